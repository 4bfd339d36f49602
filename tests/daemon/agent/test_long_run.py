"""A simulated day of the agent's own loop: no growth in memory, threads, files or spool."""

from __future__ import annotations

import gc
import threading
import tracemalloc
from pathlib import Path

from fakes_agent import FakeCollector, FakeTransport, gpu_reading
from forewarn.collectors.base import Event, Reading
from forewarn.collectors.clock import ManualClock
from forewarn.collectors.errors import UnavailableError
from forewarn.daemon.agent.main import Agent
from forewarn.daemon.agent.scheduler import InlineRunner, Slot
from forewarn.daemon.agent.shipper import Response, Shipper
from forewarn.daemon.agent.spool import Spool
from forewarn.daemon.config import AgentConfig

HOUR_S = 3600.0
SPOOL_MAX_BYTES = 6_000_000
"""An empty spool and the log that SQLite writes over again (4 MB)."""


class Counting(FakeTransport):
    """Acknowledges all and keeps only a count."""

    sent = 0

    def post(self, body: bytes, encoding: str | None) -> Response:
        answer = super().post(body, encoding)
        self.sent += 1
        self.batches.clear()
        return answer


class Lively(FakeCollector):
    """A GPU whose error comes and goes, with an event each hour."""

    def collect(self) -> Reading:
        self.calls += 1
        events = [Event("gpu0", "xid", "13", "warning", f"n {self.calls}")] if self.calls % 360 == 0 else []
        if self.calls % 500 == 0:
            raise UnavailableError("lively: away for a moment")
        return gpu_reading(40.0 + self.calls % 7, events=events)


def held() -> tuple[int, int]:
    return threading.active_count(), len(list(Path("/proc/self/fd").iterdir()))


def test_a_day_leaves_nothing_behind(tmp_path: Path) -> None:
    clock = ManualClock()
    spool = Spool(tmp_path / "s.db", "n1", clock, max_bytes=1 << 20)
    transport = Counting()
    shipper = Shipper(spool, transport, clock)
    slots = [Slot(c, c.interval_s, c.deadline_s) for c in (Lively("nvml"), FakeCollector("host"))]
    config = AgentConfig(node="n1", listen="", ship_interval_s=300.0)
    agent = Agent(config, slots, spool, shipper, clock=clock, runner=InlineRunner())

    def run_until(end_s: float) -> None:
        while clock.monotonic() < end_s:
            clock.advance(agent.step())
            while shipper.step() == 0.0:
                pass

    run_until(3 * HOUR_S)
    gc.collect()
    tracemalloc.start()
    try:
        before, base = held(), tracemalloc.get_traced_memory()[0]
        run_until(24 * HOUR_S)
        gc.collect()
        grown = tracemalloc.get_traced_memory()[0] - base
    finally:
        tracemalloc.stop()
    # What was traced replaces what stood there before tracing began, so a little shows as grown.
    assert grown < 300_000, f"{grown} bytes more after 21 hours"
    assert held() == before
    assert sum(f.stat().st_size for f in tmp_path.iterdir()) < SPOOL_MAX_BYTES
    assert spool.status.batches == 0
    assert transport.sent > 24 * HOUR_S / config.ship_interval_s - 5
    assert slots[0].errors > 10
