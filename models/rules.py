"""Rules for what is known to be fatal or nearly so. Pure: an event or readings in, hits out. A rule raises a risk to a
floor, never lowers it, and says which part to look at and what to do.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from forewarn.collectors.base import Event


@dataclass(frozen=True)
class RuleHit:
    """A rule that holds for a device from `time` to `expires` (None: until reset, repair or replacement).

    `floors` are least risks for the horizons of the device's kind. `fatal`: act at once, without waiting for a cycle.
    """

    rule: str
    device: str
    time: float
    text: str
    action: str
    floors: tuple[float, ...]
    hardware: str
    fatal: bool
    expires: float | None = None
    evidence: dict[str, object] = field(default_factory=dict)


def kind_of(device: str) -> str:
    """`gpu`, `disk`, `nic` or `node`, from the id (`NODE/gpu3`, `NODE/nvme0`, `NODE`)."""
    raise NotImplementedError


def on_event(event: Event) -> RuleHit | None:
    """What an event alone says, at once."""
    raise NotImplementedError


def on_readings(device: str, kind: str, time: float, latest: Mapping[str, float]) -> list[RuleHit]:
    """What the last readings of one device say."""
    raise NotImplementedError
