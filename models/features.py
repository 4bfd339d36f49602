"""The feature engine: readings and events in, one row of features for each device out. Serving, replay and training
all go through it, so the three cannot disagree. One engine holds one kind of device (`gpu`, `disk`, `node`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from forewarn.collectors.base import Device

Floats = NDArray[np.float64]
Singles = NDArray[np.float32]

HORIZONS_S: dict[str, tuple[int, ...]] = {
    "gpu": (900, 3600, 86_400),
    "disk": (86_400, 7 * 86_400, 30 * 86_400),
    "node": (900, 3600, 86_400),
}
"""Horizons of each kind of device, in seconds."""


@dataclass(frozen=True)
class FeatureTable:
    """`values` is (devices x names) float32; NaN where nothing is known. `time` is the moment it holds for."""

    time: float
    kind: str
    devices: list[str]
    names: tuple[str, ...]
    values: Singles

    @property
    def known(self) -> NDArray[np.bool_]:
        """True where a value is known; same shape as `values`."""
        return ~np.isnan(self.values)


def feature_names(kind: str) -> tuple[str, ...]:
    """Names of the columns of `FeatureEngine(kind).features()`, stable and in order."""
    raise NotImplementedError


def monotone_constraints(kind: str) -> list[int]:
    """For each feature +1 (more is worse), -1 (less is worse) or 0, for LightGBM's monotone_constraints."""
    raise NotImplementedError


class FeatureEngine:
    """State of all devices of one kind. Not thread-safe: one thread owns it.

    Samples and events wait in a queue until `features(now)` or `flush(now)` takes in those stamped up to `now`,
    in the order of their stamps. So how they were cut into calls makes no difference, to the bit, and no feature
    at `now` can see a later sample. A sample not newer than the last one of the same device and metric is
    counted in `late` and left out, unless several in a row show that the clock was set back.
    """

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def describe(self, device: Device, time: float | None = None, installed: float | None = None) -> None:
        """Take in what is known of a device. Another serial in the same place from `time` on starts its history
        anew; the place keeps its count of past failures. `installed`: seconds since the epoch, gives the age."""

    def remove(self, device: str) -> None:
        """Leave a device out of all later tables (its state is dropped)."""

    def apply(self, time: float, devices: Sequence[str], metrics: Sequence[str], values: Floats) -> None:
        """One sweep: `values` (devices x metrics), NaN where not reported. Unknown metrics are passed over."""

    def rows(self, devices: Sequence[str]) -> NDArray[np.int32]:
        """Row numbers of devices (made on first sight), for `apply_bulk`."""
        raise NotImplementedError

    def apply_bulk(
        self, times: Floats, rows: NDArray[np.int32], metrics: Sequence[str], values: NDArray[np.floating]
    ) -> None:
        """Many readings: `times` (n), `rows` (n) from `rows()`, `values` (n x metrics), NaN where not reported."""

    def apply_event(
        self, time: float, device: str, kind: str, code: str, severity: str = "", count: int = 1
    ) -> None:
        """One event of a device. An event on the node itself concerns the engine of kind `node`."""

    def apply_failure(self, time: float, device: str) -> None:
        """A failure that is known to have happened: it counts as history from `time` on."""

    def flush(self, now: float) -> None:
        """Take in all that is queued with stamps up to `now`."""

    def features(self, now: float) -> FeatureTable:
        """Features of every device at `now`."""
        raise NotImplementedError

    def save(self, path: Path) -> None:
        """Write the whole state, queue included, to one file, atomically. Raises StorageError."""

    @classmethod
    def load(cls, path: Path) -> FeatureEngine:
        """Read what `save` wrote. Raises StorageError when it is damaged or of another version."""
        raise NotImplementedError
