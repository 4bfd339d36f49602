"""Where time comes from. Nothing else in Forewarn reads a clock, so tests can own the time."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Wall time for stamps, monotonic time for durations."""

    def now(self) -> float:
        """Seconds since the Unix epoch, UTC. May step."""

    def monotonic(self) -> float:
        """Seconds that never go back; only differences mean something."""

    def sleep(self, seconds: float) -> None:
        """Wait; a test clock merely moves itself on."""


class SystemClock:
    """The clock of this machine."""

    def now(self) -> float:
        return time.time()

    def monotonic(self) -> float:
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)


class ManualClock:
    """A clock that moves only when told to; for tests, replay and simulation."""

    def __init__(self, now: float = 1_700_000_000.0) -> None:
        self._now = now
        self._monotonic = 0.0

    def now(self) -> float:
        return self._now

    def monotonic(self) -> float:
        return self._monotonic

    def sleep(self, seconds: float) -> None:
        self.advance(seconds)

    def advance(self, seconds: float) -> None:
        """Let both clocks pass `seconds` (0 or more)."""
        self._now += seconds
        self._monotonic += seconds

    def step(self, seconds: float) -> None:
        """Step the wall clock alone, as NTP does; may be negative."""
        self._now += seconds
