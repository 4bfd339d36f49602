"""What the agent itself costs: memory and CPU time of this process and the children it keeps, from /proc."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
TICK_S = 1 / os.sysconf("SC_CLK_TCK")


def children(pid: int | None = None) -> Iterator[int]:
    """Every live descendant of a process (default: this one)."""
    for task in _listed(Path(f"/proc/{pid or os.getpid()}/task")):
        try:
            found = (task / "children").read_text().split()
        except OSError:
            continue
        for child in map(int, found):
            yield child
            yield from children(child)


def _listed(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except OSError:
        return []


def resident_bytes(pid: int) -> int:
    """Memory of one process that is in RAM; 0 when it is gone."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE_BYTES
    except (OSError, IndexError, ValueError):
        return 0


def cpu_seconds(pid: int) -> float:
    """CPU time of one process and of its children that have ended; 0 when it is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return sum(int(ticks) for ticks in fields[11:15]) * TICK_S
    except (OSError, IndexError, ValueError):
        return 0.0


def total() -> tuple[int, float]:
    """Resident bytes and CPU seconds of this process with all its descendants."""
    pids = [os.getpid(), *children()]
    return sum(map(resident_bytes, pids)), sum(map(cpu_seconds, pids))


def kill_children() -> None:
    """End every descendant that is left; for the end of the program."""
    for pid in list(children()):
        try:
            os.kill(pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            continue
