"""A second opinion on plain output that our own reader does not know: pySMART parses it, in a process of its own.

pySMART knows many releases' wording, but it has no timeout, raises on odd numbers and needs memory that the agent
does not have to spare. So it runs as `python -m forewarn.collectors.smart_pysmart NAME INTERFACE`, is given smartctl's
text on standard input and answers with JSON; it starts no smartctl and is stopped like any other program.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

from forewarn.collectors.smart_reading import (
    Attribute,
    DiskReading,
    attribute_values,
    attributes_below_threshold,
    grouped_number,
    number,
    temperature,
)

MODULE = "forewarn.collectors.smart_pysmart"

_NVME = {
    "criticalWarning": ("disk_nvme_critical_warning", 1),
    "percentageUsed": ("disk_nvme_percentage_used_ratio", 100),
    "availableSpare": ("disk_nvme_available_spare_ratio", 100),
    "integrityErrors": ("disk_nvme_media_errors_total", 1),
    "unsafeShutdowns": ("disk_nvme_unsafe_shutdowns_total", 1),
    "powerCycles": ("disk_power_cycles", 1),
    "powerOnHours": ("disk_power_on_hours", 1),
}


def command(name: str, interface: str) -> list[str]:
    """The command line of the child process."""
    return [sys.executable, "-m", MODULE, name, interface]


def interface_of(type_: str, text: str) -> str:
    """pySMART's word for the kind of disk; it refuses types that it does not know."""
    if "nvme" in type_ or type_.startswith("snt") or "NVMe" in text:
        return "nvme"
    return "ata" if "ATTRIBUTE_NAME" in text or "Device Model" in text else "scsi"


def reading_of(answer: bytes) -> DiskReading | None:
    """The reading in the child's answer, or None where pySMART too found nothing."""
    try:
        found = json.loads(answer)
    except ValueError:
        return None
    if not isinstance(found, dict):
        return None
    attributes = [
        Attribute(
            id=row["id"],
            name=row["name"],
            value=number(row["value"]),
            raw=row["raw"],
            raw_text=row["raw_text"],
            prefail=row["prefail"],
            when_failed=row["when_failed"],
        )
        for row in found["attributes"]
    ]
    values = attribute_values(attributes)
    for name, (metric, divisor) in _NVME.items():
        value = number(found["nvme"].get(name))
        if value is not None:
            values[metric] = value / divisor
    celsius = temperature(found["temperature"])
    if celsius is not None:
        values["disk_temperature_celsius"] = celsius
    passed = {"PASS": True, "WARN": True, "FAIL": False}.get(found["assessment"] or "")
    if passed is None and not values:
        return None
    if passed is not None:
        values["disk_smart_passed"] = float(passed)
    return DiskReading(
        "read",
        protocol={"nvme": "NVMe", "ata": "ATA", "scsi": "SCSI"}.get(found["interface"], ""),
        model=found["model"],
        serial=found["serial"],
        firmware=found["firmware"],
        passed=passed,
        values=values,
        below_threshold=attributes_below_threshold(attributes),
        notes=("read by pySMART",),
    )


def parse(text: str, name: str, interface: str) -> dict[str, Any]:
    """What pySMART makes of smartctl's text. Only for the child process: it imports pySMART."""
    from pySMART import Device
    from pySMART.smartctl import Smartctl

    lines = text.splitlines()

    class Replay(Smartctl):  # type: ignore[misc]  # pySMART has no types
        """Gives pySMART the text that we have instead of starting smartctl."""

        def generic_call(self, params: list[str], pass_options: bool = False) -> tuple[list[str], int]:
            # Other queries fail; pySMART looks into their first lines all the same.
            return (lines, 0) if "--all" in params or "--info" in params else ([""] * 8, 1)

    device = Device(name, interface=interface, smartctl=Replay())
    return {
        "interface": interface,
        "model": device.model or "",
        "serial": device.serial or "",
        "firmware": device.firmware or "",
        "assessment": device.assessment,
        "temperature": device.temperature,
        "nvme": _nvme(device),
        "attributes": [_attribute(a) for a in device.attributes if a is not None],
    }


def _nvme(device: Any) -> dict[str, Any]:
    log = device.if_attributes
    return {name: getattr(log, name, None) for name in _NVME}


def _attribute(attribute: Any) -> dict[str, Any]:
    raw = grouped_number(str(attribute.raw))
    return {
        "id": int(attribute.num),
        "name": str(attribute.name),
        "value": float(attribute.value_int) if attribute.value_int is not None else None,
        "raw": None if raw is None else int(raw),
        "raw_text": str(attribute.raw),
        "prefail": attribute.type == "Pre-fail",
        "when_failed": str(attribute.when_failed),
    }


def main(arguments: list[str], read: Callable[[], bytes], write: Callable[[str], object]) -> int:
    """The child process: text in, JSON out."""
    name, interface = arguments
    write(json.dumps(parse(read().decode("utf-8", errors="replace"), name, interface)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], sys.stdin.buffer.read, sys.stdout.write))
