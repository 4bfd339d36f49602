"""Alert thresholds: the lowest line that keeps false alarms within the budget."""

from __future__ import annotations

import numpy as np
import pytest

from forewarn.models.alerts import AlertPolicy
from forewarn.models.dataset import Dataset
from forewarn.models.thresholds import Course, choose_thresholds, run_policy

STEP_S = 300.0
HORIZONS = (900, 3600, 86_400)
DAY_S = 86_400.0


def fleet(
    risk_of: dict[int, float], failing: dict[int, float], devices: int = 10, steps: int = 100
) -> Dataset:
    """Devices scored at every step; `failing`: device -> moment of failure in seconds."""
    time = np.repeat(np.arange(steps) * STEP_S, devices)
    device = np.tile(np.arange(devices, dtype=np.int32), steps)
    fails = np.array([failing.get(int(d), np.inf) for d in device])
    keep = time < fails
    to_failure = (fails - time)[keep]
    n = int(keep.sum())
    return Dataset(
        "gpu", ("a",), [f"d{i}" for i in range(devices)], np.zeros((n, 1), np.float32), time[keep], device[keep],
        to_failure, np.full(n, 10 * DAY_S), np.ones(n, np.float32), STEP_S, len(failing),
    )  # fmt: skip


def risks(data: Dataset, level: dict[int, float], others: float = 0.01) -> np.ndarray:
    column = np.array([level.get(int(d), others) for d in data.device])
    return np.column_stack([column] * 3)


def test_foreseen_failures_and_false_alarms_are_counted_once() -> None:
    data = fleet({}, {0: 20_000.0, 1: 20_000.0})
    risk = risks(data, {0: 0.8, 5: 0.7})
    tally = run_policy(Course.of(data), risk, AlertPolicy({900: 0.5}))
    assert (tally.foreseen, tally.failures, tally.false_alarms, tally.alerts) == (1, 2, 1, 2)
    assert tally.recall == 0.5
    assert tally.device_days == pytest.approx(len(data) * STEP_S / DAY_S)


def test_an_alert_that_comes_late_is_neither_foresight_nor_false() -> None:
    data = fleet({}, {0: 20_000.0})
    risk = risks(data, {})
    risk[(data.device == 0) & (data.to_failure < 800), :] = 0.8
    tally = run_policy(Course.of(data), risk, AlertPolicy({900: 0.5}))
    assert (tally.foreseen, tally.false_alarms, tally.alerts) == (0, 0, 1)


def test_the_line_is_as_low_as_the_budget_allows() -> None:
    failing = dict.fromkeys(range(4), 25000.0)
    data = fleet({}, failing)
    # Two failing devices stand out; the other two look like two healthy ones.
    risk = risks(data, {0: 0.8, 1: 0.7, 2: 0.3, 3: 0.3, 8: 0.31, 9: 0.32})
    strict, _ = choose_thresholds(data, risk, budget=1.0)
    loose, measured = choose_thresholds(data, risk, budget=10_000.0)
    few = run_policy(Course.of(data), risk, AlertPolicy(strict))
    all_of_them = run_policy(Course.of(data), risk, AlertPolicy(loose))
    assert (few.foreseen, few.false_alarms) == (2, 0)
    assert all_of_them.foreseen == 4
    assert measured["held_out_recall_15min"] == 1.0
    assert measured["held_out_failures"] == 4


def test_nothing_held_out_leaves_a_plain_threshold() -> None:
    data = fleet({}, {}).select(np.zeros(1000, bool))
    assert choose_thresholds(data, np.empty((0, 3)), budget=4.0) == ({86_400: 0.5}, {})
