"""Services that end with the test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from service_bench import Bench, Starter, make_settings


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Starter]:
    """Starts services; all are stopped at the end."""
    running: list[Bench] = []

    def begin(hook: Callable[[httpx.Request], httpx.Response] | None = None, **fields: Any) -> Bench:
        running.append(Bench(make_settings(tmp_path, **fields), hook))
        return running[-1]

    yield begin
    for bench in running:
        bench.stop()


@pytest.fixture
def bench(start: Starter) -> Bench:
    return start()
