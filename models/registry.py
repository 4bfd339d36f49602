"""Model files: LightGBM text and a JSON manifest, never pickle; loaded only when every digest matches, first in a
child process, since a damaged file crashes LightGBM's loader. And the store with champion and challenger.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import secrets
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightgbm
import msgspec
import numpy as np
from numpy.typing import NDArray

from forewarn.collectors.errors import InputError, StorageError
from forewarn.models.features import HORIZONS_S, FeatureTable, feature_names

MANIFEST_VERSION = 1
MANIFEST_NAME = "manifest.json"
CURRENT_NAME = "current.json"
CHILD_TIMEOUT_S = 60
HISTORY_KEPT = 20
"""Champions before the present one that a store remembers."""
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


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
    """A loaded model of one kind of device. Made by `load`."""

    def __init__(self, manifest: Manifest, digest: str, boosters: Mapping[int, lightgbm.Booster]) -> None:
        self.manifest = manifest
        self.digest = digest
        """sha256 of the manifest: the name of this model."""
        self.name = digest[:12]
        self._boosters = dict(boosters)
        self._tables = {
            m.horizon_s: (np.array(m.calibration.x), np.array(m.calibration.y)) for m in manifest.models
        }
        self._picked: tuple[tuple[str, ...], NDArray[np.int64]] | None = None

    @property
    def kind(self) -> str:
        return self.manifest.kind

    @property
    def horizons_s(self) -> tuple[int, ...]:
        return self.manifest.horizons_s

    def select(self, table: FeatureTable) -> NDArray[np.float32]:
        """The columns of a table that this model takes, in its order. Raises InputError when one is missing."""
        if table.names == tuple(self.manifest.features):
            return table.values
        if self._picked is None or self._picked[0] != table.names:
            at = {n: i for i, n in enumerate(table.names)}
            missing = [n for n in self.manifest.features if n not in at]
            if missing:
                raise InputError(f"features: model {self.name} needs {missing[0]!r}, which this table lacks")
            self._picked = table.names, np.array([at[n] for n in self.manifest.features], np.int64)
        return np.ascontiguousarray(table.values[:, self._picked[1]])

    def raw(self, values: NDArray[np.float32], horizon_s: int) -> NDArray[np.float64]:
        """LightGBM's own probability before calibration, for the columns of `manifest.features`."""
        if not len(values):
            return np.empty(0)
        return np.asarray(self._boosters[horizon_s].predict(values), np.float64)

    def calibrated(self, raw: NDArray[np.float64], horizon_s: int) -> NDArray[np.float64]:
        """Probability for raw scores."""
        x, y = self._tables[horizon_s]
        return np.asarray(np.interp(raw, x, y), np.float64)

    def predict(self, table: FeatureTable) -> NDArray[np.float32]:
        """Calibrated probabilities (devices x horizons); never falling from a horizon to a longer one."""
        values = self.select(table)
        out = np.empty((len(values), len(self.horizons_s)), np.float32)
        for i, horizon in enumerate(self.horizons_s):
            out[:, i] = self.calibrated(self.raw(values, horizon), horizon)
        return np.maximum.accumulate(out, axis=1)

    def contributions(self, values: NDArray[np.float32], horizon_s: int) -> NDArray[np.float64]:
        """LightGBM's contributions (rows x features + 1, the last is the base), in log odds."""
        if not len(values):
            return np.empty((0, len(self.manifest.features) + 1))
        return np.asarray(self._boosters[horizon_s].predict(values, pred_contrib=True), np.float64)


def save(
    path: Path, manifest: Manifest, boosters: Mapping[int, str], extra: Mapping[str, bytes] | None = None
) -> Manifest:
    """Write a model folder: `boosters` maps horizon seconds to LightGBM text (`booster.model_to_string()`).

    File names and digests in `manifest.models` are filled in here (calibrations are kept). `extra`: more files, such as
    `card.md`. The folder must not exist yet, or be a model folder, which is replaced. Returns the manifest as
    written. Raises StorageError.
    """
    models = []
    for model in manifest.models:
        text = boosters[model.horizon_s]
        name = f"model_{model.horizon_s}s.txt"
        models.append(msgspec.structs.replace(model, file=name, sha256=_sha256(text.encode())))
    written = msgspec.structs.replace(manifest, models=models)
    _check(path, written)
    if path.exists() and not (path / MANIFEST_NAME).is_file() and any(path.iterdir()):
        raise StorageError(f"{path}: exists and is not a model folder: choose another place")
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        temporary.mkdir(parents=True)
        for model in models:
            (temporary / model.file).write_bytes(boosters[model.horizon_s].encode())
        for name, data in (extra or {}).items():
            (temporary / name).write_bytes(data)
        (temporary / MANIFEST_NAME).write_bytes(_encode(written))
        _replace_folder(temporary, path)
    except OSError as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise StorageError(f"{path}: the model could not be written: {error}") from error
    return written


def read_manifest(path: Path) -> tuple[Manifest, str]:
    """The manifest of a model folder and its digest; no model is loaded. Raises StorageError."""
    file = path / MANIFEST_NAME
    try:
        data = file.read_bytes()
        manifest = msgspec.json.decode(data, type=Manifest)
    except OSError as error:
        raise StorageError(f"{file}: cannot be read: {error.strerror or error}") from error
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise StorageError(f"{file}: not a manifest of a model: {error}") from error
    _check(file, manifest)
    return manifest, _sha256(data)


def load(path: Path, check_in_child: bool = True) -> RiskModel:
    """Load a model folder. Raises StorageError naming the file when it is damaged, changed or not ours."""
    manifest, digest = read_manifest(path)
    texts: dict[int, str] = {}
    for model in manifest.models:
        file = path / model.file
        try:
            data = file.read_bytes()
        except OSError as error:
            raise StorageError(f"{file}: cannot be read: {error.strerror or error}") from error
        if _sha256(data) != model.sha256:
            raise StorageError(
                f"{file}: its digest is not the one in {MANIFEST_NAME}: it was damaged or changed; install it anew"
            )
        texts[model.horizon_s] = data.decode(errors="replace")
    if check_in_child:
        _check_in_child(path, [m.file for m in manifest.models], len(manifest.features))
    boosters: dict[int, lightgbm.Booster] = {}
    for model in manifest.models:
        try:
            booster = lightgbm.Booster(model_str=texts[model.horizon_s])
        except (lightgbm.basic.LightGBMError, ValueError) as error:
            raise StorageError(f"{path / model.file}: LightGBM cannot load it: {error}") from error
        if booster.num_feature() != len(manifest.features):
            raise StorageError(
                f"{path / model.file}: takes {booster.num_feature()} features, but {MANIFEST_NAME} names "
                f"{len(manifest.features)}"
            )
        boosters[model.horizon_s] = booster
    return RiskModel(manifest, digest, boosters)


_CHILD = """
import ctypes, sys
library, width, *names = sys.argv[1:]
lib = ctypes.CDLL(library)
lib.LGBM_GetLastError.restype = ctypes.c_char_p
def call(name, *arguments):
    if getattr(lib, name)(*arguments):
        sys.exit(lib.LGBM_GetLastError().decode(errors="replace"))
for name in names:
    handle, iterations, features = ctypes.c_void_p(), ctypes.c_int(), ctypes.c_int()
    call("LGBM_BoosterCreateFromModelfile", name.encode(), ctypes.byref(iterations), ctypes.byref(handle))
    call("LGBM_BoosterGetNumFeature", handle, ctypes.byref(features))
    if features.value != int(width):
        continue
    row, out, count = (ctypes.c_double * int(width))(), (ctypes.c_double * 64)(), ctypes.c_int64()
    call("LGBM_BoosterPredictForMat", handle, row, 1, 1, int(width), 1, 0, 0, -1, b"", ctypes.byref(count), out)
"""
"""Speaks to LightGBM's C interface itself: importing the package takes many times as long as loading a model."""


def _check_in_child(path: Path, files: list[str], width: int) -> None:
    """Load and try each file in a child process, so that a crash of the loader is a plain error here."""
    library: str = vars(lightgbm.basic)[
        "_LIB"
    ]._name  # no public name for it; the file that this process has loaded
    command = [sys.executable, "-I", "-S", "-c", _CHILD, library, str(width), *(str(path / f) for f in files)]
    try:
        done = subprocess.run(
            command, capture_output=True, timeout=CHILD_TIMEOUT_S, check=False, stdin=subprocess.DEVNULL
        )
    except subprocess.TimeoutExpired as error:
        raise StorageError(f"{path}: LightGBM did not load it within {CHILD_TIMEOUT_S} s") from error
    except OSError as error:
        raise StorageError(f"{path}: no child process to check it in: {error}") from error
    if done.returncode:
        lines = done.stderr.decode(errors="replace").strip().splitlines()
        why = lines[-1] if lines and done.returncode > 0 else f"its loader ended with {done.returncode}"
        raise StorageError(f"{path}: LightGBM cannot load it: {why}")


def _check(path: Path, manifest: Manifest) -> None:
    """What types cannot say. Raises StorageError."""
    if manifest.version != MANIFEST_VERSION:
        raise StorageError(f"{path}: version {manifest.version}, but this Forewarn reads {MANIFEST_VERSION}")
    if manifest.kind not in HORIZONS_S:
        raise StorageError(f"{path}: kind {manifest.kind!r} is none of {', '.join(HORIZONS_S)}")
    unknown = sorted(set(manifest.features) - set(feature_names(manifest.kind)))
    if unknown:
        raise StorageError(
            f"{path}: feature {unknown[0]!r} is not known to this version: train the model anew"
        )
    if not manifest.models or list(manifest.horizons_s) != sorted(set(manifest.horizons_s)):
        raise StorageError(f"{path}: models must name rising horizons")
    for model in manifest.models:
        if Path(model.file).name != model.file or model.file in ("", ".", ".."):
            raise StorageError(f"{path}: file {model.file!r} must lie beside the manifest")
        x, y = np.array(model.calibration.x), np.array(model.calibration.y)
        ordered = len(x) == len(y) > 0 and (np.diff(x) > 0).all() and (np.diff(y) >= 0).all()
        if not (ordered and np.isfinite(x).all() and (y >= 0).all() and (y <= 1).all()):
            raise StorageError(
                f"{path}: calibration of {model.horizon_s} s is not a rising table of probabilities"
            )


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _encode(value: object) -> bytes:
    return msgspec.json.format(msgspec.json.encode(value), indent=1) + b"\n"


def _replace_folder(new: Path, path: Path) -> None:
    """Put `new` in the place of `path`."""
    if not path.exists():
        new.replace(path)
        return
    old = path.with_name(f".{path.name}.{secrets.token_hex(4)}.old")
    path.replace(old)
    new.replace(path)
    shutil.rmtree(old, ignore_errors=True)


class _Current(msgspec.Struct):
    """`current.json` of a store: for each kind the champion, and those before it, the last one last."""

    champion: dict[str, str] = {}
    before: dict[str, list[str]] = {}


class StoredModel(msgspec.Struct, frozen=True):
    """One model of a store. `state` is `champion`, `before` (was champion) or `challenger`."""

    name: str
    kind: str
    state: str
    digest: str
    horizons_s: list[int]
    simulated: bool
    created: str
    trained_from: str
    trained_to: str
    metrics: dict[str, float]
    error: str = ""


class Store:
    """A folder of models: `NAME/` each; `current.json` says for each kind which is champion and which went before.

    Until there is such a file, the only model of a kind is its champion, as `load_all` serves it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def models(self) -> list[StoredModel]:
        """Every model, by kind and name. A damaged one has `error` set."""
        current = self._current()
        out = []
        for folder in sorted(p for p in _folders(self.path) if (p / MANIFEST_NAME).exists()):
            name = folder.name
            try:
                manifest, digest = read_manifest(folder)
            except StorageError as error:
                out.append(StoredModel(name, "", "damaged", "", [], False, "", "", "", {}, str(error)))
                continue
            kind, state = manifest.kind, "challenger"
            if current.champion.get(kind) == name:
                state = "champion"
            elif name in current.before.get(kind, []):
                state = "before"
            out.append(
                StoredModel(
                    name=name,
                    kind=kind,
                    state=state,
                    digest=digest,
                    horizons_s=list(manifest.horizons_s),
                    simulated=manifest.simulated,
                    created=manifest.created,
                    trained_from=manifest.trained_from,
                    trained_to=manifest.trained_to,
                    metrics=dict(manifest.metrics),
                )
            )
        return sorted(out, key=lambda m: (m.kind, m.name))

    def add(self, source: Path, name: str | None = None) -> str:
        """Copy a model folder in as a challenger; returns its name. Raises StorageError."""
        model = load(source)
        name = name or f"{model.kind}-{model.name}"
        if not NAME.fullmatch(name):
            raise InputError(f"name: {name!r} must be letters, digits, dots, dashes, at most 100")
        target = self.path / name
        if target.exists():
            if read_manifest(target)[1] == model.digest:
                return name
            raise StorageError(f"{target}: there is another model of that name: choose another name")
        temporary = self.path / f".{name}.{secrets.token_hex(4)}"
        self._settle()
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            shutil.copytree(source, temporary)
            temporary.replace(target)
        except OSError as error:
            shutil.rmtree(temporary, ignore_errors=True)
            raise StorageError(f"{target}: the model could not be copied in: {error}") from error
        return name

    def promote(self, name: str) -> str:
        """Make a model the champion of its kind, once it has been loaded; returns the kind. Raises StorageError."""
        if not NAME.fullmatch(name) or not (self.path / name / MANIFEST_NAME).is_file():
            known = ", ".join(m.name for m in self.models()) or "none"
            raise InputError(f"model: {name!r} is not in {self.path} (there are: {known})")
        kind = load(self.path / name).kind
        current = self._current()
        champion = current.champion.get(kind)
        if champion == name:
            self._settle()
            return kind
        before = [n for n in current.before.get(kind, []) if n != name]
        if champion is not None:
            before.append(champion)
        current.before[kind] = before[-HISTORY_KEPT:]
        current.champion[kind] = name
        self._write(current)
        return kind

    def rollback(self, kind: str) -> str:
        """Back to the champion before; returns its name. Raises InputError when there is none."""
        current = self._current()
        before = current.before.get(kind, [])
        if not before:
            raise InputError(f"kind: no champion of kind {kind!r} went before in {self.path}")
        name = before[-1]
        load(self.path / name)
        current.before[kind] = before[:-1]
        current.champion[kind] = name
        self._write(current)
        return name

    def champions(self) -> dict[str, RiskModel]:
        """The champion of each kind, loaded. Raises StorageError."""
        return {kind: load(self.path / name) for kind, name in sorted(self._current().champion.items())}

    def _current(self) -> _Current:
        file = self.path / CURRENT_NAME
        try:
            return msgspec.json.decode(file.read_bytes(), type=_Current)
        except FileNotFoundError:
            return _Current(champion=self._only_ones())
        except (OSError, msgspec.DecodeError, msgspec.ValidationError) as error:
            raise StorageError(f"{file}: cannot be read: {error}") from error

    def _only_ones(self) -> dict[str, str]:
        """The name by kind of each model that is the only one of its kind; a damaged one is of none."""
        names: dict[str, list[str]] = {}
        for folder in sorted(_folders(self.path)) if self.path.is_dir() else []:
            with contextlib.suppress(StorageError):
                names.setdefault(read_manifest(folder)[0].kind, []).append(folder.name)
        return {kind: found[0] for kind, found in names.items() if len(found) == 1}

    def _settle(self) -> None:
        """Write down who is champion already, so that a model which comes to it changes nothing."""
        if not (self.path / CURRENT_NAME).exists():
            current = self._current()
            if current.champion:
                self._write(current)

    def _write(self, current: _Current) -> None:
        file = self.path / CURRENT_NAME
        temporary = file.with_name(f".{CURRENT_NAME}.{secrets.token_hex(4)}")
        try:
            with temporary.open("wb") as stream:
                stream.write(_encode(current))
                stream.flush()
                os.fsync(stream.fileno())
            temporary.replace(file)
        except OSError as error:
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise StorageError(f"{file}: cannot be written: {error}") from error


def _folders(path: Path) -> list[Path]:
    try:
        return [p for p in path.iterdir() if p.is_dir() and not p.name.startswith(".")]
    except OSError as error:
        raise StorageError(f"{path}: cannot be read: {error.strerror or error}") from error


def load_all(path: Path) -> dict[str, RiskModel]:
    """Models by kind from a store, from one model folder, or from a folder of model folders (such as the bundled).

    In a plain folder of model folders there must be one of each kind at most. Raises StorageError.
    """
    if (path / MANIFEST_NAME).is_file():
        model = load(path)
        return {model.kind: model}
    if (path / CURRENT_NAME).is_file():
        return Store(path).champions()
    found: dict[str, RiskModel] = {}
    for folder in sorted(_folders(path)):
        if not (folder / MANIFEST_NAME).is_file():
            continue
        model = load(folder)
        if model.kind in found:
            raise StorageError(
                f"{path}: two models of kind {model.kind!r}: promote one with `forewarn models promote`"
            )
        found[model.kind] = model
    return found


def bundled_path() -> Path:
    """The folder of models shipped with Forewarn."""
    return Path(__file__).parent / "bundled"


def as_dict(model: StoredModel) -> dict[str, Any]:
    """A stored model for JSON output."""
    found: dict[str, Any] = msgspec.to_builtins(model)
    return found
