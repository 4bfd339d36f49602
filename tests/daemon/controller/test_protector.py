from __future__ import annotations

import os
import signal
import socket
import threading
from pathlib import Path

import pytest

from forewarn.collectors.clock import ManualClock
from forewarn.collectors.errors import StorageError
from forewarn.collectors.training import ProgressSender, decode
from forewarn.daemon.controller import checkpoints
from forewarn.daemon.controller.mailbox import Mailbox
from forewarn.daemon.controller.messages import SaveRequest
from forewarn.daemon.controller.protector import Protector


@pytest.fixture
def protector(mailbox: Mailbox, clock: ManualClock) -> Protector:
    return Protector(mailbox, clock=clock, watch=False)


def never() -> str:
    raise AssertionError("nobody asked for a save")


def test_idle_steps_save_nothing(protector: Protector) -> None:
    assert [protector.step(n, never) for n in range(3)] == [None, None, None]


def test_request_is_served_at_the_next_step_and_reported(
    protector: Protector, mailbox: Mailbox, clock: ManualClock
) -> None:
    mailbox.accept("msg_1", SaveRequest(protection="p1"))
    assert protector.look()

    def save() -> Path:
        assert mailbox.state_of("p1") == "saving"
        clock.advance(2.5)
        return Path("/checkpoints/step-7")

    saved = protector.step(7, save)
    assert saved is not None
    assert (saved.step, saved.checkpoint, saved.duration_s) == (7, "/checkpoints/step-7", 2.5)
    assert mailbox.undelivered()[-1].body == {
        "state": "completed",
        "checkpoint": "/checkpoints/step-7",
        "step": 7,
        "duration_seconds": 2.5,
    }
    assert not protector.look()
    assert protector.step(8, never) is None


def test_one_save_serves_all_that_is_open_by_then(protector: Protector, mailbox: Mailbox) -> None:
    mailbox.accept("m1", SaveRequest(protection="p1"))
    mailbox.accept("m2", SaveRequest(protection="p2"))
    protector.look()
    saved = protector.step(1, lambda: "c")
    assert saved is not None and saved.protections == ["p1", "p2"]


def test_request_that_arrives_during_a_save_gets_its_own(protector: Protector, mailbox: Mailbox) -> None:
    mailbox.accept("m1", SaveRequest(protection="p1"))
    protector.look()

    def save() -> str:
        mailbox.accept("m2", SaveRequest(protection="p2"))
        protector.look()
        return "c1"

    protector.step(1, save)
    assert mailbox.state_of("p2") == "waiting"
    saved = protector.step(2, lambda: "c2")
    assert saved is not None and saved.protections == ["p2"]


def test_failed_save_is_reported_and_training_goes_on(protector: Protector, mailbox: Mailbox) -> None:
    mailbox.accept("m1", SaveRequest(protection="p1"))
    protector.look()

    def save() -> str:
        raise OSError(28, "No space left on device")

    assert protector.step(4, save) is None
    last = mailbox.undelivered()[-1].body
    assert last["state"] == "failed" and last["step"] == 4 and "No space left" in last["reason"]
    assert protector.step(5, never) is None


def test_deadline_that_has_passed_is_told_and_not_served(
    protector: Protector, mailbox: Mailbox, clock: ManualClock
) -> None:
    mailbox.accept("m1", SaveRequest(protection="p1", deadline=clock.now() + 10))
    clock.advance(15)
    protector.look()
    assert protector.step(1, never) is None
    last = mailbox.undelivered()[-1].body
    assert last["state"] == "failed" and "deadline passed 5 s before" in last["reason"]


def test_save_that_a_crash_interrupted_is_made_after_the_restart(
    mailbox: Mailbox, clock: ManualClock
) -> None:
    mailbox.accept("m1", SaveRequest(protection="p1"))
    mailbox.begin(["p1"])
    again = Protector(mailbox, clock=clock, watch=False)
    saved = again.step(9, lambda: "c")
    assert saved is not None and saved.protections == ["p1"]


def test_signal_asks_for_a_save_of_its_own(protector: Protector, mailbox: Mailbox) -> None:
    before = signal.getsignal(signal.SIGUSR1)
    try:
        protector.on_signal()
        os.kill(os.getpid(), signal.SIGUSR1)
        saved = protector.step(1, lambda: "c")
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert saved is not None and saved.protections == []
    assert mailbox.undelivered() == []
    assert protector.step(2, never) is None


def test_steps_are_told_to_the_agent_without_the_time_of_saves(mailbox: Mailbox, clock: ManualClock) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as agent:
        agent.bind(b"")  # an address of the kernel's choice, without a file
        address = agent.getsockname()
        sender = ProgressSender("@" + address[1:].decode())
        protector = Protector(mailbox, clock=clock, watch=False, progress=sender, job="llm", rank=3)
        clock.advance(1)
        protector.step(1, never)
        clock.advance(2)
        protector.request()

        def save() -> str:
            clock.advance(60)
            return "c"

        protector.step(2, save)
        clock.advance(3)
        protector.step(3, never)
        protector.close()
        agent.setblocking(False)
        told = [decode(agent.recv(4096)) for _ in range(5)]
    assert [(m.step, m.seconds, m.mark, m.done) for m in told] == [
        (1, None, "", False),
        (2, 2.0, "", False),
        (2, None, "checkpoint", False),
        (3, 3.0, "", False),
        (0, None, "", True),
    ]
    assert {(m.job, m.rank) for m in told} == {("llm", 3)}


def test_missing_agent_costs_nothing(mailbox: Mailbox, clock: ManualClock) -> None:
    sender = ProgressSender("@forewarn-test-nobody-listens")
    protector = Protector(mailbox, clock=clock, watch=False, progress=sender)
    assert protector.step(1, never) is None
    assert sender.dropped == 1
    protector.close()


def test_watcher_thread_sees_the_flag(mailbox: Mailbox) -> None:
    with Protector(mailbox, watch_interval_s=0.01) as protector:
        mailbox.accept("m1", SaveRequest(protection="p1"))
        saved = threading.Event()
        for step in range(10_000):
            if protector.step(step, lambda: "c"):
                saved.set()
                break
            threading.Event().wait(0.001)
    assert saved.is_set()


def test_crash_in_the_middle_of_a_write_leaves_the_previous_file(tmp_path: Path) -> None:
    path = checkpoints.path_of(tmp_path, 3, "npz")
    checkpoints.write_whole(path, lambda stream: stream.write(b"first"))

    def break_off(stream: object) -> None:
        assert hasattr(stream, "write")
        stream.write(b"sec")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        checkpoints.write_whole(path, break_off)
    assert path.read_bytes() == b"first"
    assert checkpoints.complete_ones(tmp_path) == [path]


def test_newest_checkpoints_are_kept(tmp_path: Path) -> None:
    for step in (5, 100, 20):
        checkpoints.write_whole(checkpoints.path_of(tmp_path, step, "npz"), lambda stream: stream.write(b"x"))
    (tmp_path / "step-00000200.npz.part").write_bytes(b"half")
    removed = checkpoints.prune(tmp_path, keep=2)
    assert [p.name for p in removed] == ["step-00000005.npz"]
    assert [p.name for p in checkpoints.complete_ones(tmp_path)] == ["step-00000100.npz", "step-00000020.npz"]


def test_checkpoint_that_cannot_be_written_says_where(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match=r"file/step-1.*cannot be written"):
        checkpoints.write_whole(tmp_path / "file" / "step-1.npz", lambda stream: stream.write(b""))
