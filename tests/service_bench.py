"""A service in the test's own process, with agents and controllers that are a few lines each."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import uvicorn

from forewarn.collectors.base import Device, Event, Sample
from forewarn.daemon import wire
from forewarn.daemon.config import ServiceConfig
from forewarn.daemon.service import tokens
from forewarn.daemon.service.app import make_app
from forewarn.daemon.service.service import Service

DEADLINE_S = 20.0


def eventually(what: Callable[[], Any], deadline_s: float = DEADLINE_S) -> Any:
    """Wait until `what` gives something true, and return it."""
    end = time.monotonic() + deadline_s
    while True:
        found = what()
        if found or time.monotonic() > end:
            assert found, "did not come to be in time"
            return found
        time.sleep(0.01)


def batch(
    node: str = "n1",
    sequence: int = 1,
    *,
    stream: str = "s1",
    events: list[Event] | None = None,
    gpus: int = 2,
    at: float | None = None,
    temperature: float = 60.0,
    sent: float | None = None,
) -> wire.Batch:
    """What an agent with a few GPUs sends."""
    now = time.time() if at is None else at
    names = [f"{node}/gpu{i}" for i in range(gpus)]
    samples = [Sample(n, "gpu_temperature_celsius", temperature) for n in names]
    return wire.Batch(
        node=node,
        stream=stream,
        sequence=sequence,
        sent=now if sent is None else sent,
        agent_version="test",
        devices=[Device(n, "gpu", "H100", f"GPU-{n}", simulated=True) for n in names],
        frames=[wire.pack_samples(now, samples)],
        events=events or [],
    )


def xid(device: str = "n1/gpu1", code: str = "79", at: float | None = None) -> Event:
    return Event(device, "xid", code, "critical", f"XID {code}", time=time.time() if at is None else at)


class Bench:
    """A running service, a client for its API and tokens for each role."""

    def __init__(
        self, settings: ServiceConfig, hook: Callable[[httpx.Request], httpx.Response] | None
    ) -> None:
        self.hooks: list[httpx.Request] = []

        def answer(request: httpx.Request) -> httpx.Response:
            self.hooks.append(request)
            return hook(request) if hook else httpx.Response(202)

        self.service = Service(settings, webhook_transport=httpx.MockTransport(answer))
        self.service.start()
        eventually(lambda: self.service.engine.view.number)
        self._socket = socket.create_server(("127.0.0.1", 0))
        self._server = uvicorn.Server(
            uvicorn.Config(
                make_app(self.service), log_config=None, lifespan="off", timeout_graceful_shutdown=1
            )
        )
        self._thread = threading.Thread(target=lambda: asyncio.run(self._server.serve([self._socket])))
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        self.client = httpx.Client(base_url=self.url, timeout=20.0)
        clock = self.service.clock
        self.agent = tokens.create(self.service.database, clock, "agent", node="*")
        self.reader = tokens.create(self.service.database, clock, "reader")
        self.operator = tokens.create(self.service.database, clock, "operator")

    def stop(self) -> None:
        self.client.close()
        self.service.broadcast.close()
        self._server.should_exit = True
        self._thread.join()
        self._socket.close()
        self.service.stop()

    def headers(self, token: str) -> dict[str, str]:
        return {"Authorization": f"Bearer {token}"}

    def send(self, sent: wire.Batch, token: str | None = None) -> httpx.Response:
        body, encoding = wire.compress(wire.encode(sent))
        headers = self.headers(token or self.agent) | {"Content-Type": wire.CONTENT_TYPE}
        if encoding:
            headers["Content-Encoding"] = encoding
        return self.client.post("/v1/ingest", content=body, headers=headers)

    def get(self, path: str, **query: Any) -> Any:
        answer = self.client.get(path, params=query)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def put_job(self, job: str = "llm", **body: Any) -> httpx.Response:
        asked = {
            "nodes": ["n1"],
            "checkpoint_seconds": 5.0,
            "webhook": {"url": "http://127.0.0.1:9/hook"},
        } | body
        return self.client.put(f"/v1/jobs/{job}", json=asked, headers=self.headers(self.operator))

    def post(self, path: str, body: Any = None) -> httpx.Response:
        return self.client.post(path, json=body, headers=self.headers(self.operator))

    def scored(self) -> int:
        """Wait for a cycle that begins now."""
        number = self.service.engine.view.number
        self.service.engine.score_soon()
        eventually(lambda: self.service.engine.view.number > number)
        return self.service.engine.view.number


def make_settings(tmp_path: Path, **fields: Any) -> ServiceConfig:
    """Settings on loopback with a folder of their own; webhooks may go to loopback."""
    given: dict[str, Any] = {
        "listen": "127.0.0.1:0",
        "data": str(tmp_path / "data"),
        "allow_webhook_hosts": ["127.0.0.0/8"],
        "allow_insecure_webhooks": True,
        "cycle_interval_s": 3600.0,
        "models": "",
    }
    return ServiceConfig(**(given | fields))


Starter = Callable[..., Bench]
