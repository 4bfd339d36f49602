"""Progress from a training loop: times, marks, ranks by the environment, and no trouble without an agent."""

from __future__ import annotations

import math
import socket
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from forewarn.collectors.clock import ManualClock
from forewarn.collectors.training import Step, decode
from forewarn.daemon.controller import Progress
from forewarn.daemon.controller.progress import gpu_of, job_of


class Agent:
    """The agent's end of the socket: an address of the kernel's choice, without a file."""

    def __init__(self) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        self._socket.bind(b"")
        self.path = "@" + self._socket.getsockname()[1:].decode()

    def told(self) -> list[Step]:
        found = []
        while True:
            try:
                found.append(decode(self._socket.recv(4096)))
            except BlockingIOError:
                return found

    def close(self) -> None:
        self._socket.close()


@pytest.fixture
def agent() -> Iterator[Agent]:
    made = Agent()
    yield made
    made.close()


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


def _progress(agent: Agent, clock: ManualClock, **fields: Any) -> Progress:
    fields.setdefault("environment", {})
    return Progress("llama", 3, path=agent.path, clock=clock, **fields)


def test_the_time_of_a_step_runs_from_the_end_of_the_one_before(agent: Agent, clock: ManualClock) -> None:
    with _progress(agent, clock, role="first", gpu="gpu3", world_size=16) as progress:
        progress.step(10)
        clock.advance(1.5)
        progress.computed()
        clock.advance(0.5)
        progress.step(11, loss=2.5, samples=64)
        clock.advance(4.0)
        progress.step(12, seconds=3.0, compute=2.0)
    first, second, third, last = agent.told()
    assert (first.step, first.seconds, first.compute) == (10, None, None)
    assert second == Step(
        step=11,
        job="llama",
        rank=3,
        seconds=2.0,
        compute=1.5,
        samples_per_second=32.0,
        loss=2.5,
        gpu="gpu3",
        role="first",
        world_size=16,
    )
    assert (third.seconds, third.compute, third.samples_per_second) == (3.0, 2.0, None)
    assert (last.done, last.step) == (True, 12)


def test_what_is_marked_is_no_part_of_a_step(agent: Agent, clock: ManualClock) -> None:
    progress = _progress(agent, clock)
    progress.step(1)
    clock.advance(1.0)
    with progress.marked("checkpoint"):
        clock.advance(100.0)
    clock.advance(1.0)
    progress.step(2)
    progress.begin("evaluation")
    clock.advance(30.0)  # and nobody calls end: the next step does
    progress.step(3)
    _, begin, second, evaluation, third = agent.told()
    assert (begin.step, begin.mark, begin.seconds) == (1, "checkpoint", None)
    assert (second.seconds, second.mark) == (2.0, "")
    assert evaluation.mark == "evaluation"
    assert third.seconds == 0.0
    progress.close()


def test_the_mark_ends_also_when_the_save_fails(agent: Agent, clock: ManualClock) -> None:
    progress = _progress(agent, clock)
    progress.step(1)
    with pytest.raises(OSError, match="full"), progress.marked("checkpoint"):
        clock.advance(9.0)
        raise OSError("full")
    clock.advance(2.0)
    progress.step(2)
    assert agent.told()[-1].seconds == 2.0
    progress.close()


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_bad_losses_are_said_to_be_bad(agent: Agent, clock: ManualClock, loss: float) -> None:
    progress = _progress(agent, clock)
    progress.step(1, loss=loss)
    assert agent.told()[0].loss_bad
    progress.close()


def test_without_an_agent_nothing_happens(clock: ManualClock) -> None:
    with Progress(path="@forewarn-test-nobody-listens", clock=clock, environment={}) as progress:
        progress.step(1)
        assert progress.dropped == 1


@pytest.mark.parametrize(
    ("environment", "rank", "world"),
    [
        ({"RANK": "5", "WORLD_SIZE": "8", "SLURM_PROCID": "1"}, 5, 8),
        ({"SLURM_PROCID": "7", "SLURM_NTASKS": "64"}, 7, 64),
        ({"OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_SIZE": "4"}, 2, 4),
        ({"RANK": "what"}, 0, 0),
        ({}, 0, 0),
    ],
)
def test_the_rank_comes_from_the_launcher(environment: dict[str, str], rank: int, world: int) -> None:
    progress = Progress(path="@x", environment=environment)
    assert (progress.rank, progress.world_size) == (rank, world)
    progress.close()


@pytest.mark.parametrize(
    ("environment", "job"),
    [
        ({"FOREWARN_JOB": "llama", "SLURM_JOB_ID": "12"}, "llama"),
        ({"SLURM_JOB_ID": "12"}, "slurm-12"),
        ({}, ""),
    ],
)
def test_the_job_comes_from_the_environment(environment: dict[str, str], job: str) -> None:
    assert job_of(environment) == job


@pytest.mark.parametrize(
    ("environment", "gpu"),
    [
        ({"LOCAL_RANK": "3"}, "gpu3"),
        ({"LOCAL_RANK": "1", "CUDA_VISIBLE_DEVICES": "4,6"}, "gpu6"),
        ({"LOCAL_RANK": "5", "CUDA_VISIBLE_DEVICES": "2"}, "gpu2"),
        ({"SLURM_LOCALID": "0", "CUDA_VISIBLE_DEVICES": "GPU-5151fa7e"}, "GPU-5151fa7e"),
        ({"CUDA_VISIBLE_DEVICES": "7"}, "gpu7"),
        ({"CUDA_VISIBLE_DEVICES": "0,1"}, ""),
        ({"LOCAL_RANK": "2", "CUDA_VISIBLE_DEVICES": "0,1"}, ""),
        ({}, ""),
    ],
)
def test_the_gpu_comes_from_the_environment_or_stays_unknown(environment: dict[str, str], gpu: str) -> None:
    assert gpu_of(environment) == gpu


def test_the_import_is_slim() -> None:
    script = "import sys; from forewarn.daemon.controller import Progress; print(*sys.modules)"
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    loaded = set(run.stdout.split())
    assert not loaded & {"structlog", "httpx", "numpy", "torch", "fastapi", "standardwebhooks"}
