"""Calibration: probabilities that come true, and a ranking that survives."""

from __future__ import annotations

import numpy as np
import pytest

from forewarn.models.calibration import fit_calibration


def drawn(rate: float, n: int, seed: int = 3) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Raw scores that are four times too high, and what came of them."""
    dice = np.random.default_rng(seed)
    truth = np.clip(dice.gamma(0.5, rate * 2, n), 0, 0.2)
    return np.clip(truth * 4, 0, 1), (dice.random(n) < truth).astype(float), np.ones(n)


@pytest.mark.parametrize(("rate", "n"), [(0.02, 40_000), (0.002, 20_000)])
def test_the_mean_risk_is_the_share_that_failed(rate: float, n: int) -> None:
    raw, label, weight = drawn(rate, n)
    curve = fit_calibration(raw, label, weight)
    assert np.interp(raw, curve.x, curve.y).mean() == pytest.approx(label.mean(), rel=0.1)


def test_high_risks_come_true_as_often_as_they_say_on_data_not_seen() -> None:
    curve = fit_calibration(*drawn(0.02, 40_000))
    raw, label, _ = drawn(0.02, 40_000, seed=4)
    risk = np.interp(raw, curve.x, curve.y)
    top = risk > np.quantile(risk, 0.9)
    assert risk[top].mean() == pytest.approx(label[top].mean(), rel=0.15)


@pytest.mark.parametrize("positives", [20, 400])
def test_what_ranks_higher_stays_higher(positives: int) -> None:
    dice = np.random.default_rng(1)
    label = np.zeros(5_000)
    label[:positives] = 1
    raw = np.clip(dice.beta(1, 60, 5_000) + label * dice.beta(2, 20, 5_000), 0, 1)
    curve = fit_calibration(raw, label, np.ones(5_000))
    assert (np.diff(curve.x) > 0).all()
    assert (np.diff(curve.y) >= 0).all()
    assert min(curve.y) >= 0
    assert max(curve.y) <= 1
    order = np.sort(np.unique(raw))[-200:]
    risk = np.interp(order, curve.x, curve.y)
    assert (np.diff(risk) >= 0).all()
    assert len(np.unique(risk)) > 100


def test_weights_stand_for_rows() -> None:
    raw, label, weight = drawn(0.02, 20_000)
    keep = (label > 0) | (np.arange(len(raw)) % 4 == 0)
    thinned = fit_calibration(raw[keep], label[keep], np.where(label > 0, weight, 4.0)[keep])
    whole = fit_calibration(raw, label, weight)
    points = np.quantile(raw, [0.5, 0.9, 0.99])
    assert np.interp(points, thinned.x, thinned.y) == pytest.approx(
        np.interp(points, whole.x, whole.y), rel=0.25
    )


@pytest.mark.parametrize("label", [np.zeros(50), np.ones(50)])
def test_with_nothing_to_go_by_raw_risks_stay(label: np.ndarray) -> None:
    curve = fit_calibration(np.linspace(0, 1, 50), label, np.ones(50))
    assert (curve.x, curve.y) == ([0.0, 1.0], [0.0, 1.0])
