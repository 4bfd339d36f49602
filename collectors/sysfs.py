"""Small reads of /proc and /sys: a value, or None for what is not there, is not allowed, or makes no sense."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path

MAX_READ_BYTES = 1_048_576
READ_BYTES = 65_536


def read_text(path: Path) -> str | None:
    """The stripped text of a small file, None when it cannot be read."""
    try:
        fd = os.open(
            path, os.O_RDONLY | os.O_CLOEXEC
        )  # a third of the cost of open(): hundreds are read a poll
    except (OSError, ValueError):
        return None
    try:
        parts = []
        size = 0
        while size < MAX_READ_BYTES and (part := os.read(fd, READ_BYTES)):
            parts.append(part)
            size += len(part)
        return b"".join(parts).decode("utf-8", "replace").strip()
    except OSError:
        return None
    finally:
        os.close(fd)


def read_number(path: Path) -> float | None:
    """The first number of a file (decimal, or 0x and hexadecimal), None when there is none."""
    text = read_text(path)
    return number(text.split(None, 1)[0]) if text else None


def number(word: str) -> float | None:
    """A finite number from a word, else None."""
    try:
        value = float(int(word, 16)) if word[:2].lower() == "0x" else float(word)
    except (ValueError, OverflowError):
        return None
    return value if math.isfinite(value) else None


def entries(path: Path, pattern: str = "*") -> list[Path]:
    """What lies under a folder, by name; empty when there is no such folder."""
    try:
        return sorted(path.glob(pattern))
    except OSError:
        return []


def pairs(text: str, separator: str = ":") -> Iterator[tuple[str, str]]:
    """`name: value` lines."""
    for line in text.splitlines():
        name, found, value = line.partition(separator)
        if found:
            yield name.strip(), value.strip()
