"""When a risk becomes an alert. Pure; the same for the service and the back-test.

A device is reported when its risk at some horizon has reached that horizon's threshold in `enter_of` of the last
`enter_within` scores, and once only: again when its risk has been below half of every threshold for a while.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

LEAVE_SHARE = 0.5
SLOW_S = 86_400
"""Kinds whose shortest horizon is at least this are read rarely."""
DEFAULT_THRESHOLDS = {900: 0.2, 3600: 0.3, 86_400: 0.5, 7 * 86_400: 0.5, 30 * 86_400: 0.5}
"""For models that bring none of their own."""


@dataclass(frozen=True)
class AlertPolicy:
    """`thresholds`: horizon in seconds -> probability; a horizon without one never raises an alert.

    `cool_down_s`: least time between two alerts of a device. `certain`: one score is enough at this risk.
    """

    thresholds: Mapping[int, float]
    enter_of: int = 2
    enter_within: int = 3
    cool_down_s: float = 86_400.0
    certain: float = 0.9

    @classmethod
    def of(
        cls, parameters: Mapping[str, object], horizons_s: Sequence[int], cool_down_s: float = 86_400.0
    ) -> AlertPolicy:
        """The policy that a model's manifest asks for (`alert_threshold_SECONDS`), else the defaults."""
        found = {h: parameters.get(f"alert_threshold_{h}") for h in horizons_s}
        known = {
            h: float(v) for h, v in found.items() if isinstance(v, int | float) and not isinstance(v, bool)
        }
        if not known:
            known = {h: DEFAULT_THRESHOLDS[h] for h in horizons_s if h in DEFAULT_THRESHOLDS}
        return cls.usual(known, horizons_s, cool_down_s)

    @classmethod
    def usual(
        cls, thresholds: Mapping[int, float], horizons_s: Sequence[int], cool_down_s: float = 86_400.0
    ) -> AlertPolicy:
        """The policy of a kind with these horizons. What is foreseen by days, as disks are, may be read once a week and
        does not flicker: one score is enough. And a drive in a bad way stays so: once in the longest horizon."""
        if min(horizons_s) >= SLOW_S:
            return cls(thresholds, enter_of=1, cool_down_s=max(cool_down_s, horizons_s[-1]))
        return cls(thresholds, cool_down_s=cool_down_s)


@dataclass
class AlertState:
    """Which devices are raised. `step` is told every score; devices are rows that the caller numbers."""

    policy: AlertPolicy
    horizons_s: Sequence[int]
    _recent: NDArray[np.int8] = field(default_factory=lambda: np.zeros((0, 0), np.int8))
    _raised: NDArray[np.bool_] = field(default_factory=lambda: np.zeros(0, np.bool_))
    _when: NDArray[np.float64] = field(default_factory=lambda: np.zeros(0))
    _turn: int = 0

    def __post_init__(self) -> None:
        limits = [self.policy.thresholds.get(h, np.inf) for h in self.horizons_s]
        self._limits = np.array(limits, np.float64)

    def _grow(self, count: int) -> None:
        more = count - len(self._raised)
        if more > 0:
            self._recent = np.concatenate(
                [
                    self._recent.reshape(-1, self.policy.enter_within),
                    np.zeros((more, self.policy.enter_within), np.int8),
                ]
            )
            self._raised = np.concatenate([self._raised, np.zeros(more, np.bool_)])
            self._when = np.concatenate([self._when, np.full(more, -np.inf)])

    def step(
        self, now: float, rows: NDArray[np.integer], risk: NDArray[np.floating]
    ) -> list[tuple[int, int]]:
        """Take in the scores of one moment: `rows` (n) and `risk` (n x horizons). Returns (row, horizon number) of
        each device that is to be reported now, by the horizon that exceeds its threshold the most."""
        if not len(rows):
            return []
        self._grow(int(rows.max()) + 1)
        share = risk / self._limits
        best = share.argmax(axis=1)
        most = share[np.arange(len(rows)), best]
        top = risk[np.arange(len(rows)), best]
        self._recent[rows, self._turn] = most >= 1.0
        self._turn = (self._turn + 1) % self.policy.enter_within
        often = self._recent[rows].sum(axis=1)
        enter = (most >= 1.0) & ((often >= self.policy.enter_of) | (top >= self.policy.certain))
        raised = self._raised[rows]
        leave = raised & (most < LEAVE_SHARE) & (often == 0)
        self._raised[rows[leave]] = False
        new = enter & ~raised & (now - self._when[rows] >= self.policy.cool_down_s)
        self._raised[rows[new]] = True
        self._when[rows[new]] = now
        return [(int(rows[i]), int(best[i])) for i in np.flatnonzero(new)]
