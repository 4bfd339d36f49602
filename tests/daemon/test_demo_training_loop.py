"""The example job as its own process beside a real controller: saved on a webhook, killed, resumed."""

from __future__ import annotations

import base64
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import pytest
from standardwebhooks import Webhook

from forewarn.daemon.config import ControllerConfig
from forewarn.daemon.controller.sidecar import Controller
from forewarn.daemon.demo import network

DEADLINE_S = 60.0
SECRET = "whsec_" + base64.b64encode(b"a secret of thirty-two bytes, ok").decode()


def wait_for(condition: Callable[[], Any], what: str) -> Any:
    """Wait until a condition holds; real processes need real time."""
    end = time.monotonic() + DEADLINE_S
    while time.monotonic() < end:
        value = condition()
        if value:
            return value
        threading.Event().wait(0.02)
    raise AssertionError(f"{what} did not happen within {DEADLINE_S:g} s")


@pytest.fixture
def settings(tmp_path: Path) -> ControllerConfig:
    secret = tmp_path / "secret"
    secret.write_text(SECRET)
    return ControllerConfig(
        listen="127.0.0.1:0",
        job="llm",
        service_url="http://127.0.0.1:9",  # nobody listens there: acknowledgements have to wait
        secret_file=str(secret),
        state=str(tmp_path / "state"),
    )


class Loop:
    """The training loop as a process."""

    def __init__(self, state: Path, folder: Path, *more: str) -> None:
        words = [sys.executable, "-m", "forewarn.daemon.demo.training_loop"]
        words += ["--state", str(state), "--checkpoints", str(folder), "--step-seconds", "0.005", *more]
        self.process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
        self.lines: list[dict[str, Any]] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(json.loads(line))

    def first(self, event: str) -> dict[str, Any] | None:
        return next((line for line in list(self.lines) if line["event"] == event), None)

    def end(self, kill: bool = False) -> int:
        if kill:
            self.process.kill()
        else:
            self.process.terminate()
        code = self.process.wait(DEADLINE_S)
        self._reader.join(DEADLINE_S)
        assert self.process.stdout is not None
        self.process.stdout.close()
        return code


@pytest.fixture
def loops() -> Iterator[list[Loop]]:
    started: list[Loop] = []
    yield started
    for loop in started:
        if loop.process.poll() is None:
            loop.end(kill=True)


def send(url: str, identity: str, protection: str) -> dict[str, Any]:
    body = json.dumps({"id": identity, "data": {"protection": protection, "job": "llm"}})
    now = datetime.now(tz=UTC)
    headers = {
        "webhook-id": identity,
        "webhook-timestamp": str(int(now.timestamp())),
        "webhook-signature": Webhook(SECRET).sign(identity, now, body),
    }
    answer = httpx.post(url, content=body, headers=headers, trust_env=False)
    assert answer.status_code == 202
    content: dict[str, Any] = answer.json()
    return content


def test_saved_on_a_webhook_then_killed_and_resumed(
    settings: ControllerConfig, tmp_path: Path, loops: list[Loop]
) -> None:
    state, folder = Path(settings.state), tmp_path / "checkpoints"
    with Controller(settings) as controller:
        loop = Loop(state, folder)
        loops.append(loop)
        wait_for(lambda: loop.first("started"), "the start of the loop")
        answer = send(controller.url, "msg_1", "p1")
        assert answer["decision"] == "accepted"
        wait_for(lambda: controller.mailbox.state_of("p1") == "completed", "the save")
        saved = wait_for(lambda: loop.first("saved"), "the word of the save")
        assert saved["protections"] == ["p1"]
        assert network.load(Path(saved["checkpoint"])).step == saved["step"] > 0
        assert send(controller.url, "msg_1", "p1") == answer
        loop.end(kill=True)
        # The next request comes while the job is down; it is kept, and served by the restarted job.
        assert send(controller.url, "msg_2", "p2")["decision"] == "accepted"
        again = Loop(state, folder)
        loops.append(again)
        wait_for(lambda: controller.mailbox.state_of("p2") == "completed", "the save after the restart")
        resumed = again.first("resumed")
        assert resumed is not None and resumed["step"] >= saved["step"]
        assert again.end() == 0
        told = [(m.protection, m.body["state"]) for m in controller.mailbox.undelivered()]
    assert told == [("p1", "accepted"), ("p1", "completed"), ("p2", "accepted"), ("p2", "completed")]
    assert not list(folder.glob("*.part"))


def test_unreadable_checkpoint_is_passed_over_for_the_one_before(tmp_path: Path, loops: list[Loop]) -> None:
    folder = tmp_path / "checkpoints"
    job = network.start()
    network.train_step(job)
    network.save(job, folder)
    (folder / "step-00000009.npz").write_bytes(b"torn")
    loop = Loop(tmp_path / "state", folder, "--steps", "3")
    loops.append(loop)
    assert loop.process.wait(DEADLINE_S) == 0
    loop.end()
    assert [line["event"] for line in loop.lines][:3] == ["unreadable", "resumed", "started"]
    assert loop.lines[1]["step"] == 1
    assert loop.lines[-1] == {"event": "stopped", "step": 3}
