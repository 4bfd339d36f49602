"""The feature engine: readings and events in, one row of features for each device out. Serving, replay and training
all go through it, so the three cannot disagree. One engine holds one kind of device (`gpu`, `disk`, `node`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from forewarn.collectors.base import Device
from forewarn.collectors.errors import InputError
from forewarn.collectors.xids import xid_fact
from forewarn.models import buckets, columns, snapshot
from forewarn.models.buckets import Feed, Rings
from forewarn.models.columns import View
from forewarn.models.peers import Groups
from forewarn.models.signals import event_signal, scheme_of

Floats = NDArray[np.float64]
Singles = NDArray[np.float32]

HORIZONS_S: dict[str, tuple[int, ...]] = {
    "gpu": (900, 3600, 86_400),
    "disk": (86_400, 7 * 86_400, 30 * 86_400),
    "node": (900, 3600, 86_400),
}
"""Horizons of each kind of device, in seconds."""

GONE_AFTER_S = {"gpu": 7 * 86_400, "disk": 60 * 86_400, "node": 7 * 86_400}
"""A device silent for this long is left out of the tables until it speaks again."""

LATEST_S = 1e11
"""Stamps beyond this are no times (it is the year 5138)."""

STATE_VERSION = 1


@dataclass(frozen=True)
class FeatureTable:
    """`values` is (devices x names) float32; NaN where nothing is known. `time` is the moment it holds for."""

    time: float
    kind: str
    devices: list[str]
    names: tuple[str, ...]
    values: Singles

    @property
    def known(self) -> NDArray[np.bool_]:
        """True where a value is known; same shape as `values`."""
        return ~np.isnan(self.values)

    @cached_property
    def row_of(self) -> dict[str, int]:
        """Row of each device."""
        return {d: i for i, d in enumerate(self.devices)}

    @cached_property
    def rows_of_node(self) -> dict[str, list[int]]:
        """Rows of the devices of each node."""
        found: dict[str, list[int]] = {}
        for i, device in enumerate(self.devices):
            found.setdefault(device.split("/", 1)[0], []).append(i)
        return found

    @cached_property
    def column_of(self) -> dict[str, int]:
        """Column of each feature."""
        return {n: i for i, n in enumerate(self.names)}

    def rows(self, rows: NDArray[np.integer] | Sequence[int]) -> FeatureTable:
        """The same table with some devices only."""
        picked = [self.devices[int(r)] for r in rows]
        return FeatureTable(self.time, self.kind, picked, self.names, self.values[np.asarray(rows, np.int64)])


@cache
def _blank(kind: str) -> columns.Columns:
    return FeatureEngine(kind)._columns(0.0, np.empty(0, np.int32))


def feature_names(kind: str) -> tuple[str, ...]:
    """Names of the columns of `FeatureEngine(kind).features()`, stable and in order."""
    return tuple(_blank(kind).names)


def monotone_constraints(kind: str) -> list[int]:
    """For each feature +1 (more is worse), -1 (less is worse) or 0, for LightGBM's monotone_constraints."""
    return list(_blank(kind).directions)


@dataclass
class _Chunk:
    """Samples that wait: rising `times` (n), `rows` (n), `columns` (metric numbers), `values` (n x columns)."""

    times: Floats
    rows: NDArray[np.int32]
    columns: NDArray[np.int32]
    values: Floats


@dataclass
class _Places:
    """What is known of each place besides its samples; grows with the rings."""

    node: NDArray[np.int64]
    model: NDArray[np.int64]
    known: NDArray[np.bool_]
    """A sample or an event of the device was taken in."""
    installed: Floats
    failures: Floats
    last_failure: Floats
    slot_failures: Floats
    last_event: Floats

    @classmethod
    def empty(cls, capacity: int) -> _Places:
        return cls(
            node=np.zeros(capacity, np.int64),
            model=np.zeros(capacity, np.int64),
            known=np.zeros(capacity, np.bool_),
            installed=np.full(capacity, np.nan),
            failures=np.zeros(capacity),
            last_failure=np.full(capacity, np.nan),
            slot_failures=np.zeros(capacity),
            last_event=np.full(capacity, -np.inf),
        )


class FeatureEngine:
    """State of all devices of one kind. Not thread-safe: one thread owns it.

    Samples and events wait in a queue until `features(now)` or `flush(now)` takes in those stamped up to `now`,
    in the order of their stamps. So how they were cut into calls makes no difference, to the bit, and no feature
    at `now` can see a later sample. A sample not newer than the last one of the same device and metric is
    counted in `late` and left out. A counter that falls counts as reset only when the next sample confirms it, so
    a stray reading of a stepped clock adds nothing.
    """

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.scheme = scheme_of(kind)
        self.now = -np.inf
        """The moment up to which everything was taken in; never goes back."""
        self._feed = Feed.of(self.scheme)
        self._capacity = 0
        self._rings = Rings.empty(self.scheme, 0)
        self._places = _Places.empty(0)
        self._row: dict[str, int] = {}
        self._names: list[str] = []
        self._serials: dict[str, str] = {}
        self._codes: dict[str, dict[str, int]] = {"node": {}, "model": {"": 0}}
        self._free: list[int] = []
        self._queue: list[_Chunk] = []
        self._events: list[tuple[float, int, int, float, str]] = []
        self._event_last: dict[tuple[int, str], float] = {}
        self._failures: list[tuple[float, int]] = []
        self._resets: list[tuple[float, int]] = []
        self._metric_column = {m: i for i, m in enumerate(self.scheme.metrics)}
        self._column_sets: dict[tuple[str, ...], tuple[NDArray[np.int64], NDArray[np.int32]]] = {}
        self._groups: tuple[int, Groups, Groups] | None = None
        self._changes = 0

    # Devices ---------------------------------------------------------------------------------------------------

    def describe(self, device: Device, time: float | None = None, installed: float | None = None) -> None:
        """Take in what is known of a device. Another serial in the same place from `time` on (default: now) starts
        its history anew; the place keeps its count of past failures. `installed`: seconds since the epoch, gives
        the age."""
        row = self._row_of(device.device)
        before = self._serials.get(device.device, "")
        if device.serial and before and device.serial != before:
            self._resets.append((self.now if time is None else time, row))
        if device.serial:
            self._serials[device.device] = device.serial
        if device.model:
            self._places.model[row] = self._code("model", device.model)
            self._changes += 1
        if installed is not None:
            self._places.installed[row] = installed

    def remove(self, device: str) -> None:
        """Leave a device out of all later tables; its state is dropped."""
        row = self._row.pop(device, None)
        if row is None:
            return
        self._drop_queued(row)
        self._forget(row)
        self._names[row] = ""
        self._places.known[row] = False
        self._places.slot_failures[row] = 0
        self._serials.pop(device, None)
        self._free.append(row)
        self._changes += 1

    def devices(self) -> list[str]:
        """Every device there is state for."""
        return [self._names[r] for r in self._known_rows()]

    def rows(self, devices: Sequence[str]) -> NDArray[np.int32]:
        """Row numbers of devices (made on first sight), for `apply_bulk`."""
        row = self._row
        return np.array([row[d] if d in row else self._row_of(d) for d in devices], np.int32)

    def _row_of(self, device: str) -> int:
        row = self._row.get(device)
        if row is not None:
            return row
        if self._free:
            row = self._free.pop()
            self._names[row] = device
        else:
            row = len(self._names)
            self._names.append(device)
            if row >= self._capacity:
                self._grow(max(row + 1, self._capacity + self._capacity // 4 + 64))
        self._row[device] = row
        self._places.node[row] = self._code("node", device.split("/", 1)[0])
        self._places.model[row] = 0
        self._changes += 1
        return row

    def _grow(self, capacity: int) -> None:
        self._rings.grow(capacity)
        larger = _Places.empty(capacity)
        for name, array in vars(self._places).items():
            getattr(larger, name)[: len(array)] = array
        self._places, self._capacity = larger, capacity

    def _code(self, what: str, text: str) -> int:
        codes = self._codes[what]
        return codes.setdefault(text, len(codes))

    def _forget(self, row: int) -> None:
        self._rings.clear(row)
        self._places.installed[row] = np.nan
        self._places.failures[row] = 0
        self._places.last_failure[row] = np.nan
        for key in [k for k in self._event_last if k[0] == row]:
            del self._event_last[key]

    def _drop_queued(self, row: int) -> None:
        kept = []
        for chunk in self._queue:
            keep = chunk.rows != row
            if keep.all():
                kept.append(chunk)
            elif keep.any():
                kept.append(_Chunk(chunk.times[keep], chunk.rows[keep], chunk.columns, chunk.values[keep]))
        self._queue = kept
        self._events = [e for e in self._events if e[1] != row]
        self._failures = [f for f in self._failures if f[1] != row]
        self._resets = [r for r in self._resets if r[1] != row]

    # Samples and events ----------------------------------------------------------------------------------------

    def apply(self, time: float, devices: Sequence[str], metrics: Sequence[str], values: Floats) -> None:
        """One sweep: `values` (devices x metrics), NaN where not reported. Unknown metrics are passed over."""
        taken, numbers = self._columns_of(metrics)
        if not len(numbers) or not len(devices):
            return
        if not 0 <= time <= LATEST_S:
            raise InputError(f"time: {time} must be seconds since 1970, at most {LATEST_S:.0f}")
        cells = np.array(values, np.float64)
        if cells.shape != (len(devices), len(metrics)):
            raise InputError(
                f"values: shape {cells.shape}, but {len(devices)} devices x {len(metrics)} metrics"
            )
        cells = cells[:, taken]
        some: NDArray[np.bool_] = np.asarray(np.isfinite(cells).any(axis=1))
        if not some.all():
            cells = cells[some]
            devices = [d for d, s in zip(devices, some.tolist(), strict=True) if s]
            if not devices:
                return
        rows = self.rows(devices)
        self._queue.append(_Chunk(np.full(len(rows), float(time)), rows, numbers, cells))

    def apply_bulk(
        self, times: Floats, rows: NDArray[np.int32], metrics: Sequence[str], values: NDArray[np.floating]
    ) -> None:
        """Many readings: `times` (n), `rows` (n) from `rows()`, `values` (n x metrics), NaN where not reported.

        The arrays are kept until they are taken in: do not change them afterwards.
        """
        taken, numbers = self._columns_of(metrics)
        if not len(numbers) or not len(times):
            return
        if values.shape != (len(times), len(metrics)) or rows.shape != (len(times),):
            raise InputError(f"values: shape {values.shape}, but {len(times)} times x {len(metrics)} metrics")
        times = np.asarray(times, np.float64)
        if not ((times >= 0) & (times <= LATEST_S)).all():
            raise InputError(f"times: must be seconds since 1970, at most {LATEST_S:.0f}")
        if len(taken) < len(metrics):
            values = values[:, taken]
        cells = np.asarray(values, np.float64)
        numbers_of_rows = np.asarray(rows, np.int32)
        if (times[1:] < times[:-1]).any():
            order = np.argsort(times, kind="stable")
            times, numbers_of_rows, cells = times[order], numbers_of_rows[order], cells[order]
        self._queue.append(_Chunk(times, numbers_of_rows, numbers, cells))

    def apply_event(
        self, time: float, device: str, kind: str, code: str, severity: str = "", count: int = 1
    ) -> None:
        """One event of a device. An event on the node itself concerns the engine of kind `node`."""
        fact = xid_fact(int(code)) if kind == "xid" and code.isdigit() else None
        signal = event_signal(self.kind, kind, code, fact.category if fact else "")
        if not 0 <= time <= LATEST_S:
            raise InputError(f"events.time: {time} must be seconds since 1970, at most {LATEST_S:.0f}")
        if signal is None or (severity == "info" and kind != "xid"):
            return
        column = self.scheme.signal(signal)
        self._events.append((float(time), self._row_of(device), column, float(count), f"{kind}:{code}"))

    def apply_failure(self, time: float, device: str) -> None:
        """A failure that is known to have happened: it counts as history from `time` on."""
        self._failures.append((float(time), self._row_of(device)))

    def _columns_of(self, metrics: Sequence[str]) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
        """Positions of the metrics we keep, and their numbers; the same arrays for the same list."""
        key = tuple(metrics)
        found = self._column_sets.get(key)
        if found is None:
            taken = [i for i, m in enumerate(key) if m in self._metric_column]
            numbers = [self._metric_column[key[i]] for i in taken]
            found = np.array(taken, np.int64), np.array(numbers, np.int32)
            if len(self._column_sets) > 4096:
                self._column_sets.clear()
            self._column_sets[key] = found
        return found

    # Taking in -------------------------------------------------------------------------------------------------

    def flush(self, now: float) -> None:
        """Take in all that is queued with stamps up to `now`. An earlier `now` than before changes nothing."""
        now = max(now, self.now)
        self.now = now
        due = sorted(r for r in self._resets if r[0] <= now)
        self._resets = [r for r in self._resets if r[0] > now]
        for time, row in due:
            self._take(time, "left")
            self._forget(row)
        self._take(now, "right")

    def _take(self, limit: float, side: str) -> None:
        parts, kept = [], []
        for chunk in self._queue:
            k = int(np.searchsorted(chunk.times, limit, "left" if side == "left" else "right"))
            if k:
                parts.append(_Chunk(chunk.times[:k], chunk.rows[:k], chunk.columns, chunk.values[:k]))
            if k < len(chunk.times):
                kept.append(_Chunk(chunk.times[k:], chunk.rows[k:], chunk.columns, chunk.values[k:]))
        self._queue = kept
        if parts:
            whole = _merged(parts)
            buckets.take(self._feed, self._rings, whole.times, whole.rows, whole.columns, whole.values)
            self._places.known |= self._rings.taken > 0
        self._take_events(limit, side)

    def _take_events(self, limit: float, side: str) -> None:
        def due(time: float) -> bool:
            return time < limit or (side == "right" and time == limit)

        if any(due(e[0]) for e in self._events):
            ready = sorted((e for e in self._events if due(e[0])), key=lambda e: e[0])
            self._events = [e for e in self._events if not due(e[0])]
            fresh = []
            for event in ready:
                key = (event[1], event[4])
                # The same event of the same moment was sent twice.
                if self._event_last.get(key) == event[0]:
                    continue
                self._event_last[key] = event[0]
                fresh.append(event)
            if fresh:
                rows = np.array([e[1] for e in fresh], np.int32)
                buckets.take_events(
                    self._feed,
                    self._rings,
                    np.array([e[0] for e in fresh]),
                    rows,
                    np.array([e[2] for e in fresh], np.int32),
                    np.array([e[3] for e in fresh]),
                )
                self._places.known[rows] = True
                self._places.last_event[rows] = [e[0] for e in fresh]
        for time, row in sorted(f for f in self._failures if due(f[0])):
            self._places.failures[row] += 1
            self._places.slot_failures[row] += 1
            self._places.last_failure[row] = time
        self._failures = [f for f in self._failures if not due(f[0])]

    # Features --------------------------------------------------------------------------------------------------

    def features(self, now: float) -> FeatureTable:
        """Features at `now` (or at the latest moment asked for before, should that be later) of every device that gave
        a sample or an event within GONE_AFTER_S."""
        self.flush(now)
        rows = self._known_rows()
        places = self._places
        # A device that was silent this long is gone; scoring it would only show its last state for ever.
        active = np.maximum(self._rings.seen[rows], places.last_event[rows])
        rows = rows[self.now - active <= GONE_AFTER_S[self.kind]]
        if not len(rows):
            names = feature_names(self.kind)
            return FeatureTable(self.now, self.kind, [], names, np.empty((0, len(names)), np.float32))
        made = self._columns(self.now, rows)
        values = np.empty((len(rows), len(made.names)), np.float32)
        for i, column in enumerate(made.values):
            values[:, i] = column
        return FeatureTable(self.now, self.kind, [self._names[r] for r in rows], tuple(made.names), values)

    def _known_rows(self) -> NDArray[np.int32]:
        return np.flatnonzero(self._places.known[: len(self._names)]).astype(np.int32)

    def _columns(self, now: float, rows: NDArray[np.int32]) -> columns.Columns:
        rings, places = self._rings, self._places
        nodes, models = self._groups_of(rows)
        failures = places.failures[rows]
        by_node: Floats = np.bincount(places.node[rows], places.slot_failures[rows], minlength=1).astype(
            np.float64
        )
        view = View(
            now=now,
            scheme=self.scheme,
            windows=buckets.read_windows(self.scheme, self._feed, rings, now, rows),
            last_value=rings.last_value[rows],
            last_time=rings.last_time[rows],
            interval=rings.interval[rows],
            total=rings.total[rows],
            first=rings.first[rows],
            recent=rings.recent[rows],
            most=rings.most[rows],
            seen=rings.seen[rows],
            nodes=nodes,
            models=models,
            installed=places.installed[rows],
            failures=failures,
            last_failure=places.last_failure[rows],
            slot_failures=places.slot_failures[rows],
            node_failures=by_node[places.node[rows]],
        )
        return columns.build(view)

    def _groups_of(self, rows: NDArray[np.int32]) -> tuple[Groups, Groups]:
        key = hash((self._changes, rows.tobytes()))
        if self._groups is None or self._groups[0] != key:
            nodes = Groups.of(self._places.node[rows])
            self._groups = (key, nodes, Groups.of(self._places.model[rows]))
        return self._groups[1], self._groups[2]

    # What was read ---------------------------------------------------------------------------------------------

    def latest(self, device: str) -> dict[str, tuple[float, float]]:
        """Metric -> (value, stamp) of the last samples taken in."""
        row = self._row.get(device)
        if row is None:
            return {}
        values, times = self._rings.last_value[row], self._rings.last_time[row]
        return {
            m: (float(values[i]), float(times[i]))
            for i, m in enumerate(self.scheme.metrics)
            if not np.isnan(values[i])
        }

    def levels(self, metrics: Sequence[str]) -> tuple[list[str], Floats]:
        """Last values of some metrics of every device: (devices x metrics), NaN where never reported."""
        rows = self._known_rows()
        numbers = np.array([self._metric_column[m] for m in metrics], np.int64)
        return [self._names[r] for r in rows], self._rings.last_value[np.ix_(rows, numbers)]

    def seen(self, device: str) -> float:
        """Stamp of the newest sample taken in; -inf when there was none."""
        row = self._row.get(device)
        return -np.inf if row is None else float(self._rings.seen[row])

    def signal_history(self, device: str, signal: str) -> tuple[float, float, float]:
        """Increase since first sight, stamp of the first increase and of the last; NaN: none."""
        if device not in self._row:
            return 0.0, np.nan, np.nan
        row, column = self._row[device], self.scheme.signal(signal)
        rings = self._rings
        return (
            float(rings.total[row, column]),
            float(rings.first[row, column]),
            float(rings.recent[row, column]),
        )

    def series(self, device: str, signal: str, level: int) -> tuple[Floats, Floats]:
        """One ring: ends of its buckets and their values, oldest first."""
        row = self._row.get(device)
        if row is None:
            return np.empty(0), np.empty(0)
        return buckets.read_series(self._feed, self._rings, row, self.scheme.signal(signal), level)

    def counts(self) -> dict[str, int]:
        """Samples taken in, samples left out as late, samples that wait."""
        return {
            "taken": int(self._rings.taken.sum()),
            "late": int(self._rings.late.sum()),
            "queued": sum(len(c.times) for c in self._queue),
        }

    # Keeping ---------------------------------------------------------------------------------------------------

    def save(self, path: Path) -> None:
        """Write the whole state, queue included, to one file, atomically. Raises StorageError."""
        used = len(self._names)
        arrays: dict[str, NDArray[np.generic]] = {}
        arrays.update({f"rings.{k}": a[:used] for k, a in vars(self._rings).items()})
        arrays.update({f"places.{k}": a[:used] for k, a in vars(self._places).items()})
        for i, chunk in enumerate(self._queue):
            arrays.update({f"queue.{i}.{k}": a for k, a in vars(chunk).items()})
        header = {
            "version": STATE_VERSION,
            "kind": self.kind,
            "metrics": list(self.scheme.metrics),
            "signals": [s.name for s in self.scheme.signals],
            "levels": [[level.width_s, level.slots] for level in self.scheme.levels],
            "now": self.now if np.isfinite(self.now) else None,
            "names": self._names,
            "serials": self._serials,
            "codes": self._codes,
            "free": self._free,
            "queue": len(self._queue),
            "events": self._events,
            "event_last": [[row, key, time] for (row, key), time in self._event_last.items()],
            "failures": self._failures,
            "resets": self._resets,
        }
        snapshot.write(path, header, arrays)

    @classmethod
    def load(cls, path: Path) -> FeatureEngine:
        """Read what `save` wrote. Raises StorageError when it is damaged or of another version."""
        header, arrays = snapshot.read(path)
        engine = cls(str(header.get("kind")) if header.get("kind") in HORIZONS_S else "gpu")
        scheme = engine.scheme
        expected = {
            "version": STATE_VERSION,
            "kind": engine.kind,
            "metrics": list(scheme.metrics),
            "signals": [s.name for s in scheme.signals],
            "levels": [[level.width_s, level.slots] for level in scheme.levels],
        }
        for key, value in expected.items():
            if header.get(key) != value:
                raise snapshot.other_version(path, key)
        engine._rings = Rings(**{n: arrays[f"rings.{n}"] for n in vars(engine._rings)})
        engine._places = _Places(**{n: arrays[f"places.{n}"] for n in vars(engine._places)})
        engine._capacity = len(header["names"])
        engine.now = -np.inf if header["now"] is None else header["now"]
        engine._names = header["names"]
        engine._row = {n: i for i, n in enumerate(engine._names) if n}
        engine._serials = header["serials"]
        engine._codes = header["codes"]
        engine._free = header["free"]
        engine._queue = [
            _Chunk(*(arrays[f"queue.{i}.{k}"] for k in ("times", "rows", "columns", "values")))
            for i in range(header["queue"])
        ]
        engine._events = [(e[0], e[1], e[2], e[3], e[4]) for e in header["events"]]
        engine._event_last = {(row, key): time for row, key, time in header["event_last"]}
        engine._failures = [(f[0], f[1]) for f in header["failures"]]
        engine._resets = [(r[0], r[1]) for r in header["resets"]]
        return engine


def _merged(parts: list[_Chunk]) -> _Chunk:
    """Chunks as one, in the order of their stamps (of equal stamps, in the order they came)."""
    if len(parts) == 1:
        one = parts[0]
        return _Chunk(one.times, one.rows, one.columns, np.ascontiguousarray(one.values))
    times = np.concatenate([p.times for p in parts])
    rows = np.concatenate([p.rows for p in parts])
    if all(p.columns is parts[0].columns for p in parts):
        numbers = parts[0].columns
        values = np.concatenate([p.values for p in parts])
    else:
        numbers = np.unique(np.concatenate([p.columns for p in parts]))
        values = np.full((len(times), len(numbers)), np.nan)
        at = 0
        for part in parts:
            values[at : at + len(part.times), np.searchsorted(numbers, part.columns)] = part.values
            at += len(part.times)
    if (times[1:] < times[:-1]).any():
        order = np.argsort(times, kind="stable")
        times, rows, values = times[order], rows[order], values[order]
    return _Chunk(times, rows, numbers, np.ascontiguousarray(values))
