"""The HTTP side of the controller: takes signed webhooks and answers once they are safe on disk.

Answers are quick and never wait for the loop: 202 with a decision, or a problem document (RFC 9457).
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading

import structlog
import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from forewarn.collectors.errors import ConfigError, InputError, StorageError, UnavailableError
from forewarn.daemon.controller.mailbox import Mailbox
from forewarn.daemon.controller.messages import MAX_BODY_BYTES, SignatureError, Verifier, parse

BODY_TIMEOUT_S = 5.0
"""A sender that takes longer to send its body is cut off."""
START_TIMEOUT_S = 10.0
MAX_CONNECTIONS = 64

_log = structlog.get_logger("forewarn.controller")


def problem(status: int, title: str, detail: str) -> JSONResponse:
    """A problem document."""
    return JSONResponse(
        {"type": "about:blank", "title": title, "status": status, "detail": detail},
        status_code=status,
        media_type="application/problem+json",
    )


def make_app(mailbox: Mailbox, verifier: Verifier, job: str = "") -> Starlette:
    """The ASGI app. A request for another job than `job` (when set) is declined."""

    async def webhook(request: Request) -> Response:
        try:
            async with asyncio.timeout(BODY_TIMEOUT_S):
                body = await _limited_body(request)
        except TimeoutError:
            return problem(408, "Too slow", f"the body did not arrive within {BODY_TIMEOUT_S:g} s")
        except ClientDisconnect:
            return problem(400, "Incomplete", "the sender went away in the middle of the body")
        if body is None:
            return problem(413, "Too large", f"the body is larger than {MAX_BODY_BYTES} bytes")
        try:
            identity = verifier.verify(body, request.headers)
            asked = parse(body)
        except SignatureError as error:
            _log.warning("webhook_refused", reason=str(error))
            return problem(401, "Not authentic", str(error))
        except InputError as error:
            return problem(422, "Not understood", str(error))
        decline = ""
        if job and asked.job and asked.job != job:
            decline = f"this controller serves job {job!r}, not {asked.job!r}"
        try:
            answer = await asyncio.to_thread(mailbox.accept, identity, asked, decline)
        except StorageError as error:
            _log.error("webhook_not_kept", error=str(error))
            return problem(503, "Not kept", str(error))
        _log.info("webhook", id=identity, device=asked.device, risk=asked.risk, **answer)
        return JSONResponse(answer, status_code=202)

    async def health(_request: Request) -> Response:
        try:
            return JSONResponse({"status": "ok", "job": job, **await asyncio.to_thread(mailbox.counts)})
        except StorageError as error:
            return problem(503, "State unusable", str(error))

    async def on_http_error(_request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        return problem(error.status_code, error.detail, "POST /webhook and GET /healthz are served here")

    return Starlette(
        routes=[
            Route("/webhook", webhook, methods=["POST"]),
            Route("/healthz", health, methods=["GET"]),
        ],
        exception_handlers={HTTPException: on_http_error},
    )


async def _limited_body(request: Request) -> bytes | None:
    """The body, or None when it is larger than allowed; never held beyond that."""
    body = bytearray()
    async for piece in request.stream():
        body += piece
        if len(body) > MAX_BODY_BYTES:
            return None
    return bytes(body)


class Receiver:
    """The app on a socket, served from a thread of its own."""

    def __init__(self, app: Starlette, host: str, port: int) -> None:
        """Binds at once; port 0 takes a free one. Raises ConfigError when the address is taken or not ours."""
        try:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            self._socket = socket.create_server((host, port), family=family)
        except OSError as error:
            raise ConfigError(
                f"controller.listen: cannot listen on {host}:{port}: {error.strerror or error}; choose another port"
            ) from error
        self.port: int = self._socket.getsockname()[1]
        self._server = uvicorn.Server(
            uvicorn.Config(
                app,
                log_config=None,
                access_log=False,
                lifespan="off",
                limit_concurrency=MAX_CONNECTIONS,
                timeout_keep_alive=5,
                timeout_graceful_shutdown=3,
                server_header=False,
            )
        )
        self._thread = threading.Thread(target=self._serve, name="forewarn-receiver", daemon=True)

    def start(self) -> None:
        """Serve from now on. Raises UnavailableError when the server does not come up."""
        self._thread.start()
        waiter = threading.Event()
        for _ in range(int(START_TIMEOUT_S / 0.02)):
            if self._server.started or not self._thread.is_alive():
                break
            waiter.wait(0.02)
        if not self._server.started:
            raise UnavailableError("controller: the receiver did not start; see its log")

    def stop(self) -> None:
        """Finish what is being answered, then close the socket."""
        self._server.should_exit = True
        if self._thread.ident is not None:
            self._thread.join()
        with contextlib.suppress(OSError):
            self._socket.close()

    def _serve(self) -> None:
        asyncio.run(self._server.serve(sockets=[self._socket]))
