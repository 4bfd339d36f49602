"""What agents and the service say to each other: batches in MessagePack, samples in packed columns.

A batch is applied once: the service remembers the highest `sequence` per (`node`, `stream`), and answers a
repeat like the first time. Fields that a reader does not know are ignored and new fields have defaults, so an
older agent talks to a newer service and the other way round; `version` rises only when meaning changes.
"""

from __future__ import annotations

import array
import math
import sys
import zlib
from collections.abc import Iterable

import msgspec

from forewarn.collectors.base import Device, Event, Sample
from forewarn.collectors.errors import InputError

WIRE_VERSION = 1
CONTENT_TYPE = "application/msgpack"
COMPRESS_ABOVE_BYTES = 1024
"""Bodies above this travel with Content-Encoding: deflate (zlib)."""
MAX_BODY_BYTES = 8 * 1024 * 1024
"""Largest body the service takes, before and after decompression."""


class Frame(msgspec.Struct, frozen=True):
    """One sweep: `values` holds float64, little-endian, row-major over devices x metrics; NaN: not reported.

    `devices` are full ids (`NODE/gpu3`); `time` is the node's clock in seconds since the epoch (UTC).
    """

    time: float
    devices: list[str]
    metrics: list[str]
    values: bytes


class Batch(msgspec.Struct, frozen=True):
    """What an agent sends at once. `stream` names the spool's life (a new spool, a new stream);
    `sequence` counts up from 1 within it. `sent` is the node's clock at sending, for measuring skew."""

    node: str
    stream: str
    sequence: int
    version: int = WIRE_VERSION
    sent: float = 0.0
    agent_version: str = ""
    devices: list[Device] = []
    frames: list[Frame] = []
    events: list[Event] = []


class Answer(msgspec.Struct, frozen=True):
    """The service's word on a batch: all up to `sequence` of `stream` is safe and may leave the spool."""

    stream: str
    sequence: int
    duplicate: bool = False


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Batch)


def pack_samples(time: float, samples: Iterable[Sample], node: str = "") -> Frame:
    """Pack samples of one sweep into a frame; `node` is put before local device ids. Labelled samples and
    non-finite values are left out: labels are for the node's own /metrics, and a value that is no number was
    never reported."""
    kept = [s for s in samples if not s.labels and math.isfinite(s.value)]
    devices = list(dict.fromkeys(s.device for s in kept))
    metrics = list(dict.fromkeys(s.metric for s in kept))
    row = {d: i for i, d in enumerate(devices)}
    column = {m: i for i, m in enumerate(metrics)}
    cells = array.array("d", [math.nan]) * (len(devices) * len(metrics))
    for s in kept:
        cells[row[s.device] * len(metrics) + column[s.metric]] = s.value
    if sys.byteorder == "big":
        cells.byteswap()
    if node:
        devices = [full_id(node, device) for device in devices]
    return Frame(time=time, devices=devices, metrics=metrics, values=cells.tobytes())


def encode(batch: Batch) -> bytes:
    """The batch as MessagePack, not compressed."""
    return _encoder.encode(batch)


def compress(body: bytes) -> tuple[bytes, str | None]:
    """The body to send and its Content-Encoding (None when sent as it is)."""
    if len(body) <= COMPRESS_ABOVE_BYTES:
        return body, None
    return zlib.compress(body, 1), "deflate"


def decompress(body: bytes, encoding: str | None, limit: int = MAX_BODY_BYTES) -> bytes:
    """Undo `compress`, never inflating past `limit` bytes. Raises InputError."""
    if encoding in (None, "", "identity"):
        return body
    if encoding != "deflate":
        raise InputError(f"content encoding {encoding!r} is not supported: send deflate or identity")
    inflater = zlib.decompressobj()
    try:
        plain = inflater.decompress(body, limit)
    except zlib.error as error:
        raise InputError(f"the body is not valid deflate data: {error}") from error
    if inflater.unconsumed_tail:
        raise InputError(f"the body inflates to more than {limit} bytes: send smaller batches")
    if not inflater.eof:
        raise InputError("the body is truncated deflate data")
    return plain


def decode(body: bytes) -> Batch:
    """Read a batch and check what types cannot say. Raises InputError naming the field."""
    try:
        batch = _decoder.decode(body)
    except (msgspec.DecodeError, msgspec.ValidationError, UnicodeDecodeError, RecursionError) as error:
        raise InputError(f"not a batch: {error}") from error
    if batch.version > WIRE_VERSION:
        raise InputError(
            f"version: {batch.version} is newer than this service speaks ({WIRE_VERSION}): upgrade it"
        )
    if not batch.node or "/" in batch.node:
        raise InputError(f"node: {batch.node!r} must be a non-empty name without a slash")
    if not batch.stream:
        raise InputError("stream: must not be empty")
    if batch.sequence < 1:
        raise InputError(f"sequence: {batch.sequence} must be 1 or more")
    if not math.isfinite(batch.sent):
        raise InputError("sent: must be a finite number of seconds")
    for i, frame in enumerate(batch.frames):
        expected = len(frame.devices) * len(frame.metrics) * 8
        if len(frame.values) != expected:
            raise InputError(
                f"frames[{i}].values: {len(frame.values)} bytes, but {len(frame.devices)} devices x "
                f"{len(frame.metrics)} metrics need {expected}"
            )
        if not math.isfinite(frame.time):
            raise InputError(f"frames[{i}].time: must be a finite number of seconds")
        for device in frame.devices:
            _check_owner(batch.node, device, f"frames[{i}].devices")
    for i, event in enumerate(batch.events):
        _check_owner(batch.node, event.device, f"events[{i}].device")
        if event.time is None or not math.isfinite(event.time):
            raise InputError(f"events[{i}].time: must be a finite number of seconds")
    for i, described in enumerate(batch.devices):
        _check_owner(batch.node, described.device, f"devices[{i}].device")
    return batch


def _check_owner(node: str, device: str, field: str) -> None:
    if device != node and not device.startswith(node + "/"):
        raise InputError(f"{field}: {device!r} does not belong to node {node!r}")


def full_id(node: str, local: str) -> str:
    """`NODE/gpu3` for a local device id, `NODE` for the node itself (the empty local id)."""
    return f"{node}/{local}" if local else node
