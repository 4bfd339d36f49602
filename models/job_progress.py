"""One training job over time: what its ranks report, and what that says of the job and of the device that stands out.

Puts the detectors of `progress` together. One object a job; pure, and its state can be kept as plain values.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from forewarn.models.progress import (
    ClippedCusum,
    LossState,
    LossWatch,
    MedianShift,
    Shift,
    Straggler,
    StragglerWatch,
    ratios_to_peers,
    stalled,
)

SILENT_AFTER_S = 60.0
"""A rank whose agent has said nothing of it for so long is silent: its node or its agent may be gone."""
FORGET_AFTER_S = 900.0
"""A rank silent for so long is no part of the job any more, unless the job hangs for want of it."""
MARKED_LIMIT_S = 3600.0
"""No checkpoint or evaluation takes longer, unless one did before."""
GAP_MARGIN = 1.5
"""A pause half as long again as any that ended by itself is a hang."""
LONGEST_GAP_S = 600.0
"""What is learnt so ends here: a hang of hours that somebody ended must not hide the next."""
LAG_SMOOTHING = 0.3
"""Weight of the newest look in a rank's lag."""
FRESH_SHARE = 0.9
"""Ranks are compared once so many of them have reported anew."""
LOSS_HELD_S = 600.0
"""A bad loss is told for so long after the last one."""
NAMED = 4
"""Ranks that a reason names."""

Kind = Literal["fine", "straggler", "slow_job", "stalled"]


class Finding(msgspec.Struct, frozen=True):
    """What the job's progress says now. `kind` is `fine`, `straggler` (ranks named), `slow_job` (all alike: network,
    storage or data, and no reason to save), or `stalled` (ranks named when they stand out). `silent`: the ranks named
    no longer report at all, while the others wait."""

    kind: Kind
    ranks: tuple[str, ...] = ()
    reason: str = ""
    silent: bool = False

    @property
    def points_at_device(self) -> bool:
        """Whether some device is to be suspected, so that saving may pay."""
        return self.kind == "straggler" or (self.kind == "stalled" and len(self.ranks) == 1)


class LossFinding(msgspec.Struct, frozen=True):
    """What the losses say. `ranks`: those with a bad loss, when others have none."""

    state: LossState = "fine"
    ranks: tuple[str, ...] = ()
    reason: str = ""


def judge(shift: Shift | None, stragglers: list[Straggler], stalled_ranks: list[str], ranks: int) -> Finding:
    """Put the detectors together for a job of `ranks` ranks."""
    if stalled_ranks:
        if len(stalled_ranks) < ranks:
            return Finding(
                "stalled", tuple(stalled_ranks), f"{_named(stalled_ranks)} finished no step while others did"
            )
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


class _RankState(msgspec.Struct):
    """One rank. Times are on the clock of `observe`. `idle_s`: how long it has finished no step, as last reported."""

    seen: float
    step: float = -1.0
    idle_s: float = 0.0
    marked: bool = False
    compute: float | None = None
    rate: float | None = None
    loss: float | None = None
    role: str = ""
    bad_losses: float | None = None
    bad_at: float | None = None


class JobProgress:
    """One job's ranks as their agents report them, and what they say together.

    `observe` takes the samples of one rank as they arrive; `judge` is asked once a cycle. Ranks in step share
    their iteration time, so the slowdown of the job is read from one of them, the first that reports it. Idle time
    counts as of a rank's last report, so an agent or a service that was away looks like no hang.
    """

    def __init__(self) -> None:
        self._ranks: dict[str, _RankState] = {}
        self._shift = MedianShift()
        self._cusum = ClippedCusum(self._shift)
        self._watch = StragglerWatch()
        self._losses = LossWatch()
        self._pacer = ""
        self._last: Shift | None = None
        self._stragglers: list[Straggler] = []
        self._fresh: set[str] = set()
        self.lag: dict[str, float] = {}
        """Each rank's compute time over that of its peers, smoothed; only with enough peers."""
        self._longest_marked_s = 0.0
        self._longest_gap_s = 0.0
        self._spiked: float | None = None
        self._spike = ""
        self.sensitive = 0.0
        """The sensitive channel, a signal for the model: evidence of slower steps, 1 at its own limit."""
        self.bad_losses = 0
        """Steps with a NaN or infinite loss since the job was first seen, all ranks."""
        self.iteration_s: float | None = None
        """Time of a step as last reported."""

    @property
    def median_s(self) -> float | None:
        """The usual time of a step; None until enough steps were seen."""
        return self._shift.median_seconds

    @property
    def ranks(self) -> list[str]:
        """Ranks that are known, in the order in which they came."""
        return list(self._ranks)

    @property
    def seen(self) -> float:
        """When a rank last reported; minus infinity before."""
        return max((s.seen for s in self._ranks.values()), default=-math.inf)

    @property
    def step(self) -> int | None:
        """The furthest step that a rank has told."""
        furthest = max((s.step for s in self._ranks.values()), default=-1.0)
        return int(furthest) if furthest >= 0 else None

    @property
    def loss(self) -> float | None:
        """The mean of the last finite losses of all ranks; None when none is told."""
        losses = [s.loss for s in self._ranks.values() if s.loss is not None]
        return sum(losses) / len(losses) if losses else None

    @property
    def samples_per_second(self) -> float | None:
        """Samples a second of all ranks together; None when none is told."""
        rates = [s.rate for s in self._ranks.values() if s.rate is not None]
        return sum(rates) if rates else None

    @property
    def is_marked(self) -> bool:
        """Whether the job saves, evaluates or warms up, by the word of one of its ranks."""
        return any(s.marked for s in self._ranks.values())

    def silent(self, time: float) -> list[str]:
        """Ranks that nobody has reported lately."""
        return [r for r, s in self._ranks.items() if time - s.seen > SILENT_AFTER_S]

    def observe(self, rank: str, samples: Mapping[str, float], time: float, role: str = "") -> None:
        """Take one rank's `training_*` samples of one poll, read at `time` (seconds, any one clock)."""
        state = self._ranks.get(rank)
        if state is None:
            state = self._ranks[rank] = _RankState(seen=time)
        elif time < state.seen:
            return  # late: newer is known
        state.role = role or state.role
        self._move(state, samples, time)
        state.seen = time
        seconds = samples.get("training_iteration_seconds")
        if seconds is not None and seconds > 0 and math.isfinite(seconds):
            self._pace(rank, seconds, time)
        compute = samples.get("training_compute_seconds")
        if compute is not None:
            state.compute = compute
            self._fresh.add(rank)
        state.rate = samples.get("training_samples_per_second", state.rate)
        self._take_losses(rank, state, samples, time)

    def _move(self, state: _RankState, samples: Mapping[str, float], time: float) -> None:
        """Steps, idle time and phases; what pauses there were that ended by themselves."""
        step = samples.get("training_step_total")
        idle = samples.get("training_idle_seconds", 0.0)
        if step is not None and step != state.step:
            if state.step >= 0:
                # It was idle at least as long as last reported; the rest until the new step is not known.
                if state.marked:
                    self._longest_marked_s = max(self._longest_marked_s, state.idle_s)
                else:
                    self._longest_gap_s = min(LONGEST_GAP_S, max(self._longest_gap_s, state.idle_s))
            state.step = step
            state.idle_s = idle
        elif step is not None:
            # Agents that do not tell idle time leave it to the times of the reports.
            known = "training_idle_seconds" in samples
            state.idle_s = idle if known else state.idle_s + max(0.0, time - state.seen)
        state.marked = samples.get("training_marked", 0.0) > 0

    def _pace(self, rank: str, seconds: float, time: float) -> None:
        pacer = self._ranks.get(self._pacer)
        if pacer is None or time - pacer.seen > SILENT_AFTER_S:
            self._pacer = rank
        if rank == self._pacer:
            self.iteration_s = seconds
            self.sensitive = self._cusum.observe(seconds)
            self._last = self._shift.observe(seconds)

    def _take_losses(self, rank: str, state: _RankState, samples: Mapping[str, float], time: float) -> None:
        bad = samples.get("training_bad_losses_total")
        if bad is not None:
            if state.bad_losses is not None and bad > state.bad_losses:
                self.bad_losses += int(bad - state.bad_losses)
                state.bad_at = time
            state.bad_losses = bad
        loss = samples.get("training_loss")
        if loss is None:
            return
        is_new = loss != state.loss
        state.loss = loss
        if rank == self._pacer and is_new and self._losses.observe(loss) == "spike":
            self._spiked, self._spike = time, f"the loss rose to {loss:.4g}"

    def forget(self, rank: str) -> None:
        """A rank that ended as it should."""
        self._ranks.pop(rank, None)
        self._fresh.discard(rank)
        self.lag.pop(rank, None)
        if rank == self._pacer:
            self._pacer = ""

    def judge(self, time: float, longest_marked_s: float = 0.0) -> Finding:
        """What the job's progress says at `time`. `longest_marked_s`: what a checkpoint or evaluation may take."""
        silent = set(self.silent(time))
        live = {r: s for r, s in self._ranks.items() if r not in silent}
        still = [r for r, s in live.items() if self._is_still(s, longest_marked_s)]
        if not still:
            for rank in [r for r in silent if time - self._ranks[r].seen > FORGET_AFTER_S]:
                self.forget(rank)
        if not live:
            return Finding("fine")
        self._compare(live)
        found = judge(self._last, [s for s in self._stragglers if s.rank in live], still, len(live))
        return self._blame(found, sorted(silent), live)

    def _is_still(self, state: _RankState, longest_marked_s: float) -> bool:
        if state.marked:
            return self.median_s is not None and state.idle_s > max(
                MARKED_LIMIT_S, 2.0 * self._longest_marked_s, 2.0 * longest_marked_s
            )
        return state.idle_s > GAP_MARGIN * self._longest_gap_s and stalled(
            state.idle_s, self.median_s, longest_marked_s
        )

    def _compare(self, live: Mapping[str, _RankState]) -> None:
        """One look at all ranks together, none twice."""
        timed = [r for r, s in live.items() if s.compute is not None]
        fresh = self._fresh & live.keys()
        if not fresh or len(fresh) < FRESH_SHARE * len(timed):
            return
        compute = {r: s.compute for r, s in live.items() if r in fresh and s.compute is not None}
        roles = {r: live[r].role for r in compute}
        self._stragglers = self._watch.observe(compute, roles)
        ratios = ratios_to_peers(compute, roles)
        self.lag = {
            r: ratio if r not in self.lag else self.lag[r] + LAG_SMOOTHING * (ratio - self.lag[r])
            for r, ratio in ratios.items()
        }
        self._fresh.clear()

    def _blame(self, found: Finding, silent: list[str], live: Mapping[str, _RankState]) -> Finding:
        """When all hang: those that no longer report at all, or are a step behind the others, are to blame."""
        if found.kind != "stalled" or len(found.ranks) < len(live):
            return found
        if silent:
            return Finding(
                "stalled",
                tuple(silent),
                f"{_named(silent)} no longer report, and all others wait",
                silent=True,
            )
        steps = sorted(s.step for s in live.values())
        usual = steps[len(steps) // 2]
        behind = [r for r, s in live.items() if 0 <= s.step < usual]
        if behind and len(behind) * 4 <= len(live):
            return Finding(
                "stalled", tuple(behind), f"all hang, and {_named(behind)} did a step less than the others"
            )
        return Finding("stalled", (), found.reason)

    def judge_loss(self, time: float) -> LossFinding:
        """What the losses say at `time`."""
        bad = [r for r, s in self._ranks.items() if s.bad_at is not None and time - s.bad_at <= LOSS_HELD_S]
        if bad:
            told = [r for r, s in self._ranks.items() if s.bad_losses is not None]
            alone = len(bad) * 4 <= len(told)
            who = f"of {_named(bad)} alone" if alone else "of most ranks" if len(bad) > 1 else f"of {bad[0]}"
            return LossFinding("not_a_number", tuple(bad) if alone else (), f"the loss {who} is not a number")
        if self._spiked is not None and time - self._spiked <= LOSS_HELD_S:
            return LossFinding("spike", (), self._spike)
        return LossFinding()

    # Keeping -----------------------------------------------------------------------------------------------------

    def plain(self) -> dict[str, Any]:
        """The state as plain values, for `of`."""
        return {
            "ranks": {r: msgspec.to_builtins(s) for r, s in self._ranks.items()},
            "shift": self._shift.plain(),
            "cusum": self._cusum.total,
            "losses": self._losses.losses,
            "pacer": self._pacer,
            "longest_marked_s": self._longest_marked_s,
            "longest_gap_s": self._longest_gap_s,
            "bad_losses": self.bad_losses,
            "iteration_s": self.iteration_s,
        }

    @classmethod
    def of(cls, plain: Mapping[str, Any]) -> JobProgress:
        """What `plain` gave. Raises KeyError, TypeError or ValueError when it is something else."""
        job = cls()
        job._ranks = msgspec.convert(plain["ranks"], dict[str, _RankState])
        job._shift.restore(plain["shift"])
        job._cusum.total = float(plain["cusum"])
        job._losses.restore([float(v) for v in plain["losses"]])
        job._pacer = str(plain["pacer"])
        job._longest_marked_s = float(plain["longest_marked_s"])
        job._longest_gap_s = float(plain["longest_gap_s"])
        job.bad_losses = int(plain["bad_losses"])
        job.iteration_s = plain["iteration_s"]
        return job


def _named(ranks: list[str]) -> str:
    more = len(ranks) - NAMED
    return ", ".join(ranks[:NAMED]) + (f" and {more} more" if more > 0 else "")
