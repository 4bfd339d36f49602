"""Every metric and every kind of event Forewarn knows, once. The exporter, the feature builder, the dashboards
and the documents all read this; collectors emit only what stands here.

`trouble` is the direction that means trouble: +1 higher is worse, -1 lower is worse, 0 neither by itself. Models
take their monotone constraints from it. `source` names the call, field or file that the value comes from.
"""

from __future__ import annotations

from typing import Literal

import msgspec

MetricType = Literal["gauge", "counter"]
DeviceKind = Literal["gpu", "disk", "nic", "node", "job"]


class Metric(msgspec.Struct, frozen=True):
    """One metric. `unit` is the base unit as Prometheus spells it, or "1" for plain numbers and masks."""

    name: str
    kind: DeviceKind
    type: MetricType
    unit: str
    help: str
    source: str
    trouble: int = 0
    labels: tuple[str, ...] = ()
    """Labels a sample of it may carry on the node's own /metrics."""


class EventKind(msgspec.Struct, frozen=True):
    """One kind of event. `codes` explains the code: a number, or one of a few words."""

    name: str
    help: str
    codes: str


def _g(
    name: str,
    unit: str,
    help: str,
    source: str,
    trouble: int = 0,
    kind: DeviceKind = "gpu",
    labels: tuple[str, ...] = (),
) -> Metric:
    return Metric(
        name=name,
        kind=kind,
        type="gauge",
        unit=unit,
        help=help,
        source=source,
        trouble=trouble,
        labels=labels,
    )


def _c(
    name: str,
    unit: str,
    help: str,
    source: str,
    trouble: int = 1,
    kind: DeviceKind = "gpu",
    labels: tuple[str, ...] = (),
) -> Metric:
    return Metric(
        name=name,
        kind=kind,
        type="counter",
        unit=unit,
        help=help,
        source=source,
        trouble=trouble,
        labels=labels,
    )


_GPU = [
    _g(
        "gpu_temperature_celsius", "celsius", "GPU core temperature", "nvmlDeviceGetTemperatureV, sensor 0", 1
    ),
    _g("gpu_memory_temperature_celsius", "celsius", "Memory (HBM) temperature", "field 82", 1),
    _g(
        "gpu_temperature_margin_celsius",
        "celsius",
        "Degrees left to the slowdown limit",
        "nvmlDeviceGetMarginTemperature",
        -1,
    ),
    _g(
        "gpu_temperature_slowdown_celsius",
        "celsius",
        "Temperature at which the GPU slows down",
        "nvmlDeviceGetTemperatureThreshold(SLOWDOWN)",
    ),
    _g(
        "gpu_temperature_shutdown_celsius",
        "celsius",
        "Temperature at which the GPU shuts down",
        "nvmlDeviceGetTemperatureThreshold(SHUTDOWN)",
    ),
    _g("gpu_power_watts", "watts", "Power drawn by the board", "nvmlDeviceGetPowerUsage"),
    _g("gpu_power_limit_watts", "watts", "Power limit in force", "nvmlDeviceGetEnforcedPowerLimit"),
    _g("gpu_power_limit_default_watts", "watts", "Power limit the board was shipped with", "field 189"),
    _c(
        "gpu_energy_joules_total",
        "joules",
        "Energy drawn since the driver was loaded",
        "nvmlDeviceGetTotalEnergyConsumption",
        0,
    ),
    _g("gpu_sm_clock_hertz", "hertz", "SM clock", "nvmlDeviceGetClockInfo(SM)"),
    _g("gpu_memory_clock_hertz", "hertz", "Memory clock", "nvmlDeviceGetClockInfo(MEM)"),
    _g("gpu_sm_clock_max_hertz", "hertz", "Highest SM clock of the part", "nvmlDeviceGetMaxClockInfo(SM)"),
    _g(
        "gpu_performance_state",
        "1",
        "Performance state: 0 (P0, fastest) to 15",
        "nvmlDeviceGetPerformanceState",
    ),
    _g(
        "gpu_utilization_ratio",
        "ratio",
        "Share of time with a kernel running, 0 to 1",
        "nvmlDeviceGetUtilizationRates",
    ),
    _g(
        "gpu_memory_utilization_ratio",
        "ratio",
        "Share of time memory was read or written, 0 to 1",
        "nvmlDeviceGetUtilizationRates",
    ),
    _g(
        "gpu_encoder_utilization_ratio",
        "ratio",
        "Video encoder use, 0 to 1",
        "nvmlDeviceGetEncoderUtilization",
    ),
    _g(
        "gpu_decoder_utilization_ratio",
        "ratio",
        "Video decoder use, 0 to 1",
        "nvmlDeviceGetDecoderUtilization",
    ),
    _g("gpu_fan_speed_ratio", "ratio", "Fan speed that is asked for, 0 to 1", "nvmlDeviceGetFanSpeed_v2"),
    _g("gpu_memory_used_bytes", "bytes", "Memory in use", "nvmlDeviceGetMemoryInfo v2"),
    _g("gpu_memory_total_bytes", "bytes", "Memory of the device", "nvmlDeviceGetMemoryInfo v2"),
    _g(
        "gpu_memory_reserved_bytes",
        "bytes",
        "Memory the driver keeps for itself",
        "nvmlDeviceGetMemoryInfo v2",
    ),
    _g(
        "gpu_clock_event_reasons",
        "1",
        "Bit mask of why clocks are not at their highest, as NVML gives it",
        "nvmlDeviceGetCurrentClocksEventReasons",
    ),
    _c(
        "gpu_violation_power_seconds_total",
        "seconds",
        "Time clocks were held down by the power limit",
        "field 74",
    ),
    _c(
        "gpu_violation_thermal_seconds_total",
        "seconds",
        "Time clocks were held down by the thermal limit",
        "field 75",
    ),
    _c(
        "gpu_violation_sync_boost_seconds_total",
        "seconds",
        "Time clocks were held down by sync boost",
        "field 76",
        0,
    ),
    _c(
        "gpu_violation_board_limit_seconds_total",
        "seconds",
        "Time clocks were held down by the board limit",
        "field 77",
    ),
    _c(
        "gpu_violation_low_utilization_seconds_total",
        "seconds",
        "Time clocks were low for lack of work",
        "field 78",
        0,
    ),
    _c(
        "gpu_violation_reliability_seconds_total",
        "seconds",
        "Time clocks were held down for reliability",
        "field 79",
    ),
    _c(
        "gpu_slowdown_software_thermal_seconds_total",
        "seconds",
        "Time in software thermal slowdown",
        "field 269",
    ),
    _c(
        "gpu_slowdown_hardware_thermal_seconds_total",
        "seconds",
        "Time in hardware thermal slowdown",
        "field 270",
    ),
    _c("gpu_slowdown_power_brake_seconds_total", "seconds", "Time in hardware power brake", "field 271"),
    _g("gpu_ecc_enabled", "1", "1 when ECC is on", "nvmlDeviceGetEccMode"),
    _c(
        "gpu_ecc_sram_corrected_total",
        "1",
        "Corrected SRAM errors over the life of the board",
        "nvmlDeviceGetMemoryErrorCounter / ECC fields",
    ),
    _c(
        "gpu_ecc_sram_uncorrected_total",
        "1",
        "Uncorrected SRAM errors over the life of the board",
        "nvmlDeviceGetMemoryErrorCounter / ECC fields",
    ),
    _c(
        "gpu_ecc_dram_corrected_total",
        "1",
        "Corrected DRAM errors over the life of the board",
        "nvmlDeviceGetMemoryErrorCounter / ECC fields",
    ),
    _c(
        "gpu_ecc_dram_uncorrected_total",
        "1",
        "Uncorrected DRAM errors over the life of the board",
        "nvmlDeviceGetMemoryErrorCounter / ECC fields",
    ),
    _c(
        "gpu_ecc_aggregate_corrected_total",
        "1",
        "Corrected errors over the life of the board, all locations",
        "field 5, DCGM_FI_DEV_ECC_SBE_AGG_TOTAL",
    ),
    _c(
        "gpu_ecc_aggregate_uncorrected_total",
        "1",
        "Uncorrected errors over the life of the board, all locations",
        "field 6, DCGM_FI_DEV_ECC_DBE_AGG_TOTAL",
    ),
    _c("gpu_ecc_volatile_corrected_total", "1", "Corrected errors since the driver was loaded", "field 3"),
    _c(
        "gpu_ecc_volatile_uncorrected_total", "1", "Uncorrected errors since the driver was loaded", "field 4"
    ),
    _g(
        "gpu_ecc_sram_threshold_exceeded",
        "1",
        "1 when SRAM errors passed the vendor's replacement limit",
        "nvmlDeviceGetSramEccErrorStatus",
        1,
    ),
    _c(
        "gpu_row_remap_corrected_total",
        "1",
        "Rows remapped after corrected errors",
        "nvmlDeviceGetRemappedRows",
    ),
    _c(
        "gpu_row_remap_uncorrected_total",
        "1",
        "Rows remapped after uncorrected errors",
        "nvmlDeviceGetRemappedRows",
    ),
    _g("gpu_row_remap_pending", "1", "1 when a remap waits for a GPU reset", "nvmlDeviceGetRemappedRows", 1),
    _g(
        "gpu_row_remap_failure", "1", "1 when a remap failed: replace the GPU", "nvmlDeviceGetRemappedRows", 1
    ),
    _g(
        "gpu_row_remap_banks_max",
        "1",
        "Memory banks with all spare rows left",
        "nvmlDeviceGetRowRemapperHistogram",
    ),
    _g(
        "gpu_row_remap_banks_high",
        "1",
        "Memory banks with many spare rows left",
        "nvmlDeviceGetRowRemapperHistogram",
    ),
    _g(
        "gpu_row_remap_banks_partial",
        "1",
        "Memory banks with some spare rows left",
        "nvmlDeviceGetRowRemapperHistogram",
        1,
    ),
    _g(
        "gpu_row_remap_banks_low",
        "1",
        "Memory banks with few spare rows left",
        "nvmlDeviceGetRowRemapperHistogram",
        1,
    ),
    _g(
        "gpu_row_remap_banks_none",
        "1",
        "Memory banks with no spare row left",
        "nvmlDeviceGetRowRemapperHistogram",
        1,
    ),
    _c(
        "gpu_retired_pages_sbe_total",
        "1",
        "Pages retired after corrected errors (before Ampere)",
        "nvmlDeviceGetRetiredPages_v2 cause 0",
    ),
    _c(
        "gpu_retired_pages_dbe_total",
        "1",
        "Pages retired after uncorrected errors (before Ampere)",
        "nvmlDeviceGetRetiredPages_v2 cause 1",
    ),
    _g(
        "gpu_retired_pages_pending",
        "1",
        "1 when page retirement waits for a reset",
        "nvmlDeviceGetRetiredPagesPendingStatus",
        1,
    ),
    _c("gpu_pcie_replay_total", "1", "PCIe packets sent again", "nvmlDeviceGetPcieReplayCounter"),
    _c("gpu_pcie_correctable_errors_total", "1", "PCIe correctable errors", "field 173"),
    _c("gpu_pcie_nonfatal_errors_total", "1", "PCIe non-fatal errors", "field 179"),
    _c("gpu_pcie_fatal_errors_total", "1", "PCIe fatal errors", "field 180"),
    _c("gpu_pcie_nak_received_total", "1", "PCIe NAKs received", "field 174"),
    _c("gpu_pcie_nak_sent_total", "1", "PCIe NAKs sent", "field 177"),
    _c("gpu_pcie_receiver_errors_total", "1", "PCIe receiver errors", "field 175"),
    _c("gpu_pcie_bad_tlp_total", "1", "PCIe bad transaction-layer packets", "field 176"),
    _c("gpu_pcie_bad_dllp_total", "1", "PCIe bad data-link-layer packets", "field 178"),
    _c("gpu_pcie_unsupported_requests_total", "1", "PCIe unsupported requests", "field 181"),
    _c("gpu_pcie_lcrc_errors_total", "1", "PCIe link CRC errors", "field 182"),
    _c("gpu_pcie_lane_errors_total", "1", "PCIe lane errors", "field 183"),
    _c("gpu_pcie_recovery_total", "1", "PCIe link trips from L0 to recovery", "field 169"),
    _g(
        "gpu_pcie_link_generation",
        "1",
        "PCIe generation in use (falls at idle on some boards)",
        "nvmlDeviceGetCurrPcieLinkGeneration",
    ),
    _g(
        "gpu_pcie_link_generation_max",
        "1",
        "PCIe generation of GPU and slot together",
        "nvmlDeviceGetMaxPcieLinkGeneration",
    ),
    _g("gpu_pcie_link_width", "1", "PCIe lanes in use", "nvmlDeviceGetCurrPcieLinkWidth", -1),
    _g(
        "gpu_pcie_link_width_max", "1", "PCIe lanes of GPU and slot together", "nvmlDeviceGetMaxPcieLinkWidth"
    ),
    _g("gpu_nvlink_links_active", "1", "NVLinks that are up", "nvmlDeviceGetNvLinkState", -1),
    _g("gpu_nvlink_links_total", "1", "NVLinks of the part", "field 91"),
    _c(
        "gpu_nvlink_crc_flit_errors_total",
        "1",
        "NVLink CRC flit errors",
        "fields 32-38, 96-101",
        labels=("link",),
    ),
    _c(
        "gpu_nvlink_crc_data_errors_total",
        "1",
        "NVLink CRC data errors",
        "fields 39-45, 102-107",
        labels=("link",),
    ),
    _c("gpu_nvlink_replay_errors_total", "1", "NVLink replays", "fields 46-52, 108-113", labels=("link",)),
    _c(
        "gpu_nvlink_recovery_errors_total",
        "1",
        "NVLink recoveries",
        "fields 53-59, 114-119",
        labels=("link",),
    ),
    _c(
        "gpu_nvlink_malformed_packets_total", "1", "NVLink 5 malformed packets", "field 206", labels=("link",)
    ),
    _c("gpu_nvlink_buffer_overruns_total", "1", "NVLink 5 buffer overruns", "field 207", labels=("link",)),
    _c("gpu_nvlink_receive_errors_total", "1", "NVLink 5 receive errors", "field 208", labels=("link",)),
    _c(
        "gpu_nvlink_local_integrity_errors_total",
        "1",
        "NVLink 5 local link integrity errors",
        "field 211",
        labels=("link",),
    ),
    _c(
        "gpu_nvlink_recovery_failed_total",
        "1",
        "NVLink 5 link recoveries that failed",
        "field 214",
        labels=("link",),
    ),
    _c("gpu_nvlink_recovery_events_total", "1", "NVLink 5 link recoveries", "field 215", labels=("link",)),
    _c(
        "gpu_nvlink_effective_errors_total",
        "1",
        "NVLink 5 errors after correction",
        "field 219",
        labels=("link",),
    ),
    _c("gpu_nvlink_symbol_errors_total", "1", "NVLink 5 symbol errors", "field 221", labels=("link",)),
    _g(
        "gpu_nvlink_effective_bit_error_ratio",
        "ratio",
        "NVLink 5 bit error rate after correction, worst link",
        "field 220",
        1,
        labels=("link",),
    ),
    _g(
        "gpu_nvlink_symbol_bit_error_ratio",
        "ratio",
        "NVLink 5 symbol bit error rate, worst link",
        "field 222",
        1,
        labels=("link",),
    ),
    _g(
        "gpu_fabric_state",
        "1",
        "Fabric registration: 0 none, 1 not started, 2 in progress, 3 completed",
        "nvmlDeviceGetGpuFabricInfoV",
    ),
    _g(
        "gpu_fabric_health",
        "1",
        "Fabric health: 0 unknown, 1 healthy, 2 unhealthy, 3 limited",
        "nvmlDeviceGetGpuFabricInfoV",
    ),
    _g(
        "gpu_recovery_action",
        "1",
        "What the driver asks for: 0 none, 1 GPU reset, 2 node reboot, 3 drain, 4 drain and reset",
        "field 230",
        1,
    ),
    _g("gpu_mig_enabled", "1", "1 when MIG is on", "nvmlDeviceGetMigMode"),
    _g("gpu_persistence_enabled", "1", "1 when persistence mode is on", "nvmlDeviceGetPersistenceMode"),
    _g("gpu_processes", "1", "Compute processes on the GPU", "nvmlDeviceGetComputeRunningProcesses_v3"),
    _g(
        "gpu_tensor_active_ratio",
        "ratio",
        "Share of cycles with tensor cores active",
        "DCGM_FI_PROF_PIPE_TENSOR_ACTIVE",
    ),
    _g(
        "gpu_engine_active_ratio",
        "ratio",
        "Share of time the graphics engine was active",
        "DCGM_FI_PROF_GR_ENGINE_ACTIVE",
    ),
    _g("gpu_dram_active_ratio", "ratio", "Share of cycles with memory traffic", "DCGM_FI_PROF_DRAM_ACTIVE"),
    _g("gpu_last_xid", "1", "Number of the last XID that DCGM saw (not a count)", "DCGM_FI_DEV_XID_ERRORS"),
    _g(
        "gpu_nvml_call_seconds",
        "seconds",
        "Time NVML took for this GPU in the last poll",
        "the agent's own watch",
        1,
    ),
    _g("gpu_power_instant_watts", "watts", "Power drawn by the board at this instant", "field 186", 0),
    _c(
        "gpu_ecc_sram_parity_uncorrected_total",
        "1",
        "SRAM parity errors over the life of the board",
        "nvmlDeviceGetSramEccErrorStatus",
        1,
    ),
    _c(
        "gpu_ecc_sram_secded_uncorrected_total",
        "1",
        "SRAM double bit errors over the life of the board",
        "nvmlDeviceGetSramEccErrorStatus",
        1,
    ),
    _c(
        "gpu_ecc_sram_l2_uncorrected_total",
        "1",
        "Uncorrected SRAM errors over the life of the board: L2 cache",
        "nvmlDeviceGetSramEccErrorStatus",
        1,
    ),
    _c(
        "gpu_ecc_sram_sm_uncorrected_total",
        "1",
        "Uncorrected SRAM errors over the life of the board: SMs",
        "nvmlDeviceGetSramEccErrorStatus",
        1,
    ),
    _c(
        "gpu_ecc_sram_pcie_uncorrected_total",
        "1",
        "Uncorrected SRAM errors over the life of the board: PCIe",
        "nvmlDeviceGetSramEccErrorStatus",
        1,
    ),
    _c(
        "gpu_ecc_sram_microcontroller_uncorrected_total",
        "1",
        "Uncorrected SRAM errors over the life of the board: microcontrollers",
        "nvmlDeviceGetSramEccErrorStatus",
        1,
    ),
    _c(
        "gpu_ecc_sram_other_uncorrected_total",
        "1",
        "Uncorrected SRAM errors over the life of the board: other units",
        "nvmlDeviceGetSramEccErrorStatus",
        1,
    ),
    _g(
        "gpu_memory_unrepairable",
        "1",
        "1 when memory has damage that cannot be repaired: replace the GPU",
        "nvmlDeviceGetUnrepairableMemoryFlag_v1",
        1,
    ),
    _c("gpu_pcie_replay_rollover_total", "1", "PCIe replay counter rollovers", "field 95", 1),
    _c(
        "gpu_nvlink_remote_errors_total",
        "1",
        "NVLink 5 packets the other end marked bad",
        "field 209",
        1,
        labels=("link",),
    ),
    _c(
        "gpu_nvlink_general_errors_total",
        "1",
        "NVLink 5 packets received with errors",
        "field 210",
        1,
        labels=("link",),
    ),
    _c(
        "gpu_nvlink_discards_total",
        "1",
        "NVLink 5 packets given up before sending",
        "field 212",
        1,
        labels=("link",),
    ),
    _c(
        "gpu_nvlink_recovery_succeeded_total",
        "1",
        "NVLink 5 link recoveries that succeeded",
        "field 213",
        1,
        labels=("link",),
    ),
    _g(
        "gpu_nvlink_raw_bit_error_ratio",
        "ratio",
        "NVLink 5 bit error rate before correction, worst link",
        "field 293",
        1,
        labels=("link",),
    ),
    _c(
        "gpu_nvlink_fec_codewords_total",
        "1",
        "NVLink 5 codewords by number of corrected symbols, all links",
        "fields 235-250",
        0,
        labels=("bin",),
    ),
    _g("gpu_c2c_links_total", "1", "Chip-to-chip links of the part", "field 170", 0),
    _c("gpu_c2c_crc_errors_total", "1", "Chip-to-chip link CRC errors", "field 231", 1),
    _c("gpu_c2c_replay_errors_total", "1", "Chip-to-chip link replays", "field 232", 1),
    _c(
        "gpu_c2c_back_to_back_replays_total",
        "1",
        "Chip-to-chip link replays in direct succession",
        "field 233",
        1,
    ),
    _g(
        "gpu_fabric_status",
        "1",
        "NVML code of the fabric registration, 0 when it went well",
        "nvmlDeviceGetGpuFabricInfoV",
        1,
    ),
    _g(
        "gpu_fabric_health_mask",
        "1",
        "Fabric health bit mask as NVML gives it",
        "nvmlDeviceGetGpuFabricInfoV",
        0,
    ),
    _g(
        "gpu_gsp_enabled",
        "1",
        "1 when the GPU's own system processor runs the driver firmware",
        "nvmlDeviceGetGspFirmwareMode",
        0,
    ),
]

_DISK = [
    _g("disk_temperature_celsius", "celsius", "Temperature", "smartctl temperature.current", 1, "disk"),
    _g("disk_power_on_hours", "hours", "Hours powered on", "smartctl power_on_time.hours", 0, "disk"),
    _c("disk_power_cycles", "1", "Power cycles", "smartctl power_cycle_count", 0, "disk"),
    _c("disk_reallocated_sectors", "1", "Reallocated sectors (SAS: grown defects)", "ATA 5", 1, "disk"),
    _c("disk_reallocation_events", "1", "Reallocation events", "ATA 196", 1, "disk"),
    _g("disk_pending_sectors", "1", "Sectors waiting to be reallocated", "ATA 197", 1, "disk"),
    _g("disk_offline_uncorrectable", "1", "Sectors that could not be read offline", "ATA 198", 1, "disk"),
    _c("disk_reported_uncorrectable", "1", "Uncorrectable errors reported to the host", "ATA 187", 1, "disk"),
    _c("disk_command_timeouts", "1", "Commands that timed out", "ATA 188, low word", 1, "disk"),
    _c("disk_spin_retries", "1", "Spin-up retries", "ATA 10", 1, "disk"),
    _c("disk_high_fly_writes", "1", "Writes with the head too high", "ATA 189", 1, "disk"),
    _c("disk_end_to_end_errors", "1", "Data path parity errors inside the drive", "ATA 184", 1, "disk"),
    _g("disk_read_error_rate_raw", "1", "Read errors (vendor encoded)", "ATA 1 raw", 0, "disk"),
    _g(
        "disk_read_error_rate_normalized",
        "1",
        "Read error rate, normalised: higher is better",
        "ATA 1 value",
        -1,
        "disk",
    ),
    _g("disk_power_on_normalized", "1", "Power-on hours, normalised", "ATA 9 value", 0, "disk"),
    _c("disk_crc_errors_total", "1", "Interface CRC errors (mostly cabling)", "ATA 199", 1, "disk"),
    _c("disk_grown_defects", "1", "SAS grown defect list", "smartctl scsi_grown_defect_list", 1, "disk"),
    _c(
        "disk_uncorrected_errors_total",
        "1",
        "SAS uncorrected read, write and verify errors",
        "smartctl scsi_error_counter_log",
        1,
        "disk",
    ),
    _g(
        "disk_smart_passed",
        "1",
        "1 when the drive's own verdict is good, 0 when it is failing",
        "smartctl smart_status.passed",
        -1,
        "disk",
    ),
    _g("disk_standby", "1", "1 when the disk sleeps and was not woken", "smartctl power mode", 0, "disk"),
    _g(
        "disk_endurance_used_ratio",
        "ratio",
        "SSD endurance used, 0 to 1 and beyond",
        "smartctl endurance_used / vendor wear attributes",
        1,
        "disk",
    ),
    _g("disk_capacity_bytes", "bytes", "Capacity", "smartctl user_capacity.bytes", 0, "disk"),
    _g(
        "disk_nvme_critical_warning",
        "1",
        "NVMe critical warning bit mask",
        "nvme log critical_warning",
        1,
        "disk",
    ),
    _g(
        "disk_nvme_percentage_used_ratio",
        "ratio",
        "NVMe endurance used, 0 to 1 and beyond",
        "nvme log percentage_used",
        1,
        "disk",
    ),
    _g(
        "disk_nvme_available_spare_ratio",
        "ratio",
        "NVMe spare left, 0 to 1",
        "nvme log available_spare",
        -1,
        "disk",
    ),
    _c(
        "disk_nvme_media_errors_total",
        "1",
        "NVMe media and data integrity errors",
        "nvme log media_errors",
        1,
        "disk",
    ),
    _c(
        "disk_nvme_unsafe_shutdowns_total",
        "1",
        "NVMe unsafe shutdowns",
        "nvme log unsafe_shutdowns",
        0,
        "disk",
    ),
    _g(
        "disk_verdict",
        "1",
        "1 for the verdict in force",
        "Forewarn's reading of SMART",
        0,
        "disk",
        ("verdict",),
    ),
    _g("disk_smartctl_exit_status", "1", "Exit status of smartctl, a bit mask", "smartctl", 0, "disk"),
]

_TRAINING = [
    _c("training_step_total", "1", "Steps done", "the job", 0, "job"),
    _g("training_iteration_seconds", "seconds", "Time of the last step", "the job", 1, "job"),
    _g("training_samples_per_second", "1", "Samples a second", "the job", -1, "job"),
    _g("training_rank", "1", "Rank of the reporting process", "the job", 0, "job"),
    _g("training_idle_seconds", "seconds", "Time since the last new step was heard of", "the job", 1, "job"),
    _c("training_bad_losses_total", "1", "Steps whose loss was NaN or infinite", "the job", 1, "job"),
    _c("training_marked_steps_total", "1", "Steps marked as checkpoint, evaluation or warm-up", "the job", 0, "job"),
    _g("training_loss", "1", "Loss of the last step", "the job", 0, "job"),
    _g(
        "training_compute_seconds",
        "seconds",
        "Time of the last step before its collective",
        "the job",
        1,
        "job",
    ),
]

_NIC = [
    _g("fabric_port_up", "1", "1 when the port is active", "/sys/class/infiniband/*/ports/*/state", -1, "nic"),
    _g("fabric_port_state", "1", "Port state: 1 down, 2 initialising, 3 armed, 4 active", "/sys/class/infiniband/*/ports/*/state", 0, "nic"),
    _g("fabric_port_physical_state", "1", "Physical state: 2 polling, 3 disabled, 5 link up, 6 error recovery", "/sys/class/infiniband/*/ports/*/phys_state", 0, "nic"),
    _g("fabric_port_rate_bytes_per_second", "bytes", "Rate the port runs at", "/sys/class/infiniband/*/ports/*/rate", -1, "nic"),
    _c("fabric_symbol_errors_total", "1", "Symbol errors of the physical lanes", "/sys/class/infiniband/*/ports/*/counters/symbol_error", 1, "nic"),
    _c("fabric_link_recoveries_total", "1", "Links that recovered by themselves", "/sys/class/infiniband/*/ports/*/counters/link_error_recovery", 1, "nic"),
    _c("fabric_link_downs_total", "1", "Times the link went down", "/sys/class/infiniband/*/ports/*/counters/link_downed", 1, "nic"),
    _c("fabric_receive_errors_total", "1", "Packets received with an error", "/sys/class/infiniband/*/ports/*/counters/port_rcv_errors", 1, "nic"),
    _c("fabric_receive_remote_physical_errors_total", "1", "Packets the other side marked bad", "/sys/class/infiniband/*/ports/*/counters/port_rcv_remote_physical_errors", 1, "nic"),
    _c("fabric_local_integrity_errors_total", "1", "Times local errors passed their threshold", "/sys/class/infiniband/*/ports/*/counters/local_link_integrity_errors", 1, "nic"),
    _c("fabric_buffer_overruns_total", "1", "Times the receive buffer overran for long", "/sys/class/infiniband/*/ports/*/counters/excessive_buffer_overrun_errors", 1, "nic"),
    _c("fabric_transmit_discards_total", "1", "Packets dropped because the port was down or full", "/sys/class/infiniband/*/ports/*/counters/port_xmit_discards", 1, "nic"),
    _c("fabric_transmit_wait_ticks_total", "1", "Ticks with data to send and no credit to send it", "/sys/class/infiniband/*/ports/*/counters/port_xmit_wait", 1, "nic"),
    _c("fabric_transmit_bytes_total", "bytes", "Bytes sent", "/sys/class/infiniband/*/ports/*/counters/port_xmit_data, words of four bytes", 0, "nic"),
    _c("fabric_receive_bytes_total", "bytes", "Bytes received", "/sys/class/infiniband/*/ports/*/counters/port_rcv_data, words of four bytes", 0, "nic"),
    _c("fabric_out_of_sequence_total", "1", "Packets that came out of order", "/sys/class/infiniband/*/ports/*/hw_counters/out_of_sequence", 1, "nic"),
    _c("fabric_packet_sequence_errors_total", "1", "Sequence errors the other side reported", "/sys/class/infiniband/*/ports/*/hw_counters/packet_seq_err", 1, "nic"),
    _c("fabric_ack_timeouts_total", "1", "Packets whose acknowledgement never came", "/sys/class/infiniband/*/ports/*/hw_counters/local_ack_timeout_err", 1, "nic"),
    _c("fabric_receiver_not_ready_errors_total", "1", "Retries given up because the receiver was not ready", "/sys/class/infiniband/*/ports/*/hw_counters/rnr_nak_retry_err", 1, "nic"),
    _c("fabric_adaptive_retransmissions_total", "1", "RoCE adaptive retransmissions", "/sys/class/infiniband/*/ports/*/hw_counters/roce_adp_retrans", 1, "nic"),
    _c("fabric_icrc_errors_total", "1", "RoCE packets with a wrong checksum", "/sys/class/infiniband/*/ports/*/hw_counters/rx_icrc_encapsulated", 1, "nic"),
    _c("fabric_out_of_buffer_total", "1", "Packets dropped for want of a receive buffer", "/sys/class/infiniband/*/ports/*/hw_counters/out_of_buffer", 1, "nic"),
    _c("fabric_congestion_notifications_sent_total", "1", "Congestion notifications sent", "/sys/class/infiniband/*/ports/*/hw_counters/np_cnp_sent", 0, "nic"),
    _c("fabric_congestion_notifications_handled_total", "1", "Congestion notifications obeyed", "/sys/class/infiniband/*/ports/*/hw_counters/rp_cnp_handled", 0, "nic"),
    _g("fabric_interface_up", "1", "1 when the interface has a carrier", "/sys/class/net/*/carrier", -1, "nic"),
    _g("fabric_interface_speed_bytes_per_second", "bytes", "Speed the interface runs at", "/sys/class/net/*/speed", -1, "nic"),
    _c("fabric_interface_carrier_changes_total", "1", "Times the carrier came or went", "/sys/class/net/*/carrier_changes", 1, "nic"),
    _c("fabric_interface_receive_errors_total", "1", "Receive errors", "/sys/class/net/*/statistics/rx_errors", 1, "nic"),
    _c("fabric_interface_transmit_errors_total", "1", "Transmit errors", "/sys/class/net/*/statistics/tx_errors", 1, "nic"),
    _c("fabric_interface_receive_drops_total", "1", "Packets dropped on receipt", "/sys/class/net/*/statistics/rx_dropped", 1, "nic"),
    _c("fabric_interface_crc_errors_total", "1", "Frames with a wrong checksum", "/sys/class/net/*/statistics/rx_crc_errors", 1, "nic"),
    _c("fabric_interface_receive_bytes_total", "bytes", "Bytes received", "/sys/class/net/*/statistics/rx_bytes", 0, "nic"),
    _c("fabric_interface_transmit_bytes_total", "bytes", "Bytes sent", "/sys/class/net/*/statistics/tx_bytes", 0, "nic"),
]

_NODE = [
    _g("node_uptime_seconds", "seconds", "Time since boot", "/proc/uptime", 0, "node"),
    _g("node_load1", "1", "Processes running or waiting, one-minute average", "/proc/loadavg", 0, "node"),
    _g("node_cpus", "1", "CPUs", "/proc/stat", 0, "node"),
    _g("node_cpu_utilization_ratio", "ratio", "Share of CPU time in use, 0 to 1", "/proc/stat", 0, "node"),
    _g("node_cpu_iowait_ratio", "ratio", "Share of CPU time idle for a disk, 0 to 1", "/proc/stat", 1, "node"),
    _g("node_cpu_steal_ratio", "ratio", "Share of CPU time taken by the hypervisor, 0 to 1", "/proc/stat", 1, "node"),
    _g("node_processes_blocked", "1", "Processes blocked on I/O", "/proc/stat procs_blocked", 1, "node"),
    _g("node_memory_total_bytes", "bytes", "Host memory", "/proc/meminfo MemTotal", 0, "node"),
    _g("node_memory_available_bytes", "bytes", "Host memory to be had without swapping", "/proc/meminfo MemAvailable", -1, "node"),
    _g("node_memory_dirty_bytes", "bytes", "Host memory that waits to be written to disk", "/proc/meminfo Dirty", 0, "node"),
    _g("node_memory_corrupted_bytes", "bytes", "Host memory given up after uncorrected errors", "/proc/meminfo HardwareCorrupted", 1, "node"),
    _c("node_oom_kills_total", "1", "Processes the kernel killed for memory", "/proc/vmstat oom_kill", 1, "node"),
    _c("node_pressure_cpu_waiting_seconds_total", "seconds", "Time in which some task waited for a CPU", "/proc/pressure/cpu some", 0, "node"),
    _c("node_pressure_memory_waiting_seconds_total", "seconds", "Time in which some task waited for memory", "/proc/pressure/memory some", 1, "node"),
    _c("node_pressure_memory_stalled_seconds_total", "seconds", "Time in which all tasks waited for memory", "/proc/pressure/memory full", 1, "node"),
    _c("node_pressure_io_waiting_seconds_total", "seconds", "Time in which some task waited for I/O", "/proc/pressure/io some", 1, "node"),
    _c("node_pressure_io_stalled_seconds_total", "seconds", "Time in which all tasks waited for I/O", "/proc/pressure/io full", 1, "node"),
    _c("node_edac_corrected_errors_total", "1", "Corrected host memory errors, all controllers", "/sys/devices/system/edac/mc/mc*/ce_count", 1, "node"),
    _c("node_edac_uncorrected_errors_total", "1", "Uncorrected host memory errors, all controllers", "/sys/devices/system/edac/mc/mc*/ue_count", 1, "node"),
    _g("node_cpu_temperature_celsius", "celsius", "Hottest CPU sensor", "/sys/class/hwmon coretemp or k10temp, /sys/class/thermal", 1, "node"),
    _g("node_thermal_zone_celsius", "celsius", "Temperature of a thermal zone", "/sys/class/thermal/thermal_zone*/temp", 1, "node", ("zone", "type")),
    _c("node_cpu_throttles_total", "1", "Thermal throttles of the CPU packages", "cpu*/thermal_throttle/package_throttle_count", 1, "node"),
    _g("node_kernel_taint", "1", "Kernel taint bit mask (16 machine check, 128 oops, 16384 soft lockup)", "/proc/sys/kernel/tainted", 0, "node"),
    _g("node_open_files_ratio", "ratio", "Open files of the most there may be, 0 to 1", "/proc/sys/fs/file-nr", 1, "node"),
    _g("node_clock_synchronized", "1", "1 when the kernel's clock follows a time source", "adjtimex status", -1, "node"),
    _g("node_clock_offset_seconds", "seconds", "Distance of the clock from its source", "adjtimex offset", 1, "node"),
    _g("node_clock_error_seconds", "seconds", "Largest error the clock may have", "adjtimex maxerror", 1, "node"),
    _c("node_clock_steps_total", "1", "Steps of the wall clock against the monotonic one since the agent's start", "the agent's clocks", 1, "node"),
    _g("node_filesystem_free_bytes", "bytes", "Free space of a local file system", "statvfs f_bavail", -1, "node", ("mount",)),
    _g("node_filesystem_used_max_ratio", "ratio", "Fullest local file system, 0 to 1", "statvfs", 1, "node"),
    _g("node_filesystem_inodes_used_max_ratio", "ratio", "Local file system with the fewest inodes left, 0 to 1", "statvfs", 1, "node"),
    _g("node_filesystems_read_only", "1", "Local file systems mounted read-only", "/proc/mounts", 1, "node"),
    _g("disk_read_latency_seconds", "seconds", "Average time of a read since the last poll", "/proc/diskstats", 1, "disk"),
    _g("disk_write_latency_seconds", "seconds", "Average time of a write since the last poll", "/proc/diskstats", 1, "disk"),
    _g("disk_busy_ratio", "ratio", "Share of time the disk had work, 0 to 1", "/proc/diskstats", 0, "disk"),
]

_SELF = [
    _g(
        "collector_poll_seconds", "seconds", "Time the last poll took", "the agent", 1, "node", ("collector",)
    ),
    _g("collector_up", "1", "1 when the last poll succeeded", "the agent", -1, "node", ("collector",)),
    _c(
        "collector_errors_total",
        "1",
        "Polls that failed or were abandoned",
        "the agent",
        1,
        "node",
        ("collector",),
    ),
    _c(
        "collector_timeouts_total",
        "1",
        "Polls that passed their deadline",
        "the agent",
        1,
        "node",
        ("collector",),
    ),
    _g("agent_spool_batches", "1", "Batches that wait for the service", "the agent", 1, "node"),
    _g("agent_spool_bytes", "bytes", "Size of the spool", "the agent", 1, "node"),
    _c(
        "agent_spool_dropped_total",
        "1",
        "Batches given up because the spool was full",
        "the agent",
        1,
        "node",
    ),
    _g("agent_resident_bytes", "bytes", "Memory of the agent", "the agent", 0, "node"),
    _c(
        "agent_cpu_seconds_total", "seconds", "CPU time of the agent and its children", "the agent", 0, "node"
    ),
    _c(
        "agent_batches_refused_total",
        "1",
        "Batches the service refused for good; they wait in the spool's quarantine",
        "the agent",
        1,
        "node",
    ),
    _g(
        "agent_spool_degraded",
        "1",
        "1 when batches wait in memory because the disk fails",
        "the agent",
        1,
        "node",
    ),
    _g("agent_devices_missing", "1", "Devices seen before and not now", "the agent", 1, "node"),
    _g("agent_collectors_down", "1", "Sources that answered before and fail or hang now", "the agent", 1, "node"),
    _g("agent_poll_seconds_max", "seconds", "Slowest poll since the last batch", "the agent", 1, "node"),
    _g(
        "agent_poll_lateness_seconds_max",
        "seconds",
        "Longest wait for a reading beyond its interval since the last batch",
        "the agent",
        1,
        "node",
    ),
    _c(
        "agent_collection_errors_total",
        "1",
        "Polls of any source that failed in whole or part",
        "the agent",
        1,
        "node",
    ),
    _c(
        "agent_collection_timeouts_total",
        "1",
        "Polls of any source that passed their deadline",
        "the agent",
        1,
        "node",
    ),
    _g("gpu_poll_gap_seconds", "seconds", "Time between the last two readings of this GPU", "the agent", 1),
    _g("gpu_metrics_missing", "1", "Metrics this GPU gave before and does not give now", "the agent", 1),
]

METRICS: dict[str, Metric] = {m.name: m for m in (*_GPU, *_DISK, *_TRAINING, *_NIC, *_NODE, *_SELF)}
"""Every metric by name."""

EVENTS: dict[str, EventKind] = {
    e.name: e
    for e in (
        EventKind("xid", "An error the NVIDIA driver reported for a GPU", "XID number"),
        EventKind("sxid", "An error of an NVSwitch", "SXid number"),
        EventKind("aer", "A PCIe error", "corrected, nonfatal, fatal, unrecoverable"),
        EventKind("mce", "A machine check", "corrected, uncorrected"),
        EventKind("edac", "A host memory error", "ce, ue"),
        EventKind("nvme", "An NVMe drive in trouble", "timeout, reset, dead, io_error"),
        EventKind("ata", "An ATA link or drive in trouble", "exception, reset, io_error, disabled"),
        EventKind("disk_error", "A block device error", "io_error, medium_error, raid_degraded"),
        EventKind("pcie", "A PCIe device or slot that went away", "link_down, card_gone, inaccessible"),
        EventKind("gpu_driver", "The NVIDIA driver could not bring a GPU up", "init_failed"),
        EventKind(
            "mlx5",
            "A ConnectX adapter in trouble",
            "slot_power, module_temp, module_error, module_unplugged, link_down, link_up, health, temperature, "
            "command_timeout, tx_timeout, rx_timeout",
        ),
        EventKind(
            "efa",
            "An AWS fabric adapter in trouble",
            "command_timeout, command_failed, queue_closed, not_ready, reset_failed",
        ),
        EventKind("link_down", "A network link went down", "interface"),
        EventKind("link_up", "A network link came up", "interface"),
        EventKind("oom", "The kernel killed a process for memory", "kill"),
        EventKind("hung_task", "A task was blocked for long", "blocked"),
        EventKind("lockup", "A CPU was stuck", "soft, hard, rcu_stall"),
        EventKind("filesystem", "A file system in trouble", "read_only, error"),
        EventKind("thermal", "Host thermal trouble", "throttle, shutdown"),
        EventKind("gpu_lost", "NVML says that the GPU is lost", "lost"),
        EventKind("gpu_reset_required", "NVML says that the GPU needs a reset", "reset_required"),
        EventKind("gpu_missing", "A GPU that was there does not answer any more", "missing"),
        EventKind("gpu_returned", "A GPU that was away is back", "returned"),
        EventKind("gpu_reset", "A GPU was reset: its energy counter began anew", "reset"),
        EventKind(
            "gpu_driver_error", "NVML calls for a GPU keep failing", "timeout, unknown, or the NVML code"
        ),
        EventKind(
            "gpu_event",
            "The driver reported something besides an XID",
            "double_bit_ecc, single_bit_ecc_storm, dram_retirement, dram_retirement_failure, poison_nonfatal, poison_fatal, gpu_unavailable, recovery_action, mig_changed",
        ),
        EventKind("driver_reloaded", "The NVIDIA driver was loaded anew", "reloaded, upgraded"),
        EventKind("collector_silent", "A source did not answer within its deadline", "collector name"),
        EventKind("collector_recovered", "A silent source answers again", "collector name"),
        EventKind("disk_verdict", "The verdict on a disk changed", "the verdict"),
        EventKind("log_gap", "Kernel messages were lost before they could be read", "overrun"),
        EventKind("agent_started", "The agent was started", "version"),
        EventKind("telemetry_dropped", "The spool was full and telemetry was given up", "spool_full"),
    )
}
"""Every kind of event by name."""


def metrics_of(kind: str) -> list[Metric]:
    """All metrics of one kind of device, in catalog order."""
    return [m for m in METRICS.values() if m.kind == kind]


EXPOSED_PREFIX = "forewarn_"
SECONDS_PER_HOUR = 3600.0


def exposed_name(metric: Metric) -> str:
    """The name on a Prometheus page, by its conventions: counters end in `_total`, gauges never do, time is in
    seconds. `disk_power_on_hours` is `forewarn_disk_power_on_seconds` there."""
    name = metric.name.removesuffix("_total")
    if metric.unit == "hours":
        name = name.removesuffix("_hours") + "_seconds"
    return EXPOSED_PREFIX + name + ("_total" if metric.type == "counter" else "")


def exposed_scale(metric: Metric) -> float:
    """What a value is multiplied with on a Prometheus page."""
    return SECONDS_PER_HOUR if metric.unit == "hours" else 1.0
