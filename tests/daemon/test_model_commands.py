"""train, backtest and label from the command line, on the exchange format alone."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from forewarn.daemon.cli import main
from support.histories import START_S, write_disks, write_rows


def test_train_on_one_history_and_backtest_on_another(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    card = tmp_path / "card.md"
    card.write_text("# card")
    write_disks(tmp_path / "a")
    write_disks(tmp_path / "b", seed=9)
    model = tmp_path / "model"
    arguments = ["--history", str(tmp_path / "a"), "--out", str(model), "--card", str(card), "--credit", "me"]
    assert main(["train", *arguments, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["kind"] == "disk"
    assert report["simulated"] is False
    assert report["parameters"]["false_alarm_budget_per_1000_device_days"] == 0.1
    assert (model / "card.md").read_text() == "# card"
    alerts, scores = tmp_path / "alerts.parquet", tmp_path / "scores.parquet"
    arguments = ["--history", str(tmp_path / "b"), "--model", str(model), "--alerts", str(alerts)]
    assert main(["backtest", *arguments, "--scores", str(scores), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["alerts"] == len(pd.read_parquet(alerts)) > 5
    assert len(pd.read_parquet(scores)) == 3 * len(pd.read_parquet(tmp_path / "b" / "telemetry"))


def test_label_writes_the_failures_it_derives_and_keeps_what_is_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    times = START_S + np.arange(10) * 60.0
    columns = {"time": times, "node": ["n"] * 10, "device": ["n/gpu0"] * 10, "gpu_power_watts": [300.0] * 10}
    write_rows(tmp_path / "telemetry" / "a.parquet", columns)
    write_rows(
        tmp_path / "events.parquet",
        {"time": [START_S], "node": ["n"], "device": ["n/gpu0"], "kind": ["xid"], "code": ["79"]},
    )
    assert main(["label", "--history", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["by_cause"] == {"gpu_off_bus": 1}
    assert pd.read_parquet(tmp_path / "failures.parquet")["device"].tolist() == ["n/gpu0"]
    assert main(["label", "--history", str(tmp_path)]) == 1
    assert "--force" in capsys.readouterr().err
    assert main(["label", "--history", str(tmp_path), "--force"]) == 0


@pytest.mark.parametrize("command", ["train", "backtest"])
def test_a_history_that_is_none_is_named(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    more = ["--out", str(tmp_path / "m")] if command == "train" else ["--alerts", str(tmp_path / "a.parquet")]
    assert main([command, "--history", str(tmp_path / "nowhere"), *more]) == 1
    assert "nowhere" in capsys.readouterr().err


def test_a_card_that_is_missing_is_named_before_anything_is_trained(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_disks(tmp_path / "a", drives=4, days=3, failing=0)
    arguments = [
        "--history",
        str(tmp_path / "a"),
        "--out",
        str(tmp_path / "m"),
        "--card",
        str(tmp_path / "no.md"),
    ]
    assert main(["train", *arguments]) == 1
    assert "no.md" in capsys.readouterr().err
