"""Rings of time buckets for all devices of one kind: taking samples and events in, and reading windows out.

Everything is an array over devices, so that one compiled pass takes in a sweep of the fleet. Order within a device
decides, and nothing else: each sample is applied on its own, so any split of a stream gives the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from forewarn.models.compiled import jit
from forewarn.models.signals import BITS, COUNTER, GAUGE, Scheme

Doubles = NDArray[np.float64]
Singles = NDArray[np.float32]
Integers = NDArray[np.int64]

NO_BUCKET = np.iinfo(np.int64).min // 4
"""Head of a ring that never took anything."""
INTERVAL_WEIGHT = 0.1
"""Weight of a new interval in a metric's usual interval."""
MISSED_AFTER = 2.5
"""A poll counts as missed when its interval is this many times the usual one."""
THREADS = 2
"""Threads over which large passes are spread; the compiled code holds no interpreter lock."""
LEAST_FOR_THREADS = 4096
"""Rows from which it pays."""
MISSED_MOST = 1000.0
"""Most polls one gap may count as missed: a device switched off for a month is one gap."""
LARGEST_MASK = 2.0**53
"""A bit mask beyond this is no mask: it is not a whole number any more."""
INTERVAL_CLIP = 3.0
"""A gap moves the usual interval as if it were at most this many times as long."""

SUM, ACTIVE, KNOWN = 0, 1, 2
"""What the last axis of `read_windows` holds for counters: increase, buckets with one, buckets with a sample."""
MEAN, DEVIATION, SLOPE = 0, 1, 2
"""And for gauges: mean, deviation of the bucket means, slope per hour."""


@dataclass
class Feed:
    """How metrics feed signals, as arrays: metric m feeds `signal[start[m]:start[m + 1]]`."""

    start: NDArray[np.int32]
    signal: NDArray[np.int32]
    type: NDArray[np.int32]
    bits: Integers
    anchor: NDArray[np.bool_]
    counter: NDArray[np.bool_]
    width: Integers
    offset: Integers
    slots: Integers
    missed: int

    @classmethod
    def of(cls, scheme: Scheme) -> Feed:
        """The arrays of a scheme."""
        start, signal, types, bits, counter = [0], [], [], [], []
        for metric in scheme.metrics:
            fed = [(i, s) for i, s in enumerate(scheme.signals) if metric in s.metrics]
            signal += [i for i, _ in fed]
            types += [s.type for _, s in fed]
            bits += [s.bits for _, s in fed]
            counter.append(any(s.type == COUNTER for _, s in fed))
            start.append(len(signal))
        slots = [level.slots for level in scheme.levels]
        return cls(
            start=np.array(start, np.int32),
            signal=np.array(signal, np.int32),
            type=np.array(types, np.int32),
            bits=np.array(bits, np.int64),
            anchor=np.array([m in scheme.anchors for m in scheme.metrics], np.bool_),
            counter=np.array(counter, np.bool_),
            width=np.array([level.width_s for level in scheme.levels], np.int64),
            offset=np.array([sum(slots[:i]) for i in range(len(slots))], np.int64),
            slots=np.array(slots, np.int64),
            missed=scheme.signal("missed_polls"),
        )


@dataclass
class Rings:
    """State over devices (first axis). M metrics, S signals, L levels, T slots of all levels together."""

    last_time: Doubles
    """(M) stamp of the last sample taken."""
    last_value: Doubles
    """(M) its value."""
    reference: Doubles
    """(M) where a counter's next increase is counted from."""
    low: Doubles
    """(M) a value under the reference that still waits to be confirmed as a reset; NaN: none."""
    interval: Singles
    """(M) usual seconds between samples."""
    head: Integers
    """(L) newest bucket of each ring."""
    ring: Singles
    """(T, S) increase or mean in a bucket; NaN: nothing came. Undefined before the first sample of the device."""
    filled: NDArray[np.int32]
    """(S, L) samples in the newest bucket of a gauge."""
    total: Doubles
    """(S) increase since first sight."""
    first: Doubles
    """(S) stamp of the first increase; NaN: none."""
    recent: Doubles
    """(S) stamp of the last increase; NaN: none."""
    most: Singles
    """(S) highest value of a gauge ever seen."""
    seen: Doubles
    """stamp of the newest sample."""
    late: Integers
    """samples left out because they were not newer than the last."""
    taken: Integers
    """samples taken in."""

    @classmethod
    def empty(cls, scheme: Scheme, capacity: int) -> Rings:
        """Rings for `capacity` devices."""
        metrics, signals, levels = len(scheme.metrics), len(scheme.signals), len(scheme.levels)
        slots = sum(level.slots for level in scheme.levels)
        rings = cls(
            last_time=np.empty((0, metrics)),
            last_value=np.empty((0, metrics)),
            reference=np.empty((0, metrics)),
            low=np.empty((0, metrics)),
            interval=np.empty((0, metrics), np.float32),
            head=np.empty((0, levels), np.int64),
            ring=np.empty((0, slots, signals), np.float32),
            filled=np.empty((0, signals, levels), np.int32),
            total=np.empty((0, signals)),
            first=np.empty((0, signals)),
            recent=np.empty((0, signals)),
            most=np.empty((0, signals), np.float32),
            seen=np.empty(0),
            late=np.empty(0, np.int64),
            taken=np.empty(0, np.int64),
        )
        rings.grow(capacity)
        return rings

    def grow(self, capacity: int) -> None:
        """Make room for more devices, in place: the rings are most of the memory and are not held twice."""
        before = len(self.seen)
        for array in vars(self).values():
            # No view of these arrays outlives a call, so that none can point at the memory given up here.
            array.resize((capacity, *array.shape[1:]), refcheck=False)
        self.clear(slice(before, capacity))

    def clear(self, rows: int | slice) -> None:
        """Forget one device or several."""
        for name, array in vars(self).items():
            # A ring needs no clearing: a head of NO_BUCKET has the next sample do it.
            if name != "ring":
                array[rows] = _FRESH.get(name, np.nan)


_FRESH: dict[str, float | int] = {
    "last_time": -np.inf,
    "head": NO_BUCKET,
    "filled": 0,
    "total": 0,
    "seen": -np.inf,
    "late": 0,
    "taken": 0,
}
"""What arrays of the state begin with, where it is not NaN."""


@jit
def _advance(
    r: Any, t: Any, width: Any, offset: Any, slots: Any, head: Any, ring: Any, bucket: Any, slot: Any
) -> None:
    """Move the rings of a device on to time `t`; fills `bucket` and `slot` (-1: too old for the ring)."""
    signals = ring.shape[2]
    for level in range(width.shape[0]):
        b = math.floor(t / width[level])
        bucket[level] = b
        n = slots[level]
        h = head[r, level]
        if b > h:
            start = h + 1 if b - h < n else b - n + 1
            for c in range(start, b + 1):
                k = offset[level] + c % n
                for s in range(signals):
                    ring[r, k, s] = np.nan
            head[r, level] = b
            slot[level] = offset[level] + b % n
        elif b > h - n:
            slot[level] = offset[level] + b % n
        else:
            slot[level] = -1


@jit
def _add(r: Any, s: Any, amount: Any, slot: Any, ring: Any) -> None:
    """Add to a counter's bucket on every level."""
    for level in range(slot.shape[0]):
        k = slot[level]
        if k >= 0:
            old = ring[r, k, s]
            ring[r, k, s] = amount if np.isnan(old) else old + amount


@jit
def _take(
    order: Any,
    times: Any,
    rows: Any,
    columns: Any,
    values: Any,
    start: Any,
    signal: Any,
    types: Any,
    bits: Any,
    anchor: Any,
    counter: Any,
    width: Any,
    offset: Any,
    slots: Any,
    missed: Any,
    last_time: Any,
    last_value: Any,
    reference: Any,
    low: Any,
    interval: Any,
    head: Any,
    ring: Any,
    filled: Any,
    total: Any,
    first: Any,
    recent: Any,
    most: Any,
    seen: Any,
    late: Any,
    taken: Any,
) -> None:
    levels = width.shape[0]
    bucket = np.empty(levels, np.int64)
    slot = np.empty(levels, np.int64)
    for at in range(order.shape[0]):
        i = order[at]
        r = rows[i]
        t = times[i]
        moved = False
        for j in range(columns.shape[0]):
            v = values[i, j]
            if not np.isfinite(v):
                continue
            m = columns[j]
            before = last_time[r, m]
            if not t > before:
                late[r] += 1
                continue
            if not moved:
                _advance(r, t, width, offset, slots, head, ring, bucket, slot)
                moved = True
            taken[r] += 1
            old = last_value[r, m]
            last_time[r, m] = t
            last_value[r, m] = v
            # The rhythm of the metric, and polls that went missing.
            if before > -np.inf:
                gap = t - before
                usual = interval[r, m]
                if np.isnan(usual):
                    interval[r, m] = gap
                else:
                    if anchor[m]:
                        lost = 0.0
                        if gap > MISSED_AFTER * usual:
                            lost = min(np.round(gap / usual) - 1.0, MISSED_MOST)
                            total[r, missed] += lost
                            if np.isnan(first[r, missed]):
                                first[r, missed] = t
                            recent[r, missed] = t
                        _add(r, missed, lost, slot, ring)
                    clipped = min(gap, INTERVAL_CLIP * usual)
                    interval[r, m] = usual + INTERVAL_WEIGHT * (clipped - usual)
            increase = 0.0
            if counter[m]:
                if np.isnan(old):
                    reference[r, m] = v
                elif v >= reference[r, m]:
                    increase = v - reference[r, m]
                    reference[r, m] = v
                    low[r, m] = np.nan
                elif np.isnan(low[r, m]) or v < low[r, m]:
                    # Lower than before: a reset, or the stray reading of a stepped clock. The next one tells.
                    low[r, m] = v
                else:
                    increase = v - low[r, m]
                    reference[r, m] = v
                    low[r, m] = np.nan
            for f in range(start[m], start[m + 1]):
                s = signal[f]
                if types[f] == COUNTER:
                    # Nothing to add to buckets that this metric has been in already.
                    if increase > 0.0 or before < bucket[0] * width[0]:
                        _add(r, s, increase, slot, ring)
                    if increase > 0.0:
                        total[r, s] += increase
                        if np.isnan(first[r, s]):
                            first[r, s] = t
                        recent[r, s] = t
                    continue
                x = v
                if types[f] == BITS:
                    x = 1.0 if 0.0 <= v < LARGEST_MASK and (int(v) & bits[f]) != 0 else 0.0
                    if x > 0.0:
                        if np.isnan(first[r, s]):
                            first[r, s] = t
                        recent[r, s] = t
                if np.isnan(most[r, s]) or x > most[r, s]:
                    most[r, s] = x
                for level in range(levels):
                    k = slot[level]
                    if k < 0:
                        continue
                    if before < bucket[level] * width[level]:
                        filled[r, s, level] = 1
                        ring[r, k, s] = x
                    else:
                        filled[r, s, level] += 1
                        ring[r, k, s] += (x - ring[r, k, s]) / filled[r, s, level]
        if moved and t > seen[r]:
            seen[r] = t


@jit
def _take_events(
    times: Any,
    rows: Any,
    signals: Any,
    amounts: Any,
    width: Any,
    offset: Any,
    slots: Any,
    head: Any,
    ring: Any,
    total: Any,
    first: Any,
    recent: Any,
) -> None:
    levels = width.shape[0]
    bucket = np.empty(levels, np.int64)
    slot = np.empty(levels, np.int64)
    for i in range(times.shape[0]):
        r, s, t = rows[i], signals[i], times[i]
        _advance(r, t, width, offset, slots, head, ring, bucket, slot)
        _add(r, s, amounts[i], slot, ring)
        total[r, s] += amounts[i]
        if np.isnan(first[r, s]):
            first[r, s] = t
        if not recent[r, s] > t:
            recent[r, s] = t


@jit
def _read(
    now: Any,
    rows: Any,
    gauge: Any,
    window_level: Any,
    window_buckets: Any,
    width: Any,
    offset: Any,
    slots: Any,
    head: Any,
    ring: Any,
    out: Any,
) -> None:
    signals = ring.shape[2]
    count = np.empty(signals, np.int64)
    sums = np.empty(signals, np.float64)
    squares = np.empty(signals, np.float64)
    shift = np.empty(signals, np.float64)
    sx = np.empty(signals, np.float64)
    sxx = np.empty(signals, np.float64)
    sxy = np.empty(signals, np.float64)
    for i in range(rows.shape[0]):
        r = rows[i]
        for w in range(window_level.shape[0]):
            level = window_level[w]
            n = slots[level]
            newest = math.floor(now / width[level])
            h = head[r, level]
            count[:] = 0
            sums[:] = 0.0
            squares[:] = 0.0
            sx[:] = 0.0
            sxx[:] = 0.0
            sxy[:] = 0.0
            for b in range(newest - window_buckets[w] + 1, newest + 1):
                if b > h or b <= h - n:
                    continue
                k = offset[level] + b % n
                x = (b - newest) * width[level] / 3600.0
                for s in range(signals):
                    v = ring[r, k, s]
                    if np.isnan(v):
                        continue
                    if gauge[s]:
                        if count[s] == 0:
                            shift[s] = v
                        y = v - shift[s]
                        sums[s] += y
                        squares[s] += y * y
                        sx[s] += x
                        sxx[s] += x * x
                        sxy[s] += x * y
                    else:
                        sums[s] += v
                        if v > 0.0:
                            squares[s] += 1.0
                    count[s] += 1
            for s in range(signals):
                c = count[s]
                if c == 0:
                    out[i, s, w, 0] = np.nan
                    out[i, s, w, 1] = np.nan
                    out[i, s, w, 2] = np.nan
                elif gauge[s]:
                    mean = sums[s] / c
                    out[i, s, w, 0] = shift[s] + mean
                    out[i, s, w, 1] = math.sqrt(max(squares[s] / c - mean * mean, 0.0))
                    spread = sxx[s] - sx[s] * sx[s] / c
                    out[i, s, w, 2] = (
                        (sxy[s] - sx[s] * sums[s] / c) / spread if c >= 3 and spread > 0.0 else np.nan
                    )
                else:
                    out[i, s, w, 0] = sums[s]
                    out[i, s, w, 1] = squares[s]
                    out[i, s, w, 2] = c


def _spread(run: Callable[[int], None], parts: int) -> None:
    """Run the parts at once: each has devices of its own, so the outcome is that of one after the other."""
    if parts == 1:
        run(0)
        return
    with ThreadPoolExecutor(parts) as pool:
        for done in [pool.submit(run, part) for part in range(parts)]:
            done.result()


def take(
    feed: Feed,
    rings: Rings,
    times: Doubles,
    rows: NDArray[np.int32],
    columns: NDArray[np.int32],
    values: Doubles,
) -> None:
    """Take in samples: `values` (n x columns), `columns` the metric numbers; in the order given."""
    if not len(times):
        return
    parts = THREADS if len(times) >= LEAST_FOR_THREADS else 1

    # Device by device, each in the order of its samples: the same outcome, and its state stays at hand.
    order = np.argsort(rows, kind="stable")
    edges = np.linspace(0, int(rows.max()) + 1, parts + 1).astype(int)
    cuts = np.searchsorted(rows[order], edges)

    def run(part: int) -> None:
        _take(
            order[cuts[part] : cuts[part + 1]],
            times,
            rows,
            columns,
            values,
            feed.start,
            feed.signal,
            feed.type,
            feed.bits,
            feed.anchor,
            feed.counter,
            feed.width,
            feed.offset,
            feed.slots,
            feed.missed,
            *vars(rings).values(),
        )

    _spread(run, parts)


def take_events(
    feed: Feed,
    rings: Rings,
    times: Doubles,
    rows: NDArray[np.int32],
    signals: NDArray[np.int32],
    amounts: Doubles,
) -> None:
    """Take in events: signal `signals[i]` of device `rows[i]` rises by `amounts[i]`."""
    _take_events(
        times,
        rows,
        signals,
        amounts,
        feed.width,
        feed.offset,
        feed.slots,
        rings.head,
        rings.ring,
        rings.total,
        rings.first,
        rings.recent,
    )


def read_windows(scheme: Scheme, feed: Feed, rings: Rings, now: float, rows: NDArray[np.int32]) -> Singles:
    """Windows at `now`: (rows x signals x windows x 3). Counters: increase, active buckets, known
    buckets. Gauges: mean, deviation of bucket means, slope per hour."""
    out = np.empty((len(rows), len(scheme.signals), len(scheme.windows), 3), np.float32)
    gauge = np.array([s.type != COUNTER for s in scheme.signals], np.bool_)
    parts = THREADS if len(rows) >= LEAST_FOR_THREADS else 1
    edges = np.linspace(0, len(rows), parts + 1).astype(int)
    level = np.array([w.level for w in scheme.windows], np.int64)
    length = np.array([w.buckets for w in scheme.windows], np.int64)

    def run(part: int) -> None:
        own = slice(edges[part], edges[part + 1])
        _read(
            now,
            rows[own],
            gauge,
            level,
            length,
            feed.width,
            feed.offset,
            feed.slots,
            rings.head,
            rings.ring,
            out[own],
        )

    _spread(run, parts)
    return out


def read_series(feed: Feed, rings: Rings, row: int, signal: int, level: int) -> tuple[Doubles, Doubles]:
    """One ring of one device, oldest first: bucket ends (seconds) and values; empty buckets left out."""
    head, n = int(rings.head[row, level]), int(feed.slots[level])
    if head == NO_BUCKET:
        return np.empty(0), np.empty(0)
    buckets = np.arange(head - n + 1, head + 1)
    values = rings.ring[row, feed.offset[level] + buckets % n, signal].astype(np.float64)
    known = ~np.isnan(values)
    ends = (buckets + 1) * float(feed.width[level])
    return ends[known], values[known]


__all__ = [
    "ACTIVE",
    "BITS",
    "COUNTER",
    "DEVIATION",
    "GAUGE",
    "KNOWN",
    "MEAN",
    "SLOPE",
    "SUM",
    "Feed",
    "Rings",
    "read_series",
    "read_windows",
    "take",
    "take_events",
]
