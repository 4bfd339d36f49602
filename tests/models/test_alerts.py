"""When a risk becomes an alert."""

from __future__ import annotations

import numpy as np
import pytest

from forewarn.models.alerts import DEFAULT_THRESHOLDS, AlertPolicy, AlertState

HORIZONS = (900, 3600, 86_400)
STEP_S = 300.0


def play(policy: AlertPolicy, risks: list[list[float]], step_s: float = STEP_S) -> list[int]:
    """Numbers of the scores at which one device was reported."""
    state = AlertState(policy, HORIZONS)
    row = np.array([0])
    return [i for i, r in enumerate(risks) if state.step(i * step_s, row, np.array([r], np.float32))]


POLICY = AlertPolicy({900: 0.2, 86_400: 0.5}, cool_down_s=3_600.0)
LOW, HIGH = [0.0, 0.0, 0.1], [0.3, 0.3, 0.3]


@pytest.mark.parametrize(
    ("risks", "reported"),
    [
        ([LOW, HIGH, LOW, LOW, LOW], []),
        ([LOW, HIGH, HIGH, HIGH], [2]),
        ([HIGH, LOW, HIGH, LOW], [2]),
        ([[0.95, 0.95, 0.95], LOW], [0]),
        ([[0.0, 0.9, 0.1]] * 4, []),
        ([[0.0, 0.0, 0.6]] * 3, [1]),
        ([[0.2, 0.2, 0.2]] * 3, [1]),
    ],
    ids=["a spike", "it lasts", "two of three", "certain", "no threshold", "long horizon", "just reached"],
)
def test_what_is_reported(risks: list[list[float]], reported: list[int]) -> None:
    assert play(POLICY, risks) == reported


def test_a_device_is_reported_once_while_its_risk_lasts() -> None:
    assert play(POLICY, [HIGH] * 400) == [1]


def test_it_is_reported_again_only_after_its_risk_was_gone_and_the_pause_is_over() -> None:
    gap = [LOW] * 4
    assert play(POLICY, [*[HIGH] * 3, *gap, *[HIGH] * 3]) == [1]
    assert play(POLICY, [*[HIGH] * 3, *gap, *[HIGH] * 3], step_s=1_000.0) == [1, 8]
    half_gone = [[0.15, 0.0, 0.0]] * 4
    assert play(POLICY, [*[HIGH] * 3, *half_gone, *[HIGH] * 3], step_s=1_000.0) == [1]


def test_the_horizon_that_exceeds_its_threshold_the_most_is_named() -> None:
    state = AlertState(POLICY, HORIZONS)
    risk = np.array([[0.25, 0.3, 0.8]], np.float32)
    state.step(0.0, np.array([0]), risk)
    assert state.step(1.0, np.array([0]), risk) == [(0, 2)]


def test_devices_do_not_disturb_each_other_and_may_come_late() -> None:
    state = AlertState(POLICY, HORIZONS)
    both = np.array([HIGH, LOW], np.float32)
    assert state.step(0.0, np.array([0, 1]), both) == []
    assert state.step(1.0, np.array([0, 1]), both) == [(0, 0)]
    assert state.step(2.0, np.array([7]), np.array([[0.99, 0.99, 0.99]], np.float32)) == [(7, 0)]
    assert state.step(3.0, np.empty(0, np.int64), np.empty((0, 3), np.float32)) == []


def test_a_model_brings_its_thresholds_or_the_usual_ones_hold() -> None:
    own = AlertPolicy.of({"alert_threshold_900": 0.07, "alert_threshold_3600": True, "seed": 1}, HORIZONS)
    assert own.thresholds == {900: 0.07}
    assert AlertPolicy.of({}, HORIZONS).thresholds == {h: DEFAULT_THRESHOLDS[h] for h in HORIZONS}


def test_one_score_is_enough_for_what_is_foreseen_by_days() -> None:
    horizons = (86_400, 7 * 86_400, 30 * 86_400)
    state = AlertState(AlertPolicy.of({"alert_threshold_86400": 0.1}, horizons), horizons)
    risk = np.array([[0.2, 0.3, 0.4]], np.float32)
    assert state.step(0.0, np.array([0]), risk) == [(0, 0)]
