"""A node's readings in a file, and played back: how a fault travels from a user's node to whoever looks into it.

JSON lines (gzip when the name ends in .gz), so that anyone can look at what they hand out. Serial numbers, GPU UUIDs,
addresses and the node's name are replaced before anything is written.
"""

from __future__ import annotations

import gzip
import logging
import re
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import IO, Any, cast

import msgspec

from forewarn import __version__
from forewarn.collectors.base import Device, Event, Reading
from forewarn.collectors.clock import Clock
from forewarn.collectors.errors import InputError, StorageError
from forewarn.daemon.agent.logs import log
from forewarn.daemon.agent.scheduler import Kind, Outcome, Slot

FORMAT = 1
SHORTEST_SERIAL = 5
"""Shorter texts are not taken for serial numbers when they occur within other text."""

_PATTERNS = (
    ("uuid", re.compile(r"(?:GPU|MIG)-[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}", re.IGNORECASE)),
    ("mac", re.compile(r"(?<![0-9a-f:])(?:[0-9a-f]{2}:){5}[0-9a-f]{2}(?![0-9a-f:])", re.IGNORECASE)),
    ("ipv4", re.compile(r"(?<![\d.])(?:\d{1,3}\.){3}\d{1,3}(?![\d.])")),
    ("wwn", re.compile(r"\b(?:0x|naa\.|eui\.)[0-9a-f]{16}\b", re.IGNORECASE)),
    ("guid", re.compile(r"\b(?:[0-9a-f]{4}:){3}[0-9a-f]{4}\b", re.IGNORECASE)),
)


class Header(msgspec.Struct, frozen=True):
    """The first line of a recording. `start` is the wall clock of offset 0; `scrubbed` says that names are replaced."""

    forewarn_recording: int
    version: str
    node: str
    start: float
    scrubbed: bool


class Entry(msgspec.Struct, frozen=True):
    """One poll: `offset_s` after the start."""

    offset_s: float
    collector: str
    kind: Kind
    duration_s: float
    reading: Reading
    late: bool = False
    error: str = ""


class Scrubber:
    """Replaces what tells one machine from another by stand-ins, the same for the same text throughout."""

    def __init__(self, names: Iterable[str] = ()) -> None:
        self._known: dict[str, str] = {name: "node" for name in names if name}
        self._counts: dict[str, int] = {}
        self._finder: re.Pattern[str] | None = None

    def learn(self, devices: Iterable[Device]) -> None:
        """Remember the serial numbers of `devices`, to find them in any text."""
        for device in devices:
            if device.serial and device.serial not in self._known:
                kind = "uuid" if _PATTERNS[0][1].fullmatch(device.serial) else "serial"
                self._stand_in(kind, device.serial)

    def text(self, text: str) -> str:
        """`text` with every known or recognisable identity replaced."""
        if text in self._known:
            return self._known[text]
        if self._finder is None:
            long = [k for k in self._known if len(k) >= SHORTEST_SERIAL or self._known[k] == "node"]
            words = "|".join(re.escape(k) for k in sorted(long, key=len, reverse=True))
            self._finder = re.compile(rf"(?<!\w)(?:{words})(?!\w)" if words else r"(?!)")
        text = self._finder.sub(lambda found: self._known[found.group()], text)
        for kind, pattern in _PATTERNS:
            text = pattern.sub(lambda found, kind=kind: self._stand_in(kind, found.group()), text)  # type: ignore[misc]
        return text

    @staticmethod
    def _is_common(kind: str, text: str) -> bool:
        """Addresses that every machine has tell nothing."""
        return kind == "ipv4" and text.startswith(("127.", "0."))

    def value(self, value: Any) -> Any:
        """Any plain data, with all text in it replaced."""
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, dict):
            return {key: self.value(inner) for key, inner in value.items()}
        if isinstance(value, list):
            return [self.value(inner) for inner in value]
        return value

    def _stand_in(self, kind: str, text: str) -> str:
        if text in self._known:
            return self._known[text]
        if text in self._known.values() or self._is_common(kind, text):
            return text
        number = self._counts[kind] = self._counts.get(kind, 0) + 1
        self._known[text] = {
            "uuid": f"{text[:3].upper()}-00000000-0000-0000-0000-{number:012d}",
            "mac": f"02:00:00:00:{number >> 8 & 255:02x}:{number & 255:02x}",
            "ipv4": f"192.0.2.{number & 255}",
        }.get(kind, f"{kind}-{number:06d}")
        self._finder = None
        return self._known[text]


class Recorder:
    """Writes outcomes as they come. Call `settle` once every source has answered: until then entries are held
    back, so that a serial number that becomes known a moment later is found in what came before."""

    def __init__(
        self, path: Path, node: str, clock: Clock, *, scrub: bool = True, names: Iterable[str] = ()
    ) -> None:
        self._clock, self._path = clock, path
        self._scrubber = Scrubber([node, *names]) if scrub else None
        self._held: list[Entry] | None = []
        self._begun = clock.monotonic()
        self.entries = 0
        try:
            plain = path.open("wb")
            self._file = cast(
                IO[bytes], gzip.GzipFile(fileobj=plain, mode="wb") if path.suffix == ".gz" else plain
            )
            self._plain = plain
        except OSError as error:
            raise StorageError(f"{path}: cannot be written: {error.strerror}") from error
        shown = "node" if scrub else node
        self._write(Header(FORMAT, __version__, shown, clock.now(), scrub))

    def add(self, outcome: Outcome) -> None:
        """Keep one outcome. Raises StorageError when the file cannot be written."""
        if self._scrubber is not None:
            self._scrubber.learn(outcome.reading.devices)
        entry = Entry(
            round(self._clock.monotonic() - self._begun, 3),
            outcome.name,
            outcome.kind,
            round(outcome.duration_s, 6),
            outcome.reading,
            outcome.late,
            outcome.error,
        )
        self.entries += 1
        if self._held is not None:
            self._held.append(entry)
        else:
            self._write(entry)

    def settle(self) -> None:
        """Write what was held back."""
        held, self._held = self._held or [], None
        for entry in held:
            self._write(entry)

    def close(self) -> None:
        self.settle()
        try:
            self._file.close()
            self._plain.close()
        except OSError as error:
            raise StorageError(f"{self._path}: cannot be written: {error.strerror}") from error

    def _write(self, record: Header | Entry) -> None:
        plain = msgspec.to_builtins(record)
        if self._scrubber is not None and isinstance(record, Entry):
            plain["reading"] = self._scrubber.value(plain["reading"])
            plain["error"] = self._scrubber.text(record.error)
        try:
            self._file.write(msgspec.json.encode(plain) + b"\n")
        except OSError as error:
            raise StorageError(f"{self._path}: cannot be written: {error.strerror}") from error


def read(path: Path) -> tuple[Header, list[Entry]]:
    """The header and the entries of a recording. Raises InputError naming file and line."""
    number = 0
    header: Header | None = None
    entries: list[Entry] = []
    try:
        with path.open("rb") as raw:
            zipped = raw.peek(2)[:2] == b"\x1f\x8b"
            for line in gzip.GzipFile(fileobj=raw) if zipped else raw:
                number += 1
                if header is None:
                    header = msgspec.json.decode(line, type=Header)
                    _check_format(header, path)
                else:
                    entries.append(msgspec.json.decode(line, type=Entry))
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InputError(f"{path}:{number}: not a recording of `forewarn record`: {error}") from error
    except (OSError, EOFError, zlib.error) as error:
        raise InputError(f"{path}:{number + 1}: cannot be read: {error}") from error
    if header is None:
        raise InputError(f"{path}:1: the file is empty: make it with `forewarn record`")
    return header, entries


def _check_format(header: Header, path: Path) -> None:
    if header.forewarn_recording > FORMAT:
        raise InputError(
            f"{path}:1: format {header.forewarn_recording} is newer than this Forewarn reads ({FORMAT}): upgrade"
        )


class Replay:
    """Plays a recording in the place of a scheduler: the same outcomes, at the same distances, as if now.

    Every device is marked as simulated: what is shown is not this node. `speed` 10 plays ten times as fast.
    """

    def __init__(self, path: Path, clock: Clock, *, speed: float = 1.0) -> None:
        self._header, self._entries = read(path)
        self._clock, self._speed, self._name = clock, speed, path.name
        self._begun = clock.monotonic()
        self._start = clock.now()
        self._next = 0
        names = dict.fromkeys(e.collector for e in self._entries)
        self.slots = [Slot(_Played(name), 0.0, 0.0) for name in names]

    @property
    def done(self) -> bool:
        return self._next >= len(self._entries)

    @property
    def settled(self) -> bool:
        return self.done or all(slot.up is not None for slot in self.slots)

    def step(self) -> list[Outcome]:
        """What the recording has up to now."""
        elapsed_s = (self._clock.monotonic() - self._begun) * self._speed
        outcomes: list[Outcome] = []
        while self._next < len(self._entries) and self._entries[self._next].offset_s <= elapsed_s:
            outcomes.append(self._outcome(self._entries[self._next]))
            self._next += 1
            if self._next == len(self._entries):
                log(logging.INFO, "replay_done", recording=self._name, entries=len(self._entries))
        return outcomes

    def wait_s(self) -> float:
        """Seconds until the next entry; a while when there is none."""
        if self.done:
            return 3600.0
        elapsed_s = self._clock.monotonic() - self._begun
        return max(0.0, self._entries[self._next].offset_s / self._speed - elapsed_s)

    def _outcome(self, entry: Entry) -> Outcome:
        slot = next(s for s in self.slots if s.name == entry.collector)
        slot.up, slot.duration_s = entry.kind == "reading", entry.duration_s
        slot.errors += entry.kind != "reading"
        slot.timeouts += entry.kind == "silent"
        shift = self._start - self._header.start
        reading = Reading(
            entry.reading.samples,
            [self._moved(e, shift) for e in entry.reading.events],
            [self._marked(d) for d in entry.reading.devices],
            entry.reading.errors,
        )
        at = self._start + entry.offset_s / self._speed
        return Outcome(
            entry.collector, entry.kind, at, entry.duration_s, reading, late=entry.late, error=entry.error
        )

    def _moved(self, event: Event, shift: float) -> Event:
        if event.time is None:
            return event
        since = event.time + shift - self._start
        return msgspec.structs.replace(event, time=self._start + since / (self._speed if since > 0 else 1.0))

    def _marked(self, device: Device) -> Device:
        labels = {**device.labels, "replay_of": self._name}
        return msgspec.structs.replace(device, simulated=True, labels=labels)


class _Played:
    """Stands for a collector of the recording."""

    interval_s = deadline_s = 0.0

    def __init__(self, name: str) -> None:
        self.name = name

    def collect(self) -> Reading:
        return Reading()

    def close(self) -> None:
        """Holds nothing."""
