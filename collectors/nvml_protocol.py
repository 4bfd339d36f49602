"""What the agent and its NVML child process say to each other: msgpack frames behind four bytes of length."""

from __future__ import annotations

import struct

import msgspec

from forewarn.collectors.nvml_fields import Tier

LENGTH = struct.Struct("<I")
MAX_FRAME_BYTES = 16 << 20


class Start(msgspec.Struct, tag="start"):
    """To the child, first: open NVML. `names` are local names known from before, by UUID and by `pci-ADDRESS`."""

    library: str
    names: dict[str, str]


class Poll(msgspec.Struct, tag="poll"):
    """To the child: read these tiers of these GPUs in this order. `now` is the agent's monotonic time."""

    tiers: list[Tier]
    devices: list[str]
    now: float
    probe_after_s: float


class Gpu(msgspec.Struct):
    """A GPU as found when NVML was opened. `error` is the NVML code when it could not be opened, else 0."""

    device: str
    uuid: str
    model: str
    pci: str | None
    labels: dict[str, str]
    error: int = 0


class Hello(msgspec.Struct, tag="hello"):
    """From the child: NVML is open."""

    driver: str
    simulated: bool
    gpus: list[Gpu]
    events: bool


class Failed(msgspec.Struct, tag="failed"):
    """From the child, last: NVML could not be opened."""

    code: int
    message: str


class Fault(msgspec.Struct):
    """A call that failed in a way that says something about the GPU or about our rights."""

    code: int
    call: str
    message: str
    tier: Tier


class Part(msgspec.Struct, tag="part"):
    """From the child: one GPU was read. `samples` are (metric, value, label value or empty)."""

    device: str
    tiers: list[Tier]
    samples: list[tuple[str, float, str]]
    faults: list[Fault]
    refused: list[str]


class Done(msgspec.Struct, tag="done"):
    """From the child: the poll is over. `restart` is the NVML code for which the child must be made anew, or 0."""

    restart: int


class Notice(msgspec.Struct, tag="notice"):
    """From the child at any time: a driver event. `seen` is CLOCK_MONOTONIC, which all processes of a host share."""

    device: str
    pci: str | None
    event: int
    data: int
    seen: float
    gpu_instance: int | None = None
    compute_instance: int | None = None


Request = Start | Poll
Reply = Hello | Failed | Part | Done | Notice

_encoder = msgspec.msgpack.Encoder()


def frame(message: Request | Reply) -> bytes:
    """A message as it goes over the pipe."""
    body = _encoder.encode(message)
    return LENGTH.pack(len(body)) + body
