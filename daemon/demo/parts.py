"""The demo's processes: each in a group of its own with a log file, all of them ended when the demo ends."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from forewarn.collectors.errors import UnavailableError

STOP_TIMEOUT_S = 8.0
"""After this a part that was asked to end is killed."""
TAIL_LINES = 15
_PR_SET_PDEATHSIG = 1


class Part:
    """One process. Its output goes to `log`; lines of standard output also to `on_line`, from a thread."""

    def __init__(
        self,
        name: str,
        words: Sequence[str],
        log: Path,
        environment: Mapping[str, str],
        on_line: Callable[[str], None] | None = None,
    ) -> None:
        self.name = name
        self.log = log
        self._stream = log.open("ab")
        self._process = subprocess.Popen(
            [sys.executable, "-m", *words],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE if on_line else self._stream,
            stderr=self._stream,
            env=dict(environment),
            process_group=0,  # Ctrl-C reaches the demo alone, which then ends its parts in order
            preexec_fn=_die_with_parent(),  # noqa: PLW1509 - the call made there takes no lock
        )
        self._reader: threading.Thread | None = None
        if on_line:
            self._reader = threading.Thread(target=self._read, args=(on_line,), daemon=True)
            self._reader.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def ended(self) -> int | None:
        """The exit code, None while it runs."""
        return self._process.poll()

    def check(self) -> None:
        """Raises UnavailableError with the end of its log when it has ended."""
        code = self.ended()
        if code is not None:
            raise UnavailableError(
                f"demo: {self.name} ended by itself (exit code {code}); the end of {self.log}:\n{self.tail()}"
            )

    def tail(self) -> str:
        """The last lines of the log."""
        with contextlib.suppress(OSError):
            lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()
            return "\n".join(f"    {line}" for line in lines[-TAIL_LINES:]) or "    (empty)"
        return "    (unreadable)"

    def ask_to_stop(self) -> None:
        """SIGTERM to the whole group."""
        self._signal(signal.SIGTERM)

    def wait_stopped(self) -> None:
        """Wait for the end, killing the group when it takes too long."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(STOP_TIMEOUT_S)
        self._signal(signal.SIGKILL)  # also what a part may have left behind in its group
        self._process.wait()
        if self._reader is not None:
            self._reader.join(STOP_TIMEOUT_S)
        if self._process.stdout is not None:
            self._process.stdout.close()
        self._stream.close()

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, number)

    def _read(self, on_line: Callable[[str], None]) -> None:
        assert self._process.stdout is not None
        for raw in self._process.stdout:
            self._stream.write(raw)
            on_line(raw.decode("utf-8", errors="replace").rstrip("\n"))


def _die_with_parent() -> Callable[[], None] | None:
    """On Linux: have the kernel end a part when the demo itself is killed and cannot do it."""
    if not sys.platform.startswith("linux"):
        return None
    try:
        libc = ctypes.CDLL(None)
        prctl = libc.prctl
    except (OSError, AttributeError):
        return None

    def ask() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)

    return ask


class Parts:
    """All processes of the demo, stopped in the reverse order of their start."""

    def __init__(self, logs: Path) -> None:
        self._logs = logs
        self._all: list[Part] = []
        logs.mkdir(parents=True, exist_ok=True)

    def start(
        self,
        name: str,
        words: Sequence[str],
        environment: Mapping[str, str],
        on_line: Callable[[str], None] | None = None,
    ) -> Part:
        part = Part(name, words, self._logs / f"{name}.log", environment, on_line)
        self._all.append(part)
        return part

    def check(self) -> None:
        """Raises UnavailableError when one has ended by itself."""
        for part in self._all:
            part.check()

    def stop(self) -> None:
        """End all: first those that report, last the service."""
        for part in reversed(self._all):
            part.ask_to_stop()
            part.wait_stopped()
        self._all.clear()
