"""Which device an event is about, and whether two sources tell of the same thing. Pure bookkeeping, no I/O.

The kernel names a GPU by its PCI address, NVML by its index; the readings of NVML join the two.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable

import msgspec

from forewarn.collectors.base import Device, Event

TWIN_WINDOW_S = 5.0
"""An XID from NVML and one from the kernel log, this close in time, are one."""
TWINS_REMEMBERED = 512

_PCI = re.compile(r"(?:([0-9a-f]{4,8}):)?([0-9a-f]{2}):([0-9a-f]{2})(?:\.[0-7])?", re.IGNORECASE)


def pci_key(pci: str | None) -> str:
    """`dddd:bb:dd` in lower case from any spelling (`00000000:3B:00.0`); empty when it is no PCI address."""
    found = _PCI.fullmatch(pci.strip()) if pci else None
    if found is None:
        return ""
    domain, bus, slot = found.groups()
    return f"{(domain or '0000')[-4:]}:{bus}:{slot}".lower()


class PciMap:
    """PCI address to local device id, for devices of every source that knows its address."""

    def __init__(self) -> None:
        self._device_of: dict[str, str] = {}

    def learn(self, devices: Iterable[Device]) -> None:
        """Remember the addresses of `devices`; the newest word counts."""
        for device in devices:
            if device.device and (key := pci_key(device.pci)):
                self._device_of[key] = device.device

    def resolve(self, event: Event) -> Event:
        """`event` with its device filled in from its PCI address, where that is known."""
        if event.device or not (key := pci_key(event.pci)):
            return event
        device = self._device_of.get(key)
        return event if device is None else msgspec.structs.replace(event, device=device)


class _Told(msgspec.Struct):
    key: tuple[str, str]
    time: float
    source: str
    paired: bool = False


class Twins:
    """Finds the second telling of one XID. Each telling pairs with at most one of another source, so that two
    XIDs seen by both sources stay two."""

    def __init__(self) -> None:
        self._told: deque[_Told] = deque(maxlen=TWINS_REMEMBERED)

    def is_repeat(self, event: Event, source: str) -> bool:
        """True when another source told of `event` before. `event.time` must be set."""
        if event.kind != "xid" or event.time is None:
            return False
        key = (pci_key(event.pci) or event.device, event.code)
        for told in self._told:
            if (
                told.key == key
                and told.source != source
                and not told.paired
                and abs(told.time - event.time) <= TWIN_WINDOW_S
            ):
                told.paired = True
                return True
        self._told.append(_Told(key, event.time, source))
        return False
