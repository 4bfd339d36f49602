"""Reads one JSON document of smartctl. Pure: text in, reading out, whatever the text may be."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from typing import Any

from forewarn.collectors.errors import InputError
from forewarn.collectors.smart_failure import failure_of, is_asleep
from forewarn.collectors.smart_reading import (
    EXIT_NO_DATA,
    EXIT_OPEN_FAILED,
    Attribute,
    DiskReading,
    attribute_values,
    attributes_below_threshold,
    number,
    temperature,
)

MAX_STARTS = 32
"""How many opening braces are tried: text may stand before the document, and hold braces itself."""

FIRST_VERSION_WITH_PLAIN_DEFECTS = (7, 3)
"""Older releases were seen to count grown defects eight times in JSON. Which release mended it is not known."""

Document = Mapping[str, Any]


def decode(data: bytes) -> str:
    """Text of any encoding that smartctl's output was seen in; never fails."""
    if data[:2] in (b"\xff\xfe", b"\xfe\xff"):
        return data.decode("utf-16", errors="replace")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError:
        return data.decode("latin-1")


def find_document(text: str) -> Document | None:
    """The first JSON object in a text, or None where there is none.

    Raises InputError when an object begins and cannot be read to its end.
    """
    decoder = json.JSONDecoder(parse_constant=lambda _: None)
    start, failure = text.find("{"), ""
    for _ in range(MAX_STARTS):
        if start < 0:
            break
        try:
            found, _end = decoder.raw_decode(text, start)
        except RecursionError:
            raise InputError("smartctl's JSON is nested too deeply to be one of its documents") from None
        except ValueError as error:  # also numbers with thousands of digits
            failure = failure or str(error)[:120]
        else:
            if found:
                return dict(found)
        start = text.find("{", start + 1)
    if failure and text.lstrip()[:1] == "{":
        raise InputError(f"smartctl's JSON is damaged or cut short: {failure}")
    return None


def scan_entries(document: Document) -> list[tuple[str, str]] | None:
    """(name, type) of each disk in a scan's answer; None when the document is no scan. `devices` may lack."""
    devices = document.get("devices")
    if isinstance(devices, list):
        entries = []
        for entry in devices:
            name, type_ = _text(entry, "name"), _text(entry, "type")
            if name:
                entries.append((name, type_))
        return entries
    answered = "device" in document or number(_get(document, "smartctl", "exit_status"))
    return [] if is_scan_command(document) and not answered else None


def is_scan_command(document: Document) -> bool:
    """Whether the command line that the document repeats is a scan."""
    argv = _get(document, "smartctl", "argv")
    return isinstance(argv, list) and any(isinstance(a, str) and a.startswith("--scan") for a in argv)


def read(document: Document, exit_status: int = 0) -> DiskReading:
    """The right reading of a document: what the disk said, and nothing that it did not say. Never fails.

    `exit_status` is the program's own, for documents that do not repeat it.
    """
    if scan_entries(document) is not None:
        return DiskReading("scan", message="the answer is a list of disks")
    messages = _messages(document)
    told_status = number(_get(document, "smartctl", "exit_status"))
    exit_status = (exit_status if told_status is None else int(told_status)) & 0xFF
    attributes = _attributes(document)
    values = _values(document, attributes)
    passed = _get(document, "smart_status", "passed")
    passed = passed if isinstance(passed, bool) else None
    who = _identity(document)
    told = passed is not None or bool(values)
    if passed is not None:
        values["disk_smart_passed"] = float(passed)
    power_mode = _text(_get(document, "power_mode"), "name")
    if not told and (
        is_asleep(messages) or (exit_status & EXIT_OPEN_FAILED and is_asleep(f"in {power_mode} mode"))
    ):
        return DiskReading("asleep", exit_status=exit_status, message=messages, **who)
    if not told and exit_status & EXIT_NO_DATA:
        failure = failure_of(messages, exit_status)
        assert failure is not None  # the exit status alone is reason enough
        return DiskReading(
            "unavailable",
            exit_status=exit_status,
            why=failure.why,
            hint=failure.hint,
            message=failure.message,
            **who,
        )
    notes = _notes(document, values)
    state = "read" if told else "identity_only" if who["model"] or who["serial"] else "empty"
    spare = number(_get(document, "nvme_smart_health_information_log", "available_spare_threshold"))
    return DiskReading(
        state,  # type: ignore[arg-type]  # a literal, chosen above
        passed=passed,
        exit_status=exit_status,
        message=messages,
        values=values,
        below_threshold=attributes_below_threshold(attributes),
        error_log_entries=_error_log_entries(document),
        uncorrected_writes=number(
            _get(document, "scsi_error_counter_log", "write", "total_uncorrected_errors")
        ),
        spare_threshold_ratio=None if spare is None else spare / 100,
        notes=notes,
        **who,
    )


def replayed_name(document: Document) -> tuple[str, str]:
    """(name, type) of the disk that a document is about, from its device or from the command line it repeats."""
    name, type_ = _text(_get(document, "device"), "name"), _text(_get(document, "device"), "type")
    if name:
        return name, type_
    argv = _get(document, "smartctl", "argv")
    words = [a for a in argv if isinstance(a, str)] if isinstance(argv, list) else []
    for flag, word in itertools.pairwise(words):
        if flag in ("-d", "--device"):
            type_ = word
    return next((w for w in words[1:] if w.startswith("/dev/")), ""), type_


def _get(value: Any, *keys: str) -> Any:
    for key in keys:
        if not isinstance(value, Mapping):
            return None
        value = value.get(key)
    return value


def _text(value: Any, key: str) -> str:
    found = _get(value, key)
    return found.strip()[:200] if isinstance(found, str) else ""


def _messages(document: Document) -> str:
    messages = _get(document, "smartctl", "messages")
    if not isinstance(messages, list):
        return ""
    return "\n".join(text for text in (_text(m, "string") for m in messages[:20]) if text)


def _identity(document: Document) -> dict[str, Any]:
    device = _get(document, "device")
    model = _text(document, "model_name") or _text(document, "scsi_model_name")
    if not model:
        vendor = _text(document, "scsi_vendor") or _text(document, "vendor")
        product = _text(document, "scsi_product") or _text(document, "product")
        model = f"{vendor} {product}".strip()
    protocol = _text(device, "protocol")
    rate = number(document.get("rotation_rate"))
    rotational = None if rate is None else rate > 0
    if protocol == "NVMe" or _get(document, "trim", "supported") is True:
        rotational = False
    capacity = number(_get(document, "user_capacity", "bytes")) or number(document.get("nvme_total_capacity"))
    return {
        "name": _text(device, "name"),
        "type": _text(device, "type"),
        "protocol": protocol,
        "model": model,
        "serial": _text(document, "serial_number"),
        "firmware": _text(document, "firmware_version")
        or _text(document, "scsi_revision")
        or _text(document, "revision"),
        "capacity_bytes": capacity or None,
        "rotational": rotational,
    }


def _attributes(document: Document) -> list[Attribute]:
    table = _get(document, "ata_smart_attributes", "table")
    found = []
    for row in table[:512] if isinstance(table, list) else []:
        id_, raw = number(_get(row, "id")), number(_get(row, "raw", "value"))
        if id_ is None or id_ > 255:
            continue
        prefail = _get(row, "flags", "prefailure") is True
        found.append(
            Attribute(
                id=int(id_),
                name=_text(row, "name"),
                value=_normalized(_get(row, "value")),
                raw=int(_get(row, "raw", "value")) if raw is not None and raw < 2**64 else None,
                raw_text=_text(_get(row, "raw"), "string"),
                prefail=prefail,
                when_failed=_text(row, "when_failed"),
            )
        )
    return found


def _normalized(value: Any) -> float | None:
    found = number(value)
    return found if found is not None and found <= 255 else None


def _values(document: Document, attributes: list[Attribute]) -> dict[str, float]:
    values = attribute_values(attributes)
    nvme = _get(document, "nvme_smart_health_information_log")
    _put(values, "disk_temperature_celsius", _temperature(document, values.get("disk_temperature_celsius")))
    hours = number(_get(document, "power_on_time", "hours"))
    _put(values, "disk_power_on_hours", hours if hours is not None else number(_get(nvme, "power_on_hours")))
    if values.get("disk_power_on_hours") == 0 and _self_test_hours(document) > 0:
        del values["disk_power_on_hours"]  # a self-test once ran at a later hour: the counter is not one
    cycles = number(document.get("power_cycle_count"))
    _put(values, "disk_power_cycles", cycles if cycles is not None else number(_get(nvme, "power_cycles")))
    defects = number(document.get("scsi_grown_defect_list"))
    _put(values, "disk_grown_defects", defects)
    _put(values, "disk_reallocated_sectors", defects)
    _put(values, "disk_pending_sectors", number(_get(document, "scsi_pending_defects", "count")))
    _put(values, "disk_uncorrected_errors_total", _scsi_uncorrected(document))
    used = number(_get(document, "endurance_used", "current_percent"))
    if used is None:
        used = number(document.get("scsi_percentage_used_endurance_indicator"))
    _put(values, "disk_endurance_used_ratio", None if used is None or used > 255 else used / 100)
    values |= _nvme_values(nvme)
    return values


def _nvme_values(log: Any) -> dict[str, float]:
    values: dict[str, float] = {}
    warning = number(_get(log, "critical_warning"))
    _put(values, "disk_nvme_critical_warning", warning if warning is not None and warning <= 255 else None)
    used, spare = number(_get(log, "percentage_used")), number(_get(log, "available_spare"))
    _put(values, "disk_nvme_percentage_used_ratio", None if used is None or used > 255 else used / 100)
    _put(values, "disk_nvme_available_spare_ratio", None if spare is None or spare > 100 else spare / 100)
    _put(values, "disk_nvme_media_errors_total", number(_get(log, "media_errors")))
    _put(values, "disk_nvme_unsafe_shutdowns_total", number(_get(log, "unsafe_shutdowns")))
    return values


def _temperature(document: Document, from_attributes: float | None) -> float | None:
    """smartctl's own figure first; where that cannot be one, the attributes, SCT, the NVMe log, the enclosure page."""
    found = temperature(_get(document, "temperature", "current"))
    if found is None:
        found = from_attributes
    if found is None:
        found = temperature(_get(document, "ata_sct_status", "temperature", "current"))
    if found is None:
        found = temperature(_get(document, "nvme_smart_health_information_log", "temperature"))
    if found is None:
        reports = _get(document, "scsi_environmental_reports")
        for key in sorted(map(str, reports)) if isinstance(reports, Mapping) else []:
            if key.startswith("temperature") and (celsius := temperature(_get(reports, key, "current"))):
                return celsius
    return found


def _scsi_uncorrected(document: Document) -> float | None:
    log = _get(document, "scsi_error_counter_log")
    counts = [number(_get(log, way, "total_uncorrected_errors")) for way in ("read", "write", "verify")]
    known = [c for c in counts if c is not None]
    return sum(known) if known else None


def _self_test_hours(document: Document) -> float:
    """The latest hour at which a self-test is said to have run; 0 when none."""
    rows = [document.get(f"scsi_self_test_{i}") for i in range(20)]
    for page in ("standard", "extended"):
        table = _get(document, "ata_smart_self_test_log", page, "table")
        rows += table[:32] if isinstance(table, list) else []
    named = (("power_on_time", "hours"), ("lifetime_hours",))
    return max((number(_get(row, *keys)) or 0.0 for row in rows for keys in named), default=0.0)


def _error_log_entries(document: Document) -> float | None:
    for page in ("extended", "summary"):
        count = number(_get(document, "ata_smart_error_log", page, "count"))
        if count is not None:
            return count
    return None


def _notes(document: Document, values: Mapping[str, float]) -> tuple[str, ...]:
    defects = values.get("disk_grown_defects", 0)
    version = _get(document, "smartctl", "version")
    numbers = tuple(v for v in version if isinstance(v, int)) if isinstance(version, list) else ()
    if defects and defects % 8 == 0 and numbers < FIRST_VERSION_WITH_PLAIN_DEFECTS:
        return (f"this smartctl may count grown defects eight times over: {defects / 8:.0f} is possible",)
    return ()


def _put(values: dict[str, float], metric: str, value: float | None) -> None:
    if value is not None:
        values[metric] = value
