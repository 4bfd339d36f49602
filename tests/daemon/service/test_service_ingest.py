"""Ingest: who may send, what is let in, what a repeat gets, and what is never acknowledged."""

from __future__ import annotations

import errno
import json
import os
import threading
import time
import zlib
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec
import pytest

from forewarn.collectors.base import Device
from forewarn.daemon import wire
from forewarn.daemon.service import journal, tokens
from service_bench import Bench, Starter, batch, eventually, xid


def test_a_batch_is_answered_when_it_is_on_the_disk(bench: Bench) -> None:
    answer = bench.send(batch(sequence=7))
    assert answer.status_code == 200
    assert answer.json() == {"stream": "s1", "sequence": 7, "duplicate": False}
    folder = Path(bench.service.settings.data) / "wal"
    records = [
        r for n in journal.segments(folder) for r in journal.read_segment(journal.segment_path(folder, n))
    ]
    assert [wire.decode(r.payload).sequence for r in records] == [7]


def test_a_repeat_is_answered_like_the_first_and_counted_once(bench: Bench) -> None:
    sent = batch(events=[xid()])
    assert bench.send(sent).json()["duplicate"] is False
    assert bench.send(sent).json() == {"stream": "s1", "sequence": 1, "duplicate": True}
    eventually(lambda: bench.get("/v1/events")["items"])
    bench.scored()
    assert len(bench.get("/v1/events")["items"]) == 1
    assert bench.service.engine.nodes["n1"].batches == 1


def test_many_senders_share_one_fsync(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    real, first = os.fdatasync, threading.Event()

    def slow(file: int) -> None:
        first.wait(0.2)
        real(file)

    monkeypatch.setattr(os, "fdatasync", slow)
    with ThreadPoolExecutor(16) as pool:
        records = [journal.Record(journal.BATCH, 0.0, b"x" * i) for i in range(200)]
        futures = [pool.submit(bench.service.journal.append, record) for record in records]
        for future in futures:
            future.result().result(timeout=10)
    assert bench.service.journal.appended == 200
    assert bench.service.journal.commits < 100


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"frames": [wire.Frame(time.time() + 3600, ["n1/gpu0"], ["m"], bytes(8))]}, "frames[0].time"),
        ({"frames": [wire.Frame(time.time() - 8 * 86400, ["n1/gpu0"], ["m"], bytes(8))]}, "frames[0].time"),
        ({"frames": [wire.Frame(time.time(), ["n1/gpu0"], ["m"], b"")]}, "frames[0].values"),
        ({"frames": [wire.Frame(time.time(), ["n2/gpu0"], ["m"], bytes(8))]}, "frames[0].devices"),
        ({"events": [xid(at=time.time() + 3600)]}, "events[0].time"),
        ({"devices": [Device("n2/gpu0", "gpu")]}, "devices[0].device"),
        ({"sequence": 0}, "sequence"),
        ({"node": "a/b"}, "node"),
    ],
)
def test_a_bad_batch_is_refused_by_field_kept_and_counted(
    bench: Bench, changes: dict[str, Any], field: str
) -> None:
    answer = bench.send(msgspec.structs.replace(batch(), **changes))
    assert answer.status_code == 422
    assert answer.headers["content-type"] == "application/problem+json"
    assert answer.json()["field"] == field
    assert answer.json()["detail"].startswith(field)
    assert bench.service.counts.refused == 1
    kept = list((Path(bench.service.settings.data) / "refused").glob("*.json"))
    assert len(kept) == 1
    assert json.loads(kept[0].read_text())["reason"].startswith(field)
    # It stops nobody else, and its sequence number is still free.
    assert bench.send(batch(sequence=1)).json()["duplicate"] is False


def test_a_wrong_clock_is_corrected_not_refused(bench: Bench) -> None:
    hour_ahead = time.time() + 3600
    assert bench.send(batch(at=hour_ahead, events=[xid(at=hour_ahead)])).status_code == 200
    event = eventually(lambda: bench.get("/v1/events")["items"])[0]
    assert abs(msgspec.convert(event["time"], datetime).timestamp() - time.time()) < 60
    bench.scored()
    node = bench.get("/v1/nodes/n1")
    assert abs(node["clock_skew_seconds"] + 3600) < 60


@pytest.mark.parametrize("body", [b"", b"\xc1", b"\x80", b"\x93\x01\x02\x03", b"[" * 5000, bytes(100_000)])
def test_noise_is_refused(bench: Bench, body: bytes) -> None:
    answer = bench.client.post("/v1/ingest", content=body, headers=bench.headers(bench.agent))
    assert answer.status_code == 422


def test_a_body_that_inflates_too_far_is_refused(bench: Bench) -> None:
    bomb = zlib.compress(bytes(wire.MAX_BODY_BYTES * 4), 9)
    headers = bench.headers(bench.agent) | {"Content-Encoding": "deflate"}
    answer = bench.client.post("/v1/ingest", content=bomb, headers=headers)
    assert answer.status_code == 422
    assert "inflates" in answer.json()["detail"]
    answer = bench.client.post("/v1/ingest", content=bytes(wire.MAX_BODY_BYTES + 1), headers=headers)
    assert answer.status_code == 413


def test_who_may_send(bench: Bench) -> None:
    clock = bench.service.clock
    own = tokens.create(bench.service.database, clock, "agent", node="n1")
    assert bench.send(batch(), own).status_code == 200
    other = bench.send(batch("n2"), own)
    assert (other.status_code, other.json()["field"]) == (403, "node")
    assert bench.send(batch(sequence=2), bench.operator).status_code == 403
    assert bench.send(batch(sequence=2), "fwt_000000000000_nonsense").status_code == 401
    body = wire.encode(batch(sequence=2))
    assert bench.client.post("/v1/ingest", content=body).status_code == 401


def test_a_revoked_token_is_refused_and_an_expired_one(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    database, clock = bench.service.database, bench.service.clock
    mine = tokens.create(database, clock, "agent", node="*")
    brief = tokens.create(database, clock, "agent", node="*", days=1e-9)
    assert bench.send(batch(), mine).status_code == 200
    tokens.revoke(database, clock, mine.split("_")[1])
    bench.service.tokens.refresh()
    assert bench.send(batch(sequence=2), mine).status_code == 401
    assert bench.send(batch(sequence=2), brief).status_code == 401


def test_a_full_disk_is_never_acknowledged_and_comes_back(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert bench.send(batch(sequence=1)).status_code == 200
    real = os.write

    def full(file: int, data: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        answer = bench.send(batch(sequence=2))
        assert answer.status_code == 503
        assert int(answer.headers["retry-after"]) > 0
        assert bench.client.get("/readyz").status_code == 503
    assert os.write is real
    eventually(lambda: bench.client.get("/readyz").status_code == 200)
    again = bench.send(batch(sequence=2))
    assert (again.status_code, again.json()["duplicate"]) == (200, False)


def test_when_too_much_waits_agents_are_told_to_come_back(start: Starter) -> None:
    bench = start(backlog_max_bytes=1)
    gate = threading.Event()
    bench.service.engine.call(gate.wait)
    try:
        assert bench.send(batch(sequence=1)).status_code == 200
        answer = eventually(
            lambda: (a := bench.send(batch(sequence=2))).status_code == 429 and a, deadline_s=5
        )
        assert int(answer.headers["retry-after"]) > 0
    finally:
        gate.set()
    eventually(lambda: bench.send(batch(sequence=3)).status_code == 200)


def test_streams_of_a_node_are_apart_and_bounded(bench: Bench) -> None:
    for i in range(40):
        assert bench.send(batch(stream=f"s{i}")).json()["duplicate"] is False
    assert bench.send(batch(stream="s39")).json()["duplicate"] is True
    assert len(bench.service._sequences.highest["n1"]) == 32
