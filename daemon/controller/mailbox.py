"""What the controller must not forget: webhook ids with their answers, requests to save, acknowledgements on their way.

One SQLite file in a state folder, shared by the receiver and the training loop (one process or two, same host), and
a flag file beside it for loops in any language. Everything that is answered for is on disk first.
"""

from __future__ import annotations

import contextlib
import json
import os
import sqlite3
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from forewarn.collectors.clock import Clock, SystemClock
from forewarn.collectors.errors import StorageError
from forewarn.daemon.controller.messages import SaveRequest

DATABASE_NAME = "controller.db"
FLAG_NAME = "save-requested"
"""Exists while a save is wanted; holds the requests as JSON. Only a sign: the truth is in the database."""
REMEMBER_WEBHOOKS_S = 7 * 86_400
"""How long a webhook id is remembered; its signature expires after 5 minutes."""
BUSY_TIMEOUT_S = 5.0

_SCHEMA = """
create table if not exists webhooks (id text primary key, received real not null, answer text not null);
create table if not exists requests (
    protection text primary key, received real not null, state text not null, request text not null,
    outcome text not null default '{}');
create table if not exists acknowledgements (
    number integer primary key autoincrement, protection text not null, body text not null,
    made real not null, state text not null default 'waiting', attempts integer not null default 0,
    trouble text not null default '');
create table if not exists notes (name text primary key, value text not null);
"""


class Outcome(msgspec.Struct, frozen=True, omit_defaults=True):
    """How a request ended, as the service is told: `state` is completed, declined or failed."""

    state: str
    checkpoint: str | None = None
    step: int | None = None
    duration_seconds: float | None = None
    reason: str | None = None


class Acknowledgement(msgspec.Struct, frozen=True):
    """One message to the service. `body` is the JSON of `POST /v1/protections/{protection}/ack`."""

    number: int
    protection: str
    body: dict[str, Any]
    attempts: int


class Mailbox:
    """The state folder. Safe to use from several threads, and from receiver and loop as two processes."""

    def __init__(self, folder: Path | str, clock: Clock | None = None) -> None:
        """Open or make the folder. Raises StorageError."""
        self.folder = Path(folder)
        self.flag = self.folder / FLAG_NAME
        self._clock = clock or SystemClock()
        self._lock = threading.Lock()
        try:
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._database = sqlite3.connect(
                self.folder / DATABASE_NAME,
                timeout=BUSY_TIMEOUT_S,
                check_same_thread=False,
                isolation_level=None,
            )
            self._database.execute("pragma journal_mode = wal")
            self._database.execute("pragma synchronous = full")
            self._database.executescript(_SCHEMA)
        except (OSError, sqlite3.Error) as error:
            raise StorageError(
                f"controller.state: {self.folder} cannot be used: {error}; give a writable folder"
            ) from error
        self.refresh_flag()

    def close(self) -> None:
        """Give up the database."""
        with self._lock:
            self._database.close()

    def accept(self, webhook: str | None, request: SaveRequest, decline: str = "") -> dict[str, Any]:
        """Take in a request; returns the answer, the same for a repeat of `webhook` (None: it came by polling).

        `decision` is `accepted`, `declined` (`decline` says why), or for a protection that is known already
        `already_in_progress` or `duplicate`. Raises StorageError.
        """
        now = self._clock.now()
        with self._transaction() as run:
            if webhook is not None:
                known = run("select answer from webhooks where id = ?", (webhook,)).fetchone()
                if known:
                    answer: dict[str, Any] = json.loads(known[0])
                    return answer
            row = run("select state from requests where protection = ?", (request.protection,)).fetchone()
            answer = {"decision": "accepted", "protection": request.protection}
            if row is not None:
                open_now = row[0] in ("waiting", "saving")
                answer["decision"] = "already_in_progress" if open_now else "duplicate"
            elif decline:
                answer |= {"decision": "declined", "reason": decline}
                self._insert(run, request, "declined", now)
                self._queue(run, request.protection, {"state": "declined", "reason": decline}, now)
            else:
                self._insert(run, request, "waiting", now)
                self._queue(run, request.protection, {"state": "accepted"}, now)
            if webhook is not None:
                run("delete from webhooks where received < ?", (now - REMEMBER_WEBHOOKS_S,))
                run("insert into webhooks values (?, ?, ?)", (webhook, now, json.dumps(answer)))
        self.refresh_flag()
        return answer

    def open_requests(self) -> list[SaveRequest]:
        """Requests without an outcome, oldest first; one being saved when the process died is among them."""
        with self._transaction() as run:
            rows = run(
                "select request from requests where state in ('waiting', 'saving') order by received"
            ).fetchall()
        return [msgspec.json.decode(row[0], type=SaveRequest) for row in rows]

    def state_of(self, protection: str) -> str | None:
        """`waiting`, `saving`, `completed`, `declined`, `failed`; None when unknown."""
        with self._transaction() as run:
            row = run("select state from requests where protection = ?", (protection,)).fetchone()
        return None if row is None else str(row[0])

    def begin(self, protections: list[str]) -> None:
        """The loop starts saving for these."""
        with self._transaction() as run:
            for protection in protections:
                run("update requests set state = 'saving' where protection = ?", (protection,))

    def finish(self, protections: list[str], outcome: Outcome) -> None:
        """The end of these requests, told to the service as soon as it can be reached. Ended ones stay as they are."""
        now = self._clock.now()
        body = msgspec.to_builtins(outcome)
        with self._transaction() as run:
            for protection in protections:
                done = run(
                    "update requests set state = ?, outcome = ? "
                    "where protection = ? and state in ('waiting', 'saving')",
                    (outcome.state, json.dumps(body), protection),
                )
                if done.rowcount:
                    self._queue(run, protection, body, now)
        self.refresh_flag()

    def note_checkpoint(self, time: float, step: int, checkpoint: str) -> None:
        """The loop saved on its own account at `time`."""
        value = json.dumps({"time": time, "step": step, "checkpoint": checkpoint})
        with self._transaction() as run:
            run("insert or replace into notes values ('last_checkpoint', ?)", (value,))

    def last_checkpoint(self) -> dict[str, Any] | None:
        """`time`, `step` and `checkpoint` of the newest save that was noted; None when there was none."""
        with self._transaction() as run:
            row = run("select value from notes where name = 'last_checkpoint'").fetchone()
        if row is None:
            return None
        noted: dict[str, Any] = json.loads(row[0])
        return noted

    def undelivered(self, limit: int = 100) -> list[Acknowledgement]:
        """Acknowledgements the service has not taken yet, in the order they were made."""
        with self._transaction() as run:
            rows = run(
                "select number, protection, body, attempts from acknowledgements "
                "where state = 'waiting' order by number limit ?",
                (limit,),
            ).fetchall()
        return [Acknowledgement(row[0], row[1], json.loads(row[2]), row[3]) for row in rows]

    def delivered(self, number: int, trouble: str = "") -> None:
        """The service took it, or (`trouble`) refused it for good."""
        with self._transaction() as run:
            run(
                "update acknowledgements set state = ?, attempts = attempts + 1, trouble = ? where number = ?",
                ("refused" if trouble else "delivered", trouble, number),
            )

    def postponed(self, number: int, trouble: str) -> None:
        """It could not be delivered now; it stays."""
        with self._transaction() as run:
            run(
                "update acknowledgements set attempts = attempts + 1, trouble = ? where number = ?",
                (trouble, number),
            )

    def counts(self) -> dict[str, dict[str, int]]:
        """How many requests and acknowledgements are in which state."""
        with self._transaction() as run:
            return {
                table: dict(run(f"select state, count(*) from {table} group by state").fetchall())  # noqa: S608 - our own names
                for table in ("requests", "acknowledgements")
            }

    def refresh_flag(self) -> None:
        """Make the flag file agree with the database."""
        waiting = self.open_requests()
        try:
            if waiting:
                part = self.flag.with_name(f"{FLAG_NAME}.{os.getpid()}.{threading.get_ident()}.part")
                part.write_bytes(msgspec.json.encode(waiting))
                part.replace(self.flag)
            else:
                self.flag.unlink(missing_ok=True)
        except OSError as error:
            raise StorageError(f"{self.flag}: cannot be written: {error}") from error

    def _insert(self, run: Any, request: SaveRequest, state: str, now: float) -> None:
        run(
            "insert into requests (protection, received, state, request) values (?, ?, ?, ?)",
            (request.protection, now, state, msgspec.json.encode(request).decode()),
        )

    def _queue(self, run: Any, protection: str, body: dict[str, Any], now: float) -> None:
        run(
            "insert into acknowledgements (protection, body, made) values (?, ?, ?)",
            (protection, json.dumps(body), now),
        )

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[Any]:
        """One immediate transaction, so that two processes never decide on the same old state."""
        with self._lock:
            try:
                self._database.execute("begin immediate")
                try:
                    yield self._database.execute
                except BaseException:
                    self._database.execute("rollback")
                    raise
                self._database.execute("commit")
            except sqlite3.Error as error:
                raise StorageError(f"{self.folder / DATABASE_NAME}: {error}") from error
