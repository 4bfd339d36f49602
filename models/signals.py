"""What the feature engine watches: how catalog metrics and events become signals, and over which windows.

A signal is one column of the bucket rings: the increase of one or several counters, the mean of one gauge, the share
of time a bit was set, or a count of events. Signals, not metrics, are what features are made of, so a fleet that
reports the AER counters of DCGM and one that reports only replays are read alike.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, cached_property

from forewarn.collectors.catalog import METRICS

MINUTE_S, HOUR_S, DAY_S = 60, 3600, 86_400

COUNTER, GAUGE, BITS = 0, 1, 2

HW_SLOWDOWN_BITS = 0x8 | 0x40 | 0x80
"""Clock event reasons: hardware slowdown, hardware thermal slowdown, hardware power brake."""
SW_THERMAL_BITS = 0x20
"""Clock event reason: software thermal slowdown."""


@dataclass(frozen=True)
class Signal:
    """One column. `metrics` feed it; `events` says that events do; `bits` selects bits of a mask (type BITS)."""

    name: str
    type: int
    metrics: tuple[str, ...] = ()
    bits: int = 0
    text: str = ""
    """What it counts or measures, in words for the explanation."""


@dataclass(frozen=True)
class Level:
    """One ring: `slots` buckets of `width_s` seconds, aligned to the epoch."""

    width_s: int
    slots: int


@dataclass(frozen=True)
class Window:
    """The last `buckets` buckets of a level, the one under way included."""

    name: str
    level: int
    buckets: int
    seconds: int


@dataclass(frozen=True)
class Scheme:
    """All that the engine needs to know for one kind of device."""

    kind: str
    signals: tuple[Signal, ...]
    levels: tuple[Level, ...]
    windows: tuple[Window, ...]
    anchors: tuple[str, ...]
    """Metrics whose rhythm shows whether polls went missing."""
    metrics: tuple[str, ...]
    """Every metric whose last value is kept: those of the signals and those read as levels."""

    def signal(self, name: str) -> int:
        """Column of a signal."""
        return self._signal_at[name]

    def window(self, name: str) -> int:
        """Number of a window."""
        return self._window_at[name]

    @cached_property
    def _signal_at(self) -> dict[str, int]:
        return {s.name: i for i, s in enumerate(self.signals)}

    @cached_property
    def _window_at(self) -> dict[str, int]:
        return {w.name: i for i, w in enumerate(self.windows)}


def _counter(name: str, text: str, *metrics: str) -> Signal:
    return Signal(name, COUNTER, metrics, 0, text)


def _gauge(name: str, text: str, metric: str) -> Signal:
    return Signal(name, GAUGE, (metric,), 0, text)


def _events(name: str, text: str) -> Signal:
    return Signal(name, COUNTER, (), 0, text)


_GPU_SIGNALS = (
    _counter("ecc_dram_corrected", "corrected DRAM errors", "gpu_ecc_dram_corrected_total"),
    _counter("ecc_sram_corrected", "corrected SRAM errors", "gpu_ecc_sram_corrected_total"),
    _counter("ecc_volatile_corrected", "corrected memory errors", "gpu_ecc_volatile_corrected_total"),
    _counter(
        "ecc_uncorrected",
        "uncorrected memory errors",
        "gpu_ecc_sram_uncorrected_total",
        "gpu_ecc_dram_uncorrected_total",
        "gpu_ecc_volatile_uncorrected_total",
    ),
    _counter(
        "row_remaps", "rows remapped", "gpu_row_remap_corrected_total", "gpu_row_remap_uncorrected_total"
    ),
    _counter("retired_pages", "pages retired", "gpu_retired_pages_sbe_total", "gpu_retired_pages_dbe_total"),
    _counter("pcie_replays", "PCIe replays", "gpu_pcie_replay_total"),
    _counter(
        "pcie_errors",
        "PCIe errors",
        "gpu_pcie_correctable_errors_total",
        "gpu_pcie_nonfatal_errors_total",
        "gpu_pcie_fatal_errors_total",
        "gpu_pcie_nak_received_total",
        "gpu_pcie_nak_sent_total",
        "gpu_pcie_receiver_errors_total",
        "gpu_pcie_bad_tlp_total",
        "gpu_pcie_bad_dllp_total",
        "gpu_pcie_lcrc_errors_total",
        "gpu_pcie_lane_errors_total",
        "gpu_pcie_recovery_total",
    ),
    _counter(
        "nvlink_crc_errors",
        "NVLink CRC errors",
        "gpu_nvlink_crc_flit_errors_total",
        "gpu_nvlink_crc_data_errors_total",
        "gpu_nvlink_effective_errors_total",
        "gpu_nvlink_receive_errors_total",
    ),
    _counter("nvlink_replays", "NVLink replays", "gpu_nvlink_replay_errors_total"),
    _counter(
        "nvlink_recoveries",
        "NVLink recoveries",
        "gpu_nvlink_recovery_errors_total",
        "gpu_nvlink_recovery_failed_total",
        "gpu_nvlink_recovery_events_total",
        "gpu_nvlink_malformed_packets_total",
        "gpu_nvlink_buffer_overruns_total",
        "gpu_nvlink_local_integrity_errors_total",
    ),
    _counter(
        "thermal_violation",
        "seconds of thermal slowdown",
        "gpu_violation_thermal_seconds_total",
        "gpu_slowdown_software_thermal_seconds_total",
        "gpu_slowdown_hardware_thermal_seconds_total",
    ),
    _counter(
        "power_violation",
        "seconds held down for power",
        "gpu_violation_power_seconds_total",
        "gpu_violation_board_limit_seconds_total",
        "gpu_slowdown_power_brake_seconds_total",
    ),
    _counter(
        "reliability_violation",
        "seconds held down for reliability",
        "gpu_violation_reliability_seconds_total",
    ),
    _gauge("temperature", "temperature", "gpu_temperature_celsius"),
    _gauge("memory_temperature", "memory temperature", "gpu_memory_temperature_celsius"),
    _gauge("power", "power", "gpu_power_watts"),
    _gauge("sm_clock", "SM clock", "gpu_sm_clock_hertz"),
    _gauge("memory_clock", "memory clock", "gpu_memory_clock_hertz"),
    _gauge("utilization", "utilisation", "gpu_utilization_ratio"),
    _gauge("fan_speed", "fan speed", "gpu_fan_speed_ratio"),
    _gauge("pcie_width", "PCIe width", "gpu_pcie_link_width"),
    _gauge("nvlink_active", "active NVLinks", "gpu_nvlink_links_active"),
    _gauge("nvml_call", "time of a driver call", "gpu_nvml_call_seconds"),
    Signal(
        "hw_slowdown",
        BITS,
        ("gpu_clock_event_reasons",),
        HW_SLOWDOWN_BITS,
        "share of time in hardware slowdown",
    ),
    Signal(
        "sw_thermal",
        BITS,
        ("gpu_clock_event_reasons",),
        SW_THERMAL_BITS,
        "share of time in software thermal slowdown",
    ),
    _events("missed_polls", "polls missed"),
    _events("xid_app", "application XIDs"),
    _events("xid_memory", "memory XIDs"),
    _events("xid_nvlink", "NVLink XIDs"),
    _events("xid_pcie", "PCIe XIDs"),
    _events("xid_firmware", "firmware and driver XIDs"),
    _events("xid_other", "other XIDs"),
    _events("aer", "PCIe errors in the kernel log"),
    _events("loss", "times lost, missing or in need of a reset"),
    _events("silence", "times the driver or a collector did not answer"),
)

_GPU_LEVEL_METRICS = (
    "gpu_temperature_margin_celsius",
    "gpu_temperature_slowdown_celsius",
    "gpu_temperature_shutdown_celsius",
    "gpu_power_limit_watts",
    "gpu_power_limit_default_watts",
    "gpu_sm_clock_max_hertz",
    "gpu_memory_used_bytes",
    "gpu_memory_total_bytes",
    "gpu_memory_utilization_ratio",
    "gpu_energy_joules_total",
    "gpu_ecc_enabled",
    "gpu_ecc_sram_threshold_exceeded",
    "gpu_row_remap_pending",
    "gpu_row_remap_failure",
    "gpu_row_remap_banks_max",
    "gpu_row_remap_banks_high",
    "gpu_row_remap_banks_partial",
    "gpu_row_remap_banks_low",
    "gpu_row_remap_banks_none",
    "gpu_retired_pages_pending",
    "gpu_pcie_link_width_max",
    "gpu_pcie_link_generation",
    "gpu_pcie_link_generation_max",
    "gpu_nvlink_links_total",
    "gpu_recovery_action",
    "gpu_last_xid",
    "gpu_poll_gap_seconds",
    "gpu_metrics_missing",
)

_DISK_SIGNALS = (
    _counter("reallocated", "reallocated sectors", "disk_reallocated_sectors", "disk_grown_defects"),
    _counter("reallocation_events", "reallocation events", "disk_reallocation_events"),
    _counter(
        "reported_uncorrectable",
        "uncorrectable errors",
        "disk_reported_uncorrectable",
        "disk_uncorrected_errors_total",
        "disk_nvme_media_errors_total",
    ),
    _counter("command_timeouts", "command timeouts", "disk_command_timeouts"),
    _counter("spin_retries", "spin retries", "disk_spin_retries"),
    _counter("high_fly_writes", "high-fly writes", "disk_high_fly_writes"),
    _counter("end_to_end_errors", "end-to-end errors", "disk_end_to_end_errors"),
    _counter("crc_errors", "interface CRC errors", "disk_crc_errors_total"),
    _counter("power_cycles", "power cycles", "disk_power_cycles"),
    _counter("unsafe_shutdowns", "unsafe shutdowns", "disk_nvme_unsafe_shutdowns_total"),
    _gauge("pending", "pending sectors", "disk_pending_sectors"),
    _gauge("offline_uncorrectable", "offline uncorrectable sectors", "disk_offline_uncorrectable"),
    _gauge("temperature", "temperature", "disk_temperature_celsius"),
    _gauge("read_error_rate", "read error rate, normalised", "disk_read_error_rate_normalized"),
    _gauge("spare", "spare left", "disk_nvme_available_spare_ratio"),
    _events("missed_polls", "polls missed"),
    _events("io_errors", "I/O errors in the kernel log"),
    _events("resets", "resets and timeouts in the kernel log"),
)

_DISK_LEVEL_METRICS = (
    "disk_power_on_hours",
    "disk_read_error_rate_raw",
    "disk_power_on_normalized",
    "disk_smart_passed",
    "disk_endurance_used_ratio",
    "disk_nvme_critical_warning",
    "disk_nvme_percentage_used_ratio",
    "disk_capacity_bytes",
)

_NODE_EVENTS = (
    _events("missed_polls", "polls missed"),
    _events("xid_app", "application XIDs on its GPUs"),
    _events("xid_hardware", "hardware XIDs on its GPUs"),
    _events("sxid", "NVSwitch errors"),
    _events("aer_corrected", "corrected PCIe errors"),
    _events("aer_severe", "severe PCIe errors"),
    _events("memory_corrected", "corrected host memory errors"),
    _events("memory_uncorrected", "uncorrected host memory errors"),
    _events("link_down", "network links that went down"),
    _events("nic", "network adapter errors"),
    _events("disk", "disk errors in the kernel log"),
    _events("filesystem", "file system errors"),
    _events("lockup", "lockups and hung tasks"),
    _events("oom", "processes killed for memory"),
    _events("thermal", "host thermal events"),
    _events("silence", "collectors that did not answer"),
    _events("gpu_loss", "GPUs lost or missing"),
)

_NODE_NOT_ERRORS = ("agent_cpu_seconds_total", "agent_spool_dropped_total")


def _node_signals() -> tuple[Signal, ...]:
    """Counters of the node that mean trouble go into one signal, so new host metrics are taken in of themselves."""
    errors = tuple(
        m.name
        for m in METRICS.values()
        if m.kind == "node" and m.type == "counter" and m.trouble > 0 and m.name not in _NODE_NOT_ERRORS
    )
    return (_counter("errors", "errors of host and collectors", *errors), *_NODE_EVENTS)


_LIVE_LEVELS = (
    Level(MINUTE_S, 16),
    Level(5 * MINUTE_S, 25),
    Level(30 * MINUTE_S, 49),
    Level(6 * HOUR_S, 29),
)
_LIVE_WINDOWS = (
    Window("15m", 0, 15, 15 * MINUTE_S),
    Window("1h", 1, 12, HOUR_S),
    Window("6h", 2, 12, 6 * HOUR_S),
    Window("24h", 2, 48, DAY_S),
    Window("7d", 3, 28, 7 * DAY_S),
)
_DISK_LEVELS = (Level(6 * HOUR_S, 29), Level(DAY_S, 32), Level(7 * DAY_S, 14))
_DISK_WINDOWS = (
    Window("1d", 0, 4, DAY_S),
    Window("7d", 0, 28, 7 * DAY_S),
    Window("30d", 1, 30, 30 * DAY_S),
    Window("90d", 2, 13, 91 * DAY_S),
)


def _scheme(
    kind: str,
    signals: tuple[Signal, ...],
    levels: tuple[Level, ...],
    windows: tuple[Window, ...],
    anchors: tuple[str, ...],
    more: tuple[str, ...],
) -> Scheme:
    metrics = dict.fromkeys([m for s in signals for m in s.metrics])
    metrics.update(dict.fromkeys(more))
    return Scheme(kind, signals, levels, windows, anchors, tuple(m for m in metrics if m in METRICS))


@cache
def scheme_of(kind: str) -> Scheme:
    """The scheme of `gpu`, `disk` or `node`."""
    if kind == "gpu":
        anchors = ("gpu_temperature_celsius", "gpu_power_watts")
        return _scheme(kind, _GPU_SIGNALS, _LIVE_LEVELS, _LIVE_WINDOWS, anchors, _GPU_LEVEL_METRICS)
    if kind == "disk":
        anchors = ("disk_power_on_hours", "disk_temperature_celsius")
        return _scheme(kind, _DISK_SIGNALS, _DISK_LEVELS, _DISK_WINDOWS, anchors, _DISK_LEVEL_METRICS)
    if kind == "node":
        gauges = tuple(m.name for m in METRICS.values() if m.kind == "node" and not m.labels)
        return _scheme(kind, _node_signals(), _LIVE_LEVELS, _LIVE_WINDOWS, ("agent_resident_bytes",), gauges)
    raise ValueError(f"no features for kind {kind!r}: gpu, disk or node")


_XID_CATEGORY_SIGNALS = {
    "memory": "xid_memory",
    "nvlink": "xid_nvlink",
    "c2c": "xid_nvlink",
    "pcie": "xid_pcie",
    "user_app": "xid_app",
    "gsp": "xid_firmware",
    "microcontroller": "xid_firmware",
    "inforom": "xid_firmware",
    "driver": "xid_firmware",
    "thermal": "xid_other",
    "power": "xid_other",
    "meta": "xid_other",
}

_GPU_EVENT_SIGNALS = {
    "aer": "aer",
    "gpu_lost": "loss",
    "gpu_missing": "loss",
    "gpu_reset_required": "loss",
    "collector_silent": "silence",
    "sxid": "xid_nvlink",
}
_DISK_EVENT_SIGNALS = {"disk_error": "io_errors", "filesystem": "io_errors"}
_NODE_EVENT_SIGNALS = {
    "sxid": "sxid",
    "link_down": "link_down",
    "mlx5": "nic",
    "nvme": "disk",
    "ata": "disk",
    "disk_error": "disk",
    "filesystem": "filesystem",
    "lockup": "lockup",
    "hung_task": "lockup",
    "oom": "oom",
    "thermal": "thermal",
    "collector_silent": "silence",
    "gpu_lost": "gpu_loss",
    "gpu_missing": "gpu_loss",
}

_PREEMPTIVE_REMOVAL_XID = "45"
"""The driver ends the channels of a killed process: follows other events, says nothing by itself."""


def event_signal(kind: str, event: str, code: str, category: str = "", hardware: str = "") -> str | None:
    """The signal that an event feeds in the engine of `kind`; None: none.

    `category` and `hardware` are those of the XID where the event is one.
    """
    if kind == "gpu":
        if event != "xid":
            return _GPU_EVENT_SIGNALS.get(event)
        if code == _PREEMPTIVE_REMOVAL_XID:
            return "xid_app"
        return _XID_CATEGORY_SIGNALS.get(category, "xid_other")
    if kind == "disk":
        if event in ("nvme", "ata"):
            return "io_errors" if code == "io_error" else "resets"
        return _DISK_EVENT_SIGNALS.get(event)
    if event == "xid":
        return "xid_app" if category == "user_app" or code == _PREEMPTIVE_REMOVAL_XID else "xid_hardware"
    if event == "aer":
        return "aer_corrected" if code == "corrected" else "aer_severe"
    if event in ("mce", "edac"):
        return "memory_corrected" if code in ("corrected", "ce") else "memory_uncorrected"
    return _NODE_EVENT_SIGNALS.get(event)
