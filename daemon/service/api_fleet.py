"""Routes on what the fleet is like: risk, nodes, events, failures, models, live messages."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Mapping
from typing import Annotated, Any

import msgspec
import sqlalchemy
from fastapi import APIRouter, Query, Request
from sqlalchemy.engine import RowMapping
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response, StreamingResponse

from forewarn.collectors.errors import StorageError
from forewarn.daemon.service import journal, schema, shapes, view
from forewarn.daemon.service.access import Operator, Reader, ServiceOf, audit
from forewarn.daemon.service.problems import Problem
from forewarn.daemon.service.protections import JobBook
from forewarn.daemon.service.readings import Clear, Failure
from forewarn.daemon.service.service import Service
from forewarn.daemon.service.times import iso
from forewarn.models import registry
from forewarn.models.fleet import Fleet

router = APIRouter()

Limit = Annotated[int, Query(ge=1, le=1000, description="rows a page")]
Cursor = Annotated[str | None, Query(max_length=2048, description="`next` of the page before")]
Filter = Annotated[str, Query(max_length=512)]

ENGINE_TIMEOUT_S = 10.0
STREAM_IDLE_S = 15.0
SERIES = {
    "gpu": (
        "gpu_ecc_dram_corrected_total",
        "gpu_ecc_dram_uncorrected_total",
        "gpu_row_remap_uncorrected_total",
        "gpu_temperature_celsius",
        "gpu_memory_temperature_celsius",
        "gpu_power_watts",
        "gpu_pcie_replay_total",
    ),
    "disk": (
        "disk_reallocated_sectors",
        "disk_pending_sectors",
        "disk_reported_uncorrectable",
        "disk_temperature_celsius",
        "disk_nvme_media_errors_total",
        "disk_nvme_available_spare_ratio",
    ),
}
"""Metrics whose course a device's page shows, by kind."""


def json_response(content: Any, headers: Mapping[str, str] | None = None) -> Response:
    """A JSON answer; numbers that are no numbers become null."""
    return Response(msgspec.json.encode(content), media_type="application/json", headers=dict(headers or {}))


def event_row(row: RowMapping) -> dict[str, Any]:
    names = ("id", "node", "device", "kind", "code", "severity", "action", "message", "pci", "count")
    return {**{n: row[n] for n in names}, "time": iso(row["time"])}


@router.get("/v1/risk", response_model=shapes.RiskPage, tags=["risk"], summary="Devices by falling risk")
def list_risk(
    service: ServiceOf,
    _who: Reader,
    request: Request,
    node: Filter = "",
    device: Filter = "",
    kind: Filter = "",
    job: Filter = "",
    min_risk: Annotated[float, Query(ge=0, le=1)] = 0.0,
    horizon: Annotated[
        int | None, Query(ge=1, le=10**9, description="judge and sort by this horizon, in seconds")
    ] = None,
    limit: Limit = 100,
    cursor: Cursor = None,
) -> Response:
    shown = service.engine.view
    etag = f'W/"{shown.number}"'
    if request.headers.get("if-none-match") == etag and not job:
        return Response(status_code=304, headers={"ETag": etag})
    after = None
    if cursor:
        risk, name = view.read_cursor(cursor, float, str)
        after = float(risk), str(name)
    devices = None
    if job:
        with service.database.read() as run:
            book = JobBook.read(run)
        if job not in book.rows:
            raise Problem(404, f"job {job!r} is not registered", field="job")
        devices = frozenset(book.devices(job, shown))
    query = view.Query(node, device, kind, devices, min_risk, horizon, limit, after)
    rows, following = view.select(shown, query)
    return json_response(
        {
            "items": [shown.row(r) for r in rows],
            "next": None if following is None else view.write_cursor(*following),
            "time": iso(shown.time) if shown.number else None,
        },
        {"ETag": etag},
    )


@router.get(
    "/v1/risk/{device:path}",
    response_model=shapes.RiskDetail,
    tags=["risk"],
    summary="One device: why, since when, and what was read",
    responses={404: {"model": shapes.ProblemDocument}},
)
async def show_risk(
    device: str,
    service: ServiceOf,
    _who: Reader,
    horizon: Annotated[int | None, Query(ge=1, le=10**9)] = None,
) -> Response:
    shown = service.engine.view
    row = shown.row_of.get(device)
    if row is None:
        raise Problem(404, f"device {device!r} is not known (ids look like NODE/gpu0)", field="device")
    kind = shown.kind_of_row(row)
    wanted = horizon if horizon in kind.horizons_s else kind.horizons_s[min(1, len(kind.horizons_s) - 1)]
    fleet = service.engine.fleet
    # Rules act between cycles, so their reasons are those of now, not of the last cycle.
    now = max(shown.time, service.clock.now())
    future = service.engine.call(lambda: _inspect(fleet, device, kind.kind, now, wanted))
    try:
        found = await asyncio.wait_for(asyncio.wrap_future(future), ENGINE_TIMEOUT_S)
    except TimeoutError:
        raise Problem(503, "the service is busy scoring; try again", headers={"Retry-After": "2"}) from None
    events = await run_in_threadpool(_events_of, service, schema.events.c.device == device, 50)
    points = [(p.time, p.risks(device)) for p in service.engine.history]
    history = [
        {"time": iso(t), "risk": {str(h): p for h, p in risks.items()}} for t, risks in points if risks
    ]
    return json_response({**shown.row(row), **found, "events": events, "history": history})


def _inspect(fleet: Fleet, device: str, kind: str, now: float, horizon_s: int) -> dict[str, Any]:
    """What only the fleet knows; run by the thread that owns it."""
    reasons = [
        {
            "text": r.text,
            "feature": r.feature,
            "value": r.value,
            "since": iso(r.since),
            "contribution": round(r.contribution, 4) if math.isfinite(r.contribution) else None,
            "evidence": r.evidence,
        }
        for r in fleet.explain(device, now, horizon_s)
    ]
    latest = {m: {"value": v, "time": iso(t)} for m, (v, t) in sorted(fleet.latest(device).items())}
    series = []
    for metric in SERIES.get(kind, ()):
        times, values = fleet.series(device, metric)
        if len(times):
            series.append(
                {
                    "metric": metric,
                    "times": [iso(float(t)) for t in times[-720:]],
                    "values": [float(v) if math.isfinite(v) else None for v in values[-720:]],
                }
            )
    return {"reasons": reasons, "latest": latest, "series": series}


def _events_of(service: Service, where: sqlalchemy.ColumnElement[bool], limit: int) -> list[dict[str, Any]]:
    with service.database.read() as run:
        rows = (
            run.execute(
                sqlalchemy.select(schema.events).where(where).order_by(schema.events.c.id.desc()).limit(limit)
            )
            .mappings()
            .all()
        )
    return [event_row(r) for r in rows]


def _node_row(service: Service, name: str) -> dict[str, Any] | None:
    state = service.engine.nodes.get(name)
    if state is None:
        return None
    row = service.engine.view.node(name)
    return {
        "node": name,
        "last_seen": iso(state.last_seen),
        "simulated": row.simulated if row else False,
        "devices": row.devices if row else 0,
        "max_risk": round(row.max_risk, 6) if row else 0.0,
        "level": row.level if row else "healthy",
        "agent_version": state.agent_version,
        "clock_skew_seconds": round(state.skew_s, 3),
    }


@router.get("/v1/nodes", response_model=shapes.NodePage, tags=["nodes"], summary="Nodes by name")
def list_nodes(
    service: ServiceOf,
    _who: Reader,
    level: Filter = "",
    min_risk: Annotated[float, Query(ge=0, le=1)] = 0.0,
    limit: Limit = 1000,
    cursor: Cursor = None,
) -> Response:
    after = str(view.read_cursor(cursor, str)[0]) if cursor else ""
    items: list[dict[str, Any]] = []
    following = None
    for name in sorted(n for n in list(service.engine.nodes) if n > after):
        row = _node_row(service, name)
        if row is None or row["max_risk"] < min_risk or (level and row["level"] != level):
            continue
        if len(items) == limit:
            following = view.write_cursor(items[-1]["node"])
            break
        items.append(row)
    return json_response({"items": items, "next": following})


@router.get(
    "/v1/nodes/{node}",
    response_model=shapes.NodeDetail,
    tags=["nodes"],
    summary="One node",
    responses={404: {"model": shapes.ProblemDocument}},
)
def show_node(node: str, service: ServiceOf, _who: Reader) -> Response:
    row = _node_row(service, node)
    if row is None:
        raise Problem(404, f"node {node!r} has never reported", field="node")
    state, shown = service.engine.nodes[node], service.engine.view
    rows = sorted((int(r) for r in shown.rows_of_node.get(node, ())), key=lambda r: shown.devices[r])
    return json_response(
        {
            **row,
            "first_seen": iso(state.first_seen),
            "batches": state.batches,
            "risks": [shown.row(r) for r in rows],
            "events": _events_of(service, schema.events.c.node == node, 50),
        }
    )


@router.get(
    "/v1/events", response_model=shapes.EventPage, tags=["events"], summary="Events, the newest first"
)
def list_events(
    service: ServiceOf,
    _who: Reader,
    node: Filter = "",
    device: Filter = "",
    kind: Filter = "",
    code: Filter = "",
    severity: Filter = "",
    limit: Limit = 100,
    cursor: Cursor = None,
) -> Response:
    table = schema.events.c
    wanted = {
        table.node: node,
        table.device: device,
        table.kind: kind,
        table.code: code,
        table.severity: severity,
    }
    where = [column == value for column, value in wanted.items() if value]
    if cursor:
        where.append(table.id < int(view.read_cursor(cursor, int)[0]))
    with service.database.read() as run:
        rows = (
            run.execute(
                sqlalchemy.select(schema.events).where(*where).order_by(table.id.desc()).limit(limit + 1)
            )
            .mappings()
            .all()
        )
    page = rows[:limit]
    following = view.write_cursor(page[-1]["id"]) if len(rows) > limit else None
    return json_response({"items": [event_row(r) for r in page], "next": following})


@router.post(
    "/v1/failures",
    response_model=shapes.FailureRow,
    status_code=201,
    tags=["failures"],
    summary="Say what really failed: the label that teaches",
)
async def report_failure(body: shapes.FailureBody, service: ServiceOf, who: Operator) -> Response:
    now = service.clock.now()
    time = body.time.timestamp() if body.time else now
    if time > now + 60:
        raise Problem(422, "time: lies in the future", field="time")
    values = {
        "time": time,
        "node": view.node_of(body.device),
        "device": body.device,
        "cause": body.cause,
        "reported_by": who.id,
        "created": now,
    }

    def write() -> int:
        with service.database.write() as run:
            new = service.database.insert_new(run, schema.failures, [values])
            audit(run, service, who, "failure", body.device, cause=body.cause, time=iso(time))
            return new

    new = await run_in_threadpool(write)
    notes = []
    if new:
        notes.append(
            service.note(journal.FAILURE, msgspec.json.encode(Failure(body.device, time, body.cause)))
        )
    if body.repaired:
        notes.append(service.note(journal.CLEAR, msgspec.json.encode(Clear(body.device))))
    for note in notes:
        try:
            await asyncio.wrap_future(note)
        except StorageError as error:
            raise Problem(503, str(error), headers={"Retry-After": "5"}) from error
    row = {
        "time": iso(time),
        "node": values["node"],
        "device": body.device,
        "cause": body.cause,
        "new": bool(new),
    }
    return Response(msgspec.json.encode(row), 201, media_type="application/json")


@router.get(
    "/v1/models", response_model=shapes.ModelPage, tags=["models"], summary="Models, and which are in use"
)
def list_models(service: ServiceOf, _who: Reader) -> Response:
    try:
        found = registry.Store(service.models_path).models()
    except StorageError:
        found = []
    items = []
    for model in found:
        row = registry.as_dict(model)
        used = service.models.get(model.kind)
        if used is not None and used.digest == model.digest:
            row["state"] = "in use"
        items.append(row)
    return json_response({"items": items, "next": None})


@router.get(
    "/v1/stream",
    tags=["live"],
    summary="Live messages as server-sent events",
    response_class=StreamingResponse,
    responses={200: {"content": {"text/event-stream": {}}}},
)
async def stream(service: ServiceOf, _who: Reader) -> StreamingResponse:
    if service.broadcast.full:
        raise Problem(503, "too many listeners", headers={"Retry-After": "10"})

    async def lines() -> AsyncIterator[bytes]:
        yield b"retry: 2000\n\n"
        async for item in service.broadcast.listen(STREAM_IDLE_S):
            if item is None:
                yield b": still here\n\n"
            else:
                yield f"event: {item[0]}\ndata: ".encode() + msgspec.json.encode(item[1]) + b"\n\n"

    return StreamingResponse(lines(), media_type="text/event-stream", headers={"Cache-Control": "no-store"})
