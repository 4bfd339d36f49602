"""Webhooks that must arrive: rows written with the protection, sent by workers until answered or too late.

Standard Webhooks signatures; the id is the same for every attempt of a delivery. The retry schedule is our own (0, 1,
2, 4, 8, 15, 30 s with jitter until the deadline): the specification's day-long one suits no deadline of minutes, and a
schedule that must survive a restart lives in the table, not in a retry loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any

import httpx
import sqlalchemy
import structlog
from sqlalchemy.engine import Connection
from standardwebhooks import Webhook

from forewarn.collectors.clock import Clock
from forewarn.collectors.errors import ForewarnError, InputError, StorageError
from forewarn.daemon.service import schema
from forewarn.daemon.service.database import Database
from forewarn.daemon.service.targets import Target, TargetPolicy

TIMEOUT_S = 5.0
CLAIM_S = 30.0
"""A claimed delivery is nobody else's for this long: longer than any attempt can take."""
SCHEDULE_S = (0.0, 1.0, 2.0, 4.0, 8.0, 15.0, 30.0)
JITTER = 0.2
IDLE_S = 5.0
CONCURRENCY = 32
BREAK_AFTER, BREAK_S = 5, 20.0
"""So many failures in a row of one endpoint, and it is left alone for this long (never beyond a deadline)."""
RETRY_AFTER_MAX_S = 60.0
LOG_KEPT = 50

_log = structlog.get_logger("forewarn.service")


@dataclass
class Breaker:
    """Counts failures in a row of one endpoint."""

    failures: int = 0
    closed_until: float = 0.0


@dataclass(frozen=True)
class Due:
    """One delivery that a worker has claimed."""

    id: str
    protection: str
    job: str
    url: str
    body: str
    attempts: int
    deadline: float
    secrets: Sequence[str]


@dataclass(frozen=True)
class Outcome:
    """How an attempt went. `retry_after_s` None: as the schedule says. `final`: no further attempt helps."""

    ok: bool
    status: int | None = None
    error: str = ""
    retry_after_s: float | None = None
    final: bool = False
    disable: bool = False


def next_delay_s(attempts: int, random_ratio: Callable[[], float] = random.random) -> float:
    """Seconds to wait after so many attempts, with jitter."""
    base = SCHEDULE_S[min(attempts, len(SCHEDULE_S) - 1)]
    return base * (1.0 - JITTER + 2.0 * JITTER * random_ratio())


def signed_headers(identity: str, now: float, body: str, secrets: Sequence[str]) -> dict[str, str]:
    """The Standard Webhooks headers; with several secrets (rotation) several signatures."""
    stamp = datetime.fromtimestamp(int(now), UTC)
    signatures = [Webhook(secret).sign(identity, stamp, body) for secret in secrets]
    return {
        "webhook-id": identity,
        "webhook-timestamp": str(int(now)),
        "webhook-signature": " ".join(signatures),
        "content-type": "application/json",
        "user-agent": "forewarn",
    }


def outcome_of(response: httpx.Response, now: float) -> Outcome:
    """What an answer means."""
    status = response.status_code
    if 200 <= status < 300:
        return Outcome(True, status)
    if status == 410:
        return Outcome(
            False,
            status,
            "410 Gone: the webhook is disabled until the job is registered again",
            final=True,
            disable=True,
        )
    if 300 <= status < 400:
        return Outcome(False, status, f"{status}: redirects are not followed", final=True)
    return Outcome(
        False, status, f"answered {status}", _retry_after_s(response.headers.get("retry-after", ""), now)
    )


def _retry_after_s(text: str, now: float) -> float | None:
    if not text:
        return None
    try:
        seconds = float(text)
    except ValueError:
        try:
            seconds = parsedate_to_datetime(text).timestamp() - now
        except (TypeError, ValueError):
            return None
    return min(max(seconds, 0.0), RETRY_AFTER_MAX_S) if seconds == seconds else None


def insert(
    run: Connection,
    *,
    identity: str,
    protection: str,
    job: str,
    url: str,
    body: Mapping[str, Any],
    now: float,
    deadline: float,
) -> None:
    """Put a delivery into the outbox, in the transaction of its protection."""
    run.execute(
        schema.deliveries.insert().values(
            id=identity,
            protection=protection,
            job=job,
            url=url,
            state="waiting",
            attempts=0,
            created=now,
            deadline=deadline,
            next_attempt=now,
            claimed_until=0.0,
            last_error="",
            body=json.dumps(body),
            log=[],
        )
    )


class Outbox:
    """Sends what is due from a thread with an event loop of its own. `wake` after a commit that put something in."""

    def __init__(
        self,
        database: Database,
        clock: Clock,
        policy: TargetPolicy,
        *,
        on_dead: Callable[[str, str], None] = lambda protection, reason: None,
        transport: httpx.AsyncBaseTransport | None = None,
        random_ratio: Callable[[], float] = random.random,
    ) -> None:
        self._database, self._clock, self._policy = database, clock, policy
        self._on_dead, self._transport, self._random = on_dead, transport, random_ratio
        self._breakers: dict[str, Breaker] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._wake: asyncio.Event | None = None
        self._stopping = False
        self.delivered = self.failed = 0
        self._thread = threading.Thread(
            target=lambda: asyncio.run(self._main()), name="forewarn-outbox", daemon=True
        )
        self._ready: Future[None] = Future()

    def start(self) -> None:
        self._thread.start()
        self._ready.result()

    def stop(self) -> None:
        """Let attempts under way end (they are short), start no more."""
        self._stopping = True
        self.wake()
        if self._thread.ident is not None:
            self._thread.join(TIMEOUT_S + 1)

    def wake(self) -> None:
        """Something may be due. From any thread."""
        if self._loop is not None and self._wake is not None:
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._wake.set)

    async def _main(self) -> None:
        self._loop, self._wake = asyncio.get_running_loop(), asyncio.Event()
        self._ready.set_result(None)
        tasks: set[asyncio.Task[None]] = set()
        async with httpx.AsyncClient(
            timeout=TIMEOUT_S,
            follow_redirects=False,
            trust_env=False,
            transport=self._transport,
            limits=httpx.Limits(max_connections=CONCURRENCY, max_keepalive_connections=0),
        ) as client:
            while not self._stopping:
                self._wake.clear()
                wait_s = IDLE_S
                try:
                    due, wait_s = await asyncio.to_thread(self.claim, CONCURRENCY - len(tasks))
                except StorageError as error:
                    due = []
                    _log.error("outbox_unreadable", reason=str(error))
                for item in due:
                    task = asyncio.create_task(self._deliver(client, item))
                    tasks.add(task)
                    task.add_done_callback(tasks.discard)
                    task.add_done_callback(lambda _: self.wake())
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._wake.wait(), max(0.02, wait_s))
            if tasks:
                await asyncio.wait(tasks, timeout=2.0)

    def claim(self, most: int) -> tuple[list[Due], float]:
        """Take what is due, so that no other worker sends the same; and seconds until something is due again."""
        now = self._clock.now()
        table, jobs = schema.deliveries, schema.jobs.c
        open_ = sqlalchemy.and_(table.c.state == "waiting", table.c.claimed_until <= now)
        claimed: list[Due] = []
        with self._database.read() as run:
            first = run.execute(
                sqlalchemy.select(sqlalchemy.func.min(table.c.next_attempt)).where(open_)
            ).scalar()
        if first is None or first > now or most <= 0:
            return [], IDLE_S if first is None else min(IDLE_S, max(0.0, first - now))
        with self._database.write() as run:
            rows = (
                run.execute(
                    sqlalchemy.select(table, jobs.webhook_secrets)
                    .join_from(table, schema.jobs, jobs.job == table.c.job, isouter=True)
                    .where(open_, table.c.next_attempt <= now)
                    .order_by(table.c.next_attempt)
                    .limit(most)
                )
                .mappings()
                .all()
            )
            for row in rows:
                if row["deadline"] <= now:
                    self._finish(run, row["id"], "dead", row["last_error"] or "the deadline passed", now)
                    continue
                done = run.execute(
                    table.update().where(table.c.id == row["id"], open_).values(claimed_until=now + CLAIM_S)
                )
                if done.rowcount:
                    claimed.append(
                        Due(
                            row["id"],
                            row["protection"],
                            row["job"],
                            row["url"],
                            row["body"],
                            row["attempts"],
                            row["deadline"],
                            row["webhook_secrets"] or [],
                        )
                    )
        for row in rows:
            if row["deadline"] <= now:
                self._on_dead(row["protection"], row["last_error"] or "the deadline passed")
        return claimed, 0.05 if len(rows) == most else IDLE_S

    def _finish(self, run: Connection, identity: str, state: str, error: str, now: float) -> None:
        run.execute(
            schema.deliveries.update()
            .where(schema.deliveries.c.id == identity)
            .values(state=state, last_error=error, finished=now, claimed_until=0.0)
        )

    async def _deliver(self, client: httpx.AsyncClient, item: Due) -> None:
        began = self._clock.now()
        breaker = self._breakers.setdefault(item.url, Breaker())
        if breaker.closed_until > began and breaker.closed_until < item.deadline:
            outcome = Outcome(
                False,
                None,
                "the endpoint failed too often; left alone for a while",
                breaker.closed_until - began,
            )
        else:
            outcome = await self._attempt(client, item)
            self._note(breaker, outcome, began)
        try:
            await asyncio.to_thread(self.record, item, outcome, began)
        except StorageError as error:
            # The claim runs out and the attempt is made again, under the same id: the receiver knows it.
            _log.error("delivery_not_recorded", delivery=item.id, reason=str(error))

    def _note(self, breaker: Breaker, outcome: Outcome, now: float) -> None:
        if outcome.ok:
            breaker.failures, breaker.closed_until = 0, 0.0
            return
        breaker.failures += 1
        if breaker.failures >= BREAK_AFTER:
            breaker.closed_until = now + BREAK_S

    async def _attempt(self, client: httpx.AsyncClient, item: Due) -> Outcome:
        if not item.secrets:
            return Outcome(False, None, "the job is gone, and its secret with it", final=True)
        try:
            target: Target = await asyncio.to_thread(self._policy.resolve, item.url)
            headers = signed_headers(item.id, self._clock.now(), item.body, item.secrets)
            request = client.build_request(
                "POST",
                target.pinned_url,
                content=item.body.encode(),
                headers={**headers, "host": target.host_header},
                extensions={"sni_hostname": target.host},
            )
            async with asyncio.timeout(TIMEOUT_S):
                # Only the status counts; whatever the body holds is left unread.
                response = await client.send(request, stream=True)
                await response.aclose()
            return outcome_of(response, self._clock.now())
        except InputError as error:
            return Outcome(False, None, str(error), final=True)
        except ForewarnError as error:
            return Outcome(False, None, str(error))
        except TimeoutError:
            return Outcome(False, None, f"no answer within {TIMEOUT_S:g} s")
        except Exception as error:  # whatever a host on the network can cause: it is one failed attempt
            return Outcome(False, None, f"{type(error).__name__}: {error}")

    def record(self, item: Due, outcome: Outcome, began: float) -> None:
        """Write down how an attempt went, and when the next is. Raises StorageError."""
        now, table = self._clock.now(), schema.deliveries
        attempts = item.attempts + 1
        entry = {
            "time": began,
            "status": outcome.status,
            "error": outcome.error,
            "seconds": round(now - began, 3),
        }
        wait_s = next_delay_s(attempts, self._random)
        if outcome.retry_after_s is not None:
            wait_s = outcome.retry_after_s
        dead = not outcome.ok and (outcome.final or now + wait_s >= item.deadline)
        state = "delivered" if outcome.ok else "dead" if dead else "waiting"
        with self._database.write() as run:
            known = run.execute(
                sqlalchemy.select(table.c.log, table.c.state).where(table.c.id == item.id)
            ).first()
            if known is None:
                return
            # Answered in the meantime: the attempt is noted, and nothing follows from it.
            if known.state != "waiting" and not outcome.ok:
                state = known.state
            run.execute(
                table.update()
                .where(table.c.id == item.id)
                .values(
                    state=state,
                    attempts=attempts,
                    last_status=outcome.status,
                    last_error=outcome.error,
                    next_attempt=now + wait_s,
                    claimed_until=0.0,
                    finished=None if state == "waiting" else now,
                    log=[*known.log, entry][-LOG_KEPT:],
                )
            )
            if outcome.disable:
                run.execute(
                    schema.jobs.update()
                    .where(schema.jobs.c.job == item.job)
                    .values(webhook_disabled=outcome.error)
                )
        fields = {"delivery": item.id, "job": item.job, "attempt": attempts, "status": outcome.status}
        if outcome.ok:
            self.delivered += 1
            _log.info("webhook_delivered", **fields)
            return
        self.failed += 1
        _log.warning("webhook_failed", **fields, reason=outcome.error, state=state)
        if state == "dead":
            self._on_dead(item.protection, outcome.error)


def retry(run: Connection, identity: str, now: float, deadline: float) -> bool:
    """Send a dead delivery again, by hand; false when there is none of this id that is dead."""
    table = schema.deliveries
    done = run.execute(
        table.update()
        .where(table.c.id == identity, table.c.state == "dead")
        .values(state="waiting", next_attempt=now, deadline=deadline, finished=None, claimed_until=0.0)
    )
    return bool(done.rowcount)
