"""A job's ranks over time, on simulated reports: who stands out, what is a hang, and what only looks like one."""

from __future__ import annotations

import json
import math
import random
from typing import Any

import pytest

from forewarn.models.job_progress import (
    FORGET_AFTER_S,
    LOSS_HELD_S,
    MARKED_LIMIT_S,
    SILENT_AFTER_S,
    Finding,
    JobProgress,
    judge,
)
from forewarn.models.progress import Shift, Straggler

POLL_S = 5.0


def _ranks(slow: dict[int, float] | None = None, count: int = 16, seed: int = 0) -> dict[str, float]:
    generator = random.Random(seed)
    return {f"rank{i}": generator.gauss(1.0, 0.004) * (slow or {}).get(i, 1.0) for i in range(count)}


def test_a_straggler_points_at_a_device_and_a_slow_job_does_not() -> None:
    shift = Shift(alarm=True, ratio=1.1, z=9.0)
    straggler = Straggler("llama.rank5", 1.2, 40.0)
    found = judge(shift, [straggler], [], ranks=8)
    assert (found.kind, found.ranks, found.points_at_device) == ("straggler", ("llama.rank5",), True)
    assert "20 %" in found.reason
    slow = judge(shift, [], [], ranks=8)
    assert (slow.kind, slow.points_at_device) == ("slow_job", False)
    assert "network, storage or data" in slow.reason
    assert judge(Shift(False, 1.0, 0.0), [], [], ranks=8).kind == "fine"


def test_stalls_come_first() -> None:
    assert judge(None, [], ["rank3"], ranks=8).points_at_device
    everyone = judge(None, [], [f"rank{i}" for i in range(8)], ranks=8)
    assert (everyone.kind, everyone.points_at_device) == ("stalled", False)


# --- one job over time ---


def _run(
    job: JobProgress, polls: int, start: int = 0, slow: dict[int, float] | None = None, pace: float = 1.0
) -> float:
    """Eight ranks in step: each waits for the slowest, so all share the step time. Returns the time after."""
    generator = random.Random(start)
    time = 5.0 * start
    for poll in range(start, start + polls):
        time = 5.0 * (poll + 1)
        compute = _ranks(slow, count=8, seed=poll)
        step = 2.0 * pace * math.exp(generator.gauss(0, 0.01)) * max(1.0, *(slow or {0: 1.0}).values())
        for rank, seconds in compute.items():
            job.observe(
                rank,
                {
                    "training_step_total": 10.0 * (poll + 1),
                    "training_idle_seconds": 0.5,
                    "training_iteration_seconds": step,
                    "training_compute_seconds": seconds,
                    "training_bad_losses_total": 0.0,
                },
                time,
            )
        job.judge(time)
    return time


def test_a_steady_job_is_fine() -> None:
    job = JobProgress()
    time = _run(job, 300)
    assert job.judge(time) == Finding("fine")
    assert job.sensitive < 1.0


def test_a_job_with_one_slow_rank_names_it() -> None:
    job = JobProgress()
    _run(job, 200)
    time = _run(job, 20, start=200, slow={5: 1.15})
    found = job.judge(time)
    assert (found.kind, found.ranks) == ("straggler", ("rank5",))


def test_a_job_slowed_by_its_storage_names_no_one() -> None:
    job = JobProgress()
    _run(job, 200)
    time = _run(job, 20, start=200, pace=1.2)
    assert job.judge(time).kind == "slow_job"
    assert job.sensitive > 1.0


def test_one_rank_that_hangs_is_named_and_a_checkpoint_is_no_hang() -> None:
    job = JobProgress()
    time = _run(job, 100)
    for rank in _ranks(count=8):
        if rank != "rank2":
            job.observe(rank, {"training_step_total": 5000.0}, time + 40)
    job.observe("rank2", {"training_step_total": 1000.0, "training_idle_seconds": 40.5}, time + 40)
    assert job.judge(time + 40).ranks == ("rank2",)
    assert job.judge(time + 40, longest_marked_s=60.0).kind == "fine"
    job.forget("rank2")
    assert job.judge(time + 40).kind == "fine"


def test_bad_losses_are_added_up_from_when_the_job_was_first_seen() -> None:
    job = JobProgress()
    for count in (3.0, 3.0, 5.0):
        job.observe("rank0", {"training_bad_losses_total": count}, 0.0)
    assert job.bad_losses == 2


# --- hangs, and what looks like them ---


def _report(job: JobProgress, time: float, *, but: tuple[str, ...] = (), **values: float) -> Finding:
    """All ranks but some report the same; what the job says then."""
    samples: dict[str, Any] = {f"training_{k}": v for k, v in values.items()}
    for rank in _ranks(count=8):
        if rank not in but:
            job.observe(rank, samples, time)
    return job.judge(time)


def _idle(job: JobProgress, start: float, seconds: float, step: float, **values: float) -> list[Finding]:
    """Polls of a job that stays at one step."""
    return [
        _report(job, start + t, but=(), step_total=step, idle_seconds=t, **values)
        for t in (POLL_S * i for i in range(1, int(seconds / POLL_S) + 1))
    ]


def test_a_hang_of_all_names_no_one() -> None:
    job = JobProgress()
    time = _run(job, 100)
    found = _idle(job, time, 60.0, 1000.0)
    assert [f.kind for f in found[:5]] == ["fine"] * 5
    assert (found[-1].kind, found[-1].ranks, found[-1].points_at_device) == ("stalled", (), False)


def test_who_is_a_step_behind_in_a_hang_is_named() -> None:
    job = JobProgress()
    time = _run(job, 100)
    job.observe("rank6", {"training_step_total": 999.0, "training_idle_seconds": 40.0}, time + 40)
    found = _report(job, time + 40, but=("rank6",), step_total=1000.0, idle_seconds=39.0)
    assert (found.kind, found.ranks, found.points_at_device) == ("stalled", ("rank6",), True)


def test_who_no_longer_reports_in_a_hang_is_named() -> None:
    """A node is gone: its agent says nothing, and the others wait for its rank."""
    job = JobProgress()
    time = _run(job, 100)
    for t in range(5, 100, 5):
        found = _report(job, time + t, but=("rank3",), step_total=1000.0, idle_seconds=float(t))
    assert (found.kind, found.ranks, found.silent) == ("stalled", ("rank3",), True)
    assert "rank3 no longer report" in found.reason


def test_a_rank_that_ended_while_the_others_go_on_is_forgotten() -> None:
    job = JobProgress()
    time = _run(job, 100)
    for t in (SILENT_AFTER_S + 5, FORGET_AFTER_S + 5):
        assert _report(job, time + t, but=("rank3",), step_total=1000 + t).kind == "fine"
    assert "rank3" not in job.ranks


def test_a_service_or_an_agent_that_was_away_sees_no_hang() -> None:
    """Idle time is as of the last report: no report, no verdict."""
    job = JobProgress()
    time = _run(job, 100)
    assert job.judge(time + 600).kind == "fine"
    assert _report(job, time + 600, step_total=2000.0, idle_seconds=1.0).kind == "fine"


def test_an_announced_phase_is_no_hang_until_it_takes_beyond_measure() -> None:
    job = JobProgress()
    time = _run(job, 100)
    assert {f.kind for f in _idle(job, time, MARKED_LIMIT_S - 60, 1000.0, marked=1.0)} == {"fine"}
    assert job.is_marked
    assert _report(job, time + 3700, step_total=1000.0, idle_seconds=3700.0, marked=1.0).kind == "stalled"


def test_a_pause_that_ended_by_itself_is_known_the_next_time() -> None:
    """A loop that says nothing of its checkpoints: one alarm, not one at each."""
    job = JobProgress()
    time = _run(job, 100)
    assert _idle(job, time, 120.0, 1000.0)[-1].kind == "stalled"
    assert _report(job, time + 125, step_total=1001.0, idle_seconds=1.0).kind == "fine"
    assert {f.kind for f in _idle(job, time + 125, 150.0, 1001.0)} == {"fine"}
    assert _idle(job, time + 275, 200.0, 1001.0)[-1].kind == "stalled"


# --- stragglers in ragged reports ---


def test_ranks_are_compared_although_one_agent_is_away() -> None:
    job = JobProgress()
    found = Finding("fine")
    for poll in range(20):
        time = POLL_S * (poll + 1)
        for rank, seconds in _ranks({5: 1.2}, count=12, seed=poll).items():
            if rank != "rank0" or poll < 2:
                job.observe(
                    rank, {"training_step_total": poll, "training_compute_seconds": seconds}, time, "r"
                )
        found = job.judge(time)
    assert (found.kind, found.ranks) == ("straggler", ("rank5",))
    assert job.lag["rank5"] == pytest.approx(1.2, rel=0.03)
    assert job.lag["rank7"] == pytest.approx(1.0, rel=0.02)


def test_late_reports_change_nothing() -> None:
    job = JobProgress()
    job.observe("rank0", {"training_step_total": 10.0}, 100.0)
    job.observe("rank0", {"training_step_total": 5.0}, 50.0)
    assert job.step == 10


# --- losses ---


def test_one_rank_with_bad_losses_is_named() -> None:
    job = JobProgress()
    for count, time in ((0.0, 5.0), (0.0, 10.0), (2.0, 15.0)):
        for rank in _ranks(count=8):
            bad = count if rank == "rank4" else 0.0
            job.observe(rank, {"training_bad_losses_total": bad}, time)
    found = job.judge_loss(15.0)
    assert (found.state, found.ranks) == ("not_a_number", ("rank4",))
    assert job.bad_losses == 2
    assert job.judge_loss(15.0 + LOSS_HELD_S + 1).state == "fine"


def test_bad_losses_of_all_name_no_one() -> None:
    job = JobProgress()
    _report(job, 5.0, bad_losses_total=0.0)
    _report(job, 10.0, bad_losses_total=1.0)
    found = job.judge_loss(10.0)
    assert (found.state, found.ranks) == ("not_a_number", ())


def test_a_spike_is_told_for_a_while() -> None:
    job = JobProgress()
    generator = random.Random(1)
    for poll in range(60):
        job.observe(
            "rank0",
            {"training_iteration_seconds": 2.0, "training_loss": 3.0 + generator.gauss(0, 0.05)},
            5.0 * poll,
        )
    assert job.judge_loss(300.0).state == "fine"
    job.observe("rank0", {"training_iteration_seconds": 2.0, "training_loss": 9.5}, 305.0)
    assert (job.judge_loss(306.0).state, job.judge_loss(306.0).reason) == ("spike", "the loss rose to 9.5")
    assert job.judge_loss(310.0 + LOSS_HELD_S).state == "fine"


# --- keeping ---


def test_a_job_goes_on_from_its_kept_state() -> None:
    job = JobProgress()
    _run(job, 200)
    again = JobProgress.of(json.loads(json.dumps(job.plain(), allow_nan=False)))
    assert (again.median_s, again.step, again.ranks) == (job.median_s, job.step, job.ranks)
    for one in (job, again):
        time = _run(one, 20, start=200, pace=1.2)
        assert one.judge(time).kind == "slow_job"
    assert again.sensitive == pytest.approx(job.sensitive)
    assert math.isfinite(again.seen)


@pytest.mark.parametrize("plain", [{}, {"ranks": 1}, {"ranks": {"a": {"seen": "x"}}}])
def test_a_state_of_something_else_is_refused(plain: dict[str, Any]) -> None:
    with pytest.raises((KeyError, TypeError, ValueError)):
        JobProgress.of(plain)
