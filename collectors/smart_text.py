"""Reads what smartctl prints for people, for hosts whose smartctl has no JSON. Pure: text in, reading out."""

from __future__ import annotations

import re
from typing import Any

from forewarn.collectors.smart_failure import failure_of, is_asleep
from forewarn.collectors.smart_reading import (
    Attribute,
    DiskReading,
    attribute_values,
    attributes_below_threshold,
    grouped_number,
    temperature,
)

MAX_LINES = 5000
MAX_LINE_LENGTH = 1000

_SCAN_LINE = re.compile(r"^(?:#\s*)?(\S+)\s+-d\s+(\S+)\s+#")
_FIELD = re.compile(r"^ {0,2}([A-Za-z][^:=]{1,60}?)\s*[:=]\s*(.*)$")
_ATTRIBUTE = re.compile(
    r"^\s*(\d{1,3})\s+(\S+)\s+(0x[0-9a-fA-F]{4})\s+(\d{1,3})\s+(\d{1,3})\s+(\d{1,3}|---)\s+"
    r"(Pre-fail|Old_age)\s+(\S+)\s+(\S+)\s+(.*)$"
)
_BRIEF_ATTRIBUTE = re.compile(
    r"^\s*(\d{1,3})\s+(\S+)\s+([A-Z-]{6,7})\s+(\d{1,3})\s+(\d{1,3})\s+(\d{1,3}|---)\s+(\S+)\s+(.*)$"
)
_COUNTER_ROW = re.compile(r"^(read|write|verify):\s+(.*)$")
_NAME = re.compile(r"(/dev/[^\s:\]]+)")

_MODEL_FIELDS = ("device model", "model number", "product")


def scan_entries(text: str) -> list[tuple[str, str]]:
    """(name, type) of each disk in a plain scan's answer, also of those that could not be opened."""
    found = (_SCAN_LINE.match(line[:MAX_LINE_LENGTH]) for line in text.splitlines()[:MAX_LINES])
    return [(match.group(1), match.group(2)) for match in found if match]


def replayed_name(text: str) -> str:
    """The device node that an answer speaks of, or nothing."""
    found = _NAME.search(text[:4000])
    return found.group(1) if found else ""


def read(text: str, exit_status: int = 0) -> DiskReading:
    """The reading of plain output. Never fails; what is not recognised is `empty`."""
    lines = [line[:MAX_LINE_LENGTH] for line in text.splitlines()[:MAX_LINES]]
    if scan_entries(text) and "=== START" not in text:
        return DiskReading("scan", message="the answer is a list of disks")
    fields = _fields(lines)
    attributes = _attributes(lines)
    values = attribute_values(attributes) | _field_values(fields)
    uncorrected, writes = _uncorrected(lines)
    if uncorrected is not None:
        values["disk_uncorrected_errors_total"] = uncorrected
    passed = _passed(fields)
    who = _identity(fields)
    told = passed is not None or bool(values)
    if passed is not None:
        values["disk_smart_passed"] = float(passed)
    who["protocol"] = _protocol(fields, attributes)
    if not told and is_asleep(text):
        return DiskReading("asleep", exit_status=exit_status, message=_message(lines), **who)
    if not told:
        failure = failure_of(_message(lines), exit_status & 3) if not who["model"] else None
        if failure is not None:
            return DiskReading(
                "unavailable",
                exit_status=exit_status,
                why=failure.why,
                hint=failure.hint,
                message=failure.message,
                **{**who, "name": replayed_name(text)},
            )
        return DiskReading("identity_only" if who["model"] else "empty", exit_status=exit_status, **who)
    entries = _error_log_entries(text)
    threshold = grouped_number(fields.get("available spare threshold", ""))
    return DiskReading(
        "read",
        passed=passed,
        exit_status=exit_status,
        values=values,
        below_threshold=attributes_below_threshold(attributes),
        error_log_entries=entries,
        uncorrected_writes=writes,
        spare_threshold_ratio=None if threshold is None else threshold / 100,
        **who,
    )


def _fields(lines: list[str]) -> dict[str, str]:
    """The first value of each `Name: value` line, names in small letters."""
    fields: dict[str, str] = {}
    for line in lines:
        found = _FIELD.match(line)
        if found:
            name = " ".join(found.group(1).lower().split())
            value = found.group(2).strip()
            if name == "smart support is" and name in fields:
                name = "smart support is enabled"
            fields.setdefault(name, value)
    return fields


def _passed(fields: dict[str, str]) -> bool | None:
    verdict = fields.get("smart overall-health self-assessment test result", "")
    if verdict.startswith("PASSED"):
        return True
    if verdict.startswith("FAILED"):
        return False
    status = fields.get("smart health status", "")
    if status:
        return status.startswith("OK")
    return None


def _identity(fields: dict[str, str]) -> dict[str, Any]:
    model = next((fields[name] for name in _MODEL_FIELDS if fields.get(name)), "")
    rate = fields.get("rotation rate", "").lower()
    rotational = (
        False if "solid state" in rate or "model number" in fields else True if "rpm" in rate else None
    )
    capacity = fields.get("user capacity") or fields.get("total nvm capacity") or ""
    return {
        "name": "",
        "type": "",
        "model": model.strip()[:200],
        "serial": fields.get("serial number", "")[:200],
        "firmware": (fields.get("firmware version") or fields.get("revision") or "")[:200],
        "capacity_bytes": grouped_number(capacity) or None,
        "rotational": rotational,
    }


def _protocol(fields: dict[str, str], attributes: list[Attribute]) -> str:
    if "model number" in fields or "critical warning" in fields:
        return "NVMe"
    if attributes or "device model" in fields:
        return "ATA"
    return "SCSI" if "product" in fields or "transport protocol" in fields else ""


def _attributes(lines: list[str]) -> list[Attribute]:
    found = []
    for line in lines:
        if match := _ATTRIBUTE.match(line):
            id_, name, _, value, _, _, kind, _, failed, raw = match.groups()
            prefail = kind == "Pre-fail"
        elif match := _BRIEF_ATTRIBUTE.match(line):
            id_, name, flags, value, _, _, failed, raw = match.groups()
            prefail = flags.startswith("P")
        else:
            continue
        found.append(
            Attribute(
                id=int(id_),
                name=name,
                value=float(value),
                raw=_raw(int(id_), raw),
                raw_text=raw.strip(),
                prefail=prefail,
                when_failed=failed,
            )
        )
    return found


def _raw(id_: int, text: str) -> int | None:
    """The figure itself; of `0 0 22` (three counters of 16 bits, the total last) the last one."""
    packed = re.match(r"^\s*(\d{1,5}) (\d{1,5}) (\d{1,5})\s*$", text)
    if id_ == 188 and packed:
        return int(packed.group(3))
    if found := re.match(r"^\s*0x([0-9a-fA-F]{1,16})", text):
        return int(found.group(1), 16)
    found = re.match(r"^\s*(\d{1,19})", text)
    return int(found.group(1)) if found else None


_COUNTS = {
    "power cycles": "disk_power_cycles",
    "power on hours": "disk_power_on_hours",
    "unsafe shutdowns": "disk_nvme_unsafe_shutdowns_total",
    "media and data integrity errors": "disk_nvme_media_errors_total",
    "elements in grown defect list": "disk_grown_defects",
}
_PERCENTAGES = {
    "available spare": "disk_nvme_available_spare_ratio",
    "percentage used": "disk_nvme_percentage_used_ratio",
    "percentage used endurance indicator": "disk_endurance_used_ratio",
}


def _field_values(fields: dict[str, str]) -> dict[str, float]:
    values: dict[str, float] = {}
    for name, metric in _COUNTS.items():
        count = grouped_number(fields.get(name, ""))
        if count is not None:
            values[metric] = count
    for name, metric in _PERCENTAGES.items():
        percent = grouped_number(fields.get(name, ""))
        if percent is not None and percent <= 255:
            values[metric] = percent / 100
    if "disk_grown_defects" in values:
        values["disk_reallocated_sectors"] = values["disk_grown_defects"]
    warning = re.match(r"0x([0-9a-fA-F]{1,2})\b", fields.get("critical warning", ""))
    if warning:
        values["disk_nvme_critical_warning"] = float(int(warning.group(1), 16))
    for name in ("temperature", "current drive temperature", "current temperature"):
        degrees = re.match(r"(-?\d{1,4})\b", fields.get(name, ""))
        celsius = temperature(int(degrees.group(1))) if degrees else None
        if celsius is not None:
            values["disk_temperature_celsius"] = celsius
            break
    on_time = fields.get("accumulated power on time, hours", "")
    if found := re.match(r"minutes (\d{1,9}):", on_time):
        values["disk_power_on_hours"] = float(found.group(1))
    return values


def _uncorrected(lines: list[str]) -> tuple[float | None, float | None]:
    """(all uncorrected errors, those of writes) of the SAS error counter log: the last column."""
    counts: dict[str, float] = {}
    for line in lines:
        if match := _COUNTER_ROW.match(line):
            words = match.group(2).split()
            if len(words) >= 7 and (count := grouped_number(words[-1])) is not None:
                counts[match.group(1)] = count
    return (sum(counts.values()), counts.get("write")) if counts else (None, None)


def _error_log_entries(text: str) -> float | None:
    if found := re.search(r"ATA Error Count: (\d{1,9})", text):
        return float(found.group(1))
    return 0.0 if "No Errors Logged" in text else None


def message(text: str) -> str:
    """What smartctl says once its own banner is taken away."""
    return _message(text.splitlines()[:MAX_LINES])


def _message(lines: list[str]) -> str:
    banner = ("smartctl ", "Copyright (C)", "===")
    said = [line.strip() for line in lines[:60] if line.strip() and not line.startswith(banner)]
    # `=======> UNRECOGNIZED OPTION` begins like a heading but is the message itself.
    said += [line.strip() for line in lines[:60] if line.startswith("====") and ">" in line]
    return "\n".join(said)[:2000]
