"""Model files: loaded whole or not at all; the store remembers who was champion."""

from __future__ import annotations

import json
from pathlib import Path

import lightgbm
import numpy as np
import pytest

from forewarn.collectors.errors import InputError, StorageError
from forewarn.daemon import cli
from forewarn.models import registry
from forewarn.models.features import HORIZONS_S, FeatureEngine, FeatureTable, feature_names
from forewarn.models.registry import Calibration, Manifest, ModelFile, Store

KIND = "gpu"
USED = ["ecc_dram_corrected.increase_1h", "temperature.node_excess_1h", "history.failures"]
CURVE = Calibration([0.0, 0.5, 1.0], [0.001, 0.2, 0.9])


def booster(seed: int = 0, features: list[str] | None = None) -> str:
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(600, len(features or USED)))
    y = (x[:, 0] + 0.3 * rng.normal(size=600) > 0.8).astype(int)
    settings = {"objective": "binary", "verbose": -1, "num_leaves": 5, "seed": seed, "num_threads": 1}
    text: str = lightgbm.train(settings, lightgbm.Dataset(x, y), 5).model_to_string()
    return text


def make(path: Path, seed: int = 0, kind: str = KIND, features: list[str] | None = None) -> Manifest:
    manifest = Manifest(
        kind=kind,
        features=features or USED,
        models=[ModelFile(h, "", "", CURVE) for h in HORIZONS_S[kind]],
        simulated=True,
        trained_from="2026-01-01T00:00:00Z",
        trained_to="2026-02-01T00:00:00Z",
        data=["made up for this test"],
    )
    text = booster(seed, features)
    return registry.save(
        path, manifest, dict.fromkeys(HORIZONS_S[kind], text), {"card.md": b"# a test model\n"}
    )


def table(values: np.ndarray) -> FeatureTable:
    whole = np.full((len(values), len(feature_names(KIND))), np.nan, np.float32)
    for i, name in enumerate(USED):
        whole[:, feature_names(KIND).index(name)] = values[:, i]
    return FeatureTable(0.0, KIND, [f"n/gpu{i}" for i in range(len(values))], feature_names(KIND), whole)


def test_what_is_saved_is_what_predicts(tmp_path: Path) -> None:
    make(tmp_path / "m")
    model = registry.load(tmp_path / "m")
    values = np.random.default_rng(3).normal(size=(50, 3)).astype(np.float32)
    risk = model.predict(table(values))
    bare = lightgbm.Booster(model_str=booster()).predict(values)
    expected = np.interp(np.asarray(bare), CURVE.x, CURVE.y)
    assert risk.shape == (50, 3) and risk.dtype == np.float32
    np.testing.assert_allclose(risk[:, 0], expected, rtol=1e-6)
    assert (np.diff(risk, axis=1) >= 0).all()
    contributions = model.contributions(values, 900)
    raw = 1 / (1 + np.exp(-contributions.sum(axis=1)))
    np.testing.assert_allclose(raw, np.asarray(bare), rtol=1e-6)


def test_empty_table(tmp_path: Path) -> None:
    make(tmp_path / "m")
    model = registry.load(tmp_path / "m")
    assert model.predict(FeatureEngine(KIND).features(0.0)).shape == (0, 3)


def test_same_model_same_digest(tmp_path: Path) -> None:
    make(tmp_path / "a")
    make(tmp_path / "b")
    make(tmp_path / "c", seed=1)
    digests = [registry.load(tmp_path / n, check_in_child=False).digest for n in "abc"]
    assert digests[0] == digests[1] != digests[2]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ("flip", "digest is not the one"),
        ("cut", "digest is not the one"),
        ("gone", "cannot be read"),
        ("no manifest", "cannot be read"),
        ("not json", "not a manifest"),
        ("version", "version 99"),
        ("kind", "kind 'toaster'"),
        ("feature", "is not known to this version"),
        ("calibration", "not a rising table"),
        ("outside", "must lie beside"),
        ("crash", "LightGBM cannot load it"),
        ("width", "takes 3 features"),
    ],
)
def test_a_damaged_model_is_refused(tmp_path: Path, damage: str, message: str) -> None:
    path = tmp_path / "m"
    make(path)
    manifest_file, model_file = path / "manifest.json", path / "model_900s.txt"
    manifest = json.loads(manifest_file.read_bytes())
    if damage == "flip":
        model_file.write_bytes(model_file.read_bytes().replace(b"1", b"2", 1))
    elif damage == "cut":
        model_file.write_bytes(model_file.read_bytes()[:300])
    elif damage == "gone":
        model_file.unlink()
    elif damage == "no manifest":
        manifest_file.unlink()
    elif damage == "not json":
        manifest_file.write_text("{")
    elif damage == "version":
        manifest["version"] = 99
    elif damage == "kind":
        manifest["kind"] = "toaster"
    elif damage == "feature":
        manifest["features"][0] = "no.such_feature"
    elif damage == "calibration":
        manifest["models"][0]["calibration"]["y"] = [0.5, 0.2, 0.1]
    elif damage == "outside":
        manifest["models"][0]["file"] = "../model.txt"
    elif damage == "crash":
        # The digest is right and the content is not: what kills LightGBM's loader must not kill us.
        text = model_file.read_text()
        text = text.replace("num_leaves=5", "num_leaves=500000", 1).replace(
            "split_feature=", "split_feature=9"
        )
        model_file.write_text(text)
        manifest["models"][0]["sha256"] = registry._sha256(text.encode())
    elif damage == "width":
        manifest["features"].append("history.slot_failures")
    if damage not in ("no manifest", "not json"):
        manifest_file.write_text(json.dumps(manifest))
    with pytest.raises(StorageError, match=message):
        registry.load(path)


def test_a_model_folder_is_replaced_and_nothing_else(tmp_path: Path) -> None:
    make(tmp_path / "m")
    make(tmp_path / "m", seed=1)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["m"]
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.tex").write_text("years of work")
    with pytest.raises(StorageError, match="not a model folder"):
        make(tmp_path / "home")
    assert (tmp_path / "home" / "thesis.tex").exists()


def test_champion_challenger_and_back(tmp_path: Path) -> None:
    make(tmp_path / "one")
    make(tmp_path / "two", seed=1)
    store = Store(tmp_path / "store")
    first = store.add(tmp_path / "one", "first")
    second = store.add(tmp_path / "two")
    # The first of its kind is served, and one that comes to it changes nothing.
    assert store.champions()[KIND].digest == registry.load(tmp_path / "one").digest
    assert registry.load_all(store.path)[KIND].digest == registry.load(tmp_path / "one").digest
    assert store.promote(first) == KIND
    assert {m.name: m.state for m in store.models()} == {first: "champion", second: "challenger"}
    store.promote(second)
    assert {m.name: m.state for m in store.models()} == {first: "before", second: "champion"}
    assert store.champions()[KIND].digest == registry.load(tmp_path / "two").digest
    assert store.rollback(KIND) == first
    assert registry.load_all(store.path)[KIND].digest == registry.load(tmp_path / "one").digest
    with pytest.raises(InputError, match="no champion of kind 'gpu' went before"):
        store.rollback(KIND)
    with pytest.raises(InputError, match="there are: first"):
        store.promote("nobody")


def test_promoting_one_kind_leaves_the_others_served(tmp_path: Path) -> None:
    disk = ["reallocated.level", "pending.level", "power_on_hours.level"]
    make(tmp_path / "store" / "gpu-1")
    make(tmp_path / "store" / "disk-1", kind="disk", features=disk)
    make(tmp_path / "two", seed=1)
    store = Store(tmp_path / "store")
    assert {m.state for m in store.models()} == {"champion"}
    store.promote(store.add(tmp_path / "two", "gpu-2"))
    assert {m.name: m.state for m in store.models()} == {
        "disk-1": "champion",
        "gpu-1": "before",
        "gpu-2": "champion",
    }
    assert store.rollback(KIND) == "gpu-1"


def test_the_bundled_models_are_listed_as_what_they_are_used_for() -> None:
    assert {m.state for m in Store(registry.bundled_path()).models()} <= {"champion"}


def test_a_damaged_model_is_never_promoted(tmp_path: Path) -> None:
    make(tmp_path / "one")
    store = Store(tmp_path / "store")
    name = store.add(tmp_path / "one")
    store.promote(name)
    other = store.add(tmp_path / "one", "other")
    (store.path / other / "model_900s.txt").write_text("tree\n")
    with pytest.raises(StorageError, match="model_900s"):
        store.promote(other)
    assert {m.name: m.state for m in store.models()}[name] == "champion"


def test_folders_of_models(tmp_path: Path) -> None:
    make(tmp_path / "gpu")
    make(
        tmp_path / "disk",
        kind="disk",
        features=["reallocated.level", "pending.level", "power_on_hours.level"],
    )
    assert set(registry.load_all(tmp_path)) == {"gpu", "disk"}
    assert set(registry.load_all(tmp_path / "gpu")) == {"gpu"}
    make(tmp_path / "gpu-again")
    with pytest.raises(StorageError, match="two models of kind 'gpu'"):
        registry.load_all(tmp_path)
    with pytest.raises(StorageError, match="cannot be read"):
        registry.load_all(tmp_path / "nowhere")


def test_models_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make(tmp_path / "one")
    make(tmp_path / "two", seed=1)
    store = ["models", "--store", str(tmp_path / "store")]
    assert cli.main([*store, "add", str(tmp_path / "one"), "--name", "one"]) == 0
    assert cli.main([*store, "add", str(tmp_path / "two"), "--name", "two"]) == 0
    assert cli.main([*store, "promote", "one"]) == 0
    assert cli.main([*store, "promote", "two"]) == 0
    assert cli.main([*store, "rollback", "gpu"]) == 0
    capsys.readouterr()
    assert cli.main([*store, "list", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)["models"]
    assert [(m["name"], m["state"], m["simulated"]) for m in listed] == [
        ("one", "champion", True),
        ("two", "challenger", True),
    ]
    assert cli.main([*store, "list"]) == 0
    assert "simulated" in capsys.readouterr().out
    assert cli.main([*store, "promote", "three"]) == 1
    assert "three" in capsys.readouterr().err
    assert cli.main(["models", "promote", "one"]) == 2
    assert "service.models" in capsys.readouterr().err
