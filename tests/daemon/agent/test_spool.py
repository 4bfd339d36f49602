"""Nothing that is spooled is lost or counted twice; a disk in trouble degrades, and says so."""

from __future__ import annotations

import logging
import sqlite3
from pathlib import Path

import pytest

from forewarn.collectors.base import Event, Sample
from forewarn.collectors.clock import ManualClock
from forewarn.collectors.errors import StorageError
from forewarn.daemon import wire
from forewarn.daemon.agent import spool as spool_module
from forewarn.daemon.agent.spool import Item, Parts, Spool


def open_spool(path: Path, *, max_bytes: int = 1 << 20, node: str = "n1") -> Spool:
    return Spool(path, node, ManualClock(), max_bytes=max_bytes, agent_version="1")


def telemetry(value: float = 1.0, devices: int = 1) -> Parts:
    samples = [Sample(f"n1/gpu{i}", "gpu_power_watts", value) for i in range(devices)]
    return Parts(frames=[wire.pack_samples(1.0, samples)])


def event(code: str = "79") -> Parts:
    return Parts(events=[Event("n1/gpu0", "xid", code, "critical", "m", time=1.0)])


def drain(spool: Spool) -> list[tuple[str, int]]:
    """Send all, as a perfect service would acknowledge it; gives streams and sequences in order."""
    sent = []
    while (item := spool.peek()) is not None:
        batch = wire.decode(item.body)
        assert (batch.stream, batch.sequence) == (item.stream, item.sequence)
        sent.append((item.stream, item.sequence))
        spool.acknowledge(item)
    return sent


def full_disk(spool: Spool) -> None:
    """SQLite's own way to run out of space."""
    assert spool._db is not None
    pages = spool._db.execute("PRAGMA page_count").fetchone()[0]
    spool._db.execute(f"PRAGMA max_page_count = {pages}")


def more_disk(spool: Spool) -> None:
    assert spool._db is not None
    spool._db.execute("PRAGMA max_page_count = 1000000")


def test_batches_come_out_in_order_and_leave_when_acknowledged(tmp_path: Path) -> None:
    spool = open_spool(tmp_path / "s.db")
    for i in range(3):
        spool.append(telemetry(i))
    assert spool.status.batches == 3
    assert [sequence for _, sequence in drain(spool)] == [1, 2, 3]
    assert (spool.status.batches, spool.status.bytes) == (0, 0)


def test_what_is_not_acknowledged_comes_again_after_a_restart(tmp_path: Path) -> None:
    spool = open_spool(tmp_path / "s.db")
    for i in range(3):
        spool.append(telemetry(i))
    first = spool.peek()
    assert first is not None
    spool.acknowledge(first)
    stream = first.stream
    spool.close()
    assert drain(open_spool(tmp_path / "s.db")) == [(stream, 2), (stream, 3)]


def test_an_emptied_spool_never_uses_a_sequence_again(tmp_path: Path) -> None:
    spool = open_spool(tmp_path / "s.db")
    spool.append(telemetry())
    before = drain(spool)
    spool.close()
    again = open_spool(tmp_path / "s.db")
    again.append(telemetry())
    assert drain(again) == [(before[0][0], 2)]


def test_commits_are_forced_to_the_disk(tmp_path: Path) -> None:
    spool = open_spool(tmp_path / "s.db")
    assert spool._db is not None
    assert spool._db.execute("PRAGMA synchronous").fetchone() == (2,)
    assert spool._db.execute("PRAGMA journal_mode").fetchone() == ("wal",)


def test_a_second_agent_on_the_same_spool_is_refused(tmp_path: Path) -> None:
    held = open_spool(tmp_path / "s.db")
    held.append(telemetry())
    with pytest.raises(StorageError, match="in use by another agent"):
        open_spool(tmp_path / "s.db")


def test_a_spool_of_another_node_begins_anew(tmp_path: Path) -> None:
    spool = open_spool(tmp_path / "s.db")
    spool.append(telemetry())
    spool.close()
    other = open_spool(tmp_path / "s.db", node="n2")
    assert other.peek() is None


def test_states_are_kept_with_the_batch_that_makes_them_true(tmp_path: Path) -> None:
    spool = open_spool(tmp_path / "s.db")
    assert spool.state("kernel_log") is None
    spool.append(Parts(events=event().events, states={"kernel_log": {"boot": "b", "sequence": 7}}))
    spool.close()
    assert open_spool(tmp_path / "s.db").state("kernel_log") == {"boot": "b", "sequence": 7}


def test_a_full_spool_gives_up_the_oldest_telemetry_and_keeps_events(tmp_path: Path) -> None:
    spool = open_spool(tmp_path / "s.db", max_bytes=20_000)
    spool.append(Parts(frames=telemetry(devices=50).frames, events=event("79").events))
    for i in range(100):
        spool.append(telemetry(i, devices=50))
    assert spool.status.bytes <= 20_000
    assert spool.status.dropped > 50
    assert [n.kind for n in spool.notices] == ["telemetry_dropped"], "said once, not for each batch"
    kept = []
    while (item := spool.peek()) is not None:
        kept.append(wire.decode(item.body))
        spool.acknowledge(item)
    assert [e.code for b in kept for e in b.events] == ["79"]
    assert kept[0].frames == [], "the telemetry beside the event went first"
    assert kept[-1].sequence == 101, "the newest telemetry stays"


def test_events_go_only_when_nothing_else_is_left(tmp_path: Path) -> None:
    spool = open_spool(tmp_path / "s.db", max_bytes=3000)
    for i in range(100):
        spool.append(event(str(i)))
    codes = []
    while (item := spool.peek()) is not None:
        codes += [e.code for e in wire.decode(item.body).events]
        spool.acknowledge(item)
    assert codes == [str(i) for i in range(100 - len(codes), 100)]
    assert 5 < len(codes) < 100


def test_a_full_disk_degrades_and_recovers_without_losing_or_doubling(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    spool = open_spool(tmp_path / "s.db")
    spool.append(event("1"))
    full_disk(spool)
    big = telemetry(devices=2000)
    spool.append(Parts(frames=big.frames, events=event("2").events, states={"kernel_log": 2}))
    spool.append(Parts(frames=big.frames, events=event("3").events, states={"kernel_log": 3}))
    assert "full" in spool.status.degraded
    assert spool.status.batches == 3
    assert spool.state("kernel_log") is None, "a place that is not on disk is not promised"

    # One of the batches in memory is under way while the disk comes back.
    on_disk = spool.peek()
    assert on_disk is not None
    spool.acknowledge(on_disk)
    under_way = spool.peek()
    assert under_way is not None and under_way.id is None
    more_disk(spool)
    spool.append(event("4"))
    assert spool.status.degraded == ""
    spool.acknowledge(under_way)
    codes, keys = [], {(under_way.stream, under_way.sequence)}
    while (item := spool.peek()) is not None:
        codes += [e.code for e in wire.decode(item.body).events]
        assert (item.stream, item.sequence) not in keys
        keys.add((item.stream, item.sequence))
        spool.acknowledge(item)
    assert codes == ["3", "4"]
    assert spool.state("kernel_log") == 3
    said = [r.getMessage() for r in caplog.records]
    assert said.count("spool_degraded") == 1 and said.count("spool_recovered") == 1


def test_memory_is_bounded_and_keeps_events_longest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spool_module, "MEMORY_MAX_BYTES", 20_000)
    (tmp_path / "file").write_text("in the way")
    spool = open_spool(tmp_path / "file" / "s.db")
    assert spool.status.degraded
    for i in range(50):
        spool.append(Parts(frames=telemetry(devices=50).frames, events=event(str(i)).events))
    assert spool.status.bytes <= 20_000
    codes = []
    while (item := spool.peek()) is not None:
        codes += [e.code for e in wire.decode(item.body).events]
        spool.acknowledge(item)
    assert codes == [str(i) for i in range(50)]
    assert spool.notices[0].kind == "telemetry_dropped"


def test_a_folder_that_appears_later_is_used(tmp_path: Path) -> None:
    blocker = tmp_path / "place"
    blocker.write_text("in the way")
    spool = open_spool(blocker / "s.db")
    spool.append(event("1"))
    blocker.unlink()
    spool.append(event("2"))
    assert spool.status.degraded == ""
    spool.close()
    assert len(drain(open_spool(blocker / "s.db"))) == 2


@pytest.mark.parametrize("damage", [b"not a database at all" * 100, b"SQLite format 3\x00" + b"\xff" * 8000])
def test_a_damaged_file_is_moved_aside_and_a_new_stream_begins(
    tmp_path: Path, damage: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "s.db"
    path.write_bytes(damage)
    spool = open_spool(path)
    spool.append(event())
    assert len(drain(spool)) == 1
    assert spool.status.degraded == ""
    aside = [p for p in tmp_path.iterdir() if "damaged" in p.name]
    assert len(aside) == 1 and aside[0].read_bytes() == damage
    assert [r.getMessage() for r in caplog.records if r.levelno >= logging.ERROR] == ["spool_damaged"]


def test_damage_while_running_costs_the_file_and_no_more(tmp_path: Path) -> None:
    path = tmp_path / "s.db"
    spool = open_spool(path)
    for i in range(200):
        spool.append(telemetry(i, devices=100))
    spool.close()
    with path.open("r+b") as file:  # all but the first page turns to noise
        file.seek(4096)
        file.write(b"\xa5" * (path.stat().st_size - 4096))
    spool = open_spool(path)
    old = spool.peek()
    spool.append(event())
    left = drain(spool)
    assert left and (old is None or left[-1][0] != old.stream or left[-1][1] > 200)


def test_a_read_only_disk_keeps_batches_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "s.db"
    spool = open_spool(path)
    spool.append(event("before"))
    spool.close()
    connect = sqlite3.connect

    def read_only(database: Path, **options: object) -> sqlite3.Connection:
        return connect(f"file:{database}?mode=ro", uri=True, isolation_level=None, check_same_thread=False)

    monkeypatch.setattr(sqlite3, "connect", read_only)
    spool = open_spool(path)
    spool.append(event())
    assert spool.status.degraded
    assert len(drain(spool)) == 1
    monkeypatch.undo()
    spool.append(event())
    assert spool.status.degraded == ""
    assert len(drain(spool)) == 2, "what was on the disk is still there"


def test_a_refused_batch_is_set_aside_with_its_reason(tmp_path: Path) -> None:
    spool = open_spool(tmp_path / "s.db")
    spool.append(event("1"))
    spool.append(event("2"))
    item = spool.peek()
    assert item is not None
    spool.quarantine(item, "HTTP 422: events[0].code")
    assert [sequence for _, sequence in drain(spool)] == [2]
    assert spool.status.refused == 1
    assert spool._db is not None
    [(reason, body)] = spool._db.execute("SELECT reason, body FROM quarantine").fetchall()
    assert reason == "HTTP 422: events[0].code" and wire.decode(body).events[0].code == "1"


def test_the_quarantine_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spool_module, "QUARANTINE_MAX_BATCHES", 3)
    spool = open_spool(tmp_path / "s.db")
    for i in range(10):
        spool.append(event(str(i)))
        item = spool.peek()
        assert item is not None
        spool.quarantine(item, str(i))
    assert spool._db is not None
    assert [r for (r,) in spool._db.execute("SELECT reason FROM quarantine ORDER BY id")] == ["7", "8", "9"]


def test_acknowledging_what_is_not_there_does_no_harm(tmp_path: Path) -> None:
    spool = open_spool(tmp_path / "s.db")
    spool.append(event())
    spool.acknowledge(Item(None, "another stream", 9, b""))
    assert spool.status.batches == 1


def test_a_long_outage_and_return_leaves_a_small_file(tmp_path: Path) -> None:
    path = tmp_path / "s.db"
    spool = open_spool(path)
    for i in range(300):
        spool.append(telemetry(i, devices=20))
    drain(spool)
    for i in range(300):
        spool.append(telemetry(i, devices=20))
        drain(spool)
    size = path.stat().st_size
    for i in range(300):
        spool.append(telemetry(i, devices=20))
        drain(spool)
    assert path.stat().st_size <= size
