"""A training loop that tells of its steps, a real agent and a real service: the slow rank's GPU is named by itself.

The loop is a process of its own with eight ranks in step; each rank's work is real, one rank has more of it. The GPUs'
driver is the simulated one.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from simnvml import build
from simnvml.control import SimulatedDriver
from support.deployment import Deployment, deployment, wait_for

NODE = "gpu-node-000"
RANKS = 8
SLOW = 5
LOOP = f"""
import sys, time
from forewarn.daemon.controller import Progress

ranks = [Progress("llama", rank, gpu=f"gpu{{rank}}", path=sys.argv[1]) for rank in range({RANKS})]

def work(times):
    began = time.perf_counter()
    for _ in range(times):
        sum(range(20_000))
    return time.perf_counter() - began

step = 0
while True:
    step += 1
    own = [work(4 if rank == {SLOW} else 1) for rank in range({RANKS})]
    for progress, seconds in zip(ranks, own):  # all wait for the slowest, as in a collective
        progress.step(step, loss=2.0, samples=8, compute=seconds)
"""

pytestmark = pytest.mark.skipif(bool(build.missing()), reason=build.missing() or "gcc is there")


@pytest.fixture
def forewarn(tmp_path: Path) -> Iterator[Deployment]:
    driver = SimulatedDriver(tmp_path / "driver", gpus=RANKS, profile="H100")
    settings = (
        f'[agent.collectors.nvml]\ninterval_s = 1.0\noptions = {{ library = "{driver.library}" }}\n'
        f'[agent.collectors.training]\ninterval_s = 0.3\noptions = {{ path = "{_socket()}", folder = "" }}\n'
    )
    with deployment(tmp_path) as running:
        running.start_service()
        running.start_agent(NODE, settings)
        yield running


@pytest.fixture
def loop() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", LOOP, _socket()])
    yield process
    process.kill()
    process.wait()


def _socket() -> str:
    return f"@forewarn-e2e-{os.getpid()}"


def test_the_gpu_of_a_slow_rank_is_named_and_an_abrupt_end_is_no_hang(
    forewarn: Deployment, loop: subprocess.Popen[bytes]
) -> None:
    gpu = f"{NODE}/gpu{SLOW}"

    def progress() -> Any:
        items = forewarn.get("/v1/progress", job="llama")["items"]
        return items[0] if items else None

    found = wait_for(
        lambda: (p := progress()) and p["finding"] == "straggler" and gpu in p["devices"] and p,
        "the slow rank to stand out",
    )
    assert found["ranks"] == RANKS
    assert found["step"] > 0
    assert found["loss"] == 2.0
    assert f"rank {SLOW} on {NODE} computes" in found["reason"]

    def event() -> Any:
        return [e for e in forewarn.items("/v1/events", kind="job_straggler") if e["device"] == gpu]

    assert wait_for(event, "the event")[0]["severity"] == "warning"
    alert = wait_for(lambda: forewarn.items("/v1/alerts", job="llama"), "the alert")[0]
    assert alert["key"] == "progress:llama"

    def reasons() -> Any:
        return [
            r["text"]
            for r in forewarn.get(f"/v1/risk/{gpu}")["reasons"]
            if "longer than its peers" in r["text"]
        ]

    wait_for(reasons, "the reason in the GPU's risk")
    assert forewarn.items("/v1/protections") == []

    loop.send_signal(signal.SIGKILL)
    loop.wait()

    def ended() -> Any:
        found = forewarn.items("/v1/events", kind="job_ended")
        return found if len(found) == RANKS else None

    assert {e["code"] for e in wait_for(ended, "the ranks that died to be told")} == {"unannounced"}
    assert not forewarn.items("/v1/events", kind="job_stalled")
