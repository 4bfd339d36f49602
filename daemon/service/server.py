"""The service on its port: logs, signals, uvicorn. What `forewarn serve` runs."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import signal
import socket
import sys
from collections.abc import Callable, Iterator, MutableMapping
from typing import Any, TextIO

import structlog
import uvicorn

from forewarn.collectors.clock import Clock
from forewarn.collectors.errors import ConfigError
from forewarn.daemon.config import ServiceConfig
from forewarn.daemon.service.app import make_app
from forewarn.daemon.service.service import Service

GRACE_S = 2
"""Answers under way get this long at the end."""
SWITCH_INTERVAL_S = 0.001
KEEP_ALIVE_S = 75
BACKLOG = 2048
MAX_CONNECTIONS = 20_000
SECRET = re.compile(r"whsec_[A-Za-z0-9+/=]+|fwt_[0-9a-f]+_[\w-]+|(?<=Bearer )\S+")

_log = structlog.get_logger("forewarn.service")


def redact(_logger: Any, _name: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """A structlog processor: secrets never reach a log, wherever they stand in a line."""
    for key, value in event.items():
        if (
            key in ("secret", "token", "authorization", "password")
            and isinstance(value, str)
            and len(value) > 12
        ):
            event[key] = "[redacted]"
        elif isinstance(value, str) and SECRET.search(value):
            event[key] = SECRET.sub("[redacted]", value)
    return event


def configure_logs(level: str, stream: TextIO | None = None) -> None:
    """Lines for people on a terminal, JSON when piped."""
    stream = stream or sys.stderr
    last: Any = structlog.dev.ConsoleRenderer() if stream.isatty() else structlog.processors.JSONRenderer()
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.StackInfoRenderer(),
            structlog.processors.format_exc_info,
            redact,
            last,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[level.upper()]),
        logger_factory=structlog.PrintLoggerFactory(stream),
        cache_logger_on_first_use=False,
    )
    logging.basicConfig(level=logging.WARNING, stream=stream)
    logging.getLogger("httpx").setLevel(logging.WARNING)


def listen(host: str, port: int) -> socket.socket:
    """Bind the port. Raises ConfigError."""
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family, backlog=BACKLOG)
    except OSError as error:
        raise ConfigError(
            f"service.listen: cannot listen on {host}:{port}: {error.strerror or error}; choose another address"
        ) from error


def serve(settings: ServiceConfig, clock: Clock | None = None) -> None:
    """Serve until SIGTERM or SIGINT. Raises ConfigError, StorageError when it cannot start."""
    # Threads take turns: with the default of 5 ms an answer that waits for the log waits for two turns of others.
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    service = Service(settings, clock)
    try:
        with (
            listen(service.host, service.port) as sock,
            asyncio.Runner(loop_factory=_loop_factory()) as runner,
        ):
            runner.run(_serve(service, sock))
    finally:
        service.stop()


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """uvloop where it is installed, else the standard loop."""
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop


class _Server(uvicorn.Server):
    """uvicorn without its signal handling, which would end the process before the service has kept its state."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def _serve(service: Service, sock: socket.socket) -> None:
    server = _Server(
        uvicorn.Config(
            make_app(service),
            log_config=None,
            access_log=False,
            lifespan="off",
            server_header=False,
            limit_concurrency=MAX_CONNECTIONS,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=GRACE_S,
            proxy_headers=False,
        )
    )

    def end() -> None:
        server.should_exit = True
        service.broadcast.close()

    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, end)
    serving = asyncio.create_task(server.serve([sock]))
    try:
        # Meanwhile everything but /healthz answers 503.
        await asyncio.to_thread(service.start)
        host = f"[{service.host}]" if ":" in service.host else service.host
        _log.info("listening", url=f"http://{host}:{sock.getsockname()[1]}", data=str(service.data))
    except BaseException:
        end()
        await serving
        raise
    await serving
