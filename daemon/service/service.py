"""The parts of the service put together: what starts before what, and what ends last. No HTTP here."""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import os
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

import httpx
import structlog

from forewarn.collectors.clock import Clock, SystemClock
from forewarn.collectors.errors import ConfigError, InputError, StorageError
from forewarn.daemon import wire
from forewarn.daemon.config import ServiceConfig, parse_address
from forewarn.daemon.service import intake, journal, protections, times
from forewarn.daemon.service.archive import Archive
from forewarn.daemon.service.broadcast import Broadcast
from forewarn.daemon.service.database import open_database
from forewarn.daemon.service.engine import Engine
from forewarn.daemon.service.journal import Journal, Record, Sealed
from forewarn.daemon.service.outbox import Outbox
from forewarn.daemon.service.problems import Problem
from forewarn.daemon.service.reactor import Reactor, Told
from forewarn.daemon.service.snapshots import SnapshotFolder
from forewarn.daemon.service.targets import TargetPolicy
from forewarn.daemon.service.tokens import Principal, TokenBook
from forewarn.daemon.service.view import View
from forewarn.models import registry
from forewarn.models.registry import RiskModel

RETRY_AFTER_S = 5
REPLAY_AT_ONCE = 1000

_log = structlog.get_logger("forewarn.service")


@dataclass
class Counts:
    """What the ingest has seen since the start."""

    batches: int = 0
    duplicates: int = 0
    refused: int = 0
    busy: int = 0
    bytes: int = 0
    samples: int = 0


class Service:
    """Everything behind the API. `start` recovers what was, `stop` keeps what is."""

    def __init__(
        self,
        settings: ServiceConfig,
        clock: Clock | None = None,
        *,
        webhook_transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        """Opens the data folder and the database. Raises ConfigError, StorageError."""
        self.settings, self.clock = settings, clock or SystemClock()
        self.data = Path(settings.data)
        self.host, self.port = parse_address(settings.listen, "service.listen")
        self.loopback = is_loopback(self.host)
        self.policy = TargetPolicy(
            settings.allow_webhook_hosts, allow_insecure=settings.allow_insecure_webhooks
        )
        with contextlib.ExitStack() as undo:
            lock = lock_folder(self.data)
            undo.callback(os.close, lock)
            self._lock = lock
            self.models, self.models_path = load_models(settings.models)
            self.database = open_database(self.data, settings.database_url)
            undo.callback(self.database.close)
            self.tokens = TokenBook(self.database, self.clock)
            if not self.tokens.refresh() and not self.loopback:
                raise ConfigError(
                    f"service.listen: {settings.listen} is not a loopback address, and there is no token: make one "
                    "with `forewarn token create --role operator` first"
                )
            undo.pop_all()
        self.protections = protections.Protections(
            self.clock,
            protections.Limits(
                settings.checkpoint_request_timeout_s, settings.cool_down_s, dry_run=settings.protect_dry_run
            ),
            settings.public_url.rstrip("/") or f"http://{settings.listen}",
        )
        self.outbox = Outbox(
            self.database, self.clock, self.policy, on_dead=self._on_dead, transport=webhook_transport
        )
        self.broadcast = Broadcast()
        self.snapshots = SnapshotFolder(self.data / "snapshots", self.clock, settings.snapshot_interval_s)
        self.refused = intake.RefusedBatches(self.data / "refused")
        self.counts = Counts()
        self.ready = False
        self._sequences = intake.Sequences()
        self._pending = intake.Pending()

    def start(self) -> None:
        """Recover from snapshot and log, then run. Raises StorageError."""
        began = self.clock.monotonic()
        restored = self.snapshots.load(self.models)
        self.engine = Engine(
            restored.fleet,
            self.clock,
            self.snapshots,
            cycle_interval_s=self.settings.cycle_interval_s,
            on_view=self._on_view,
            sequences=restored.sequences,
            nodes=restored.nodes,
            jobs=restored.jobs,
            on_news=self._on_news,
        )
        self.archive = Archive(
            self.data,
            self.clock,
            self.database,
            retention_days=self.settings.history_days,
            needed_from=lambda: min(self.snapshots.oldest_needed(), self.reactor.reacted),
            devices=self.engine.fleet.devices,
        )
        self.reactor = Reactor(
            self.database,
            self.clock,
            self.protections,
            current_view=lambda: self.engine.view,
            nodes=lambda: self.engine.nodes,
            on_told=self._on_told,
            on_sealed=self.archive.sealed,
        )
        self.reactor.load()
        replayed, last = self._replay(restored.number)
        self._sequences = intake.Sequences.of(self.engine.sequences.plain())
        self.journal = Journal(
            self.data / "wal",
            self.clock,
            self._on_durable,
            segment_bytes=self.settings.segment_max_bytes,
            segment_interval_s=self.settings.segment_interval_s,
            first_number=last + 1,
        )
        for part in (self.archive, self.outbox, self.engine, self.reactor, self.journal):
            part.start()
        self.ready = True
        _log.info(
            "started",
            snapshot=restored.number,
            replayed=replayed,
            seconds=round(self.clock.monotonic() - began, 3),
        )

    def _replay(self, after: int) -> tuple[int, int]:
        """Bring in the log segments after a snapshot; how many records, and the last segment's number."""
        folder = self.data / "wal"
        count, last = 0, after
        numbers = journal.segments(folder)
        for number in numbers:
            last = max(last, number)
            if number <= after:
                self.reactor.replay([Sealed(number)])
                continue
            group: list[Record | Sealed] = []
            for record in journal.read_segment(
                journal.segment_path(folder, number), repair=number == numbers[-1]
            ):
                group.append(record)
                count += 1
                if len(group) >= REPLAY_AT_ONCE:
                    self._replay_group(group)
                    group = []
            self._replay_group([*group, Sealed(number)])
        return count, last

    def _replay_group(self, group: list[Record | Sealed]) -> None:
        self.engine.replay(group)
        self.reactor.replay(group)

    def stop(self) -> None:
        """Answer no more, keep everything, close. May be called more than once."""
        if not self.ready:
            return
        self.ready = False
        self.journal.stop()
        self.engine.stop()
        self.reactor.stop()
        self.archive.stop()
        self.outbox.stop()
        self.database.close()
        with contextlib.suppress(OSError):
            os.close(self._lock)
        _log.info("stopped")

    # What the threads say to each other --------------------------------------------------------------------------

    def _on_durable(self, items: list[Record | Sealed]) -> None:
        self.reactor.submit(items)
        self.engine.submit(items)

    def _on_view(self, view: View) -> None:
        self.reactor.show(view)
        self.broadcast.send(
            "cycle", {"number": view.number, "time": times.iso(view.time), "devices": len(view.devices)}
        )

    def _on_news(self, batches: list[wire.Batch]) -> None:
        now = self.clock.now()
        for batch in batches:
            self.journal.append(Record(journal.BATCH, now, wire.encode(batch), batch))

    def _on_told(self, told: Told) -> None:
        if told.protections:
            self.outbox.wake()
        if told.hits:
            self.engine.overlay(told.hits)
        for row in told.events:
            self.broadcast.send(
                "event",
                {
                    "device": row["device"],
                    "kind": row["kind"],
                    "code": row["code"],
                    "severity": row["severity"],
                    "time": times.iso(row["time"]),
                },
            )
        for identity in told.protections:
            self.broadcast.send("protection", {"id": identity})
        if told.alerts:
            self.broadcast.send("alert", {"count": told.alerts})

    def _on_dead(self, protection: str, reason: str) -> None:
        with contextlib.suppress(StorageError):
            protections.escalate_undelivered(self.database, self.clock, protection, reason)

    # Ingest -------------------------------------------------------------------------------------------------------

    def check_load(self) -> None:
        """Raises Problem when nothing more can be taken now."""
        if not self.ready:
            raise Problem(503, "the service is starting or stopping", headers={"Retry-After": "1"})
        if self.engine.backlog_bytes > self.settings.backlog_max_bytes:
            self.counts.busy += 1
            raise Problem(
                429,
                f"{self.engine.backlog_bytes} bytes wait to be applied: come back later",
                headers={"Retry-After": str(RETRY_AFTER_S)},
            )

    def take(
        self, batch: wire.Batch, body: bytes, received: float
    ) -> tuple[wire.Answer, Future[None] | None]:
        """Queue a batch for the log; the answer is good once the future is done. Called by one thread.

        A repeat gets the future of the first, when that is still under way, or none.
        """
        stream = batch.node, batch.stream
        highest = self._sequences.get(*stream)
        pending = self._pending.futures.get(stream)
        if batch.sequence <= highest:
            self.counts.duplicates += 1
            return wire.Answer(batch.stream, highest, duplicate=True), pending
        self._sequences.set(*stream, batch.sequence)
        future = self.journal.append(Record(journal.BATCH, received, body, batch))
        self._pending.futures[stream] = future
        self.counts.batches += 1
        self.counts.bytes += len(body)
        self.counts.samples += sum(len(f.values) // 8 for f in batch.frames)
        return wire.Answer(batch.stream, batch.sequence), future

    def settle(self, batch: wire.Batch, future: Future[None], before: int, failed: bool) -> None:
        """After the write: forget the future; when it failed, the batch is news again."""
        stream = batch.node, batch.stream
        if self._pending.futures.get(stream) is future:
            del self._pending.futures[stream]
        if failed:
            self._sequences.back(*stream, before)

    def highest(self, batch: wire.Batch) -> int:
        return self._sequences.get(batch.node, batch.stream)

    def note(self, kind: int, payload: bytes) -> Future[None]:
        """Log something other than a batch that the fleet must know after a restart as well."""
        return self.journal.append(Record(kind, self.clock.now(), payload))

    def trouble(self) -> list[str]:
        """Why the service is not ready; empty when it is. May wait for a disk."""
        if not self.ready:
            return ["starting or stopping"]
        found = [self.journal.probe(), self.reactor.trouble]
        try:
            self.database.check()
        except StorageError as error:
            found.append(str(error))
        return [f for f in found if f]

    def principal(self, text: str) -> Principal | None:
        return self.tokens.find(text)


def is_loopback(host: str) -> bool:
    """Whether an address to listen on can be reached from this machine alone."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def lock_folder(data: Path) -> int:
    """Hold the data folder for this process alone. Raises StorageError."""
    path = data / "lock"
    try:
        data.mkdir(parents=True, exist_ok=True, mode=0o700)
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise StorageError(
            f"{data}: cannot be used: {error.strerror or error}; set service.data to a folder that can be written"
        ) from error
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(handle)
        raise StorageError(
            f"{data}: another service uses this folder; stop it, or give service.data"
        ) from None
    return handle


def load_models(setting: str) -> tuple[dict[str, RiskModel], Path]:
    """The models to score with, and their folder. Shipped ones may be missing: rules and base rates remain."""
    path = Path(setting) if setting else registry.bundled_path()
    try:
        return registry.load_all(path), path
    except (StorageError, InputError) as error:
        if setting:
            raise ConfigError(f"service.models: {error}") from error
        _log.warning(
            "no_models", reason=str(error), remedy="rules and base rates are used; see `forewarn train`"
        )
        return {}, path
