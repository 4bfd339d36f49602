"""A simulated fleet that answers poll by poll, on the physics of the batch simulator: for demonstrations."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from forewarn.collectors.base import Device, Event, Reading, Sample
from forewarn.collectors.catalog import METRICS
from forewarn.collectors.clock import Clock
from forewarn.collectors.errors import InputError
from forewarn.models.simulator_faults import xid
from forewarn.models.simulator_jobs import Job, load_of
from forewarn.models.simulator_mechanisms import DAY_S
from forewarn.models.simulator_physics import NodeState, Note, Traits, draw_traits, render, spare_rows
from forewarn.models.simulator_profiles import Profile, draw

WEAR_GROWTH = 7.0
"""Corrected errors grow by e to this power from the first sign of wear to its end."""
WEAR_ERRORS = 4000.0
"""Corrected errors that the wear brings in all."""
REMAPS_AT = (0.25, 0.45, 0.6, 0.72, 0.82, 0.9)
"""Shares of the wear at which a row is remapped."""
LEAST_STEP_S = 0.01


@dataclass
class _Wear:
    start: float
    length_s: float
    done: float = 0.0
    """Share of the wear that polls have seen."""


@dataclass
class _Node:
    state_seed: int
    traits: Traits
    job: Job
    last: float = math.nan
    totals: dict[str, NDArray[np.floating]] = field(default_factory=dict)
    warmth: NDArray[np.float32] | None = None
    wear: dict[int, _Wear] = field(default_factory=dict)
    polls: int = 0


class LiveFleet:
    """Nodes with GPUs that answer in the hardware's place, all marked simulated.

    Deterministic for a seed and the times of the polls, which come from `clock`. Device names are local (`gpu3`),
    as collectors give them.
    """

    def __init__(
        self, nodes: int, gpus_per_node: int, seed: int, clock: Clock, profile: str = "h100"
    ) -> None:
        self._clock = clock
        self._gpus = gpus_per_node
        self._seed = seed
        self._profile: Profile = draw(profile, seed)
        self.nodes = [f"sim-{n:02d}" for n in range(1, nodes + 1)]
        now = clock.now()
        rng = np.random.default_rng([seed, 21])
        board = self._profile.boards[0]
        self._nodes = {}
        for n, name in enumerate(self.nodes):
            traits = draw_traits(self._profile.physics, board, gpus_per_node, 0.0, rng)
            job = Job(0, now - DAY_S / 2, now + 3650 * DAY_S, (n,), gpus_per_node, False)
            self._nodes[name] = _Node(n, traits, job)

    def wear_out(self, device: str, seconds: float) -> None:
        """Let the memory of `NODE/gpuN` wear out from now on; it fails after `seconds`.

        Raises InputError for a device the fleet does not have.
        """
        name, _, local = device.partition("/")
        if name not in self._nodes or local not in {f"gpu{g}" for g in range(self._gpus)}:
            raise InputError(f"device {device!r}: the simulated fleet has no such GPU")
        if not seconds > 0:
            raise InputError(f"seconds {seconds}: must be above 0")
        self._nodes[name].wear[int(local[3:])] = _Wear(self._clock.now(), seconds)

    def poll(self, node: str) -> Reading:
        """Devices, samples and events of one node now. Raises InputError for a node the fleet does not have."""
        if node not in self._nodes:
            raise InputError(f"node {node!r}: the simulated fleet has no such node")
        own = self._nodes[node]
        now = self._clock.now()
        passed_s = LEAST_STEP_S if math.isnan(own.last) else max(LEAST_STEP_S, now - own.last)
        physics, board = self._profile.physics, self._profile.boards[0]
        own.polls += 1
        times = np.array([now])
        use, share, memory = load_of(own.job, times, self._seed)

        def wide(row: NDArray[np.float32]) -> NDArray[np.float32]:
            return np.repeat(row[None, :].astype(np.float32), self._gpus, axis=0)

        rng = np.random.default_rng([self._seed, 23, own.state_seed, own.polls])
        state = NodeState(
            own.state_seed, board, times, passed_s, self._gpus, rng, wide(use), wide(share),
            np.full((self._gpus, 1), memory, np.float32), used=False, warmth=own.warmth,
        )  # fmt: skip
        for gpu, wear in own.wear.items():
            _wear(state, gpu, wear, now)
        values = render(state, own.traits, physics)
        own.warmth, own.last = state.warmth, now
        _add_up(own, values)
        if board.banks:
            spare_rows(values, board)
        reading = Reading(
            samples=[], events=[], devices=[Device("", "node", "simulated host", simulated=True)]
        )
        for g in range(self._gpus):
            reading.devices.append(
                Device(f"gpu{g}", "gpu", board.model, f"SIM-{node}-gpu{g}", simulated=True)
            )
            for name, array in values.items():
                value = float(array[g, 0])
                if value == value:  # NaN alone differs from itself
                    reading.samples.append(Sample(f"gpu{g}", name, value))
        reading.events.extend(_event(n) for n in state.notes)
        return reading


def _add_up(own: _Node, values: dict[str, NDArray[np.floating]]) -> None:
    """`render` gives what one step adds to counters; a GPU shows their totals."""
    for name in values:
        if METRICS[name].type == "counter":
            own.totals[name] = own.totals.get(name, 0.0) + np.asarray(values[name], float)
            values[name] = own.totals[name]


def _wear(state: NodeState, gpu: int, wear: _Wear, now: float) -> None:
    """What the wear of one board does between the last poll and this one."""
    before, after = wear.done, min(1.0, max(wear.done, (now - wear.start) / wear.length_s))
    wear.done = after
    growth = math.exp(WEAR_GROWTH)
    errors = WEAR_ERRORS * (math.exp(WEAR_GROWTH * after) - math.exp(WEAR_GROWTH * before)) / (growth - 1)
    state.counts["gpu_ecc_dram_corrected_total"][gpu, 0] += int(state.rng.poisson(errors))
    for share in REMAPS_AT:
        if before < share <= after:
            state.counts["gpu_row_remap_corrected_total"][gpu, 0] += 1
            xid(state, wear.start + share * wear.length_s, gpu, 63)
    if after >= REMAPS_AT[0]:
        state.pending[gpu] = [(0, 1)]
    if after < 1:
        return
    # The program on it has ended, and nothing reads the worn rows any more.
    state.use[gpu] = state.share[gpu] = 0
    state.action[gpu] = [(0, 1, 1)]
    if before < 1:
        state.counts["gpu_ecc_dram_uncorrected_total"][gpu, 0] += 1
        xid(state, wear.start + wear.length_s, gpu, 94)


def _event(note: Note) -> Event:
    device = "" if note.gpu < 0 else f"gpu{note.gpu}"
    return Event(device, note.kind, note.code, note.severity, note.message, time=note.time, count=note.count)
