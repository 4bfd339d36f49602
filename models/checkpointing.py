"""The theory of checkpoints with a failure predictor, in closed form. Pure; all times in seconds, shares from 0 to 1.

Sources: Young 1974; Daly 2006; Aupy, Robert, Vivien, Zaidouni, "Checkpointing algorithms and fault prediction" (2014).
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Costs:
    """What a job pays, in seconds.

    `save_s`: a regular checkpoint. `protective_save_s`: a checkpoint asked for by an alert (None: as a regular one).
    `recovery_s`: from a failure to the first new step. `downtime_s`: before recovery can begin. `swap_s`: a planned
    move off a node that still works.
    """

    save_s: float
    recovery_s: float
    downtime_s: float = 0.0
    swap_s: float = 120.0
    protective_save_s: float | None = None

    @property
    def on_alert_s(self) -> float:
        return self.save_s if self.protective_save_s is None else self.protective_save_s


@dataclass(frozen=True)
class Predictor:
    """Measured quality: the share of failures announced in time, and the share of alerts that come true."""

    recall: float = 0.0
    precision: float = 1.0

    @property
    def useful(self) -> bool:
        return self.recall > 0.0 and self.precision > 0.0


def best_period_s(mtbf_s: float, save_s: float, recall: float = 0.0) -> float:
    """Young's period, from the end of one save to the end of the next; longer when failures are foreseen.

    At recall 1 no regular save is needed: infinity.
    """
    if recall >= 1.0:
        return math.inf
    return math.sqrt(2.0 * mtbf_s * save_s / (1.0 - recall))


def trust_threshold_s(protective_save_s: float, precision: float) -> float:
    """Age of the last save above which saving on an alert pays; infinity for a predictor that is never right."""
    return math.inf if precision <= 0.0 else protective_save_s / precision


def drain_pays(precision: float, age_s: float, costs: Costs) -> bool:
    """Whether moving off the node pays: what a failure would cost, times how often it comes, exceeds save and swap."""
    return precision * (age_s + costs.downtime_s + costs.recovery_s) > costs.on_alert_s + costs.swap_s


def window_period_s(window_s: float, protective_save_s: float, precision: float) -> float:
    """Seconds between saves inside a prediction window of `window_s`."""
    return math.sqrt((2.0 - precision) * window_s * protective_save_s / precision)


def waste(period_s: float, mtbf_s: float, costs: Costs, predictor: Predictor = Predictor()) -> float:
    """Share of time lost with a save each period and one save per trusted alert (first order in 1/mtbf)."""
    r, p, alert = predictor.recall, predictor.precision, costs.on_alert_s
    down = costs.downtime_s + costs.recovery_s
    loss = (1.0 - r) * (period_s / 2.0 + down) + r * down
    if predictor.useful:
        loss += (r / p) * alert * (1.0 - alert / (2.0 * p * period_s))
    return 1.0 - (1.0 - costs.save_s / period_s) * (1.0 - loss / mtbf_s)


def drain_waste(period_s: float, mtbf_s: float, costs: Costs, predictor: Predictor) -> float:
    """Share of time lost when each alert saves and moves the job off the node (first order in 1/mtbf)."""
    r, p = predictor.recall, predictor.precision
    loss = (1.0 - r) * (period_s / 2.0 + costs.downtime_s + costs.recovery_s)
    if predictor.useful:
        loss += (r / p) * (costs.on_alert_s + costs.swap_s)
    return 1.0 - (1.0 - costs.save_s / period_s) * (1.0 - loss / mtbf_s)


def exact_share(period_s: float, mtbf_s: float, costs: Costs) -> float:
    """Effective share of time without a predictor, exponential failures (Daly)."""
    down = (costs.downtime_s + costs.recovery_s) / mtbf_s
    return (period_s - costs.save_s) / (mtbf_s * math.exp(down) * math.expm1(period_s / mtbf_s))
