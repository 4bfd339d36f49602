"""What a training job's own progress says: slowdowns, stalls, stragglers, losses that went wrong, and whose fault.

The detectors, each by itself; `job_progress` puts them together for a job. They work on what `collectors/training`
reads, one observation a step (or a poll's median). Steps marked as checkpoint, evaluation or warm-up must not be given
to them: they would be the false alarms. Pure.
"""

from __future__ import annotations

import bisect
import math
import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec

RECENT_STEPS = 15
BASE_STEPS = 300
MIN_BASE_STEPS = 60
ALARM_Z = 6.0
ALARM_SHIFT = 0.03
"""Median shift: recent against base, on log time. In the trial behind it (30 runs a size) no false alarm in
100,000 steps, and all slowdowns of 5 % found, in 8 steps."""
CUSUM_DRIFT = 0.75
CUSUM_LIMIT = 12.0
CUSUM_CLIP = 4.0
STALL_FACTOR = 5.0
STALL_FLOOR_S = 30.0
"""Short steps stall by five times their median all the time (data loading, Python's own pauses)."""
MIN_PEERS = 4
STRAGGLER_Z = 5.0
STRAGGLER_RATIO = 1.05
STRAGGLER_OBSERVATIONS = 3
_IQR_TO_SIGMA = 1.349
_MEDIAN_TO_MEAN_ERROR = 1.2533
"""The median of n normal values errs by 1.2533 sigma / sqrt(n)."""
_MIN_SIGMA = 1e-3
"""Timers and rounding alone make a thousandth; a steadier base would alarm on nothing."""


class Shift(msgspec.Struct, frozen=True):
    """What the median shift detector holds after an observation. `ratio` is recent time over base time."""

    alarm: bool
    ratio: float
    z: float


class MedianShift:
    """Alarms when steps got slower for good: the median of RECENT_STEPS against that of the BASE_STEPS before.

    While it alarms the base stands still, so a slowdown is not learnt as normal; after BASE_STEPS in alarm the
    job is taken to run so now (another batch size, another phase), and the base begins anew.
    """

    def __init__(self, recent: int = RECENT_STEPS, base: int = BASE_STEPS) -> None:
        self._recent: deque[float] = deque(maxlen=recent)
        self._base: deque[float] = deque()
        self._sorted: list[float] = []
        self._size = base
        self._in_alarm = 0

    def observe(self, seconds: float) -> Shift:
        """Take the time of one unmarked step (above 0)."""
        value = math.log(seconds)
        if len(self._recent) == self._recent.maxlen and not self._in_alarm:
            self._grow(self._recent[0])
        self._recent.append(value)
        if len(self._base) < MIN_BASE_STEPS or len(self._recent) < (self._recent.maxlen or 0):
            return Shift(False, 1.0, 0.0)
        shift = statistics.median(self._recent) - _quantile(self._sorted, 0.5)
        error = self.sigma * _MEDIAN_TO_MEAN_ERROR / math.sqrt(len(self._recent))
        z = shift / error
        alarm = z > ALARM_Z and shift > math.log1p(ALARM_SHIFT)
        self._in_alarm = self._in_alarm + 1 if alarm else 0
        if self._in_alarm > self._size:
            self._begin_anew()
        return Shift(alarm, math.exp(shift), z)

    def plain(self) -> dict[str, Any]:
        """The state as plain values, for `restore`."""
        return {"recent": list(self._recent), "base": list(self._base), "in_alarm": self._in_alarm}

    def restore(self, plain: Mapping[str, Any]) -> None:
        """Go on from what `plain` gave. Raises KeyError, TypeError or ValueError when it is something else."""
        self._recent.extend(float(v) for v in plain["recent"])
        self._base.extend(float(v) for v in plain["base"])
        self._sorted = sorted(self._base)
        self._in_alarm = int(plain["in_alarm"])

    @property
    def sigma(self) -> float:
        """Robust spread of one step's log time about the base."""
        spread = _quantile(self._sorted, 0.75) - _quantile(self._sorted, 0.25)
        return max(_MIN_SIGMA, spread / _IQR_TO_SIGMA)

    @property
    def median_seconds(self) -> float | None:
        """The base's median step, None until there is a base."""
        return math.exp(_quantile(self._sorted, 0.5)) if len(self._base) >= MIN_BASE_STEPS else None

    def _grow(self, value: float) -> None:
        self._base.append(value)
        bisect.insort(self._sorted, value)
        if len(self._base) > self._size:
            del self._sorted[bisect.bisect_left(self._sorted, self._base.popleft())]

    def _begin_anew(self) -> None:
        self._base.clear()
        self._sorted.clear()
        self._recent.clear()
        self._in_alarm = 0


class ClippedCusum:
    """The sensitive channel, for the model and not for alarms: evidence of slower steps, 1 at its own limit.

    Each step's robust z is clipped, so that one long step counts no more than a few; the sum drifts back to 0.
    """

    def __init__(self, base: MedianShift) -> None:
        self._base = base
        self._sum = 0.0

    @property
    def total(self) -> float:
        """The sum over its limit; may be set, to go on from before."""
        return self._sum / CUSUM_LIMIT

    @total.setter
    def total(self, value: float) -> None:
        self._sum = max(0.0, value) * CUSUM_LIMIT

    def observe(self, seconds: float) -> float:
        """Take a step's time before the base does; returns the sum over its limit (0 and above)."""
        usual = self._base.median_seconds
        if usual is None:
            return 0.0
        z = (math.log(seconds) - math.log(usual)) / self._base.sigma
        z = min(CUSUM_CLIP, max(-CUSUM_CLIP, z))
        self._sum = max(0.0, self._sum + z - CUSUM_DRIFT)
        return self._sum / CUSUM_LIMIT


def stalled(idle_s: float, median_s: float | None, longest_marked_s: float = 0.0) -> bool:
    """Whether a rank that finished no step for `idle_s` hangs: five times its median step, and longer than any
    checkpoint or evaluation it is known to take. Unknown pace (None): no verdict."""
    if median_s is None:
        return False
    return idle_s > max(STALL_FACTOR * median_s, STALL_FLOOR_S, 2.0 * longest_marked_s)


class Straggler(msgspec.Struct, frozen=True):
    """A rank whose own compute takes longer than that of its peers. `ratio` is its time over theirs."""

    rank: str
    ratio: float
    z: float


def slower_ranks(compute_s: Mapping[str, float], roles: Mapping[str, str] | None = None) -> list[Straggler]:
    """Ranks slower than their peers of the same role in one observation, slowest first.

    `compute_s` is time before the first collective: in synchronous training all ranks share the step time, so
    only this tells them apart. Roles (pipeline stages) compute different work and are never compared.
    """
    found: list[Straggler] = []
    for ranks in _peers(compute_s, roles):
        logs = {rank: math.log(compute_s[rank]) for rank in ranks}
        middle = statistics.median(logs.values())
        deviation = statistics.median(abs(v - middle) for v in logs.values())
        sigma = max(1.4826 * deviation, _MIN_SIGMA * 2)
        found.extend(
            Straggler(rank, math.exp(value - middle), (value - middle) / sigma)
            for rank, value in logs.items()
            if value - middle > math.log(STRAGGLER_RATIO) and (value - middle) / sigma > STRAGGLER_Z
        )
    return sorted(found, key=lambda s: -s.ratio)


def ratios_to_peers(
    compute_s: Mapping[str, float], roles: Mapping[str, str] | None = None
) -> dict[str, float]:
    """Each rank's compute time over the median of its peers; ranks without enough peers are left out."""
    found = {}
    for ranks in _peers(compute_s, roles):
        middle = statistics.median(compute_s[r] for r in ranks)
        found.update({r: compute_s[r] / middle for r in ranks})
    return found


def _peers(compute_s: Mapping[str, float], roles: Mapping[str, str] | None) -> list[list[str]]:
    """Ranks by role, where there are enough of one."""
    groups: dict[str, list[str]] = {}
    for rank, seconds in compute_s.items():
        if seconds > 0 and math.isfinite(seconds):
            groups.setdefault((roles or {}).get(rank, ""), []).append(rank)
    return [ranks for ranks in groups.values() if len(ranks) >= MIN_PEERS]


class StragglerWatch:
    """Names a rank only when it was slower in STRAGGLER_OBSERVATIONS observations on end: anyone is late once."""

    def __init__(self) -> None:
        self._runs: dict[str, int] = {}

    def observe(
        self, compute_s: Mapping[str, float], roles: Mapping[str, str] | None = None
    ) -> list[Straggler]:
        """Take one observation of all ranks; returns those that stand out for good, slowest first."""
        now = slower_ranks(compute_s, roles)
        self._runs = {s.rank: self._runs.get(s.rank, 0) + 1 for s in now}
        return [s for s in now if self._runs[s.rank] >= STRAGGLER_OBSERVATIONS]


LossState = Literal["fine", "spike", "not_a_number"]


class LossWatch:
    """NaN and infinite losses at once; spikes against the last hundred losses. A loss that stays up for half as many
    is no spike any more, and the watch begins anew."""

    def __init__(self, window: int = 100, spike_z: float = 8.0) -> None:
        self._losses: deque[float] = deque(maxlen=window)
        self._spike_z = spike_z
        self._spikes = 0

    @property
    def losses(self) -> list[float]:
        """The losses it goes by, oldest first."""
        return list(self._losses)

    def restore(self, losses: Sequence[float]) -> None:
        """Go on from such a list."""
        self._losses.extend(losses)

    def observe(self, loss: float) -> LossState:
        """Take one loss. A spike needs both: far outside the spread, and half as much again as usual."""
        if not math.isfinite(loss):
            return "not_a_number"
        state: LossState = "fine"
        if len(self._losses) >= 20:
            middle = statistics.median(self._losses)
            spread = 1.4826 * statistics.median(abs(v - middle) for v in self._losses)
            beyond = loss - middle
            if beyond > self._spike_z * max(spread, 1e-6) and beyond > 0.5 * abs(middle):
                state = "spike"
        self._spikes = self._spikes + 1 if state == "spike" else 0
        if self._spikes * 2 > (self._losses.maxlen or 0):
            self._losses.clear()
            self._spikes, state = 0, "fine"
        if state == "fine":
            self._losses.append(loss)
        return state


def _quantile(ordered: list[float], q: float) -> float:
    """Of a sorted list, by linear interpolation; 0 for an empty one."""
    if not ordered:
        return 0.0
    position = q * (len(ordered) - 1)
    low = int(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)
