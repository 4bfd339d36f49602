"""Small reads of /proc and /sys: a value, or None for what is not there, is not allowed, or makes no sense."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

MAX_READ_BYTES = 1_048_576


def read_text(path: Path) -> str | None:
    """The stripped text of a small file, None when it cannot be read."""
    try:
        with path.open("rb") as file:
            return file.read(MAX_READ_BYTES).decode("utf-8", "replace").strip()
    except (OSError, ValueError):
        return None


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
