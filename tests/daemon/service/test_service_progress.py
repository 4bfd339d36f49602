"""A job's progress in the service: from the ranks' samples to findings, events, alerts, risk and what is shown."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Mapping
from typing import Any

import pytest
from msgspec.structs import replace

from forewarn.collectors.base import Device, Sample
from forewarn.collectors.errors import InputError, StorageError
from forewarn.daemon import wire
from forewarn.daemon.service import intake
from forewarn.daemon.service.intake import OWN_STREAM
from forewarn.daemon.service.progress import HELD_S, JobsProgress, JobState
from forewarn.daemon.service.readings import readings_of
from service_bench import Bench, Starter, eventually

NODES = ("n1", "n2")
RANKS_A_NODE = 4
POLL_S = 5.0


def rank_batch(
    node: str,
    sequence: int,
    at: float,
    *,
    step: int,
    seconds: float = 2.0,
    slow: Mapping[int, float] | None = None,
    idle: float = 0.5,
    marked: bool = False,
    losses: Mapping[int, float] | None = None,
    job: str = "llama",
    without: frozenset[int] = frozenset(),
) -> wire.Batch:
    """What the agent of a node sends of its four ranks, and of their GPUs."""
    first = NODES.index(node) * RANKS_A_NODE
    noise = random.Random(f"{node}{sequence}")
    devices, samples = [], []
    for i in range(RANKS_A_NODE):
        rank = first + i
        gpu = Device(f"{node}/gpu{i}", "gpu", "H100", f"GPU-{node}-{i}", simulated=True)
        devices.append(gpu)
        if rank in without:
            continue
        # One half tells the GPU's name, the other its UUID.
        labels = {"job": job, "rank": str(rank), "gpu": f"gpu{i}" if rank % 2 else gpu.serial}
        name = f"{node}/{job}.rank{rank}"
        devices.append(Device(name, "job", labels=labels, simulated=True))
        compute = noise.gauss(1.0, 0.004) * (slow or {}).get(rank, 1.0)
        values = {
            "training_step_total": step,
            "training_idle_seconds": idle,
            "training_iteration_seconds": seconds * noise.gauss(1.0, 0.01),
            "training_compute_seconds": compute,
            "training_samples_per_second": 32.0,
            "training_loss": 2.5,
            "training_bad_losses_total": (losses or {}).get(rank, 0.0),
            "training_marked": float(marked),
        }
        if idle > POLL_S:
            del values["training_iteration_seconds"], values["training_compute_seconds"]
        samples += [Sample(name, k, float(v)) for k, v in values.items()]
    gpus = [Sample(f"{node}/gpu{i}", "gpu_temperature_celsius", 60.0) for i in range(RANKS_A_NODE)]
    return wire.Batch(
        node=node,
        stream="s1",
        sequence=sequence,
        sent=at,
        devices=devices,
        frames=[wire.pack_samples(at, samples), wire.pack_samples(at, gpus)],
    )


class Jobs:
    """The jobs' progress alone, fed by the clock of the test."""

    def __init__(self) -> None:
        self.jobs = JobsProgress()
        self.devices: dict[str, Device] = {}
        self.now = 1_700_000_000.0
        self.sequence = 0
        self.states: dict[str, JobState] = {}
        self.told: list[tuple[str, str, str]] = []
        self.batches: list[wire.Batch] = []

    def poll(self, **fields: Any) -> JobState:
        """One poll of both nodes and one cycle after it."""
        self.sequence += 1
        self.now += POLL_S
        fields.setdefault("step", self.sequence)
        for node in NODES:
            sent = rank_batch(node, self.sequence, self.now, **fields)
            self.devices.update({d.device: d for d in sent.devices})
            for device in self.jobs.take(node, readings_of(sent), self.devices.get):
                del self.devices[device]
        self.cycle()
        return self.states[fields.get("job", "llama")]

    def polls(self, count: int, **fields: Any) -> JobState:
        for _ in range(count):
            state = self.poll(**fields)
        return state

    def cycle(self) -> None:
        self.states, batches = self.jobs.judge(self.now, lambda node: 0)
        self.batches += batches
        for batch in batches:
            wire.decode(wire.encode(batch))  # it keeps to what is asked of agents
            self.told += [(e.device, e.kind, e.code) for e in batch.events]


@pytest.fixture
def jobs() -> Jobs:
    made = Jobs()
    made.polls(100)
    return made


def test_a_steady_job_is_shown_and_nothing_is_told(jobs: Jobs) -> None:
    state = jobs.poll()
    assert (state.finding, state.ranks, state.step) == ("fine", 8, 101)
    assert state.usual_iteration_s == pytest.approx(2.0, rel=0.02)
    assert state.samples_per_second == 256.0
    assert (state.devices, state.since, state.simulated) == ((), None, True)
    assert jobs.told == []


@pytest.mark.parametrize(("rank", "gpu"), [(5, "n2/gpu1"), (2, "n1/gpu2")])
def test_a_slow_rank_accuses_its_gpu_by_name_or_uuid(jobs: Jobs, rank: int, gpu: str) -> None:
    state = jobs.polls(20, slow={rank: 1.2}, seconds=2.4)
    assert (state.finding, state.devices, state.nodes) == ("straggler", (gpu,), (gpu[:2],))
    assert f"rank {rank} on {gpu[:2]} computes" in state.reason
    assert jobs.told == [(gpu, "job_straggler", "compute")] or jobs.told == [
        ("n1/llama.rank0", "job_slow", "job"),
        ("n1/llama.rank0", "job_recovered", "slow"),
        (gpu, "job_straggler", "compute"),
    ]


def test_a_finding_that_ended_is_told_to_be_over_after_a_while(jobs: Jobs) -> None:
    jobs.polls(20, slow={5: 1.2})
    jobs.polls(3)
    assert jobs.states["llama"].finding == "straggler"
    jobs.polls(int(HELD_S / POLL_S) + 2)
    assert jobs.states["llama"].finding == "fine"
    assert jobs.told[-1] == ("n2/gpu1", "job_recovered", "straggler")


def test_a_slow_job_accuses_nobody(jobs: Jobs) -> None:
    state = jobs.polls(20, seconds=2.4)
    assert (state.finding, state.devices) == ("slow_job", ())
    assert state.slowdown_score > 1
    assert jobs.told == [("n1/llama.rank0", "job_slow", "job")]


def test_an_evaluation_is_no_alarm_and_a_hang_is(jobs: Jobs) -> None:
    for n in range(40):
        state = jobs.poll(step=100, idle=POLL_S * (n + 2), marked=True)
        assert state.finding == "fine"
    assert state.in_marked_phase
    jobs.poll(step=101, idle=1.0)
    for n in range(20):
        state = jobs.poll(step=101, idle=POLL_S * (n + 2))
    assert (state.finding, state.devices) == ("stalled", ())
    assert ("n1/llama.rank0", "job_stalled", "job") in jobs.told


def test_a_bad_loss_of_one_rank_names_its_gpu(jobs: Jobs) -> None:
    state = jobs.polls(2, losses={3: 1.0})
    assert (state.finding, state.loss_finding, state.bad_losses) == ("fine", "not_a_number", 1)
    assert state.devices == ("n1/gpu3",)
    assert jobs.told == [("n1/gpu3", "job_loss", "not_a_number")]


def test_ranks_that_ended_are_forgotten_with_their_devices(jobs: Jobs) -> None:
    state = jobs.poll(without=frozenset({6, 7}))
    assert state.ranks == 6
    assert "n2/llama.rank6" not in jobs.devices


def test_a_rank_without_a_known_gpu_is_named_itself(jobs: Jobs) -> None:
    for device in [d for d in jobs.devices if "/gpu" in d]:
        del jobs.devices[device]
    fresh = JobsProgress()
    again = Jobs()
    again.jobs = fresh
    for sequence in range(1, 30):
        again.now += POLL_S
        for node in NODES:
            sent = rank_batch(node, sequence, again.now, step=sequence, slow={5: 1.2})
            described = {d.device: d for d in sent.devices if d.kind == "job"}
            fresh.take(node, readings_of(sent), described.get)
        again.cycle()
    assert again.states["llama"].devices == ("n2/llama.rank5",)


def test_unnamed_jobs_of_two_nodes_are_two() -> None:
    jobs = JobsProgress()
    for node in NODES:
        sample = Sample(f"{node}/rank0", "training_step_total", 3.0)
        frame = wire.pack_samples(100.0, [sample])
        batch = wire.Batch(node=node, stream="s", sequence=1, frames=[frame])
        jobs.take(node, readings_of(batch), lambda device: None)
    states, _ = jobs.judge(100.0, lambda node: 0)
    assert set(states) == {"unnamed@n1", "unnamed@n2"}


def test_news_continue_the_numbers_that_were_applied(jobs: Jobs) -> None:
    jobs.polls(20, seconds=2.4)
    assert [(b.stream, b.sequence) for b in jobs.batches] == [(OWN_STREAM, 1)]
    again = JobsProgress.of(json.loads(json.dumps(jobs.jobs.plain(), allow_nan=False)))
    jobs.jobs = again
    jobs.sequence += 1
    _, batches = again.judge(jobs.now + 2 * HELD_S, lambda node: 7)
    assert [b.sequence for b in batches] == [8]


def test_kept_state_goes_on_without_telling_again(jobs: Jobs) -> None:
    jobs.polls(20, slow={5: 1.2})
    told = list(jobs.told)
    jobs.jobs = JobsProgress.of(json.loads(json.dumps(jobs.jobs.plain(), allow_nan=False)))
    state = jobs.polls(5, slow={5: 1.2})
    assert state.finding == "straggler"
    assert jobs.told == told


@pytest.mark.parametrize(
    "plain", [{}, {"jobs": 1}, {"jobs": {"a": {}}, "ranks": []}, {"jobs": {}, "ranks": [1]}]
)
def test_a_state_of_something_else_is_refused(plain: dict[str, Any]) -> None:
    with pytest.raises(StorageError):
        JobsProgress.of(plain)


def test_no_agent_may_use_the_services_own_stream() -> None:
    batch = wire.Batch(node="n1", stream=OWN_STREAM, sequence=1, sent=100.0)
    with pytest.raises(InputError, match="the service's own"):
        intake.check(batch, 100.0)


# --- a whole service ---


def _feed(bench: Bench, number: int, polls: int, cycles: int = 1, **fields: Any) -> None:
    """Polls of the last minutes, in batches with a cycle after each. `number`: of the first batch."""
    now, each = time.time(), polls // cycles
    for cycle in range(cycles):
        for node in NODES:
            whole = None
            for poll in range(each):
                step = (number + cycle) * 1000 + poll
                at = now - 45 + 5 * (number + cycle) + 4 * poll / each
                sent = rank_batch(node, step, at, step=step, **fields)
                whole = sent if whole is None else replace(whole, frames=[*whole.frames, *sent.frames])
            assert whole is not None
            assert bench.send(replace(whole, sequence=number + cycle, sent=time.time())).status_code == 200
        bench.scored()


def test_a_straggler_is_an_event_an_alert_a_modest_risk_and_no_reason_to_drain(bench: Bench) -> None:
    assert bench.put_job("llama", nodes=list(NODES), gpus=8).status_code == 200
    _feed(bench, 1, 100)
    assert bench.get("/v1/jobs/llama")["progress"]["finding"] == "fine"
    _feed(bench, 2, 24, cycles=6, slow={5: 1.25}, seconds=2.5)
    row = eventually(lambda: _with(bench, "straggler"))
    assert row["progress"]["devices"] == ["n2/gpu1"]
    assert row["progress"]["step"] > 2000
    events = eventually(lambda: bench.get("/v1/events", kind="job_straggler")["items"])
    assert [(e["device"], e["node"], e["code"]) for e in events] == [("n2/gpu1", "n2", "compute")]
    alert = eventually(lambda: bench.get("/v1/alerts", job="llama")["items"])[0]
    assert (alert["key"], alert["device"], alert["level"]) == ("progress:llama", "n2/gpu1", "warning")
    assert alert["simulated"]
    risk = eventually(lambda: _reason(bench, "n2/gpu1", "longer than its peers"))
    assert 0.02 <= risk["risk"]["900"] < 0.1
    assert not [p for p in bench.get("/v1/protections")["items"] if "drain" in p["action"]]
    listed = bench.get("/v1/progress")["items"]
    assert [(i["job"], i["registered"], i["finding"]) for i in listed] == [("llama", True, "straggler")]
    page = bench.client.get("/metrics", headers=bench.headers(bench.reader)).text
    assert 'forewarn_job_trouble{finding="straggler",job="llama"} 1.0' in page


def test_a_slow_job_saves_nothing_and_survives_a_restart(start: Starter) -> None:
    bench = start()
    bench.put_job("llama", nodes=list(NODES))
    _feed(bench, 1, 100)
    _feed(bench, 2, 18, seconds=2.5)
    eventually(lambda: _with(bench, "slow_job"))
    eventually(lambda: bench.get("/v1/events", kind="job_slow")["items"])
    alert = eventually(lambda: bench.get("/v1/alerts", job="llama")["items"])[0]
    assert "network, storage or data" in alert["reason"]
    assert bench.get("/v1/protections")["items"] == []
    bench.stop()
    again = start()
    assert eventually(lambda: _with(again, "slow_job"))["progress"]["ranks"] == 8
    assert len(again.get("/v1/events", kind="job_slow")["items"]) == 1


def test_a_job_that_nobody_registered_is_shown_as_well(bench: Bench) -> None:
    _feed(bench, 1, 2)
    listed = eventually(lambda: bench.get("/v1/progress", job="llama")["items"])
    assert [(i["job"], i["registered"], i["ranks"]) for i in listed] == [("llama", False, 8)]
    assert bench.client.get("/v1/jobs/llama", headers=bench.headers(bench.reader)).status_code == 404


def _with(bench: Bench, finding: str) -> Any:
    bench.scored()  # by then the last batch was taken in, if not in the cycle before
    row = bench.get("/v1/jobs/llama")
    return row if row["progress"] and row["progress"]["finding"] == finding else None


def _reason(bench: Bench, device: str, text: str) -> Any:
    row = bench.get(f"/v1/risk/{device}")
    return row if any(text in r["text"] for r in row["reasons"]) else None
