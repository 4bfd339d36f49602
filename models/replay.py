"""Plays a history into a fleet in the order of time, moment by moment. Training and back-test both go through here, so
what a model learns from is what it will be shown.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from forewarn.collectors.base import Device, Event
from forewarn.collectors.catalog import METRICS
from forewarn.models.features import HORIZONS_S
from forewarn.models.fleet import Fleet
from forewarn.models.history import History
from forewarn.models.rules import RuleHit

DAY_S = 86_400.0
CAPACITY = "disk_capacity_bytes"
LIVE_STEP_S = 300.0
"""Seconds between scores in a replay of GPUs or nodes: the service scores more often, but risks move slower."""
MOST_DEVICE_STEPS = 8_000_000
"""Above this many scores the step is widened, so that a replay of any history ends."""


@dataclass(frozen=True)
class Moment:
    """The fleet has taken in everything up to `now`. `fresh`: devices read since the moment before; `hits`: rules
    that newly hold because of an event since then."""

    now: float
    fresh: list[str]
    hits: list[RuleHit]


def step_of(history: History, kind: str) -> float:
    """Seconds between scores for a kind: five minutes for what is read live, a day for disks."""
    if kind == "disk":
        return DAY_S
    first, last = history.span
    steps = max(1.0, (last - first) / LIVE_STEP_S)
    wider = np.ceil(steps * max(1, history.device_count) / MOST_DEVICE_STEPS)
    return float(LIVE_STEP_S * max(1.0, wider))


def spacing_of(history: History, kind: str) -> float:
    """Seconds that one score of a device stands for. Disks are scored on the days they are read, which may be weeks
    apart; all else at every step."""
    step = step_of(history, kind)
    interval = history.interval_s
    if kind != "disk" or np.isnan(interval):
        return step
    return float(max(step, np.round(interval / DAY_S) * DAY_S))


def replay(
    history: History, fleet: Fleet, step_s: float, start: float | None = None, end: float | None = None
) -> Iterator[Moment]:
    """Feed `fleet` and stop at each moment of a grid of `step_s`; events between moments are taken in on the way."""
    arrivals = _Arrivals(history)
    last = history.span[1] if end is None else end
    events = _Events(history)
    capacity = _capacity_of(history)
    waiting: list[str] = []
    moment = -np.inf
    for piece in history.slices(step_s, start, end):
        order = np.argsort(piece.times, kind="stable")
        times, codes = piece.times[order], piece.codes[order]
        metrics, values = piece.metrics, piece.values[order]
        if capacity:
            known = np.array([capacity.get(d, np.nan) for d in piece.devices])
            metrics, values = [*metrics, CAPACITY], np.column_stack([values, known[codes]])
        fleet.apply_bulk(times, piece.devices, metrics, values, codes=codes)
        # A sample stamped exactly at a moment belongs to it: grids of days begin with the readings of the day.
        moments = np.arange(piece.start, min(piece.end, last + step_s), step_s)
        at = np.searchsorted(times, moments, "right")
        before = 0
        for moment, upto in zip(moments.tolist(), at.tolist(), strict=True):
            arrivals.up_to(moment, fleet)
            hits = events.up_to(moment, fleet)
            fresh = [piece.devices[c] for c in np.unique(codes[before:upto]).tolist()]
            before = upto
            yield Moment(moment, _both(waiting, fresh), hits)
            waiting = []
        # Read after the last moment of this piece: the first of the next piece is theirs.
        waiting = _both(waiting, [piece.devices[c] for c in np.unique(codes[before:]).tolist()])
    if waiting:
        moment += step_s
        arrivals.up_to(moment, fleet)
        yield Moment(moment, waiting, events.up_to(moment, fleet))


def _both(a: list[str], b: list[str]) -> list[str]:
    return list(dict.fromkeys([*a, *b])) if a else b


def _capacity_of(history: History) -> dict[str, float]:
    """Capacity of disks as devices.parquet tells it, for histories whose telemetry does not: live, disks report it."""
    table = history.devices
    if CAPACITY in history.metrics or "capacity_bytes" not in table:
        return {}
    if not any(METRICS[m].kind == "disk" for m in history.metrics):
        return {}
    bytes_of = pd.to_numeric(table["capacity_bytes"], errors="coerce")
    return {d: float(b) for d, b in zip(table["device"], bytes_of, strict=True) if b > 0}


class _Events:
    """Events in order of time."""

    def __init__(self, history: History) -> None:
        self._table = history.events
        self._times: NDArray[np.float64] = self._table["time"].to_numpy(float)
        self._next = 0

    def up_to(self, moment: float, fleet: Fleet) -> list[RuleHit]:
        until = int(np.searchsorted(self._times, moment, "right"))
        if until == self._next:
            return []
        hits = []
        for row in self._table.iloc[self._next : until].to_dict("records"):
            count = row["count"]
            event = Event(
                device=row["device"] or row["node"],
                kind=row["kind"],
                code=row["code"],
                severity=row["severity"] or "",
                message=row.get("message") or "",
                time=float(row["time"]),
                count=int(count) if count == count else 1,
            )
            hit = fleet.apply_event(row["node"], event)
            if hit is not None:
                hits.append(hit)
        self._next = until
        return hits


class _Arrivals:
    """Descriptions of devices, each when it was installed; removals when they happened."""

    def __init__(self, history: History) -> None:
        table = history.devices
        table = table.assign(at=table["installed"].fillna(-np.inf)).sort_values("at", kind="stable")
        self._rows: list[tuple[float, Device, float]] = []
        self._removals: list[tuple[float, str]] = []
        last_removed = (
            table.groupby("device", sort=False)["removed"].last() if len(table) else pd.Series(dtype=float)
        )
        for row in table.to_dict("records"):
            kind = row["kind"] if row["kind"] in HORIZONS_S else ""
            device = Device(device=row["device"], kind=kind, model=row["model"], serial=row["serial"])
            self._rows.append((float(row["at"]), device, float(row["installed"])))
        self._removals = sorted((float(t), str(d)) for d, t in last_removed.items() if t == t)
        self._next = self._next_removal = 0

    def up_to(self, moment: float, fleet: Fleet) -> None:
        while self._next < len(self._rows) and self._rows[self._next][0] <= moment:
            at, device, installed = self._rows[self._next]
            fleet.describe(
                device,
                None if np.isinf(at) else at,
                None if np.isnan(installed) else installed,
            )
            self._next += 1
        while self._next_removal < len(self._removals) and self._removals[self._next_removal][0] <= moment:
            fleet.remove(self._removals[self._next_removal][1])
            self._next_removal += 1
