"""How often a job should save: from its failure rate, its costs and how well failures are foreseen."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sqlalchemy
from sqlalchemy.engine import Connection

from forewarn.daemon.service import schema
from forewarn.daemon.service.view import View
from forewarn.models.checkpointing import Costs, Predictor, best_period_s, trust_threshold_s, waste
from forewarn.models.registry import RiskModel

RECALL, PRECISION = 0.2, 0.5
"""Assumed until measured: published field results for GPUs lie about here for recall."""
DAY_S = 86400.0
STANDS_OUT = 0.5
MIN_OUTCOMES = 10
"""Protections and failures needed before the site's own figures count."""


@dataclass(frozen=True)
class Quality:
    """How well failures are foreseen, and where the figures come from."""

    recall: float
    precision: float
    source: str


def quality_of(run: Connection, model: RiskModel | None, now: float) -> Quality:
    """This site's figures when there are enough, else the model's own, else an assumption."""
    protections, failures = schema.protections.c, schema.failures.c
    made = run.execute(
        sqlalchemy.select(protections.device, protections.created).where(
            protections.created > now - 90 * DAY_S
        )
    ).all()
    failed = run.execute(
        sqlalchemy.select(failures.device, failures.time).where(failures.time > now - 90 * DAY_S)
    ).all()
    if len(made) >= MIN_OUTCOMES and len(failed) >= MIN_OUTCOMES:
        hits = sum(any(d == e and 0 <= t - c <= DAY_S for e, t in failed) for d, c in made)
        found = sum(any(d == e and 0 <= t - c <= DAY_S for d, c in made) for e, t in failed)
        return Quality(found / len(failed), max(hits / len(made), 0.01), "measured here over 90 days")
    metrics: Mapping[str, float] = model.manifest.metrics if model else {}
    recall, precision = metrics.get("recall"), metrics.get("precision")
    if model is not None and recall is not None and precision is not None and precision > 0:
        told = "on simulated data" if model.manifest.simulated else "in its evaluation"
        return Quality(min(recall, 0.95), precision, f"of model {model.name} {told}")
    return Quality(RECALL, PRECISION, "assumed, until enough failures have been reported (POST /v1/failures)")


def advise(job: Mapping[Any, Any], devices: Sequence[str], view: View, quality: Quality) -> dict[str, Any]:
    """The advice for a job whose devices are as the view shows."""
    mtbf_s, source = _mtbf_s(devices, view)
    save_s = float(job["measured_checkpoint_seconds"] or job["checkpoint_seconds"])
    costs = Costs(save_s=save_s, recovery_s=float(job["restart_seconds"]))
    plain = best_period_s(mtbf_s, save_s)
    interval = best_period_s(mtbf_s, save_s, quality.recall)
    lost = waste(interval, mtbf_s, costs, Predictor(quality.recall, quality.precision))
    return {
        "job": job["job"],
        "interval_seconds": round(interval, 3),
        "without_prediction_seconds": round(plain, 3),
        "mtbf_seconds": round(mtbf_s, 3),
        "mtbf_source": source,
        "checkpoint_seconds": save_s,
        "restart_seconds": float(job["restart_seconds"]),
        "recall": round(quality.recall, 4),
        "precision": round(quality.precision, 4),
        "quality_source": quality.source,
        "expected_effective_ratio": round(min(1.0, max(0.0, 1.0 - lost)), 6),
        "trust_age_seconds": round(trust_threshold_s(save_s, quality.precision), 3),
        "why": (
            f"one failure in {mtbf_s / 3600:.1f} h is to be expected from {len(devices)} devices; with a save of "
            f"{save_s:.0f} s the loss is least at one every {interval / 60:.0f} min (Young's formula"
            + (
                f", longer by the {quality.recall:.0%} of failures that are foreseen)"
                if quality.recall
                else ")"
            )
        ),
    }


def _mtbf_s(devices: Sequence[str], view: View) -> tuple[float, str]:
    """Mean time between failures of the job, from the risk of its devices at their longest horizon."""
    rates = []
    for device in devices:
        risks = view.risks(device)
        # A device about to fail is a matter of protection, not of the regular interval.
        if risks and max(risks.values()) < STANDS_OUT:
            horizon = max(risks)
            rates.append(-math.log1p(-min(risks[horizon], 0.999)) / horizon)
    total = math.fsum(rates)
    if total > 0:
        return 1.0 / total, f"risk now of {len(rates)} devices"
    assumed = 0.09 / (365 * DAY_S)
    count = max(1, len(devices))
    return 1.0 / (
        assumed * count
    ), "assumed yearly rate of 9 % a device: none of the job's devices reports yet"
