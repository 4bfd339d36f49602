"""Training: discrete-time hazards per horizon with LightGBM, calibrated and given alert thresholds on later time.

First a model on the earlier part of each history, with a gap, so that trees, calibration and thresholds are chosen on
time it has not seen; then the same model on everything. The same data and seed give the same files.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightgbm
import numpy as np
from numpy.typing import NDArray

from forewarn.collectors.errors import InputError, StorageError
from forewarn.models import registry
from forewarn.models.calibration import fit_calibration
from forewarn.models.dataset import Dataset, collect
from forewarn.models.features import HORIZONS_S, feature_names, monotone_constraints
from forewarn.models.history import History
from forewarn.models.labels import failures_of
from forewarn.models.registry import Calibration, Manifest, ModelFile
from forewarn.models.thresholds import BUDGET_PER_1000_DEVICE_DAYS, choose_thresholds

LEAST_FAILURES = 10
"""With fewer failures nothing can be learned that would hold tomorrow."""
EARLY_SHARE = 0.68
"""Share of the failures that the first model learns from."""
MOST_TREES = 300
LEARNING_RATE = 0.05
PATIENCE = 40
"""Trees without gain on later time after which no more are grown."""


NOT_LEARNED = {"disk": ("telemetry.", "history.")}
"""Prefixes of features that tell of how a history was collected rather than of its devices. The drive statistics that
disk models learn from are daily or weekly, an agent reads every few minutes; and they know no repairs."""


FIXED_OFFSETS = (
    ".node_ratio",
    ".node_excess_1h",
    ".node_excess_6h",
    ".node_excess_24h",
    ".node_excess_ratio",
)
"""Parts of names of features in which a device stands off its neighbours for good. With a few dozen failures they
single out those very devices; the drift of the same offset (`excess_drift`, `own_excess`) is what warns."""


def tells_devices_apart(name: str, direction: int) -> bool:
    """Whether a feature of GPUs or nodes is more apt to name the devices that failed than to foresee the next: it has
    no direction of trouble, or is an offset that stays."""
    if name.startswith("telemetry."):
        return False
    return direction == 0 or name.startswith("history.") or any(part in name for part in FIXED_OFFSETS)


@dataclass(frozen=True)
class Options:
    """How to train. `rows`: rows to learn from per history; `budget`: false alarms allowed per 1,000 device-days (None:
    what the kind is usually allowed)."""

    seed: int = 1
    rows: int = 150_000
    budget: float | None = None
    credits: Sequence[str] = ()
    """Where the data come from and whom to thank; kept in the manifest."""
    leave_out: Sequence[str] = ()
    """Prefixes of features not to learn from, besides those of NOT_LEARNED."""


@dataclass(frozen=True)
class Fit:
    """What training gave for one horizon."""

    horizon_s: int
    text: str
    trees: int
    calibration: Calibration


Watch = Callable[[str, float], None]


def targets(
    data: Dataset, horizon_s: int, known_until: NDArray[np.float64] | None = None
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Labels and weights of rows for a horizon, right-censored: a device known of for only a part of the horizon and
    healthy so far counts for that part. `known_until` cuts knowledge earlier (seconds from each row)."""
    known = data.to_censor if known_until is None else np.minimum(data.to_censor, known_until)
    seen = np.minimum(known, horizon_s)
    failed = data.to_failure <= seen
    weight = data.weight * np.where(failed, 1.0, np.clip(seen / horizon_s, 0.0, 1.0))
    return failed.astype(np.float64), weight.astype(np.float64)


def train(
    histories: Sequence[History], kind: str, options: Options = Options(), watch: Watch | None = None
) -> tuple[Manifest, dict[int, str]]:
    """Train on histories of one kind of device. Returns the manifest and the LightGBM text of each horizon.

    Raises InputError when there are too few failures or no telemetry.
    """
    early, late = _gather(histories, kind, options, watch)
    names = feature_names(kind)
    fits, raws = [], {}
    for number, horizon_s in enumerate(HORIZONS_S[kind]):
        if watch is not None:
            watch(f"learning horizon {horizon_s} s", number / len(HORIZONS_S[kind]))
        fit, raws[horizon_s] = _fit(early, late, horizon_s, kind, options)
        fits.append(fit)
    risks = np.column_stack([np.interp(raws[f.horizon_s], f.calibration.x, f.calibration.y) for f in fits])
    held = _joined(late)
    budget = BUDGET_PER_1000_DEVICE_DAYS[kind] if options.budget is None else options.budget
    chosen, measured = choose_thresholds(held, np.maximum.accumulate(risks, axis=1), budget)
    start = min(h.span[0] for h in histories)
    end = max(h.span[1] for h in histories)
    parameters: dict[str, str | float | int | bool] = {
        "seed": options.seed,
        "rows": int(sum(len(d) for d in early)),
        "false_alarm_budget_per_1000_device_days": budget,
        "step_s": early[0].step_s,
        **{f"trees_{f.horizon_s}": f.trees for f in fits},
        **{f"alert_threshold_{h}": float(t) for h, t in chosen.items()},
    }
    manifest = Manifest(
        kind=kind,
        features=list(names),
        models=[ModelFile(f.horizon_s, "", "", f.calibration) for f in fits],
        simulated=any(h.simulated for h in histories),
        trained_from=_iso(start),
        trained_to=_iso(end),
        data=[*sorted({h.path.name for h in histories}), *options.credits],
        metrics=measured,
        parameters=parameters,
    )
    return manifest, {f.horizon_s: f.text for f in fits}


def train_to(
    path: Path,
    histories: Sequence[History],
    kind: str,
    options: Options = Options(),
    watch: Watch | None = None,
    extra: Mapping[str, bytes] | None = None,
) -> Manifest:
    """Train and write a model folder; `extra` files, such as `card.md`, go beside the model. Raises InputError and
    StorageError."""
    if path.exists() and not (path / registry.MANIFEST_NAME).is_file() and any(path.iterdir()):
        # As saving would, but before the time is spent.
        raise StorageError(f"{path}: exists and is not a model folder: choose another place")
    manifest, texts = train(histories, kind, options, watch)
    return registry.save(path, manifest, texts, extra)


def _gather(
    histories: Sequence[History], kind: str, options: Options, watch: Watch | None
) -> tuple[list[Dataset], list[Dataset]]:
    total = sum(len(failures_of(h, kind)) for h in histories)
    if total < LEAST_FAILURES:
        where = ", ".join(str(h.path) for h in histories)
        raise InputError(
            f"{where}: {total} failures of kind {kind}; at least {LEAST_FAILURES} are needed to learn from. "
            "Give more history (--history may be repeated), or use the shipped model"
        )
    early, late = [], []
    for history in histories:
        split = _split(history, kind)
        data = collect(
            history,
            kind,
            rows=options.rows,
            keep_all_from=split,
            keep_all_rows=options.rows,
            seed=options.seed,
            watch=None if watch is None else _named(watch, f"reading {history.path.name}"),
        )
        if not len(data):
            raise InputError(f"{history.path}: the telemetry holds no readings of kind {kind}")
        gap = _gap(history, kind)
        before = data.time < split - gap
        first = data.select(before)
        # What happened after the split is not known to the first model.
        first.to_censor = np.minimum(first.to_censor, split - first.time)
        early.append(first)
        late.append(data.select(data.time >= split))
    return early, late


def _split(history: History, kind: str) -> float:
    """The moment that divides learning from judging: by share of failures, within the middle half of the span."""
    first, last = history.span
    times = failures_of(history, kind)["time"].to_numpy(float)
    wanted = float(np.quantile(times, EARLY_SHARE)) if len(times) else first + EARLY_SHARE * (last - first)
    return float(np.clip(wanted, first + 0.4 * (last - first), first + 0.8 * (last - first)))


def _gap(history: History, kind: str) -> float:
    """Time left out between learning and judging: the longest horizon, as far as the history is long enough."""
    first, last = history.span
    return float(min(HORIZONS_S[kind][-1], 0.08 * (last - first)))


def _fit(
    early: Sequence[Dataset], late: Sequence[Dataset], horizon_s: int, kind: str, options: Options
) -> tuple[Fit, NDArray[np.float64]]:
    """One horizon: the first model, its calibration on later time, and the final model. Also returns the raw risks of
    the later rows by the first model."""
    first, held = _joined(early), _joined(late)
    label, weight = targets(first, horizon_s)
    later_label, later_weight = targets(held, horizon_s)
    parameters = _parameters(kind, float(label.sum()), _failed(first, label), len(first), options)
    usable = later_weight > 0
    measured = bool(later_label[usable].sum() >= 5)
    book = lightgbm.Dataset(
        first.values, label, weight=weight, feature_name=_safe(first.names), params=parameters
    )
    kept = (
        [
            lightgbm.Dataset(
                held.values[usable], later_label[usable], weight=later_weight[usable], reference=book
            )
        ]
        if measured
        else []
    )
    stop: list[Callable[..., Any]] = [lightgbm.early_stopping(PATIENCE, verbose=False)] if measured else []
    trial = lightgbm.train(parameters, book, MOST_TREES if measured else 120, valid_sets=kept, callbacks=stop)
    trees = max(10, trial.best_iteration or trial.current_iteration())
    raw = np.asarray(trial.predict(held.values, num_iteration=trees), float) if len(held) else np.empty(0)
    calibration = fit_calibration(raw[usable], later_label[usable], later_weight[usable])
    everything = _joined([*early_full(early, late)])
    label, weight = targets(everything, horizon_s)
    parameters = _parameters(kind, float(label.sum()), _failed(everything, label), len(everything), options)
    book = lightgbm.Dataset(
        everything.values, label, weight=weight, feature_name=_safe(everything.names), params=parameters
    )
    final = lightgbm.train(parameters, book, trees)
    return Fit(horizon_s, final.model_to_string(), trees, calibration), raw


def early_full(early: Sequence[Dataset], late: Sequence[Dataset]) -> list[Dataset]:
    """All rows of both parts, thinned where the later part was kept whole, for the final model."""
    out = list(early)
    for part in late:
        near = part.to_failure <= HORIZONS_S[part.kind][-1]
        share = 0.25
        dice = np.random.default_rng(7).random(len(part))
        keep = near | (dice < share)
        thin = part.select(keep)
        thin.weight = np.where(
            thin.to_failure <= HORIZONS_S[part.kind][-1], thin.weight, thin.weight / share
        ).astype(np.float32)
        out.append(thin)
    return out


def _parameters(kind: str, positives: float, failing: int, rows: int, options: Options) -> dict[str, Any]:
    """Small trees, smaller still where few devices failed; nothing random that the seed does not decide."""
    few = failing < 150
    prefixes = (*options.leave_out, *NOT_LEARNED.get(kind, ()))
    constraints = monotone_constraints(kind)
    left_out = [
        i
        for i, (n, direction) in enumerate(zip(feature_names(kind), constraints, strict=True))
        if n.startswith(prefixes) or (kind != "disk" and tells_devices_apart(n, direction))
    ]
    return {
        "objective": "binary",
        "num_leaves": 8 if few else 31,
        "min_data_in_leaf": int(np.clip(rows / 1000, 50, 500))
        if not few
        else int(np.clip(rows / 2000, 30, 200)),
        "min_sum_hessian_in_leaf": 1e-3,
        "lambda_l2": 10.0,
        "learning_rate": LEARNING_RATE,
        "feature_fraction": 0.4,
        "max_bin": 63,
        "monotone_constraints": [0 if i in set(left_out) else c for i, c in enumerate(constraints)],
        "feature_contri": [0.0 if i in set(left_out) else 1.0 for i in range(len(constraints))],
        "deterministic": True,
        "force_row_wise": True,
        "num_threads": 2,
        "seed": options.seed,
        "verbose": -1,
    }


def _failed(data: Dataset, label: NDArray[np.float64]) -> int:
    """Devices with a positive row."""
    return len(np.unique(data.device[label > 0]))


def _joined(parts: Sequence[Dataset]) -> Dataset:
    """Rows of several histories as one; devices of different histories are different devices."""
    if len(parts) == 1:
        return parts[0]
    devices: list[str] = []
    codes = []
    for number, part in enumerate(parts):
        codes.append(part.device + len(devices))
        devices += [f"{number}:{d}" for d in part.devices]
    return Dataset(
        parts[0].kind,
        parts[0].names,
        devices,
        np.concatenate([p.values for p in parts]),
        np.concatenate([p.time for p in parts]),
        np.concatenate(codes).astype(np.int32),
        np.concatenate([p.to_failure for p in parts]),
        np.concatenate([p.to_censor for p in parts]),
        np.concatenate([p.weight for p in parts]),
        # Histories read at different pace: such that weights and step give the time of all devices together.
        sum(float(p.weight.sum()) * p.step_s for p in parts)
        / max(1e-9, sum(float(p.weight.sum()) for p in parts)),
        sum(p.failures for p in parts),
    )


def _safe(names: Sequence[str]) -> list[str]:
    """Names as LightGBM takes them."""
    return [n.replace(" ", "_") for n in names]


def _named(watch: Watch, text: str) -> Callable[[float], None]:
    return lambda share: watch(text, share)


def _iso(seconds: float) -> str:
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC).isoformat(timespec="seconds")
