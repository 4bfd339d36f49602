"""Base rates: how often a part fails given its group (position, batch, age) and its own history, and nothing else.

Each group has a rate, drawn towards the rate of all; each unit a factor on it that rises with its own failures, the
recent ones the most. How far history counts is fitted, since it differs: repeat offenders rule on some machines and
mean little on others.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources

import numpy as np
from numpy.typing import NDArray

from forewarn.collectors.errors import InputError

DAY_S = 86_400.0
GROUP_WEIGHT = 5.0
"""Failures that a group must have for its own rate to count as much as that of all."""
WEIGHTS = (0.01, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)
"""What one failure of a unit adds to its factor. Never 0: of two units that are alike, the one that failed is worse."""
MEMORIES_DAYS = (60.0, 180.0, 720.0, 1e6)
"""Days after which a failure counts for 1/e; 1e6: for ever."""


@dataclass(frozen=True)
class Units:
    """What is watched, n units: `start`, `end` of watching (seconds), `group` (any text), and the failures as two
    arrays `time` (seconds) and `unit` (index), by time."""

    start: NDArray[np.float64]
    end: NDArray[np.float64]
    group: Sequence[str]
    time: NDArray[np.float64]
    unit: NDArray[np.int64]

    def __post_init__(self) -> None:
        if len(self.unit) and (self.unit.min() < 0 or self.unit.max() >= len(self.start)):
            raise InputError("failures: a unit is named that is not among those watched")
        if (np.diff(self.time) < 0).any():
            raise InputError("failures: must be in order of time")
        if not len(self.start) == len(self.end) == len(self.group):
            raise InputError("units: start, end and group must have one entry each")


@dataclass(frozen=True)
class BaseRates:
    """Fitted rates. `rates`: failures a second by group; `overall` for groups never seen."""

    rates: dict[str, float]
    overall: float
    weight: float
    memory_s: float

    def rate(self, units: Units, now: float) -> NDArray[np.float64]:
        """Failures a second of each unit at `now`, from what happened before `now`; 0 where it is not watched."""
        base = np.array([self.rates.get(g, self.overall) for g in units.group])
        upto = int(np.searchsorted(units.time, now, "left"))
        ago, unit = now - units.time[:upto], units.unit[:upto]
        own = np.bincount(unit, np.exp(-ago / self.memory_s), minlength=len(base))
        rate = base * (1.0 + self.weight * own)
        active = (units.start <= now) & (units.end > now)
        return np.where(active, rate, 0.0)

    def risk(self, units: Units, now: float, horizon_s: float) -> NDArray[np.float64]:
        """Probability of a failure within `horizon_s` of each unit."""
        return -np.expm1(-self.rate(units, now) * horizon_s)


def fit(units: Units, until: float, step_s: float = 14 * DAY_S) -> BaseRates:
    """Fit to what happened before `until`; nothing later is looked at.

    Group rates from all of it; how far a unit's own history counts, by likelihood, step by step. Raises InputError when
    nothing failed before `until`.
    """
    known = int(np.searchsorted(units.time, until, "left"))
    watched = np.maximum(np.minimum(units.end, until) - units.start, 0.0)
    if not known or not watched.sum():
        raise InputError("base rates: no failure before the time given; at least one is needed")
    overall = known / float(watched.sum())
    names, code = np.unique(np.array(units.group, str), return_inverse=True)
    failed = np.bincount(code[units.unit[:known]], minlength=len(names))
    exposed = np.bincount(code, watched, minlength=len(names))
    shrunk = (failed + GROUP_WEIGHT) / (exposed + GROUP_WEIGHT / overall)
    rates = dict(zip(names.tolist(), shrunk.tolist(), strict=True))
    first = float(units.start.min())
    moments = np.arange(first + 0.25 * (until - first), until - step_s, step_s)
    best: tuple[float, BaseRates] | None = None
    for weight, memory in itertools.product(WEIGHTS, sorted(MEMORIES_DAYS, reverse=True)):
        model = BaseRates(rates, overall, weight, memory * DAY_S)
        score = sum(_likelihood(model, units, m, step_s) for m in moments.tolist())
        if best is None or score > best[0] + 1e-9:
            best = score, model
    if best is None:  # never: there is always a weight and a memory to try
        raise InputError("base rates: nothing to choose from")
    return best[1]


def _likelihood(model: BaseRates, units: Units, now: float, step_s: float) -> float:
    """Log likelihood of the failures of one step, up to what is the same for all models."""
    rate = model.rate(units, now)
    low, high = np.searchsorted(units.time, [now, now + step_s], "left")
    happened = np.bincount(units.unit[low:high], minlength=len(rate))
    known = np.maximum(np.minimum(units.end - now, step_s), 0.0)
    active = rate > 0
    # The level of a step (a bad month) tells nothing of who fails in it.
    expected = float((rate[active] * known[active]).sum())
    if not expected or not happened[active].sum():
        return 0.0
    return float((happened[active] * np.log(rate[active] * known[active].clip(1.0) / expected)).sum())


@dataclass(frozen=True)
class PublishedRate:
    """One line of `base_rates.tsv`: failures counted over unit-years in a public record."""

    source: str
    group: str
    failures: int
    unit_years: float
    per_unit_year: float


def published() -> list[PublishedRate]:
    """Rates counted from public records; the file says from which."""
    text = resources.files("forewarn.models").joinpath("base_rates.tsv").read_text()
    lines = [line.split("\t") for line in text.splitlines() if line and not line.startswith("#")]
    return [PublishedRate(s, g, int(n), float(y), float(r)) for s, g, n, y, r in lines[1:]]
