"""What becomes of a reading: full device ids, stamped and paired events, packed frames, and the health of collecting.

Takes the outcomes of polls, keeps them until a batch is cut, and holds the newest value of everything for /metrics.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import dataclass, field

import msgspec

from forewarn.collectors.base import Device, Event, Sample
from forewarn.collectors.catalog import METRICS
from forewarn.collectors.clock import Clock
from forewarn.daemon import wire
from forewarn.daemon.agent.identity import PciMap, Twins
from forewarn.daemon.agent.scheduler import Outcome
from forewarn.daemon.agent.spool import Parts

DEVICES_EVERY_S = 600.0
"""Devices are described in the first batch, when something about them changes, and this often."""
FORGET_MISSING_S = 24 * 3600.0
FORGET_VALUE_S = 3600.0
"""A value is never shown for longer than this without being read again."""
SWEEP_S = 10.0
"""How often values and metrics are looked over for what has stayed away."""
STALE_INTERVALS = 3.0
"""A metric that stayed away for this many of its own intervals is missing."""
MAX_PENDING_EVENTS = 20_000
PREFERRED = {"dcgm": "nvml"}
"""Where two sources give the same metric of a device, the second named is believed and the first left out."""

Labels = tuple[tuple[str, str], ...]
Key = tuple[str, str, Labels]
"""Local device, metric, sorted labels."""
_Values = dict[tuple[str, Labels], tuple[float, float]]
"""Metric and labels to value and the monotonic time it was read."""


@dataclass
class _Presence:
    """When a metric or device was last there, and how long it usually stays away."""

    last: float
    usual_gap_s: float = 0.0
    sightings: int = 1

    def see(self, now: float) -> None:
        gap = now - self.last
        # The first gaps teach; later ones only as far as they stay near, or an outage would become usual.
        if self.sightings < 3 or gap < 2 * self.usual_gap_s:
            self.usual_gap_s = max(self.usual_gap_s, gap)
        self.last, self.sightings = now, self.sightings + 1

    def is_missing(self, now: float) -> bool:
        return self.sightings > 1 and now - self.last > STALE_INTERVALS * max(self.usual_gap_s, 0.001)


@dataclass
class _Source:
    """What one collector gave lately. `values` maps a device to its metrics and labels with value and time."""

    values: dict[str, _Values] = field(default_factory=dict)
    present: dict[str, _Presence] = field(default_factory=dict)
    metrics: dict[tuple[str, str], _Presence] = field(default_factory=dict)
    devices: dict[str, Device] = field(default_factory=dict)
    missing: dict[str, int] = field(default_factory=dict)
    """Metrics that each GPU lacks, as of `counted`."""
    counted: float = 0.0
    swept: float = 0.0


class Intake:
    """Readings in, batches out. One thread takes and cuts; `latest` may be called from another."""

    def __init__(self, node: str, clock: Clock, *, simulated: bool = False) -> None:
        self.node, self._clock, self._simulated = node, clock, simulated
        self._lock = threading.Lock()
        self._sources: dict[str, _Source] = {}
        self._pci = PciMap()
        self._twins = Twins()
        self._frames: list[wire.Frame] = []
        self._events: list[tuple[str, Event]] = []
        self._states: dict[str, object] = {}
        self._last_states: dict[str, object] = {}
        self._described: dict[str, Device] = {}
        self._sent_devices: dict[str, Device] = {}
        self._sent_devices_at = -DEVICES_EVERY_S
        self.urgent = False
        """A critical event waits: cut and ship now."""

    # In

    def take(self, outcome: Outcome) -> None:
        """Work one outcome in."""
        source = self._sources.setdefault(outcome.name, _Source())
        reading, now = outcome.reading, self._clock.monotonic()
        if outcome.kind == "reading":
            self._describe(source, reading.devices)
            if not outcome.late:
                samples = self._without_preferred(outcome.name, reading.samples)
                self._keep_latest(source, samples, now)
                samples = samples + self._presence(source, samples, reading.devices, now)
                frame = wire.pack_samples(
                    outcome.time,
                    (Sample(wire.full_id(self.node, s.device), s.metric, s.value, s.labels) for s in samples),
                )
                if frame.devices:
                    self._frames.append(frame)
            if outcome.state is not None and outcome.state != self._last_states.get(outcome.name):
                self._states[outcome.name] = self._last_states[outcome.name] = outcome.state
        else:
            with self._lock:
                source.values = {}
        for event in reading.events:
            self.add_event(event, outcome.name, outcome.time)

    def add_event(self, event: Event, source: str = "agent", time: float | None = None) -> None:
        """Queue one event. Without a time of its own it gets `time`, or now."""
        if event.time is None:
            event = msgspec.structs.replace(event, time=self._clock.now() if time is None else time)
        if len(self._events) < MAX_PENDING_EVENTS:
            self._events.append((source, event))
        self.urgent = self.urgent or event.severity == "critical"

    def add_samples(self, samples: Iterable[Sample]) -> None:
        """Queue one frame of the agent's own samples, taken now."""
        frame = wire.pack_samples(self._clock.now(), samples, self.node)
        if frame.devices:
            self._frames.append(frame)

    def _describe(self, source: _Source, devices: list[Device]) -> None:
        self._pci.learn(devices)
        for device in devices:
            marked = device if not self._simulated else msgspec.structs.replace(device, simulated=True)
            with self._lock:
                source.devices[device.device] = marked
            full = msgspec.structs.replace(marked, device=wire.full_id(self.node, device.device))
            known = self._described.get(full.device)
            if known is not None and known != full:
                full = _joined(known, full)
            self._described[full.device] = full

    def _without_preferred(self, name: str, samples: list[Sample]) -> list[Sample]:
        better = self._sources.get(PREFERRED.get(name, ""))
        if better is None:
            return samples
        return [s for s in samples if (s.metric, ()) not in better.values.get(s.device, {})]

    def _keep_latest(self, source: _Source, samples: list[Sample], now: float) -> None:
        """New values replace old ones. A device without any is gone. A metric that came with other labels has lost
        the old ones (a link, a verdict); one that did not come stays until it is missing by its own habit."""
        values = source.values
        fresh: set[str] = set()
        labelled: set[tuple[str, str]] = set()
        with self._lock:
            for s in samples:
                fresh.add(s.device)
                labels: Labels = ()
                if s.labels:
                    labels = tuple(sorted(s.labels.items()))
                    labelled.add((s.device, s.metric))
                values.setdefault(s.device, {})[s.metric, labels] = (s.value, now)
            for device in values.keys() - fresh:
                del values[device]
            for device, metric in labelled:
                of = values[device]
                for key in [k for k, (_, seen) in of.items() if k[0] == metric and seen != now]:
                    del of[key]
            if now - source.swept >= SWEEP_S:
                source.swept = now
                self._sweep(source, now)

    @staticmethod
    def _sweep(source: _Source, now: float) -> None:
        """Take away values that have stayed away for too long."""
        for device, of in source.values.items():
            for key, (_, seen) in list(of.items()):
                presence = source.metrics.get((device, key[0]))
                missing = presence is not None and seen != now and presence.is_missing(now)
                if missing or now - seen >= FORGET_VALUE_S:
                    del of[key]

    def _presence(
        self, source: _Source, samples: list[Sample], devices: list[Device], now: float
    ) -> list[Sample]:
        """Note what is there; give the monitoring's own signals for each GPU: its last gap, its missing metrics."""
        own: list[Sample] = []
        gpus = {s.device for s in samples if (m := METRICS.get(s.metric)) is not None and m.kind == "gpu"}
        for device in {s.device for s in samples} | {d.device for d in devices}:
            known = source.present.get(device)
            if known is None:
                source.present[device] = _Presence(now)
                continue
            if device in gpus:
                own.append(Sample(device, "gpu_poll_gap_seconds", now - known.last))
            known.see(now)
        metrics = source.metrics
        for s in samples:
            seen = metrics.get((s.device, s.metric))
            if seen is None:
                metrics[s.device, s.metric] = _Presence(now)
            elif seen.last != now:
                seen.see(now)
        if gpus != source.missing.keys() or now - source.counted >= SWEEP_S:
            source.counted = now
            source.missing = dict.fromkeys(gpus, 0)
            for (device, _), seen in metrics.items():
                if device in gpus and seen.is_missing(now):
                    source.missing[device] += 1
        own += [Sample(device, "gpu_metrics_missing", count) for device, count in source.missing.items()]
        return own

    # Out

    def missing_devices(self) -> int:
        """Devices that were there and have not been seen for three of their own intervals."""
        now, count = self._clock.monotonic(), 0
        for source in self._sources.values():
            for device, seen in list(source.present.items()):
                if now - seen.last > FORGET_MISSING_S:
                    del source.present[device]
                    for key in [k for k in source.metrics if k[0] == device]:
                        del source.metrics[key]
                elif device and seen.is_missing(now):
                    count += 1
        return count

    def cut(self) -> Parts | None:
        """Everything since the last cut; None when there is nothing to say."""
        now = self._clock.monotonic()
        events = self._paired(self._events)
        changed = [d for d in self._described.values() if self._sent_devices.get(d.device) != d]
        if now - self._sent_devices_at >= DEVICES_EVERY_S:
            changed = list(self._described.values())
        if not (self._frames or events or changed or self._states):
            return None
        if changed:
            self._sent_devices_at = now if len(changed) == len(self._described) else self._sent_devices_at
            self._sent_devices.update({d.device: d for d in changed})
        parts = Parts(devices=changed, frames=self._frames, events=events, states=dict(self._states))
        self._frames, self._events, self._states, self.urgent = [], [], {}, False
        return parts

    def _paired(self, pending: list[tuple[str, Event]]) -> list[Event]:
        """Resolve devices and leave out second tellings. The kernel's telling says more, and stays."""
        kept: list[Event] = []
        for source, event in sorted(pending, key=lambda p: p[0] != "kernel_log"):
            resolved = self._pci.resolve(event)
            if not self._twins.is_repeat(resolved, source):
                device = resolved.device
                if device != self.node and not device.startswith(self.node + "/"):
                    device = wire.full_id(self.node, device)
                kept.append(msgspec.structs.replace(resolved, device=device))
        return sorted(kept, key=lambda e: e.time or 0.0)

    def latest(self) -> list[tuple[Key, float]]:
        """The newest value of every device, metric and label set, of every source that answers."""
        with self._lock:
            return [
                ((device, metric, labels), value)
                for source in self._sources.values()
                for device, values in source.values.items()
                for (metric, labels), (value, _) in values.items()
            ]

    def devices(self) -> dict[str, Device]:
        """Devices that are known now, by local id."""
        with self._lock:
            found: dict[str, Device] = {}
            for source in self._sources.values():
                for device in source.devices.values():
                    if device.device == "" or device.device in source.values:
                        known = found.get(device.device)
                        found[device.device] = device if known is None else _joined(known, device)
            return found


def _joined(first: Device, second: Device) -> Device:
    """What two sources know of one device together; the second is believed where both speak."""
    return Device(
        device=second.device,
        kind=second.kind or first.kind,
        model=second.model or first.model,
        serial=second.serial or first.serial,
        pci=second.pci or first.pci,
        simulated=first.simulated or second.simulated,
        labels={**first.labels, **second.labels},
    )
