"""Rows to learn from: the right fate beside each, none after the failure, weights that stand for what was left out."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from forewarn.models.dataset import Dataset, collect
from forewarn.models.features import HORIZONS_S, feature_names
from forewarn.models.history import History
from forewarn.models.training import targets
from support.histories import DAY_S, START_S, write_disks, write_rows


@pytest.fixture(scope="module")
def history(tmp_path_factory: pytest.TempPathFactory) -> History:
    return History(write_disks(tmp_path_factory.mktemp("disks"), drives=40, days=50, failing=8))


def test_each_row_knows_when_its_device_fails(history: History) -> None:
    data = collect(history, "disk", rows=10**9)
    failed = dict(zip(history.failures["device"], history.failures["time"], strict=True))
    assert len(data) == history.rows
    for i in range(0, len(data), 17):
        expected = failed.get(data.devices[data.device[i]], np.inf) - data.time[i]
        assert data.to_failure[i] == pytest.approx(expected)
        assert data.to_censor[i] == pytest.approx(history.span[1] - data.time[i])
    assert (data.to_failure > 0).all()
    assert data.names == feature_names("disk")
    assert data.step_s == DAY_S


def test_thinning_keeps_every_row_near_a_failure_and_weights_stand_for_the_rest(history: History) -> None:
    whole, thin = collect(history, "disk", rows=10**9), collect(history, "disk", rows=400)
    near = HORIZONS_S["disk"][-1]
    assert len(thin) < len(whole) * 0.6
    assert (thin.to_failure <= near).sum() == (whole.to_failure <= near).sum()
    assert thin.weight.sum() == pytest.approx(whole.weight.sum(), rel=0.25)


def test_the_same_seed_takes_the_same_rows(history: History) -> None:
    one, two = collect(history, "disk", rows=300, seed=7), collect(history, "disk", rows=300, seed=7)
    other = collect(history, "disk", rows=300, seed=8)
    assert one.time.tobytes() == two.time.tobytes()
    assert one.values.tobytes() == two.values.tobytes()
    assert one.device.tobytes() == two.device.tobytes()
    assert other.device.tobytes() != one.device.tobytes()


def test_later_time_is_kept_in_whole_moments(history: History) -> None:
    split = START_S + 30 * DAY_S
    data = collect(history, "disk", rows=10**9, keep_all_from=split, keep_all_rows=200)
    late = data.select(data.time >= split)
    moments, counts = np.unique(late.time, return_counts=True)
    assert len(moments) < 20
    assert (counts >= 32).all()
    assert late.weight.sum() == pytest.approx((history.rows - len(data.select(data.time < split))), rel=0.25)


def test_a_device_is_gone_after_its_failure(tmp_path: Path) -> None:
    # The drive goes on reporting after it failed: those readings teach nothing.
    times = START_S + np.arange(20) * DAY_S
    write_rows(
        tmp_path / "telemetry" / "a.parquet",
        {"time": times, "node": ["n"] * 20, "device": ["n/sda"] * 20, "disk_pending_sectors": [0.0] * 20},
    )
    failed = START_S + 9 * DAY_S + 60
    write_rows(tmp_path / "failures.parquet", {"time": [failed], "node": ["n"], "device": ["n/sda"]})
    data = collect(History(tmp_path), "disk")
    assert data.time.max() < failed
    assert len(data) == 10


def test_a_removed_device_is_censored(tmp_path: Path) -> None:
    write_disks(tmp_path, drives=4, days=20, failing=0)
    removed = START_S + 10 * DAY_S
    write_rows(
        tmp_path / "devices.parquet",
        {"device": ["n0/disk0"], "node": ["n0"], "kind": ["disk"], "serial": ["S"], "removed": [removed]},
    )
    data = collect(History(tmp_path), "disk")
    own = np.array([data.devices[d] == "n0/disk0" for d in data.device])
    assert data.to_censor[own] == pytest.approx(removed - data.time[own])
    assert data.time[own].max() < removed


def test_no_telemetry_of_the_kind_gives_no_rows(tmp_path: Path) -> None:
    write_disks(tmp_path, drives=2, days=3, failing=0)
    assert len(collect(History(tmp_path), "gpu")) == 0


def rows(to_failure: list[float], to_censor: list[float]) -> Dataset:
    n = len(to_failure)
    return Dataset(
        "disk", ("a",), ["d"], np.zeros((n, 1), np.float32), np.zeros(n), np.zeros(n, np.int32),
        np.array(to_failure), np.array(to_censor), np.full(n, 2.0, np.float32), DAY_S, 0,
    )  # fmt: skip


def test_censored_rows_count_for_the_part_that_is_known() -> None:
    day = DAY_S
    data = rows(
        [0.5 * day, np.inf, np.inf, 0.5 * day, 2 * day], [9 * day, 9 * day, 0.25 * day, 0.25 * day, 9 * day]
    )
    label, weight = targets(data, int(day))
    assert label.tolist() == [1, 0, 0, 0, 0]
    assert weight.tolist() == [2, 2, 0.5, 0.5, 2]


def test_what_happens_after_knowledge_is_cut_is_not_known() -> None:
    data = rows([0.5 * DAY_S], [9 * DAY_S])
    label, weight = targets(data, int(DAY_S), known_until=np.array([0.25 * DAY_S]))
    assert (label.tolist(), weight.tolist()) == ([0], [0.5])
