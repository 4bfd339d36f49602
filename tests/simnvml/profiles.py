"""What kinds of GPU answer which calls: plain figures that a test can rely on, not measurements of real boards."""

from __future__ import annotations

import dataclasses
from typing import Any

GIB = 1 << 30
EVENTS_DATACENTER = 0xFF8F | 0x100
EVENTS_GEFORCE = 0x18

_COMMON: dict[str, int] = {
    "temperature_c": 41,
    "threshold_shutdown_c": 92,
    "threshold_slowdown_c": 89,
    "power_mw": 71_500,
    "energy_mj": 3_600_000_000,
    "clock_graphics_mhz": 1410,
    "clock_sm_mhz": 1410,
    "clock_memory_mhz": 1593,
    "clock_video_mhz": 1275,
    "clock_max_sm_mhz": 1980,
    "clock_max_memory_mhz": 2619,
    "performance_state": 0,
    "utilization_gpu_pct": 97,
    "utilization_memory_pct": 43,
    "utilization_encoder_pct": 0,
    "utilization_decoder_pct": 0,
    "memory_reserved": GIB // 2,
    "memory_used": 20 * GIB,
    "clock_event_reasons": 0x4,
    "pcie_gen": 4,
    "pcie_gen_max": 4,
    "pcie_width": 16,
    "pcie_width_max": 16,
    "persistence": 1,
    "compute_mode": 0,
    "process_list": 0,
}
_DATACENTER: dict[str, int] = {
    "ecc_mode": 1,
    "remap_corrected": 0,
    "remap_uncorrected": 0,
    "remap_pending": 0,
    "remap_failure": 0,
    "banks_max": 640,
    "banks_high": 0,
    "banks_partial": 0,
    "banks_low": 0,
    "banks_none": 0,
    "pcie_replay": 0,
    "mig_mode": 0,
    "event_types": EVENTS_DATACENTER,
    "gsp_mode": 1,
}
_SRAM = dict.fromkeys(
    (
        "sram_status",
        "sram_threshold_exceeded",
        "sram_parity",
        "sram_secded",
        "sram_bucket_l2",
        "sram_bucket_sm",
        "sram_bucket_pcie",
        "sram_bucket_mcu",
        "sram_bucket_other",
    ),
    0,
)
_FIELDS_COMMON: dict[int, int] = {83: 3_600_000_000, 94: 0, 95: 0, 186: 73_250, 189: 400_000, 190: 400_000}
_FIELDS_DATACENTER: dict[int, int] = {
    82: 47,
    **dict.fromkeys((3, 4, 5, 6, 74, 75, 76, 77, 78, 79, 142, 143, 144, 145, 269, 270, 271), 0),
    **dict.fromkeys(range(173, 184), 0),
    169: 0,
}
FLAT_LINK_FIELDS = {
    "crc_flit": (*range(32, 38), *range(96, 102)),
    "crc_data": (*range(39, 45), *range(102, 108)),
    "replay": (*range(46, 52), *range(108, 114)),
    "recovery": (*range(53, 59), *range(114, 120)),
}
"""Field ids of the per-link counters up to NVLink 4, for links 0 to 11."""
_LINK_TOTALS = dict.fromkeys((38, 45, 52, 59), 0)
NVLINK5 = (*range(206, 216), 219, 220, 221, 222, *range(235, 251), 293)


@dataclasses.dataclass(frozen=True)
class Profile:
    """One kind of GPU: readings by name, fields by id, fields of each link by id, ECC locations, text."""

    name: str
    values: dict[str, int]
    fields: dict[int, int]
    links: int = 0
    link_fields: dict[int, int] = dataclasses.field(default_factory=dict)
    ecc_locations: tuple[int, ...] = ()
    fans: tuple[int, ...] = ()
    texts: dict[str, str] = dataclasses.field(default_factory=dict)


def _flat(links: int) -> dict[int, int]:
    return {ids[link]: 0 for ids in FLAT_LINK_FIELDS.values() for link in range(min(links, 12))}


def _profile(name: str, values: dict[str, int], **more: Any) -> Profile:
    texts = {"vbios": "92.00.36.00.01", "serial": "1320221000001", **more.pop("texts", {})}
    return Profile(name=name, values=values, texts=texts, **more)


A100 = _profile(
    "NVIDIA A100-SXM4-80GB",
    {**_COMMON, **_DATACENTER, "memory_total": 80 * GIB, "power_limit_mw": 400_000, "gsp_mode": 0},
    fields={**_FIELDS_COMMON, **_FIELDS_DATACENTER, **_flat(12), **_LINK_TOTALS, 91: 12},
    links=12,
    link_fields={161: 0, 162: 0, 163: 0, 165: 1},
    ecc_locations=(2, 7),
    texts={"inforom": "G506.0200.00.04"},
)
H100 = _profile(
    "NVIDIA H100 80GB HBM3",
    {
        **_COMMON,
        **_DATACENTER,
        **_SRAM,
        "memory_total": 80 * GIB,
        "power_limit_mw": 700_000,
        "margin_c": 46,
        "pcie_gen": 5,
        "pcie_gen_max": 5,
        "fabric_state": 3,
        "fabric_status": 0,
        "fabric_health_mask": 0,
        "fabric_health_summary": 1,
        "fabric_versions": 3,
        "unrepairable_memory": 0,
    },
    fields={**_FIELDS_COMMON, **_FIELDS_DATACENTER, **_flat(12), **_LINK_TOTALS, 91: 18, 185: 72_000, 230: 0},
    links=18,
    link_fields={161: 0, 162: 0, 163: 0, 165: 1},
    ecc_locations=(2, 7),
    texts={"inforom": "G520.0200.00.05", "gsp_version": "570.86.15", "vbios": "96.00.74.00.01"},
)
B200 = _profile(
    "NVIDIA B200",
    {**H100.values, "memory_total": 180 * GIB, "power_limit_mw": 1_000_000},
    fields={**_FIELDS_COMMON, **_FIELDS_DATACENTER, 91: 18, 185: 72_000, 230: 0},
    links=18,
    link_fields={165: 1, **dict.fromkeys(NVLINK5, 0)},
    ecc_locations=(2, 7),
    texts={"inforom": "G525.0220.00.03", "gsp_version": "570.86.15", "vbios": "97.00.5c.00.0a"},
)
GH200 = _profile(
    "NVIDIA GH200 480GB",
    H100.values,
    fields={**H100.fields, 170: 2, 231: 0, 232: 0, 233: 0},
    links=18,
    link_fields={**H100.link_fields, 171: 1, 231: 0, 232: 0, 233: 0},
    ecc_locations=(2, 7),
    texts=H100.texts,
)
V100 = _profile(
    "Tesla V100-SXM2-16GB",
    {
        **_COMMON,
        "memory_total": 16 * GIB,
        "power_limit_mw": 300_000,
        "ecc_mode": 1,
        "retired_sbe": 1,
        "retired_dbe": 2,
        "retired_pending": 0,
        "pcie_replay": 0,
        "event_types": 0xF,
    },
    fields={**_FIELDS_COMMON, 82: 44, 3: 0, 4: 0, 74: 0, 75: 0, 91: 6, **_flat(6), **_LINK_TOTALS},
    links=6,
    link_fields={165: 1},
    ecc_locations=(0, 1, 2, 3, 5, 6),
)
GEFORCE = _profile(
    "NVIDIA GeForce RTX 4090",
    {
        **_COMMON,
        "memory_total": 24 * GIB,
        "power_limit_mw": 450_000,
        "fans": 2,
        "event_types": EVENTS_GEFORCE,
    },
    fields={186: 73_250, 189: 450_000, 190: 450_000},
    fans=(30, 33),
)

PROFILES = {"A100": A100, "H100": H100, "B200": B200, "GH200": GH200, "V100": V100, "GEFORCE": GEFORCE}
