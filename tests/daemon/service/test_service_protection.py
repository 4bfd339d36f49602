"""The decision against the published rule and closed forms, then what follows from it through the API."""

from __future__ import annotations

import json
import time
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from standardwebhooks import Webhook

from forewarn.daemon.service import schema
from forewarn.daemon.service.protection import (
    DeviceRisk,
    JobCosts,
    chance_within,
    cool_down_s,
    decide,
    save_pays,
    together,
)
from forewarn.models.checkpointing import drain_pays
from service_bench import Bench, Starter, batch, eventually, xid


@pytest.mark.parametrize(("precision", "threshold_s"), [(0.8, 43.75), (0.2, 175.0)])
def test_saving_pays_from_the_published_age_on(precision: float, threshold_s: float) -> None:
    assert not save_pays(precision, threshold_s, 35.0)
    assert save_pays(precision, threshold_s + 1e-6, 35.0)


def test_the_period_inside_a_window_is_the_published_one() -> None:
    assert cool_down_s(35.0, 0.8, 900.0) == pytest.approx(217.371, abs=1e-3)


@given(
    chance=st.floats(0.011, 0.999),
    age_s=st.floats(0, 1e5),
    save_s=st.floats(1, 1000),
    recovery_s=st.floats(0, 5000),
    swap_s=st.none() | st.floats(0, 1000),
    gpus=st.integers(1, 20_000),
)
def test_the_decision_is_the_published_rule_for_one_device(
    chance: float, age_s: float, save_s: float, recovery_s: float, swap_s: float | None, gpus: int
) -> None:
    job = JobCosts(age_s, save_s, recovery_s, swap_s=swap_s, gpus=gpus)
    decision = decide(job, [DeviceRisk("n/gpu0", {900: chance})])
    may_drain = swap_s is not None or chance >= 0.5
    drains = may_drain and drain_pays(chance, age_s, job.costs())
    assert decision.action.endswith("drain") == drains
    assert bool(decision.action) == (drains or age_s > save_s / chance)
    if decision.action == "checkpoint":
        # Acting is cheaper than not acting; the number of GPUs is on both sides.
        assert decision.loss_gpu_s > decision.cost_gpu_s > 0


def test_risks_of_many_devices_add_up() -> None:
    assert together([0.1] * 10) == pytest.approx(1 - 0.9**10)
    job = JobCosts(age_s=600.0, save_s=60.0, recovery_s=600.0)
    assert decide(job, [DeviceRisk("n/gpu0", {900: 0.06})]).action == ""
    few = [DeviceRisk(f"n/gpu{i}", {900: 0.06}) for i in range(3)]
    assert decide(job, few).action == "checkpoint"


def test_what_is_usual_for_all_is_left_to_regular_saves() -> None:
    job = JobCosts(age_s=1e6, save_s=1.0, recovery_s=600.0)
    usual = [DeviceRisk(f"n{i}/gpu0", {900: 0.02}, base={900: 0.02}) for i in range(1000)]
    assert decide(job, usual).action == ""


def test_many_rising_together_have_one_cause_and_nobody_is_drained() -> None:
    job = JobCosts(age_s=600.0, save_s=5.0, recovery_s=600.0, swap_s=60.0)
    crowd = [DeviceRisk(f"n{i}/gpu0", {900: 0.6}) for i in range(8)]
    decision = decide(job, crowd)
    assert (decision.action, decision.common_cause) == ("checkpoint", True)
    assert decide(job, [*crowd[:1], *(DeviceRisk(f"m{i}/gpu0", {900: 0.0}) for i in range(7))]).action == (
        "checkpoint_and_drain"
    )


def test_a_fatal_event_acts_whatever_the_age() -> None:
    job = JobCosts(age_s=0.0, save_s=60.0, recovery_s=0.0, swap_s=600.0)
    assert decide(job, [DeviceRisk("n/gpu0", {}, fatal=True)]).action == "checkpoint_and_drain"


@pytest.mark.parametrize(
    ("risk", "window_s", "expected"),
    [
        ({900: 0.1, 3600: 0.3}, 900.0, 0.1),
        ({3600: 0.19}, 1800.0, 0.1),  # 1 - sqrt(0.81)
        ({86400: 0.0}, 900.0, 0.0),
        ({86400: 1.0}, 900.0, 1.0),
        ({}, 900.0, 0.0),
        ({900: 0.1}, 1800.0, 0.19),
    ],
)
def test_chance_within_a_window(risk: dict[int, float], window_s: float, expected: float) -> None:
    assert chance_within(risk, window_s) == pytest.approx(expected)


# Through the service ------------------------------------------------------------------------------------------------


def protections(bench: Bench, **query: Any) -> list[dict[str, Any]]:
    items: list[dict[str, Any]] = bench.get("/v1/protections", **query)["items"]
    return items


def ready_job(bench: Bench, **body: Any) -> Any:
    """A job on n1, whose devices have been seen."""
    bench.send(batch())
    bench.scored()
    answer = bench.put_job(**body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_a_fatal_event_becomes_one_signed_webhook_and_one_acknowledged_protection(bench: Bench) -> None:
    secret = ready_job(bench)["webhook_secret"]
    bench.send(batch(sequence=2, events=[xid()]))
    request = eventually(lambda: bench.hooks)[0]
    Webhook(secret).verify(request.content, dict(request.headers))
    message = json.loads(request.content)
    data = message["data"]
    assert message["specversion"] == "1.0"
    assert (data["job"], data["device"], data["action"]) == ("llm", "n1/gpu1", "checkpoint_and_drain")
    assert data["simulated"] is True
    assert data["risk"]["900"] > 0.9
    assert any("79" in reason for reason in data["reasons"])
    # Neither the same event again nor the next cycles ask for more.
    bench.send(batch(sequence=3, events=[xid()]))
    bench.scored()
    bench.scored()
    (found,) = protections(bench)
    assert found["id"] == data["protection"]

    ack = f"/v1/protections/{found['id']}/ack"
    assert bench.post(ack, {"state": "accepted"}).json()["state"] == "accepted"
    done = {"state": "completed", "checkpoint": "/ckpt/7", "step": 7, "duration_seconds": 2.5}
    first = bench.post(ack, done)
    assert first.json()["save_seconds"] == 2.5
    assert bench.post(ack, done).json() == first.json()
    assert bench.post(ack, {"state": "accepted"}).json() == first.json()
    assert bench.post(ack, {"state": "failed"}).status_code == 409
    job = bench.get("/v1/jobs/llm")
    assert job["measured_checkpoint_seconds"] == 2.5
    assert job["last_checkpoint"] is not None
    bench.scored()
    assert len(protections(bench)) == len(bench.hooks) == 1
    assert bench.get("/v1/deliveries")["items"][0]["state"] == "delivered"


def test_the_risk_is_shown_before_the_next_cycle(bench: Bench) -> None:
    ready_job(bench)
    number = bench.service.engine.view.number
    bench.send(batch(sequence=2, events=[xid()]))
    row = eventually(lambda: bench.get("/v1/risk", min_risk=0.9)["items"])[0]
    assert (row["device"], row["level"]) == ("n1/gpu1", "critical")
    assert "79" in row["reason"]
    assert bench.service.engine.view.number == number
    bench.scored()
    assert bench.get("/v1/risk", min_risk=0.9)["items"][0]["device"] == "n1/gpu1"


def test_a_second_fatal_device_waits_for_the_open_protection_then_asks(bench: Bench) -> None:
    ready_job(bench)
    bench.send(batch(sequence=2, events=[xid("n1/gpu0")]))
    (first,) = eventually(lambda: protections(bench))
    bench.send(batch(sequence=3, events=[xid("n1/gpu1", "48")]))
    eventually(lambda: len(bench.get("/v1/events")["items"]) == 2)
    assert len(protections(bench)) == 1
    bench.post(f"/v1/protections/{first['id']}/ack", {"state": "completed", "duration_seconds": 1})
    bench.send(batch(sequence=4, events=[xid("n1/gpu1", "48", at=time.time() + 2)]))
    eventually(lambda: len(protections(bench)) == 2)


def test_silence_dry_run_and_other_nodes(bench: Bench) -> None:
    ready_job(bench, dry_run=True)
    bench.send(batch("n2"))
    bench.put_job("other", nodes=["n2"])
    quiet = {"job": "other", "hours": 1, "reason": "new driver"}
    assert bench.post("/v1/silences", quiet).status_code == 201
    bench.send(batch("n1", 2, events=[xid()]))
    bench.send(batch("n2", 2, events=[xid("n2/gpu0")]))
    bench.send(batch("n3", 1, events=[xid("n3/gpu0")]))
    eventually(lambda: len(bench.get("/v1/events")["items"]) == 3)
    (only,) = eventually(lambda: protections(bench))
    assert (only["job"], only["state"]) == ("llm", "dry_run")
    assert bench.hooks == []
    assert bench.post(f"/v1/protections/{only['id']}/ack", {"state": "completed"}).status_code == 409


def test_no_answer_escalates_to_an_alert_and_a_late_one_still_counts(start: Starter) -> None:
    bench = start(checkpoint_request_timeout_s=0.2)
    ready_job(bench, checkpoint_seconds=0.1)
    bench.send(batch(sequence=2, events=[xid()]))
    (found,) = eventually(lambda: protections(bench, state="escalated"))
    alert = next(a for a in bench.get("/v1/alerts")["items"] if a["key"] == f"protection:{found['id']}")
    assert (alert["level"], alert["job"]) == ("critical", "llm")
    acknowledged = bench.post(f"/v1/alerts/{alert['id']}/acknowledge").json()
    assert acknowledged["acknowledged"] and acknowledged["acknowledged_by"]
    late = bench.post(f"/v1/protections/{found['id']}/ack", {"state": "completed"})
    assert late.json()["state"] == "completed"
    assert not [a for a in bench.get("/v1/alerts")["items"] if a["key"] == alert["key"]]


def test_a_removed_job_is_told_nothing_more(start: Starter) -> None:
    bench = start(lambda request: httpx.Response(500))
    ready_job(bench)
    bench.send(batch(sequence=2, events=[xid()]))
    eventually(lambda: bench.hooks)
    answer = bench.client.delete("/v1/jobs/llm", headers=bench.headers(bench.operator))
    assert answer.status_code == 204
    assert protections(bench)[0]["state"] == "declined"
    eventually(lambda: bench.get("/v1/deliveries")["items"][0]["state"] == "answered")


def test_two_at_once_make_one(bench: Bench) -> None:
    """The index in the database holds even where two services share it."""
    ready_job(bench)
    view = bench.service.engine.view
    with bench.service.database.write() as run:
        job = run.execute(schema.jobs.select()).mappings().one()
        made = [
            bench.service.protections._make(
                run, job, view, "checkpoint", ["n1/gpu0"], 0.5, ["risk@n1/gpu0"], [], time.time()
            )
            for _ in range(2)
        ]
    assert [len(m) for m in made] == [1, 0]
