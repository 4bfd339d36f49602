"""A whole Forewarn of real processes in a temporary folder: one service, agents, and a client to look at it.

Processes are waited for by condition with a deadline, never by a fixed sleep.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import httpx

T = TypeVar("T")
DEADLINE_S = 60.0
PAUSE_S = 0.05


def free_port() -> int:
    """A loopback port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def wait_for(condition: Callable[[], T | None], what: str, deadline_s: float = DEADLINE_S) -> T:
    """The first truthy answer of `condition`; fails the test when none came within `deadline_s`."""
    end = time.monotonic() + deadline_s
    while True:
        found = condition()
        if found:
            return found
        if time.monotonic() > end:
            raise AssertionError(f"waited {deadline_s:g} s in vain for {what}")
        time.sleep(PAUSE_S)


class Deployment:
    """One service with its data in `folder`, and any number of agents."""

    def __init__(self, folder: Path, service_settings: str = "") -> None:
        self.folder = folder
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.data = folder / "service"
        self.data.mkdir(parents=True, exist_ok=True)
        self.config = folder / "service.toml"
        self.config.write_text(
            f'[service]\nlisten = "127.0.0.1:{self.port}"\ndata = "{self.data}"\ncycle_interval_s = 1.0\n'
            f'allow_webhook_hosts = ["127.0.0.1"]\nallow_insecure_webhooks = true\n{service_settings}'
        )
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.operator = ""

    def command(self, *words: str) -> list[str]:
        return [sys.executable, "-m", "forewarn.daemon.cli", *words]

    def token(self, role: str, node: str = "") -> str:
        """A fresh token, by the command that an operator would use."""
        words = ["token", "create", "--config", str(self.config), "--role", role, "--json"]
        if node:
            words += ["--node", node]
        done = subprocess.run(self.command(*words), capture_output=True, text=True, timeout=DEADLINE_S)
        assert done.returncode == 0, done.stderr
        token: str = json.loads(done.stdout)["token"]
        return token

    def start(
        self, name: str, *words: str, environment: Mapping[str, str] | None = None
    ) -> subprocess.Popen[bytes]:
        """Start a Forewarn command in its own process group; its output goes to NAME.log."""
        log = (self.folder / f"{name}.log").open("ab")
        process = subprocess.Popen(
            self.command(*words),
            stdout=log,
            stderr=log,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            env={**os.environ, **(environment or {})},
        )
        log.close()
        self.processes[name] = process
        return process

    def start_service(self) -> None:
        """Start the service and wait until it is ready."""
        process = self.start("service", "serve", "--config", str(self.config))

        def ready() -> bool:
            assert process.poll() is None, f"the service ended:\n{self.log('service')}"
            with contextlib.suppress(httpx.TransportError):
                return httpx.get(f"{self.url}/readyz", timeout=2).status_code == 200
            return False

        wait_for(ready, "the service to be ready")
        if not self.operator:
            self.operator = self.token("operator")

    def start_agent(self, node: str, settings: str, *, token: str | None = None) -> None:
        """Start an agent for `node`; `settings` is the TOML of its collectors."""
        folder = self.folder / node
        folder.mkdir(exist_ok=True)
        secret = folder / "token"
        if token is not None or not secret.exists():
            secret.write_text(token if token is not None else self.token("agent", node))
        config = folder / "agent.toml"
        config.write_text(
            f'[agent]\nnode = "{node}"\nservice_url = "{self.url}"\ntoken_file = "{secret}"\n'
            f'spool = "{folder}/spool.db"\nlisten = ""\nship_interval_s = 0.5\n{settings}'
        )
        self.start(node, "agent", "--config", str(config))

    def kill(self, name: str) -> None:
        """kill -9 of a process and all that it started."""
        process = self.processes.pop(name)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    def stop(self, name: str) -> int:
        """Ask a process to end (SIGTERM); returns its exit code."""
        process = self.processes.pop(name)
        process.terminate()
        return process.wait(timeout=DEADLINE_S)

    def log(self, name: str) -> str:
        """What a process has written so far."""
        return (self.folder / f"{name}.log").read_text(errors="replace")

    def request(self, method: str, path: str, **options: Any) -> httpx.Response:
        """A request with the operator's token."""
        headers = {"Authorization": f"Bearer {self.operator}"}
        return httpx.request(method, f"{self.url}{path}", headers=headers, timeout=20, **options)

    def get(self, path: str, **parameters: Any) -> Any:
        """The JSON of a GET."""
        response = self.request("GET", path, params=parameters)
        assert response.status_code == 200, response.text
        return response.json()

    def items(self, path: str, **parameters: Any) -> list[dict[str, Any]]:
        """All items of a listing, page by page."""
        found: list[dict[str, Any]] = []
        while True:
            page = self.get(path, **parameters)
            found += page["items"]
            if not page.get("next"):
                return found
            parameters["cursor"] = page["next"]

    def close(self) -> None:
        """Kill whatever still runs."""
        for name in list(self.processes):
            self.kill(name)


@contextlib.contextmanager
def deployment(folder: Path, service_settings: str = "") -> Iterator[Deployment]:
    """A deployment that leaves no process behind."""
    running = Deployment(folder, service_settings)
    try:
        yield running
    finally:
        running.close()
