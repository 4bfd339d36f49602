"""Model files: LightGBM text and a JSON manifest, never pickle; loaded only when every digest matches, first in a
child process, since a damaged file crashes LightGBM's loader. And the store with champion and challenger.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from forewarn.models.features import FeatureTable

MANIFEST_VERSION = 1
MANIFEST_NAME = "manifest.json"


class Calibration(msgspec.Struct, frozen=True):
    """Raw score to probability by a table: `np.interp(raw, x, y)`, x rising, y never falling."""

    x: list[float]
    y: list[float]


class ModelFile(msgspec.Struct, frozen=True):
    """The model of one horizon: LightGBM text beside the manifest."""

    horizon_s: int
    file: str
    sha256: str
    calibration: Calibration


class Manifest(msgspec.Struct, frozen=True):
    """What a model folder says of itself (`manifest.json`)."""

    kind: str
    features: list[str]
    models: list[ModelFile]
    created: str = ""
    """ISO 8601, UTC. Left empty where the same data must give the same digest."""
    version: int = MANIFEST_VERSION
    simulated: bool = False
    """True when trained on simulated data."""
    trained_from: str = ""
    trained_to: str = ""
    data: list[str] = []
    """Sources and credits."""
    metrics: dict[str, float] = {}
    parameters: dict[str, str | float | int | bool] = {}
    note: str = ""

    @property
    def horizons_s(self) -> tuple[int, ...]:
        return tuple(m.horizon_s for m in self.models)


class RiskModel:
    """A loaded model of one kind of device."""

    manifest: Manifest
    digest: str
    """sha256 of the manifest: the name of this model."""

    def predict(self, table: FeatureTable) -> NDArray[np.float32]:
        """Calibrated probabilities (devices x horizons); never falling from a horizon to a longer one."""
        raise NotImplementedError

    def raw(self, values: NDArray[np.float32], horizon_s: int) -> NDArray[np.float64]:
        """LightGBM's own probability before calibration, for the columns of `manifest.features`."""
        raise NotImplementedError

    def contributions(self, values: NDArray[np.float32], horizon_s: int) -> NDArray[np.float64]:
        """LightGBM's contributions (rows x features + 1, the last is the base), in log odds."""
        raise NotImplementedError


def save(
    path: Path, manifest: Manifest, boosters: Mapping[int, str], extra: Mapping[str, bytes] | None = None
) -> Manifest:
    """Write a model folder: `boosters` maps horizon seconds to LightGBM text (`booster.model_to_string()`).

    File names and digests in `manifest.models` are filled in here (calibrations are kept). `extra`: more files, such as
    `card.md`. Returns the manifest as written. Raises StorageError.
    """
    raise NotImplementedError


def load(path: Path, check_in_child: bool = True) -> RiskModel:
    """Load a model folder. Raises StorageError naming the file when it is damaged, changed or not ours."""
    raise NotImplementedError


class Store:
    """A folder of models: `NAME/` each, `current.json` says for each kind which is champion and which went before."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def list(self) -> Sequence[dict[str, object]]:
        raise NotImplementedError

    def add(self, source: Path, name: str | None = None) -> str:
        """Copy a model folder in as a challenger; returns its name."""
        raise NotImplementedError

    def promote(self, name: str) -> None:
        """Make a model the champion of its kind."""

    def rollback(self, kind: str) -> str:
        """Back to the champion before; returns its name."""
        raise NotImplementedError

    def champions(self) -> dict[str, RiskModel]:
        """The champion of each kind, loaded."""
        raise NotImplementedError


def load_all(path: Path) -> dict[str, RiskModel]:
    """Models by kind from a store, from one model folder, or from a folder of model folders (such as the bundled)."""
    raise NotImplementedError


def bundled_path() -> Path:
    """The folder of models shipped with Forewarn."""
    raise NotImplementedError
