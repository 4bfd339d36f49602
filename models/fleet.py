"""The fleet: state of all devices, their risk and the reasons for it. The one facade that the service and the
back-test drive; it puts engines, models and rules together. No I/O but `save` and `load`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from forewarn.collectors.base import Device, Event
from forewarn.models.registry import RiskModel
from forewarn.models.rules import RuleHit


@dataclass(frozen=True)
class Reading:
    """One sweep: `values` (devices x metrics) float64, NaN where not reported; `time` seconds since the epoch."""

    time: float
    devices: Sequence[str]
    metrics: Sequence[str]
    values: NDArray[np.float64]


@dataclass(frozen=True)
class Reason:
    """One reason for a risk. `contribution` is in log odds; rules have theirs as infinity. `since`: since when."""

    text: str
    feature: str
    value: float | None
    since: float | None
    contribution: float
    evidence: dict[str, object]


@dataclass(frozen=True)
class RiskTable:
    """`risk` (devices x horizons) float32: the higher of model and rules; `rule_risk` the rules' part alone."""

    time: float
    kind: str
    devices: list[str]
    horizons_s: tuple[int, ...]
    risk: NDArray[np.float32]
    model_risk: NDArray[np.float32]
    rule_risk: NDArray[np.float32]


class Fleet:
    """State of all devices. One thread owns it: calls must not overlap (the service has one scoring thread)."""

    def __init__(self, models: Mapping[str, RiskModel | None]) -> None:
        self.models = dict(models)

    def set_model(self, kind: str, model: RiskModel | None) -> None:
        """Swap the model of a kind (after a promotion)."""

    def apply_batch(
        self,
        node: str,
        readings: Iterable[Reading],
        events: Iterable[Event] = (),
        devices: Iterable[Device] = (),
        shift_s: float = 0.0,
    ) -> list[RuleHit]:
        """Take in what a node sent; returns what the rules say at once. `shift_s` is added to every stamp (the
        caller's correction of a node's wrong clock)."""
        raise NotImplementedError

    def apply_bulk(
        self,
        times: NDArray[np.float64],
        devices: Sequence[str],
        metrics: Sequence[str],
        values: NDArray[np.floating],
    ) -> list[RuleHit]:
        """History rows of any kind and mix of devices: `values` (rows x metrics). For replay and training."""
        raise NotImplementedError

    def apply_failure(self, time: float, device: str) -> None:
        """An operator or a label says that the device failed at `time`."""

    def score(self, now: float) -> dict[str, RiskTable]:
        """Risk of every device at `now`, by kind."""
        raise NotImplementedError

    def explain(self, device: str, now: float, horizon_s: int, top: int = 5) -> list[Reason]:
        """Reasons for a device's risk as of the last `score`, strongest first."""
        raise NotImplementedError

    def devices(self) -> dict[str, Device]:
        """Every device seen, by id; the description is bare when the node never sent one."""
        raise NotImplementedError

    def latest(self, device: str) -> dict[str, tuple[float, float]]:
        """Metric -> (value, time) of the last readings."""
        raise NotImplementedError

    def series(self, device: str, metric: str) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Times (bucket ends) and values from the buckets, for charts; counters as increase in the bucket."""
        raise NotImplementedError

    def active_hits(self, device: str, now: float) -> list[RuleHit]:
        """Rules in force for a device."""
        raise NotImplementedError

    def clear(self, device: str) -> None:
        """The device was reset, repaired or replaced: rules in force for it end."""

    def save(self, folder: Path) -> None:
        """Write the state to a folder. Raises StorageError."""

    @classmethod
    def load(cls, folder: Path, models: Mapping[str, RiskModel | None]) -> Fleet:
        """Read what `save` wrote. Raises StorageError when it is damaged."""
        raise NotImplementedError
