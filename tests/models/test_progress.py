"""Detectors of training progress, on simulated steps: how much they find, how soon, and how rarely they err."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forewarn.models.progress import (
    BASE_STEPS,
    STALL_FLOOR_S,
    STRAGGLER_OBSERVATIONS,
    ClippedCusum,
    LossWatch,
    MedianShift,
    StragglerWatch,
    slower_ranks,
    stalled,
)


def _steps(generator: random.Random, count: int, slowdown: float = 1.0) -> list[float]:
    """Step times of 2 s with 1.5 % of spread, and one step in 200 that takes a tenth to a half longer."""
    return [
        2.0
        * slowdown
        * math.exp(generator.gauss(0, 0.015))
        * (1 + (generator.uniform(0.1, 0.5) if generator.random() < 0.005 else 0))
        for _ in range(count)
    ]


def _steps_until_alarm(slowdown: float, seed: int, within: int = 60) -> int | None:
    generator = random.Random(seed)
    detector = MedianShift()
    for seconds in _steps(generator, 500):
        assert not detector.observe(seconds).alarm
    for n, seconds in enumerate(_steps(generator, within, slowdown), start=1):
        if detector.observe(seconds).alarm:
            return n
    return None


@pytest.mark.parametrize(("slowdown", "least_found", "most_steps"), [(1.05, 30, 12), (1.10, 30, 10)])
def test_slowdowns_are_found_within_a_few_steps(slowdown: float, least_found: int, most_steps: int) -> None:
    """The published mark: 30 of 30 slowdowns of 5 %, in 8 steps at the median."""
    found = [n for seed in range(30) if (n := _steps_until_alarm(slowdown, seed)) is not None]
    assert len(found) >= least_found
    assert sorted(found)[len(found) // 2] <= most_steps


def test_steady_training_never_alarms() -> None:
    detector = MedianShift()
    alarms = sum(detector.observe(s).alarm for s in _steps(random.Random(7), 20_000))
    assert alarms == 0


@pytest.mark.slow
def test_steady_training_never_alarms_in_a_hundred_thousand_steps() -> None:
    detector = MedianShift()
    assert sum(detector.observe(s).alarm for s in _steps(random.Random(11), 100_000)) == 0


def test_slow_drift_below_the_limit_never_alarms() -> None:
    detector = MedianShift()
    generator = random.Random(3)
    steps = [s * (1 + i * 1e-5) for i, s in enumerate(_steps(generator, 3000))]
    assert not any(detector.observe(s).alarm for s in steps)


def test_a_single_long_step_is_no_slowdown() -> None:
    detector = MedianShift()
    for seconds in _steps(random.Random(1), 400):
        detector.observe(seconds)
    assert not detector.observe(60.0).alarm


def test_a_slowdown_stays_an_alarm_and_is_then_the_new_pace() -> None:
    generator = random.Random(2)
    detector = MedianShift()
    for seconds in _steps(generator, 500):
        detector.observe(seconds)
    slow = [detector.observe(s).alarm for s in _steps(generator, BASE_STEPS, 1.2)]
    assert all(slow[15:])
    later = [detector.observe(s).alarm for s in _steps(generator, 800, 1.2)]
    assert not any(later[400:])
    assert detector.median_seconds == pytest.approx(2.4, rel=0.02)


def test_an_end_of_the_slowdown_ends_the_alarm() -> None:
    generator = random.Random(4)
    detector = MedianShift()
    for seconds in _steps(generator, 500):
        detector.observe(seconds)
    assert [detector.observe(s).alarm for s in _steps(generator, 40, 1.1)][-1]
    assert not [detector.observe(s).alarm for s in _steps(generator, 20)][-1]


def test_without_a_base_there_is_no_verdict() -> None:
    detector = MedianShift()
    assert detector.median_seconds is None
    assert not any(detector.observe(s).alarm for s in (1.0, 50.0, 50.0) * 6)


def test_the_ratio_says_how_much_slower() -> None:
    generator = random.Random(5)
    detector = MedianShift()
    for seconds in _steps(generator, 400):
        detector.observe(seconds)
    shift = [detector.observe(s) for s in _steps(generator, 30, 1.25)][-1]
    assert shift.ratio == pytest.approx(1.25, rel=0.02)
    assert shift.z > 6


def test_cusum_is_more_sensitive_and_calms_down() -> None:
    generator = random.Random(6)
    base = MedianShift()
    cusum = ClippedCusum(base)
    quiet = []
    for seconds in _steps(generator, 600):
        quiet.append(cusum.observe(seconds))
        base.observe(seconds)
    slow = [cusum.observe(s) for s in _steps(generator, 20, 1.03)]
    assert max(quiet) < 1.0
    assert max(slow) > 1.0
    assert [cusum.observe(s) for s in _steps(generator, 80)][-1] < 0.5


@given(st.lists(st.floats(1e-6, 1e6), max_size=120))
def test_any_times_give_finite_answers(times: list[float]) -> None:
    base = MedianShift(recent=5, base=70)
    cusum = ClippedCusum(base)
    for seconds in times:
        assert math.isfinite(cusum.observe(seconds))
        shift = base.observe(seconds)
        assert math.isfinite(shift.ratio)
        assert math.isfinite(shift.z)


# --- stalls ---


@pytest.mark.parametrize(
    ("idle", "median", "marked", "is_stalled"),
    [
        (61.0, 12.0, 0.0, True),
        (59.0, 12.0, 0.0, False),
        (STALL_FLOOR_S - 1, 0.1, 0.0, False),
        (STALL_FLOOR_S + 1, 0.1, 0.0, True),
        (100.0, 2.0, 60.0, False),
        (121.0, 2.0, 60.0, True),
        (1e6, None, 0.0, False),
    ],
)
def test_stalls(idle: float, median: float | None, marked: float, is_stalled: bool) -> None:
    assert stalled(idle, median, marked) is is_stalled


# --- stragglers ---


def _ranks(slow: dict[int, float] | None = None, count: int = 16, seed: int = 0) -> dict[str, float]:
    generator = random.Random(seed)
    return {f"rank{i}": generator.gauss(1.0, 0.004) * (slow or {}).get(i, 1.0) for i in range(count)}


def test_a_straggler_is_named_with_its_ratio() -> None:
    (found,) = slower_ranks(_ranks({5: 1.2}))
    assert found.rank == "rank5"
    assert found.ratio == pytest.approx(1.2, rel=0.02)


def test_ranks_of_another_role_are_no_peers() -> None:
    compute = {
        **_ranks(count=8),
        **{f"rank{i}": 2.0 * v for i, v in enumerate(_ranks(count=8, seed=1).values(), 8)},
    }
    roles = {f"rank{i}": "first" if i < 8 else "last" for i in range(16)}
    assert slower_ranks(compute, roles) == []
    compute["rank9"] *= 1.3
    assert [s.rank for s in slower_ranks(compute, roles)] == ["rank9"]


def test_few_peers_give_no_verdict() -> None:
    assert slower_ranks({"rank0": 1.0, "rank1": 1.0, "rank2": 5.0}) == []


def test_nonsense_times_are_left_out() -> None:
    compute = {**_ranks(), "rank0": math.nan, "rank1": -1.0, "rank2": 0.0}
    assert slower_ranks(compute) == []


def test_only_who_is_slow_for_good_is_named() -> None:
    watch = StragglerWatch()
    for n in range(STRAGGLER_OBSERVATIONS - 1):
        assert watch.observe(_ranks({3: 1.3}, seed=n)) == []
    assert watch.observe(_ranks(seed=8)) == []  # it was late, not slow
    for n in range(STRAGGLER_OBSERVATIONS):
        named = watch.observe(_ranks({3: 1.3}, seed=n))
    assert [s.rank for s in named] == ["rank3"]


def test_even_ranks_are_never_named_in_a_thousand_observations() -> None:
    watch = StragglerWatch()
    assert not [s for n in range(1000) for s in watch.observe(_ranks(seed=n))]


# --- losses ---


def test_losses() -> None:
    generator = random.Random(9)
    watch = LossWatch()
    falling = [watch.observe(3.0 * math.exp(-i / 4000) + generator.gauss(0, 0.05)) for i in range(2000)]
    assert set(falling) == {"fine"}
    assert watch.observe(9.0) == "spike"
    assert watch.observe(math.nan) == "not_a_number"
    assert watch.observe(math.inf) == "not_a_number"
    assert watch.observe(1.9) == "fine"


def test_a_loss_that_stays_up_is_the_new_usual() -> None:
    watch = LossWatch()
    generator = random.Random(2)
    for _ in range(200):
        watch.observe(2.0 + generator.gauss(0, 0.02))
    states = [watch.observe(6.0 + generator.gauss(0, 0.02)) for _ in range(200)]
    assert states[0] == "spike"
    assert set(states[60:]) == {"fine"}
