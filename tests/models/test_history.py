"""History directories as sites have them: whole, odd and broken."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from forewarn.collectors.errors import InputError, StorageError
from forewarn.models.history import History, write_table
from support.histories import DAY_S, START_S, stamps, write_disks, write_rows

GPU = "gpu_temperature_celsius"


def telemetry(path: Path, columns: Mapping[str, object], name: str = "a") -> Path:
    base = {"time": [START_S, START_S + 60], "node": ["n", "n"], "device": ["n/gpu0", "n/gpu0"]}
    return write_rows(path / "telemetry" / f"{name}.parquet", {**base, **columns})


def test_a_folder_that_is_none_says_what_it_should_hold(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="telemetry"):
        History(tmp_path / "missing")
    with pytest.raises(InputError, match="holds none of"):
        History(tmp_path)


def test_facts_of_a_whole_history(tmp_path: Path) -> None:
    history = History(write_disks(tmp_path, drives=8, days=20, failing=2))
    assert set(history.metrics) == {
        "disk_pending_sectors",
        "disk_reallocated_sectors",
        "disk_power_on_hours",
    }
    assert history.span == (START_S, START_S + 19 * DAY_S)
    assert history.interval_s == DAY_S
    assert history.device_count == 8
    assert history.rows == pq.read_metadata(tmp_path / "telemetry" / "part-0.parquet").num_rows
    assert history.models_of()["n0/disk0"] == "MODEL0"
    assert not history.simulated


def test_columns_we_do_not_know_are_passed_over_and_files_may_differ(tmp_path: Path) -> None:
    telemetry(tmp_path, {GPU: [50, 51], "site_specific": ["x", "y"]})
    telemetry(tmp_path, {"gpu_power_watts": [300.0, None]}, "b")
    history = History(tmp_path)
    assert set(history.metrics) == {GPU, "gpu_power_watts"}
    (piece,) = list(history.slices(60.0))
    assert len(piece.times) == 4
    at = piece.metrics.index("gpu_power_watts")
    assert int(np.isnan(piece.values[:, at]).sum()) == 3


@pytest.mark.parametrize("unit", ["s", "ms", "us", "ns"])
def test_times_of_any_unit_mean_the_same(tmp_path: Path, unit: str) -> None:
    time = (
        pa.array([1_700_000_000, 1_700_000_060], pa.int64()).cast(pa.timestamp("s")).cast(pa.timestamp(unit))
    )
    table = pa.table({"time": time, "node": ["n", "n"], "device": ["n/gpu0", "n/gpu0"], GPU: [50.0, 51.0]})
    (tmp_path / "telemetry").mkdir()
    pq.write_table(table, tmp_path / "telemetry" / "a.parquet")
    assert History(tmp_path).span == (1_700_000_000.0, 1_700_000_060.0)


def test_slices_follow_each_other_and_lose_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forewarn.models.history.ROWS_AT_ONCE", 40)
    history = History(write_disks(tmp_path, drives=10, days=30, failing=3))
    pieces = list(history.slices(DAY_S))
    assert len(pieces) > 3
    for before, after in itertools.pairwise(pieces):
        assert before.end == after.start
    for piece in pieces:
        assert piece.start % DAY_S == 0
        assert ((piece.times >= piece.start) & (piece.times < piece.end)).all()
    assert sum(len(p.times) for p in pieces) == history.rows


@pytest.mark.parametrize("missing", ["time", "node", "device"])
def test_a_missing_key_column_is_named(tmp_path: Path, missing: str) -> None:
    columns: dict[str, object] = {"time": [START_S], "node": ["n"], "device": ["n/gpu0"], GPU: [50.0]}
    del columns[missing]
    write_rows(tmp_path / "telemetry" / "a.parquet", columns)
    with pytest.raises(InputError, match=rf"a\.parquet: has no column '{missing}'"):
        _ = History(tmp_path).metrics


def test_a_metric_that_is_no_number_is_named(tmp_path: Path) -> None:
    telemetry(tmp_path, {GPU: ["hot", "cold"]})
    with pytest.raises(InputError, match=GPU):
        _ = History(tmp_path).metrics


def test_a_file_that_is_no_parquet_is_named(tmp_path: Path) -> None:
    telemetry(tmp_path, {GPU: [50.0, 51.0]})
    (tmp_path / "telemetry" / "b.parquet").write_bytes(b"not parquet")
    with pytest.raises(InputError, match=r"b\.parquet"):
        _ = History(tmp_path).metrics
    (tmp_path / "failures.parquet").write_bytes(b"PAR1 torn")
    with pytest.raises(InputError, match=r"failures\.parquet"):
        _ = History(tmp_path).failures


def test_small_tables_are_ordered_and_repeats_dropped(tmp_path: Path) -> None:
    write_rows(
        tmp_path / "failures.parquet",
        {
            "time": [START_S + 9, START_S, START_S],
            "node": ["n"] * 3,
            "device": ["n/gpu1", "n/gpu0", "n/gpu0"],
        },
    )
    failures = History(tmp_path).failures
    assert failures["device"].tolist() == ["n/gpu0", "n/gpu1"]
    assert failures["cause"].tolist() == ["unknown", "unknown"]


def test_an_empty_time_is_an_error(tmp_path: Path) -> None:
    table = pa.table(
        {"time": pa.array([None], pa.timestamp("us", "UTC")), "node": ["n"], "device": ["n/gpu0"]}
    )
    pq.write_table(table, tmp_path / "failures.parquet")
    with pytest.raises(InputError, match="'time' is empty in 1 rows"):
        _ = History(tmp_path).failures


def test_codes_of_events_are_text_whatever_the_column_is(tmp_path: Path) -> None:
    write_rows(
        tmp_path / "events.parquet",
        {
            "time": [START_S, START_S + 1],
            "node": ["n", "n"],
            "device": ["n", "n"],
            "kind": ["xid", "x"],
            "code": [79.0, None],
        },
    )
    assert History(tmp_path).events["code"].tolist() == ["79", ""]


def test_times_given_as_text_are_read(tmp_path: Path) -> None:
    table = pd.DataFrame({"time": ["2023-11-14T22:13:20Z"], "node": ["n"], "device": ["n/gpu0"]})
    table.to_parquet(tmp_path / "failures.parquet")
    assert History(tmp_path).failures["time"].tolist() == [1_700_000_000.0]


def test_what_a_simulator_wrote_says_so(tmp_path: Path) -> None:
    keys = {"time": stamps([START_S]), "node": ["n"], "device": ["n/gpu0"], GPU: [50.0]}
    write_table(
        tmp_path / "telemetry" / "a.parquet", pa.Table.from_pandas(pd.DataFrame(keys)), simulated=True
    )
    assert History(tmp_path).simulated


def test_writing_where_nothing_can_be_written_is_a_storage_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="file"):
        write_table(tmp_path / "file" / "a.parquet", pa.table({"a": [1]}), simulated=False)
