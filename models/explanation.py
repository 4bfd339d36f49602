"""Why a risk is what it is, in words: LightGBM's own contributions joined to the readings behind them, the rules in
force with the facts of their XIDs, and what to do next.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from forewarn.models.features import FeatureEngine, FeatureTable
from forewarn.models.registry import RiskModel
from forewarn.models.rules import RuleHit
from forewarn.models.signals import COUNTER, HOUR_S

LEAST_CONTRIBUTION = 0.05
"""Log odds under which a contribution is not worth a word."""
MOST_NEIGHBOURS = 64
"""Beyond this many devices a node is no set of peers (all disks of a storage site under one name)."""
WORTH_A_RATIO = 2.0
"""A value is set against its node's median from this many times it on."""

ACTIONS = {
    "RESET_GPU": "drain the node and reset the GPU",
    "RESTART_BM": "drain the node and power-cycle it",
    "RESTART_VM": "restart the virtual machine",
    "RESTART_APP": "restart the application",
    "REPLACE_GPU": "drain the node and have the GPU replaced",
    "REPLACE_DISK": "copy the data off and replace the disk",
    "CHECK_DISK": "run a long self-test of the disk and watch it",
    "CHECK_MECHANICALS": "reseat the card, its cables and its power",
    "CHECK_THERMALS": "check fans, air flow and the heat sink",
    "CHECK_GPU": "compare the GPU's clocks, heat and power with its neighbours', and test it after the job",
    "CHECK_HOST": "drain the node and look at the host's own log",
    "CHECK_NIC": "reset the network adapter, then its cable",
    "REPLACE_DIMM": "drain the node and replace the DIMM",
    "CONTACT_SUPPORT": "collect nvidia-bug-report and ask the vendor",
    "DRAIN_P2P": "stop jobs that use peer-to-peer on this GPU",
    "DRAIN_AND_RESET": "drain the node and reset the GPU",
    "WORKFLOW_XID_48": "drain the node and reset the GPU; replace it when rows can no longer be remapped",
    "WORKFLOW_NVLINK_ERR": "drain the node, reset its GPUs, then run field diagnostics on the link",
    "WORKFLOW_NVLINK5_ERR": "drain the node, reset its GPUs, then run field diagnostics on the link",
}
"""What to do next, by action."""


@dataclass(frozen=True)
class Reason:
    """One reason for a risk. `contribution` is in log odds; rules have theirs as infinity. `since`: since when."""

    text: str
    feature: str
    value: float | None
    since: float | None
    contribution: float
    evidence: dict[str, object] = field(default_factory=dict)


def next_step(action: str) -> str:
    """An action in words; an unknown one as it stands."""
    return ACTIONS.get(action, action.replace("_", " ").lower())


NOTHING_TO_DO = ("", "IGNORE", "NONE")
"""Actions that ask nothing of anybody."""


def of_rule(hit: RuleHit) -> Reason:
    """A rule in force as a reason."""
    text = hit.text + (f"; next: {next_step(hit.action)}" if hit.action not in NOTHING_TO_DO else "")
    evidence = {**hit.evidence, "part": hit.hardware, "action": hit.action}
    return Reason(text, f"rule.{hit.rule}", None, hit.time, math.inf, evidence)


def of_model(
    engine: FeatureEngine,
    model: RiskModel,
    table: FeatureTable,
    row: int,
    horizon_s: int,
    top: int,
) -> list[Reason]:
    """The features that raise a device's risk most, one for each signal, strongest first."""
    one = table.rows([row])
    weights = model.contributions(model.select(one), horizon_s)[0][:-1]
    by_subject: dict[str, list[tuple[float, str]]] = {}
    for name, weight in zip(model.manifest.features, weights.tolist(), strict=True):
        by_subject.setdefault(name.split(".", 1)[0], []).append((weight, name))
    ranked = sorted(
        ((sum(w for w, _ in found), max(found)[1], subject) for subject, found in by_subject.items()),
        key=lambda r: -r[0],
    )
    reasons = []
    for weight, name, subject in ranked[:top]:
        if weight < LEAST_CONTRIBUTION:
            break
        value = float(table.values[row, table.column_of[name]])
        words = Words(engine, table, row)
        text, since, evidence = words.of(subject, name)
        evidence["share"] = round(weight / max(float(np.maximum(weights, 0).sum()), 1e-9), 3)
        shown = None if math.isnan(value) else value
        reasons.append(Reason(text, name, shown, since, weight, evidence))
    return reasons


class Words:
    """Turns the features of one device into words."""

    def __init__(self, engine: FeatureEngine, table: FeatureTable, row: int) -> None:
        self.engine, self.table, self.row, self.at = engine, table, row, table.column_of
        self.device = table.devices[row]

    def of(self, subject: str, name: str) -> tuple[str, float | None, dict[str, object]]:
        """Text, since when, evidence."""
        signals = {s.name: s for s in self.engine.scheme.signals}
        if subject in _TOGETHER:
            text, parts = _TOGETHER[subject]
            busiest = max(parts, key=lambda s: self.engine.signal_history(self.device, s)[0])
            return self._counter(subject, text, busiest)
        if subject in signals and signals[subject].type == COUNTER:
            return self._counter(subject, signals[subject].text, subject)
        if math.isnan(self._value(name)):
            return f"{name.replace('_', ' ').replace('.', ': ')} is not reported", None, {}
        for known, say in _SUBJECTS.items():
            if subject == known or name.startswith(known):
                text, since = say(self, name), None
                if subject in signals:
                    since = self._since(subject)
                return text, since, {name: self._value(name)}
        return (
            f"{name.replace('_', ' ').replace('.', ': ')} is {self._value(name):.3g}",
            None,
            {name: self._value(name)},
        )

    def _value(self, name: str) -> float:
        return float(self.table.values[self.row, self.at[name]]) if name in self.at else math.nan

    def _since(self, signal: str) -> float | None:
        first = self.engine.signal_history(self.device, signal)[1]
        return None if math.isnan(first) else first

    def _counter(self, subject: str, text: str, signal: str) -> tuple[str, float | None, dict[str, object]]:
        """The shortest window that holds a good part of what the longest does, and the node's median."""
        windows = self.engine.scheme.windows
        word = "increase" if f"{subject}.increase_{windows[-1].name}" in self.at else "count"
        counted = {
            w.name: math.expm1(self._value(f"{subject}.{word}_{w.name}"))
            for w in windows
            if f"{subject}.{word}_{w.name}" in self.at
        }
        known = {w: c for w, c in counted.items() if not math.isnan(c) and c > 0}
        total, first, recent = self.engine.signal_history(self.device, signal)
        level = self._value(f"{subject}.level")
        evidence: dict[str, object] = {
            f"increase_{w}": round(c, 3) for w, c in counted.items() if not math.isnan(c)
        }
        if not known:
            if not math.isnan(level) and level > 0:
                return (
                    f"{_number(math.expm1(level))} {text} over its life",
                    None,
                    {"level": math.expm1(level)},
                )
            return f"no {text} lately", None, evidence
        most = max(known.values())
        chosen = next(w for w, c in known.items() if c >= 0.5 * most)
        said = f"{_number(known[chosen])} {text} in {_window(chosen)}"
        median = self._node_median(f"{subject}.{word}_{chosen}")
        if median is not None:
            evidence["node_median"] = round(median, 3)
            if median > 0 and known[chosen] / median >= WORTH_A_RATIO:
                said += f", {known[chosen] / median:.0f} x its node's median"
            elif median <= 0:
                said += ", none on its neighbours"
        since = None if math.isnan(first) else first
        if since is not None and recent >= self.table.time - 2 * HOUR_S:
            # Up to two deviations above its own past is the play of chance.
            names = (f"{subject}.surprise_{w.name}" for w in windows)
            rising = max((s for s in map(self._value, names) if not math.isnan(s)), default=0.0) > 2
            lasts = _duration(self.table.time - self._rising_since(signal, since))
            said += f", rising for {lasts}" if rising else f", for {lasts} now"
        evidence |= {"total": total, "last": None if math.isnan(recent) else recent}
        return said, since, evidence

    def _rising_since(self, signal: str, first: float) -> float:
        """Start of the run of active half hours (or days) that lasts until now; at most one empty one in between."""
        level = min(2, len(self.engine.scheme.levels) - 1)
        width = self.engine.scheme.levels[level].width_s
        ends, values = self.engine.series(self.device, signal, level)
        active = ends[values > 0]
        if not len(active):
            return first
        breaks = np.flatnonzero(np.diff(active) > 2 * width)
        start = active[breaks[-1] + 1] if len(breaks) else active[0]
        return max(float(start) - width, first)

    def _node_median(self, name: str) -> float | None:
        column: NDArray[np.float32] = self.table.values[:, self.at[name]]
        rows = self.table.rows_of_node[self.device.partition("/")[0]]
        if len(rows) > MOST_NEIGHBOURS:
            return None
        others = [float(column[i]) for i in rows if i != self.row and not math.isnan(float(column[i]))]
        if len(others) < 2:
            return None
        return math.expm1(float(np.median(others)))


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 or value == round(value) else f"{value:.2g}"


def _window(name: str) -> str:
    return {"15m": "15 min", "1h": "1 h", "6h": "6 h", "24h": "24 h", "7d": "7 days", "1d": "1 day"}.get(
        name, name.replace("d", " days")
    )


def _duration(seconds: float) -> str:
    for size, unit in ((86_400.0, "days"), (3600.0, "h"), (60.0, "min")):
        if seconds >= 1.5 * size:
            return f"{seconds / size:.0f} {unit}"
    return "a minute"


def _thermal(words: Words, name: str) -> str:
    what = "memory temperature" if name.startswith("memory") else "temperature"
    value = words._value(name)
    if "margin" in name:
        return f"{value:.0f} C left to the slowdown limit"
    if "excess_drift" in name or "own_excess" in name:
        return f"{what} {value:+.1f} C against peers at equal power, compared with its own past"
    if "node_excess" in name or "model_excess" in name:
        return f"{what} {value:+.1f} C against its peers at equal power"
    if "slope" in name:
        return f"{what} rising {value:.1f} C an hour"
    if "change" in name:
        return f"{what} {value:+.1f} C against its own past"
    return f"{what}: {name.split('.', 1)[1].replace('_', ' ')} {value:.2g}"


def _share(words: Words, name: str) -> str:
    what = "hardware slowdown" if name.startswith("hw") else "software thermal slowdown"
    return f"in {what} {100 * words._value(name):.0f} % of {_window(name.rsplit('_', 1)[1])}"


def _clock(words: Words, name: str) -> str:
    return f"SM clock {100 * math.expm1(words._value(name)):+.0f} % against " + (
        "busy peers" if "node" in name else "its own past day"
    )


def _telemetry(words: Words, name: str) -> str:
    value = words._value(name)
    if "silence" in name:
        return f"silent for {math.expm1(value):.0f} times its usual interval"
    if name.endswith("poll_gap_ratio"):
        return f"its polls lie {math.exp(value):.1f} x as far apart as its neighbours'"
    if name.endswith("metrics_missing"):
        return f"{math.expm1(value):.0f} metrics that it gave before are missing"
    if "stale" in name:
        return f"{100 * value:.0f} % of its metrics no longer come"
    return f"{math.expm1(value):.0f} polls missed in {_window(name.rsplit('_', 1)[1])}"


def _call(words: Words, name: str) -> str:
    return f"driver calls take {math.exp(words._value(name)):.1f} x as long as " + (
        "on its neighbours" if "node" in name else "a day ago"
    )


def _lost(words: Words, name: str) -> str:
    if name.startswith("pcie"):
        return f"PCIe link lost {100 * words._value(name):.0f} % of its lanes"
    return f"{words._value(name):.0f} NVLinks no longer active"


def _gauge_level(words: Words, name: str) -> str:
    what = {"pending": "sectors wait to be remapped", "offline_uncorrectable": "sectors cannot be read"}
    subject = name.split(".", 1)[0]
    return f"{_number(math.expm1(words._value(f'{subject}.level')))} {what[subject]}"


def _history(words: Words, name: str) -> str:
    value = words._value(name)
    if name.endswith("age_days"):
        return f"{math.expm1(value):.0f} days old"
    return f"{name.split('.', 1)[1].replace('_', ' ')}: {math.expm1(value):.0f}"


def _hours(words: Words, name: str) -> str:
    return f"{math.expm1(words._value('power_on_hours.level')):,.0f} hours of use"


_TOGETHER = {
    "ecc_corrected": (
        "corrected memory errors",
        ("ecc_dram_corrected", "ecc_sram_corrected", "ecc_volatile_corrected"),
    ),
    "pcie": ("PCIe errors and replays", ("pcie_replays", "pcie_errors", "aer")),
    "nvlink": ("NVLink errors and replays", ("nvlink_crc_errors", "nvlink_replays", "nvlink_recoveries")),
}
"""Subjects that take several signals together."""

_SUBJECTS: dict[str, Callable[[Words, str], str]] = {
    "temperature": _thermal,
    "memory_temperature": _thermal,
    "hw_slowdown": _share,
    "sw_thermal": _share,
    "sm_clock": _clock,
    "telemetry": _telemetry,
    "nvml_call": _call,
    "pcie_width": _lost,
    "nvlink_active": _lost,
    "pending": _gauge_level,
    "offline_uncorrectable": _gauge_level,
    "history": _history,
    "power_on_hours": _hours,
}


def strongest(reasons: Sequence[Reason], top: int) -> list[Reason]:
    """The first `top`, rules before the model, then by contribution."""
    return sorted(reasons, key=lambda r: -r.contribution)[:top]
