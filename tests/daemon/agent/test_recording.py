"""A recording gives back what was read, tells nothing of whose machine it was, and survives damage in transit."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from fakes_agent import FakeCollector, FakeTransport, gpu_reading
from forewarn.collectors.base import CollectionError, Device, Event, Reading, Sample
from forewarn.collectors.clock import ManualClock
from forewarn.collectors.errors import InputError, StorageError, UnavailableError
from forewarn.daemon.agent.main import Agent
from forewarn.daemon.agent.recording import Recorder, Replay, Scrubber, read
from forewarn.daemon.agent.scheduler import InlineRunner, Outcome, Scheduler, Slot
from forewarn.daemon.agent.shipper import Shipper
from forewarn.daemon.agent.spool import Spool
from forewarn.daemon.config import AgentConfig

UUID = "GPU-5e7a1c2d-aaaa-bbbb-cccc-0123456789ab"


def record(path: Path, *collectors: FakeCollector, rounds: int = 3) -> None:
    clock = ManualClock(1_700_000_000.0)
    scheduler = Scheduler([Slot(c, 10, 5) for c in collectors], clock, InlineRunner())
    recorder = Recorder(path, "train-07", clock, names=["train-07.example.com"])
    for _ in range(rounds):
        for outcome in scheduler.step():
            recorder.add(outcome)
        recorder.settle()
        clock.advance(10)
    recorder.close()


def identified() -> Reading:
    return Reading(
        samples=[Sample("gpu0", "gpu_temperature_celsius", 41.0)],
        events=[
            Event("gpu0", "xid", "79", "critical", f"train-07 kernel: {UUID} fell off", time=1_699_999_990.0),
            Event("sda", "disk_error", "io_error", "error", "disk ZA12BC34 at 10.1.2.3, 0c:42:a1:00:11:22"),
        ],
        devices=[Device("gpu0", "gpu", "H100", UUID), Device("sda", "disk", "ST8000", "ZA12BC34")],
        errors=[CollectionError("smart", "wwn 0x5000c500a1b2c3d4 on train-07.example.com", "sda")],
    )


@pytest.mark.parametrize("name", ["fault.jsonl", "fault.jsonl.gz"])
def test_nothing_in_the_file_tells_whose_machine_it_was(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    # The kernel's line comes before any source has told which text is a serial number.
    first = FakeCollector(
        "kernel_log", Reading(events=[Event("", "nvme", "dead", "critical", "drive ZA12BC34 died")])
    )
    record(path, first, FakeCollector("all", identified()))
    raw = path.read_bytes()
    text = (gzip.decompress(raw) if name.endswith(".gz") else raw).decode()
    for secret in ("train-07", "example.com", UUID, "ZA12BC34", "10.1.2.3", "0c:42:a1", "5000c500a1b2c3d4"):
        assert secret not in text
    assert "H100" in text and "ST8000" in text and "fell off" in text


def test_one_identity_has_one_stand_in(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    record(path, FakeCollector("all", identified()), rounds=2)
    header, entries = read(path)
    assert header.scrubbed and header.node == "node"
    found = [e.reading for e in entries]
    serials = {r.devices[0].serial for r in found}
    assert len(serials) == 1
    assert all(serials.copy().pop() in r.events[0].message for r in found)


def test_identities_are_kept_when_asked() -> None:
    scrubber = Scrubber(["n"])
    scrubber.learn([Device("sda", "disk", serial="ZA12BC34"), Device("sdb", "disk", serial="ZA12BC34X")])
    assert scrubber.text("ZA12BC34X is not ZA12BC34") == "serial-000002 is not serial-000001"
    assert (
        scrubber.text("no 1.2.3 or 127.0.0.1 or 0000:3b:00 or 12:34:56 here")
        == "no 1.2.3 or 127.0.0.1 or 0000:3b:00 or 12:34:56 here"
    )


def test_a_replay_gives_the_same_outcomes_shifted_to_now(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    gone = FakeCollector("nvml", gpu_reading(), UnavailableError("nvml: no driver"))
    record(path, FakeCollector("all", identified()), gone)
    clock = ManualClock(1_800_000_000.0)
    replay = Replay(path, clock)
    outcomes: list[Outcome] = []
    times = []
    while not replay.done:
        outcomes += replay.step()
        times.append(clock.monotonic())
        clock.advance(replay.wait_s() if not replay.done else 0)
    assert [(o.name, o.kind) for o in outcomes] == [
        ("all", "reading"),
        ("nvml", "reading"),
        ("all", "reading"),
        ("nvml", "unavailable"),
        ("all", "reading"),
        ("nvml", "unavailable"),
    ]
    assert times == [0, 10, 20]
    assert outcomes[0].reading.events[0].time == 1_799_999_990.0, "ten seconds before the start, as recorded"
    assert all(
        d.simulated and d.labels == {"replay_of": "r.jsonl"} for o in outcomes for d in o.reading.devices
    )
    assert replay.slots[1].up is False


def test_speed_shortens_distances(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    record(path, FakeCollector("nvml", gpu_reading()))
    clock = ManualClock()
    replay = Replay(path, clock, speed=10)
    replay.step()
    assert replay.wait_s() == pytest.approx(1.0)


def test_an_agent_ships_a_replay_marked_as_what_it_is(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    record(path, FakeCollector("all", identified()))
    clock = ManualClock()
    spool = Spool(tmp_path / "s.db", "n1", clock, max_bytes=1 << 20)
    transport = FakeTransport()
    shipper = Shipper(spool, transport, clock)
    agent = Agent(
        AgentConfig(node="n1", listen=""), [], spool, shipper, clock=clock, replay=Replay(path, clock)
    )
    for _ in range(4):
        clock.advance(agent.step())
    agent.cut()
    while shipper.step() == 0.0:
        pass
    devices = [d for b in transport.batches for d in b.devices]
    assert {d.device for d in devices} == {"n1", "n1/gpu0", "n1/sda"}
    assert all(d.simulated for d in devices)
    assert [e.code for b in transport.batches for e in b.events if e.kind == "xid"] == ["79"] * 3


@pytest.mark.parametrize(
    ("content", "where"),
    [
        (b"", ":1"),
        (b"not json\n", ":1"),
        (b'{"forewarn_recording": 99, "version": "9", "node": "n", "start": 0, "scrubbed": true}\n', ":1"),
        (
            b'{"forewarn_recording": 1, "version": "1", "node": "n", "start": 0, "scrubbed": true}\n{"x": 1}\n',
            ":2",
        ),
        (gzip.compress(b"x" * 1000)[:20], ""),
        (b"\x1f\x8bnot gzip", ""),
    ],
    ids=["empty", "not json", "newer format", "bad entry", "truncated gzip", "not gzip"],
)
def test_a_file_that_is_no_recording_is_named_with_its_line(
    tmp_path: Path, content: bytes, where: str
) -> None:
    path = tmp_path / "r.jsonl"
    path.write_bytes(content)
    with pytest.raises(InputError, match=r"r\.jsonl" + where):
        Replay(path, ManualClock())


def test_a_missing_file_and_an_unwritable_one_are_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="nowhere"):
        read(tmp_path / "nowhere")
    with pytest.raises(StorageError, match="nowhere"):
        Recorder(tmp_path / "nowhere" / "r.jsonl", "n", ManualClock())
