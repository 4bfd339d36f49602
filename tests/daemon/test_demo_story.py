from __future__ import annotations

from typing import Any

import pytest

from forewarn.collectors.clock import ManualClock
from forewarn.daemon.demo.story import STEPS, Line, Story, span


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def lines() -> list[Line]:
    return []


@pytest.fixture
def story(clock: ManualClock, lines: list[Line]) -> Story:
    return Story(clock, lines.append, "job")


def device(level: str, p: float, name: str = "sim-07/gpu3") -> dict[str, Any]:
    risk = {"86400": p, "900": p / 4, "3600": p / 2}
    return {"device": name, "level": level, "risk": risk, "simulated": True, "reason": "errors grow"}


def test_each_step_is_told_once_with_its_time(story: Story, clock: ManualClock, lines: list[Line]) -> None:
    clock.advance(2.5)
    assert story.step("service_ready", "service", "ready")
    clock.advance(1)
    assert not story.step("service_ready", "service", "ready")
    assert [(line.seconds, line.text) for line in lines] == [(2.5, "ready")]
    assert story.steps["service_ready"]["at_seconds"] == 2.5


def test_only_rising_levels_are_told(story: Story, lines: list[Line]) -> None:
    for level, p in (("healthy", 0.0), ("watch", 0.1), ("watch", 0.12), ("critical", 0.9), ("healthy", 0.0)):
        story.on_risk([device(level, p)])
    assert [line.level for line in lines] == ["watch", "critical"]
    assert lines[0].text == "sim-07/gpu3 is now watch: 2.5% in 15 min, 5.0% in 1 h, 10.0% in 1 d; errors grow"
    assert all(line.simulated for line in lines)


def test_whole_course(story: Story, clock: ManualClock, lines: list[Line]) -> None:
    for name in ("service_ready", "host_reported", "fleet_reported", "job_registered"):
        story.step(name, "x", name)
    story.on_fleet({"event": "wear", "device": "sim-07/gpu3"})
    clock.advance(20)
    story.on_risk([device("warning", 0.5, "sim-01/gpu0"), device("watch", 0.1)])
    protection = {"id": "p1", "job": "job", "state": "open", "device": "sim-07/gpu3", "action": "checkpoint"}
    saved = {"event": "saved", "step": 9, "seconds": 0.01, "checkpoint": "/c/step-9", "protections": ["p1"]}
    story.on_loop(saved)
    assert "checkpoint_saved" not in story.steps  # told after its reason, with its own time
    clock.advance(0.5)
    story.on_protections([{"id": "p0", "job": "another", "state": "failed"}, protection])
    assert "webhook_accepted" not in story.steps
    assert [line.who for line in lines[-2:]] == ["service", "training"]
    assert story.steps["checkpoint_saved"]["at_seconds"] == 20.0
    story.on_protections([protection | {"state": "completed", "step": 9, "save_seconds": 0.01}])
    assert story.missing == ["checkpoint_verified"]
    story.step("checkpoint_verified", "training", "ok")
    clock.advance(5)
    fatal = {
        "event": "device_event",
        "device": "sim-07/gpu3",
        "kind": "xid",
        "code": "94",
        "severity": "critical",
    }
    story.on_fleet(fatal | {"message": "gone"})
    summary = story.summary()
    assert summary["done"] and summary["missing"] == [] and summary["protection"] == "p1"
    assert summary["seconds_from_wear_to_checkpoint"] == 20.0
    assert summary["checkpoint_before_fatal_event"] is True
    assert set(STEPS) < set(summary["steps"])


@pytest.mark.parametrize("state", ["declined", "failed", "escalated"])
def test_protection_that_ends_badly_is_told_once(story: Story, lines: list[Line], state: str) -> None:
    for _ in range(2):
        story.on_protections([{"id": "p1", "job": "job", "state": state, "device": "d"}])
    assert [line.text for line in lines if line.level == "critical"] == [f"protection p1 ended as {state}"]
    assert "acknowledged" in story.missing


def test_spans() -> None:
    assert [span(s) for s in (900, 3600, 604_800, 7)] == ["15 min", "1 h", "7 d", "7 s"]
