"""Runs one program for a bounded time and takes a bounded answer. Nothing here can wait for ever.

A program that hangs in the kernel cannot be killed: it is left behind, and whoever asked keeps it in mind.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import dataclass

from forewarn.collectors.clock import SystemClock

MAX_OUTPUT_BYTES = 4 * 1024 * 1024
MAX_STDERR_BYTES = 64 * 1024
KILL_WAIT_S = 0.5
EXIT_POLL_S = 0.2
"""How often it is looked whether a program ended while a child of its own still holds the pipe."""


@dataclass(frozen=True)
class Answer:
    """What a program printed. `timed_out` when it was stopped at its time limit, `cut` when it printed too much,
    `left` the process that even a kill did not end, `problem` why it could not be started."""

    output: bytes = b""
    errors: bytes = b""
    exit_status: int = 0
    timed_out: bool = False
    cut: bool = False
    left: subprocess.Popen[bytes] | None = None
    problem: str = ""
    missing: bool = False


class Runner:
    """Starts programs, each in a session of its own, and can stop them all. Safe from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: set[subprocess.Popen[bytes]] = set()
        self._closed = False
        self._clock = SystemClock()  # a real process lives in real time, whatever clock a test uses

    def run(self, command: Sequence[str], timeout_s: float, given: bytes = b"") -> Answer:
        """The answer of `command` after at most `timeout_s` and a second. `given` is its standard input."""
        if not given:
            return self._run(command, timeout_s, subprocess.DEVNULL)
        with tempfile.TemporaryFile() as file:  # a file, so that a child that does not read cannot block us
            file.write(given)
            file.seek(0)
            return self._run(command, timeout_s, file.fileno())

    def _run(self, command: Sequence[str], timeout_s: float, stdin: int) -> Answer:
        environment = {**os.environ, "LC_ALL": "C", "LANG": "C"}
        with self._lock:
            if self._closed:
                return Answer(problem="the collector is closed")
            try:
                process = subprocess.Popen(
                    list(command),
                    stdin=stdin,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    start_new_session=True,
                    env=environment,
                )
            except (FileNotFoundError, NotADirectoryError) as error:
                return Answer(problem=str(error), missing=True)
            except (OSError, ValueError) as error:
                return Answer(problem=str(error))
            self._running.add(process)
        try:
            return self._listen(process, timeout_s)
        finally:
            with self._lock:
                self._running.discard(process)

    def close(self) -> None:
        """Stop what still runs; nothing more is started."""
        with self._lock:
            self._closed = True
            running = list(self._running)
        for process in running:
            _kill(process)

    def _listen(self, process: subprocess.Popen[bytes], timeout_s: float) -> Answer:
        assert process.stdout is not None and process.stderr is not None
        until = self._clock.monotonic() + timeout_s
        taken = {process.stdout.fileno(): bytearray(), process.stderr.fileno(): bytearray()}
        limits = dict(zip(taken, (MAX_OUTPUT_BYTES, MAX_STDERR_BYTES), strict=True))
        out, err = taken
        timed_out = cut = False
        with selectors.DefaultSelector() as selector, process.stdout, process.stderr:
            for descriptor in taken:
                selector.register(descriptor, selectors.EVENT_READ)
            while selector.get_map():
                left_s = until - self._clock.monotonic()
                if left_s <= 0:
                    timed_out = True
                    break
                ready = selector.select(min(left_s, EXIT_POLL_S))
                if not ready and process.poll() is not None:
                    break  # it ended; a child that outlives it keeps the pipe open
                for key, _ in ready:
                    descriptor = key.fd
                    data = os.read(descriptor, 65536)
                    taken[descriptor] += data
                    if not data:
                        selector.unregister(descriptor)
                    elif len(taken[descriptor]) > limits[descriptor]:
                        cut = True
                if cut:
                    break
            if not timed_out and not cut:
                timed_out = not _ended(process, max(until - self._clock.monotonic(), 0.0))
            alive = False
            if timed_out or cut:
                _kill(process)
                alive = not _ended(process, KILL_WAIT_S)
        return Answer(
            output=bytes(taken[out]),
            errors=bytes(taken[err]),
            exit_status=process.returncode or 0,
            timed_out=timed_out,
            cut=cut,
            left=process if alive else None,
        )


def _kill(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)


def _ended(process: subprocess.Popen[bytes], timeout_s: float) -> bool:
    try:
        process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        return False
    return True
