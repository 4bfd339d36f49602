"""Replays failures against checkpoint policies, to show what each is worth. Event by event, no formulas.

A job works, saves every period, fails at given times, recovers. A predictor announces some failures `lead_s` ahead
and raises some false alerts. What a policy does on an alert is all that differs. Times are wall seconds.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

from forewarn.models.checkpointing import Costs, Predictor, best_period_s, drain_pays, trust_threshold_s


class Policy(Enum):
    """What is done about failures."""

    NONE = "none"
    """No checkpoints: every failure loses all work."""
    PERIODIC = "periodic"
    """A checkpoint each period."""
    PROTECT = "periodic + protection"
    """and one on each alert that is worth it."""
    DRAIN = "periodic + protection + drain"
    """and the job leaves the node where that is worth it, so the failure does not strike it."""
    CLAIRVOYANT = "clairvoyant"
    """Every failure known: saved and moved just in time, nothing else is ever paid for."""


@dataclass(frozen=True)
class Incident:
    """One thing the job meets: an alert, a failure, or both (an announced failure)."""

    alert_s: float | None
    failure_s: float | None


@dataclass(frozen=True)
class Outcome:
    """What became of the time. `share` is useful time over `elapsed_s`."""

    policy: str
    period_s: float
    elapsed_s: float
    useful_s: float
    saves: int
    protective_saves: int
    drains: int
    failures: int
    failures_avoided: int
    lost_work_s: float
    saving_s: float
    recovering_s: float
    swapping_s: float

    @property
    def share(self) -> float:
        return self.useful_s / self.elapsed_s if self.elapsed_s else 0.0


def poisson_failures(mtbf_s: float, count: int, seed: int) -> list[float]:
    """Times of `count` failures with exponential gaps."""
    dice = random.Random(seed)  # noqa: S311 - a simulation, not a secret
    now, times = 0.0, []
    for _ in range(count):
        now += dice.expovariate(1.0 / mtbf_s)
        times.append(now)
    return times


def announce(failures_s: Sequence[float], predictor: Predictor, lead_s: float, seed: int) -> list[Incident]:
    """Give failures their alerts, and add false alerts at random so that precision comes out as asked."""
    dice = random.Random(seed)  # noqa: S311 - a simulation, not a secret
    incidents = []
    announced = 0
    for moment in failures_s:
        seen = dice.random() < predictor.recall
        announced += seen
        incidents.append(Incident(max(0.0, moment - lead_s) if seen else None, moment))
    if predictor.useful and failures_s:
        false_alerts = round(announced * (1.0 - predictor.precision) / predictor.precision)
        incidents += [Incident(dice.uniform(0.0, failures_s[-1]), None) for _ in range(false_alerts)]
    return sorted(incidents, key=lambda i: i.alert_s if i.alert_s is not None else i.failure_s or 0.0)


class _Failures:
    """Failures still to come, in order; some are cancelled when the job has left the node in time."""

    def __init__(self, times: Iterable[float]) -> None:
        self._times = sorted(times, reverse=True)
        self._cancelled: Counter[float] = Counter()

    def next(self) -> float:
        """When the next one strikes; infinity when none does."""
        while self._times and self._cancelled[self._times[-1]]:
            self._cancelled[self._times.pop()] -= 1
        return self._times[-1] if self._times else math.inf

    def pop(self) -> float:
        moment = self.next()
        self._times.pop()
        return moment

    def cancel(self, moment: float) -> None:
        self._cancelled[moment] += 1


class _Job:
    """The state of a run. A cycle is `period - save` seconds of work and then a save; `into` is the place in it."""

    def __init__(self, period_s: float, costs: Costs) -> None:
        self.period, self.costs = period_s, costs
        self.now = self.into = 0.0
        self.useful = self.lost = self.saving = self.recovering = self.swapping = 0.0
        self.saves = self.protective = self.drains = self.failures = self.avoided = 0

    @property
    def unsaved(self) -> float:
        return min(self.into, self.period - self.costs.save_s)

    def run_until(self, moment: float) -> None:
        """Work and save regularly up to `moment` (earlier: nothing, the job was busy recovering)."""
        if moment <= self.now:
            return
        if math.isinf(self.period):
            self.into += moment - self.now
            self.now = moment
            return
        total = self.into + moment - self.now
        cycles = int(total // self.period)
        work = self.period - self.costs.save_s
        before = max(0.0, self.into - work)
        self.useful += cycles * work
        self.saves += cycles
        self.into = total - cycles * self.period
        self.saving += cycles * self.costs.save_s + max(0.0, self.into - work) - before
        self.now = moment

    def save(self, until: float) -> bool:
        """A protective save; False when the failure at `until` came before it was done."""
        already_saving = self.into > self.period - self.costs.save_s
        duration = self.period - self.into if already_saving else self.costs.on_alert_s
        if self.now + duration > until:
            return False
        self.useful += self.unsaved
        self.saving += duration
        self.protective += 1
        self.now += duration
        self.into = 0.0
        return True

    def fail(self, failures: _Failures) -> None:
        """Meet the next failure: lose what is not saved and recover; another during recovery starts it again."""
        moment = failures.pop()
        self.run_until(moment)
        down = self.costs.downtime_s + self.costs.recovery_s
        end = max(moment, self.now) + down
        self.failures += 1
        while failures.next() < end:
            end = failures.pop() + down
            self.failures += 1
        self.lost += self.unsaved
        self.into = 0.0
        self.recovering += end - max(moment, self.now)
        self.now = end


def replay(
    incidents: Sequence[Incident],
    policy: Policy,
    costs: Costs,
    predictor: Predictor,
    period_s: float,
    swap_pays_at_age: bool = True,
) -> Outcome:
    """One run of a job through `incidents` with a save every `period_s` (infinite: never).

    `swap_pays_at_age`: drain only where the rule of `checkpointing.drain_pays` says so; else on every alert.
    """
    job = _Job(period_s, costs)
    if policy is Policy.CLAIRVOYANT:
        return _clairvoyant([i.failure_s for i in incidents if i.failure_s is not None], costs)
    acts = policy in (Policy.PROTECT, Policy.DRAIN)
    trust = trust_threshold_s(costs.on_alert_s, predictor.precision)
    failures = _Failures(i.failure_s for i in incidents if i.failure_s is not None)
    alerts = sorted((i.alert_s, n, i) for n, i in enumerate(incidents) if acts and i.alert_s is not None)
    end = max((i.failure_s or i.alert_s or 0.0 for i in incidents), default=0.0)
    for moment, _, incident in alerts:
        while failures.next() <= moment:
            job.fail(failures)
        if incident.failure_s is not None and incident.failure_s < job.now:
            continue  # it struck already, while the job recovered from another
        job.run_until(moment)
        age = job.unsaved
        drain = policy is Policy.DRAIN and (
            not swap_pays_at_age or drain_pays(predictor.precision, age, costs)
        )
        if (not drain and age <= trust) or not job.save(failures.next()):
            continue
        if drain and job.now + costs.swap_s <= failures.next():
            job.now += costs.swap_s
            job.swapping += costs.swap_s
            job.drains += 1
            if incident.failure_s is not None:
                failures.cancel(incident.failure_s)
                job.avoided += 1
    while failures.next() < math.inf:
        job.fail(failures)
    job.run_until(end)
    return Outcome(
        policy.value, period_s, max(end, job.now), job.useful, job.saves, job.protective, job.drains, job.failures,
        job.avoided, job.lost, job.saving, job.recovering, job.swapping,
    )  # fmt: skip


def _clairvoyant(failures: list[float], costs: Costs) -> Outcome:
    """The limit: every failure costs its save and swap (or recovery where that is cheaper) and nothing more."""
    end = max(failures, default=0.0)
    swap = min(costs.swap_s, costs.downtime_s + costs.recovery_s)
    each = costs.on_alert_s + swap
    paid = min(end, each * len(failures))
    return Outcome(
        Policy.CLAIRVOYANT.value, math.inf, end, end - paid, 0, len(failures), len(failures), 0, len(failures), 0.0,
        costs.on_alert_s * len(failures), 0.0, swap * len(failures),
    )  # fmt: skip


def compare(
    failures_s: Sequence[float],
    mtbf_s: float,
    costs: Costs,
    predictor: Predictor,
    lead_s: float,
    seed: int = 1,
    period_s: float | None = None,
) -> list[Outcome]:
    """Every policy on the same failures and alerts, each with the best of several periods round Young's."""
    incidents = announce(failures_s, predictor, lead_s, seed)
    outcomes = [replay(incidents, Policy.NONE, costs, predictor, math.inf)]
    for policy in (Policy.PERIODIC, Policy.PROTECT, Policy.DRAIN):
        recall = predictor.recall if policy is Policy.DRAIN else 0.0
        young = best_period_s(mtbf_s, costs.save_s, min(recall, 0.99))
        periods = [period_s] if period_s else [young * f for f in (0.6, 0.8, 1.0, 1.25, 1.6)]
        floor = costs.save_s * 1.001
        runs = [replay(incidents, policy, costs, predictor, max(floor, p)) for p in periods]
        outcomes.append(max(runs, key=lambda o: o.share))
    outcomes.append(replay(incidents, Policy.CLAIRVOYANT, costs, predictor, math.inf))
    return outcomes
