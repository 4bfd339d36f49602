"""When a job should save, and whether it should leave a node: the decision, pure.

Act when the expected loss of not acting exceeds what acting costs, both in GPU-seconds. With the chance of failure p,
the age of the last checkpoint and the cost of a save C, saving pays when p * age > C: the published rule "trust a
prediction only when the last save is older than C / p" (Aupy, Robert, Vivien, Zaidouni 2014). Moving off the node
avoids downtime and recovery too: it pays when p * (age + downtime + recovery) > save + swap.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from forewarn.models.checkpointing import Costs, drain_pays, trust_threshold_s, window_period_s

WINDOW_S = 900.0
"""The time ahead that counts: failures later than this are left to a later decision or a regular save."""
MIN_EXCESS = 0.01
"""A device counts when its chance exceeds that of its peers by this; the rest is what regular saves are for."""
UNASKED_DRAIN_FLOOR = 0.5
"""A job that never said what a swap costs is asked to leave a node only above this chance."""
COMMON_CAUSE_SHARE, COMMON_CAUSE_MIN = 0.25, 4
"""More than this share of a job's devices (and at least so many) rising together have one cause; a swap won't help."""


@dataclass(frozen=True)
class DeviceRisk:
    """A device of the job. `risk`: horizon in seconds to probability; `base`: the same for a usual device of its kind.

    `fatal`: a rule says that it has failed, or is about to for certain.
    """

    device: str
    risk: Mapping[int, float]
    base: Mapping[int, float] = field(default_factory=dict)
    fatal: bool = False


@dataclass(frozen=True)
class JobCosts:
    """What the job pays, in seconds. `age_s`: since the last checkpoint. `swap_s` None: it never said."""

    age_s: float
    save_s: float
    recovery_s: float
    downtime_s: float = 0.0
    swap_s: float | None = None
    gpus: int = 1

    def costs(self) -> Costs:
        swap_s = Costs.swap_s if self.swap_s is None else self.swap_s
        return Costs(self.save_s, self.recovery_s, self.downtime_s, swap_s)


@dataclass(frozen=True)
class Decision:
    """What to ask of the job: `action` is empty (nothing), `checkpoint`, `checkpoint_and_drain` or `drain`.

    `loss_gpu_s` is what not acting is expected to lose, `cost_gpu_s` what acting costs. `devices`: those that count,
    the worst first. `common_cause`: so many rise together that one thing must be behind it.
    """

    action: str
    chance: float
    loss_gpu_s: float
    cost_gpu_s: float
    devices: tuple[str, ...]
    common_cause: bool = False
    why: str = ""


def chance_within(risk: Mapping[int, float], window_s: float) -> float:
    """The chance of failure within `window_s`, from probabilities by horizon, at a constant rate inside a horizon."""
    if not risk:
        return 0.0
    longer = [h for h in risk if h >= window_s]
    horizon = min(longer) if longer else max(risk)
    chance = min(max(risk[horizon], 0.0), 1.0)
    if horizon == window_s or chance >= 1.0:
        return chance
    return -_expm1_of(chance, window_s / horizon)


def _expm1_of(chance: float, share: float) -> float:
    """`(1 - chance) ** share - 1`, exact for small chances too."""
    return math.expm1(share * math.log1p(-chance))


def together(chances: Sequence[float]) -> float:
    """The chance that at least one of several independent things happens."""
    none = 1.0
    for chance in chances:
        none *= 1.0 - chance
    return 1.0 - none


def excess(device: DeviceRisk, window_s: float) -> float:
    """A device's chance beyond what is usual for its kind."""
    chance, usual = chance_within(device.risk, window_s), chance_within(device.base, window_s)
    return max(0.0, (chance - usual) / (1.0 - usual)) if usual < 1.0 else 0.0


def save_pays(chance: float, age_s: float, save_s: float) -> bool:
    """The published rule."""
    return chance > 0.0 and age_s > trust_threshold_s(save_s, chance)


def decide(
    job: JobCosts, devices: Sequence[DeviceRisk], window_s: float = WINDOW_S, total: int | None = None
) -> Decision:
    """Weigh what may be lost against what a save, or a save and a swap, costs.

    Devices whose highest risk is below MIN_EXCESS may be left out of `devices`; `total` then tells how many there are.
    """
    chances = {d.device: 1.0 if d.fatal else excess(d, window_s) for d in devices}
    counted = sorted((d for d in chances if chances[d] >= MIN_EXCESS), key=lambda d: (-chances[d], d))
    fatal = any(d.fatal for d in devices)
    chance = together([chances[d] for d in counted])
    if not counted:
        return Decision("", 0.0, 0.0, 0.0, (), why="no device stands out")
    common = len(counted) >= COMMON_CAUSE_MIN and len(counted) > COMMON_CAUSE_SHARE * (total or len(devices))
    action = _action(job, chance, fatal, common)
    leaving = action.endswith("drain")
    loss_s = chance * (job.age_s + (job.downtime_s + job.recovery_s if leaving else 0.0))
    save_s = min(job.save_s, job.age_s) if action == "drain" else job.save_s
    cost_s = save_s + (job.costs().swap_s if leaving else 0.0)
    return Decision(
        action,
        chance,
        loss_s * job.gpus,
        cost_s * job.gpus,
        tuple(counted),
        common,
        _why(job, action, chance, fatal),
    )


def _action(job: JobCosts, chance: float, fatal: bool, common: bool) -> str:
    may_leave = fatal or (not common and (job.swap_s is not None or chance >= UNASKED_DRAIN_FLOOR))
    leaving_pays = may_leave and (fatal or drain_pays(chance, job.age_s, job.costs()))
    if leaving_pays:
        # With less done since the last save than a save takes, doing it again is cheaper.
        return "drain" if job.age_s < job.save_s and not fatal else "checkpoint_and_drain"
    return "checkpoint" if fatal or save_pays(chance, job.age_s, job.save_s) else ""


def _why(job: JobCosts, action: str, chance: float, fatal: bool) -> str:
    if fatal:
        return "a device has failed or is certain to"
    threshold_s = trust_threshold_s(job.save_s, chance)
    relation = "older" if job.age_s > threshold_s else "not older"
    return (
        f"the last checkpoint is {job.age_s:.0f} s old, {relation} than save cost over chance ({threshold_s:.0f} s)"
        + ("; leaving the node pays as well" if action.endswith("drain") else "")
    )


def cool_down_s(save_s: float, chance: float, window_s: float = WINDOW_S) -> float:
    """Seconds between saves while a risk lasts: the period inside a prediction window."""
    return window_period_s(window_s, save_s, min(1.0, max(chance, MIN_EXCESS)))
