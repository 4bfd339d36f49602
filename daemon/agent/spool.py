"""Batches on disk until the service has them: SQLite with a write-ahead log, every commit forced to the disk.

A batch is written before it is sent and leaves only when it is acknowledged. Sequence numbers are kept apart from the
batches, so an emptied spool never counts the same number twice. When the disk fails, batches wait in bounded memory
under a stream of their own, and move to the disk when it works again.
"""

from __future__ import annotations

import errno
import logging
import os
import sqlite3
import threading
import uuid
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from forewarn.collectors.base import Device, Event
from forewarn.collectors.clock import Clock
from forewarn.collectors.errors import StorageError
from forewarn.daemon import wire
from forewarn.daemon.agent.logs import log

MEMORY_MAX_BYTES = 4 * 1024 * 1024
"""What may wait in memory while the disk cannot be written."""
QUARANTINE_MAX_BATCHES = 100
"""Refused batches that are kept for a look; the oldest go first."""
CLEAR_AFTER_BATCHES = 64
"""Acknowledged batches are deleted with the next write, or at once when this many have piled up."""

SCHEMA = """
CREATE TABLE IF NOT EXISTS meta (name TEXT PRIMARY KEY, value BLOB NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS batches (
  id INTEGER PRIMARY KEY AUTOINCREMENT, stream TEXT NOT NULL, sequence INTEGER NOT NULL,
  has_events INTEGER NOT NULL, has_frames INTEGER NOT NULL, body BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS quarantine (
  id INTEGER PRIMARY KEY AUTOINCREMENT, time REAL NOT NULL, reason TEXT NOT NULL, body BLOB NOT NULL);
"""


@dataclass(frozen=True)
class Parts:
    """What goes into one batch, and the places from which collectors resume once it is safe."""

    devices: list[Device] = field(default_factory=list)
    frames: list[wire.Frame] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    states: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Item:
    """One batch that waits. `id` is its row on disk, None while it is only in memory."""

    id: int | None
    stream: str
    sequence: int
    body: bytes


@dataclass(frozen=True)
class Status:
    """How the spool is: `degraded` says why the disk is not used, empty when it is."""

    batches: int
    bytes: int
    dropped: int
    refused: int
    degraded: str


class Spool:
    """The batches of one node. All methods may be called from any thread; none raises for a disk in trouble."""

    def __init__(
        self, path: Path, node: str, clock: Clock, *, max_bytes: int, agent_version: str = ""
    ) -> None:
        """Open or make the spool at `path`. Raises StorageError when another agent holds it."""
        self.path, self.node, self.clock, self.max_bytes = path, node, clock, max_bytes
        self.agent_version = agent_version
        self._lock = threading.RLock()
        self._db: sqlite3.Connection | None = None
        self._stream = ""
        self._next = 1
        self._bytes = self._batches = 0
        self._done_id = self._cleared_id = 0
        self._memory: deque[Item] = deque()
        self._memory_stream, self._memory_next = _new_stream(), 1
        self._states: dict[str, Any] = {}
        self._held_states: dict[str, Any] = {}
        self._dropped = self._refused = 0
        self._dropping = False
        self._degraded = ""
        self.notices: list[Event] = []
        """Events about the spool itself; whoever cuts the next batch takes them along."""
        with self._lock:
            self._try_open()

    # Writing

    def append(self, parts: Parts) -> None:
        """Keep a batch: on disk, or in memory while the disk fails."""
        with self._lock:
            if self._db is None:
                self._try_open()
            if self._db is not None and self._append_to_disk(parts):
                return
            self._append_to_memory(parts)

    def _append_to_disk(self, parts: Parts) -> bool:
        states = {**self._held_states, **parts.states}
        body = self._encode(parts, self._stream, self._next)
        moved = list(self._memory)
        kept = False
        with self._guard("write"):
            assert self._db is not None
            self._db.execute("BEGIN IMMEDIATE")
            self._delete_done()
            for item in moved:
                held = wire.decode(item.body)
                self._insert(item.stream, item.sequence, item.body, held.events, held.frames)
            self._insert(self._stream, self._next, body, parts.events, parts.frames)
            self._put("next_sequence", self._next + 1)
            for name, state in states.items():
                self._put(f"state:{name}", state)
            self._db.execute("COMMIT")
            self._cleared_id = self._done_id
            self._next += 1
            self._states.update(states)
            self._held_states.clear()
            self._memory.clear()
            if moved:
                self._memory_stream, self._memory_next = _new_stream(), 1
            self._batches += len(moved) + 1
            self._bytes += len(body) + sum(len(item.body) for item in moved)
            kept = True
            self._recovered()
            self._enforce_limit()
        return kept

    def _append_to_memory(self, parts: Parts) -> None:
        body = self._encode(parts, self._memory_stream, self._memory_next)
        self._memory.append(Item(None, self._memory_stream, self._memory_next, body))
        self._memory_next += 1
        self._held_states.update(parts.states)
        limit = min(MEMORY_MAX_BYTES, self.max_bytes)
        excess = sum(len(item.body) for item in self._memory) - limit
        # Telemetry goes first, oldest first; then the oldest events.
        for item in list(self._memory) if excess > 0 else []:
            batch = wire.decode(item.body)
            lean = wire.encode(msgspec.structs.replace(batch, frames=[], devices=[])) if batch.events else b""
            if batch.frames and excess > 0:
                self._say_dropped("the memory that stands in for the spool is full")
                excess -= len(item.body) - len(lean)
                place = self._memory.index(item)
                if lean:
                    self._memory[place] = Item(None, item.stream, item.sequence, lean)
                else:
                    del self._memory[place]
        while excess > 0 and len(self._memory) > 1:
            excess -= len(self._memory.popleft().body)
            self._say_dropped("the memory that stands in for the spool is full")

    def _encode(self, parts: Parts, stream: str, sequence: int) -> bytes:
        return wire.encode(
            wire.Batch(
                node=self.node,
                stream=stream,
                sequence=sequence,
                sent=self.clock.now(),
                agent_version=self.agent_version,
                devices=parts.devices,
                frames=parts.frames,
                events=parts.events,
            )
        )

    def _enforce_limit(self) -> None:
        """Give up the oldest telemetry, then the oldest events, until the spool fits again."""
        if self._bytes <= self.max_bytes:
            self._dropping = False
            return
        assert self._db is not None
        self._db.execute("BEGIN IMMEDIATE")
        while self._bytes > self.max_bytes:
            row = self._db.execute(
                "SELECT id, has_events, has_frames, body FROM batches WHERE id > ? "
                "ORDER BY has_frames DESC, id LIMIT 1",
                (self._done_id,),
            ).fetchone()
            if row is None:
                break
            number, has_events, has_frames, body = row
            if has_frames and has_events:
                lean = wire.encode(msgspec.structs.replace(wire.decode(body), frames=[]))
                self._db.execute("UPDATE batches SET has_frames = 0, body = ? WHERE id = ?", (lean, number))
                self._bytes -= len(body) - len(lean)
            else:
                self._db.execute("DELETE FROM batches WHERE id = ?", (number,))
                self._bytes -= len(body)
                self._batches -= 1
            self._say_dropped(f"the spool is full ({self.max_bytes} bytes, agent.spool_max_bytes)")
        self._db.execute("COMMIT")

    def _say_dropped(self, why: str) -> None:
        self._dropped += 1
        if self._dropping:
            return
        self._dropping = True
        message = f"oldest telemetry is given up: {why}; the service has not taken batches for long"
        log(logging.ERROR, "telemetry_dropped", reason=why, path=self.path)
        self.notices.append(
            Event(self.node, "telemetry_dropped", "spool_full", "error", message, time=self.clock.now())
        )

    # Reading and acknowledging

    def peek(self) -> Item | None:
        """The oldest batch that waits."""
        with self._lock:
            if self._db is not None:
                with self._guard("read"):
                    row = self._db.execute(
                        "SELECT id, stream, sequence, body FROM batches WHERE id > ? ORDER BY id LIMIT 1",
                        (self._done_id,),
                    ).fetchone()
                    if row is not None:
                        return Item(*row)
            return self._memory[0] if self._memory else None

    def acknowledge(self, item: Item) -> None:
        """The service has `item`: it need not be sent again."""
        with self._lock:
            if item.id is not None:
                self._finish(item.id, len(item.body))
                return
            for waiting in list(self._memory):
                if waiting.stream == item.stream and waiting.sequence <= item.sequence:
                    self._memory.remove(waiting)
                    return
            if self._db is not None:  # it moved to the disk while it was under way
                with self._guard("write"):
                    self._db.execute(
                        "DELETE FROM batches WHERE stream = ? AND sequence <= ?", (item.stream, item.sequence)
                    )
                    self._count()

    def quarantine(self, item: Item, reason: str) -> None:
        """The service will never take `item`: set it aside with the reason and go on."""
        with self._lock:
            self._refused += 1
            if self._db is not None:
                with self._guard("write"):
                    self._db.execute("BEGIN IMMEDIATE")
                    self._db.execute(
                        "INSERT INTO quarantine (time, reason, body) VALUES (?, ?, ?)",
                        (self.clock.now(), reason, item.body),
                    )
                    self._db.execute(
                        "DELETE FROM quarantine WHERE id <= (SELECT max(id) FROM quarantine) - ?",
                        (QUARANTINE_MAX_BATCHES,),
                    )
                    self._db.execute("COMMIT")
            self.acknowledge(item)

    def _finish(self, number: int, size: int) -> None:
        if number > self._done_id:
            self._done_id = number
            self._batches -= 1
            self._bytes -= size
        if self._db is not None and self._done_id - self._cleared_id >= CLEAR_AFTER_BATCHES:
            with self._guard("write"):
                self._delete_done()
                self._cleared_id = self._done_id
                self._count()

    # State

    def state(self, name: str) -> Any:
        """Where a collector left off, as of the newest batch that is safe; None when it never said."""
        return self._states.get(name)

    @property
    def status(self) -> Status:
        with self._lock:
            waiting = sum(len(item.body) for item in self._memory)
            return Status(
                max(0, self._batches) + len(self._memory),
                max(0, self._bytes) + waiting,
                self._dropped,
                self._refused,
                self._degraded,
            )

    def close(self) -> None:
        """Delete what is acknowledged and let the file go."""
        with self._lock:
            if self._db is None:
                return
            with self._guard("write"):
                self._delete_done()
            if self._db is not None:
                self._db.close()
                self._db = None

    # The file

    def _try_open(self) -> None:
        for _ in range(2):
            try:
                self._open()
                return
            except sqlite3.OperationalError as error:
                self._forget()
                if "locked" in str(error):
                    raise StorageError(
                        f"{self.path}: the spool is in use by another agent: stop it, or set agent.spool"
                    ) from error
                self._degrade(f"cannot be opened: {error}")
                return
            except sqlite3.DatabaseError as error:
                self._forget()
                if not self._set_aside(str(error)):
                    return
            except OSError as error:
                self._forget()
                self._degrade(f"cannot be opened: {error}")
                return

    def _open(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._db = db = sqlite3.connect(self.path, timeout=0.5, isolation_level=None, check_same_thread=False)
        # One agent, one spool: the lock also does without the shared-memory file beside the log.
        for pragma in (
            "locking_mode = EXCLUSIVE",
            "journal_mode = WAL",
            "synchronous = FULL",
            "cache_size = -256",
            "temp_store = MEMORY",
        ):
            db.execute(f"PRAGMA {pragma}")
        db.execute("BEGIN IMMEDIATE")
        for statement in SCHEMA.split(";"):
            db.execute(statement)
        meta = {name: msgspec.msgpack.decode(value) for name, value in db.execute("SELECT * FROM meta")}
        # A spool copied to another node must not speak for the node it came from.
        if meta.get("node", self.node) != self.node:
            log(logging.WARNING, "spool_of_other_node", node=meta["node"], path=self.path)
            db.execute("DELETE FROM batches")
            db.execute("DELETE FROM meta")
            meta = {}
        self._stream = meta.get("stream") or _new_stream()
        self._next = int(meta.get("next_sequence", 1))
        if "stream" not in meta:
            self._put("stream", self._stream)
            self._put("node", self.node)
        db.execute("COMMIT")
        self._states = {n.partition(":")[2]: v for n, v in meta.items() if n.startswith("state:")}
        self._done_id = self._cleared_id = 0
        self._count()

    def _count(self) -> None:
        assert self._db is not None
        self._batches, self._bytes = self._db.execute(
            "SELECT count(*), coalesce(sum(length(body)), 0) FROM batches WHERE id > ?", (self._done_id,)
        ).fetchone()

    def _insert(
        self, stream: str, sequence: int, body: bytes, events: list[Event], frames: list[wire.Frame]
    ) -> None:
        assert self._db is not None
        self._db.execute(
            "INSERT INTO batches (stream, sequence, has_events, has_frames, body) VALUES (?, ?, ?, ?, ?)",
            (stream, sequence, bool(events), bool(frames), body),
        )

    def _put(self, name: str, value: Any) -> None:
        assert self._db is not None
        self._db.execute("REPLACE INTO meta VALUES (?, ?)", (name, msgspec.msgpack.encode(value)))

    def _delete_done(self) -> None:
        assert self._db is not None
        if self._done_id > self._cleared_id:
            self._db.execute("DELETE FROM batches WHERE id <= ?", (self._done_id,))

    @contextmanager
    def _guard(self, doing: str) -> Iterator[None]:
        """Turn a failure of the disk into degraded mode; the caller goes on without it."""
        try:
            yield
        except sqlite3.OperationalError as error:
            self._roll_back()
            self._degrade(f"cannot {doing}: {error}")
        except sqlite3.DatabaseError as error:
            self._forget()
            self._set_aside(str(error))
        except OSError as error:
            self._roll_back()
            self._degrade(f"cannot {doing}: {error}")

    def _roll_back(self) -> None:
        if self._db is not None and self._db.in_transaction:
            try:
                self._db.execute("ROLLBACK")
            except sqlite3.Error:
                self._forget()

    def _forget(self) -> None:
        if self._db is not None:
            try:
                self._db.close()
            except sqlite3.Error:
                log(logging.DEBUG, "spool_close_failed", path=self.path)
            self._db = None
        self._batches = self._bytes = 0

    def _set_aside(self, why: str) -> bool:
        """Move a damaged file out of the way; true when a new one can be made."""
        stamp = int(self.clock.now())
        aside = self.path.with_name(f"{self.path.name}.damaged-{stamp}")
        try:
            self.path.replace(aside)
            for suffix in ("-wal", "-shm"):
                beside = self.path.with_name(self.path.name + suffix)
                if beside.exists():
                    beside.replace(aside.with_name(aside.name + suffix))
        except OSError as error:
            self._degrade(f"is damaged ({why}) and cannot be moved aside: {error}")
            return False
        log(
            logging.ERROR,
            "spool_damaged",
            path=self.path,
            reason=why,
            moved_to=aside,
            remedy="a new spool and a new stream begin; what the damaged one held was not sent",
        )
        return True

    def _degrade(self, why: str) -> None:
        if why == self._degraded:
            return
        self._degraded = why
        remedy = "batches wait in memory; free space or make the folder of agent.spool writable"
        if os.strerror(errno.EACCES) in why or "readonly" in why or "unable to open" in why:
            remedy = (
                "batches wait in memory; make the folder of agent.spool exist and be writable by the agent"
            )
        log(logging.ERROR, "spool_degraded", path=self.path, reason=why, remedy=remedy)

    def _recovered(self) -> None:
        if self._degraded:
            log(logging.WARNING, "spool_recovered", path=self.path)
            self._degraded = ""


def _new_stream() -> str:
    return uuid.uuid4().hex
