"""Repeats of an event folded into a count: a storm of one error is one piece of news, not ten thousand."""

from __future__ import annotations

from collections import OrderedDict

import msgspec

from forewarn.collectors.base import Event
from forewarn.collectors.kernel_events import Found

COALESCE_S = 5.0
"""Repeats of one event within this time of the first are reported with it, as a count (as the Delta study did)."""
MAX_OPEN_WINDOWS = 4096


class Coalescer:
    """Reports the first of a kind at once, and its repeats within COALESCE_S as a count, afterwards."""

    def __init__(self, window_s: float = COALESCE_S) -> None:
        self._window_s = window_s
        self._open: OrderedDict[tuple[str, ...], _Window] = OrderedDict()
        self._ready: list[_Window] = []

    def add(self, found: Found, at: float | None, monotonic: float) -> None:
        """Take an event that happened at `at` (epoch seconds, None when unknown) and was read at `monotonic`."""
        event = found.event
        where = event.pci or event.device or ""
        key: tuple[str, ...] = (event.kind, event.code, where, found.ident, event.severity, event.action)
        if at is None:
            key = (
                *key,
                event.message,
            )  # nothing says how far apart they were: only the very same is a repeat
        window = self._open.get(key)
        if window is not None and window.takes(at, monotonic, self._window_s):
            if not (found.implied or window.implied):
                window.count += event.count
            elif not found.implied:
                window.implied = (
                    False  # the explicit line of an incident that was already counted by its other
                )
            return
        if window is not None:
            self._close(self._open.pop(key))
        event = msgspec.structs.replace(event, time=at)
        window = _Window(event, event.count, at, monotonic, found.implied)
        self._open[key] = window
        self._ready.append(window)
        while len(self._open) > MAX_OPEN_WINDOWS:
            self._close(self._open.popitem(last=False)[1])

    def take(self, monotonic: float) -> list[Event]:
        """What is due now: every first with the repeats so far, and the repeats of windows that ended."""
        for key in [k for k, w in self._open.items() if monotonic - w.opened >= self._window_s]:
            self._close(self._open.pop(key))
        events = [w.flush() for w in self._ready if w.count]
        self._ready = []
        return events

    def _close(self, window: _Window) -> None:
        if window.count and window not in self._ready:
            self._ready.append(window)


class _Window:
    __slots__ = ("count", "event", "first", "implied", "opened")

    def __init__(self, event: Event, count: int, first: float | None, opened: float, implied: bool) -> None:
        self.event = event
        self.count = count
        self.first = first
        self.opened = opened
        self.implied = implied

    def takes(self, at: float | None, monotonic: float, window_s: float) -> bool:
        if at is None or self.first is None:
            return at is self.first and monotonic - self.opened < window_s
        return abs(at - self.first) < window_s

    def flush(self) -> Event:
        event = msgspec.structs.replace(self.event, count=self.count)
        self.count = 0
        return event
