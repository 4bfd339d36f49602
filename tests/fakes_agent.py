"""Collectors, transports and a service that agent tests put in the place of real ones."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import msgspec

from forewarn.collectors.base import Device, Event, Reading, Sample
from forewarn.collectors.errors import UnavailableError
from forewarn.collectors.registry import Setup
from forewarn.daemon import wire
from forewarn.daemon.agent.shipper import Response


class FakeCollector:
    """Gives what `answers` says, one after the other, the last one for ever; an exception is raised."""

    def __init__(
        self,
        name: str = "fake",
        *answers: Reading | BaseException,
        interval_s: float = 10.0,
        deadline_s: float = 5.0,
    ) -> None:
        self.name, self.interval_s, self.deadline_s = name, interval_s, deadline_s
        self.answers = list(answers) or [Reading()]
        self.calls = 0
        self.closed = False

    def collect(self) -> Reading:
        answer = self.answers[min(self.calls, len(self.answers) - 1)]
        self.calls += 1
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def close(self) -> None:
        self.closed = True


class HeldRunner:
    """Holds the polls of named collectors until they are let go; runs others at once."""

    def __init__(self, *held: str) -> None:
        self.names = set(held)
        self.held: dict[str, Callable[[], None]] = {}

    def start(self, name: str, work: Callable[[], None]) -> None:
        if name in self.names:
            assert name not in self.held, "a second poll was started while one is under way"
            self.held[name] = work
        else:
            work()

    def let_go(self, name: str) -> None:
        self.names.discard(name)
        self.held.pop(name)()


class LineCollector:
    """Gives one event for each line of a file and remembers its place, as the kernel log does."""

    name = "lines"

    def __init__(self, setup: Setup, *, path: Path, interval_s: float = 0.05) -> None:
        self.interval_s, self.deadline_s = interval_s, 2.0
        self._path, self._clock, self._place = path, setup.clock, 0

    def collect(self) -> Reading:
        try:
            with self._path.open("rb") as source:
                source.seek(self._place)
                fresh = source.read()
        except OSError as error:
            raise UnavailableError(f"{self._path}: cannot be read: {error}") from error
        fresh = fresh[: fresh.rfind(b"\n") + 1]
        self._place += len(fresh)
        now = self._clock.now()
        events = [
            Event("", "oom", line, "critical", f"line {line}", time=now) for line in fresh.decode().split()
        ]
        return Reading(
            samples=[Sample("gpu0", "gpu_temperature_celsius", 40.0)],
            events=events,
            devices=[Device("gpu0", "gpu", serial="GPU-1", pci="0000:3b:00")],
        )

    def state(self) -> dict[str, int]:
        return {"place": self._place}

    def restore(self, state: dict[str, int]) -> None:
        self._place = int(state["place"])

    def close(self) -> None:
        pass


class HungCollector:
    """Never answers, like a driver that hangs, and cannot be closed either."""

    name = "hung"
    interval_s = 1.0
    deadline_s = 0.2

    def __init__(self, setup: Setup) -> None:
        self._for_ever = threading.Event()

    def collect(self) -> Reading:
        self._for_ever.wait()
        return Reading()

    def close(self) -> None:
        self._for_ever.wait()


class FakeTransport:
    """Answers with what `answers` says, one after the other, the last for ever: a status, a Response or an error."""

    def __init__(self, *answers: int | Response | BaseException) -> None:
        self.answers: list[int | Response | BaseException] = list(answers) or [200]
        self.batches: list[wire.Batch] = []

    def post(self, body: bytes, encoding: str | None) -> Response:
        batch = wire.decode(wire.decompress(body, encoding))
        answer = self.answers[min(len(self.batches), len(self.answers) - 1)]
        self.batches.append(batch)
        if isinstance(answer, BaseException):
            raise answer
        if isinstance(answer, Response):
            return answer
        told = {"stream": batch.stream, "sequence": batch.sequence, "duplicate": False}
        return Response(answer, "", json.dumps(told).encode() if answer == 200 else b"{}")

    def close(self) -> None:
        pass


class FakeService:
    """A tiny ingest over real HTTP that applies each (stream, sequence) once and remembers what it was told."""

    def __init__(self, token: str = "", port: int = 0) -> None:
        self.applied: dict[tuple[str, int], wire.Batch] = {}
        self.duplicates = 0
        self.refusals = 0
        self.statuses: list[int] = []
        """Answers to give instead, one request each, before it serves."""
        self.lose_answers = 0
        """How many times to apply a batch and drop the connection without a word."""
        self.lock = threading.Lock()
        service = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                service._serve(self, token)

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        self.server.daemon_threads = True
        self.thread = threading.Thread(
            target=self.server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True
        )
        self.thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.server_address[1]}"

    def _serve(self, request: BaseHTTPRequestHandler, token: str) -> None:
        body = request.rfile.read(int(request.headers["Content-Length"]))
        with self.lock:
            if self.statuses:
                self._answer(request, self.statuses.pop(0), {"title": "as the test asked"})
                return
            if token and request.headers.get("Authorization") != f"Bearer {token}":
                self.refusals += 1
                self._answer(request, 401, {"title": "the token is not known"})
                return
            batch = wire.decode(wire.decompress(body, request.headers.get("Content-Encoding")))
            key = (batch.stream, batch.sequence)
            duplicate = key in self.applied
            self.duplicates += duplicate
            self.applied.setdefault(key, batch)
            if self.lose_answers:
                self.lose_answers -= 1
                request.close_connection = True
                request.connection.close()
                return
        self._answer(request, 200, {"stream": key[0], "sequence": key[1], "duplicate": duplicate})

    @staticmethod
    def _answer(request: BaseHTTPRequestHandler, status: int, told: dict[str, Any]) -> None:
        body = json.dumps(told).encode()
        request.send_response(status)
        request.send_header("Content-Type", "application/json")
        request.send_header("Content-Length", str(len(body)))
        request.end_headers()
        request.wfile.write(body)

    def events(self, kind: str) -> list[Event]:
        with self.lock:
            return [e for b in self.applied.values() for e in b.events if e.kind == kind]

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()


def wait_until(what: Callable[[], bool], within_s: float = 20.0, poll_s: float = 0.02) -> bool:
    """Wait for a condition of a real process; false when it did not come true in time."""
    end = time.monotonic() + within_s
    while time.monotonic() < end:
        if what():
            return True
        time.sleep(poll_s)
    return what()


def gpu_reading(
    temperature: float = 40.0, *, device: str = "gpu0", events: list[Event] | None = None
) -> Reading:
    """A reading of one GPU."""
    return Reading(
        samples=[
            Sample(device, "gpu_temperature_celsius", temperature),
            Sample(device, "gpu_power_watts", 300.0),
        ],
        devices=[Device(device, "gpu", "H100", f"GPU-{device}", pci="00000000:3B:00.0")],
        events=events or [],
    )


def renamed(event: Event, **changes: Any) -> Event:
    return msgspec.structs.replace(event, **changes)
