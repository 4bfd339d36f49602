"""Which NVML field gives which metric, and how often each is read. Ids are those of nvml.h; nothing here calls NVML.

Three tiers: fast changes by the second, medium are counters and link states, slow is configuration and wear.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

Tier = Literal["fast", "medium", "slow"]
TIERS: tuple[Tier, ...] = ("fast", "medium", "slow")

MILLI = 1e-3
NANO = 1e-9


class Field(NamedTuple):
    """One field of the whole GPU. The metric is the field's value times `scale`."""

    id: int
    metric: str
    tier: Tier
    scale: float = 1.0


class LinkField(NamedTuple):
    """One field that is asked for each link, as (id, scope). `pool` says how links make up the GPU's own figure;
    `packed` marks a bit error rate packed into bits (see `bit_error_rate`)."""

    id: int
    metric: str
    tier: Tier
    pool: Literal["sum", "max"] = "sum"
    packed: bool = False


FIELDS: tuple[Field, ...] = (
    Field(82, "gpu_memory_temperature_celsius", "fast"),
    Field(186, "gpu_power_instant_watts", "fast", MILLI),
    Field(74, "gpu_violation_power_seconds_total", "fast", NANO),
    Field(75, "gpu_violation_thermal_seconds_total", "fast", NANO),
    Field(76, "gpu_violation_sync_boost_seconds_total", "medium", NANO),
    Field(77, "gpu_violation_board_limit_seconds_total", "medium", NANO),
    Field(78, "gpu_violation_low_utilization_seconds_total", "medium", NANO),
    Field(79, "gpu_violation_reliability_seconds_total", "medium", NANO),
    Field(269, "gpu_slowdown_software_thermal_seconds_total", "fast", NANO),
    Field(270, "gpu_slowdown_hardware_thermal_seconds_total", "fast", NANO),
    Field(271, "gpu_slowdown_power_brake_seconds_total", "fast", NANO),
    Field(94, "gpu_pcie_replay_total", "fast"),
    Field(230, "gpu_recovery_action", "fast"),
    Field(144, "gpu_row_remap_pending", "fast"),
    Field(145, "gpu_row_remap_failure", "fast"),
    Field(142, "gpu_row_remap_corrected_total", "medium"),
    Field(143, "gpu_row_remap_uncorrected_total", "medium"),
    Field(3, "gpu_ecc_volatile_corrected_total", "medium"),
    Field(4, "gpu_ecc_volatile_uncorrected_total", "medium"),
    Field(95, "gpu_pcie_replay_rollover_total", "medium"),
    Field(169, "gpu_pcie_recovery_total", "medium"),
    Field(173, "gpu_pcie_correctable_errors_total", "medium"),
    Field(174, "gpu_pcie_nak_received_total", "medium"),
    Field(175, "gpu_pcie_receiver_errors_total", "medium"),
    Field(176, "gpu_pcie_bad_tlp_total", "medium"),
    Field(177, "gpu_pcie_nak_sent_total", "medium"),
    Field(178, "gpu_pcie_bad_dllp_total", "medium"),
    Field(179, "gpu_pcie_nonfatal_errors_total", "medium"),
    Field(180, "gpu_pcie_fatal_errors_total", "medium"),
    Field(181, "gpu_pcie_unsupported_requests_total", "medium"),
    Field(182, "gpu_pcie_lcrc_errors_total", "medium"),
    Field(183, "gpu_pcie_lane_errors_total", "medium"),
    Field(189, "gpu_power_limit_default_watts", "slow", MILLI),
    Field(91, "gpu_nvlink_links_total", "slow"),
    Field(170, "gpu_c2c_links_total", "slow"),
)
"""Fields without a scope."""

LINK_FIELDS: tuple[LinkField, ...] = (
    LinkField(206, "gpu_nvlink_malformed_packets_total", "medium"),
    LinkField(207, "gpu_nvlink_buffer_overruns_total", "medium"),
    LinkField(208, "gpu_nvlink_receive_errors_total", "medium"),
    LinkField(209, "gpu_nvlink_remote_errors_total", "medium"),
    LinkField(210, "gpu_nvlink_general_errors_total", "medium"),
    LinkField(211, "gpu_nvlink_local_integrity_errors_total", "medium"),
    LinkField(212, "gpu_nvlink_discards_total", "medium"),
    LinkField(213, "gpu_nvlink_recovery_succeeded_total", "medium"),
    LinkField(214, "gpu_nvlink_recovery_failed_total", "medium"),
    LinkField(215, "gpu_nvlink_recovery_events_total", "medium"),
    LinkField(219, "gpu_nvlink_effective_errors_total", "medium"),
    LinkField(220, "gpu_nvlink_effective_bit_error_ratio", "medium", "max", packed=True),
    LinkField(221, "gpu_nvlink_symbol_errors_total", "medium"),
    LinkField(222, "gpu_nvlink_symbol_bit_error_ratio", "medium", "max", packed=True),
    LinkField(293, "gpu_nvlink_raw_bit_error_ratio", "slow", "max", packed=True),
    # The data link layer's own counters serve every link; the flat ones below end at link 11.
    LinkField(161, "gpu_nvlink_replay_errors_total", "medium"),
    LinkField(162, "gpu_nvlink_recovery_errors_total", "medium"),
    LinkField(163, "gpu_nvlink_crc_flit_errors_total", "medium"),
)

FLAT_LINK_FIELDS: dict[str, tuple[int, ...]] = {
    "gpu_nvlink_crc_flit_errors_total": (*range(32, 38), *range(96, 102)),
    "gpu_nvlink_crc_data_errors_total": (*range(39, 45), *range(102, 108)),
    "gpu_nvlink_replay_errors_total": (*range(46, 52), *range(108, 114)),
    "gpu_nvlink_recovery_errors_total": (*range(53, 59), *range(114, 120)),
}
"""NVLink up to 4: one field id for each of the links 0 to 11. A link that answers here and by scope counts once."""

FEC_FIELDS = tuple(range(235, 251))
"""NVLink 5: codewords by number of corrected symbols, one field a bin, asked for each link."""

C2C_FIELDS: dict[int, str] = {
    231: "gpu_c2c_crc_errors_total",
    232: "gpu_c2c_replay_errors_total",
    233: "gpu_c2c_back_to_back_replays_total",
}
"""Chip-to-chip links (Grace Hopper, Grace Blackwell), asked for each link, summed."""

NVLINK_STATE_FIELD = 165
MAX_FIELDS_A_CALL = 96
"""One call is kept to this many entries: no limit is documented, and none is worth finding on a user's node."""


def bit_error_rate(packed: int) -> float:
    """The rate that NVLink 5 packs into 12 bits: mantissa in bits 8 to 11, negative exponent in bits 0 to 7."""
    return float(packed >> 8 & 0xF) * 10.0 ** -(packed & 0xFF)
