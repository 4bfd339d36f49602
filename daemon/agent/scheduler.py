"""When each collector is polled, and what becomes of one that does not come back. Knows nothing of what it collects.

Every collector has one worker. A poll that passes its deadline is left to itself and never delays the others; the
collector is polled again only once the old poll has returned, so a hung driver costs one thread and no more.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from forewarn.collectors.base import CollectionError, Collector, Event, Reading
from forewarn.collectors.clock import Clock
from forewarn.collectors.errors import UnavailableError
from forewarn.daemon.agent.logs import log

RETRY_UNAVAILABLE_S = 60.0
"""A source that cannot be read here is tried again this often (or at its own interval, if longer)."""
RETRY_SOON_FOR_S = 600.0
"""A source that was well a moment ago is tried at its own interval for so long: a hung driver often comes back."""
MAX_WAIT_S = 3600.0

Kind = Literal["reading", "unavailable", "failed", "silent"]


@dataclass(frozen=True)
class Outcome:
    """What one poll gave. `time` is the wall clock at its start, `duration_s` how long it took.

    `late` marks a reading that came after the deadline: its events are true, its numbers are old. `state` is the
    collector's own place to resume from, taken right after this reading and before any later one.
    """

    name: str
    kind: Kind
    time: float
    duration_s: float
    reading: Reading
    late: bool = False
    error: str = ""
    state: Mapping[str, Any] | None = None


@dataclass
class Slot:
    """One collector and its book: when it is due, whether a poll is under way, and how it has fared."""

    collector: Collector
    interval_s: float
    deadline_s: float
    due: float = 0.0
    started: float | None = None
    started_at: float = 0.0
    silent: bool = False
    up: bool | None = None
    """None until the first poll has ended one way or the other."""
    duration_s: float = 0.0
    errors: int = 0
    timeouts: int = 0
    last_good: float | None = None
    gap_s: float = 0.0
    """Time between the last two good readings."""
    said: str = ""
    """The trouble that was logged last, so that it is logged once and not at each poll."""
    said_parts: frozenset[tuple[str, str]] = frozenset()

    @property
    def name(self) -> str:
        return self.collector.name


class Runner(Protocol):
    """Runs a poll of `name` somewhere; at most one of each name at a time is asked for."""

    def start(self, name: str, work: Callable[[], None]) -> None: ...


class InlineRunner:
    """Runs polls on the caller's own thread; for tests, `--once` and replay."""

    def start(self, name: str, work: Callable[[], None]) -> None:
        work()


class ThreadRunner:
    """One thread for each collector, made when it is first polled. Threads do not keep the process alive."""

    def __init__(self) -> None:
        self._queues: dict[str, queue.SimpleQueue[Callable[[], None] | None]] = {}

    def start(self, name: str, work: Callable[[], None]) -> None:
        if name not in self._queues:
            inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
            self._queues[name] = inbox
            threading.Thread(target=self._serve, args=(inbox,), name=f"collect-{name}", daemon=True).start()
        self._queues[name].put(work)

    def stop(self) -> None:
        """Let idle threads end."""
        for inbox in self._queues.values():
            inbox.put(None)

    @staticmethod
    def _serve(inbox: queue.SimpleQueue[Callable[[], None] | None]) -> None:
        while (work := inbox.get()) is not None:
            work()


@dataclass(frozen=True)
class _Finished:
    slot: Slot
    duration_s: float
    reading: Reading | None
    error: BaseException | None
    state: Mapping[str, Any] | None = None


@dataclass
class Scheduler:
    """Polls collectors when due. `step` does what is due now and gives what came back; it never blocks on a source."""

    slots: list[Slot]
    clock: Clock
    runner: Runner
    wake: Callable[[], None] = lambda: None
    """Called from a worker when a poll has ended, to wake whoever waits for the next step."""
    _done: queue.SimpleQueue[_Finished] = field(default_factory=queue.SimpleQueue)

    def step(self) -> list[Outcome]:
        """Take what has ended, give up what is overdue, start what is due."""
        outcomes = list(self._harvest())
        now = self.clock.monotonic()
        for slot in self.slots:
            if slot.started is not None:
                if not slot.silent and now - slot.started > slot.deadline_s:
                    outcomes.append(self._abandon(slot))
            elif now >= slot.due:
                self._start(slot, now)
        outcomes += self._harvest()
        return outcomes

    def wait_s(self) -> float:
        """Seconds until `step` has something to do, unless a poll ends earlier."""
        now = self.clock.monotonic()
        moments = [
            slot.due if slot.started is None else slot.started + slot.deadline_s + 0.001
            for slot in self.slots
            if not (slot.started is not None and slot.silent)
        ]
        return min(max(0.0, min(moments, default=now + MAX_WAIT_S) - now), MAX_WAIT_S)

    @property
    def settled(self) -> bool:
        """True when every collector has answered once, or failed to in its time."""
        return all(slot.up is not None for slot in self.slots)

    def _start(self, slot: Slot, now: float) -> None:
        slot.due = slot.due + slot.interval_s if now - slot.due < slot.interval_s else now + slot.interval_s
        slot.started, slot.started_at = now, self.clock.now()
        self.runner.start(slot.name, lambda: self._poll(slot))

    def _poll(self, slot: Slot) -> None:
        """One poll, on the worker. Whatever happens, something is handed back."""
        begun = self.clock.monotonic()
        reading: Reading | None = None
        error: BaseException | None = None
        state: Mapping[str, Any] | None = None
        try:
            reading = slot.collector.collect()
            if callable(take := getattr(slot.collector, "state", None)):
                state = take()
        except BaseException as caught:  # the worker must outlive anything a source throws at it
            error = caught
        self._done.put(_Finished(slot, self.clock.monotonic() - begun, reading, error, state))
        self.wake()

    def _abandon(self, slot: Slot) -> Outcome:
        slot.silent, slot.up = True, False
        slot.timeouts += 1
        slot.errors += 1
        message = f"{slot.name} did not answer within {slot.deadline_s:g} s; its poll is left to itself"
        log(logging.WARNING, "collector_silent", collector=slot.name, deadline_s=slot.deadline_s)
        event = Event("", "collector_silent", slot.name, "error", message, time=self.clock.now())
        return Outcome(
            slot.name, "silent", slot.started_at, slot.deadline_s, Reading(events=[event]), error=message
        )

    def _harvest(self) -> Iterable[Outcome]:
        while True:
            try:
                finished = self._done.get_nowait()
            except queue.Empty:
                return
            yield self._account(finished)

    def _account(self, finished: _Finished) -> Outcome:
        slot, now = finished.slot, self.clock.monotonic()
        was_silent = slot.silent
        slot.started, slot.silent, slot.duration_s = None, False, finished.duration_s
        events: list[Event] = []
        if was_silent:
            message = f"{slot.name} answers again after {finished.duration_s:.1f} s"
            log(logging.INFO, "collector_recovered", collector=slot.name, after_s=finished.duration_s)
            events.append(Event("", "collector_recovered", slot.name, "info", message, time=self.clock.now()))
            slot.due = now + slot.interval_s
        if finished.reading is None:
            return self._fail(slot, finished, events, now)
        slot.gap_s = 0.0 if slot.last_good is None else now - slot.last_good
        slot.last_good, slot.up = now, True
        if slot.said:
            log(logging.INFO, "collector_up", collector=slot.name)
            slot.said = ""
        self._say_parts(slot, finished.reading.errors)
        reading = finished.reading
        if events:
            reading = Reading(reading.samples, [*events, *reading.events], reading.devices, reading.errors)
        return Outcome(
            slot.name,
            "reading",
            slot.started_at,
            finished.duration_s,
            reading,
            late=was_silent,
            state=finished.state,
        )

    def _fail(self, slot: Slot, finished: _Finished, events: list[Event], now: float) -> Outcome:
        error = finished.error
        slot.up = False
        slot.errors += 1
        unavailable = isinstance(error, UnavailableError)
        text = str(error) if unavailable else f"{type(error).__name__}: {error}"
        retry_s = slot.interval_s
        if slot.last_good is None or now - slot.last_good > RETRY_SOON_FOR_S:
            retry_s = max(RETRY_UNAVAILABLE_S, slot.interval_s)
        if unavailable:
            slot.due = max(slot.due, now + retry_s)
        if text != slot.said:
            slot.said = text
            if unavailable:
                log(
                    logging.WARNING,
                    "collector_unavailable",
                    collector=slot.name,
                    reason=text,
                    retry_s=retry_s,
                )
            else:
                log(logging.ERROR, "collector_failed", collector=slot.name, reason=text, exc_info=error)
        kind: Kind = "unavailable" if unavailable else "failed"
        return Outcome(
            slot.name, kind, slot.started_at, finished.duration_s, Reading(events=events), error=text
        )

    @staticmethod
    def _say_parts(slot: Slot, errors: list[CollectionError]) -> None:
        parts = frozenset((e.device, e.message) for e in errors)
        slot.errors += bool(errors)
        for e in errors:
            if (e.device, e.message) not in slot.said_parts:
                log(
                    logging.WARNING,
                    "collection_error",
                    collector=slot.name,
                    device=e.device,
                    reason=e.message,
                    remedy=e.remedy,
                )
        slot.said_parts = parts
