"""The fleet: state of all devices, their risk and the reasons for it. The one facade that the service and the
back-test drive; it puts engines, models and rules together. No I/O but `save` and `load`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from forewarn.collectors.base import Device, Event
from forewarn.collectors.catalog import METRICS
from forewarn.collectors.errors import InputError, StorageError
from forewarn.models import explanation, rules, snapshot
from forewarn.models.explanation import Reason
from forewarn.models.features import HORIZONS_S, LATEST_S, FeatureEngine, FeatureTable
from forewarn.models.registry import RiskModel
from forewarn.models.rules import RuleHit
from forewarn.models.signals import COUNTER

KINDS = tuple(HORIZONS_S)
BASE_RISK_PER_YEAR = {"gpu": 0.09, "disk": 0.014, "node": 0.5}
"""Failures a year that stand in where no model is loaded. Sources: GPU classes of the Llama 3 paper (268 of 419
interruptions, 16,384 GPUs, 54 days: 0.11 a GPU-year less software), Backblaze's yearly figure for disks; for nodes an
assumption."""
STATE_VERSION = 1


@dataclass(frozen=True)
class Reading:
    """One sweep: `values` (devices x metrics) float64, NaN where not reported; `time` seconds since the epoch."""

    time: float
    devices: Sequence[str]
    metrics: Sequence[str]
    values: NDArray[np.float64]


@dataclass(frozen=True)
class RiskTable:
    """`risk` (devices x horizons) float32: the higher of model and rules; `rule_risk` the rules' part alone."""

    time: float
    kind: str
    devices: list[str]
    horizons_s: tuple[int, ...]
    risk: NDArray[np.float32]
    model_risk: NDArray[np.float32]
    rule_risk: NDArray[np.float32]


class Fleet:
    """State of all devices. One thread owns it: calls must not overlap (the service has one scoring thread)."""

    def __init__(self, models: Mapping[str, RiskModel | None]) -> None:
        self.models: dict[str, RiskModel | None] = dict.fromkeys(KINDS)
        for kind, model in models.items():
            self.set_model(kind, model)
        self.engines = {kind: FeatureEngine(kind) for kind in KINDS}
        self._devices: dict[str, Device] = {}
        self._kinds: dict[str, str] = {}
        self._event_hits: dict[str, dict[str, RuleHit]] = {}
        self._reading_hits: dict[str, dict[str, RuleHit]] = {}
        self._tables: dict[str, FeatureTable] = {}
        self._splits: dict[tuple[str, ...], dict[str, NDArray[np.int64]]] = {}

    def set_model(self, kind: str, model: RiskModel | None) -> None:
        """Swap the model of a kind (after a promotion). Raises InputError when it is for another kind."""
        if kind not in HORIZONS_S:
            raise InputError(f"models: kind {kind!r} is none of {', '.join(HORIZONS_S)}")
        if model is not None and model.kind != kind:
            raise InputError(f"models: a model of kind {model.kind!r} was given for {kind!r}")
        if model is not None and model.horizons_s != HORIZONS_S[kind]:
            raise InputError(f"models: horizons {model.horizons_s}, but {kind} has {HORIZONS_S[kind]}")
        self.models[kind] = model

    # Taking in -------------------------------------------------------------------------------------------------

    def apply_batch(
        self,
        node: str,
        readings: Iterable[Reading],
        events: Iterable[Event] = (),
        devices: Iterable[Device] = (),
        shift_s: float = 0.0,
    ) -> list[RuleHit]:
        """Take in what a node sent; returns the rules that newly hold because of an event.

        `shift_s` is added to every stamp: the caller's correction of a node's wrong clock, from when the batch
        was sent and when it came (keep it with the batch, so that a replay does the same).
        """
        # A stamp that is no time (a clock that was never set) is left out: it must not cost the rest of the batch.
        readings = [r for r in readings if 0 <= r.time + shift_s <= LATEST_S]
        events = [e for e in events if e.time is None or 0 <= e.time + shift_s <= LATEST_S]
        stamps = [r.time for r in readings] + [e.time for e in events if e.time is not None]
        first = min(stamps) + shift_s if stamps else None
        for device in devices:
            self.describe(device, first)
        for reading in readings:
            self._apply_reading(reading, shift_s)
        hits = []
        for event in events:
            hit = self.apply_event(node, _shifted(event, shift_s))
            if hit is not None:
                hits.append(hit)
        return hits

    def describe(self, device: Device, time: float | None = None, installed: float | None = None) -> None:
        """Take in a description. Another serial in the same place ends its rules and starts its history anew.

        `installed` (seconds since the epoch) may also stand in the device's labels, under that name.
        """
        before = self._devices.get(device.device)
        if before is not None and before.serial and device.serial and before.serial != device.serial:
            self.clear(device.device)
        self._devices[device.device] = device
        if device.kind in HORIZONS_S:
            self._kinds[device.device] = device.kind
            if installed is None:
                installed = _number(device.labels.get("installed", ""))
            self.engines[device.kind].describe(device, time, installed)

    def _apply_reading(self, reading: Reading, shift_s: float) -> None:
        split = self._split(reading.metrics)
        for kind, columns in split.items():
            self.engines[kind].apply(
                reading.time + shift_s,
                reading.devices,
                [reading.metrics[c] for c in columns],
                reading.values[:, columns],
            )
        for device in reading.devices:
            if device not in self._kinds:
                self._note(device, rules.kind_of(device) or next(iter(split), ""))

    def _split(self, metrics: Sequence[str]) -> dict[str, NDArray[np.int64]]:
        """Columns of a list of metrics by the kind of engine they go to."""
        key = tuple(metrics)
        found = self._splits.get(key)
        if found is None:
            by_kind: dict[str, list[int]] = {}
            for i, name in enumerate(key):
                metric = METRICS.get(name)
                if metric is not None and metric.kind in self.engines:
                    by_kind.setdefault(metric.kind, []).append(i)
            found = {kind: np.array(columns, np.int64) for kind, columns in by_kind.items()}
            if len(self._splits) > 4096:
                self._splits.clear()
            self._splits[key] = found
        return found

    def _note(self, device: str, kind: str) -> None:
        self._kinds[device] = kind
        self._devices.setdefault(device, Device(device=device, kind=kind))

    def apply_bulk(
        self,
        times: NDArray[np.float64],
        devices: Sequence[str],
        metrics: Sequence[str],
        values: NDArray[np.floating],
        codes: NDArray[np.integer] | None = None,
    ) -> None:
        """History rows of any kind and mix of devices: `values` (rows x metrics). For replay and training.

        `devices` holds one id for each row or, with `codes`, the distinct ids that `codes` (one for each row) index.
        """
        if codes is None:
            unique_of: dict[str, int] = {}
            inverse = np.array([unique_of.setdefault(d, len(unique_of)) for d in devices], np.int64)
            unique: Sequence[str] = list(unique_of)
        else:
            unique, inverse = devices, np.asarray(codes, np.int64)
        for kind, columns in self._split(metrics).items():
            cells = np.asarray(values[:, columns], np.float64)
            some = np.isfinite(cells).any(axis=1)
            if not some.any():
                continue
            used, positions = np.unique(inverse[some], return_inverse=True)
            found = [unique[int(u)] for u in used]
            for device in found:
                if device not in self._kinds:
                    self._note(device, kind)
            rows = self.engines[kind].rows(found)[positions]
            self.engines[kind].apply_bulk(times[some], rows, [metrics[c] for c in columns], cells[some])

    def apply_event(self, node: str, event: Event) -> RuleHit | None:
        """Take in one event; the rule that newly holds because of it, if any. An event needs a time (InputError)."""
        if event.time is None:
            raise InputError("events.time: an event must have a time before it can be applied")
        kind = self.kind_of(event.device)
        if kind in self.engines:
            self.engines[kind].apply_event(
                event.time, event.device, event.kind, event.code, event.severity, event.count
            )
            if event.device not in self._devices:
                self._note(event.device, kind)
        if kind != "node":
            # What happens to a part also happens to its node.
            self.engines["node"].apply_event(
                event.time, node, event.kind, event.code, event.severity, event.count
            )
        self._clear_by(event)
        hit = rules.on_event(event)
        if hit is None:
            return None
        if kind not in self.engines:
            # Parts without a risk of their own (network ports): the node bears it.
            hit = replace(hit, device=node, evidence={**hit.evidence, "device": event.device})
        known = self._event_hits.setdefault(hit.device, {})
        before = known.get(hit.rule)
        if before is not None and before.time >= hit.time:
            return None
        known[hit.rule] = hit
        if before is not None and before.expires is not None and before.expires > hit.time:
            # It held already: it only lasts longer now, and keeps its beginning.
            count = before.evidence.get("times", 1)
            times = (count if isinstance(count, int) else 1) + 1
            known[hit.rule] = rules.repeated(replace(hit, time=before.time), times)
            return None
        return hit

    def _clear_by(self, event: Event) -> None:
        ends = rules.clears(event)
        if ends is None:
            return
        node = event.device.partition("/")[0]
        for device in [d for d in self._event_hits if d == node or d.startswith(f"{node}/")]:
            kept = {
                k: h
                for k, h in self._event_hits[device].items()
                if not (ends(h) and h.time <= (event.time or h.time))
            }
            self._event_hits[device] = kept

    def apply_failure(self, time: float, device: str) -> None:
        """An operator or a label says that the device failed at `time`."""
        kind = self.kind_of(device)
        if kind in self.engines:
            self.engines[kind].apply_failure(time, device)

    def kind_of(self, device: str) -> str:
        """The kind of a device: as described, else as its metrics or its id tell."""
        return self._kinds.get(device) or rules.kind_of(device)

    def clear(self, device: str) -> None:
        """The device was reset, repaired or replaced: rules in force for it end."""
        self._event_hits.pop(device, None)
        self._reading_hits.pop(device, None)

    def remove(self, device: str) -> None:
        """Forget a device that was taken away."""
        self.clear(device)
        self._devices.pop(device, None)
        kind = self._kinds.pop(device, "")
        if kind in self.engines:
            self.engines[kind].remove(device)

    # Risk ------------------------------------------------------------------------------------------------------

    def score(self, now: float) -> dict[str, RiskTable]:
        """Risk of every device at `now`, by kind."""
        out = {}
        for kind, engine in self.engines.items():
            table = engine.features(now)
            self._tables[kind] = table
            out[kind] = self._risk(kind, table)
        return out

    def _risk(self, kind: str, table: FeatureTable) -> RiskTable:
        model = self.models[kind]
        horizons = HORIZONS_S[kind]
        if model is None:
            base = np.array(rules.yearly(BASE_RISK_PER_YEAR[kind], kind), np.float32)
            model_risk = np.tile(base, (len(table.devices), 1))
        else:
            model_risk = model.predict(table)
        rule_risk = np.zeros_like(model_risk)
        self._find_reading_hits(kind, table.time)
        row_of = table.row_of
        for device in {*self._event_hits, *self._reading_hits}:
            row = row_of.get(device)
            if row is None:
                continue
            for hit in self.active_hits(device, table.time):
                if not hit.fallback or model is None:
                    rule_risk[row] = np.maximum(rule_risk[row], hit.floors)
        return RiskTable(
            table.time,
            kind,
            table.devices,
            horizons,
            np.maximum(model_risk, rule_risk),
            model_risk,
            rule_risk,
        )

    def _find_reading_hits(self, kind: str, now: float) -> None:
        metrics = rules.reading_metrics(kind)
        if not metrics:
            return
        devices, values = self.engines[kind].levels(metrics)
        found = {}
        for i in np.flatnonzero(rules.candidates(kind, metrics, values)):
            device = devices[int(i)]
            latest = dict(zip(metrics, values[int(i)].tolist(), strict=True))
            before = self._reading_hits.get(device, {})
            found[device] = {
                hit.rule: replace(hit, time=before[hit.rule].time) if hit.rule in before else hit
                for hit in rules.on_readings(device, kind, now, latest)
            }
        for device in [d for d in self._reading_hits if self.kind_of(d) == kind]:
            del self._reading_hits[device]
        self._reading_hits.update(found)

    def active_hits(self, device: str, now: float) -> list[RuleHit]:
        """Rules in force for a device. Those that have run out are forgotten."""
        held = self._event_hits.get(device, {})
        for rule in [k for k, h in held.items() if h.expires is not None and h.expires <= now]:
            if not self._silent_since(device, held[rule].time):
                del held[rule]
        if not held:
            self._event_hits.pop(device, None)
        hits = [h for h in held.values() if h.time <= now]
        return hits + list(self._reading_hits.get(device, {}).values())

    def _silent_since(self, device: str, time: float) -> bool:
        """Whether a device that used to report gave nothing after `time`: what broke it is not over."""
        engine = self.engines.get(self.kind_of(device))
        return engine is not None and 0 <= engine.seen(device) <= time

    def devices_with_hits(self, kind: str) -> list[str]:
        """Devices of a kind that some rule may hold for; `active_hits` says which."""
        return [d for d in {*self._event_hits, *self._reading_hits} if self.kind_of(d) == kind]

    def explain(self, device: str, now: float, horizon_s: int, top: int = 5) -> list[Reason]:
        """Reasons for a device's risk as of the last `score`, strongest first; rules before the model."""
        hits = sorted(self.active_hits(device, now), key=lambda h: h.floors, reverse=True)
        reasons = [explanation.of_rule(h) for h in hits]
        kind = self.kind_of(device)
        model, table = self.models.get(kind), self._tables.get(kind)
        row = None if table is None else table.row_of.get(device)
        if model is not None and table is not None and row is not None:
            reasons += explanation.of_model(self.engines[kind], model, table, row, horizon_s, top)
        return explanation.strongest(reasons, top)

    # What was read ---------------------------------------------------------------------------------------------

    def devices(self) -> dict[str, Device]:
        """Every device seen, by id; the description is bare when the node never sent one."""
        return dict(self._devices)

    def described(self, device: str) -> Device | None:
        """One device as its node described it; None when it was never seen."""
        return self._devices.get(device)

    def latest(self, device: str) -> dict[str, tuple[float, float]]:
        """Metric -> (value, time) of the last readings taken in by `score`."""
        out: dict[str, tuple[float, float]] = {}
        for engine in self.engines.values():
            out.update(engine.latest(device))
        return out

    def series(self, device: str, metric: str) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Times (bucket ends) and values from the buckets, oldest first, for charts: means of gauges, rates an hour
        of counters (all counters of the same signal together). Fine for the last minutes, coarser further back.
        Empty when not kept."""
        for engine in self.engines.values():
            signal = next((s for s in engine.scheme.signals if metric in s.metrics), None)
            if signal is not None:
                rings = []
                for i, level in enumerate(engine.scheme.levels):
                    ends, found = engine.series(device, signal.name, i)
                    rings.append((ends, found * (3600 / level.width_s) if signal.type == COUNTER else found))
                return _joined(rings)
        return np.empty(0), np.empty(0)

    # Keeping ---------------------------------------------------------------------------------------------------

    def save(self, folder: Path) -> None:
        """Write the state to a folder. Raises StorageError."""
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StorageError(f"{folder}: cannot be made: {error}") from error
        for kind, engine in self.engines.items():
            engine.save(folder / f"{kind}.state")
        header = {
            "version": STATE_VERSION,
            "devices": msgspec.to_builtins(list(self._devices.values())),
            "kinds": self._kinds,
            "event_hits": [_plain(h) for hits in self._event_hits.values() for h in hits.values()],
            "reading_hits": [_plain(h) for hits in self._reading_hits.values() for h in hits.values()],
        }
        snapshot.write(folder / "fleet.state", header, {})

    @classmethod
    def load(cls, folder: Path, models: Mapping[str, RiskModel | None]) -> Fleet:
        """Read what `save` wrote. Raises StorageError when it is damaged."""
        path = folder / "fleet.state"
        header, _ = snapshot.read(path)
        if header.get("version") != STATE_VERSION:
            raise snapshot.other_version(path, "version")
        fleet = cls(models)
        try:
            fleet.engines = {kind: FeatureEngine.load(folder / f"{kind}.state") for kind in KINDS}
            fleet._devices = {d.device: d for d in msgspec.convert(header["devices"], list[Device])}
            fleet._kinds = dict(header["kinds"])
            for name in ("event_hits", "reading_hits"):
                held: dict[str, dict[str, RuleHit]] = getattr(fleet, f"_{name}")
                for plain in header[name]:
                    hit = RuleHit(**{**plain, "floors": tuple(plain["floors"])})
                    held.setdefault(hit.device, {})[hit.rule] = hit
        except (KeyError, TypeError, msgspec.ValidationError) as error:
            raise StorageError(f"{path}: the state cannot be read: {error}") from error
        return fleet


def _plain(hit: RuleHit) -> dict[str, Any]:
    return {**vars(hit), "floors": list(hit.floors)}


def _shifted(event: Event, shift_s: float) -> Event:
    if not shift_s or event.time is None:
        return event
    return msgspec.structs.replace(event, time=event.time + shift_s)


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _joined(
    rings: list[tuple[NDArray[np.float64], NDArray[np.float64]]],
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Rings from fine to coarse as one line: each only for the time before the finer ones begin."""
    times, values = [], []
    begins = np.inf
    for ends, found in rings:
        older = ends <= begins
        if older.any():
            times.append(ends[older])
            values.append(found[older])
            begins = min(begins, float(ends[0]))
    if not times:
        return np.empty(0), np.empty(0)
    return np.concatenate(times[::-1]), np.concatenate(values[::-1])
