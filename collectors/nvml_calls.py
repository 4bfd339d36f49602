"""What NVML is asked for besides fields: one entry a reading, with the older calls that serve where newer are missing.

Runs in the child process, like the reader that walks this table.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import pynvml as nvml

from forewarn.collectors.nvml_fields import Tier

ABSENT_CODES = frozenset((2, 3, 21, 22, 25, 26))
"""INVALID_ARGUMENT, NOT_SUPPORTED, NO_DATA, VGPU_ECC_NOT_SUPPORTED, ARGUMENT_VERSION_MISMATCH, DEPRECATED."""

Pairs = list[tuple[str, float]]


class Call(NamedTuple):
    """One reading: tried in the order of `ways`, the first that this driver has wins."""

    name: str
    tier: Tier
    ways: tuple[Callable[[Any], Pairs], ...]


class OpenGpu:
    """A GPU in reach: its handle, and what is known of what it can do."""

    def __init__(self, device: str, handle: Any) -> None:
        self.device = device
        self.handle = handle
        self.absent: dict[str, float] = {}
        """Call name to the monotonic time after which it may be asked again."""
        self.way: dict[str, int] = {}
        self.blocks: dict[str, Any] = {}
        self.links: int | None = None
        self.fans: int = 0
        self.mig: float | None = None

    def forget(self) -> None:
        """Ask everything again: the GPU was configured anew."""
        self.absent = {name: until for name, until in self.absent.items() if math.isinf(until)}
        self.blocks.clear()
        self.links = None


def _one(
    call: Callable[..., Any], metric: str, *arguments: Any, scale: float = 1.0
) -> Callable[[OpenGpu], Pairs]:
    def read(gpu: OpenGpu) -> Pairs:
        return [(metric, call(gpu.handle, *arguments) * scale)]

    return read


def _utilization(gpu: OpenGpu) -> Pairs:
    rates = nvml.nvmlDeviceGetUtilizationRates(gpu.handle)
    return [("gpu_utilization_ratio", rates.gpu / 100), ("gpu_memory_utilization_ratio", rates.memory / 100)]


def _memory(gpu: OpenGpu) -> Pairs:
    info = nvml.nvmlDeviceGetMemoryInfo(gpu.handle, nvml.nvmlMemory_v2)
    return [
        ("gpu_memory_used_bytes", info.used),
        ("gpu_memory_total_bytes", info.total),
        ("gpu_memory_reserved_bytes", info.reserved),
    ]


def _memory_v1(gpu: OpenGpu) -> Pairs:
    # Since R510 "used" of this call holds what the driver reserves; older drivers have nothing better.
    info = nvml.nvmlDeviceGetMemoryInfo(gpu.handle)
    return [("gpu_memory_used_bytes", info.used), ("gpu_memory_total_bytes", info.total)]


def _codec(call: Callable[[Any], list[int]], metric: str) -> Callable[[OpenGpu], Pairs]:
    return lambda gpu: [(metric, call(gpu.handle)[0] / 100)]


def _fans(gpu: OpenGpu) -> Pairs:
    if not gpu.fans:
        gpu.fans = nvml.nvmlDeviceGetNumFans(gpu.handle)
    speeds = [nvml.nvmlDeviceGetFanSpeed_v2(gpu.handle, fan) for fan in range(gpu.fans)]
    return [("gpu_fan_speed_ratio", max(speeds) / 100)] if speeds else []


def _ecc(metric: str, uncorrected: int, location: int) -> Callable[[OpenGpu], Pairs]:
    return lambda gpu: [
        (
            metric,
            nvml.nvmlDeviceGetMemoryErrorCounter(gpu.handle, uncorrected, nvml.NVML_AGGREGATE_ECC, location),
        )
    ]


def _ecc_sum(metric: str, uncorrected: int) -> Callable[[OpenGpu], Pairs]:
    """SRAM of parts that count it by unit only: L1, L2, register file, texture, CBU."""

    def read(gpu: OpenGpu) -> Pairs:
        total, answered, last = 0, False, None
        for location in (0, 1, 3, 5, 6):
            try:
                total += nvml.nvmlDeviceGetMemoryErrorCounter(
                    gpu.handle, uncorrected, nvml.NVML_AGGREGATE_ECC, location
                )
                answered = True
            except nvml.NVMLError as error:
                if error.value not in ABSENT_CODES:
                    raise
                last = error
        if not answered and last is not None:
            raise last
        return [(metric, total)]

    return read


def _sram(gpu: OpenGpu) -> Pairs:
    status = nvml.c_nvmlEccSramErrorStatus_v1_t()  # sets its own version; the driver refuses another with 25
    nvml.nvmlDeviceGetSramEccErrorStatus(gpu.handle, ctypes.byref(status))
    return [
        ("gpu_ecc_sram_threshold_exceeded", 1.0 if status.bThresholdExceeded else 0.0),
        ("gpu_ecc_sram_parity_uncorrected_total", status.aggregateUncParity),
        ("gpu_ecc_sram_secded_uncorrected_total", status.aggregateUncSecDed),
        ("gpu_ecc_sram_l2_uncorrected_total", status.aggregateUncBucketL2),
        ("gpu_ecc_sram_sm_uncorrected_total", status.aggregateUncBucketSm),
        ("gpu_ecc_sram_pcie_uncorrected_total", status.aggregateUncBucketPcie),
        ("gpu_ecc_sram_microcontroller_uncorrected_total", status.aggregateUncBucketMcu),
        ("gpu_ecc_sram_other_uncorrected_total", status.aggregateUncBucketOther),
    ]


def _remapped(gpu: OpenGpu) -> Pairs:
    corrected, uncorrected, pending, failed = nvml.nvmlDeviceGetRemappedRows(gpu.handle)
    return [
        ("gpu_row_remap_corrected_total", corrected),
        ("gpu_row_remap_uncorrected_total", uncorrected),
        ("gpu_row_remap_pending", pending),
        ("gpu_row_remap_failure", failed),
    ]


def _histogram(gpu: OpenGpu) -> Pairs:
    banks = nvml.nvmlDeviceGetRowRemapperHistogram(gpu.handle)
    return [
        (f"gpu_row_remap_banks_{name}", getattr(banks, name))
        for name in ("max", "high", "partial", "low", "none")
    ]


def _retired(call: Callable[[Any, int], list[Any]], metric: str, cause: int) -> Callable[[OpenGpu], Pairs]:
    return lambda gpu: [(metric, len(call(gpu.handle, cause)))]


def _fabric(version: int) -> Callable[[OpenGpu], Pairs]:
    def read(gpu: OpenGpu) -> Pairs:
        info = nvml.c_nvmlGpuFabricInfo_v3_t() if version == 3 else nvml.c_nvmlGpuFabricInfo_v2_t()
        nvml.nvmlDeviceGetGpuFabricInfoV(gpu.handle, ctypes.byref(info))
        if info.state == nvml.NVML_GPU_FABRIC_STATE_NOT_SUPPORTED:
            return []
        pairs = [("gpu_fabric_state", info.state), ("gpu_fabric_health_mask", info.healthMask)]
        if info.state == nvml.NVML_GPU_FABRIC_STATE_COMPLETED:
            pairs.append(("gpu_fabric_status", info.status))
        if version == 3:
            pairs.append(("gpu_fabric_health", info.healthSummary))
        return pairs

    return read


def _first(call: Callable[[Any], list[int]], metric: str) -> Callable[[OpenGpu], Pairs]:
    return lambda gpu: [(metric, call(gpu.handle)[0])]


def _gsp(gpu: OpenGpu) -> Pairs:
    # Own arguments: the defaults of the wrapper are shared between all callers.
    enabled, default = ctypes.c_uint(), ctypes.c_uint()
    nvml.nvmlDeviceGetGspFirmwareMode(gpu.handle, ctypes.pointer(enabled), ctypes.pointer(default))
    return [("gpu_gsp_enabled", enabled.value)]


def _processes(gpu: OpenGpu) -> Pairs:
    # Only the v3 call: with the older ones, structs of driver and binding differ and process ids come out wrong.
    return [("gpu_processes", len(nvml.nvmlDeviceGetComputeRunningProcesses_v3(gpu.handle)))]


_MHZ = 1e6
_ECC = (("corrected", 0), ("uncorrected", 1))

CALLS: tuple[Call, ...] = (
    Call(
        "temperature",
        "fast",
        (
            _one(nvml.nvmlDeviceGetTemperatureV, "gpu_temperature_celsius", 0),
            _one(nvml.nvmlDeviceGetTemperature, "gpu_temperature_celsius", 0),
        ),
    ),
    Call("power", "fast", (_one(nvml.nvmlDeviceGetPowerUsage, "gpu_power_watts", scale=1e-3),)),
    Call(
        "energy",
        "fast",
        (_one(nvml.nvmlDeviceGetTotalEnergyConsumption, "gpu_energy_joules_total", scale=1e-3),),
    ),
    Call("sm_clock", "fast", (_one(nvml.nvmlDeviceGetClockInfo, "gpu_sm_clock_hertz", 1, scale=_MHZ),)),
    Call(
        "memory_clock", "fast", (_one(nvml.nvmlDeviceGetClockInfo, "gpu_memory_clock_hertz", 2, scale=_MHZ),)
    ),
    Call("utilization", "fast", (_utilization,)),
    Call("memory", "fast", (_memory, _memory_v1)),
    Call(
        "clock_event_reasons",
        "fast",
        (
            _one(nvml.nvmlDeviceGetCurrentClocksEventReasons, "gpu_clock_event_reasons"),
            _one(nvml.nvmlDeviceGetCurrentClocksThrottleReasons, "gpu_clock_event_reasons"),
        ),
    ),
    Call("performance_state", "fast", (_one(nvml.nvmlDeviceGetPerformanceState, "gpu_performance_state"),)),
    Call(
        "power_limit",
        "medium",
        (_one(nvml.nvmlDeviceGetEnforcedPowerLimit, "gpu_power_limit_watts", scale=1e-3),),
    ),
    Call("margin", "medium", (_one(nvml.nvmlDeviceGetMarginTemperature, "gpu_temperature_margin_celsius"),)),
    Call("fans", "medium", (_fans, _one(nvml.nvmlDeviceGetFanSpeed, "gpu_fan_speed_ratio", scale=0.01))),
    Call(
        "encoder", "medium", (_codec(nvml.nvmlDeviceGetEncoderUtilization, "gpu_encoder_utilization_ratio"),)
    ),
    Call(
        "decoder", "medium", (_codec(nvml.nvmlDeviceGetDecoderUtilization, "gpu_decoder_utilization_ratio"),)
    ),
    *(
        Call(
            f"ecc_sram_{word}",
            "medium",
            (
                _ecc(f"gpu_ecc_sram_{word}_total", kind, nvml.NVML_MEMORY_LOCATION_SRAM),
                _ecc_sum(f"gpu_ecc_sram_{word}_total", kind),
            ),
        )
        for word, kind in _ECC
    ),
    *(
        Call(
            f"ecc_dram_{word}",
            "medium",
            (_ecc(f"gpu_ecc_dram_{word}_total", kind, nvml.NVML_MEMORY_LOCATION_DRAM),),
        )
        for word, kind in _ECC
    ),
    Call("sram_status", "medium", (_sram,)),
    Call("remapped_rows", "medium", (_remapped,)),
    Call("pcie_replay", "medium", (_one(nvml.nvmlDeviceGetPcieReplayCounter, "gpu_pcie_replay_total"),)),
    Call(
        "pcie_generation",
        "medium",
        (_one(nvml.nvmlDeviceGetCurrPcieLinkGeneration, "gpu_pcie_link_generation"),),
    ),
    Call("pcie_width", "medium", (_one(nvml.nvmlDeviceGetCurrPcieLinkWidth, "gpu_pcie_link_width"),)),
    Call("fabric", "medium", (_fabric(3), _fabric(2))),
    Call("mig", "medium", (_first(nvml.nvmlDeviceGetMigMode, "gpu_mig_enabled"),)),
    Call("processes", "medium", (_processes,)),
    Call("ecc_mode", "slow", (_first(nvml.nvmlDeviceGetEccMode, "gpu_ecc_enabled"),)),
    Call("persistence", "slow", (_one(nvml.nvmlDeviceGetPersistenceMode, "gpu_persistence_enabled"),)),
    Call("gsp", "slow", (_gsp,)),
    Call("row_histogram", "slow", (_histogram,)),
    Call(
        "unrepairable",
        "slow",
        (_one(nvml.nvmlDeviceGetUnrepairableMemoryFlag_v1, "gpu_memory_unrepairable"),),
    ),
    *(
        Call(
            f"retired_{word}",
            "slow",
            (
                _retired(nvml.nvmlDeviceGetRetiredPages_v2, f"gpu_retired_pages_{word}_total", cause),
                _retired(nvml.nvmlDeviceGetRetiredPages, f"gpu_retired_pages_{word}_total", cause),
            ),
        )
        for word, cause in (("sbe", 0), ("dbe", 1))
    ),
    Call(
        "retired_pending",
        "slow",
        (_one(nvml.nvmlDeviceGetRetiredPagesPendingStatus, "gpu_retired_pages_pending"),),
    ),
    Call(
        "sm_clock_max",
        "slow",
        (_one(nvml.nvmlDeviceGetMaxClockInfo, "gpu_sm_clock_max_hertz", 1, scale=_MHZ),),
    ),
    Call(
        "shutdown_threshold",
        "slow",
        (_one(nvml.nvmlDeviceGetTemperatureThreshold, "gpu_temperature_shutdown_celsius", 0),),
    ),
    Call(
        "slowdown_threshold",
        "slow",
        (_one(nvml.nvmlDeviceGetTemperatureThreshold, "gpu_temperature_slowdown_celsius", 1),),
    ),
    Call(
        "pcie_generation_max",
        "slow",
        (_one(nvml.nvmlDeviceGetMaxPcieLinkGeneration, "gpu_pcie_link_generation_max"),),
    ),
    Call("pcie_width_max", "slow", (_one(nvml.nvmlDeviceGetMaxPcieLinkWidth, "gpu_pcie_link_width_max"),)),
)

IN_FIELDS = {"remapped_rows": "gpu_row_remap_corrected_total", "pcie_replay": "gpu_pcie_replay_total"}
"""Calls that serve only where the field of the same meaning does not answer."""
