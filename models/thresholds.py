"""Where to draw the line for alerts: the lowest thresholds whose false alarms stay within a budget on later time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from forewarn.models.alerts import AlertPolicy, AlertState
from forewarn.models.dataset import Dataset
from forewarn.models.features import HORIZONS_S

BUDGET_PER_1000_DEVICE_DAYS = {"gpu": 4.0, "node": 4.0, "disk": 0.1}
"""False alarms allowed, by kind. Users bear ten for GPUs. About one drive in 5,000 fails a day, so a budget fit for
GPUs would bury true alerts."""
LEAD_S = 900.0
"""How far ahead an alert must come to count as foresight."""
DAY_S = 86_400.0
CANDIDATES = 14


@dataclass(frozen=True)
class Tally:
    """What a policy would have done: failures foreseen at least LEAD_S ahead, all failures, false alarms, true alerts
    and device-days."""

    foreseen: int
    failures: int
    false_alarms: int
    alerts: int
    device_days: float

    @property
    def recall(self) -> float:
        return self.foreseen / self.failures if self.failures else 0.0

    @property
    def false_per_1000_days(self) -> float:
        return 1000.0 * self.false_alarms / self.device_days if self.device_days else 0.0


@dataclass(frozen=True)
class Course:
    """Held-out rows in order of time, moment by moment; made once, played many times."""

    data: Dataset
    rows: list[NDArray[np.int64]]
    times: list[float]
    failures: int
    device_days: float

    @classmethod
    def of(cls, data: Dataset) -> Course:
        order = np.argsort(data.time, kind="stable")
        times = data.time[order]
        edges = np.flatnonzero(np.diff(times, prepend=-np.inf))
        failed = np.isfinite(data.to_failure) & (data.to_failure <= data.to_censor)
        moments = np.round(data.time[failed] + data.to_failure[failed])
        failures = set(zip(data.device[failed].tolist(), moments.tolist(), strict=True))
        days = float(data.weight.sum()) * data.step_s / DAY_S
        return cls(data, np.split(order, edges[1:]), times[edges].tolist(), len(failures), days)


def run_policy(course: Course, risk: NDArray[np.floating], policy: AlertPolicy) -> Tally:
    """Play held-out rows through the alert policy. An alert is true when its device fails within its horizon (at
    least a day); one that comes with less than LEAD_S to go is neither foresight nor a false alarm."""
    data = course.data
    horizons = HORIZONS_S[data.kind]
    state = AlertState(policy, horizons)
    foreseen: set[tuple[int, float]] = set()
    false_alarms = alerts = 0
    for now, rows in zip(course.times, course.rows, strict=True):
        devices = data.device[rows]
        for device, horizon in state.step(now, devices, risk[rows]):
            row = int(rows[int(np.flatnonzero(devices == device)[0])])
            alerts += 1
            ahead = data.to_failure[row]
            if ahead <= max(horizons[horizon], DAY_S):
                if ahead >= LEAD_S:
                    foreseen.add((device, round(float(data.time[row] + ahead))))
            elif data.to_censor[row] > DAY_S / 4:
                false_alarms += 1
    return Tally(len(foreseen), course.failures, false_alarms, alerts, course.device_days)


def choose_thresholds(
    data: Dataset, risk: NDArray[np.float64], budget: float
) -> tuple[dict[int, float], dict[str, float]]:
    """Thresholds by horizon, and what they gave on the held-out rows (`held_out_...`).

    Each horizon in turn gets the lowest threshold that keeps the false alarms of all so far within the budget, the
    longest horizon first: it sees furthest.
    """
    horizons = HORIZONS_S[data.kind]
    chosen: dict[int, float] = {}
    best: Tally | None = None
    if len(data):
        course = Course.of(data)
        for share, horizon in zip((0.7, 0.9, 1.0), sorted(horizons, reverse=True), strict=True):
            column = risk[:, horizons.index(horizon)]
            found = _lowest(course, risk, chosen, horizon, column, budget * share)
            if found is None:
                continue
            threshold, tally = found
            if best is None or tally.foreseen > best.foreseen:
                chosen[horizon], best = threshold, tally
    if not chosen or best is None:
        return {horizons[-1]: 0.5}, {}
    measured = {
        "held_out_recall_15min": best.recall,
        "held_out_false_alarms_per_1000_device_days": best.false_per_1000_days,
        "held_out_failures": float(best.failures),
        "held_out_precision": 1.0 - best.false_alarms / best.alerts if best.alerts else 0.0,
    }
    return chosen, measured


def _lowest(
    course: Course,
    risk: NDArray[np.float64],
    others: Mapping[int, float],
    horizon: int,
    column: NDArray[np.float64],
    budget: float,
) -> tuple[float, Tally] | None:
    """The lowest threshold within budget, by bisection over the ranks of the risks."""
    ranked = np.unique(column[column > 0])
    if not len(ranked):
        return None
    low, high = 0, len(ranked) - 1
    found = None
    for _ in range(CANDIDATES):
        middle = (low + high) // 2
        threshold = float(ranked[middle])
        tally = run_policy(
            course, risk, AlertPolicy.usual({**others, horizon: threshold}, HORIZONS_S[course.data.kind])
        )
        if tally.false_per_1000_days <= budget:
            found, high = (threshold, tally), middle - 1
        else:
            low = middle + 1
        if low > high:
            break
    return found
