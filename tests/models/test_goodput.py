"""The event simulation against the closed forms, the published 67 -> 92 % case, and its own accounts."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import pytest

from forewarn.daemon.cli import main
from forewarn.models.checkpointing import Costs, Predictor, best_period_s, exact_share
from forewarn.models.goodput import (
    Incident,
    Outcome,
    Policy,
    announce,
    compare,
    poisson_failures,
    replay,
)

MTBF_S = 7200.0
FAST = Costs(35, 480, swap_s=120)
GOOD = Predictor(0.75, 0.8)
FAILURES = poisson_failures(MTBF_S, 5000, seed=5)


@functools.cache
def shares(costs: Costs, predictor: Predictor = GOOD) -> dict[str, float]:
    return {o.policy: o.share for o in compare(FAILURES, MTBF_S, costs, predictor, lead_s=900)}


@pytest.mark.parametrize("costs", [Costs(120, 1500), FAST], ids=["slow", "fast"])
def test_periodic_lands_on_the_exact_form(costs: Costs) -> None:
    period_s = best_period_s(MTBF_S, costs.save_s)
    outcome = replay(announce(FAILURES, Predictor(), 0, 1), Policy.PERIODIC, costs, Predictor(), period_s)
    assert outcome.share == pytest.approx(exact_share(period_s, MTBF_S, costs), abs=0.006)


def test_reproduces_the_published_case() -> None:
    before = shares(Costs(120, 1500))
    after = shares(FAST)
    assert before["periodic"] == pytest.approx(0.67, abs=0.01)
    assert after["periodic"] == pytest.approx(0.847, abs=0.01)
    assert after["periodic + protection"] == pytest.approx(0.865, abs=0.012)
    assert after["periodic + protection + drain"] == pytest.approx(0.92, abs=0.01)
    assert after["none"] == pytest.approx(0.0, abs=1e-9)
    assert after["clairvoyant"] > after["periodic + protection + drain"]


@pytest.mark.parametrize(("swap_s", "share"), [(60, 0.927), (300, 0.898)])
def test_drain_by_swap_time(swap_s: float, share: float) -> None:
    assert shares(Costs(35, 480, swap_s=swap_s))["periodic + protection + drain"] == pytest.approx(
        share, abs=0.01
    )


@pytest.mark.parametrize("predictor", [Predictor(0.0, 0.0), Predictor(0.05, 0.02), Predictor(0.3, 0.01)])
def test_a_useless_predictor_costs_at_most_one_percent(predictor: Predictor) -> None:
    found = shares(FAST, predictor)
    for policy in ("periodic + protection", "periodic + protection + drain"):
        assert found[policy] >= found["periodic"] - 0.01


def test_all_time_is_accounted_for() -> None:
    outcome = replay(announce(FAILURES, GOOD, 900, 1), Policy.DRAIN, FAST, GOOD, 1400)
    parts = (
        outcome.useful_s + outcome.lost_work_s + outcome.saving_s + outcome.recovering_s + outcome.swapping_s
    )
    # What is missing at most: the unsaved work of the last cycle, and saves cut short by a failure.
    assert parts == pytest.approx(outcome.elapsed_s, rel=0.002)
    assert outcome.failures + outcome.failures_avoided == len(FAILURES)


def test_one_announced_failure_is_avoided_by_a_drain_and_only_softened_by_a_save() -> None:
    incidents = [Incident(alert_s=5000, failure_s=6000)]

    def run(policy: Policy) -> Outcome:
        return replay(incidents, policy, FAST, Predictor(1.0, 1.0), period_s=10_000)

    assert (run(Policy.PERIODIC).lost_work_s, run(Policy.PERIODIC).failures) == (6000, 1)
    assert (run(Policy.PROTECT).lost_work_s, run(Policy.PROTECT).failures) == (965, 1)
    assert (run(Policy.DRAIN).lost_work_s, run(Policy.DRAIN).failures_avoided) == (0, 1)


def test_a_drain_that_takes_longer_than_the_lead_does_not_avoid_the_failure() -> None:
    incidents = [Incident(alert_s=5900, failure_s=6000)]
    outcome = replay(incidents, Policy.DRAIN, FAST, Predictor(1.0, 1.0), period_s=10_000)
    assert outcome.failures == 1
    assert outcome.failures_avoided == 0


def test_command_replays_a_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "faults.csv"
    trace.write_text("time,node\n" + "".join(f"2024-04-{d:02d} 12:00:00+00:00,s{d}\n" for d in range(1, 20)))
    assert main(["simulate-goodput", "--trace", str(trace), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["simulated"] is True
    assert report["mtbf_hours"] == pytest.approx(24)
    assert report["policies"][0]["policy"] == "none"


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("node\ns1\n", "no column 'time'"),
        ("time\nsoon\nlater\n", "no timestamp"),
        ("time\n2024-01-01\n", "at least 2"),
    ],
)
def test_command_refuses_a_bad_trace(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, complaint: str
) -> None:
    trace = tmp_path / "faults.csv"
    trace.write_text(text)
    assert main(["simulate-goodput", "--trace", str(trace)]) == 1
    assert complaint in capsys.readouterr().err


def test_command_refuses_impossible_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate-goodput", "--recall", "1.5"]) == 1
    assert "--recall 1.5: must be between 0 and 1" in capsys.readouterr().err
