"""The thread that acts: events into the database, fatal ones into protections at once, alerts after each cycle.

An event and what follows from it are one transaction: after a crash the replayed log finds both or neither, so an
event leads to one protection however often it is seen.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import sqlalchemy
import structlog
from sqlalchemy.engine import Connection

from forewarn.collectors.base import Event
from forewarn.collectors.clock import Clock
from forewarn.collectors.errors import ForewarnError, InputError, StorageError
from forewarn.daemon.service import alerts, schema
from forewarn.daemon.service.alerts import SILENT_AFTER_S, DeviceAlerts, JobAlerts
from forewarn.daemon.service.database import Database
from forewarn.daemon.service.intake import NodeState
from forewarn.daemon.service.journal import Record, Sealed
from forewarn.daemon.service.protections import JobBook, Protections
from forewarn.daemon.service.readings import content_of, events_of
from forewarn.daemon.service.silences import Silences
from forewarn.daemon.service.view import View
from forewarn.daemon.wire import Batch
from forewarn.models.rules import RuleHit, on_event

TICK_S = 1.0
RETRY_S = 2.0
RECORDS_AT_ONCE = 512
MESSAGE_MAX_CHARS = 4000

_log = structlog.get_logger("forewarn.service")


@dataclass
class Told:
    """What one transaction made, told to others after its commit."""

    events: list[dict[str, Any]] = field(default_factory=list)
    hits: list[RuleHit] = field(default_factory=list)
    protections: list[str] = field(default_factory=list)
    alerts: int = 0


class Reactor:
    """`submit` what is durable, `view` what was scored; from any thread."""

    def __init__(
        self,
        database: Database,
        clock: Clock,
        protections: Protections,
        *,
        current_view: Callable[[], View],
        nodes: Callable[[], dict[str, NodeState]],
        on_told: Callable[[Told], None],
        on_sealed: Callable[[int], None],
    ) -> None:
        self._database, self._clock, self._protections = database, clock, protections
        self._current_view, self._nodes = current_view, nodes
        self._on_told, self._on_sealed = on_told, on_sealed
        self._items: deque[Record | Sealed] = deque()
        self._view: View | None = None
        self._condition = threading.Condition()
        self._stopping = False
        self._book = JobBook()
        self._book_stale = True
        self._device_alerts, self._job_alerts = DeviceAlerts(), JobAlerts()
        self._alerts_stale = False
        self._silent: set[str] = set()
        self.reacted = 0
        """All log segments up to this one have been reacted to."""
        self.trouble = ""
        self._thread = threading.Thread(target=self._run, name="forewarn-reactor", daemon=True)

    def load(self) -> None:
        """Read what is open from before. Raises StorageError."""
        with self._database.read() as run:
            self._device_alerts, self._job_alerts = DeviceAlerts.read(run), JobAlerts.read(run)
            self._book = JobBook.read(run)
            self._book_stale = False

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """React to what waits, then end."""
        with self._condition:
            self._stopping = True
            self._condition.notify()
        if self._thread.ident is not None:
            self._thread.join(5.0)

    def submit(self, items: Sequence[Record | Sealed]) -> None:
        """Hand over what has become durable, in order. Batches without events are of no interest here."""
        wanted = [
            i for i in items if isinstance(i, Sealed) or not isinstance(i.content, Batch) or i.content.events
        ]
        if wanted:
            with self._condition:
                self._items.extend(wanted)
                self._condition.notify()

    def show(self, view: View) -> None:
        """A cycle has ended. Only the newest matters."""
        with self._condition:
            self._view = view
            self._condition.notify()

    def jobs_changed(self) -> None:
        self._book_stale = True

    def replay(self, items: Sequence[Record | Sealed]) -> None:
        """React before the thread is started. Raises StorageError."""
        self.react(list(items), None)

    def _run(self) -> None:
        last_tick = self._clock.monotonic()
        while True:
            with self._condition:
                if not (self._items or self._view or self._stopping):
                    self._condition.wait(TICK_S)
                items = [self._items.popleft() for _ in range(min(RECORDS_AT_ONCE, len(self._items)))]
                view, self._view = self._view, None
                stopping = self._stopping
            if not self._try(items, view):
                with self._condition:
                    self._items.extendleft(reversed(items))
                    if stopping:
                        return
                    self._condition.wait(RETRY_S)
                continue
            if self._clock.monotonic() - last_tick >= TICK_S:
                last_tick = self._clock.monotonic()
                self._guarded(self.tick)
            if stopping and not items:
                return

    def _try(self, items: list[Record | Sealed], view: View | None) -> bool:
        """False when the database could not be written: the same is tried again, the log still has it."""
        if not items and view is None:
            return True
        try:
            self.react(items, view)
            self.trouble = ""
            return True
        except StorageError as error:
            if not self.trouble:
                _log.error("reaction_waits", reason=str(error))
            self.trouble = str(error)
            return False
        except Exception as error:
            _log.error("reaction_failed", records=len(items), exc_info=error)
            return True

    def _guarded(self, function: Callable[[], None]) -> None:
        try:
            function()
        except ForewarnError as error:
            _log.error("tick_failed", reason=str(error))
        except Exception as error:
            _log.error("tick_failed", exc_info=error)

    def react(self, items: list[Record | Sealed], view: View | None) -> None:
        """One transaction for a group of records and, when a cycle has ended, its view. Raises StorageError."""
        now = self._clock.now()
        told = Told()
        batches = list(_batches_of(items))
        # Protections and the outbox change jobs as well, so each cycle reads them anew.
        self._book_stale = self._book_stale or view is not None
        if batches or view is not None:
            with self._database.read() as run:
                silences = Silences.read(run, now)
                if self._alerts_stale:
                    self._device_alerts, self._job_alerts = DeviceAlerts.read(run), JobAlerts.read(run)
                    self._alerts_stale = False
            changes = []
            if view is not None:
                changes = self._device_alerts.step(view, silences)
                changes += self._job_alerts.step(view.jobs, silences, now)
            try:
                self._write(batches, view, silences, changes, told, now)
            except StorageError:
                # What was said to be open was not written: go on from what the database says.
                self._alerts_stale = True
                raise
            self._on_told(told)
        for item in items:
            if isinstance(item, Sealed):
                self.reacted = item.number
                self._on_sealed(item.number)

    def _write(
        self,
        batches: Sequence[tuple[Batch, float]],
        view: View | None,
        silences: Silences,
        changes: list[alerts.Change],
        told: Told,
        now: float,
    ) -> None:
        with self._database.write() as run:
            book = self._jobs(run)
            for batch, received in batches:
                self._insert_events(run, batch, received, told)
            if told.hits:
                told.protections += self._protections.on_hits(
                    run, book, self._current_view(), told.hits, silences
                )
            if view is not None:
                told.protections += self._protections.on_view(run, book, view, silences)
                alerts.write(run, changes, now)
                told.alerts = len(changes)

    def _jobs(self, run: Connection) -> JobBook:
        """The jobs; protections that complete change them, so they are read anew whenever somebody says so."""
        if self._book_stale:
            self._book_stale = False
            self._book = JobBook.read(run)
        return self._book

    def _insert_events(self, run: Connection, batch: Batch, received: float, told: Told) -> None:
        for position, event in enumerate(events_of(batch, received)):
            row = _event_row(batch, position, event, received)
            if not self._database.insert_new(run, schema.events, [row]):
                continue
            told.events.append(row)
            hit = _hit_of(event)
            if hit is not None:
                told.hits.append(hit)

    def tick(self) -> None:
        """What time alone brings: protections that are late, nodes that are silent. Raises StorageError."""
        now = self._clock.now()
        silent = {n for n, s in self._nodes().copy().items() if now - s.last_seen > SILENT_AFTER_S}
        with self._database.read() as run:
            late = run.execute(
                sqlalchemy.select(schema.protections.c.id)
                .where(
                    schema.protections.c.state.in_(schema.OPEN_STATES), schema.protections.c.deadline <= now
                )
                .limit(1)
            ).first()
        if late is None and silent == self._silent:
            return
        told = Told()
        with self._database.write() as run:
            told.alerts = len(self._protections.escalate_late(run))
            for node in sorted(silent - self._silent):
                alerts.raise_(
                    run,
                    f"silent:{node}",
                    "warning",
                    now,
                    node=node,
                    title=f"{node} is silent",
                    reason=f"no report for {SILENT_AFTER_S / 60:.0f} minutes: look at the node and its agent",
                )
            for node in sorted(self._silent - silent):
                alerts.resolve(run, f"silent:{node}", now)
        self._silent = silent
        self._on_told(told)


def _hit_of(event: Event) -> RuleHit | None:
    try:
        return on_event(event)
    except Exception as error:  # an odd event must not keep the others from being acted on
        _log.error("rule_failed", device=event.device, kind=event.kind, code=event.code, exc_info=error)
        return None


def _batches_of(items: Sequence[Record | Sealed]) -> list[tuple[Batch, float]]:
    found = []
    for item in items:
        if isinstance(item, Sealed):
            continue
        try:
            content = content_of(item)
        except InputError as error:
            _log.error("record_unreadable", reason=str(error))
            continue
        if isinstance(content, Batch) and content.events:
            found.append((content, item.received))
    return found


def _event_row(batch: Batch, position: int, event: Event, received: float) -> dict[str, Any]:
    return {
        "node": batch.node,
        "stream": batch.stream,
        "sequence": batch.sequence,
        "position": position,
        "time": event.time if event.time is not None else received,
        "received": received,
        "device": event.device[:512],
        "kind": event.kind[:64],
        "code": event.code[:128],
        "severity": event.severity[:16],
        "action": event.action[:128],
        "message": event.message[:MESSAGE_MAX_CHARS],
        "pci": None if event.pci is None else event.pci[:64],
        "count": min(event.count, 2**31 - 1),
    }
