"""Protections in the database: made with their webhook in one transaction, acknowledged once, escalated when late."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import sqlalchemy
import structlog
from numpy.typing import NDArray
from sqlalchemy.engine import Connection, RowMapping

from forewarn.collectors.clock import Clock
from forewarn.daemon.service import alerts, outbox, schema
from forewarn.daemon.service.database import Database
from forewarn.daemon.service.problems import Problem
from forewarn.daemon.service.protection import MIN_EXCESS, DeviceRisk, JobCosts, cool_down_s, decide
from forewarn.daemon.service.silences import Silences
from forewarn.daemon.service.times import iso
from forewarn.daemon.service.view import View, node_of, raised
from forewarn.models.rules import RuleHit

FATAL_REMEMBERED_S = 86400.0
"""A fatal event that a job was protected from asks for nothing more for this long."""
FINAL_STATES = ("completed", "declined", "failed")
ACK_STATES = ("accepted", *FINAL_STATES)
REASONS_SENT = 5
EVENT_TYPE = "io.forewarn.protection.requested"

_log = structlog.get_logger("forewarn.service")


@dataclass(frozen=True)
class Limits:
    """Settings of protection, in seconds. `dry_run`: decide and record, send nothing."""

    request_timeout_s: float = 120.0
    cool_down_s: float = 900.0
    open_at_once: int = 64
    """Protections open at once in all: more would be a storm of checkpoints on the same storage. Fatal ones pass."""
    dry_run: bool = False


@dataclass
class JobBook:
    """The jobs in memory, and which of them a node or a device touches."""

    rows: dict[str, RowMapping] = field(default_factory=dict)
    by_node: dict[str, set[str]] = field(default_factory=dict)
    by_device: dict[str, set[str]] = field(default_factory=dict)

    @classmethod
    def read(cls, run: Connection) -> JobBook:
        book = cls()
        for row in run.execute(sqlalchemy.select(schema.jobs)).mappings():
            book.rows[row["job"]] = row
            for node in row["nodes"]:
                book.by_node.setdefault(node, set()).add(row["job"])
            for device in row["devices"]:
                book.by_device.setdefault(device, set()).add(row["job"])
        return book

    def touched(self, device: str) -> set[str]:
        """Jobs that run on a device, on all its node, or (for the node itself) on any of its devices."""
        found = self.by_node.get(node_of(device), set()) | self.by_device.get(device, set())
        if "/" not in device:
            found = found.union(*(j for d, j in self.by_device.items() if node_of(d) == device))
        return found

    def view_rows(self, job: str, view: View) -> NDArray[np.int64]:
        """Rows of a job's devices in a view, rising; the nodes of single devices count as well."""
        row = self.rows[job]
        parts = [view.rows_of_node[n] for n in row["nodes"] if n in view.rows_of_node]
        single = {view.row_of[d] for d in row["devices"] if d in view.row_of}
        single |= {view.row_of[n] for d in row["devices"] if (n := node_of(d)) in view.row_of}
        return np.unique(np.concatenate([np.empty(0, np.int64), *parts, np.array(sorted(single), np.int64)]))

    def devices(self, job: str, view: View) -> list[str]:
        """Devices of a job that the view knows."""
        return sorted(view.devices[int(r)] for r in self.view_rows(job, view))


@dataclass(frozen=True)
class Usual:
    """What is usual: the median risk of each kind by horizon."""

    of_kind: Mapping[str, Mapping[int, float]]

    @classmethod
    def of(cls, view: View) -> Usual:
        return cls(
            {
                k.kind: {h: float(m) for h, m in zip(k.horizons_s, np.median(k.risk, axis=0), strict=True)}
                for k in view.kinds
            }
        )

    def base(self, view: View, device: str) -> Mapping[int, float]:
        row = view.row_of.get(device)
        return {} if row is None else self.of_kind.get(view.kind_of_row(row).kind, {})


class Protections:
    """Decides for every job that is touched and writes what follows. Called by one thread; acks come from others."""

    def __init__(self, clock: Clock, limits: Limits, ack_url: str = "") -> None:
        self._clock, self._limits, self._ack_url = clock, limits, ack_url

    def on_hits(
        self, run: Connection, book: JobBook, view: View, hits: Sequence[RuleHit], silences: Silences
    ) -> list[str]:
        """Act on fatal events at once; returns the ids of the protections made."""
        made = []
        fatal = [h for h in hits if h.fatal]
        for job in sorted({j for h in fatal for j in book.touched(h.device)}):
            mine = [h for h in fatal if job in book.touched(h.device)]
            made += self._consider(run, book, view, job, mine, silences, Usual.of(view))
        return made

    def on_view(self, run: Connection, book: JobBook, view: View, silences: Silences) -> list[str]:
        """Weigh every job at the end of a cycle; returns the ids of the protections made."""
        usual = Usual.of(view)
        made = []
        for job in sorted(book.rows):
            rows = book.view_rows(job, view)
            if not len(rows) or view.worst[rows].max() < MIN_EXCESS:
                continue  # most jobs, most of the time: no question to the database
            made += self._consider(run, book, view, job, [], silences, usual)
        return made

    def _consider(
        self,
        run: Connection,
        book: JobBook,
        view: View,
        job: str,
        hits: Sequence[RuleHit],
        silences: Silences,
        usual: Usual,
    ) -> list[str]:
        now, row = self._clock.now(), book.rows[job]
        if silences.job(job, now):
            return []
        past = _recent(run, job, now)
        if any(p["state"] in schema.OPEN_STATES for p in past):
            return []
        known = {t for p in past for t in p["triggers"]}
        news = [h for h in hits if _trigger(h) not in known]
        if hits and not news:
            return []
        settled = {t.split("@", 1)[1].rsplit("@", 1)[0] for t in known if t.count("@") == 2}
        risks = self._risks(book, view, job, news, settled, silences, usual, now)
        total = len(book.view_rows(job, view))
        decision = decide(_costs(row, now), risks, total=total)
        if not decision.action:
            return []
        if not news and self._too_soon(past, decision.devices, row, decision.chance, now):
            return []
        if not news and _open_count(run) >= self._limits.open_at_once:
            _log.warning("protection_held_back", job=job, reason="too many jobs are saving at once")
            return []
        triggers = [_trigger(h) for h in news] or [f"risk@{d}" for d in decision.devices[:16]]
        view = raised(view, {h.device: (h.floors, h.text) for h in news})
        reasons = _reasons(view, news, decision.devices)
        if decision.common_cause:
            reasons.insert(0, f"{len(decision.devices)} of {total} devices rise together: one common cause")
        return self._make(
            run,
            row,
            view,
            decision.action,
            decision.devices,
            decision.chance,
            triggers,
            [*reasons[:REASONS_SENT], decision.why],
            now,
        )

    def _risks(
        self,
        book: JobBook,
        view: View,
        job: str,
        news: Sequence[RuleHit],
        settled: set[str],
        silences: Silences,
        usual: Usual,
        now: float,
    ) -> list[DeviceRisk]:
        fatal = {h.device: h for h in news}
        rows = book.view_rows(job, view)
        # What is below this at every horizon cannot count; most of a large job is.
        standing = rows[view.worst[rows] >= MIN_EXCESS]
        names = dict.fromkeys([*(view.devices[int(r)] for r in standing), *fatal])
        return [
            DeviceRisk(d, view.risks(d), usual.base(view, d), fatal=d in fatal)
            for d in names
            if d in fatal or (d not in settled and not silences.device(d, now))
        ]

    def _too_soon(
        self, past: Sequence[RowMapping], devices: Sequence[str], job: RowMapping, chance: float, now: float
    ) -> bool:
        if not past:
            return False
        since_s = now - past[0]["created"]
        if since_s < cool_down_s(_save_s(job), chance):
            return True
        new = set(devices) - {t.partition("@")[2] for t in past[0]["triggers"]}
        return not new and since_s < self._limits.cool_down_s

    def _make(
        self,
        run: Connection,
        job: RowMapping,
        view: View,
        action: str,
        devices: Sequence[str],
        chance: float,
        triggers: list[str],
        reasons: list[str],
        now: float,
    ) -> list[str]:
        identity = f"prot_{int(now * 1000):012x}{secrets.token_hex(5)}"
        worst = devices[0]
        dry_run = self._limits.dry_run or bool(job["dry_run"])
        deadline = now + self._limits.request_timeout_s + 2 * _save_s(job)
        nodes = sorted({node_of(d) for d in devices})
        values = {
            "id": identity,
            "job": job["job"],
            "state": "dry_run" if dry_run else "open",
            "action": action,
            "device": worst,
            "devices": list(devices[:64]),
            "nodes": nodes[:64],
            "risk": {str(h): round(p, 6) for h, p in view.risks(worst).items()},
            "chance": chance,
            "reasons": [r for r in reasons if r],
            "triggers": triggers,
            "simulated": view.simulated(worst),
            "dry_run": dry_run,
            "created": now,
            "deadline": deadline,
            "closed": now if dry_run else None,
            "answer": "",
        }
        from sqlalchemy.dialects import postgresql, sqlite

        dialect = sqlite if run.dialect.name == "sqlite" else postgresql
        done = run.execute(dialect.insert(schema.protections).values(**values).on_conflict_do_nothing())
        if not done.rowcount:
            return []
        _log.info(
            "protection",
            id=identity,
            job=job["job"],
            action=action,
            device=worst,
            chance=round(chance, 4),
            dry_run=dry_run,
        )
        if job["webhook_url"] and not job["webhook_disabled"] and not dry_run:
            outbox.insert(
                run,
                identity=f"msg_{identity.removeprefix('prot_')}",
                protection=identity,
                job=job["job"],
                url=job["webhook_url"],
                body=message(values, self._ack_url),
                now=now,
                deadline=deadline,
            )
        return [identity]

    def acknowledge(self, run: Connection, identity: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Take a controller's answer. The same answer twice is the same as once. Raises Problem."""
        now, table = self._clock.now(), schema.protections
        row = run.execute(sqlalchemy.select(table).where(table.c.id == identity)).mappings().first()
        if row is None:
            raise Problem(404, f"protection {identity!r} does not exist")
        state, was = str(body["state"]), row["state"]
        if was == "dry_run":
            raise Problem(409, f"protection {identity} was a dry run: nothing was asked")
        if was == state or (was in FINAL_STATES and state == "accepted"):
            return dict(row)
        if was in FINAL_STATES:
            raise Problem(409, f"protection {identity} is {was} already", field="state")
        values: dict[str, Any] = {"state": state, "acknowledged": row["acknowledged"] or now}
        if state == "accepted":
            if was == "escalated":
                return dict(row)
            save_s = (
                run.execute(
                    sqlalchemy.select(schema.jobs.c.checkpoint_seconds).where(schema.jobs.c.job == row["job"])
                ).scalar()
                or 0.0
            )
            values["deadline"] = max(row["deadline"], now + self._limits.request_timeout_s + 2 * save_s)
        else:
            values |= {
                "closed": now,
                "checkpoint": body.get("checkpoint"),
                "step": body.get("step"),
                "save_seconds": body.get("duration_seconds"),
                "answer": body.get("reason") or "",
            }
            # Nobody needs to be told any more, whatever became of the webhook.
            run.execute(
                schema.deliveries.update()
                .where(schema.deliveries.c.protection == identity, schema.deliveries.c.state == "waiting")
                .values(state="answered", finished=now)
            )
            alerts.resolve(run, f"protection:{identity}", now)
        if state == "completed":
            _learn(run, row["job"], now, body.get("duration_seconds"))
        run.execute(table.update().where(table.c.id == identity).values(**values))
        if state in ("declined", "failed"):
            alerts.raise_(
                run,
                f"protection:{identity}",
                "warning",
                now,
                job=row["job"],
                device=row["device"],
                title=f"job {row['job']} did not save: {state}",
                reason=body.get("reason") or "no reason given",
                simulated=row["simulated"],
            )
        _log.info("acknowledged", id=identity, job=row["job"], state=state)
        return dict(run.execute(sqlalchemy.select(table).where(table.c.id == identity)).mappings().one())

    def escalate_late(self, run: Connection) -> list[str]:
        """Turn open ones whose deadline has passed into alerts; returns their ids."""
        now, table = self._clock.now(), schema.protections
        late = (
            run.execute(
                sqlalchemy.select(table).where(table.c.state.in_(schema.OPEN_STATES), table.c.deadline <= now)
            )
            .mappings()
            .all()
        )
        for row in late:
            run.execute(
                table.update()
                .where(table.c.id == row["id"])
                .values(state="escalated", escalated=now, closed=now)
            )
            what = "never answered" if row["acknowledged"] is None else "accepted, but has not saved"
            alerts.raise_(
                run,
                f"protection:{row['id']}",
                "critical",
                now,
                job=row["job"],
                device=row["device"],
                title=f"job {row['job']} {what}",
                reason=f"asked to {row['action'].replace('_', ' ')} {now - row['created']:.0f} s ago "
                f"because of {row['device']}; "
                "look at the controller, and save by hand",
                simulated=row["simulated"],
            )
            _log.error("protection_escalated", id=row["id"], job=row["job"], reason=what)
        return [row["id"] for row in late]


def escalate_undelivered(database: Database, clock: Clock, protection: str, reason: str) -> None:
    """The webhook could not be delivered: people should know before the deadline does it."""
    now, table = clock.now(), schema.protections
    with database.write() as run:
        row = run.execute(sqlalchemy.select(table).where(table.c.id == protection)).mappings().first()
        if row is not None and row["state"] == "open":
            alerts.raise_(
                run,
                f"protection:{protection}",
                "critical",
                now,
                job=row["job"],
                device=row["device"],
                title=f"job {row['job']} cannot be told to save",
                reason=f"the webhook failed: {reason}",
                simulated=row["simulated"],
            )


def message(values: Mapping[str, Any], ack_url: str) -> dict[str, Any]:
    """The webhook's body: a CloudEvents envelope; all that is asked stands in `data`."""
    identity = values["id"]
    return {
        "specversion": "1.0",
        "id": identity,
        "source": "forewarn",
        "type": EVENT_TYPE,
        "subject": values["job"],
        "time": iso(values["created"]),
        "datacontenttype": "application/json",
        "data": {
            "protection": identity,
            "job": values["job"],
            "action": values["action"],
            "device": values["device"],
            "devices": values["devices"],
            "nodes": values["nodes"],
            "risk": values["risk"],
            "chance": round(values["chance"], 6),
            "deadline": iso(values["deadline"]),
            "reasons": values["reasons"],
            "simulated": values["simulated"],
            "idempotency_key": identity,
            "ack_url": f"{ack_url}/v1/protections/{identity}/ack",
        },
    }


def _save_s(job: RowMapping) -> float:
    """What a save costs: as measured, once it has been."""
    return float(job["measured_checkpoint_seconds"] or job["checkpoint_seconds"])


def _costs(job: RowMapping, now: float) -> JobCosts:
    last = job["last_checkpoint"] if job["last_checkpoint"] is not None else job["created"]
    return JobCosts(
        age_s=max(0.0, now - last),
        save_s=_save_s(job),
        recovery_s=job["restart_seconds"],
        swap_s=job["swap_seconds"],
        gpus=job["gpus"] or 1,
    )


def _learn(run: Connection, job: str, now: float, seconds: float | None) -> None:
    """A completed save sets the age of the last checkpoint to zero, and tells what a save really takes."""
    table = schema.jobs
    row = run.execute(sqlalchemy.select(table).where(table.c.job == job)).mappings().first()
    if row is None:
        return
    values: dict[str, Any] = {"last_checkpoint": max(now, row["last_checkpoint"] or 0.0), "updated": now}
    if seconds is not None and seconds > 0:
        before = row["measured_checkpoint_seconds"]
        values["measured_checkpoint_seconds"] = seconds if before is None else 0.7 * before + 0.3 * seconds
    run.execute(table.update().where(table.c.job == job).values(**values))


def _recent(run: Connection, job: str, now: float) -> Sequence[RowMapping]:
    table = schema.protections.c
    return (
        run.execute(
            sqlalchemy.select(table.state, table.created, table.triggers)
            .where(table.job == job, table.created > now - FATAL_REMEMBERED_S)
            .order_by(table.created.desc())
        )
        .mappings()
        .all()
    )


def _open_count(run: Connection) -> int:
    table = schema.protections.c
    return int(
        run.execute(
            sqlalchemy.select(sqlalchemy.func.count()).where(table.state.in_(schema.OPEN_STATES))
        ).scalar_one()
    )


def _trigger(hit: RuleHit) -> str:
    return f"{hit.rule}@{hit.device}@{hit.time:.0f}"


def _reasons(view: View, hits: Sequence[RuleHit], devices: Sequence[str]) -> list[str]:
    texts = [f"{h.device}: {h.text}" for h in hits]
    for device in devices[:3]:
        texts += [f"{device}: {text}" for text in view.reasons.get(device, ())[:3]]
    return list(dict.fromkeys(texts))
