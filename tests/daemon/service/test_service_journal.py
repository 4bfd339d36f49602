"""The write-ahead log: what a crash may leave, and what is read back from it."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from forewarn.collectors.clock import ManualClock
from forewarn.collectors.errors import StorageError
from forewarn.daemon.service import journal
from forewarn.daemon.service.journal import BATCH, Journal, Record, Sealed, read_segment, segment_path


def make(folder: Path, sink: list[Record | Sealed], *, size: int = 10_000, first: int = 1) -> Journal:
    return Journal(
        folder, ManualClock(), sink.extend, segment_bytes=size, segment_interval_s=3600.0, first_number=first
    )


def written(folder: Path, payloads: list[bytes]) -> Path:
    """One segment with these records."""
    out: list[Record | Sealed] = []
    log = make(folder, out)
    log.start()
    for payload in payloads:
        log.append(Record(BATCH, 5.0, payload)).result(5)
    log.stop()
    assert [r.payload for r in out if isinstance(r, Record)] == payloads
    assert out[-1] == Sealed(1, last=True)
    return segment_path(folder, 1)


def test_what_was_appended_is_read_back(tmp_path: Path) -> None:
    path = written(tmp_path, [b"one", b"", b"x" * 5000])
    assert [(r.kind, r.received, r.payload) for r in read_segment(path)] == [
        (BATCH, 5.0, b"one"),
        (BATCH, 5.0, b""),
        (BATCH, 5.0, b"x" * 5000),
    ]


def test_a_log_cut_anywhere_gives_the_whole_records_before_the_cut(tmp_path: Path) -> None:
    path = written(tmp_path, [b"first", b"second", b"third"])
    data = path.read_bytes()
    ends = [len(journal.MAGIC)]
    for payload in (b"first", b"second", b"third"):
        ends.append(ends[-1] + journal.HEADER.size + len(payload))
    for cut in range(len(data) + 1):
        path.write_bytes(data[:cut])
        whole = sum(1 for end in ends[1:] if end <= cut)
        assert len(list(read_segment(path, repair=True))) == whole
        # Repaired: a second reading finds the same and nothing to repair.
        assert path.stat().st_size == max(e for e in [*ends, len(journal.MAGIC)] if e <= max(cut, ends[0]))
        assert len(list(read_segment(path))) == whole


def test_a_flipped_bit_ends_the_reading_there(tmp_path: Path) -> None:
    path = written(tmp_path, [b"first", b"second"])
    data = path.read_bytes()
    for place in range(len(journal.MAGIC), len(data)):
        path.write_bytes(data[:place] + bytes([data[place] ^ 0x40]) + data[place + 1 :])
        assert len(list(read_segment(path))) < 2


def test_a_full_segment_is_sealed_and_the_next_begun(tmp_path: Path) -> None:
    out: list[Record | Sealed] = []
    log = make(tmp_path, out, size=100)
    log.start()
    for _ in range(4):
        log.append(Record(BATCH, 1.0, b"y" * 60)).result(5)
    log.stop()
    assert [i.number for i in out if isinstance(i, Sealed)][:2] == [1, 2]
    assert journal.segments(tmp_path)[:2] == [1, 2]


def test_after_a_failed_write_nothing_of_it_remains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out: list[Record | Sealed] = []
    log = make(tmp_path, out)
    log.start()
    log.append(Record(BATCH, 1.0, b"kept")).result(5)
    failing = threading.Event()
    failing.set()
    real = os.fdatasync

    def fail(file: int) -> None:
        if failing.is_set():
            raise OSError(5, "Input/output error")
        real(file)

    monkeypatch.setattr(os, "fdatasync", fail)
    with pytest.raises(StorageError, match="Input/output error"):
        log.append(Record(BATCH, 1.0, b"lost")).result(5)
    assert log.trouble
    failing.clear()
    with pytest.raises(StorageError):  # not tried again at once
        log.append(Record(BATCH, 1.0, b"early")).result(5)
    log._clock.sleep(journal.REOPEN_AFTER_S)
    log.append(Record(BATCH, 1.0, b"after")).result(5)
    assert not log.trouble
    log.stop()
    found = [r.payload for n in journal.segments(tmp_path) for r in read_segment(segment_path(tmp_path, n))]
    assert found == [b"kept", b"after"]
