"""The demo's simulated GPUs: the fleet of `models/simulator_live`, on a time that the demo sets.

The course of the wear is that of real HBM faults (corrected errors grow, rows are remapped, a contained uncorrected
error ends it), but what takes hours to weeks takes about a minute here.
"""

from __future__ import annotations

from forewarn.collectors.base import Reading
from forewarn.models.simulator_live import LiveFleet

WEAR_S = 60.0
"""From the first sign of wear to the fatal event."""


class _Moment:
    """A clock that shows what it was set to: the past while history is sent, then now."""

    def __init__(self, now: float) -> None:
        self.time = now

    def now(self) -> float:
        return self.time

    def monotonic(self) -> float:
        return self.time

    def sleep(self, seconds: float) -> None:
        self.time += seconds


class SimulatedFleet:
    """Nodes with GPUs that answer in the hardware's place. Deterministic for a seed and the times polled."""

    def __init__(self, nodes: int, gpus_per_node: int, seed: int, start: float) -> None:
        """`start`: no poll is before this time (seconds since the epoch)."""
        self._moment = _Moment(start)
        self._fleet = LiveFleet(nodes, gpus_per_node, seed, self._moment)
        self._gpus = gpus_per_node
        self.nodes = self._fleet.nodes

    def wear_out(self, now: float) -> str:
        """Let one GPU begin to fail; returns its full id."""
        self._moment.time = now
        device = f"{self.nodes[min(6, len(self.nodes) - 1)]}/gpu{min(3, self._gpus - 1)}"
        self._fleet.wear_out(device, WEAR_S)
        return device

    def poll(self, node: str, time: float) -> Reading:
        """Readings and events of one node at `time`."""
        self._moment.time = time
        return self._fleet.poll(node)
