"""Programs are stopped at their limit with all that they started, and what they print is bounded."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from forewarn.collectors import smart_process
from forewarn.collectors.smart_process import Runner

PATIENCE_S = 20.0


def wait_until(holds: Callable[[], bool]) -> None:
    until = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < until, "it never came to be"
        time.sleep(0.01)


def gone(pid: int) -> bool:
    try:
        return (Path("/proc") / str(pid) / "stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def test_output_errors_and_exit_status() -> None:
    answer = Runner().run(["sh", "-c", "echo out; echo err >&2; exit 216"], PATIENCE_S)
    assert (answer.output, answer.errors, answer.exit_status) == (b"out\n", b"err\n", 216)
    assert not answer.timed_out and answer.left is None


def test_language_is_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LC_ALL", "de_DE.UTF-8")
    assert Runner().run(["sh", "-c", "echo $LC_ALL $LANG"], PATIENCE_S).output == b"C C\n"


def test_standard_input_is_given_or_empty() -> None:
    assert Runner().run(["cat"], PATIENCE_S).output == b""
    given = b"x" * 300_000  # more than a pipe holds
    assert Runner().run(["cat"], PATIENCE_S, given).output == given


def test_a_child_of_a_child_is_stopped_too(tmp_path: Path) -> None:
    answer = Runner().run(["sh", "-c", f"sleep 600 & echo $! > {tmp_path}/pid; wait"], 0.5)
    assert answer.timed_out and answer.left is None
    wait_until(lambda: gone(int((tmp_path / "pid").read_text())))


def test_a_child_that_keeps_the_pipe_open_is_not_waited_for(tmp_path: Path) -> None:
    answer = Runner().run(["sh", "-c", f"sleep 600 & echo $! > {tmp_path}/pid; echo done"], 500)
    os.kill(int((tmp_path / "pid").read_text()), 9)
    assert (answer.output, answer.timed_out) == (b"done\n", False)


def test_output_without_end_is_cut() -> None:
    answer = Runner().run(["yes"], PATIENCE_S)
    assert (
        answer.cut
        and smart_process.MAX_OUTPUT_BYTES < len(answer.output) < 2 * smart_process.MAX_OUTPUT_BYTES
    )


def test_a_program_that_is_not_there_is_a_problem() -> None:
    answer = Runner().run(["/nowhere/smartctl"], PATIENCE_S)
    assert answer.missing and "nowhere" in answer.problem


def test_closing_stops_what_runs(tmp_path: Path) -> None:
    runner = Runner()
    answers: list[smart_process.Answer] = []
    command = ["sh", "-c", f"echo $$ > {tmp_path}/pid; exec sleep 600"]
    thread = threading.Thread(target=lambda: answers.append(runner.run(command, 500)))
    thread.start()
    wait_until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text().strip() != "")
    runner.close()
    thread.join(PATIENCE_S)
    assert answers and not answers[0].timed_out
    assert runner.run(["true"], PATIENCE_S).problem
