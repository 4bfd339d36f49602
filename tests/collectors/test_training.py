"""Progress messages: formats, medians, marks, stalls, files, and senders that must never wait."""

from __future__ import annotations

import contextlib
import json
import math
import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forewarn.collectors.base import Collector, Reading
from forewarn.collectors.catalog import METRICS
from forewarn.collectors.clock import ManualClock
from forewarn.collectors.errors import UnavailableError
from forewarn.collectors.registry import Setup, create
from forewarn.collectors.training import (
    FORGET_AFTER_S,
    MAX_MESSAGE_BYTES,
    ProgressSender,
    Step,
    TrainingCollector,
    decode,
    encode,
)


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def root(tmp_path: Path) -> Iterator[Path]:
    """A short root: the path of a Unix socket may have 107 characters."""
    yield tmp_path
    assert not [t for t in threading.enumerate() if t.name == "training"], "a listener was left running"


@pytest.fixture
def collector(root: Path, clock: ManualClock) -> Iterator[TrainingCollector]:
    made = TrainingCollector(Setup(clock, root), path="/t.sock", folder="/progress")
    made.collect()
    yield made
    made.close()


@pytest.fixture
def sender(root: Path) -> Iterator[ProgressSender]:
    made = ProgressSender(str(root / "t.sock"))
    yield made
    made.close()


def _of(reading: Reading, device: str) -> dict[str, float]:
    return {s.metric: s.value for s in reading.samples if s.device == device}


# --- messages ---


@pytest.mark.parametrize(
    "message",
    [
        encode(Step(step=7, job="llama", rank=3, seconds=1.5)),
        b'{"step": 7, "job": "llama", "rank": 3, "seconds": 1.5}',
        b' {"step": 7, "job": "llama", "rank": 3, "seconds": 1.5, "of_a_later_version": [1]}\n',
        msgspec.msgpack.encode({"step": 7, "job": "llama", "rank": 3, "seconds": 1.5, "later": None}),
    ],
)
def test_both_formats(message: bytes) -> None:
    assert decode(message) == Step(step=7, job="llama", rank=3, seconds=1.5)


@pytest.mark.parametrize(
    "message",
    [
        *(
            b"",
            b"{}",
            b"[]",
            b"\xff",
            b'{"step": -1}',
            b'{"step": "x"}',
            b'{"step": 1, "rank": -1}',
            b"{" * 3000,
        ),
        *(b'{"step": 1, "job": "' + b"x" * 200 + b'"}', b'{"step":1,"job":"' + b"\xff" + b'"}'),
        b"x" * (MAX_MESSAGE_BYTES + 1),
    ],
)
def test_other_messages_are_refused(message: bytes) -> None:
    with pytest.raises(msgspec.DecodeError):
        decode(message)


@given(st.binary(max_size=200))
def test_any_bytes_are_a_step_or_refused(message: bytes) -> None:
    with contextlib.suppress(msgspec.DecodeError):
        assert decode(message).step >= 0


# --- from the socket ---


def test_medians_of_the_steps_since_the_last_poll(
    collector: TrainingCollector, sender: ProgressSender
) -> None:
    for i, seconds in enumerate((2.0, 2.2, 9.0), start=100):
        assert sender.send(
            Step(
                step=i,
                job="llama",
                rank=3,
                seconds=seconds,
                compute=1.0 + i / 100,
                samples_per_second=64.0,
                loss=2.5,
            )
        )
    reading = collector.collect()
    assert _of(reading, "llama.rank3") == pytest.approx(
        {
            "training_step_total": 102,
            "training_rank": 3,
            "training_idle_seconds": 0,
            "training_iteration_seconds": 2.2,
            "training_compute_seconds": 2.01,
            "training_samples_per_second": 64,
            "training_loss": 2.5,
            "training_bad_losses_total": 0,
            "training_marked_steps_total": 0,
            "training_marked": 0,
        }
    )
    assert all(METRICS[s.metric].kind == "job" for s in reading.samples)


def test_more_steps_than_a_socket_queues(collector: TrainingCollector, sender: ProgressSender) -> None:
    """The listener empties the socket between polls; a burst faster than it is dropped, never waited for."""
    sent = sum(sender.send(Step(step=i, seconds=1.0)) for i in range(3000))
    assert sent + sender.dropped == 3000
    assert sent > 0
    assert _of(collector.collect(), "rank0")["training_iteration_seconds"] == 1.0


def test_marked_steps_are_left_out_of_the_time(collector: TrainingCollector, sender: ProgressSender) -> None:
    for step, seconds, mark in ((1, 2.0, ""), (2, 45.0, "checkpoint"), (3, 2.0, ""), (4, 30.0, "evaluation")):
        sender.send(Step(step=step, seconds=seconds, mark=mark))
    got = _of(collector.collect(), "rank0")
    assert got["training_iteration_seconds"] == 2.0
    assert got["training_marked_steps_total"] == 2
    assert got["training_step_total"] == 4


def test_a_phase_is_marked_from_its_beginning_to_the_next_step(
    collector: TrainingCollector, sender: ProgressSender, clock: ManualClock
) -> None:
    sender.send(Step(step=7, seconds=2.0))
    assert _of(collector.collect(), "rank0")["training_marked"] == 0
    sender.send(Step(step=7, mark="evaluation"))
    clock.advance(90.0)
    got = _of(collector.collect(), "rank0")
    assert (got["training_marked"], got["training_idle_seconds"]) == (1, 90.0)
    sender.send(Step(step=8, seconds=2.0))
    got = _of(collector.collect(), "rank0")
    assert (got["training_marked"], got["training_idle_seconds"]) == (0, 0)


def test_a_rank_whose_process_ended_is_told_once_and_forgotten(
    root: Path, collector: TrainingCollector, sender: ProgressSender
) -> None:
    """`root` has no /proc: only when one is there, and without the process, is it known to have ended."""
    for step in range(1, 4):
        sender.send(Step(step=step, job="llama", rank=2))
    assert _of(collector.collect(), "llama.rank2")["training_step_total"] == 3
    (root / "proc" / "self").mkdir(parents=True)
    (root / "proc" / str(os.getpid())).mkdir()
    assert not collector.collect().events
    (root / "proc" / str(os.getpid())).rmdir()
    reading = collector.collect()
    assert [(e.device, e.kind, e.code) for e in reading.events] == [
        ("llama.rank2", "job_ended", "unannounced")
    ]
    assert "after step 3" in reading.events[0].message
    assert not reading.samples
    assert not collector.collect().events


def test_a_process_that_sends_one_message_and_ends_is_no_rank(
    root: Path, collector: TrainingCollector, sender: ProgressSender
) -> None:
    (root / "proc" / "self").mkdir(parents=True)
    sender.send(Step(step=1))
    reading = collector.collect()
    assert not reading.events
    assert _of(reading, "rank0")["training_step_total"] == 1


def test_a_stall_shows_as_idle_time(
    collector: TrainingCollector, sender: ProgressSender, clock: ManualClock
) -> None:
    sender.send(Step(step=5, seconds=2.0))
    collector.collect()
    clock.advance(60.0)
    sender.send(Step(step=5, seconds=2.0))  # said again, not done again
    got = _of(collector.collect(), "rank0")
    assert got["training_idle_seconds"] == 60.0
    sender.send(Step(step=6, seconds=62.0))
    assert _of(collector.collect(), "rank0")["training_idle_seconds"] == 0.0


def test_without_a_message_no_time_is_given_again(
    collector: TrainingCollector, sender: ProgressSender
) -> None:
    sender.send(Step(step=5, seconds=2.0))
    assert "training_iteration_seconds" in _of(collector.collect(), "rank0")
    got = _of(collector.collect(), "rank0")
    assert "training_iteration_seconds" not in got
    assert got["training_step_total"] == 5


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
def test_a_bad_loss_is_counted_and_never_a_value(
    collector: TrainingCollector, sender: ProgressSender, loss: float
) -> None:
    sender.send(Step(step=1, loss=2.0))
    sender.send(Step(step=2, loss=loss))
    sender.send(Step(step=3, loss_bad=True))
    got = _of(collector.collect(), "rank0")
    assert got["training_loss"] == 2.0
    assert got["training_bad_losses_total"] == 2


@pytest.mark.parametrize("seconds", [0.0, -1.0, math.nan, math.inf])
def test_impossible_times_are_left_out(
    collector: TrainingCollector, sender: ProgressSender, seconds: float
) -> None:
    sender.send(Step(step=1, seconds=seconds))
    assert "training_iteration_seconds" not in _of(collector.collect(), "rank0")


def test_ranks_say_who_and_where_they_are(collector: TrainingCollector, sender: ProgressSender) -> None:
    sender.send(Step(step=1, job="my job/7", rank=11, gpu="gpu3", role="pipeline0", world_size=1024))
    (device,) = collector.collect().devices
    assert (device.device, device.kind) == ("my_job_7.rank11", "job")
    assert device.labels == {
        "job": "my_job_7",
        "rank": "11",
        "gpu": "gpu3",
        "role": "pipeline0",
        "world_size": "1024",
    }


def test_goodbye_and_silence_end_a_rank(
    collector: TrainingCollector, sender: ProgressSender, clock: ManualClock
) -> None:
    sender.send(Step(step=1, rank=0))
    sender.send(Step(step=1, rank=1))
    collector.collect()
    sender.send(Step(step=2, rank=0, done=True))
    assert {d.device for d in collector.collect().devices} == {"rank1"}
    clock.advance(FORGET_AFTER_S + 1)
    assert collector.collect().devices == []


def test_a_job_that_starts_anew_counts_from_its_own_step(
    collector: TrainingCollector, sender: ProgressSender, clock: ManualClock
) -> None:
    sender.send(Step(step=500))
    collector.collect()
    clock.advance(5)
    sender.send(Step(step=450))
    got = _of(collector.collect(), "rank0")
    assert (got["training_step_total"], got["training_idle_seconds"]) == (450, 0)


def test_garbage_is_told_and_costs_nothing_else(
    collector: TrainingCollector, sender: ProgressSender, root: Path
) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as anyone:
        anyone.sendto(b"not a step", str(root / "t.sock"))
    sender.send(Step(step=1))
    reading = collector.collect()
    assert _of(reading, "rank0")["training_step_total"] == 1
    (error,) = reading.errors
    assert error.source == "training"
    assert "1 messages" in error.message
    assert collector.collect().errors == []


# --- the sender ---


def test_without_an_agent_the_sender_drops(root: Path) -> None:
    lonely = ProgressSender(str(root / "nobody.sock"))
    assert lonely.send(Step(step=1)) is False
    assert lonely.dropped == 1
    lonely.close()
    assert lonely.send(Step(step=2)) is False


def test_a_full_queue_drops_and_does_not_wait(root: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as deaf:
        deaf.bind(str(root / "deaf.sock"))
        sender = ProgressSender(str(root / "deaf.sock"))
        results = [sender.send(Step(step=i)) for i in range(5000)]
        assert results[0] is True
        assert results[-1] is False
        sender.close()


def test_a_sender_finds_an_agent_that_comes_back(root: Path, clock: ManualClock) -> None:
    sender = ProgressSender(str(root / "t.sock"))
    for step in (1, 2):
        agent = TrainingCollector(Setup(clock, root), path="/t.sock", folder="")
        agent.collect()
        assert sender.send(Step(step=step))
        assert _of(agent.collect(), "rank0")["training_step_total"] == step
        agent.close()
        assert sender.send(Step(step=99)) is False
    sender.close()


def test_the_socket_without_a_file(clock: ManualClock) -> None:
    name = f"@forewarn-test-{os.getpid()}"
    agent = TrainingCollector(Setup(clock), path=name, folder="")
    agent.collect()
    sender = ProgressSender(name)
    assert sender.send(Step(step=4))
    assert _of(agent.collect(), "rank0")["training_step_total"] == 4
    sender.close()
    agent.close()


def test_the_environment_names_the_socket(
    root: Path, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FOREWARN_TRAINING_SOCKET", str(root / "t.sock"))
    agent = TrainingCollector(Setup(clock, root), path="/t.sock", folder="")
    agent.collect()
    sender = ProgressSender()
    assert sender.send(Step(step=1))
    sender.close()
    agent.close()


# --- the socket's file ---


def test_the_file_goes_with_the_collector(root: Path, clock: ManualClock) -> None:
    agent = TrainingCollector(Setup(clock, root), path="/run/forewarn/t.sock", folder="")
    agent.collect()
    path = root / "run/forewarn/t.sock"
    assert path.stat().st_mode & 0o777 == 0o666
    agent.close()
    assert not path.exists()
    agent.close()


def test_the_socket_of_a_killed_agent_is_taken_over(root: Path, clock: ManualClock) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as killed:
        killed.bind(str(root / "t.sock"))
    agent = TrainingCollector(Setup(clock, root), path="/t.sock", folder="")
    agent.collect()
    agent.close()


def test_the_socket_of_a_living_agent_is_left_alone(
    collector: TrainingCollector, root: Path, clock: ManualClock
) -> None:
    second = TrainingCollector(Setup(clock, root), path="/t.sock", folder="")
    with pytest.raises(UnavailableError, match="another agent listens"):
        second.collect()
    second.close()
    assert (root / "t.sock").exists()


def test_a_file_in_the_way_is_named(root: Path, clock: ManualClock) -> None:
    (root / "t.sock").write_text("precious")
    agent = TrainingCollector(Setup(clock, root), path="/t.sock", folder="")
    with pytest.raises(UnavailableError, match="is not a socket"):
        agent.collect()
    assert (root / "t.sock").read_text() == "precious"


def test_a_socket_that_cannot_be_made_names_the_way_out(root: Path, clock: ManualClock) -> None:
    agent = TrainingCollector(Setup(clock, root), path="/" + "x" * 200 + ".sock", folder="")
    with pytest.raises(UnavailableError, match="set path"):
        agent.collect()


# --- progress files ---


def test_progress_files(root: Path, collector: TrainingCollector, clock: ManualClock) -> None:
    folder = root / "progress"
    folder.mkdir()
    file = folder / "rank0.json"
    file.write_text(json.dumps({"job": "llama", "rank": 0, "step": 12, "seconds": 1.9}) + "\n")
    (folder / "notes.txt").write_text("not looked at")
    assert _of(collector.collect(), "llama.rank0")["training_iteration_seconds"] == 1.9
    clock.advance(5)
    got = _of(collector.collect(), "llama.rank0")  # unchanged: read once
    assert "training_iteration_seconds" not in got
    assert got["training_idle_seconds"] == 5
    file.write_text(json.dumps({"job": "llama", "rank": 0, "step": 130, "seconds": 2.25}))
    assert _of(collector.collect(), "llama.rank0")["training_step_total"] == 130


def test_a_bad_progress_file_is_named_once(root: Path, collector: TrainingCollector) -> None:
    (root / "progress").mkdir()
    (root / "progress/x.json").write_text('{"step": ')
    (error,) = collector.collect().errors
    assert "x.json" in error.message
    assert collector.collect().errors == []


def test_is_made_by_name(root: Path, clock: ManualClock) -> None:
    made = create("training", {"path": "/t.sock"}, Setup(clock, root))
    assert isinstance(made, Collector)
    assert made.collect().samples == []
    made.close()


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.one_of(
            st.binary(max_size=100), st.builds(Step, step=st.integers(0, 9), seconds=st.floats()).map(encode)
        )
    )
)
def test_any_datagrams(tmp_path_factory: pytest.TempPathFactory, datagrams: list[bytes]) -> None:
    root = tmp_path_factory.mktemp("t")
    agent = TrainingCollector(Setup(ManualClock(), root), path="/t.sock", folder="")
    agent.collect()
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as anyone:
        for datagram in datagrams:
            anyone.sendto(datagram, str(root / "t.sock"))
    for sample in agent.collect().samples:
        assert math.isfinite(sample.value)
    agent.close()
