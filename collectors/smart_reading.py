"""What one answer of smartctl tells of one disk, whatever form it came in, and the small readers both forms share."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from typing import Literal

State = Literal["read", "asleep", "unavailable", "identity_only", "empty", "scan"]

LOWEST_TEMPERATURE_C = 1.0
HIGHEST_TEMPERATURE_C = 120.0
"""Outside these a figure is no reading: 0 stands for "no sensor" (RAID volumes, old SSDs), -93 and 255 were seen."""

LARGEST_COUNTER = 2**128
"""NVMe counters are 128 bits wide; anything above is garbage."""

EXIT_COMMAND_LINE = 1
EXIT_OPEN_FAILED = 2
EXIT_FAILING = 8
EXIT_PREFAIL_NOW = 16
EXIT_THRESHOLD_PAST = 32
EXIT_ERROR_LOG = 64
EXIT_SELF_TEST_LOG = 128
EXIT_NO_DATA = EXIT_COMMAND_LINE | EXIT_OPEN_FAILED
"""Bits of smartctl's exit status. Only the first two mean that there is no data."""


@dataclass(frozen=True)
class DiskReading:
    """One disk as one answer shows it. `values` holds catalog metrics in catalog units; what is absent was not told.

    `state` is `read` when there is health data, `asleep` when the disk was left sleeping, `unavailable` when it
    could not be opened (`why` and `hint` say more), `identity_only` when it only said who it is, `empty` when it
    said nothing, and `scan` when the answer is a list of disks. `passed` is the drive's own verdict or None.
    """

    state: State
    name: str = ""
    type: str = ""
    protocol: str = ""
    model: str = ""
    serial: str = ""
    firmware: str = ""
    capacity_bytes: float | None = None
    rotational: bool | None = None
    passed: bool | None = None
    exit_status: int = 0
    why: str = ""
    hint: str = ""
    message: str = ""
    values: dict[str, float] = field(default_factory=dict)
    below_threshold: tuple[str, ...] = ()
    error_log_entries: float | None = None
    uncorrected_writes: float | None = None
    spare_threshold_ratio: float | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Attribute:
    """One line of the ATA attribute table."""

    id: int
    name: str
    value: float | None
    raw: int | None
    raw_text: str
    prefail: bool
    when_failed: str


_COUNT_NAMES: dict[int, tuple[str, str]] = {
    5: ("disk_reallocated_sectors", r"realloc|retired_block"),
    10: ("disk_spin_retries", r"spin_retry"),
    12: ("disk_power_cycles", r"power_cycle|power_on_count"),
    184: ("disk_end_to_end_errors", r"end.to.end"),
    187: ("disk_reported_uncorrectable", r"uncorrect"),
    188: ("disk_command_timeouts", r"command_timeout"),
    189: ("disk_high_fly_writes", r"high_fly"),
    196: ("disk_reallocation_events", r"realloc"),
    197: ("disk_pending_sectors", r"pending"),
    198: ("disk_offline_uncorrectable", r"offline_uncorrect|^uncorrectable_sector|offline_scan_unc"),
    199: ("disk_crc_errors_total", r"crc"),
}
"""Attribute id to metric, with the names under which the id means that: SSD makers reuse the numbers."""

_PERCENT_LEFT_NAMES = re.compile(
    r"media_wearout|wear_leveling_count|ssd_life_left|percent_lifetime_remain|perc_rated_life_remain"
    r"|remaining_lifetime",
    re.IGNORECASE,
)
_PERCENT_USED_NAMES = re.compile(r"perc_rated_life_used|percent_lifetime_used", re.IGNORECASE)

_SEPARATORS = ",.'\u2019\u2018\u00a0\u202f\u2009\u0092\ufffd "
_GROUPED = re.compile(rf"\d{{1,3}}(?:[{re.escape(_SEPARATORS)}]\d{{3}})+(?!\d)|\d+")


def number(value: object) -> float | None:
    """A finite, non-negative number no larger than a counter can be; None for anything else, True included."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return float(value) if 0 <= value <= LARGEST_COUNTER else None


def grouped_number(text: str) -> float | None:
    """The first whole number in a text, with the thousands separators of any locale (comma, dot, space, apostrophe)."""
    found = _GROUPED.search(text[:80])
    if found is None:
        return None
    digits = "".join(c for c in found.group() if c.isascii() and c.isdigit())
    return number(int(digits)) if digits else None


def temperature(value: object) -> float | None:
    """A temperature in Celsius, or None where the figure cannot be one."""
    degrees = number(value)
    if degrees is None or not LOWEST_TEMPERATURE_C <= degrees <= HIGHEST_TEMPERATURE_C:
        return None
    return degrees


def attribute_values(attributes: list[Attribute]) -> dict[str, float]:
    """The catalog metrics that the ATA attribute table gives."""
    values: dict[str, float] = {}
    by_id = {a.id: a for a in attributes}
    for attribute in attributes:
        metric, pattern = _COUNT_NAMES.get(attribute.id, ("", ""))
        if metric and re.search(pattern, attribute.name, re.IGNORECASE):
            count = _count(attribute)
            if count is not None:
                values[metric] = count
        if attribute.id == 1 and "read_error" in attribute.name.lower():
            if attribute.raw is not None:
                values["disk_read_error_rate_raw"] = float(attribute.raw)
            if attribute.value is not None:
                values["disk_read_error_rate_normalized"] = attribute.value
        if attribute.id == 9 and "power_on" in attribute.name.lower():
            hours = _hours(attribute)
            if hours is not None:
                values["disk_power_on_hours"] = hours
            if attribute.value is not None:
                values["disk_power_on_normalized"] = attribute.value
        used = _endurance_used(attribute)
        if used is not None:
            values["disk_endurance_used_ratio"] = used
    # 194 is the drive itself, 190 may be its case or the air around it.
    for id_ in (194, 190):
        celsius = _attribute_temperature(by_id.get(id_))
        if celsius is not None:
            values["disk_temperature_celsius"] = celsius
            break
    return values


def attributes_below_threshold(attributes: list[Attribute]) -> tuple[str, ...]:
    """Names of the pre-failure attributes that are at or below their threshold now."""
    return tuple(a.name for a in attributes if a.prefail and a.when_failed.lower() in ("now", "failing_now"))


def _count(attribute: Attribute) -> float | None:
    raw = attribute.raw
    if attribute.id == 188:
        # Seagate packs three counters of 16 bits; the low word is the total.
        return None if raw is None else float(raw & 0xFFFF if raw > 0xFFFF else raw)
    if attribute.id in (5, 196) and "(" in attribute.raw_text:
        # raw16(raw16): the count proper is the low word, the rest are the maker's own.
        return grouped_number(attribute.raw_text)
    if attribute.id in (5, 196) and raw is not None and raw >= 2**32:
        return float(raw & 0xFFFF)
    return None if raw is None else float(raw)


def _hours(attribute: Attribute) -> float | None:
    found = re.match(r"\s*(\d{1,9})\s*h", attribute.raw_text)
    if found:
        return float(found.group(1))
    return None if attribute.raw is None else float(attribute.raw & 0xFFFFFF)


def _attribute_temperature(attribute: Attribute | None) -> float | None:
    if attribute is None or "temp" not in attribute.name.lower() or attribute.raw is None:
        return None
    return temperature(attribute.raw & 0xFF)


def _endurance_used(attribute: Attribute) -> float | None:
    if _PERCENT_USED_NAMES.search(attribute.name):
        return attribute.raw / 100 if attribute.raw is not None and attribute.raw <= 255 else None
    if attribute.id in (169, 177, 202, 231, 233) and _PERCENT_LEFT_NAMES.search(attribute.name):
        # The normalised value is the percentage left; the raw one counts erase cycles.
        left = attribute.value
        return (100 - left) / 100 if left is not None and 1 <= left <= 100 else None
    return None
