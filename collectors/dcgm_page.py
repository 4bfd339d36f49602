"""A dcgm-exporter page as samples in catalog names and units. Pure: text in, readings out.

Takes the default and the full counter sets, both spellings of the labels, MIG rows, and pages with bad lines.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator

import msgspec
from prometheus_client.parser import text_string_to_metric_families

from forewarn.collectors.base import Device, Sample
from forewarn.collectors.errors import InputError

MAX_ROWS = 200_000
_MIB = 1024.0 * 1024.0
_PERCENT = 0.01
_MHZ = 1e6
_MILLI = 1e-3
_NANO = 1e-9

FIELDS: dict[str, tuple[str, float]] = {
    "DCGM_FI_DEV_SM_CLOCK": ("gpu_sm_clock_hertz", _MHZ),
    "DCGM_FI_DEV_MEM_CLOCK": ("gpu_memory_clock_hertz", _MHZ),
    "DCGM_FI_DEV_MAX_SM_CLOCK": ("gpu_sm_clock_max_hertz", _MHZ),
    "DCGM_FI_DEV_GPU_TEMP": ("gpu_temperature_celsius", 1),
    "DCGM_FI_DEV_MEMORY_TEMP": ("gpu_memory_temperature_celsius", 1),
    "DCGM_FI_DEV_SLOWDOWN_TEMP": ("gpu_temperature_slowdown_celsius", 1),
    "DCGM_FI_DEV_SHUTDOWN_TEMP": ("gpu_temperature_shutdown_celsius", 1),
    "DCGM_FI_DEV_POWER_USAGE": ("gpu_power_watts", 1),
    "DCGM_FI_DEV_POWER_MGMT_LIMIT": ("gpu_power_limit_watts", 1),
    "DCGM_FI_DEV_ENFORCED_POWER_LIMIT": ("gpu_power_limit_watts", 1),
    "DCGM_FI_DEV_POWER_MGMT_LIMIT_DEF": ("gpu_power_limit_default_watts", 1),
    "DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION": ("gpu_energy_joules_total", _MILLI),
    "DCGM_FI_DEV_PSTATE": ("gpu_performance_state", 1),
    "DCGM_FI_DEV_FAN_SPEED": ("gpu_fan_speed_ratio", _PERCENT),
    "DCGM_FI_DEV_GPU_UTIL": ("gpu_utilization_ratio", _PERCENT),
    "DCGM_FI_DEV_MEM_COPY_UTIL": ("gpu_memory_utilization_ratio", _PERCENT),
    "DCGM_FI_DEV_ENC_UTIL": ("gpu_encoder_utilization_ratio", _PERCENT),
    "DCGM_FI_DEV_DEC_UTIL": ("gpu_decoder_utilization_ratio", _PERCENT),
    "DCGM_FI_DEV_CLOCK_THROTTLE_REASONS": ("gpu_clock_event_reasons", 1),
    "DCGM_FI_DEV_CLOCKS_EVENT_REASONS": ("gpu_clock_event_reasons", 1),
    # Nanoseconds, whatever the counter files of the exporter said for years (NVIDIA/dcgm-exporter#589).
    "DCGM_FI_DEV_POWER_VIOLATION": ("gpu_violation_power_seconds_total", _NANO),
    "DCGM_FI_DEV_THERMAL_VIOLATION": ("gpu_violation_thermal_seconds_total", _NANO),
    "DCGM_FI_DEV_SYNC_BOOST_VIOLATION": ("gpu_violation_sync_boost_seconds_total", _NANO),
    "DCGM_FI_DEV_BOARD_LIMIT_VIOLATION": ("gpu_violation_board_limit_seconds_total", _NANO),
    "DCGM_FI_DEV_LOW_UTIL_VIOLATION": ("gpu_violation_low_utilization_seconds_total", _NANO),
    "DCGM_FI_DEV_RELIABILITY_VIOLATION": ("gpu_violation_reliability_seconds_total", _NANO),
    "DCGM_FI_DEV_CLOCKS_EVENT_REASON_SW_THERM_SLOWDOWN_NS": (
        "gpu_slowdown_software_thermal_seconds_total",
        _NANO,
    ),
    "DCGM_FI_DEV_CLOCKS_EVENT_REASON_HW_THERM_SLOWDOWN_NS": (
        "gpu_slowdown_hardware_thermal_seconds_total",
        _NANO,
    ),
    "DCGM_FI_DEV_CLOCKS_EVENT_REASON_HW_POWER_BRAKE_SLOWDOWN_NS": (
        "gpu_slowdown_power_brake_seconds_total",
        _NANO,
    ),
    "DCGM_FI_DEV_FB_USED": ("gpu_memory_used_bytes", _MIB),
    "DCGM_FI_DEV_FB_TOTAL": ("gpu_memory_total_bytes", _MIB),
    "DCGM_FI_DEV_FB_RESERVED": ("gpu_memory_reserved_bytes", _MIB),
    "DCGM_FI_DEV_ECC_CURRENT": ("gpu_ecc_enabled", 1),
    "DCGM_FI_DEV_ECC_SBE_VOL_TOTAL": ("gpu_ecc_volatile_corrected_total", 1),
    "DCGM_FI_DEV_ECC_DBE_VOL_TOTAL": ("gpu_ecc_volatile_uncorrected_total", 1),
    "DCGM_FI_DEV_ECC_SBE_AGG_TOTAL": ("gpu_ecc_aggregate_corrected_total", 1),
    "DCGM_FI_DEV_ECC_DBE_AGG_TOTAL": ("gpu_ecc_aggregate_uncorrected_total", 1),
    "DCGM_FI_DEV_ECC_SBE_AGG_DEV": ("gpu_ecc_dram_corrected_total", 1),
    "DCGM_FI_DEV_ECC_DBE_AGG_DEV": ("gpu_ecc_dram_uncorrected_total", 1),
    "DCGM_FI_DEV_RETIRED_SBE": ("gpu_retired_pages_sbe_total", 1),
    "DCGM_FI_DEV_RETIRED_DBE": ("gpu_retired_pages_dbe_total", 1),
    "DCGM_FI_DEV_RETIRED_PENDING": ("gpu_retired_pages_pending", 1),
    "DCGM_FI_DEV_CORRECTABLE_REMAPPED_ROWS": ("gpu_row_remap_corrected_total", 1),
    "DCGM_FI_DEV_UNCORRECTABLE_REMAPPED_ROWS": ("gpu_row_remap_uncorrected_total", 1),
    "DCGM_FI_DEV_ROW_REMAP_PENDING": ("gpu_row_remap_pending", 1),
    "DCGM_FI_DEV_ROW_REMAP_FAILURE": ("gpu_row_remap_failure", 1),
    "DCGM_FI_DEV_BANKS_REMAP_ROWS_AVAIL_MAX": ("gpu_row_remap_banks_max", 1),
    "DCGM_FI_DEV_BANKS_REMAP_ROWS_AVAIL_HIGH": ("gpu_row_remap_banks_high", 1),
    "DCGM_FI_DEV_BANKS_REMAP_ROWS_AVAIL_PARTIAL": ("gpu_row_remap_banks_partial", 1),
    "DCGM_FI_DEV_BANKS_REMAP_ROWS_AVAIL_LOW": ("gpu_row_remap_banks_low", 1),
    "DCGM_FI_DEV_BANKS_REMAP_ROWS_AVAIL_NONE": ("gpu_row_remap_banks_none", 1),
    "DCGM_FI_DEV_PCIE_REPLAY_COUNTER": ("gpu_pcie_replay_total", 1),
    "DCGM_FI_DEV_PCIE_LINK_GEN": ("gpu_pcie_link_generation", 1),
    "DCGM_FI_DEV_PCIE_MAX_LINK_GEN": ("gpu_pcie_link_generation_max", 1),
    "DCGM_FI_DEV_PCIE_LINK_WIDTH": ("gpu_pcie_link_width", 1),
    "DCGM_FI_DEV_PCIE_MAX_LINK_WIDTH": ("gpu_pcie_link_width_max", 1),
    "DCGM_FI_DEV_NVLINK_CRC_FLIT_ERROR_COUNT_TOTAL": ("gpu_nvlink_crc_flit_errors_total", 1),
    "DCGM_FI_DEV_NVLINK_CRC_DATA_ERROR_COUNT_TOTAL": ("gpu_nvlink_crc_data_errors_total", 1),
    "DCGM_FI_DEV_NVLINK_REPLAY_ERROR_COUNT_TOTAL": ("gpu_nvlink_replay_errors_total", 1),
    "DCGM_FI_DEV_NVLINK_RECOVERY_ERROR_COUNT_TOTAL": ("gpu_nvlink_recovery_errors_total", 1),
    "DCGM_FI_DEV_NVLINK_COUNT_RX_MALFORMED_PACKET_ERRORS": ("gpu_nvlink_malformed_packets_total", 1),
    "DCGM_FI_DEV_NVLINK_COUNT_RX_BUFFER_OVERRUN_ERRORS": ("gpu_nvlink_buffer_overruns_total", 1),
    "DCGM_FI_DEV_NVLINK_COUNT_RX_ERRORS": ("gpu_nvlink_receive_errors_total", 1),
    "DCGM_FI_DEV_NVLINK_COUNT_LOCAL_LINK_INTEGRITY_ERRORS": ("gpu_nvlink_local_integrity_errors_total", 1),
    "DCGM_FI_DEV_NVLINK_COUNT_LINK_RECOVERY_FAILED_EVENTS": ("gpu_nvlink_recovery_failed_total", 1),
    "DCGM_FI_DEV_NVLINK_COUNT_LINK_RECOVERY_EVENTS": ("gpu_nvlink_recovery_events_total", 1),
    "DCGM_FI_DEV_NVLINK_COUNT_RX_SYMBOL_ERRORS": ("gpu_nvlink_symbol_errors_total", 1),
    "DCGM_FI_DEV_NVLINK_COUNT_EFFECTIVE_ERRORS": ("gpu_nvlink_effective_errors_total", 1),
    "DCGM_FI_DEV_NVLINK_COUNT_SYMBOL_BER_FLOAT": ("gpu_nvlink_symbol_bit_error_ratio", 1),
    "DCGM_FI_DEV_NVLINK_COUNT_EFFECTIVE_BER_FLOAT": ("gpu_nvlink_effective_bit_error_ratio", 1),
    "DCGM_FI_DEV_PCIE_COUNT_CORRECTABLE_ERRORS": ("gpu_pcie_correctable_errors_total", 1),
    "DCGM_FI_DEV_ECC_SBE_AGG_SRM": ("gpu_ecc_sram_corrected_total", 1),
    "DCGM_FI_DEV_ECC_DBE_AGG_SRM": ("gpu_ecc_sram_uncorrected_total", 1),
    "DCGM_FI_DEV_THRESHOLD_SRM": ("gpu_ecc_sram_threshold_exceeded", 1),
    "DCGM_FI_DEV_GPU_TEMP_LIMIT": ("gpu_temperature_margin_celsius", 1),
    "DCGM_FI_DEV_GET_GPU_RECOVERY_ACTION": ("gpu_recovery_action", 1),
    "DCGM_FI_DEV_MIG_MODE": ("gpu_mig_enabled", 1),
    "DCGM_FI_DEV_PERSISTENCE_MODE": ("gpu_persistence_enabled", 1),
    "DCGM_FI_DEV_XID_ERRORS": ("gpu_last_xid", 1),
    "DCGM_FI_PROF_PIPE_TENSOR_ACTIVE": ("gpu_tensor_active_ratio", 1),
    "DCGM_FI_PROF_GR_ENGINE_ACTIVE": ("gpu_engine_active_ratio", 1),
    "DCGM_FI_PROF_DRAM_ACTIVE": ("gpu_dram_active_ratio", 1),
}
"""Exporter field to catalog metric and the factor between their units."""

_D = "DCGM_FI_DEV_"
RENAMED: dict[str, str] = {
    **{
        _D + new: _D + old
        for new, old in (
            ("MEMORY_TEMP_CELSIUS", "MEMORY_TEMP"),
            ("GPU_TEMP_CELSIUS", "GPU_TEMP"),
            ("GPU_TEMP_MARGIN_CELSIUS", "GPU_TEMP_LIMIT"),
            ("GPU_TEMP_SLOWDOWN_CELSIUS", "SLOWDOWN_TEMP"),
            ("GPU_TEMP_SHUTDOWN_CELSIUS", "SHUTDOWN_TEMP"),
            ("BOARD_POWER_WATTS", "POWER_USAGE"),
            ("BOARD_POWER_LIMIT_REQUESTED_WATTS", "POWER_MGMT_LIMIT"),
            ("BOARD_POWER_LIMIT_DEFAULT_WATTS", "POWER_MGMT_LIMIT_DEF"),
            ("BOARD_POWER_LIMIT_ENFORCED_WATTS", "ENFORCED_POWER_LIMIT"),
            ("GPU_PSTATE", "PSTATE"),
            ("GPU_UTIL_RATIO", "GPU_UTIL"),
            ("PCIE_REPLAY_TOTAL", "PCIE_REPLAY_COUNTER"),
            ("PCIE_CORRECTABLE_ERROR_TOTAL", "PCIE_COUNT_CORRECTABLE_ERRORS"),
            ("XID_ERROR", "XID_ERRORS"),
            ("ECC_MODE", "ECC_CURRENT"),
            ("SRAM_EXCEEDED", "THRESHOLD_SRM"),
            ("BANK_REMAP_AVAIL_MAX", "BANKS_REMAP_ROWS_AVAIL_MAX"),
            ("BANK_REMAP_AVAIL_HIGH", "BANKS_REMAP_ROWS_AVAIL_HIGH"),
            ("BANK_REMAP_AVAIL_PARTIAL", "BANKS_REMAP_ROWS_AVAIL_PARTIAL"),
            ("BANK_REMAP_AVAIL_LOW", "BANKS_REMAP_ROWS_AVAIL_LOW"),
            ("BANK_REMAP_AVAIL_NONE", "BANKS_REMAP_ROWS_AVAIL_NONE"),
            ("PAGE_RETIRED_SBE_TOTAL", "RETIRED_SBE"),
            ("PAGE_RETIRED_DBE_TOTAL", "RETIRED_DBE"),
            ("PAGE_RETIRED_PENDING", "RETIRED_PENDING"),
            ("ROW_REMAP_UNCORRECTABLE_TOTAL", "UNCORRECTABLE_REMAPPED_ROWS"),
            ("ROW_REMAP_CORRECTABLE_TOTAL", "CORRECTABLE_REMAPPED_ROWS"),
            ("ROW_REMAP_FAILED", "ROW_REMAP_FAILURE"),
            ("NVLINK_CRC_FLIT_ERROR_TOTAL", "NVLINK_CRC_FLIT_ERROR_COUNT_TOTAL"),
            ("NVLINK_CRC_DATA_ERROR_TOTAL", "NVLINK_CRC_DATA_ERROR_COUNT_TOTAL"),
            ("NVLINK_REPLAY_ERROR_TOTAL", "NVLINK_REPLAY_ERROR_COUNT_TOTAL"),
            ("NVLINK_RECOVERY_ERROR_TOTAL", "NVLINK_RECOVERY_ERROR_COUNT_TOTAL"),
            ("NVLINK_RX_PACKET_MALFORMED_TOTAL", "NVLINK_COUNT_RX_MALFORMED_PACKET_ERRORS"),
            ("NVLINK_RX_PACKET_DROPPED_TOTAL", "NVLINK_COUNT_RX_BUFFER_OVERRUN_ERRORS"),
            ("NVLINK_RX_ERROR_TOTAL", "NVLINK_COUNT_RX_ERRORS"),
            ("NVLINK_INTEGRITY_ERROR_TOTAL", "NVLINK_COUNT_LOCAL_LINK_INTEGRITY_ERRORS"),
            ("NVLINK_RECOVERY_FAILED_TOTAL", "NVLINK_COUNT_LINK_RECOVERY_FAILED_EVENTS"),
            ("NVLINK_RECOVERY_EVENT_TOTAL", "NVLINK_COUNT_LINK_RECOVERY_EVENTS"),
            ("NVLINK_RX_SYMBOL_ERROR_TOTAL", "NVLINK_COUNT_RX_SYMBOL_ERRORS"),
            ("NVLINK_EFFECTIVE_ERROR_TOTAL", "NVLINK_COUNT_EFFECTIVE_ERRORS"),
            ("NVLINK_SYMBOL_BER_RATIO", "NVLINK_COUNT_SYMBOL_BER_FLOAT"),
            ("NVLINK_EFFECTIVE_BER_RATIO", "NVLINK_COUNT_EFFECTIVE_BER_FLOAT"),
            ("GPU_RECOVERY_ACTION", "GET_GPU_RECOVERY_ACTION"),
        )
    },
    "DCGM_FI_PROF_GR_ENGINE_UTIL_RATIO": "DCGM_FI_PROF_GR_ENGINE_ACTIVE",
    "DCGM_FI_PROF_TENSOR_UTIL_RATIO": "DCGM_FI_PROF_PIPE_TENSOR_ACTIVE",
    "DCGM_FI_PROF_DRAM_UTIL_RATIO": "DCGM_FI_PROF_DRAM_ACTIVE",
}
"""The names that DCGM gave its fields in 2026; numbers and units stayed as they were."""

NOT_FROM_NVML = frozenset(
    ("gpu_last_xid", "gpu_tensor_active_ratio", "gpu_engine_active_ratio", "gpu_dram_active_ratio")
)
"""What the page tells that NVML does not (profiling counters need DCGM)."""

_SUMMED_OVER_MIG = frozenset(("gpu_memory_used_bytes", "gpu_memory_total_bytes"))
_PER_MIG_INSTANCE = frozenset(
    (
        *("gpu_utilization_ratio", "gpu_memory_utilization_ratio", "gpu_tensor_active_ratio"),
        *("gpu_engine_active_ratio", "gpu_dram_active_ratio"),
        *("gpu_encoder_utilization_ratio", "gpu_decoder_utilization_ratio"),
    )
)
"""Shares of an instance say nothing of the whole board: left out."""

_LINK_LABELS = ("nvlink", "link")
_INT32_BLANK = (2_147_483_632.0, 2_147_483_647.0)
_INT64_BLANK = 9_223_372_036_854_774_000.0
_FP64_BLANK = (140_737_488_355_328.0, 140_737_488_355_344.0)
_GPU_NUMBER = re.compile(r"(?:nvidia|gpu)?(\d{1,4})$")
_XID = re.compile(r"\d{1,5}$")


class Row(msgspec.Struct, frozen=True):
    """One line of the page: the field, its labels, the number, and how many columns gave it."""

    field: str
    labels: dict[str, str]
    value: float


class GpuRow(msgspec.Struct):
    """What the page says of one GPU."""

    device: Device
    values: dict[str, float] = {}
    xid_counts: dict[int, float] = {}
    """Times each XID was seen in the exporter's window (DCGM_EXP_XID_ERRORS_COUNT), where it counts them."""


class Page(msgspec.Struct):
    """A page read: GPUs by local id, hosts it speaks of, and lines that could not be read."""

    gpus: dict[str, GpuRow] = {}
    hosts: tuple[str, ...] = ()
    bad_lines: int = 0
    first_bad: str = ""
    rows: int = 0
    foreign: int = 0
    """Rows of metrics that are not DCGM's."""

    def samples(self, skip_nvml: bool) -> list[Sample]:
        return [
            Sample(local, metric, value)
            for local, gpu in self.gpus.items()
            for metric, value in gpu.values.items()
            if not skip_nvml or metric in NOT_FROM_NVML
        ]


def is_blank(value: float) -> bool:
    """Whether DCGM meant "no value" (blank, not found, not supported, not permitted) by this number."""
    return (
        not math.isfinite(value)
        or _INT32_BLANK[0] <= value <= _INT32_BLANK[1]
        or value >= _INT64_BLANK
        or _FP64_BLANK[0] <= value <= _FP64_BLANK[1]
    )


def read_page(text: str, host: str = "") -> Page:
    """Read a page. With `host`, rows of other hosts are passed over.

    Raises InputError when the text is no metrics page at all.
    """
    # A damaged first byte must not cost a page that is otherwise whole: what holds DCGM rows is one.
    alien = "<html" in text[:2000].lower() or text.lstrip()[:1] in ("{", "[")
    if alien and "\nDCGM_" not in text:
        raise InputError("the page is not in Prometheus text format")
    page = Page(gpus={}, hosts=())
    if text and not text.endswith("\n"):
        text, _, cut = text.rpartition("\n")  # cut short: its last number may lack digits
        page.bad_lines, page.first_bad = 1, cut[:120]
    hosts: dict[str, None] = {}
    free: dict[str, float] = {}
    for row in _rows(text, page):
        page.rows += 1
        if page.rows > MAX_ROWS:
            raise InputError(f"the page holds more than {MAX_ROWS} rows")
        if not row.field.startswith("DCGM_"):
            page.foreign += 1
            continue
        owner = row.labels.get("Hostname") or row.labels.get("hostname") or ""
        if owner:
            hosts[owner] = None
            if host and owner.partition(".")[0] != host.partition(".")[0]:
                continue
        local = _local(row.labels)
        if local is None:
            continue
        gpu = page.gpus.get(local)
        if gpu is None:
            gpu = page.gpus[local] = GpuRow(_device(local, row.labels), {}, {})
        _take(gpu, row, free, local)
    for local, mib in free.items():
        values = page.gpus[local].values
        if "gpu_memory_used_bytes" in values:
            values.setdefault(
                "gpu_memory_total_bytes",
                values["gpu_memory_used_bytes"] + mib + values.get("gpu_memory_reserved_bytes", 0.0),
            )
    page.hosts = tuple(hosts)
    return page


def _take(gpu: GpuRow, row: Row, free: dict[str, float], local: str) -> None:
    instance = bool(row.labels.get("GPU_I_ID"))
    if row.field == "DCGM_EXP_XID_ERRORS_COUNT":
        number = row.labels.get("xid", "")
        if _XID.match(number) and not is_blank(row.value):
            gpu.xid_counts[int(number)] = gpu.xid_counts.get(int(number), 0.0) + row.value
        return
    if row.field == "DCGM_FI_DEV_FB_FREE":
        if not is_blank(row.value) and row.value >= 0:
            free[local] = free.get(local, 0.0) + row.value * _MIB
        return
    known = FIELDS.get(row.field)
    if known is None:
        return
    metric, factor = known
    if instance and metric in _PER_MIG_INSTANCE:
        return
    value = _sane(metric, row.value, factor)
    if value is None:
        return
    if any(label in row.labels for label in _LINK_LABELS):
        before = gpu.values.get(
            metric, 0.0
        )  # one row a link: counts add up, of rates the worst link's counts
        gpu.values[metric] = max(before, value) if metric.endswith("_ratio") else before + value
    elif instance and metric in _SUMMED_OVER_MIG:
        gpu.values[metric] = gpu.values.get(metric, 0.0) + value
    elif row.field == "DCGM_FI_DEV_POWER_MGMT_LIMIT":
        gpu.values.setdefault(metric, value)  # the enforced limit, where given, is the one in force
    else:
        gpu.values[metric] = value


def _sane(metric: str, value: float, factor: float) -> float | None:
    """The value in the catalog's unit, None when it cannot be one."""
    if is_blank(value) or (value < 0 and not metric.endswith("_celsius")):
        return None
    scaled = value * factor
    if metric.endswith("_ratio") and not 0.0 <= scaled <= 1.0001:
        return None
    if metric.endswith("_celsius") and not -50.0 <= scaled <= 250.0:
        return None
    if metric == "gpu_memory_temperature_celsius" and scaled == 0.0:
        return None  # boards without the sensor give 0
    return min(scaled, 1.0) if metric.endswith("_ratio") else scaled


def _local(labels: dict[str, str]) -> str | None:
    for name in ("gpu", "device", "minor_number"):
        if m := _GPU_NUMBER.match(labels.get(name, "")):
            return f"gpu{int(m[1])}"
    return None


def _device(local: str, labels: dict[str, str]) -> Device:
    pci = labels.get("pci_bus_id", "").lower()
    domain, _, rest = pci.partition(":")
    driver = labels.get("DCGM_FI_DRIVER_VERSION", "")
    return Device(
        device=local,
        kind="gpu",
        model=labels.get("modelName", ""),
        serial=labels.get("UUID") or labels.get("uuid") or "",
        pci=f"{domain.lstrip('0').rjust(4, '0')}:{rest}".partition(".")[0] if rest else None,
        labels={"driver": driver} if driver else {},
    )


def _rows(text: str, page: Page) -> Iterator[Row]:
    try:
        rows = list(_parse(text))
    except (ValueError, IndexError, KeyError, AttributeError, TypeError):
        rows = []
        for line in text.splitlines():
            if not line.strip() or line.lstrip().startswith("#"):
                continue
            try:
                rows.extend(_parse(line))
            except (ValueError, IndexError, KeyError, AttributeError, TypeError):
                page.bad_lines += 1
                page.first_bad = page.first_bad or line[:120]
    yield from rows


def _parse(text: str) -> Iterator[Row]:
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            name = sample.name
            if name not in FIELDS and name.endswith("_total"):
                name = name[: -len("_total")]  # the parser's own habit with counters that lack it
            yield Row(RENAMED.get(name, name), sample.labels, float(sample.value))
