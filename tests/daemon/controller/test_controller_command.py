"""`forewarn controller` as a process: killed at any moment, it forgets nothing and does nothing twice."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest

from forewarn.daemon.cli import main
from forewarn.daemon.controller.mailbox import Mailbox
from forewarn.daemon.controller.messages import SaveRequest
from forewarn.daemon.controller.protector import Protector

DEADLINE_S = 60.0


def wait_for(condition: Callable[[], Any], what: str) -> Any:
    end = time.monotonic() + DEADLINE_S
    while time.monotonic() < end:
        value = condition()
        if value:
            return value
        threading.Event().wait(0.02)
    raise AssertionError(f"{what} did not happen within {DEADLINE_S:g} s")


class Service:
    """Stands in for the service over real HTTP: notes what it takes, answers `status`."""

    def __init__(self) -> None:
        self.heard: list[tuple[str, str, Any]] = []
        self.status = 200
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def handle_any(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers.get("content-length", 0))) or b"null")
                if outer.status == 200:
                    outer.heard.append((self.command, self.path, body))
                self.send_response(outer.status)
                self.send_header("content-length", "2")
                self.end_headers()
                self.wfile.write(b"{}")

            do_POST = do_PUT = do_GET = handle_any

            def log_message(self, format: str, *args: Any) -> None:
                return

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.thread = threading.Thread(target=self.server.serve_forever, daemon=True)
        self.thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.server_address[1]}"

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()


@pytest.fixture
def service() -> Iterator[Service]:
    made = Service()
    yield made
    made.close()


class Sidecar:
    """The process, started and killed at will, always on the same state and port."""

    def __init__(self, folder: Path, service: Service, secret: str) -> None:
        with socket.create_server(("127.0.0.1", 0)) as probe:
            self.port = probe.getsockname()[1]
        self.state = folder / "state"
        (folder / "secret").write_text(secret + "\n")
        (folder / "token").write_text("operator-token\n")
        self.config = folder / "forewarn.toml"
        self.config.write_text(
            f'[controller]\nlisten = "127.0.0.1:{self.port}"\njob = "llm"\nnodes = ["n1"]\n'
            f'service_url = "{service.url}"\nsecret_file = "{folder}/secret"\ntoken_file = "{folder}/token"\n'
            f'state = "{self.state}"\n'
        )
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        environment = {k: v for k, v in os.environ.items() if not k.startswith("FOREWARN_")}
        command = [sys.executable, "-m", "forewarn.daemon.cli", "controller", "--config", str(self.config)]
        self.process = subprocess.Popen(
            command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        wait_for(self.answers, "the start of the controller")

    def answers(self) -> bool:
        assert self.process is not None and self.process.poll() is None
        try:
            return httpx.get(f"http://127.0.0.1:{self.port}/healthz", trust_env=False).is_success
        except httpx.HTTPError:
            return False

    def send(self, message: tuple[bytes, dict[str, str]]) -> Any:
        answer = httpx.post(
            f"http://127.0.0.1:{self.port}/webhook", content=message[0], headers=message[1], trust_env=False
        )
        assert answer.status_code == 202
        return answer.json()

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None

    def stop(self) -> int:
        assert self.process is not None
        self.process.terminate()
        code = self.process.wait(DEADLINE_S)
        self.process = None
        return code


@pytest.fixture
def sidecar(tmp_path: Path, service: Service, secret: str) -> Iterator[Sidecar]:
    made = Sidecar(tmp_path, service, secret)
    yield made
    made.kill()


def test_killed_again_and_again_it_saves_once_and_tells_once(
    sidecar: Sidecar, service: Service, sign: Any
) -> None:
    service.status = 503  # the service cannot take an acknowledgement for now
    sidecar.start()
    first = sidecar.send(sign())
    sidecar.kill()
    sidecar.start()
    assert sidecar.send(sign()) == first  # a redelivery of the same webhook
    saves: list[int] = []

    def save() -> str:
        saves.append(1)
        return "/checkpoints/step-7"

    with Protector(sidecar.state, watch=False) as protector:
        for step in range(7, 10):
            protector.look()
            protector.step(step, save)
    sidecar.kill()
    sidecar.start()
    assert sidecar.send(sign()) == first
    with Protector(sidecar.state, watch=False) as protector:
        assert not protector.look()
    assert saves == [1]
    service.status = 200
    ended = ("POST", "/v1/protections/p1/ack")
    wait_for(
        lambda: [h for h in service.heard if h[:2] == ended and h[2]["state"] == "completed"], "the word"
    )
    assert sidecar.stop() == 0
    told = [body for method, path, body in service.heard if (method, path) == ended]
    assert [body["state"] for body in told] == ["accepted", "completed"]
    assert (told[1]["checkpoint"], told[1]["step"]) == ("/checkpoints/step-7", 7)
    registered = next(
        body for method, path, body in service.heard if (method, path) == ("PUT", "/v1/jobs/llm")
    )
    assert registered["nodes"] == ["n1"]
    assert registered["webhook"]["url"] == f"http://127.0.0.1:{sidecar.port}/webhook"


def test_secret_is_made_private_and_never_overwritten(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "webhook.secret"
    assert main(["controller", "--new-secret", str(path)]) == 0
    made = path.read_text()
    assert made.startswith("whsec_") and path.stat().st_mode & 0o077 == 0
    assert made.strip() not in capsys.readouterr().out
    assert main(["controller", "--new-secret", str(path)]) == 2
    assert "exists already" in capsys.readouterr().err
    assert path.read_text() == made


def test_missing_secret_names_the_way_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["controller", "--state", str(tmp_path / "s"), "--listen", "127.0.0.1:0"]) == 2
    said = capsys.readouterr().err
    assert "controller.secret_file" in said and "--new-secret" in said


def test_loop_in_any_language_reports_by_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    state = tmp_path / "state"
    mailbox = Mailbox(state)
    mailbox.accept("m1", SaveRequest(protection="p1"))
    assert (state / "save-requested").exists()
    assert main(["controller", "--state", str(state), "--report", "completed"]) == 2
    assert main(["controller", "--state", str(state), "--report", "failed"]) == 2
    done = ["--report", "completed", "--checkpoint", "/c/9", "--step", "9", "--seconds", "1.5"]
    assert main(["controller", "--state", str(state), *done]) == 0
    assert "1 request(s)" in capsys.readouterr().out
    assert not (state / "save-requested").exists()
    assert mailbox.undelivered()[-1].body == {
        "state": "completed",
        "checkpoint": "/c/9",
        "step": 9,
        "duration_seconds": 1.5,
    }
    mailbox.close()
