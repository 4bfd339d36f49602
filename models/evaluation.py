"""Measures a model as it would have served: replays a history, then judges alerts and risks by what became of devices.

Never one number: overall and by cause, with intervals by bootstrap over devices, beside the rules alone, the devices'
own history, random alerts on the same budget and an oracle. Late alerts are counted apart from foresight.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from forewarn.collectors.errors import InputError
from forewarn.models import goodput
from forewarn.models.backtest import Alert, backtest
from forewarn.models.checkpointing import Costs, Predictor, best_period_s
from forewarn.models.evaluation_scores import ScoreQuality, quality_of, read_scores
from forewarn.models.features import HORIZONS_S
from forewarn.models.history import History
from forewarn.models.labels import failures_of
from forewarn.models.registry import RiskModel
from forewarn.models.rules import kind_of

LEAD_S = 900.0
"""How far ahead an alert must come to count as foresight."""
DAY_S = 86_400.0
LEAST_KNOWN_S = DAY_S / 4
"""An alert with less than this left to see what becomes of its device is judged neither true nor false."""
BOOTSTRAPS = 1000
USUAL_COSTS = Costs(save_s=35.0, recovery_s=480.0)
"""Of a large training job, in seconds; the same as `forewarn simulate-goodput` takes."""
INTERVAL = (2.5, 97.5)
"""Percentiles of the confidence intervals."""


@dataclass(frozen=True)
class Failure:
    """One failure. `sign_s`: how long its precursor lasted in seconds, NaN where there was none or nobody knows."""

    time: float
    device: str
    cause: str
    sign_s: float = float("nan")


@dataclass(frozen=True)
class Tally:
    """Failures: `foreseen` at least LEAD_S ahead, `late` announced but under it, the rest missed. `long_signs`: those
    whose precursor lasted over LEAD_S. Alerts: true, false, or undecided at the end of the data."""

    failures: int
    foreseen: int
    late: int
    long_signs: int
    long_foreseen: int
    alerts: int
    true_alerts: int
    false_alarms: int
    device_days: float
    leads_s: tuple[float, ...] = ()

    @property
    def recall(self) -> float:
        return self.foreseen / self.failures if self.failures else float("nan")

    @property
    def long_recall(self) -> float:
        return self.long_foreseen / self.long_signs if self.long_signs else float("nan")

    @property
    def precision(self) -> float:
        judged = self.true_alerts + self.false_alarms
        return self.true_alerts / judged if judged else float("nan")

    @property
    def false_per_1000_days(self) -> float:
        return 1000.0 * self.false_alarms / self.device_days if self.device_days else float("nan")


@dataclass
class Verdict:
    """Alerts held against failures, item by item. `lead_s`: per failure, the lead of its earliest alert (NaN: none);
    `truth`: per alert 1 true, 0 false, -1 undecided."""

    failures: Sequence[Failure]
    alerts: Sequence[Alert]
    lead_s: NDArray[np.float64]
    truth: NDArray[np.int8]
    device_days: float

    def tally(self, cause: str | None = None) -> Tally:
        """Counts, of all failures or those of one cause (false alarms belong to no cause)."""
        mine = np.array([cause is None or f.cause == cause for f in self.failures], bool)
        lead = self.lead_s[mine]
        signs = np.array([f.sign_s for f in self.failures], float)[mine]
        long = signs > LEAD_S
        foreseen = lead >= LEAD_S
        true = int((self.truth == 1).sum()) if cause is None else 0
        return Tally(
            failures=int(mine.sum()),
            foreseen=int(foreseen.sum()),
            late=int((lead < LEAD_S).sum()),
            long_signs=int(long.sum()),
            long_foreseen=int((long & foreseen).sum()),
            alerts=len(self.alerts) if cause is None else 0,
            true_alerts=true,
            false_alarms=int((self.truth == 0).sum()) if cause is None else 0,
            device_days=self.device_days,
            leads_s=tuple(sorted(lead[~np.isnan(lead)].tolist())),
        )


@dataclass
class Evaluation:
    """What was measured. `intervals`: 95 % by name of the measure. `baselines`: the same counts for other ways of
    raising alerts. `in_sample`: the model has learned from (part of) this time, so the figures flatter it."""

    kind: str
    history: str
    simulated: bool
    in_sample: bool
    model: str
    span: tuple[float, float]
    devices: int
    verdict: Verdict
    overall: Tally
    by_cause: dict[str, Tally]
    intervals: dict[str, tuple[float, float]]
    baselines: dict[str, dict[str, float]]
    scores: list[ScoreQuality]
    saved: dict[str, float] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """For JSON: no NaN, times in seconds."""
        found = {
            "kind": self.kind,
            "history": self.history,
            "simulated": self.simulated,
            "in_sample": self.in_sample,
            "model": self.model,
            "devices": self.devices,
            "device_days": round(self.overall.device_days, 3),
            "overall": _plain(self.overall),
            "confidence_95": self.intervals,
            "by_cause": {c: _plain(t) for c, t in self.by_cause.items()},
            "baselines": self.baselines,
            "scores": [s.as_dict() for s in self.scores],
            "training_time": self.saved,
        }
        cleaned: dict[str, Any] = _without_nan(found)
        return cleaned


def evaluate(
    history: History,
    models: Mapping[str, RiskModel | None],
    kind: str,
    *,
    after: float | None = None,
    seed: int = 1,
    costs: Costs | None = None,
    watch: Callable[[str, float], None] | None = None,
) -> Evaluation:
    """Replay `history` through the model of `kind` and judge it. `after`: judge only what comes at or after this time
    (seconds since the epoch), such as the end of training. Raises InputError when there is nothing to judge."""
    first, last = history.span
    start = first if after is None else max(first, after)
    if start >= last:
        raise InputError(f"{history.path}: nothing comes after the time to judge from")
    failures = [f for f in load_failures(history, kind) if start <= f.time <= last]
    known = known_until(history, last)
    with tempfile.TemporaryDirectory(prefix="forewarn-") as folder:
        path = Path(folder) / "scores.parquet"
        with_model = backtest(history, models, scores=path, watch=_named(watch, "replaying the model"))
        scored = read_scores(path, kind_filter(history, kind), start)
    if not scored.devices:
        raise InputError(f"{history.path}: holds no readings of kind {kind}")
    bare = backtest(history, {}, watch=_named(watch, "replaying the rules alone"))
    mine = kind_filter(history, kind)
    alerts = [a for a in with_model.alerts if mine(a.device) and a.time >= start]
    ruled = [a for a in bare.alerts if mine(a.device) and a.time >= start]
    verdict = judge(alerts, failures, known, last, scored.device_days)
    overall = verdict.tally()
    causes = sorted({f.cause for f in failures})
    model = models.get(kind)
    moments = times_by_device(load_failures(history, kind))
    return Evaluation(
        kind=kind,
        history=history.path.name,
        simulated=history.simulated,
        in_sample=_in_sample(history, model, start),
        model=model.name if model else "none",
        span=(start, last),
        devices=len(scored.devices),
        verdict=verdict,
        overall=overall,
        by_cause={c: verdict.tally(c) for c in causes},
        intervals=bootstrap(verdict, len(scored.devices), seed),
        baselines=_baselines(overall, ruled, failures, history, kind, known, start, last, scored.device_days),
        scores=[quality_of(scored, h, moments, known, last, seed) for h in HORIZONS_S[kind]],
        saved=time_saved(verdict, start, last, costs or USUAL_COSTS),
    )


def load_failures(history: History, kind: str) -> list[Failure]:
    """Failures of one kind in order of time, with how long their precursors lasted where the history says so."""
    table = failures_of(history, kind)
    signs = pd.Series(np.nan, index=table.index)
    if "precursor_start" in table:
        begun = pd.to_datetime(table["precursor_start"], utc=True, errors="coerce")
        seconds = begun.astype("datetime64[us, UTC]").astype("int64") / 1e6
        signs = (table["time"] - seconds).where(begun.notna())
        if "precursor" in table:
            signs = signs.where(table["precursor"].fillna(False).astype(bool))
    columns = (table["time"].tolist(), table["device"].tolist(), table["cause"].tolist(), signs.tolist())
    return [Failure(float(t), str(d), str(c), float(s)) for t, d, c, s in zip(*columns, strict=True)]


def known_until(history: History, last: float) -> dict[str, float]:
    """When devices were removed for good; all others are known of until the end. A place with a new part goes on."""
    table = history.devices.assign(at=history.devices["installed"].fillna(-np.inf)).sort_values(
        "at", kind="stable"
    )
    newest = dict(zip(table["device"], table["removed"], strict=True))
    return {d: float(t) for d, t in newest.items() if t < last}


def kind_filter(history: History, kind: str) -> Callable[[str], bool]:
    """Whether a device is of `kind`, as the history says, else as its name says."""
    kinds = dict(zip(history.devices["device"], history.devices["kind"], strict=True))
    return lambda device: (kinds.get(device) or kind_of(device) or kind) == kind


def judge(
    alerts: Sequence[Alert],
    failures: Sequence[Failure],
    known: Mapping[str, float],
    end: float,
    device_days: float,
) -> Verdict:
    """Hold alerts against failures. An alert is true when its device fails within its horizon (at least a day), or
    when the precursor of the next failure is under way. A failure is announced by its earliest true alert."""
    by_device: dict[str, list[int]] = {}
    for number, failure in enumerate(failures):
        by_device.setdefault(failure.device, []).append(number)
    lead = np.full(len(failures), np.nan)
    truth = np.zeros(len(alerts), np.int8)
    for i, alert in enumerate(alerts):
        later = [n for n in by_device.get(alert.device, ()) if failures[n].time > alert.time]
        if later:
            n = min(later, key=lambda k: failures[k].time)
            ahead = failures[n].time - alert.time
            if ahead <= max(DAY_S, alert.horizon) or ahead <= failures[n].sign_s:
                truth[i] = 1
                lead[n] = np.nanmax([lead[n], ahead])
                continue
        if known.get(alert.device, end) - alert.time < LEAST_KNOWN_S:
            truth[i] = -1
    return Verdict(failures, alerts, lead, truth, device_days)


def bootstrap(verdict: Verdict, devices: int, seed: int) -> dict[str, tuple[float, float]]:
    """95 % intervals of the overall measures, devices drawn with replacement (Poisson weights)."""
    involved = sorted({f.device for f in verdict.failures} | {a.device for a in verdict.alerts})
    at = {d: i for i, d in enumerate(involved)}
    counts = np.zeros((len(involved), 6))
    for failure, lead in zip(verdict.failures, verdict.lead_s, strict=True):
        long = failure.sign_s > LEAD_S
        counts[at[failure.device], :4] += (1, lead >= LEAD_S, long, long and lead >= LEAD_S)
    for alert, truth in zip(verdict.alerts, verdict.truth, strict=True):
        counts[at[alert.device], 4:] += (truth == 1, truth == 0)
    dice = np.random.default_rng(seed)
    weights = dice.poisson(1.0, (BOOTSTRAPS, len(involved)))
    others = dice.poisson(max(0, devices - len(involved)), BOOTSTRAPS)
    drawn = weights @ counts
    days = verdict.device_days * (weights.sum(axis=1) + others) / max(1, devices)
    with np.errstate(divide="ignore", invalid="ignore"):
        measures = {
            "recall": drawn[:, 1] / drawn[:, 0],
            "recall_long_precursor": drawn[:, 3] / drawn[:, 2],
            "precision": drawn[:, 4] / (drawn[:, 4] + drawn[:, 5]),
            "false_alarms_per_1000_device_days": 1000.0 * drawn[:, 5] / days,
        }
    found = {}
    for name, values in measures.items():
        usable = values[np.isfinite(values)]
        if len(usable):
            low, high = np.percentile(usable, INTERVAL)
            found[name] = (float(low), float(high))
    return found


def random_alerts(
    failures: Sequence[Failure], alerts: int, device_days: float, start: float
) -> dict[str, float]:
    """What as many alerts at random devices and times would give, in expectation."""
    total = device_days * DAY_S
    if not total:
        return {}
    reach = np.array([max(0.0, min(DAY_S, f.time - start) - LEAD_S) for f in failures])
    recall = float(np.mean(1.0 - (1.0 - np.minimum(1.0, reach / total)) ** alerts)) if len(reach) else np.nan
    precision = float(min(1.0, sum(min(DAY_S, f.time - start) for f in failures) / total))
    return {
        "recall": recall,
        "precision": precision,
        "false_alarms_per_1000_device_days": 1000.0 * alerts * (1.0 - precision) / device_days,
        "alerts": float(alerts),
    }


def history_alerts(failures: Sequence[Failure], start: float, end: float, budget: int) -> list[Alert]:
    """Alerts by "has failed before" alone: each day, the devices with the most and the latest failures; `budget`
    alerts in all, spent where they look best over the whole span (more than such a rule could know)."""
    moments = np.arange(start, end, DAY_S)
    ranked: list[tuple[int, float, float, str]] = []
    for device, times in times_by_device(failures).items():
        for moment in moments.tolist():
            before = [t for t in times if t <= moment]
            if before:
                ranked.append((-len(before), moment - before[-1], moment, device))
    ranked.sort()
    return [Alert(m, d, int(DAY_S), 0.0, "has failed before") for _, _, m, d in ranked[:budget]]


def time_saved(verdict: Verdict, start: float, end: float, costs: Costs) -> dict[str, float]:
    """Share of time in which one job on all devices makes progress, by policy, replayed with the alerts as they
    came. `saved_by_protection` is what users feel."""
    tally = verdict.tally()
    if len(verdict.failures) < 2:
        return {}
    incidents = [
        goodput.Incident(None if np.isnan(lead) else max(0.0, f.time - lead - start), f.time - start)
        for f, lead in zip(verdict.failures, verdict.lead_s, strict=True)
    ]
    incidents += [
        goodput.Incident(a.time - start, None)
        for a, truth in zip(verdict.alerts, verdict.truth, strict=True)
        if truth == 0
    ]
    precision = tally.precision if tally.precision == tally.precision else 1.0
    predictor = Predictor(tally.recall, precision)
    mtbf_s = (end - start) / len(verdict.failures)
    found: dict[str, float] = {"mtbf_s": mtbf_s}
    for policy in (goodput.Policy.PERIODIC, goodput.Policy.PROTECT, goodput.Policy.DRAIN):
        young = best_period_s(mtbf_s, costs.save_s)
        runs = [
            goodput.replay(incidents, policy, costs, predictor, max(costs.save_s * 1.001, young * f))
            for f in (0.6, 0.8, 1.0, 1.25, 1.6, 2.2)
        ]
        found[policy.name.lower()] = max(r.share for r in runs)
    perfect = goodput.replay(incidents, goodput.Policy.CLAIRVOYANT, costs, predictor, np.inf)
    found["clairvoyant"] = perfect.share
    found["saved_by_protection"] = found["protect"] - found["periodic"]
    found["saved_by_draining"] = found["drain"] - found["periodic"]
    return found


def _baselines(
    overall: Tally,
    ruled: Sequence[Alert],
    failures: Sequence[Failure],
    history: History,
    kind: str,
    known: Mapping[str, float],
    start: float,
    end: float,
    device_days: float,
) -> dict[str, dict[str, float]]:
    everything = load_failures(history, kind)
    before = history_alerts(everything, start, end, overall.alerts)
    found = {
        "rules alone": _measures(judge(ruled, failures, known, end, device_days).tally()),
        "device history alone": _measures(judge(before, failures, known, end, device_days).tally()),
        "random alerts, same number": random_alerts(failures, overall.alerts, device_days, start),
    }
    if any(f.sign_s == f.sign_s for f in failures):
        seen = sum(f.sign_s > LEAD_S for f in failures)
        found["oracle: every precursor over 15 min"] = {
            "recall": seen / len(failures),
            "precision": 1.0,
            "false_alarms_per_1000_device_days": 0.0,
            "alerts": float(seen),
        }
    return found


def _measures(tally: Tally) -> dict[str, float]:
    return {
        "recall": tally.recall,
        "precision": tally.precision,
        "false_alarms_per_1000_device_days": tally.false_per_1000_days,
        "alerts": float(tally.alerts),
    }


def _plain(tally: Tally) -> dict[str, Any]:
    leads = np.array(tally.leads_s)
    found: dict[str, Any] = {
        "failures": tally.failures,
        "foreseen_15min": tally.foreseen,
        "late": tally.late,
        "missed": tally.failures - tally.foreseen - tally.late,
        "recall_15min": tally.recall,
        "precursor_over_15min": tally.long_signs,
        "recall_15min_of_those": tally.long_recall,
        "median_lead_s": float(np.median(leads)) if len(leads) else float("nan"),
    }
    if tally.alerts:
        found |= {
            "alerts": tally.alerts,
            "true_alerts": tally.true_alerts,
            "false_alarms": tally.false_alarms,
            "undecided": tally.alerts - tally.true_alerts - tally.false_alarms,
            "precision": tally.precision,
            "false_alarms_per_1000_device_days": tally.false_per_1000_days,
        }
    return found


def _in_sample(history: History, model: RiskModel | None, start: float) -> bool:
    """Whether the model says it has learned from a history of this name up to later than `start`."""
    if model is None or history.path.name not in model.manifest.data or not model.manifest.trained_to:
        return False
    return start < pd.Timestamp(model.manifest.trained_to).timestamp()


def times_by_device(failures: Sequence[Failure]) -> dict[str, list[float]]:
    """Times of the failures of each device."""
    found: dict[str, list[float]] = {}
    for failure in failures:
        found.setdefault(failure.device, []).append(failure.time)
    return found


def _without_nan(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _without_nan(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nan(v) for v in value]
    return None if isinstance(value, float) and not np.isfinite(value) else value


def _named(watch: Callable[[str, float], None] | None, text: str) -> Callable[[float], None] | None:
    return None if watch is None else lambda share: watch(text, share)
