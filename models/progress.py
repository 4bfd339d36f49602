"""What a training job's own progress says: slowdowns, stalls, stragglers, losses that went wrong, and whose fault.

Works on what `collectors/training` reads, one observation a step (or a poll's median). Steps marked as
checkpoint, evaluation or warm-up must not be given to the detectors: they would be the false alarms. Pure.
"""

from __future__ import annotations

import bisect
import math
import statistics
from collections import deque
from collections.abc import Mapping
from typing import Literal

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
    groups: dict[str, list[str]] = {}
    for rank, seconds in compute_s.items():
        if seconds > 0 and math.isfinite(seconds):
            groups.setdefault((roles or {}).get(rank, ""), []).append(rank)
    found: list[Straggler] = []
    for ranks in groups.values():
        if len(ranks) < MIN_PEERS:
            continue
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
    """NaN and infinite losses at once; spikes against the last hundred losses."""

    def __init__(self, window: int = 100, spike_z: float = 8.0) -> None:
        self._losses: deque[float] = deque(maxlen=window)
        self._spike_z = spike_z

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
        if state == "fine":
            self._losses.append(loss)
        return state


class Finding(msgspec.Struct, frozen=True):
    """What the job's progress says now. `kind` is `fine`, `straggler` (ranks named), `slow_job` (all alike: network,
    storage or data, and no reason to save), or `stalled` (ranks named)."""

    kind: Literal["fine", "straggler", "slow_job", "stalled"]
    ranks: tuple[str, ...] = ()
    reason: str = ""

    @property
    def points_at_device(self) -> bool:
        """Whether some device is to be suspected, so that saving may pay."""
        return self.kind == "straggler" or (self.kind == "stalled" and len(self.ranks) == 1)


def judge(shift: Shift | None, stragglers: list[Straggler], stalled_ranks: list[str], ranks: int) -> Finding:
    """Put the detectors together for a job of `ranks` ranks."""
    if stalled_ranks:
        if len(stalled_ranks) < ranks:
            who = ", ".join(stalled_ranks[:4])
            return Finding("stalled", tuple(stalled_ranks), f"{who} finished no step while others did")
        return Finding("stalled", tuple(stalled_ranks), "no rank finishes a step: the job hangs")
    if stragglers:
        worst = stragglers[0]
        return Finding(
            "straggler",
            tuple(s.rank for s in stragglers),
            f"{worst.rank} computes {(worst.ratio - 1) * 100:.0f} % longer than its peers",
        )
    if shift is not None and shift.alarm:
        return Finding(
            "slow_job",
            (),
            f"steps take {(shift.ratio - 1) * 100:.0f} % longer and no rank stands out: network, storage or data",
        )
    return Finding("fine")


def _quantile(ordered: list[float], q: float) -> float:
    """Of a sorted list, by linear interpolation; 0 for an empty one."""
    if not ordered:
        return 0.0
    position = q * (len(ordered) - 1)
    low = int(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


class _RankState(msgspec.Struct):
    step: float = -1.0
    moved: float = 0.0
    compute: float | None = None
    role: str = ""
    bad_losses: float | None = None


class JobProgress:
    """One job's ranks as their agents report them, and what they say together.

    `observe` takes the samples of one rank as they arrive; `judge` is asked once a cycle. Ranks in step share
    their iteration time, so the slowdown of the job is read from one of them, the first that reports it.
    """

    def __init__(self) -> None:
        self._ranks: dict[str, _RankState] = {}
        self._shift = MedianShift()
        self._cusum = ClippedCusum(self._shift)
        self._watch = StragglerWatch()
        self._pacer = ""
        self._last: Shift | None = None
        self._stragglers: list[Straggler] = []
        self._fresh: set[str] = set()
        self.sensitive = 0.0
        """The sensitive channel, a signal for the model: evidence of slower steps, 1 at its own limit."""
        self.bad_losses = 0
        """Steps with a NaN or infinite loss since the job was first seen, all ranks."""

    def observe(self, rank: str, samples: Mapping[str, float], time: float, role: str = "") -> None:
        """Take one rank's `training_*` samples of one poll, read at `time` (seconds, any one clock)."""
        state = self._ranks.get(rank)
        if state is None:
            state = self._ranks[rank] = _RankState(moved=time)
        state.role = role or state.role
        step = samples.get("training_step_total")
        if step is not None and step != state.step:
            state.step, state.moved = step, time - samples.get("training_idle_seconds", 0.0)
        seconds = samples.get("training_iteration_seconds")
        if seconds is not None and seconds > 0 and math.isfinite(seconds):
            self._pacer = self._pacer or rank
            if rank == self._pacer:
                self.sensitive = self._cusum.observe(seconds)
                self._last = self._shift.observe(seconds)
        compute = samples.get("training_compute_seconds")
        if compute is not None:
            state.compute = compute
            self._fresh.add(rank)
        bad = samples.get("training_bad_losses_total")
        if bad is not None:
            if state.bad_losses is not None and bad > state.bad_losses:
                self.bad_losses += int(bad - state.bad_losses)
            state.bad_losses = bad

    def forget(self, rank: str) -> None:
        """A rank that ended as it should."""
        self._ranks.pop(rank, None)
        self._fresh.discard(rank)
        if rank == self._pacer:
            self._pacer = ""

    def judge(self, time: float, longest_marked_s: float = 0.0) -> Finding:
        """What the job's progress says at `time`. `longest_marked_s`: what a checkpoint or evaluation may take."""
        still = [
            rank
            for rank, state in self._ranks.items()
            if stalled(time - state.moved, self._shift.median_seconds, longest_marked_s)
        ]
        if self._fresh and self._fresh >= self._ranks.keys():  # one look at all ranks, no rank twice
            compute = {r: s.compute for r, s in self._ranks.items() if s.compute is not None}
            self._stragglers = self._watch.observe(compute, {r: s.role for r, s in self._ranks.items()})
            self._fresh.clear()
        return judge(self._last, self._stragglers, still, len(self._ranks))
