"""What every collector is and returns. A collector reads one source once; the runner times it and decides when.

A collector names devices locally (`gpu3`, `nvme0`, `mlx5_0`; the empty string is the node itself). Whoever
runs it puts the node in front: `NODE/gpu3`, or `NODE` alone.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import msgspec

SEVERITIES = ("info", "warning", "error", "critical")
"""Event severities, mildest first."""


class Sample(msgspec.Struct, frozen=True, omit_defaults=False):
    """One number read now. `metric` is a catalog name, `value` in the catalog's unit, never NaN."""

    device: str
    metric: str
    value: float
    labels: dict[str, str] = {}


class Event(msgspec.Struct, frozen=True, omit_defaults=False):
    """Something that happened.

    `time` is seconds since the epoch (UTC), None when the source gives none: the runner then stamps it.
    `kind` is a catalog event kind (`xid`, `sxid`, `aer`, ...); `code` is text (`79`, `corrected`).
    `severity` is one of SEVERITIES; `action` is the recommended action (`RESET_GPU`, ...) or empty.
    `pci` is `dddd:bb:dd` (`dddd:bb:dd.f` where the source gives a function) or None. `count` is above 1
    when repeats were coalesced.
    """

    device: str
    kind: str
    code: str
    severity: str
    message: str
    time: float | None = None
    action: str = ""
    pci: str | None = None
    count: int = 1
    labels: dict[str, str] = {}


class Device(msgspec.Struct, frozen=True, omit_defaults=False):
    """What is known of a device besides its numbers.

    `kind` is `gpu`, `disk`, `nic` or `node`. `serial` is its stable identity (GPU UUID, disk serial).
    `simulated` is true when a simulator answers in the hardware's place.
    """

    device: str
    kind: str
    model: str = ""
    serial: str = ""
    pci: str | None = None
    simulated: bool = False
    labels: dict[str, str] = {}


class CollectionError(msgspec.Struct, frozen=True, omit_defaults=False):
    """A part of a reading that could not be had: what, why, and the way out."""

    source: str
    message: str
    device: str = ""
    remedy: str = ""


class Reading(msgspec.Struct, omit_defaults=False):
    """All that one pass over one source gave. Lists may be empty: no data is not an error."""

    samples: list[Sample] = []
    events: list[Event] = []
    devices: list[Device] = []
    errors: list[CollectionError] = []


@runtime_checkable
class Collector(Protocol):
    """One source. `collect` is called every `interval_s` and must end within `deadline_s`.

    It raises UnavailableError when the whole source cannot be read here; trouble with one device is
    a CollectionError in the reading. It prints nothing, keeps only what it needs between calls, and
    gives up its resources in `close`.
    """

    name: str
    interval_s: float
    deadline_s: float

    def collect(self) -> Reading: ...

    def close(self) -> None: ...
