"""The write-ahead log: what is acknowledged stands here first, forced to the disk. One fsync serves all who wait.

Numbered segment files of records: length, CRC, kind, time of receipt, payload. A torn tail, left by a crash in the
middle of a write that nobody was told of, is cut off when the log is opened.
"""

from __future__ import annotations

import contextlib
import os
import struct
import threading
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import structlog

from forewarn.collectors.clock import Clock
from forewarn.collectors.errors import StorageError

MAGIC = b"FWLOG001"
HEADER = struct.Struct("<IIBd")
"""Length of the payload, CRC-32 of kind, time and payload, kind, time of receipt."""
CHECKED = struct.Struct("<Bd")
MAX_RECORD_BYTES = 64 * 1024 * 1024
REOPEN_AFTER_S = 1.0
"""After a failed write, the next try comes no sooner."""

BATCH, FAILURE, CLEAR = 1, 2, 3
"""Kinds of records: a batch as the wire has it, a reported failure, the end of a device's rules (both JSON)."""

_log = structlog.get_logger("forewarn.service")


@dataclass(frozen=True)
class Record:
    """One record; `content` is what the payload decodes to, where the writer had it at hand."""

    kind: int
    received: float
    payload: bytes
    content: Any = None


@dataclass(frozen=True)
class Sealed:
    """Stands between the records: segment `number` is complete and all its records came before this."""

    number: int
    last: bool = False


@dataclass
class _Waiting:
    record: Record
    future: Future[None] = field(default_factory=Future)


Sink = Callable[[list[Record | Sealed]], None]


class Journal:
    """Appends records from any thread; `sink` gets what is durable, in order, from the committing thread."""

    def __init__(
        self,
        folder: Path,
        clock: Clock,
        sink: Sink,
        *,
        segment_bytes: int,
        segment_interval_s: float,
        first_number: int,
    ) -> None:
        """Raises StorageError when the folder cannot be written."""
        self._folder, self._clock, self._sink = folder, clock, sink
        self._segment_bytes, self._segment_interval_s = segment_bytes, segment_interval_s
        self._number = first_number
        self._file: int | None = None
        self._size = self._records = 0
        self._opened = 0.0
        self._failed_at: float | None = None
        self.trouble = ""
        """Why nothing can be written now; empty when all is well."""
        self.commits = self.appended = self.written_bytes = 0
        self._waiting: list[_Waiting] = []
        self._condition = threading.Condition()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="forewarn-journal", daemon=True)
        self._open()

    def start(self) -> None:
        self._thread.start()

    def append(self, record: Record) -> Future[None]:
        """Queue a record. The future is done when it is on the disk; it fails with StorageError when it is not."""
        waiting = _Waiting(record)
        with self._condition:
            if self._stopping:
                waiting.future.set_exception(StorageError("the service is stopping"))
                return waiting.future
            self._waiting.append(waiting)
            self._condition.notify()
        return waiting.future

    def stop(self) -> None:
        """Write what waits, seal the segment, close."""
        with self._condition:
            self._stopping = True
            self._condition.notify()
        if self._thread.ident is not None:
            self._thread.join()
        if self._file is not None:
            self._seal(last=True)

    def _run(self) -> None:
        while True:
            with self._condition:
                if not self._waiting and not self._stopping:
                    self._condition.wait(self._seal_in_s())
                group, self._waiting = self._waiting, []
                stopping = self._stopping
            if group:
                self._commit(group)
            if self._records and self._due():
                self._rotate()
            if stopping and not group:
                return

    def _seal_in_s(self) -> float:
        if not self._records:
            return self._segment_interval_s
        return max(0.01, self._segment_interval_s - (self._clock.monotonic() - self._opened))

    def _due(self) -> bool:
        age_s = self._clock.monotonic() - self._opened
        return self._size >= self._segment_bytes or age_s >= self._segment_interval_s

    def _commit(self, group: list[_Waiting]) -> None:
        try:
            self._write([w.record for w in group])
        except StorageError as error:
            for waiting in group:
                waiting.future.set_exception(error)
            return
        self._sink([w.record for w in group])
        for waiting in group:
            waiting.future.set_result(None)

    def _write(self, records: list[Record]) -> None:
        if self._file is None:
            self._reopen()
        file = self._file
        assert file is not None
        data = b"".join(encode(r) for r in records)
        try:
            view = memoryview(data)
            while view:
                view = view[os.write(file, view) :]
            os.fdatasync(file)
        except OSError as error:
            self._give_up(error)
            raise StorageError(f"{self._path(self._number)}: cannot be written: {error.strerror}") from error
        if not self._records:
            self._opened = self._clock.monotonic()
        self._size += len(data)
        self._records += len(records)
        self.commits += 1
        self.appended += len(records)
        self.written_bytes += len(data)

    def _give_up(self, error: OSError) -> None:
        """After a failed write nothing is known of the tail: cut it off, and go on in a new segment, later."""
        file, self._file = self._file, None
        assert file is not None
        self._failed_at = self._clock.monotonic()
        self.trouble = f"{self._path(self._number)}: {error.strerror or error}"
        _log.error(
            "journal_failed", reason=self.trouble, remedy="make room or repair the disk of service.data"
        )
        with contextlib.suppress(OSError):
            os.ftruncate(file, self._size)
            os.fsync(file)
        with contextlib.suppress(OSError):
            os.close(file)
        if self._records:
            self._sink([Sealed(self._number)])
        self._number += 1

    def _reopen(self) -> None:
        if self._failed_at is not None and self._clock.monotonic() - self._failed_at < REOPEN_AFTER_S:
            raise StorageError(self.trouble)
        try:
            self._open()
        except StorageError as error:
            self._failed_at = self._clock.monotonic()
            self.trouble = str(error)
            raise
        self._failed_at, self.trouble = None, ""
        _log.info("journal_works_again", segment=self._number)

    def probe(self) -> str:
        """Why nothing can be written now; after trouble it tries again by itself, so that readiness comes back."""
        if self.trouble:
            waiting = self.append(Record(CLEAR, self._clock.now(), b'{"device":""}'))
            with contextlib.suppress(StorageError, TimeoutError):
                waiting.result(timeout=1.0)
        return self.trouble

    def _open(self) -> None:
        path = self._path(self._number)
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
            try:
                os.write(file, MAGIC)
                os.fsync(file)
                sync_folder(self._folder)
            except OSError:
                os.close(file)
                raise
        except OSError as error:
            raise StorageError(f"{path}: cannot be written: {error.strerror or error}") from error
        self._file, self._size, self._records = file, len(MAGIC), 0
        self._opened = self._clock.monotonic()

    def _seal(self, last: bool = False) -> None:
        file, self._file = self._file, None
        assert file is not None
        os.close(file)
        if self._records:
            self._sink([Sealed(self._number, last)])
        else:
            with contextlib.suppress(OSError):
                self._path(self._number).unlink()
            self._sink([Sealed(self._number - 1, last)] if last else [])

    def _rotate(self) -> None:
        self._seal()
        self._number += 1
        try:
            self._open()
        except StorageError as error:
            self._failed_at = self._clock.monotonic()
            self.trouble = str(error)

    def _path(self, number: int) -> Path:
        return segment_path(self._folder, number)


def encode(record: Record) -> bytes:
    """A record as it stands in the file."""
    checked = CHECKED.pack(record.kind, record.received)
    crc = zlib.crc32(record.payload, zlib.crc32(checked))
    return HEADER.pack(len(record.payload), crc, record.kind, record.received) + record.payload


def segment_path(folder: Path, number: int) -> Path:
    return folder / f"segment-{number:012d}.log"


def segments(folder: Path) -> list[int]:
    """Numbers of the segments in a folder, rising."""
    return sorted(int(p.stem.removeprefix("segment-")) for p in folder.glob("segment-*.log"))


def read_segment(path: Path, *, repair: bool = False) -> Iterator[Record]:
    """Records of a segment up to its end or the first damage. With `repair` a damaged tail is cut off the file.

    Raises StorageError when the file cannot be read at all.
    """
    try:
        file = path.open("r+b" if repair else "rb")
    except OSError as error:
        raise StorageError(f"{path}: cannot be read: {error.strerror or error}") from error
    with file:
        good = file.read(len(MAGIC)) == MAGIC
        end = file.tell() if good else 0
        while good:
            head = file.read(HEADER.size)
            if not head:
                return
            payload = b""
            if good := len(head) == HEADER.size:
                length, crc, kind, received = HEADER.unpack(head)
                payload = file.read(length) if length <= MAX_RECORD_BYTES else b""
                good = len(payload) == length and crc == zlib.crc32(
                    payload, zlib.crc32(CHECKED.pack(kind, received))
                )
            if good:
                end = file.tell()
                yield Record(kind, received, payload)
        lost = file.seek(0, os.SEEK_END) - end
        _log.warning("journal_tail_damaged", file=str(path), kept_bytes=end, cut_bytes=lost, repaired=repair)
        if repair:
            _cut(path, file.fileno(), end)


def _cut(path: Path, file: int, end: int) -> None:
    """Cut a file off at `end`. What is cut is kept beside it: a disk's fault may have damaged what was acknowledged."""
    try:
        if tail := os.pread(file, MAX_RECORD_BYTES, end):
            path.with_suffix(".damaged").write_bytes(tail)
        os.ftruncate(file, max(end, 0))
        if end == 0:
            os.pwrite(file, MAGIC, 0)
        os.fsync(file)
    except OSError as error:
        raise StorageError(f"{path}: its damaged tail cannot be cut off: {error.strerror}") from error


def sync_folder(folder: Path) -> None:
    """Force a folder's entries (new, renamed, removed files) to the disk."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
