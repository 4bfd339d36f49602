"""From raw scores to probabilities that can be believed, fitted on later time; kept as a plain table."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from sklearn.isotonic import IsotonicRegression
from sklearn.linear_model import LogisticRegression

from forewarn.models.registry import Calibration

TINY = 1e-7
ENOUGH_FOR_STEPS = 60
"""Positive rows from which isotonic regression has something to go by; below, a logistic curve is all there is."""
POINTS = 64


def fit_calibration(
    raw: NDArray[np.float64], label: NDArray[np.float64], weight: NDArray[np.float64]
) -> Calibration:
    """A rising table from raw probability to calibrated probability.

    Mostly isotonic where there are positives enough, with a share of a logistic curve, so that two risks that differ
    still differ afterwards: ranking must not be lost to calibration. Without positives: the identity.
    """
    positives = int(label.sum())
    if positives < 5 or positives == len(label):
        return Calibration(x=[0.0, 1.0], y=[0.0, 1.0])
    logit = _logit(raw)
    curve = LogisticRegression(C=1e6).fit(logit[:, None], label, sample_weight=weight)
    slope = max(float(curve.coef_[0, 0]), 0.05)
    grid = np.quantile(raw, np.linspace(0, 1, POINTS))
    tops = np.linspace(grid[-1], 1.0, 6)[1:] if grid[-1] < 1 else np.empty(0)
    x = np.unique(np.concatenate([[0.0], grid, np.sort(raw)[-POINTS:], tops, [1.0]]))
    smooth = _expit(slope * _logit(x) + float(curve.intercept_[0]))
    if positives >= ENOUGH_FOR_STEPS:
        steps = IsotonicRegression(y_min=0.0, y_max=1.0, out_of_bounds="clip").fit(
            raw, label, sample_weight=weight
        )
        y = 0.8 * np.asarray(steps.predict(x), float) + 0.2 * smooth
    else:
        y = smooth
    y = np.maximum.accumulate(np.clip(y, 0.0, 1.0))
    return Calibration(x=[float(v) for v in x], y=[float(v) for v in y])


def _logit(p: NDArray[np.float64]) -> NDArray[np.float64]:
    clipped = np.clip(p, TINY, 1 - TINY)
    out: NDArray[np.float64] = np.log(clipped / (1 - clipped))
    return out


def _expit(v: NDArray[np.float64]) -> NDArray[np.float64]:
    out: NDArray[np.float64] = 1.0 / (1.0 + np.exp(-v))
    return out
