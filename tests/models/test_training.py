"""Training from the exchange format alone: learns what is there, refuses too little, repeats itself to the bit."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from forewarn.collectors.errors import InputError, StorageError
from forewarn.models import registry
from forewarn.models.dataset import collect
from forewarn.models.features import HORIZONS_S, feature_names
from forewarn.models.history import History
from forewarn.models.training import NOT_LEARNED, Options, _joined, train, train_to
from support.histories import write_disks, write_rows


@pytest.fixture(scope="module")
def history(tmp_path_factory: pytest.TempPathFactory) -> History:
    return History(write_disks(tmp_path_factory.mktemp("disks")))


@pytest.fixture(scope="module")
def model(history: History, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "disk"
    train_to(path, [history], "disk", Options(credits=["somebody"]), extra={"card.md": b"# card"})
    return path


def test_the_folder_holds_all_that_serving_needs(model: Path) -> None:
    loaded = registry.load(model)
    manifest = loaded.manifest
    assert manifest.horizons_s == HORIZONS_S["disk"]
    assert manifest.features == list(feature_names("disk"))
    assert manifest.data[-1] == "somebody"
    assert not manifest.simulated
    assert manifest.created == ""
    assert manifest.trained_from < manifest.trained_to
    assert any(k.startswith("alert_threshold_") for k in manifest.parameters)
    assert (model / "card.md").read_bytes() == b"# card"


def test_what_tells_of_the_collecting_is_not_learned(model: Path) -> None:
    loaded = registry.load(model)
    for horizon_s in HORIZONS_S["disk"]:
        gains = loaded._boosters[horizon_s].feature_importance("gain")
        used = {n for n, g in zip(loaded.manifest.features, gains, strict=True) if g > 0}
        assert used
        assert not [n for n in used if n.startswith(NOT_LEARNED["disk"])]


def test_the_same_data_and_seed_give_the_same_digest(history: History, model: Path, tmp_path: Path) -> None:
    again, other = tmp_path / "again", tmp_path / "other"
    train_to(again, [History(history.path)], "disk", Options(credits=["somebody"]))
    train_to(other, [History(history.path)], "disk", Options(seed=2, credits=["somebody"]))
    assert registry.read_manifest(again)[1] == registry.read_manifest(model)[1]
    assert registry.read_manifest(other)[1] != registry.read_manifest(model)[1]


def test_rows_in_another_order_give_the_same_model(history: History, model: Path, tmp_path: Path) -> None:
    table = pd.read_parquet(history.path / "telemetry").sample(frac=1.0, random_state=1)
    write_rows(tmp_path / "h" / "telemetry" / "a.parquet", {str(k): v for k, v in table.items()})
    for name in ("failures", "devices"):
        (tmp_path / "h" / f"{name}.parquet").write_bytes((history.path / f"{name}.parquet").read_bytes())
    _, texts = train([History(tmp_path / "h")], "disk", Options(credits=["somebody"]))
    for horizon_s, text in texts.items():
        assert text == (model / f"model_{horizon_s}s.txt").read_text()


def test_two_histories_are_learned_from_together(history: History, tmp_path: Path) -> None:
    second = History(write_disks(tmp_path, seed=6, every_days=7, days=80))
    manifest, texts = train([history, second], "disk", Options(rows=2_000))
    assert set(texts) == set(HORIZONS_S["disk"])
    assert len(manifest.data) == 2


def test_too_few_failures_are_refused_with_the_way_out(tmp_path: Path) -> None:
    few = History(write_disks(tmp_path, drives=10, days=20, failing=3))
    with pytest.raises(InputError, match=r"3 failures of kind disk; at least 10.*shipped model"):
        train([few], "disk")


def test_failures_without_telemetry_are_refused(tmp_path: Path) -> None:
    write_disks(tmp_path)
    for file in (tmp_path / "telemetry").iterdir():
        file.unlink()
    with pytest.raises(InputError, match="no readings of kind disk"):
        train([History(tmp_path)], "disk")


def test_risks_rank_what_will_fail_on_drives_never_seen(model: Path, tmp_path: Path) -> None:
    fresh = collect(History(write_disks(tmp_path, seed=99)), "disk", rows=10**9)
    loaded = registry.load(model)
    risk = loaded.calibrated(loaded.raw(fresh.values, 7 * 86_400), 7 * 86_400)
    soon = fresh.to_failure <= 7 * 86_400
    assert np.median(risk[soon]) > 20 * np.median(risk[~soon])
    assert risk.mean() == pytest.approx(soon.mean(), rel=0.6)


def test_histories_read_at_different_pace_make_up_the_time_of_all(tmp_path: Path) -> None:
    daily = collect(History(write_disks(tmp_path / "a", drives=20, days=28, failing=0)), "disk")
    weekly = collect(
        History(write_disks(tmp_path / "b", drives=20, days=28, failing=0, every_days=7)), "disk"
    )
    both = _joined([daily, weekly])
    assert len(both) == 20 * 28 + 20 * 4
    assert float(both.weight.sum()) * both.step_s == pytest.approx(2 * 20 * 28 * 86_400)
    assert len(set(both.device.tolist())) == 40


def test_a_folder_of_something_else_is_refused_before_time_is_spent(history: History, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    watched: list[str] = []
    with pytest.raises(StorageError, match="not a model folder"):
        train_to(tmp_path, [history], "disk", watch=lambda text, share: watched.append(text))
    assert watched == []
    assert (tmp_path / "notes.txt").read_text() == "mine"
