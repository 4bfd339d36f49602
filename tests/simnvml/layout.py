"""The state that a test and the simulated driver share: one memory-mapped file, laid out here and nowhere else.

The C side takes its structs and numbers from `header()`, so the two cannot drift apart.
"""

from __future__ import annotations

import ctypes
from ctypes import Structure, c_char, c_int32, c_uint32, c_uint64
from typing import Any

MAGIC = 0x4D4C5653
LAYOUT_VERSION = 1
MAX_GPUS = 16
MAX_LINKS = 36
MAX_FIELDS = 320
MAX_EVENTS = 256
MAX_PROCESSES = 32
MAX_FANS = 8

CALLS = (
    "nvmlInitWithFlags",
    "nvmlInit_v2",
    "nvmlShutdown",
    "nvmlErrorString",
    "nvmlSystemGetDriverVersion",
    "nvmlSystemGetNVMLVersion",
    "nvmlSystemGetCudaDriverVersion",
    "nvmlSystemGetCudaDriverVersion_v2",
    "nvmlDeviceGetCount_v2",
    "nvmlDeviceGetHandleByIndex_v2",
    "nvmlDeviceGetHandleByUUID",
    "nvmlDeviceGetHandleByPciBusId_v2",
    "nvmlDeviceGetIndex",
    "nvmlDeviceGetMinorNumber",
    "nvmlDeviceGetName",
    "nvmlDeviceGetUUID",
    "nvmlDeviceGetSerial",
    "nvmlDeviceGetVbiosVersion",
    "nvmlDeviceGetInforomImageVersion",
    "nvmlDeviceGetGspFirmwareVersion",
    "nvmlDeviceGetGspFirmwareMode",
    "nvmlDeviceGetPciInfo_v3",
    "nvmlDeviceGetTemperature",
    "nvmlDeviceGetTemperatureV",
    "nvmlDeviceGetTemperatureThreshold",
    "nvmlDeviceGetMarginTemperature",
    "nvmlDeviceGetPowerUsage",
    "nvmlDeviceGetEnforcedPowerLimit",
    "nvmlDeviceGetPowerManagementLimit",
    "nvmlDeviceGetTotalEnergyConsumption",
    "nvmlDeviceGetClockInfo",
    "nvmlDeviceGetMaxClockInfo",
    "nvmlDeviceGetPerformanceState",
    "nvmlDeviceGetPowerState",
    "nvmlDeviceGetUtilizationRates",
    "nvmlDeviceGetEncoderUtilization",
    "nvmlDeviceGetDecoderUtilization",
    "nvmlDeviceGetNumFans",
    "nvmlDeviceGetFanSpeed",
    "nvmlDeviceGetFanSpeed_v2",
    "nvmlDeviceGetMemoryInfo",
    "nvmlDeviceGetMemoryInfo_v2",
    "nvmlDeviceGetBAR1MemoryInfo",
    "nvmlDeviceGetCurrentClocksEventReasons",
    "nvmlDeviceGetCurrentClocksThrottleReasons",
    "nvmlDeviceGetFieldValues",
    "nvmlDeviceGetEccMode",
    "nvmlDeviceGetTotalEccErrors",
    "nvmlDeviceGetMemoryErrorCounter",
    "nvmlDeviceGetSramEccErrorStatus",
    "nvmlDeviceGetRemappedRows",
    "nvmlDeviceGetRowRemapperHistogram",
    "nvmlDeviceGetUnrepairableMemoryFlag_v1",
    "nvmlDeviceGetRetiredPages",
    "nvmlDeviceGetRetiredPages_v2",
    "nvmlDeviceGetRetiredPagesPendingStatus",
    "nvmlDeviceGetPcieReplayCounter",
    "nvmlDeviceGetPcieThroughput",
    "nvmlDeviceGetCurrPcieLinkGeneration",
    "nvmlDeviceGetCurrPcieLinkWidth",
    "nvmlDeviceGetMaxPcieLinkGeneration",
    "nvmlDeviceGetMaxPcieLinkWidth",
    "nvmlDeviceGetNvLinkState",
    "nvmlDeviceGetNvLinkErrorCounter",
    "nvmlDeviceGetGpuFabricInfoV",
    "nvmlDeviceGetMigMode",
    "nvmlDeviceGetPersistenceMode",
    "nvmlDeviceGetComputeMode",
    "nvmlDeviceGetComputeRunningProcesses_v3",
    "nvmlDeviceGetGraphicsRunningProcesses_v3",
    "nvmlDeviceGetSupportedEventTypes",
    "nvmlDeviceRegisterEvents",
    "nvmlEventSetCreate",
    "nvmlEventSetWait_v2",
    "nvmlEventSetFree",
)
"""Every NVML symbol that is answered; what is not here is FUNCTION_NOT_FOUND."""

VALUES = (
    "temperature_c",
    "threshold_shutdown_c",
    "threshold_slowdown_c",
    "threshold_memory_max_c",
    "threshold_gpu_max_c",
    "margin_c",
    "power_mw",
    "power_limit_mw",
    "energy_mj",
    "clock_graphics_mhz",
    "clock_sm_mhz",
    "clock_memory_mhz",
    "clock_video_mhz",
    "clock_max_sm_mhz",
    "clock_max_memory_mhz",
    "performance_state",
    "utilization_gpu_pct",
    "utilization_memory_pct",
    "utilization_encoder_pct",
    "utilization_decoder_pct",
    "fans",
    "memory_total",
    "memory_reserved",
    "memory_used",
    "clock_event_reasons",
    "ecc_mode",
    "sram_status",
    "sram_threshold_exceeded",
    "sram_parity",
    "sram_secded",
    "sram_bucket_l2",
    "sram_bucket_sm",
    "sram_bucket_pcie",
    "sram_bucket_mcu",
    "sram_bucket_other",
    "remap_corrected",
    "remap_uncorrected",
    "remap_pending",
    "remap_failure",
    "banks_max",
    "banks_high",
    "banks_partial",
    "banks_low",
    "banks_none",
    "unrepairable_memory",
    "retired_sbe",
    "retired_dbe",
    "retired_pending",
    "pcie_replay",
    "pcie_gen",
    "pcie_width",
    "pcie_gen_max",
    "pcie_width_max",
    "nvlink",
    "fabric_state",
    "fabric_status",
    "fabric_health_mask",
    "fabric_health_summary",
    "fabric_versions",
    "mig_mode",
    "persistence",
    "compute_mode",
    "gsp_mode",
    "process_list",
    "event_types",
)
"""Readings by name. Each has its own return code: 3 (NOT_SUPPORTED) until a profile sets it."""

ECC_LOCATIONS = 8
VALUE_TYPES = {"double": 0, "uint": 1, "ulong": 2, "ull": 3, "sll": 4, "sint": 5, "ushort": 6}


class Cell(Structure):
    """One reading: its return code, its NVML value type and its 64 bits."""

    _fields_ = [("ret", c_int32), ("type", c_uint32), ("value", c_uint64)]


class Fault(Structure):
    """What a call does besides its work: answer with an error, hang, take its time. `calls` counts its calls."""

    _fields_ = [("error", c_int32), ("hang", c_uint32), ("latency_us", c_uint32), ("calls", c_uint32)]


class Happening(Structure):
    """One driver event. `slot` beyond the last GPU stands for a device that can not be looked up."""

    _fields_ = [
        ("type", c_uint64),
        ("data", c_uint64),
        ("slot", c_uint32),
        ("gpu_instance", c_uint32),
        ("compute_instance", c_uint32),
        ("reserved", c_uint32),
    ]


class Process(Structure):
    _fields_ = [("used", c_uint64), ("pid", c_uint32), ("reserved", c_uint32)]


class Gpu(Structure):
    """One GPU slot."""

    _fields_ = [
        ("present", c_uint32),
        ("error", c_int32),
        ("domain", c_uint32),
        ("bus", c_uint32),
        ("device", c_uint32),
        ("links", c_uint32),
        ("processes", c_uint32),
        ("field_limit", c_uint32),
        ("name", c_char * 96),
        ("uuid", c_char * 96),
        ("serial", c_char * 32),
        ("vbios", c_char * 32),
        ("inforom", c_char * 16),
        ("gsp_version", c_char * 64),
        ("process", Process * MAX_PROCESSES),
        ("fan_pct", c_uint32 * MAX_FANS),
        ("value", Cell * len(VALUES)),
        ("ecc", Cell * ECC_LOCATIONS * 2 * 2),
        ("fault", Fault * len(CALLS)),
        ("field", Cell * MAX_FIELDS * MAX_LINKS),
    ]


class State(Structure):
    """The whole file."""

    _fields_ = [
        ("magic", c_uint32),
        ("version", c_uint32),
        ("sequence", c_uint32),
        ("generation", c_uint32),
        ("library_version", c_char * 80),
        ("kernel_version", c_char * 80),
        ("events", c_uint64),
        ("event", Happening * MAX_EVENTS),
        ("fault", Fault * len(CALLS)),
        ("gpu", Gpu * MAX_GPUS),
    ]


_C_TYPES: dict[Any, str] = {c_int32: "int32_t", c_uint32: "uint32_t", c_uint64: "uint64_t", c_char: "char"}


def _member(name: str, kind: Any) -> str:
    sizes = ""
    while isinstance(kind, type) and issubclass(kind, ctypes.Array):
        sizes += f"[{kind._length_}]"
        kind = kind._type_
    return f"  {_C_TYPES.get(kind, kind.__name__)} {name}{sizes};"


def header() -> str:
    """The C header: the structs, the number of every call and every value, and a check of the sizes."""
    lines = ["#include <stdint.h>", f"#define SIM_MAGIC {MAGIC:#x}u", f"#define SIM_LAYOUT {LAYOUT_VERSION}u"]
    lines += [f"#define {n} {globals()[n]}" for n in ("MAX_GPUS", "MAX_LINKS", "MAX_FIELDS", "MAX_EVENTS")]
    lines += [f"#define {n} {globals()[n]}" for n in ("MAX_PROCESSES", "MAX_FANS", "ECC_LOCATIONS")]
    lines += ["enum {", *(f"  C_{name}," for name in CALLS), "  N_CALLS", "};"]
    lines += ["enum {", *(f"  V_{name}," for name in VALUES), "  N_VALUES", "};"]
    for struct in (Cell, Fault, Happening, Process, Gpu, State):
        lines += [
            "typedef struct {",
            *(_member(n, k) for n, k, *_ in struct._fields_),
            f"}} {struct.__name__};",
        ]
        lines.append(
            f'_Static_assert(sizeof({struct.__name__}) == {ctypes.sizeof(struct)}, "{struct.__name__}");'
        )
    return "\n".join(lines) + "\n"
