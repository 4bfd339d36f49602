"""The HTTP application: routes, errors, security headers, the page. Everything behind it is in `service`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from pathlib import Path
from typing import Any

import msgspec
from fastapi import FastAPI
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Match, Route
from starlette.staticfiles import StaticFiles

from forewarn import __version__
from forewarn.daemon import wire
from forewarn.daemon.service import api_fleet, api_jobs, problems, shapes
from forewarn.daemon.service.access import Reader, ServiceOf
from forewarn.daemon.service.ingest import ingest
from forewarn.daemon.service.metrics import exposition
from forewarn.daemon.service.problems import document
from forewarn.daemon.service.service import Service
from forewarn.daemon.service.times import iso

PAGE = Path(__file__).parent / "page"
INGEST_PATH = "/v1/ingest"
MAX_JSON_BYTES = 4 * 1024 * 1024
"""Bodies of all routes but the ingest, which has its own limit."""
SECURITY_HEADERS = (
    (
        b"content-security-policy",
        b"default-src 'self'; img-src 'self' data:; style-src 'self'; script-src 'self'; object-src 'none'; "
        b"base-uri 'none'; frame-ancestors 'none'; form-action 'self'",
    ),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"x-frame-options", b"DENY"),
)
DOCS_POLICY = (
    b"default-src 'self'; img-src 'self' data: https://fastapi.tiangolo.com; style-src 'self' 'unsafe-inline' "
    b"https://cdn.jsdelivr.net; script-src 'self' 'unsafe-inline' https://cdn.jsdelivr.net; frame-ancestors 'none'"
)
"""`/docs` is FastAPI's own page with its inline script; nothing else is allowed one."""
DESCRIPTION = """GPU health, failure risk and the protection of training jobs.

Reading needs a token with the role reader or operator (none on loopback, unless set otherwise); changing needs
operator. Lists give `items` and `next`; give `next` back as `cursor` for the following page. Errors are problem
documents (RFC 9457).
"""

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


class Guard:
    """The outermost layer: security headers, a limit on bodies, the ingest. Plain ASGI: streams stay streams."""

    def __init__(self, app: App, service: Service) -> None:
        self._app, self._service = app, service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        policy = scope["path"] == "/docs"

        async def send_with_headers(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                headers = [*message.get("headers", []), *SECURITY_HEADERS]
                if policy:
                    headers = [h for h in headers if h[0] != b"content-security-policy"]
                    headers.append((b"content-security-policy", DOCS_POLICY))
                message = {**message, "headers": headers}
            await send(message)

        if not self._service.ready and scope["path"] != "/healthz":
            answer = document(503, "the service is starting or stopping", headers={"Retry-After": "1"})
            await answer(scope, receive, send_with_headers)
            return
        if scope["path"] == INGEST_PATH and scope["method"] == "POST":
            # By far the busiest route: past FastAPI's layers, which it needs nothing of.
            taken = await ingest(Request(scope, receive))
            await taken(scope, receive, send)
            return
        if scope["method"] in ("GET", "HEAD", "OPTIONS"):
            await self._app(scope, receive, send_with_headers)
            return
        body = await _limited(receive)
        if body is None:
            answer = document(413, f"the body is larger than {MAX_JSON_BYTES} bytes")
            await answer(scope, receive, send_with_headers)
            return
        pieces = [{"type": "http.request", "body": body, "more_body": False}]

        async def replay() -> MutableMapping[str, Any]:
            return pieces.pop() if pieces else await receive()

        await self._app(scope, replay, send_with_headers)


async def _limited(receive: Receive) -> bytes | None:
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] != "http.request":
            return bytes(body)
        body += message.get("body", b"")
        if len(body) > MAX_JSON_BYTES:
            return None
        if not message.get("more_body"):
            return bytes(body)


def make_app(service: Service) -> FastAPI:
    """The application for a service, which need not have been started yet."""
    app = FastAPI(
        title="Forewarn",
        version=__version__,
        description=DESCRIPTION,
        redoc_url=None,
        responses={
            status: {"model": shapes.ProblemDocument, "description": text}
            for status, text in (
                (401, "No token, or one that is not in force"),
                (403, "The token's role does not allow it"),
                (422, "Something in the request is not what it must be; `field` says what"),
                (503, "Not now; Retry-After says when"),
            )
        },
    )
    app.state.service = service
    problems.install(app)
    # `Guard` answers this itself; here it stands for other methods and for other servers.
    app.router.routes.insert(0, Route(INGEST_PATH, ingest, methods=["POST"]))
    app.include_router(api_fleet.router)
    app.include_router(api_jobs.router)
    _add_health(app)
    app.openapi = _openapi_of(app)  # type: ignore[method-assign]  # FastAPI's documented way to extend it
    app.router.routes.append(Route("/v1/{rest:path}", _unknown, methods=["GET", "HEAD"]))
    if (PAGE / "index.html").is_file():
        app.mount("/", StaticFiles(directory=PAGE, html=True), name="page")
    else:
        app.add_api_route("/", _no_page, include_in_schema=False)
    app.add_middleware(Guard, service=service)
    return app


async def _unknown(request: Request) -> Response:
    """The page takes every path that is left; below /v1 a wrong method must still be told from a wrong path."""
    app: FastAPI = request.app
    allowed = {
        method
        for route in app.router.routes
        if isinstance(route, Route) and route.matches(request.scope)[0] is Match.PARTIAL
        for method in route.methods or ()
    }
    if allowed:
        return document(405, "Method Not Allowed", headers={"Allow": ", ".join(sorted(allowed))})
    return document(404, f"{request.url.path} does not exist; /docs shows what does")


async def _no_page() -> JSONResponse:
    return JSONResponse({"name": "forewarn", "version": __version__, "documentation": "/docs"})


def _add_health(app: FastAPI) -> None:
    @app.get("/healthz", response_model=shapes.Health, tags=["health"], summary="The process answers")
    async def healthz() -> JSONResponse:
        return JSONResponse({"status": "ok", "version": __version__})

    @app.get("/readyz", response_model=shapes.Readiness, tags=["health"], summary="Batches can be kept")
    async def readyz(service: ServiceOf) -> Response:
        trouble = await run_in_threadpool(service.trouble)
        if trouble:
            return document(503, "; ".join(trouble), headers={"Retry-After": "5"})
        engine = service.engine
        return JSONResponse(
            {
                "status": "ready",
                "devices": len(engine.view.devices),
                "cycle": engine.view.number,
                "last_cycle": iso(engine.view.time) if engine.view.number else None,
                "cycle_seconds": round(engine.last_cycle_s, 3),
                "backlog_bytes": engine.backlog_bytes,
            }
        )

    @app.get(
        "/metrics",
        tags=["health"],
        summary="For Prometheus",
        response_class=Response,
        responses={200: {"content": {"text/plain": {}}}},
    )
    def metrics(service: ServiceOf, _who: Reader) -> Response:
        return Response(exposition(service), media_type="text/plain; version=0.0.4; charset=utf-8")


def _openapi_of(app: FastAPI) -> Callable[[], dict[str, Any]]:
    """OpenAPI with the ingest, which FastAPI does not know of, added from the wire's own types."""
    original = app.openapi

    def openapi() -> dict[str, Any]:
        first = app.openapi_schema is None
        tree = original()
        if first:
            (batch,), parts = msgspec.json.schema_components(
                [wire.Batch], ref_template="#/components/schemas/{name}"
            )
            tree["components"]["schemas"].update(parts)
            tree["paths"]["/v1/ingest"] = {"post": _ingest_operation(batch)}
            _problem_types(tree)
        return tree

    return openapi


def _ingest_operation(batch: dict[str, Any]) -> dict[str, Any]:
    problem = {"application/problem+json": {"schema": {"$ref": "#/components/schemas/ProblemDocument"}}}
    statuses = {
        "400": "The sender went away",
        "401": "No agent's token",
        "403": "Another node's token",
        "408": "The body came too slowly",
        "413": "The body is too large",
        "422": "The batch is not valid; it is kept for inspection",
        "429": "Come back after Retry-After",
        "503": "It cannot be kept now; come back after Retry-After",
    }
    return {
        "tags": ["ingest"],
        "summary": "Take a batch from an agent; answered once it is safe on the disk",
        "operationId": "ingest",
        "security": [{"HTTPBearer": []}],
        "requestBody": {"required": True, "content": {wire.CONTENT_TYPE: {"schema": batch}}},
        "responses": {
            "200": {
                "description": "All up to `sequence` of `stream` is safe",
                "content": {
                    "application/json": {
                        "schema": {
                            "type": "object",
                            "properties": {
                                "stream": {"type": "string"},
                                "sequence": {"type": "integer"},
                                "duplicate": {"type": "boolean"},
                            },
                            "required": ["stream", "sequence"],
                        }
                    }
                },
            },
            **{status: {"description": text, "content": problem} for status, text in statuses.items()},
        },
    }


def _problem_types(tree: dict[str, Any]) -> None:
    """Errors come as application/problem+json: say so wherever FastAPI says application/json."""
    reference = {"schema": {"$ref": "#/components/schemas/ProblemDocument"}}
    for path in tree["paths"].values():
        for operation in path.values():
            for status, answer in operation.get("responses", {}).items():
                if status[0] in "45":
                    answer["content"] = {problems.MEDIA_TYPE: reference}
    for unused in ("HTTPValidationError", "ValidationError"):
        tree["components"]["schemas"].pop(unused, None)
