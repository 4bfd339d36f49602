"""Which disks there are: the answers of a scan, the setting's list, and the id each disk goes by."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from forewarn.collectors.errors import ConfigError

_RAID_TYPE = re.compile(r"(?:\w+\+)?((?:megaraid|cciss|areca|3ware|aacraid|sssraid|jmb39x\w*|hpt),.+)$")
_TYPE_SUFFIX = re.compile(r"^(.*):((?:3ware|[A-Za-z][\w+-]*)(?:,[\w/,]+)?)$")
"""A type after the name. `/dev/disk/by-path/pci-0000:00:1f.2-ata-1` has none."""
_UNSAFE = re.compile(r"[^A-Za-z0-9_.]+")

AUTOMATIC_TYPES = frozenset({"", "auto", "scsi", "ata"})
"""Types that a scan guesses without opening the disk: better left for smartctl to find out."""


@dataclass(frozen=True)
class DiskAddress:
    """How smartctl is told of a disk: `/dev/bus/0` with type `megaraid,5`. An empty type lets it find out.

    `id` is the local id: `sda`, `nvme0`, `bus0-megaraid-5`; only letters, digits, `_`, `.` and `-`.
    """

    id: str
    name: str
    type: str = ""

    @property
    def is_nvme(self) -> bool:
        return self.type.startswith(("nvme", "snt")) or "nvme" in self.name.rsplit("/", 1)[-1]


def local_id(name: str, type_: str) -> str:
    """`/dev/nvme0n1` is `nvme0`, as the kernel's messages call it; a disk behind a RAID controller has its number."""
    base = name.removeprefix("/dev/")
    if base.startswith("bus/"):
        base = base.replace("/", "")
    base = _UNSAFE.sub("-", base.rsplit("/", 1)[-1]).strip("-.") or "disk"
    base = re.sub(r"^(nvme\d+)n\d+$", r"\1", base)
    raid = _RAID_TYPE.match(type_)
    return f"{base}-{_UNSAFE.sub('-', raid.group(1)).strip('-')}"[:120] if raid else base[:120]


def addresses(entries: Iterable[tuple[str, str]], types: Mapping[str, str]) -> list[DiskAddress]:
    """Addresses with ids of their own for (name, type) entries. `types` overrides by name or by id."""
    found: list[DiskAddress] = []
    taken: set[str] = set()
    seen: set[tuple[str, str]] = set()
    for name, guessed in entries:
        id_ = local_id(name, guessed)
        chosen = types.get(name) or types.get(id_)
        type_ = chosen or ("" if guessed in AUTOMATIC_TYPES else guessed)
        if chosen:
            id_ = local_id(name, chosen)
        if (name, type_) in seen:
            continue
        seen.add((name, type_))
        unique, number = id_, 2
        while unique in taken:
            unique, number = f"{id_}-{number}", number + 1
        taken.add(unique)
        found.append(DiskAddress(unique, name, type_))
    return found


def configured(devices: Iterable[str], types: Mapping[str, str]) -> list[DiskAddress]:
    """The addresses of the setting `devices`: `/dev/sda` or `/dev/bus/0:megaraid,5`.

    Raises ConfigError for an entry without a name.
    """
    joined: list[str] = []
    for entry in devices:
        # On a command line the list is cut at commas, and so is the type: `megaraid,5`.
        if joined and ":" in joined[-1] and re.fullmatch(r"\d+(?:/\d+)?", entry):
            joined[-1] += f",{entry}"
        else:
            joined.append(entry.strip())
    entries = []
    for entry in joined:
        suffix = _TYPE_SUFFIX.match(entry)
        name, type_ = suffix.groups() if suffix else (entry, "")
        if not name or name.startswith("-") or type_.startswith("-"):
            raise ConfigError(
                f"smart: devices: {entry!r} is no disk; write /dev/sda or /dev/bus/0:megaraid,5"
            )
        entries.append((name, type_))
    # A type written beside the disk is meant, also one that a scan would only guess.
    meant = {name: type_ for name, type_ in entries if type_ and sum(n == name for n, _ in entries) == 1}
    return addresses(entries, {**meant, **types})
