"""Snapshots of the fleet and of what has been applied, each with the log segment up to which it reaches.

Two are kept: a damaged one falls back to the one before, and the log still holds what came after that.
"""

from __future__ import annotations

import contextlib
import shutil
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec
import structlog

from forewarn.collectors.clock import Clock
from forewarn.collectors.errors import StorageError
from forewarn.daemon.service.intake import NodeState, Sequences
from forewarn.daemon.service.journal import sync_folder
from forewarn.daemon.service.progress import JobsProgress
from forewarn.models import snapshot
from forewarn.models.fleet import Fleet
from forewarn.models.registry import RiskModel

KEPT = 2
STATE_NAME = "service.state"

_log = structlog.get_logger("forewarn.service")


@dataclass
class Restored:
    """What a service starts from. `number`: the last log segment that is in it; 0: none."""

    number: int
    fleet: Fleet
    sequences: Sequences
    nodes: dict[str, NodeState]
    jobs: JobsProgress


class SnapshotFolder:
    """Numbered folders, written aside and renamed when whole."""

    def __init__(
        self, folder: Path, clock: Clock, interval_s: float, on_saved: Callable[[], None] = lambda: None
    ) -> None:
        self._folder, self._clock, self._interval_s, self._on_saved = folder, clock, interval_s, on_saved
        self._last = clock.monotonic()
        self._lock = threading.Lock()
        self.last_duration_s = 0.0

    def due(self, now: float) -> bool:
        return now - self._last >= self._interval_s

    def numbers(self) -> list[int]:
        """Numbers of the whole snapshots, rising."""
        return sorted(int(p.name) for p in self._folder.glob("[0-9]*") if p.is_dir())

    def oldest_needed(self) -> int:
        """All log segments up to this one are in every snapshot that may still be loaded."""
        numbers = self.numbers()
        return numbers[0] if len(numbers) >= KEPT else 0

    def save(
        self,
        number: int,
        fleet: Fleet,
        sequences: Sequences,
        nodes: Mapping[str, NodeState],
        jobs: JobsProgress,
    ) -> None:
        """Write one that holds all up to segment `number`. Raises StorageError."""
        began = self._last = self._clock.monotonic()
        target = self._folder / f"{number:012d}"
        if number <= 0 or target.exists():
            return
        aside = self._folder / f".{number:012d}.part"
        try:
            shutil.rmtree(aside, ignore_errors=True)
            aside.mkdir(parents=True)
            fleet.save(aside / "fleet")
            header = {
                "number": number,
                "sequences": sequences.plain(),
                "nodes": {name: msgspec.to_builtins(node) for name, node in nodes.items()},
                "jobs": jobs.plain(),
            }
            snapshot.write(aside / STATE_NAME, header, {})
            sync_folder(aside / "fleet")
            sync_folder(aside)
            aside.rename(target)
            sync_folder(self._folder)
        except OSError as error:
            shutil.rmtree(aside, ignore_errors=True)
            raise StorageError(f"{target}: the snapshot could not be written: {error}") from error
        except StorageError:
            shutil.rmtree(aside, ignore_errors=True)
            raise
        for old in self.numbers()[:-KEPT]:
            shutil.rmtree(self._folder / f"{old:012d}", ignore_errors=True)
        self.last_duration_s = self._clock.monotonic() - began
        _log.debug("snapshot_saved", number=number, seconds=round(self.last_duration_s, 3))
        self._on_saved()

    def load(self, models: Mapping[str, RiskModel | None]) -> Restored:
        """The newest that is whole, or an empty fleet. A damaged one is set aside and said."""
        for leftover in self._folder.glob(".*.part"):
            shutil.rmtree(leftover, ignore_errors=True)
        for number in reversed(self.numbers()):
            folder = self._folder / f"{number:012d}"
            try:
                return self._load_one(folder, number, models)
            except StorageError as error:
                _log.error(
                    "snapshot_damaged", folder=str(folder), reason=str(error), remedy="an older one is used"
                )
                with contextlib.suppress(OSError):
                    aside = self._folder / f"damaged-{number:012d}"
                    shutil.rmtree(aside, ignore_errors=True)
                    folder.rename(aside)
        return Restored(0, Fleet(models), Sequences(), {}, JobsProgress())

    def _load_one(self, folder: Path, number: int, models: Mapping[str, RiskModel | None]) -> Restored:
        header, _ = snapshot.read(folder / STATE_NAME)
        try:
            nodes = msgspec.convert(header["nodes"], dict[str, NodeState])
            sequences = Sequences.of(msgspec.convert(header["sequences"], dict[str, dict[str, int]]))
        except (KeyError, msgspec.ValidationError) as error:
            raise StorageError(f"{folder / STATE_NAME}: not understood: {error}") from error
        jobs = JobsProgress.of(header["jobs"]) if "jobs" in header else JobsProgress()
        return Restored(number, Fleet.load(folder / "fleet", models), sequences, nodes, jobs)
