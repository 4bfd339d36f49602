"""What a step costs the training loop: idle, and with its progress told to an agent that listens."""

from __future__ import annotations

import socket
import tempfile
import time
from collections.abc import Callable
from typing import Any

from forewarn.collectors.training import ProgressSender
from forewarn.daemon.controller import Progress
from forewarn.daemon.controller.protector import Protector

CALLS = 50_000
ROUNDS = 5
IDLE_BUDGET_US = 5.0
PROGRESS_BUDGET_US = 20.0


def microseconds(call: Callable[[int], object]) -> float:
    """Of one call; the best of several rounds, since the machine does other things as well."""
    best = float("inf")
    for _ in range(ROUNDS):
        began = time.perf_counter()
        for step in range(CALLS):
            call(step)
        best = min(best, time.perf_counter() - began)
    return best / CALLS * 1e6


def row(name: str, value: float, floor: float, budget: float) -> dict[str, Any]:
    return {
        "name": name,
        "value": round(value, 3),
        "unit": "us a step",
        "floor": round(floor, 3),
        "ratio": round(value / floor, 2),
        "budget": budget,
        "met": value < budget,
    }


def save() -> str:
    raise AssertionError("nobody asks for a save here")


def run() -> list[dict[str, Any]]:
    floor = microseconds(lambda step: None)
    with tempfile.TemporaryDirectory() as folder:
        with Protector(folder) as protector:
            idle = microseconds(lambda step: protector.step(step, save))
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as agent:
            agent.bind(b"")
            agent.setblocking(False)
            name = "@" + agent.getsockname()[1:].decode()
            sender = ProgressSender(name)
            with Protector(folder, progress=sender, job="llm", rank=1) as protector:
                telling = microseconds(lambda step: (protector.step(step, save), _take(agent)))
            progress = Progress("llm", 1, path=name)
            lines = microseconds(lambda step: _tell(progress, step, agent))
            progress.close()
            _take(agent)  # its goodbye
            raw = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
            raw.setblocking(False)
            address = agent.getsockname()
            message = b"x" * 40
            bare = microseconds(lambda step: (raw.sendto(message, address), _take(agent)))
            raw.close()
    return [
        row("protector: idle step (floor: an empty call)", idle, floor, IDLE_BUDGET_US),
        row(
            "protector: step told to the agent (floor: bare sendto, recv)", telling, bare, PROGRESS_BUDGET_US
        ),
        row("progress: step with loss told to the agent (same floor)", lines, bare, PROGRESS_BUDGET_US),
    ]


def _tell(progress: Progress, step: int, agent: socket.socket) -> None:
    progress.step(step, loss=2.5, samples=64)
    _take(agent)


def _take(agent: socket.socket) -> bytes:
    """Keep the queue empty, as a listening agent does; part of both figures."""
    return agent.recv(4096)
