"""Back-test: the alerts and risks that serving would have given, as files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest

from forewarn.collectors.errors import StorageError
from forewarn.models import registry
from forewarn.models.backtest import ALERT_SCHEMA, SCORE_SCHEMA, Result, backtest, write_alerts
from forewarn.models.features import HORIZONS_S
from forewarn.models.history import History
from forewarn.models.registry import RiskModel
from forewarn.models.training import train_to
from support.histories import DAY_S, START_S, stamps, write_disks, write_rows


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> RiskModel:
    folder = tmp_path_factory.mktemp("trained")
    train_to(folder / "disk", [History(write_disks(folder / "h"))], "disk")
    return registry.load(folder / "disk")


@pytest.fixture(scope="module")
def unseen(tmp_path_factory: pytest.TempPathFactory) -> History:
    return History(write_disks(tmp_path_factory.mktemp("unseen"), seed=77, every_days=3))


@pytest.fixture(scope="module")
def replayed(
    model: RiskModel, unseen: History, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Result, pd.DataFrame]:
    scores = tmp_path_factory.mktemp("out") / "deep" / "scores.parquet"
    result = backtest(unseen, {"disk": model}, scores=scores)
    assert pq.read_schema(scores).equals(SCORE_SCHEMA)
    return result, pd.read_parquet(scores)


def test_every_drive_has_a_risk_at_each_horizon_on_each_day_it_was_read(
    replayed: tuple[Result, pd.DataFrame], unseen: History
) -> None:
    scores = replayed[1].astype({"device": str})
    read = pd.read_parquet(unseen.path / "telemetry", columns=["time", "device"])
    assert len(scores) == 3 * len(read)
    assert len(scores.merge(read, on=["time", "device"])) == len(scores)
    assert set(scores["horizon"]) == set(HORIZONS_S["disk"])
    assert scores["risk"].between(0, 1).all()
    wide = scores.pivot_table(index=["time", "device"], columns="horizon", values="risk")
    assert (np.diff(wide.to_numpy(), axis=1) >= 0).all()


def test_failing_drives_are_reported_before_they_fail(
    replayed: tuple[Result, pd.DataFrame], unseen: History
) -> None:
    result = replayed[0]
    failed = dict(zip(unseen.failures["device"], unseen.failures["time"], strict=True))
    foreseen = {a.device for a in result.alerts if failed.get(a.device, 0.0) - a.time > DAY_S}
    false = [a for a in result.alerts if a.device not in failed]
    assert len(foreseen) > len(failed) / 2
    assert len(false) <= 3
    assert all(a.reason and 0 < a.risk <= 1 and a.horizon in HORIZONS_S["disk"] for a in result.alerts)
    assert result.device_days == pytest.approx(3.0 * len(replayed[1]) / 3)


def test_a_replay_repeats_itself(
    model: RiskModel, unseen: History, replayed: tuple[Result, pd.DataFrame]
) -> None:
    assert backtest(History(unseen.path), {"disk": model}).alerts == replayed[0].alerts


def test_the_future_changes_nothing(
    model: RiskModel, unseen: History, replayed: tuple[Result, pd.DataFrame], tmp_path: Path
) -> None:
    cut = START_S + 30 * DAY_S
    table = pd.read_parquet(unseen.path / "telemetry")
    later = table["time"] > stamps([cut])[0]
    table.loc[later, "disk_pending_sectors"] = 500.0
    write_rows(tmp_path / "h" / "telemetry" / "a.parquet", {str(k): v for k, v in table.items()})
    (tmp_path / "h" / "devices.parquet").write_bytes((unseen.path / "devices.parquet").read_bytes())
    scores = tmp_path / "scores.parquet"
    backtest(History(tmp_path / "h"), {"disk": model}, scores=scores)
    before = [
        t[t["time"] <= stamps([cut])[0]].astype({"device": str}).sort_values(["time", "device", "horizon"])
        for t in (pd.read_parquet(scores), replayed[1])
    ]
    assert before[0]["risk"].to_numpy().tobytes() == before[1]["risk"].to_numpy().tobytes()


def test_without_a_model_the_base_rate_stands_and_nothing_is_reported(unseen: History) -> None:
    assert backtest(unseen, {}).alerts == []


def gpus(path: Path) -> History:
    times = START_S + np.arange(120) * 60.0
    columns = {
        "time": times,
        "node": ["n"] * 120,
        "device": ["n/gpu0"] * 120,
        "gpu_power_watts": [300.0] * 120,
    }
    write_rows(path / "telemetry" / "a.parquet", columns)
    write_rows(
        path / "events.parquet",
        {"time": [START_S + 3_000], "node": ["n"], "device": ["n/gpu0"], "kind": ["xid"], "code": ["79"]},
    )
    return History(path)


def test_what_has_happened_is_a_detection_and_no_forecast(tmp_path: Path) -> None:
    history = gpus(tmp_path)
    result = backtest(history, {})
    assert result.alerts == []
    assert [(a.time, a.device) for a in result.detections] == [(START_S + 3_000, "n/gpu0")]
    assert backtest(history, {}, detections=True).alerts == result.detections


def test_alerts_are_written_as_promised_also_when_there_are_none(
    replayed: tuple[Result, pd.DataFrame], tmp_path: Path
) -> None:
    write_alerts(tmp_path / "none.parquet", [])
    write_alerts(tmp_path / "some.parquet", replayed[0].alerts)
    for name, count in (("none", 0), ("some", len(replayed[0].alerts))):
        table = pq.read_table(tmp_path / f"{name}.parquet")
        assert table.schema.equals(ALERT_SCHEMA)
        assert table.num_rows == count


def test_a_place_that_cannot_be_written_is_an_error(unseen: History, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="file"):
        write_alerts(tmp_path / "file" / "a.parquet", [])
    with pytest.raises(StorageError, match="file"):
        backtest(unseen, {}, scores=tmp_path / "file" / "s.parquet")
