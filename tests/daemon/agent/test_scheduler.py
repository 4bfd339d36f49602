"""Polling on time, giving up what hangs, and saying so once."""

from __future__ import annotations

import logging

import pytest

from fakes_agent import FakeCollector, HeldRunner, gpu_reading
from forewarn.collectors.base import CollectionError, Event, Reading
from forewarn.collectors.clock import ManualClock
from forewarn.collectors.errors import UnavailableError
from forewarn.daemon.agent.scheduler import (
    RETRY_UNAVAILABLE_S,
    InlineRunner,
    Outcome,
    Runner,
    Scheduler,
    Slot,
)


def scheduler(clock: ManualClock, *collectors: FakeCollector, runner: Runner | None = None) -> Scheduler:
    slots = [Slot(c, c.interval_s, c.deadline_s) for c in collectors]
    return Scheduler(slots, clock, runner or InlineRunner())


def kinds(outcomes: list[Outcome]) -> list[tuple[str, str]]:
    return [(o.name, o.kind) for o in outcomes]


def test_each_collector_keeps_its_own_interval() -> None:
    clock = ManualClock()
    fast, slow = FakeCollector("fast", interval_s=10), FakeCollector("slow", interval_s=60)
    s = scheduler(clock, fast, slow)
    for _ in range(60):
        s.step()
        clock.advance(s.wait_s())
    assert clock.monotonic() == pytest.approx(600)
    assert (fast.calls, slow.calls) == (60, 10)


def test_a_wait_is_never_longer_than_the_next_deadline_or_poll() -> None:
    clock = ManualClock()
    s = scheduler(
        clock,
        FakeCollector("hung", deadline_s=3),
        FakeCollector("well", interval_s=10),
        runner=HeldRunner("hung"),
    )
    s.step()
    assert s.wait_s() == pytest.approx(3, abs=0.01)
    clock.advance(s.wait_s())
    assert kinds(s.step()) == [("hung", "silent")]
    assert s.wait_s() == pytest.approx(7, abs=0.01)


def test_a_hung_collector_is_reported_once_and_never_polled_twice_at_a_time() -> None:
    clock, runner = ManualClock(), HeldRunner("hung")
    hung, well = FakeCollector("hung", gpu_reading(), deadline_s=5), FakeCollector("well")
    s = scheduler(clock, hung, well, runner=runner)
    outcomes: list[Outcome] = []
    for _ in range(60):
        outcomes += s.step()
        clock.advance(1)
    assert well.calls == 6
    silent = [o for o in outcomes if o.kind == "silent"]
    assert [(e.kind, e.code, e.severity) for o in silent for e in o.reading.events] == [
        ("collector_silent", "hung", "error")
    ]
    assert s.slots[0].timeouts == 1 and s.slots[0].up is False

    runner.let_go("hung")
    back = [o for o in s.step() if o.name == "hung"]
    assert [e.kind for e in back[0].reading.events] == ["collector_recovered"]
    assert back[0].late and back[0].reading.samples, "the reading is there, marked as late"
    clock.advance(hung.interval_s)
    again = [o for o in s.step() if o.name == "hung"]
    assert kinds(again) == [("hung", "reading")] and not again[0].late


def test_an_unavailable_source_is_logged_once_and_tried_again_later(caplog: pytest.LogCaptureFixture) -> None:
    clock = ManualClock()
    source = FakeCollector(
        "nvml", UnavailableError("nvml: no driver"), UnavailableError("nvml: no driver"), Reading()
    )
    s = scheduler(clock, source)
    with caplog.at_level(logging.INFO):
        for _ in range(150):
            s.step()
            clock.advance(1)
    assert source.calls == 1 + 1 + 3, "at 0 s, 60 s, then each 10 s from 120 s"
    assert [r.getMessage() for r in caplog.records] == ["collector_unavailable", "collector_up"]
    assert RETRY_UNAVAILABLE_S == 60


def test_a_source_that_was_well_is_tried_at_its_own_interval_for_a_while() -> None:
    clock = ManualClock()
    source = FakeCollector("nvml", Reading(), UnavailableError("nvml: the driver does not answer"))
    s = scheduler(clock, source)
    while clock.monotonic() <= 1200:
        s.step()
        clock.advance(1)
    assert source.calls == 1 + 60 + 10, "each 10 s for ten minutes, then each minute"


def test_an_unexpected_error_ends_neither_the_loop_nor_the_collector(
    caplog: pytest.LogCaptureFixture,
) -> None:
    clock = ManualClock()
    broken, well = (
        FakeCollector("broken", ZeroDivisionError("oh"), SystemExit(3), gpu_reading()),
        FakeCollector("well"),
    )
    s = scheduler(clock, broken, well)
    seen = []
    for _ in range(3):
        seen += [o for o in s.step() if o.name == "broken"]
        clock.advance(10)
    assert [(o.kind, o.error) for o in seen] == [
        ("failed", "ZeroDivisionError: oh"),
        ("failed", "SystemExit: 3"),
        ("reading", ""),
    ]
    assert well.calls == 3
    assert s.slots[0].errors == 2


def test_errors_of_single_devices_are_logged_when_they_change(caplog: pytest.LogCaptureFixture) -> None:
    clock = ManualClock()
    one, two = CollectionError("smart", "asleep", "sda"), CollectionError("smart", "gone", "sdb")
    answers = [
        Reading(errors=[one]),
        Reading(errors=[one]),
        Reading(errors=[one, two]),
        Reading(),
        Reading(errors=[one]),
    ]
    s = scheduler(clock, FakeCollector("smart", *answers))
    with caplog.at_level(logging.WARNING):
        for _ in answers:
            s.step()
            clock.advance(10)
    assert [r.fields["device"] for r in caplog.records] == ["sda", "sdb", "sda"]  # type: ignore[attr-defined]


def test_after_a_pause_of_the_whole_machine_there_is_no_burst_of_polls() -> None:
    clock = ManualClock()
    c = FakeCollector("c", interval_s=10)
    s = scheduler(clock, c)
    s.step()
    clock.advance(3600)
    s.step()
    s.step()
    assert c.calls == 2
    assert s.wait_s() == pytest.approx(10)


def test_a_step_of_the_wall_clock_changes_no_interval() -> None:
    clock = ManualClock()
    c = FakeCollector("c", interval_s=10)
    s = scheduler(clock, c)
    s.step()
    clock.step(-86_400)
    clock.advance(5)
    assert s.step() == []
    clock.advance(5)
    assert kinds(s.step()) == [("c", "reading")]


def test_state_belongs_to_its_reading() -> None:
    class Counting(FakeCollector):
        def state(self) -> dict[str, int]:
            return {"calls": self.calls}

    clock = ManualClock()
    s = scheduler(clock, Counting("c", Reading(events=[Event("", "oom", "kill", "error", "m")])))
    first = s.step()
    clock.advance(10)
    second = s.step()
    assert [o.state for o in (*first, *second)] == [{"calls": 1}, {"calls": 2}]


def test_settled_once_each_source_has_answered_or_failed() -> None:
    clock, runner = ManualClock(), HeldRunner("hung")
    s = scheduler(clock, FakeCollector("hung"), FakeCollector("gone", UnavailableError("x")), runner=runner)
    s.step()
    assert not s.settled
    clock.advance(6)
    s.step()
    assert s.settled
