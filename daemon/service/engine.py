"""The thread that owns the fleet: takes in what is durable, scores every cycle, publishes a view, takes snapshots.

Everyone else reads the last view, or asks this thread by `call`.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

import structlog

from forewarn.collectors.clock import Clock
from forewarn.collectors.errors import ForewarnError, StorageError
from forewarn.daemon.service.intake import OWN_STREAM, NodeState, Sequences, shift_of
from forewarn.daemon.service.journal import Record, Sealed
from forewarn.daemon.service.progress import JobsProgress
from forewarn.daemon.service.readings import Clear, Failure, content_of, readings_of
from forewarn.daemon.service.view import EMPTY, LEVEL_FLOORS, Layout, Past, View, make_view, past_of, raised
from forewarn.daemon.wire import Batch
from forewarn.models.fleet import Fleet
from forewarn.models.rules import RuleHit

T = TypeVar("T")
EXPLAINED = 20
"""Devices explained anew in a cycle, the riskiest first; the others keep their texts while their risk stands."""
EXPLAIN_AGAIN_S = 60.0
HISTORY_INTERVAL_S = 60.0
HISTORY_KEPT = 180
"""Past views kept for the course of a device's risk: three hours at one a minute."""
APPLY_AT_ONCE = 256
"""Records taken in before calls and the clock are looked at again."""

_log = structlog.get_logger("forewarn.service")


@dataclass
class Overlay:
    """Rules that hold since a moment ago: shown at once, dropped when the fleet itself knows them."""

    hits: Sequence[RuleHit]
    applied: bool = False


Item = Record | Sealed | Overlay


class Snapshots(Protocol):
    """Where snapshots go."""

    def due(self, now: float) -> bool: ...

    def save(
        self,
        number: int,
        fleet: Fleet,
        sequences: Sequences,
        nodes: Mapping[str, NodeState],
        jobs: JobsProgress,
    ) -> None: ...


class Engine:
    """Owns the fleet. `submit` and `call` may come from any thread; `view` is always whole."""

    def __init__(
        self,
        fleet: Fleet,
        clock: Clock,
        snapshots: Snapshots,
        *,
        cycle_interval_s: float,
        on_view: Callable[[View], None],
        sequences: Sequences | None = None,
        nodes: dict[str, NodeState] | None = None,
        jobs: JobsProgress | None = None,
        on_news: Callable[[list[Batch]], None] = lambda batches: None,
    ) -> None:
        """`on_news` gets what the service itself has to tell of devices, to be logged like what agents send."""
        self.fleet, self._clock, self._snapshots = fleet, clock, snapshots
        self._cycle_interval_s, self._on_view = cycle_interval_s, on_view
        self.sequences = sequences or Sequences()
        """What has been applied; the ingest has its own of what has been taken."""
        self.nodes: dict[str, NodeState] = nodes or {}
        self.jobs, self._on_news = jobs or JobsProgress(), on_news
        self.view: View = EMPTY
        self.history: deque[Past] = deque(maxlen=HISTORY_KEPT)
        self.backlog_bytes = 0
        self.applied = 0
        self.last_cycle_s = self.last_apply_lag_s = 0.0
        self._layout: Layout | None = None
        self._explained: dict[str, tuple[float, float, tuple[str, ...]]] = {}
        self._items: deque[Item] = deque()
        self._overlays: list[Overlay] = []
        self._showing = threading.Lock()
        self._calls: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self._condition = threading.Condition()
        self._stopping = False
        self._score_soon = False
        self._next_cycle = 0.0
        self._thread = threading.Thread(target=self._run, name="forewarn-engine", daemon=True)

    def start(self) -> None:
        self._next_cycle = self._clock.monotonic()
        self._thread.start()

    def stop(self) -> None:
        """Take in what waits, then end."""
        with self._condition:
            self._stopping = True
            self._condition.notify()
        if self._thread.ident is not None:
            self._thread.join()

    def submit(self, items: list[Record | Sealed]) -> None:
        """Hand over what has become durable, in order."""
        with self._condition:
            self._items.extend(items)
            self.backlog_bytes += sum(len(i.payload) for i in items if isinstance(i, Record))
            self._condition.notify()

    def call(self, function: Callable[[], T]) -> Future[T]:
        """Have the owning thread run `function` as soon as it can."""
        future: Future[T] = Future()
        with self._condition:
            if self._stopping:
                future.set_exception(StorageError("the service is stopping"))
                return future
            self._calls.append((function, future))
            self._condition.notify()
        return future

    def overlay(self, hits: Sequence[RuleHit]) -> None:
        """Show at once what an event says, without waiting for the fleet and the next cycle."""
        shown = Overlay(hits)
        with self._showing:
            self._overlays.append(shown)
            self.view = raised(self.view, _floors([shown]))
        with self._condition:
            # Behind the records that the hits came from: once this is taken, the fleet knows.
            self._items.append(shown)
            self._condition.notify()

    def score_soon(self) -> None:
        """Do not wait for the next cycle: something happened."""
        with self._condition:
            self._score_soon = True
            self._condition.notify()

    def replay(self, items: list[Record | Sealed]) -> None:
        """Take in records before the thread is started."""
        for item in items:
            if isinstance(item, Record):
                self._apply(item)

    def _run(self) -> None:
        while True:
            items, calls, stopping = self._wait()
            for function, future in calls:
                _fulfil(function, future)
            for item in items:
                self._take(item)
            if not items and not calls and stopping:
                return
            now = self._clock.monotonic()
            if not stopping and (now >= self._next_cycle or self._score_soon):
                self._score_soon = False
                self._next_cycle = now + self._cycle_interval_s
                self._guard("cycle_failed", self._cycle)

    def _wait(self) -> tuple[list[Item], list[tuple[Callable[[], Any], Future[Any]]], bool]:
        with self._condition:
            if not (self._items or self._calls or self._stopping or self._score_soon):
                self._condition.wait(max(0.0, self._next_cycle - self._clock.monotonic()))
            items = [self._items.popleft() for _ in range(min(APPLY_AT_ONCE, len(self._items)))]
            self.backlog_bytes -= sum(len(i.payload) for i in items if isinstance(i, Record))
            calls, self._calls = list(self._calls), deque()
            return items, calls, self._stopping

    def _take(self, item: Item) -> None:
        if isinstance(item, Record):
            self.last_apply_lag_s = max(0.0, self._clock.now() - item.received)
            self._guard("record_failed", lambda: self._apply(item))
        elif isinstance(item, Overlay):
            item.applied = True
        elif item.last or self._snapshots.due(self._clock.monotonic()):
            self._guard(
                "snapshot_failed",
                lambda: self._snapshots.save(item.number, self.fleet, self.sequences, self.nodes, self.jobs),
            )

    def _guard(self, event: str, function: Callable[[], object]) -> None:
        """Nothing may end this thread: what one batch or one cycle does wrong is logged, and the next goes on."""
        try:
            function()
        except ForewarnError as error:
            _log.error(event, reason=str(error))
        except Exception as error:
            _log.error(event, exc_info=error)

    def _apply(self, record: Record) -> None:
        content = content_of(record)
        if isinstance(content, Failure):
            self.fleet.apply_failure(content.time, content.device)
            return
        if isinstance(content, Clear):
            self.fleet.clear(content.device)
            return
        if content.sequence <= self.sequences.get(content.node, content.stream):
            return
        # Marked first: a batch that makes the fleet raise must not be tried again and again.
        self.sequences.set(content.node, content.stream, content.sequence)
        if content.stream != OWN_STREAM:
            self._note_node(content, record.received)
        readings, shift_s = readings_of(content), shift_of(content, record.received)
        self.fleet.apply_batch(content.node, readings, content.events, content.devices, shift_s)
        for device in self.jobs.take(content.node, readings, self.fleet.described, shift_s):
            self.fleet.remove(device)
        self.applied += 1

    def _note_node(self, batch: Batch, received: float) -> None:
        node = self.nodes.get(batch.node)
        if node is None:
            node = self.nodes[batch.node] = NodeState(first_seen=received, last_seen=received)
        node.last_seen = max(node.last_seen, received)
        node.batches += 1
        node.agent_version = batch.agent_version
        if batch.sent > 0:
            node.skew_s = received - batch.sent

    def _cycle(self) -> None:
        began, now = self._clock.monotonic(), self._clock.now()
        with self._showing:
            self._overlays = [o for o in self._overlays if not o.applied]
        tables = self.fleet.score(now)
        described = self.fleet.devices()
        view, self._layout = make_view(self.view.number + 1, now, tables, described, self._layout)
        states, news = self.jobs.judge(now, lambda node: self.sequences.get(node, OWN_STREAM))
        view = replace(view, reasons=self._reasons(view), jobs=states)
        with self._showing:
            self.view = view = raised(view, _floors(self._overlays))
        if not self.history or now - self.history[-1].time >= HISTORY_INTERVAL_S:
            self.history.append(past_of(view))
        self.last_cycle_s = self._clock.monotonic() - began
        self._on_view(view)
        if news:
            self._on_news(news)

    def _reasons(self, view: View) -> dict[str, tuple[str, ...]]:
        """Texts for the devices above healthy, the riskiest first; explained anew when their risk has moved."""
        out: dict[str, tuple[str, ...]] = {}
        budget = EXPLAINED
        for row in view.order[: 50 * EXPLAINED]:
            risk = float(view.worst[row])
            if float(view.decisive[row]) < LEVEL_FLOORS[1] and risk < LEVEL_FLOORS[2]:
                continue
            device = view.devices[int(row)]
            known = self._explained.get(device)
            fresh = (
                known is not None and view.time - known[0] < EXPLAIN_AGAIN_S and abs(known[1] - risk) < 0.02
            )
            if not fresh and budget > 0:
                budget -= 1
                horizons = view.kind_of_row(int(row)).horizons_s
                reasons = self.fleet.explain(device, view.time, horizons[min(1, len(horizons) - 1)])
                known = view.time, risk, tuple(r.text for r in reasons)
                self._explained[device] = known
            if known is not None:
                out[device] = known[2]
        self._explained = {d: k for d, k in self._explained.items() if d in out}
        return out


def _floors(overlays: Sequence[Overlay]) -> dict[str, tuple[Sequence[float], str]]:
    """The highest floors of each device; the text of the last rule."""
    out: dict[str, tuple[Sequence[float], str]] = {}
    for hit in (h for o in overlays for h in o.hits):
        before = out.get(hit.device, ((), ""))[0]
        floors = [max(a, b) for a, b in zip(hit.floors, before, strict=True)] if before else hit.floors
        out[hit.device] = floors, hit.text
    return out


def _fulfil(function: Callable[[], Any], future: Future[Any]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(function())
    except Exception as error:
        future.set_exception(error)
