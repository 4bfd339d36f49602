"""Simulated GPUs for the demo: plain healthy readings with noise, and one part whose memory wears out.

The course of the wear is that of real HBM faults (corrected errors grow, rows are remapped, spare rows run out, a
contained uncorrected error ends it), but what takes hours to weeks takes about a minute here.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field

from forewarn.collectors.base import Device, Event, Reading, Sample

MODEL = "NVIDIA H100 80GB HBM3"
WEAR_GROWTH_S = 6.0
"""Corrected errors grow e-fold in this time once the wear has begun."""
FIRST_REMAP_S = 14.0
SPARES_OUT_S = 26.0
FATAL_S = 60.0
BANKS = 640
MOST_ERRORS_HZ = 400.0


@dataclass
class _Gpu:
    node: str
    name: str
    seed: int
    worn_from: float | None = None
    corrected: float = 0.0
    uncorrected: float = 0.0
    remapped: int = 0
    replays: float = 0.0
    energy_j: float = 1e9
    last: float = math.nan
    told: set[str] = field(default_factory=set)


class SimulatedFleet:
    """Nodes with GPUs that answer in the hardware's place. Deterministic for a seed and the times polled."""

    def __init__(self, nodes: int, gpus_per_node: int, seed: int) -> None:
        self._random = random.Random(seed)  # noqa: S311 - a simulation, no secret
        self.nodes = [f"sim-{n:02d}" for n in range(1, nodes + 1)]
        self._gpus = {
            node: [_Gpu(node, f"gpu{i}", self._random.randrange(2**32)) for i in range(gpus_per_node)]
            for node in self.nodes
        }

    def wear_out(self, now: float) -> str:
        """Let one GPU begin to fail; returns its full id."""
        node = self.nodes[min(6, len(self.nodes) - 1)]
        gpu = self._gpus[node][min(3, len(self._gpus[node]) - 1)]
        gpu.worn_from = now
        return f"{node}/{gpu.name}"

    def poll(self, node: str, time: float) -> Reading:
        """Readings and events of one node at `time` (seconds since the epoch)."""
        reading = Reading(samples=[], events=[], devices=[])
        reading.devices.append(Device("", "node", model="simulated host", simulated=True))
        for gpu in self._gpus[node]:
            self._poll_gpu(gpu, time, reading)
        return reading

    def _poll_gpu(self, gpu: _Gpu, time: float, reading: Reading) -> None:
        passed_s = 0.0 if math.isnan(gpu.last) else max(0.0, time - gpu.last)
        gpu.last = time
        rng = self._random
        warm = (gpu.seed % 7) - 3
        power = 620 + warm * 6 + rng.gauss(0, 12)
        gpu.energy_j += power * passed_s
        if rng.random() < passed_s / 200_000:
            gpu.corrected += 1
        if gpu.worn_from is not None:
            self._wear(gpu, time - gpu.worn_from, passed_s, reading)
        full = max(0, BANKS - gpu.remapped)
        values = {
            "gpu_temperature_celsius": 56 + warm + rng.gauss(0, 0.8),
            "gpu_memory_temperature_celsius": 68 + warm + rng.gauss(0, 0.8),
            "gpu_temperature_slowdown_celsius": 87,
            "gpu_temperature_shutdown_celsius": 92,
            "gpu_power_watts": power,
            "gpu_power_limit_watts": 700,
            "gpu_energy_joules_total": gpu.energy_j,
            "gpu_sm_clock_hertz": 1.755e9 + rng.gauss(0, 5e6),
            "gpu_memory_clock_hertz": 2.619e9,
            "gpu_utilization_ratio": min(1.0, 0.97 + rng.gauss(0, 0.01)),
            "gpu_memory_used_bytes": 71e9,
            "gpu_memory_total_bytes": 85.5e9,
            "gpu_clock_event_reasons": 0,
            "gpu_ecc_enabled": 1,
            "gpu_ecc_sram_corrected_total": 0,
            "gpu_ecc_sram_uncorrected_total": 0,
            "gpu_ecc_dram_corrected_total": math.floor(gpu.corrected),
            "gpu_ecc_dram_uncorrected_total": math.floor(gpu.uncorrected),
            "gpu_row_remap_corrected_total": gpu.remapped,
            "gpu_row_remap_uncorrected_total": 1 if "remap" in gpu.told else 0,
            "gpu_row_remap_pending": 1 if "remap" in gpu.told else 0,
            "gpu_row_remap_failure": 0,
            "gpu_row_remap_banks_max": full,
            "gpu_row_remap_banks_high": gpu.remapped if "spares" not in gpu.told else 0,
            "gpu_row_remap_banks_partial": 0,
            "gpu_row_remap_banks_low": 0,
            "gpu_row_remap_banks_none": gpu.remapped if "spares" in gpu.told else 0,
            "gpu_pcie_replay_total": gpu.replays,
            "gpu_pcie_link_generation": 5,
            "gpu_pcie_link_width": 16,
            "gpu_pcie_link_width_max": 16,
            "gpu_nvlink_links_active": 18,
            "gpu_nvlink_links_total": 18,
        }
        reading.samples.extend(Sample(gpu.name, metric, float(value)) for metric, value in values.items())
        reading.devices.append(
            Device(gpu.name, "gpu", model=MODEL, serial=f"SIM-{gpu.node}-{gpu.name}", simulated=True)
        )

    def _wear(self, gpu: _Gpu, age_s: float, passed_s: float, reading: Reading) -> None:
        if "fatal" in gpu.told:
            return  # the job on it has ended: nothing reads the worn rows any more
        rate = 0.5 * math.exp(min(age_s, FATAL_S) / WEAR_GROWTH_S)
        gpu.corrected += min(rate, MOST_ERRORS_HZ) * passed_s
        if age_s >= FIRST_REMAP_S:
            gpu.remapped = 1 + int((age_s - FIRST_REMAP_S) / 12)
            self._tell(
                gpu,
                reading,
                "remap",
                "63",
                "error",
                "Row remapping event: a row is to be remapped (simulated)",
            )
        if age_s >= SPARES_OUT_S:
            gpu.told.add("spares")
        if age_s >= FATAL_S and "fatal" not in gpu.told:
            gpu.uncorrected += 1
            self._tell(
                gpu,
                reading,
                "fatal",
                "94",
                "critical",
                "Contained memory error: the application on this GPU ends (simulated)",
            )

    def _tell(self, gpu: _Gpu, reading: Reading, once: str, code: str, severity: str, message: str) -> None:
        if once in gpu.told:
            return
        gpu.told.add(once)
        reading.events.append(Event(gpu.name, "xid", code, severity, message))
