"""From a batch on the wire to what the fleet takes in. Pure."""

from __future__ import annotations

import json

import msgspec
import numpy as np

from forewarn.collectors.base import Event
from forewarn.collectors.errors import InputError
from forewarn.daemon import wire
from forewarn.daemon.service.intake import shift_of
from forewarn.daemon.service.journal import BATCH, CLEAR, FAILURE, Record
from forewarn.models.fleet import Reading


class Failure(msgspec.Struct, frozen=True):
    """Somebody says that a device failed. `time` is seconds since the epoch."""

    device: str
    time: float
    cause: str = ""


class Clear(msgspec.Struct, frozen=True):
    """Somebody says that a device was reset, repaired or replaced."""

    device: str


Content = wire.Batch | Failure | Clear


def content_of(record: Record) -> Content:
    """What a record says. Raises InputError for one that this version does not understand."""
    if isinstance(record.content, wire.Batch | Failure | Clear):
        return record.content
    if record.kind == BATCH:
        return wire.decode(record.payload)
    kinds: dict[int, type[Failure] | type[Clear]] = {FAILURE: Failure, CLEAR: Clear}
    if record.kind not in kinds:
        raise InputError(f"kind: {record.kind} of a log record is not known to this version")
    try:
        return msgspec.json.decode(record.payload, type=kinds[record.kind])
    except (msgspec.DecodeError, json.JSONDecodeError) as error:
        raise InputError(f"payload: a log record cannot be read: {error}") from error


def readings_of(batch: wire.Batch) -> list[Reading]:
    """The frames as arrays, without copying: float64, devices x metrics."""
    return [
        Reading(
            time=frame.time,
            devices=frame.devices,
            metrics=frame.metrics,
            values=np.frombuffer(frame.values, "<f8").reshape(len(frame.devices), len(frame.metrics)),
        )
        for frame in batch.frames
        if frame.devices and frame.metrics
    ]


def events_of(batch: wire.Batch, received: float) -> list[Event]:
    """The events with their stamps corrected to the service's clock."""
    shift_s = shift_of(batch, received)
    if not shift_s:
        return list(batch.events)
    return [
        msgspec.structs.replace(e, time=None if e.time is None else e.time + shift_s) for e in batch.events
    ]
