"""Which batches are let in: sequence numbers, time ranges. And the refused ones, kept for a look."""

from __future__ import annotations

import contextlib
import json
import threading
from collections import OrderedDict
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from forewarn.collectors.errors import InputError
from forewarn.daemon.wire import Batch

FUTURE_MAX_S = 300.0
"""Stamps further ahead than this, after the node's clock was corrected, are refused."""
PAST_MAX_S = 7 * 86400.0
"""Stamps older than a week are refused."""
SKEW_NOISE_S = 5.0
"""A difference of clocks below this may be the network; nothing is corrected."""
STREAMS_PER_NODE = 32
"""Streams remembered of one node; the one unused for longest is forgotten first."""
MAX_DEVICES_PER_NODE = 1024
MAX_NAME_CHARS = 255
REFUSED_KEPT = 100
"""Refused batches kept on disk for inspection; the oldest go first."""

OWN_STREAM = "forewarn-service"
"""The stream of what the service itself tells of a node's devices; no agent may use it."""

Stream = tuple[str, str]


@dataclass
class Sequences:
    """The highest sequence per (node, stream): what tells a repeat from news. Owned by one thread at a time."""

    highest: dict[str, OrderedDict[str, int]] = field(default_factory=dict)

    def get(self, node: str, stream: str) -> int:
        streams = self.highest.get(node)
        return streams.get(stream, 0) if streams else 0

    def set(self, node: str, stream: str, sequence: int) -> None:
        streams = self.highest.setdefault(node, OrderedDict())
        streams[stream] = sequence
        streams.move_to_end(stream)
        while len(streams) > STREAMS_PER_NODE:
            streams.popitem(last=False)

    def back(self, node: str, stream: str, sequence: int) -> None:
        """A write failed: all after `sequence` is news again."""
        if self.get(node, stream) > sequence:
            self.set(node, stream, sequence)

    def plain(self) -> dict[str, dict[str, int]]:
        return {node: dict(streams) for node, streams in self.highest.items()}

    @classmethod
    def of(cls, plain: dict[str, dict[str, int]]) -> Sequences:
        return cls({node: OrderedDict(streams) for node, streams in plain.items()})


@dataclass
class Pending:
    """Writes under way, so that a repeat waits for the first instead of being answered too early."""

    futures: dict[Stream, Future[None]] = field(default_factory=dict)


def shift_of(batch: Batch, received: float) -> float:
    """Seconds to add to the batch's stamps: the difference of the clocks where it is more than noise."""
    if batch.sent <= 0:
        return 0.0
    skew = received - batch.sent
    return skew if abs(skew) > SKEW_NOISE_S else 0.0


def check(batch: Batch, received: float) -> None:
    """What the wire cannot know: that stamps are near now, and sizes within reason. Raises InputError."""
    if len(batch.node) > MAX_NAME_CHARS:
        raise InputError(f"node: longer than {MAX_NAME_CHARS} characters")
    if len(batch.stream) > MAX_NAME_CHARS:
        raise InputError(f"stream: longer than {MAX_NAME_CHARS} characters")
    if batch.stream == OWN_STREAM:
        raise InputError(f"stream: {OWN_STREAM!r} is the service's own; use another name")
    if batch.sequence > 2**62:
        raise InputError("sequence: must be below 2 to the 62nd")
    shift_s = shift_of(batch, received)
    for i, frame in enumerate(batch.frames):
        _check_time(f"frames[{i}].time", frame.time + shift_s, received)
    for i, event in enumerate(batch.events):
        assert event.time is not None  # wire.decode refuses it
        _check_time(f"events[{i}].time", event.time + shift_s, received)
    if max((len(f.devices) for f in batch.frames), default=0) > MAX_DEVICES_PER_NODE:
        raise InputError(f"frames.devices: more than {MAX_DEVICES_PER_NODE} devices of one node")
    if len(batch.devices) > MAX_DEVICES_PER_NODE:
        raise InputError(f"devices: more than {MAX_DEVICES_PER_NODE} devices of one node")


def _check_time(name: str, time: float, received: float) -> None:
    if time > received + FUTURE_MAX_S:
        raise InputError(
            f"{name}: {time - received:.0f} s in the future; more than {FUTURE_MAX_S:.0f} s is refused: "
            "look at the node's clock"
        )
    if time < received - PAST_MAX_S:
        raise InputError(f"{name}: {(received - time) / 86400:.1f} days old; more than a week is refused")


class RefusedBatches:
    """A bounded folder of batches that were refused, each with the reason beside it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self._count = 0

    def keep(self, body: bytes, encoding: str | None, reason: str, received: float, who: str) -> None:
        """Best effort: a full disk must not make a refusal fail."""
        with self._lock, contextlib.suppress(OSError):
            self._folder.mkdir(parents=True, exist_ok=True)
            self._count += 1
            stem = f"{received:.3f}-{self._count % 10000:04d}"
            (self._folder / f"{stem}.bin").write_bytes(body)
            note = {"reason": reason, "encoding": encoding, "received": received, "token": who}
            (self._folder / f"{stem}.json").write_text(json.dumps(note) + "\n")
            names = sorted(self._folder.glob("*.json"))
            for old in names[:-REFUSED_KEPT]:
                old.with_suffix(".bin").unlink(missing_ok=True)
                old.unlink()


class NodeState(msgspec.Struct):
    """What is known of a node from its batches. `skew_s`: the service's clock minus the node's."""

    first_seen: float
    last_seen: float
    skew_s: float = 0.0
    agent_version: str = ""
    batches: int = 0
    duplicates: int = 0
    refused: int = 0
