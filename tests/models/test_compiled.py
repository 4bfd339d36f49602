"""Compiling where the machine code can be kept, and where it cannot."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from forewarn.models import compiled


def double(x: float) -> float:
    return 2 * x


def test_compiled_is_the_same_function() -> None:
    assert compiled.jit(double)(21.0) == 42.0


def test_a_read_only_install_compiles_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, bool]] = []

    def njit(**options: bool) -> Callable[[Any], Any]:
        asked.append(options)
        if options.get("cache"):
            raise RuntimeError("cannot cache function: no locator available")
        return lambda function: function

    monkeypatch.setattr("numba.njit", njit)
    assert compiled.jit(double)(21.0) == 42.0
    assert asked == [{"cache": True, "nogil": True}, {"nogil": True}]
