"""The closed forms against published check points: mtbf 7200 s, no downtime."""

from __future__ import annotations

import math

import pytest

from forewarn.models.checkpointing import (
    Costs,
    Predictor,
    best_period_s,
    drain_pays,
    drain_waste,
    exact_share,
    trust_threshold_s,
    waste,
    window_period_s,
)

MTBF_S = 7200.0
SLOW = Costs(save_s=120, recovery_s=1500)
FAST = Costs(save_s=35, recovery_s=480)
GOOD = Predictor(recall=0.75, precision=0.8)


@pytest.mark.parametrize(
    ("save_s", "recall", "period_s"), [(120, 0.0, 1314.534), (35, 0.0, 709.930), (35, 0.75, 1419.859)]
)
def test_best_period(save_s: float, recall: float, period_s: float) -> None:
    assert best_period_s(MTBF_S, save_s, recall) == pytest.approx(period_s, abs=1e-3)


def test_no_regular_save_is_needed_when_every_failure_is_foreseen() -> None:
    assert best_period_s(MTBF_S, 35, 1.0) == math.inf


@pytest.mark.parametrize(("precision", "age_s"), [(0.8, 43.75), (0.2, 175.0), (0.0, math.inf)])
def test_trust_threshold(precision: float, age_s: float) -> None:
    assert trust_threshold_s(35, precision) == age_s


@pytest.mark.parametrize(
    ("period_s", "costs", "predictor", "share"),
    [
        (1314.534, SLOW, Predictor(), 0.363556),
        (709.930, FAST, Predictor(), 0.159551),
        (1419.859, FAST, GOOD, 0.118093),
    ],
)
def test_waste(period_s: float, costs: Costs, predictor: Predictor, share: float) -> None:
    assert waste(period_s, MTBF_S, costs, predictor) == pytest.approx(share, abs=2e-6)


@pytest.mark.parametrize(("swap_s", "share"), [(120, 0.084634), (60, 0.077014)])
def test_drain_waste(swap_s: float, share: float) -> None:
    assert drain_waste(1420, MTBF_S, Costs(35, 480, swap_s=swap_s), GOOD) == pytest.approx(share, abs=1e-6)


@pytest.mark.parametrize(("costs", "share"), [(SLOW, 0.672512), (FAST, 0.846259)])
def test_exact_share(costs: Costs, share: float) -> None:
    period_s = best_period_s(MTBF_S, costs.save_s)
    assert exact_share(period_s, MTBF_S, costs) == pytest.approx(share, abs=1e-6)


def test_window_period() -> None:
    assert window_period_s(900, 35, 0.8) == pytest.approx(217.371, abs=1e-3)


def test_drain_needs_more_certainty_the_longer_the_swap_takes() -> None:
    def break_even(swap_s: float) -> float:
        return next(p / 100 for p in range(1, 101) if drain_pays(p / 100, 355, Costs(35, 480, swap_s=swap_s)))

    assert break_even(60) < break_even(120) < break_even(300)
    assert 0.05 < break_even(60) < 0.2
    assert 0.3 < break_even(300) < 0.5
