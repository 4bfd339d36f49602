"""One reading of one collector, within its deadline: what `forewarn collect` and `forewarn doctor` need."""

from __future__ import annotations

import threading
from typing import Any

import msgspec

from forewarn.collectors.base import CollectionError, Collector, Event, Reading
from forewarn.collectors.clock import Clock
from forewarn.collectors.errors import ForewarnError
from forewarn.daemon import wire
from forewarn.daemon.agent.identity import PciMap
from forewarn.daemon.agent.usage import kill_children

CLOSE_GRACE_S = 1.0


def collect_within(collector: Collector, deadline_s: float) -> tuple[Reading, CollectionError | None]:
    """One reading, or the error that stands for it. A collector that hangs is left behind at its deadline."""
    result: list[Reading | BaseException] = []

    def work() -> None:
        try:
            result.append(collector.collect())
        except BaseException as error:  # handed to the caller, who sorts it
            result.append(error)

    thread = threading.Thread(target=work, name=f"collect-{collector.name}", daemon=True)
    thread.start()
    thread.join(deadline_s)
    if not result:
        text = f"{collector.name}: no answer within {deadline_s:g} s (its deadline): the source hangs"
        remedy = "look for hung processes of the driver, or allow more with --deadline"
        return Reading(), CollectionError(collector.name, text, remedy=remedy)
    outcome = result[0]
    if isinstance(outcome, Reading):
        return outcome, None
    if isinstance(outcome, ForewarnError):
        return Reading(), CollectionError(collector.name, str(outcome))
    if isinstance(outcome, Exception):
        text = f"{collector.name}: {type(outcome).__name__}: {outcome}"
        return Reading(), CollectionError(collector.name, text, remedy="this is a bug: report it, please")
    raise outcome


def close_within(collector: Collector, grace_s: float = CLOSE_GRACE_S) -> None:
    """Close a collector in bounded time and end what it started."""
    closer = threading.Thread(target=collector.close, daemon=True)
    closer.start()
    closer.join(grace_s)
    kill_children()


def named(reading: Reading, node: str, clock: Clock) -> dict[str, Any]:
    """The reading as plain data with full device ids and event times; events know their device by PCI address."""
    pci = PciMap()
    pci.learn(reading.devices)

    def event(e: Event) -> dict[str, Any]:
        found = pci.resolve(e)
        time = clock.now() if found.time is None else found.time
        return {**msgspec.to_builtins(found), "device": wire.full_id(node, found.device), "time": time}

    def full(record: Any) -> dict[str, Any]:
        return {**msgspec.to_builtins(record), "device": wire.full_id(node, record.device)}

    return {
        "samples": [full(s) for s in reading.samples],
        "events": [event(e) for e in reading.events],
        "devices": [full(d) for d in reading.devices],
        "errors": [full(e) for e in reading.errors],
    }
