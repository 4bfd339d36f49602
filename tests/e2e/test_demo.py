"""`forewarn demo` as a user runs it: to the end, cut short, killed, and on a port that is taken."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from forewarn.daemon.demo import network
from forewarn.daemon.demo.story import STEPS
from forewarn.models.registry import bundled_path, load_all

DEADLINE_S = 150.0


def wait_for(condition: Callable[[], Any], what: str, deadline_s: float = DEADLINE_S) -> Any:
    end = time.monotonic() + deadline_s
    while time.monotonic() < end:
        value = condition()
        if value:
            return value
        threading.Event().wait(0.05)
    raise AssertionError(f"{what} did not happen within {deadline_s:g} s")


@pytest.fixture
def port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        found: int = probe.getsockname()[1]
    return found


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """Temporary folders of the demo go where the test can look for leftovers."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith("FOREWARN_")}
    (tmp_path / "tmp").mkdir()
    return kept | {"TMPDIR": str(tmp_path / "tmp")}


def command(port: int, *words: str) -> list[str]:
    return [sys.executable, "-m", "forewarn.daemon.cli", "demo", "--port", str(port), *words]


def leftovers(environment: dict[str, str]) -> list[str]:
    return [p.name for p in Path(environment["TMPDIR"]).glob("forewarn-demo-*")]


def test_once_protects_the_job_and_says_when(port: int, environment: dict[str, str], tmp_path: Path) -> None:
    data = tmp_path / "kept"
    made = subprocess.run(
        command(port, "--once", "--data", str(data)),
        env=environment,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S + 60,
        check=False,
    )
    assert made.returncode == 0, made.stderr
    summary = json.loads(made.stdout)
    assert summary["done"] and summary["missing"] == [] and summary["simulated_fleet"] is True
    steps = summary["steps"]
    assert set(STEPS) <= set(steps)
    at = {name: step["at_seconds"] for name, step in steps.items()}
    assert at["service_ready"] < at["wear_begun"] < at["risk_raised"] <= at["protection_made"] < 120
    before = "fatal_event" not in at or at["checkpoint_saved"] < at["fatal_event"]
    assert summary["checkpoint_before_fatal_event"] is before
    if load_all(bundled_path()).get("gpu") is not None:  # rules alone know only what has happened
        assert before, "the model did not see the wear in time"
    assert steps["risk_raised"]["device"] == summary["device"] == steps["protection_made"]["device"]
    assert steps["risk_raised"]["reason"]
    # What it says of the checkpoint is true: the file is there, of that step, and training goes on from it.
    job = network.load(Path(steps["checkpoint_saved"]["checkpoint"]))
    assert job.step == steps["checkpoint_saved"]["step"] == steps["acknowledged"]["step"]
    simulated = [line for line in made.stderr.splitlines() if "sim-" in line and "registered" not in line]
    assert simulated and all("simulated" in line for line in simulated)
    assert "[simulated]" not in next(line for line in made.stderr.splitlines() if "this host" in line)


@pytest.fixture
def demo(port: int, environment: dict[str, str]) -> Iterator[subprocess.Popen[str]]:
    started = subprocess.Popen(command(port), env=environment, stdout=subprocess.PIPE, text=True)
    yield started
    if started.poll() is None:
        started.terminate()
        started.wait(60)
    assert started.stdout is not None
    started.stdout.close()


def parts_of(demo: subprocess.Popen[str], least: int) -> list[psutil.Process]:
    def found() -> list[psutil.Process]:
        assert demo.poll() is None
        children = psutil.Process(demo.pid).children(recursive=True)
        return children if len(children) >= least else []

    result: list[psutil.Process] = wait_for(found, f"{least} parts")
    return result


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ends_cleanly_when_asked(
    demo: subprocess.Popen[str], environment: dict[str, str], number: int
) -> None:
    parts = parts_of(demo, 5)
    demo.send_signal(number)
    assert demo.wait(90) == 0
    assert [part for part in parts if part.is_running() and part.status() != psutil.STATUS_ZOMBIE] == []
    assert leftovers(environment) == []


@pytest.mark.slow
def test_killed_demo_leaves_no_process_behind(demo: subprocess.Popen[str]) -> None:
    parts = parts_of(demo, 5)
    demo.kill()
    demo.wait(30)
    _, alive = psutil.wait_procs(parts, timeout=60)
    assert alive == []


def test_taken_port_says_what_to_do(port: int, environment: dict[str, str]) -> None:
    with socket.create_server(("127.0.0.1", port)):
        made = subprocess.run(
            command(port, "--once"), env=environment, capture_output=True, text=True, timeout=60, check=False
        )
    assert made.returncode == 2
    assert f"127.0.0.1:{port} is in use" in made.stderr
    assert f"forewarn demo --port {port + 100}" in made.stderr
    assert leftovers(environment) == []


def test_folder_of_an_earlier_demo_is_not_mixed_with_a_new_one(
    port: int, environment: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / "demo.toml").write_text("")
    made = subprocess.run(
        command(port, "--once", "--data", str(tmp_path)),
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert made.returncode == 2
    assert "holds an earlier demo" in made.stderr
