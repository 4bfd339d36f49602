"""Rows to learn from: features of devices at moments of a history, with what became of each device afterwards."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from forewarn.models.features import HORIZONS_S, feature_names
from forewarn.models.fleet import Fleet
from forewarn.models.history import History
from forewarn.models.labels import failures_of
from forewarn.models.replay import replay, spacing_of, step_of

SILENT_S = 3600.0
"""A device not read for this long (and two steps) is gone already: nothing is left to foresee."""
DOWN_S = 3600.0
"""Moments this soon after a failure belong to the failure."""


@dataclass
class Dataset:
    """`values` (n x features) float32; per row: `time`, `device` (into `devices`), seconds to the next failure
    (`to_failure`, infinite: none seen), seconds until nothing more is known of the device (`to_censor`), and
    `weight` (how many rows it stands for)."""

    kind: str
    names: tuple[str, ...]
    devices: list[str]
    values: NDArray[np.float32]
    time: NDArray[np.float64]
    device: NDArray[np.int32]
    to_failure: NDArray[np.float64]
    to_censor: NDArray[np.float64]
    weight: NDArray[np.float32]
    step_s: float
    failures: int

    def __len__(self) -> int:
        return len(self.time)

    def select(self, keep: NDArray[np.bool_]) -> Dataset:
        """The rows where `keep` is true."""
        return Dataset(
            self.kind, self.names, self.devices, self.values[keep], self.time[keep], self.device[keep],
            self.to_failure[keep], self.to_censor[keep], self.weight[keep], self.step_s, self.failures,
        )  # fmt: skip


@dataclass
class Fates:
    """What becomes of each device: next and last failure as time goes on, and when it is last known of."""

    failure_times: NDArray[np.float64]
    failure_devices: list[str]
    end: float
    removed: dict[str, float]
    code: dict[str, int] = field(default_factory=dict)
    names: list[str] = field(default_factory=list)
    _next: list[float] = field(default_factory=list)
    _last: list[float] = field(default_factory=list)
    _until: list[float] = field(default_factory=list)
    _queue: dict[str, list[float]] = field(default_factory=dict)
    _position: int = 0

    def __post_init__(self) -> None:
        for time, device in zip(self.failure_times.tolist(), self.failure_devices, strict=True):
            self._queue.setdefault(device, []).append(time)

    def codes(self, devices: Sequence[str], now: float) -> NDArray[np.int32]:
        """Numbers of devices, made on first sight."""
        out = np.empty(len(devices), np.int32)
        for i, device in enumerate(devices):
            code = self.code.get(device)
            if code is None:
                code = self.code[device] = len(self.names)
                self.names.append(device)
                times = self._queue.get(device, [])
                self._next.append(min((t for t in times if t > now), default=np.inf))
                self._last.append(max((t for t in times if t <= now), default=-np.inf))
                self._until.append(self.removed.get(device, self.end))
            out[i] = code
        return out

    def advance(self, now: float) -> None:
        """Failures up to `now` have happened."""
        while self._position < len(self.failure_times) and self.failure_times[self._position] <= now:
            device = self.failure_devices[self._position]
            code = self.code.get(device)
            if code is not None:
                self._last[code] = float(self.failure_times[self._position])
                self._next[code] = min((t for t in self._queue[device] if t > now), default=np.inf)
            self._position += 1

    def of(
        self, codes: NDArray[np.int32]
    ) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
        """Next failure, last failure and end of knowledge of each code."""
        return np.array(self._next)[codes], np.array(self._last)[codes], np.array(self._until)[codes]


def collect(
    history: History,
    kind: str,
    *,
    rows: int = 300_000,
    keep_all_from: float = np.inf,
    keep_all_rows: int = 300_000,
    seed: int = 1,
    watch: Callable[[float], None] | None = None,
) -> Dataset:
    """Replay a history and gather rows. Rows within the longest horizon of a failure are all kept; of the others so
    many that about `rows` come together, weighted to stand for the rest. From `keep_all_from` on every `n`-th moment
    is kept whole (about `keep_all_rows` rows), as the measure of alerts needs. `watch` is told how far it is (0..1).
    """
    failures = failures_of(history, kind)
    first, last = history.span
    table = history.devices
    removed = {d: t for d, t in zip(table["device"], table["removed"], strict=True) if t == t}
    fates = Fates(failures["time"].to_numpy(float), failures["device"].astype(str).tolist(), last, removed)
    step, spacing = step_of(history, kind), spacing_of(history, kind)
    longest = HORIZONS_S[kind][-1]
    moments = max(1.0, (last - first) / spacing)
    early = max(
        1.0, moments * history.device_count * np.clip((keep_all_from - first) / max(1.0, last - first), 0, 1)
    )
    keep = float(min(1.0, rows / early))
    late = moments * history.device_count - early
    stride = max(1, int(np.ceil(late / keep_all_rows))) if np.isfinite(keep_all_from) else 1
    dice = np.random.default_rng(seed)
    fleet = Fleet({})
    engine = fleet.engines[kind]
    last_seen = np.full(0, -np.inf)
    parts: list[tuple[NDArray[np.float32], NDArray[np.float64], NDArray[np.int32], NDArray[np.float64]]] = []
    number = -1
    for moment in replay(history, fleet, step):
        now = moment.now
        fates.advance(now)
        if watch is not None:
            watch((now - first) / max(1.0, last - first))
        seen = fates.codes(moment.fresh, now)
        if len(last_seen) < len(fates.names):
            more = len(fates.names) - len(last_seen)
            last_seen = np.concatenate([last_seen, np.full(more, -np.inf)])
        last_seen[seen] = now
        if kind == "disk" and not moment.fresh:
            continue
        number += 1
        whole = now >= keep_all_from
        if whole and number % stride:
            engine.flush(now)
            continue
        table_now = engine.features(now)
        if not table_now.devices:
            continue
        codes = fates.codes(table_now.devices, now)
        if len(last_seen) < len(fates.names):
            more = len(fates.names) - len(last_seen)
            last_seen = np.concatenate([last_seen, np.full(more, -np.inf)])
        upcoming, past, until = fates.of(codes)
        alive = now - last_seen[codes] <= (max(SILENT_S, 2 * step) if kind != "disk" else 0.0)
        alive &= now - past > DOWN_S
        alive &= until >= now
        if kind == "disk":
            alive &= np.isinf(past)
        near = upcoming - now <= longest
        chance = np.where(near | whole, 1.0, keep)
        taken = np.flatnonzero(alive & (dice.random(len(codes)) < chance))
        if not len(taken):
            continue
        weight = np.where(whole, float(stride), 1.0 / chance[taken])
        numbers = np.column_stack(
            [np.full(len(taken), now), upcoming[taken] - now, until[taken] - now, weight]
        )
        parts.append((table_now.values[taken], numbers[:, 0], codes[taken], numbers[:, 1:]))
    names = feature_names(kind)
    if not parts:
        empty = np.empty(0)
        return Dataset(
            kind, names, [], np.empty((0, len(names)), np.float32), empty, np.empty(0, np.int32), empty, empty,
            np.empty(0, np.float32), spacing, len(failures),
        )  # fmt: skip
    more_numbers = np.concatenate([p[3] for p in parts])
    return Dataset(
        kind,
        names,
        fates.names,
        np.concatenate([p[0] for p in parts]),
        np.concatenate([p[1] for p in parts]),
        np.concatenate([p[2] for p in parts]),
        more_numbers[:, 0],
        more_numbers[:, 1],
        more_numbers[:, 2].astype(np.float32),
        spacing,
        len(failures),
    )
