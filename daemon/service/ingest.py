"""`POST /v1/ingest`: a plain route, since it is the busiest by far. Answers only what is safe on the disk."""

from __future__ import annotations

import asyncio

import msgspec
import structlog
from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response

from forewarn.collectors.errors import InputError, StorageError
from forewarn.daemon import wire
from forewarn.daemon.service import intake
from forewarn.daemon.service.access import agent, service_of
from forewarn.daemon.service.problems import Problem, document, field_of, storage_problem
from forewarn.daemon.service.service import Service
from forewarn.daemon.service.tokens import ANY_NODE, Principal

BODY_TIMEOUT_S = 10.0
"""A sender that takes longer for its body is cut off."""
DECODE_ASIDE_BYTES = 256 * 1024
"""Larger bodies are decoded in a thread, so that they hold up nobody."""

_log = structlog.get_logger("forewarn.service")


async def ingest(request: Request) -> Response:
    """Take a batch: 200 with an Answer once it is durable, or a problem document."""
    service = service_of(request)
    try:
        who = await agent(request)
        service.check_load()
        body = await _body(request)
    except Problem as problem:
        return document(problem.status, problem.detail, field=problem.field, headers=problem.headers)
    encoding = request.headers.get("content-encoding")
    received = service.clock.now()
    try:
        if len(body) > DECODE_ASIDE_BYTES:
            batch, plain = await run_in_threadpool(_decode, body, encoding, received)
        else:
            batch, plain = _decode(body, encoding, received)
    except InputError as error:
        return await _refuse(service, who, body, encoding, received, error)
    if who.node not in (ANY_NODE, batch.node):
        return document(
            403, f"node: this token speaks for {who.node!r}, not for {batch.node!r}", field="node"
        )
    return await _keep(service, batch, plain, received)


async def _keep(service: Service, batch: wire.Batch, plain: bytes, received: float) -> Response:
    before = service.highest(batch)
    answer, future = service.take(batch, plain, received)
    if future is not None:
        waiting = asyncio.wrap_future(future)
        if not answer.duplicate:
            # Also when the sender goes away meanwhile.
            waiting.add_done_callback(
                lambda done: service.settle(batch, future, before, done.exception() is not None)
            )
        try:
            await asyncio.shield(waiting)
        except StorageError as error:
            return storage_problem(error)
    return Response(msgspec.json.encode(answer), media_type="application/json")


def _decode(body: bytes, encoding: str | None, received: float) -> tuple[wire.Batch, bytes]:
    plain = wire.decompress(body, encoding)
    batch = wire.decode(plain)
    intake.check(batch, received)
    return batch, plain


async def _refuse(
    service: Service, who: Principal, body: bytes, encoding: str | None, received: float, error: InputError
) -> JSONResponse:
    service.counts.refused += 1
    _log.warning("batch_refused", token=who.id, node=who.node, reason=str(error))
    await run_in_threadpool(service.refused.keep, body, encoding, str(error), received, who.id)
    return document(422, str(error), field=field_of(str(error)))


async def _body(request: Request) -> bytes:
    """The body, never held beyond its limit. Raises Problem."""
    length = request.headers.get("content-length", "")
    if length.isdigit() and int(length) > wire.MAX_BODY_BYTES:
        raise Problem(413, f"the body is larger than {wire.MAX_BODY_BYTES} bytes: send smaller batches")
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            async for piece in request.stream():
                body += piece
                if len(body) > wire.MAX_BODY_BYTES:
                    raise Problem(
                        413, f"the body is larger than {wire.MAX_BODY_BYTES} bytes: send smaller batches"
                    )
    except TimeoutError:
        raise Problem(408, f"the body did not arrive within {BODY_TIMEOUT_S:g} s") from None
    except ClientDisconnect:
        raise Problem(400, "the sender went away in the middle of the body") from None
    return bytes(body)
