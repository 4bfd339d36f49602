"""Routes on jobs and what is done for them: registration, advice, protections, deliveries, alerts, silences."""

from __future__ import annotations

import base64
import secrets
from collections.abc import Mapping
from datetime import datetime
from typing import Annotated, Any

import sqlalchemy
from fastapi import APIRouter, Path, Query
from sqlalchemy.engine import RowMapping
from starlette.responses import Response

from forewarn.collectors.training import job_label
from forewarn.daemon.service import advice, outbox, progress, schema, shapes, view
from forewarn.daemon.service.access import Operator, Reader, ServiceOf, audit
from forewarn.daemon.service.api_fleet import Cursor, Filter, Limit, json_response
from forewarn.daemon.service.problems import Problem
from forewarn.daemon.service.protections import JobBook
from forewarn.daemon.service.service import Service
from forewarn.daemon.service.times import iso

router = APIRouter()

JobName = Annotated[str, Path(min_length=1, max_length=255)]
NOT_FOUND: dict[int | str, dict[str, Any]] = {404: {"model": shapes.ProblemDocument}}
SECRET_BYTES = 32
TIMES = frozenset(
    {
        "created",
        "updated",
        "last_checkpoint",
        "deadline",
        "acknowledged",
        "closed",
        "escalated",
        "finished",
        "next_attempt",
        "resolved",
        "starts",
        "ends",
    }
)


def shown(row: Mapping[Any, Any], hidden: frozenset[str] = frozenset()) -> dict[str, Any]:
    """A database row as the API shows it."""
    return {k: iso(v) if k in TIMES else v for k, v in row.items() if k not in hidden}


def _job_row(row: Mapping[Any, Any], service: Service) -> dict[str, Any]:
    state = service.engine.view.jobs.get(job_label(row["job"]))
    return {**shown(row, frozenset({"webhook_secrets"})), "progress": progress.shown(state)}


def _delivery_row(row: Mapping[Any, Any]) -> dict[str, Any]:
    out = shown(row, frozenset({"body", "claimed_until"}))
    out["log"] = [{**a, "time": iso(a["time"])} for a in row["log"]]
    if row["state"] != "waiting":
        out["next_attempt"] = None
    return out


def _page(
    service: Service,
    table: sqlalchemy.Table,
    where: list[sqlalchemy.ColumnElement[bool]],
    limit: int,
    cursor: str | None,
) -> tuple[list[RowMapping], str | None]:
    """Rows of a table, newest first; those made in the same moment by falling id."""
    key = table.c.get("created")
    if key is None:
        key = table.c.starts
    if cursor:
        time, identity = view.read_cursor(cursor, float, int if table.c.id.type.python_type is int else str)
        where = [*where, sqlalchemy.or_(key < time, sqlalchemy.and_(key == time, table.c.id < identity))]
    with service.database.read() as run:
        rows = list(
            run.execute(
                sqlalchemy.select(table)
                .where(*where)
                .order_by(key.desc(), table.c.id.desc())
                .limit(limit + 1)
            ).mappings()
        )
    page = rows[:limit]
    following = view.write_cursor(page[-1][key.name], page[-1]["id"]) if len(rows) > limit else None
    return page, following


def _existing(service: Service, table: sqlalchemy.Table, column: str, identity: Any, what: str) -> RowMapping:
    with service.database.read() as run:
        row = run.execute(sqlalchemy.select(table).where(table.c[column] == identity)).mappings().first()
    if row is None:
        raise Problem(404, f"{what} {identity!r} does not exist")
    return row


@router.put(
    "/v1/jobs/{job}", response_model=shapes.JobRow, tags=["jobs"], summary="Register a job, or change it"
)
def put_job(job: JobName, body: shapes.JobBody, service: ServiceOf, who: Operator) -> Response:
    if "/" in job or not job.isprintable():
        raise Problem(422, "job: must be printable and without a slash", field="job")
    if not body.nodes and not body.devices:
        raise Problem(422, "nodes: name the nodes or the devices of the job", field="nodes")
    now, table = service.clock.now(), schema.jobs
    last = body.last_checkpoint.timestamp() if body.last_checkpoint else None
    if last is not None and last > now + 300:
        raise Problem(422, "last_checkpoint: lies in the future", field="last_checkpoint")
    if body.webhook:
        service.policy.check(body.webhook.url)
    with service.database.write() as run:
        before = run.execute(sqlalchemy.select(table).where(table.c.job == job)).mappings().first()
        signing, made = _secrets_of(body.webhook, before)
        values: dict[str, Any] = {
            "nodes": sorted(set(body.nodes)),
            "devices": sorted(set(body.devices)),
            "webhook_url": body.webhook.url if body.webhook else "",
            "webhook_secrets": signing,
            "webhook_disabled": "",
            "checkpoint_seconds": body.checkpoint_seconds,
            "restart_seconds": body.restart_seconds,
            "swap_seconds": body.swap_seconds,
            "checkpoint_interval_seconds": body.checkpoint_interval_seconds,
            "gpus": body.gpus,
            "dry_run": body.dry_run,
            "updated": now,
        }
        if before is None:
            run.execute(table.insert().values(job=job, created=now, last_checkpoint=last, **values))
        else:
            known = before["last_checkpoint"]
            values["last_checkpoint"] = known if last is None else max(last, known or 0.0)
            run.execute(table.update().where(table.c.job == job).values(**values))
        audit(run, service, who, "job", job, nodes=len(body.nodes), devices=len(body.devices))
        row = run.execute(sqlalchemy.select(table).where(table.c.job == job)).mappings().one()
    service.reactor.jobs_changed()
    return json_response({**_job_row(row, service), "webhook_secret": made})


def _secrets_of(
    webhook: shapes.WebhookBody | None, before: RowMapping | None
) -> tuple[list[str], str | None]:
    """The secrets to sign with, and one that was made just now (to be told once)."""
    if webhook is None:
        return [], None
    if webhook.secret:
        try:
            base64.b64decode(webhook.secret.removeprefix("whsec_"), validate=True)
        except ValueError:
            raise Problem(422, "webhook.secret: must be whsec_ and base64", field="webhook.secret") from None
        return [webhook.secret, *([webhook.old_secret] if webhook.old_secret else [])], None
    if before is not None and before["webhook_secrets"]:
        return list(before["webhook_secrets"]), None
    made = "whsec_" + base64.b64encode(secrets.token_bytes(SECRET_BYTES)).decode()
    return [made], made


@router.get("/v1/jobs", response_model=shapes.JobPage, tags=["jobs"], summary="Jobs by name")
def list_jobs(service: ServiceOf, _who: Reader, limit: Limit = 100, cursor: Cursor = None) -> Response:
    after = str(view.read_cursor(cursor, str)[0]) if cursor else ""
    table = schema.jobs
    with service.database.read() as run:
        rows = (
            run.execute(
                sqlalchemy.select(table).where(table.c.job > after).order_by(table.c.job).limit(limit + 1)
            )
            .mappings()
            .all()
        )
    following = view.write_cursor(rows[limit - 1]["job"]) if len(rows) > limit else None
    return json_response({"items": [_job_row(r, service) for r in rows[:limit]], "next": following})


@router.get(
    "/v1/jobs/{job}", response_model=shapes.JobRow, tags=["jobs"], summary="One job", responses=NOT_FOUND
)
def show_job(job: JobName, service: ServiceOf, _who: Reader) -> Response:
    return json_response(_job_row(_existing(service, schema.jobs, "job", job, "job"), service))


@router.get(
    "/v1/progress",
    response_model=shapes.ProgressPage,
    tags=["jobs"],
    summary="Progress of all jobs that report their steps, registered or not, by name",
)
def list_progress(
    service: ServiceOf, _who: Reader, job: Filter = "", limit: Limit = 100, cursor: Cursor = None
) -> Response:
    after = str(view.read_cursor(cursor, str)[0]) if cursor else ""
    states = service.engine.view.jobs
    names = sorted(n for n in states if n > after and job in ("", n))
    with service.database.read() as run:
        registered = {job_label(name) for name in run.execute(sqlalchemy.select(schema.jobs.c.job)).scalars()}
    page = names[:limit]
    items = [{"job": n, "registered": n in registered, **(progress.shown(states[n]) or {})} for n in page]
    following = view.write_cursor(page[-1]) if len(names) > limit else None
    return json_response({"items": items, "next": following})


@router.delete("/v1/jobs/{job}", status_code=204, tags=["jobs"], summary="Forget a job", responses=NOT_FOUND)
def delete_job(job: JobName, service: ServiceOf, who: Operator) -> Response:
    now = service.clock.now()
    with service.database.write() as run:
        done = run.execute(schema.jobs.delete().where(schema.jobs.c.job == job))
        if not done.rowcount:
            raise Problem(404, f"job {job!r} does not exist")
        table = schema.protections
        run.execute(
            table.update()
            .where(table.c.job == job, table.c.state.in_(schema.OPEN_STATES))
            .values(state="declined", closed=now, answer="the job was removed")
        )
        run.execute(
            schema.deliveries.update()
            .where(schema.deliveries.c.job == job, schema.deliveries.c.state == "waiting")
            .values(state="answered", finished=now)
        )
        audit(run, service, who, "job_removed", job)
    service.reactor.jobs_changed()
    return Response(status_code=204)


@router.get(
    "/v1/jobs/{job}/advice",
    response_model=shapes.Advice,
    tags=["jobs"],
    responses=NOT_FOUND,
    summary="How often to checkpoint, and why",
)
def show_advice(job: JobName, service: ServiceOf, _who: Reader) -> Response:
    with service.database.read() as run:
        book = JobBook.read(run)
        row = book.rows.get(job)
        if row is None:
            raise Problem(404, f"job {job!r} does not exist")
        quality = advice.quality_of(run, service.models.get("gpu"), service.clock.now())
    shown_view = service.engine.view
    return json_response(advice.advise(row, book.devices(job, shown_view), shown_view, quality))


@router.get(
    "/v1/protections",
    response_model=shapes.ProtectionPage,
    tags=["protections"],
    summary="Protections, the newest first",
)
def list_protections(
    service: ServiceOf,
    _who: Reader,
    job: Filter = "",
    state: Filter = "",
    limit: Limit = 100,
    cursor: Cursor = None,
) -> Response:
    table = schema.protections
    where = [c == v for c, v in ((table.c.job, job), (table.c.state, state)) if v]
    rows, following = _page(service, table, where, limit, cursor)
    return json_response({"items": [_protection_row(r) for r in rows], "next": following})


def _protection_row(row: Mapping[Any, Any]) -> dict[str, Any]:
    return shown(row, frozenset({"triggers", "dry_run"}))


@router.get(
    "/v1/protections/{id}",
    response_model=shapes.ProtectionRow,
    tags=["protections"],
    responses=NOT_FOUND,
    summary="One protection",
)
def show_protection(id: str, service: ServiceOf, _who: Reader) -> Response:
    return json_response(_protection_row(_existing(service, schema.protections, "id", id, "protection")))


@router.post(
    "/v1/protections/{id}/ack",
    response_model=shapes.ProtectionRow,
    tags=["protections"],
    responses={**NOT_FOUND, 409: {"model": shapes.ProblemDocument}},
    summary="A controller's answer",
)
def acknowledge(id: str, body: shapes.AckBody, service: ServiceOf, who: Operator) -> Response:
    with service.database.write() as run:
        row = service.protections.acknowledge(run, id, body.model_dump())
        audit(run, service, who, "protection", id, state=body.state)
    service.reactor.jobs_changed()
    service.broadcast.send("protection", {"id": id, "state": row["state"]})
    return json_response(_protection_row(row))


@router.get(
    "/v1/deliveries",
    response_model=shapes.DeliveryPage,
    tags=["deliveries"],
    summary="Webhook deliveries with every attempt, the newest first",
)
def list_deliveries(
    service: ServiceOf,
    _who: Reader,
    job: Filter = "",
    protection: Filter = "",
    state: Filter = "",
    limit: Limit = 100,
    cursor: Cursor = None,
) -> Response:
    table = schema.deliveries
    wanted = ((table.c.job, job), (table.c.protection, protection), (table.c.state, state))
    rows, following = _page(service, table, [c == v for c, v in wanted if v], limit, cursor)
    return json_response({"items": [_delivery_row(r) for r in rows], "next": following})


@router.post(
    "/v1/deliveries/{id}/retry",
    response_model=shapes.DeliveryRow,
    tags=["deliveries"],
    responses={**NOT_FOUND, 409: {"model": shapes.ProblemDocument}},
    summary="Send a dead delivery again",
)
def retry_delivery(id: str, service: ServiceOf, who: Operator) -> Response:
    now = service.clock.now()
    _existing(service, schema.deliveries, "id", id, "delivery")
    with service.database.write() as run:
        deadline = now + service.settings.checkpoint_request_timeout_s
        if not outbox.retry(run, id, now, deadline):
            raise Problem(409, f"delivery {id} is not dead: only those can be sent again")
        audit(run, service, who, "delivery_retry", id)
    service.outbox.wake()
    return json_response(_delivery_row(_existing(service, schema.deliveries, "id", id, "delivery")))


@router.get(
    "/v1/alerts", response_model=shapes.AlertPage, tags=["alerts"], summary="Alerts, the newest first"
)
def list_alerts(
    service: ServiceOf,
    _who: Reader,
    state: Annotated[str, Query(pattern="^(open|resolved|all)$")] = "open",
    node: Filter = "",
    device: Filter = "",
    job: Filter = "",
    limit: Limit = 100,
    cursor: Cursor = None,
) -> Response:
    table = schema.alerts
    where: list[sqlalchemy.ColumnElement[bool]] = [
        c == v for c, v in ((table.c.node, node), (table.c.device, device), (table.c.job, job)) if v
    ]
    if state != "all":
        where.append(table.c.resolved.is_(None) if state == "open" else table.c.resolved.is_not(None))
    rows, following = _page(service, table, where, limit, cursor)
    return json_response({"items": [shown(r) for r in rows], "next": following})


@router.post(
    "/v1/alerts/{id}/acknowledge",
    response_model=shapes.AlertRow,
    tags=["alerts"],
    responses=NOT_FOUND,
    summary="Somebody is on it",
)
def acknowledge_alert(
    id: Annotated[int, Path(ge=1, le=2**62)], service: ServiceOf, who: Operator
) -> Response:
    _existing(service, schema.alerts, "id", id, "alert")
    table = schema.alerts
    with service.database.write() as run:
        run.execute(
            table.update()
            .where(table.c.id == id, table.c.acknowledged.is_(None))
            .values(acknowledged=service.clock.now(), acknowledged_by=who.id)
        )
        audit(run, service, who, "alert", str(id))
    return json_response(shown(_existing(service, table, "id", id, "alert")))


@router.get(
    "/v1/silences", response_model=shapes.SilencePage, tags=["silences"], summary="Silences, the newest first"
)
def list_silences(service: ServiceOf, _who: Reader, limit: Limit = 100, cursor: Cursor = None) -> Response:
    rows, following = _page(service, schema.silences, [], limit, cursor)
    return json_response({"items": [shown(r) for r in rows], "next": following})


@router.post(
    "/v1/silences",
    response_model=shapes.SilenceRow,
    status_code=201,
    tags=["silences"],
    summary="Silence a node, a device or a job for a while",
)
def add_silence(body: shapes.SilenceBody, service: ServiceOf, who: Operator) -> Response:
    now = service.clock.now()
    if not (body.node or body.device or body.job):
        raise Problem(422, "node: name a node, a device or a job", field="node")
    starts = _seconds(body.starts) or now
    ends = _seconds(body.ends) or (starts + body.hours * 3600 if body.hours else None)
    if ends is None or ends <= starts:
        raise Problem(422, "ends: give an end after the start, or hours", field="ends")
    values = {
        "node": body.node,
        "device": body.device,
        "job": body.job,
        "starts": starts,
        "ends": ends,
        "reason": body.reason,
        "created_by": who.id,
    }
    with service.database.write() as run:
        identity = run.execute(schema.silences.insert().values(**values)).inserted_primary_key
        assert identity is not None
        audit(run, service, who, "silence", body.node or body.device or body.job, until=iso(ends))
    row = shown({"id": identity[0], **values})
    answer = json_response(row)
    answer.status_code = 201
    return answer


@router.delete(
    "/v1/silences/{id}", status_code=204, tags=["silences"], responses=NOT_FOUND, summary="End a silence"
)
def end_silence(id: Annotated[int, Path(ge=1, le=2**62)], service: ServiceOf, who: Operator) -> Response:
    now, table = service.clock.now(), schema.silences
    _existing(service, table, "id", id, "silence")
    with service.database.write() as run:
        run.execute(table.update().where(table.c.id == id, table.c.ends > now).values(ends=now))
        audit(run, service, who, "silence_ended", str(id))
    return Response(status_code=204)


def _seconds(time: datetime | None) -> float | None:
    return None if time is None else time.timestamp()
