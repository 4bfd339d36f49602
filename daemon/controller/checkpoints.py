"""Checkpoint files on disk: written whole or not at all, found and pruned by step."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from forewarn.collectors.errors import StorageError

_STEP_PATTERN = re.compile(r"step-(\d+)\.")


def write_whole(path: Path, write: Callable[[BinaryIO], object]) -> Path:
    """Write a file by `write(stream)`: first under another name, then to disk, then renamed.

    A crash at any point leaves the previous file, or the new one, never a part. Raises StorageError.
    """
    part = path.with_name(path.name + ".part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with part.open("wb") as stream:
            write(stream)
            stream.flush()
            os.fsync(stream.fileno())
        part.replace(path)
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    except OSError as error:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)
        raise StorageError(f"{path}: the checkpoint cannot be written: {error}") from error
    return path


def path_of(folder: Path, step: int, suffix: str) -> Path:
    """`FOLDER/step-00000042.SUFFIX`, so that names sort by step."""
    return folder / f"step-{step:08d}.{suffix}"


def complete_ones(folder: Path) -> list[Path]:
    """Complete checkpoints, newest step first. Leftovers of interrupted writes are not among them."""
    found = []
    for path in folder.glob("step-*"):
        match = _STEP_PATTERN.match(path.name)
        if match and not path.name.endswith(".part"):
            found.append((int(match.group(1)), path))
    return [path for _, path in sorted(found, reverse=True)]


def prune(folder: Path, keep: int) -> list[Path]:
    """Remove all but the newest `keep`; returns what was removed. What cannot be removed stays."""
    removed = []
    for path in complete_ones(folder)[keep:]:
        with contextlib.suppress(OSError):
            path.unlink()
            removed.append(path)
    return removed
