"""Telemetry history: each sealed log segment becomes Parquet files by day, then the segment may go.

`DATA/telemetry/date=YYYY-MM-DD/segment-N.parquet`, with `events`, `devices` and `failures` beside: the data folder is
a history directory for training. Writing a segment again gives the same files, so a crash costs nothing.
"""

from __future__ import annotations

import contextlib
import os
import queue
import shutil
import threading
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import sqlalchemy
import structlog

from forewarn.collectors.base import Device
from forewarn.collectors.clock import Clock
from forewarn.collectors.errors import InputError, StorageError
from forewarn.daemon.service import schema
from forewarn.daemon.service.database import Database
from forewarn.daemon.service.intake import shift_of
from forewarn.daemon.service.journal import read_segment, segment_path, segments
from forewarn.daemon.service.readings import content_of
from forewarn.daemon.wire import Batch

TIME_TYPE = pyarrow.timestamp("us", tz="UTC")
DAY_S = 86400
RETRY_S = 10.0
EXPORT_INTERVAL_S = 600.0

_log = structlog.get_logger("forewarn.service")


def tables_of(batches: Iterable[tuple[Batch, float]]) -> dict[date, pyarrow.Table]:
    """Wide rows by day from batches and their times of receipt: time, node, device, then each metric that occurs."""
    blocks: dict[date, list[tuple[float, str, list[str], list[str], np.ndarray[Any, Any]]]] = {}
    for batch, received in batches:
        shift_s = shift_of(batch, received)
        for frame in batch.frames:
            if not frame.devices or not frame.metrics:
                continue
            time = frame.time + shift_s
            values = np.frombuffer(frame.values, "<f8").reshape(len(frame.devices), len(frame.metrics))
            day = datetime.fromtimestamp(time, UTC).date()
            blocks.setdefault(day, []).append((time, batch.node, frame.devices, frame.metrics, values))
    return {day: _table(found) for day, found in blocks.items()}


def _table(blocks: list[tuple[float, str, list[str], list[str], np.ndarray[Any, Any]]]) -> pyarrow.Table:
    metrics = sorted({m for block in blocks for m in block[3]})
    column = {m: i for i, m in enumerate(metrics)}
    rows = sum(len(block[2]) for block in blocks)
    values = np.full((len(metrics), rows), np.nan, np.float32)
    times = np.empty(rows, np.int64)
    nodes: list[str] = []
    devices: list[str] = []
    at = 0
    for time, node, names, found, cells in blocks:
        end = at + len(names)
        times[at:end] = round(time * 1e6)
        values[[column[m] for m in found], at:end] = cells.T
        nodes += [node] * len(names)
        devices += names
        at = end
    arrays = [
        pyarrow.array(times, TIME_TYPE),
        pyarrow.array(nodes).dictionary_encode(),
        pyarrow.array(devices).dictionary_encode(),
        *(pyarrow.array(v, mask=np.isnan(v)) for v in values),
    ]
    return pyarrow.table(arrays, names=["time", "node", "device", *metrics])


def write_atomically(table: pyarrow.Table, path: Path) -> None:
    """Write a Parquet file that is either whole or not there. Raises StorageError."""
    part = path.with_name(f".{path.name}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        pyarrow.parquet.write_table(table, part, compression="zstd")
        with part.open("rb") as file:
            os.fsync(file.fileno())
        part.replace(path)
    except (OSError, pyarrow.ArrowException) as error:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)
        raise StorageError(f"{path}: cannot be written: {error}") from error


class Archive:
    """Turns sealed segments into history and drops them when nothing needs them any more. One thread of its own."""

    def __init__(
        self,
        data: Path,
        clock: Clock,
        database: Database,
        *,
        retention_days: float,
        needed_from: Callable[[], int],
        devices: Callable[[], Mapping[str, Device]],
    ) -> None:
        """`needed_from`: segments up to the number it gives are needed by nobody but this archive."""
        self._data, self._clock, self._database = data, clock, database
        self._retention_days, self._needed_from, self._devices = retention_days, needed_from, devices
        self._queue: queue.Queue[int | None] = queue.Queue()
        self._stopping = threading.Event()
        self._exported_at = -EXPORT_INTERVAL_S
        self._exported: tuple[int, int] | None = None
        self.archived = self.rows = 0
        self.trouble = ""
        self._thread = threading.Thread(target=self._run, name="forewarn-archive", daemon=True)

    @property
    def log_folder(self) -> Path:
        return self._data / "wal"

    def start(self) -> None:
        self._thread.start()

    def sealed(self, number: int) -> None:
        """Segment `number` is complete."""
        self._queue.put(number)

    def stop(self) -> None:
        """Finish what waits, then end."""
        self._queue.put(None)
        if self._thread.ident is not None:
            self._thread.join()
        self._stopping.set()
        try:
            self.export()
        except StorageError as error:
            _log.error("export_failed", reason=str(error))

    def _run(self) -> None:
        while (number := self._queue.get()) is not None:
            while not self._stopping.is_set():
                try:
                    self.write(number)
                    self.tidy()
                    self.trouble = ""
                    break
                except StorageError as error:
                    self.trouble = str(error)
                    _log.error("archive_failed", segment=number, reason=str(error))
                    if self._queue.qsize() and self._queue.queue[-1] is None:
                        return
                    self._stopping.wait(RETRY_S)
                except Exception as error:
                    self.trouble = f"segment {number}: {error}"
                    _log.error("archive_failed", segment=number, exc_info=error)
                    break

    def write(self, number: int) -> None:
        """Write the history of one segment. Raises StorageError."""
        path = segment_path(self.log_folder, number)
        if not path.exists():
            return
        for day, table in tables_of(self._batches(path)).items():
            target = self._data / "telemetry" / f"date={day.isoformat()}" / f"segment-{number:012d}.parquet"
            write_atomically(table, target)
            self.rows += table.num_rows
        self.archived = max(self.archived, number)

    def _batches(self, path: Path) -> Iterable[tuple[Batch, float]]:
        seen: set[tuple[str, str, int]] = set()
        for record in read_segment(path):
            try:
                content = content_of(record)
            except InputError as error:
                _log.error("record_unreadable", file=str(path), reason=str(error))
                continue
            if isinstance(content, Batch):
                key = content.node, content.stream, content.sequence
                if key not in seen:
                    seen.add(key)
                    yield content, record.received

    def tidy(self) -> None:
        """Drop segments that are archived and needed by nobody; export the small tables; drop what is too old."""
        limit = min(self._needed_from(), self.archived)
        for number in segments(self.log_folder):
            if number <= limit:
                with contextlib.suppress(OSError):
                    segment_path(self.log_folder, number).unlink()
        if self._clock.monotonic() - self._exported_at >= EXPORT_INTERVAL_S:
            self.export()
            self._drop_old_days()

    def export(self) -> None:
        """Write events.parquet, failures.parquet and devices.parquet beside the telemetry. Raises StorageError."""
        self._exported_at = self._clock.monotonic()
        events, failures = schema.events.c, schema.failures.c
        with self._database.read() as run:
            state = (
                run.execute(sqlalchemy.select(sqlalchemy.func.max(events.id))).scalar() or 0,
                run.execute(sqlalchemy.select(sqlalchemy.func.max(failures.id))).scalar() or 0,
            )
            if state != self._exported:
                rows = run.execute(
                    sqlalchemy.select(
                        events.time, events.node, events.device, events.kind, events.code
                    ).order_by(events.time)
                ).all()
                write_atomically(
                    _small(rows, ("time", "node", "device", "kind", "code")), self._data / "events.parquet"
                )
                reported = run.execute(
                    sqlalchemy.select(failures.time, failures.node, failures.device, failures.cause).order_by(
                        failures.time
                    )
                ).all()
                if reported:
                    write_atomically(
                        _small(reported, ("time", "node", "device", "cause")), self._data / "failures.parquet"
                    )
                self._exported = state
        devices = [
            (d.device, d.device.partition("/")[0], d.kind, d.model, d.serial)
            for d in self._devices().values()
        ]
        if devices:
            names = ("device", "node", "kind", "model", "serial")
            columns = [pyarrow.array(list(c), pyarrow.string()) for c in zip(*devices, strict=True)]
            write_atomically(pyarrow.table(columns, names=list(names)), self._data / "devices.parquet")

    def _drop_old_days(self) -> None:
        if not self._retention_days:
            return
        oldest = datetime.fromtimestamp(self._clock.now(), UTC).date() - timedelta(days=self._retention_days)
        for folder in (self._data / "telemetry").glob("date=*"):
            with contextlib.suppress(ValueError):
                if date.fromisoformat(folder.name.removeprefix("date=")) < oldest:
                    shutil.rmtree(folder, ignore_errors=True)
                    _log.info("history_dropped", folder=str(folder))


def _small(rows: Iterable[Any], names: tuple[str, ...]) -> pyarrow.Table:
    """A table whose first column is a time and the others text."""
    columns: list[list[Any]] = [list(c) for c in zip(*rows, strict=True)] or [[] for _ in names]
    times = pyarrow.array([round(t * 1e6) for t in columns[0]], TIME_TYPE)
    return pyarrow.table(
        [times, *(pyarrow.array(c, pyarrow.string()) for c in columns[1:])], names=list(names)
    )
