"""Alerts held against failures, by hand and through a replay."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from forewarn.collectors.errors import InputError
from forewarn.models.backtest import Alert
from forewarn.models.checkpointing import Costs
from forewarn.models.evaluation import (
    DAY_S,
    Failure,
    bootstrap,
    evaluate,
    history_alerts,
    judge,
    known_until,
    random_alerts,
    time_saved,
)
from forewarn.models.evaluation_report import IN_SAMPLE, SIMULATED, markdown, write_html
from forewarn.models.evaluation_scores import Scored, labels_of, quality_of, read_scores, reliability
from forewarn.models.history import History, write_table

START = 1_700_000_000.0 // DAY_S * DAY_S
END = START + 10 * DAY_S


def alert(hours: float, device: str = "n/gpu0", horizon: int = 3600) -> Alert:
    return Alert(START + hours * 3600, device, horizon, 0.5, "a reason")


def failure(
    hours: float, device: str = "n/gpu0", cause: str = "nvlink", sign_hours: float = np.nan
) -> Failure:
    return Failure(START + hours * 3600, device, cause, sign_hours * 3600)


@pytest.mark.parametrize(
    ("at_hours", "sign_hours", "truth", "foreseen", "late"),
    [
        (28.0, np.nan, 1, 1, 0),
        (29.9, np.nan, 1, 0, 1),
        (5.0, np.nan, 0, 0, 0),
        (5.0, 26.0, 1, 1, 0),
        (31.0, np.nan, 0, 0, 0),
    ],
    ids=["in time", "late", "too early", "precursor under way", "after it"],
)
def test_an_alert_is_held_against_the_next_failure(
    at_hours: float, sign_hours: float, truth: int, foreseen: int, late: int
) -> None:
    verdict = judge([alert(at_hours)], [failure(30, sign_hours=sign_hours)], {}, END, 100.0)
    tally = verdict.tally()
    assert verdict.truth.tolist() == [truth]
    assert (tally.foreseen, tally.late, tally.false_alarms) == (foreseen, late, 1 - truth)
    assert tally.false_per_1000_days == pytest.approx(10.0 * (1 - truth))


def test_the_earliest_alert_gives_the_lead_and_repeats_are_true_too() -> None:
    tally = judge([alert(28), alert(29.95), alert(20)], [failure(30)], {}, END, 10.0).tally()
    assert tally.leads_s == (10 * 3600.0,)
    assert (tally.true_alerts, tally.foreseen, tally.precision) == (3, 1, 1.0)


def test_an_alert_at_the_end_of_what_is_known_is_undecided() -> None:
    known = {"n/gpu1": START + 50 * 3600}
    verdict = judge([alert(238), alert(48, "n/gpu1"), alert(40, "n/gpu1")], [], known, END, 10.0)
    assert verdict.truth.tolist() == [-1, -1, 0]


def test_by_cause_counts_its_failures_alone() -> None:
    verdict = judge([alert(28)], [failure(30, sign_hours=3), failure(50, "n/gpu1", "hbm", 3)], {}, END, 10.0)
    assert (verdict.tally("hbm").recall, verdict.tally("nvlink").recall) == (0.0, 1.0)
    assert verdict.tally().long_recall == 0.5


def test_intervals_hold_the_measure_and_repeat_with_the_seed() -> None:
    failures = [failure(30, f"n{i}/gpu0") for i in range(40)]
    alerts = [alert(28, f"n{i}/gpu0") for i in range(20)] + [alert(10, f"m{i}/gpu0") for i in range(5)]
    verdict = judge(alerts, failures, {}, END, 1000.0)
    found = bootstrap(verdict, 100, seed=3)
    assert found == bootstrap(verdict, 100, seed=3)
    for name, value in (("recall", 0.5), ("precision", 0.8), ("false_alarms_per_1000_device_days", 5.0)):
        low, high = found[name]
        assert low < value < high


def test_random_alerts_hit_as_often_as_chance_has_it() -> None:
    found = random_alerts([failure(48)], 1, 100.0, START)
    assert found["recall"] == pytest.approx((DAY_S - 900) / (100 * DAY_S))
    assert found["precision"] == pytest.approx(0.01)


def test_history_alerts_go_to_those_that_failed_before() -> None:
    failures = [failure(30), failure(31), failure(60, "n/gpu1")]
    alerts = history_alerts(failures, START, END, 4)
    assert {a.device for a in alerts} == {"n/gpu0"}
    assert all(a.time >= failures[0].time for a in alerts)


def test_protection_saves_time_only_where_alerts_come_before_failures() -> None:
    failures = [failure(h, f"n{h}/gpu0") for h in (10, 20, 30, 40)]
    costs = Costs(save_s=60.0, recovery_s=480.0)
    blind = time_saved(judge([], failures, {}, END, 10.0), START, END, costs)
    seeing = judge(
        [alert(f.time / 3600 - START / 3600 - 1, f.device) for f in failures], failures, {}, END, 10.0
    )
    assert blind["saved_by_protection"] == pytest.approx(0.0)
    assert 0 < time_saved(seeing, START, END, costs)["saved_by_protection"] < 1


def test_labels_leave_out_what_nobody_can_know() -> None:
    code = np.array([0, 0, 0, 0, 1], np.int32)
    time = np.array([0.0, 9_000.0, 10_500.0, 99_000.0, 49_000.0])
    failed, usable = labels_of(code, time, ["a", "b"], {"a": [10_000.0]}, {"b": 50_000.0}, 100_000.0, 3600)
    assert failed.tolist() == [False, True, False, False, False]
    assert usable.tolist() == [True, True, False, False, False]


def test_perfect_risks_are_ranked_and_calibrated_perfectly() -> None:
    time = np.tile(np.arange(0.0, 100_000.0, 1000.0), 2)
    code = np.repeat(np.array([0, 1], np.int32), 100)
    risk = ((code == 0) & (time < 50_000) & (time >= 46_400)).astype(float)
    scored = Scored(["a", "b"], 2.0, {3600: (code, time, risk)})
    found = quality_of(scored, 3600, {"a": [50_000.0]}, {}, 100_000.0, seed=1)
    assert (found.pr_auc, found.brier, found.calibration_error) == (1.0, 0.0, 0.0)
    assert 0 < found.base_rate < 0.05


def test_reliability_bins_hold_every_row() -> None:
    risk = np.array([0.0, 0.05, 0.06, 1.0])
    pairs = reliability(risk, np.array([False, True, False, True]))
    assert [n for _, _, n in pairs] == [1, 2, 1]
    assert pairs[1][:2] == pytest.approx((0.055, 0.5))


def test_a_file_that_holds_no_scores_is_named(tmp_path: Path) -> None:
    path = tmp_path / "scores.parquet"
    path.write_bytes(b"no parquet")
    with pytest.raises(InputError, match=r"scores\.parquet: is no file of scores"):
        read_scores(path, lambda device: True, 0.0)


def test_a_place_that_got_another_part_goes_on(tmp_path: Path) -> None:
    days = pa.array([int((START + d * DAY_S) * 1e6) for d in (0, 2, 0)]).cast(pa.timestamp("us", tz="UTC"))
    gone = [int((START + d * DAY_S) * 1e6) if d else None for d in (2, 0, 3)]
    devices = {
        "device": ["n/gpu0", "n/gpu0", "n/gpu1"],
        "serial": ["a", "b", "c"],
        "installed": days,
        "removed": pa.array(gone, pa.int64()).cast(pa.timestamp("us", tz="UTC")),
    }
    write_table(tmp_path / "devices.parquet", pa.table(devices), simulated=True)
    assert known_until(History(tmp_path), END) == {"n/gpu1": START + 3 * DAY_S}


@pytest.fixture
def history(tmp_path: Path) -> History:
    """Three GPUs for two days; one has a row remapping failure four hours before it is lost."""
    folder = tmp_path / "fleet"
    times = np.arange(START, START + 2 * DAY_S, 600.0)
    stamps = pa.array((np.repeat(times, 3) * 1e6).astype("int64")).cast(pa.timestamp("us", tz="UTC"))
    devices = ["n/gpu0", "n/gpu1", "n/gpu2"] * len(times)
    worn = [float(d == "n/gpu0" and t >= START + 26 * 3600) for t in times for d in devices[:3]]
    telemetry = {
        "time": stamps,
        "node": ["n"] * len(devices),
        "device": devices,
        "gpu_temperature_celsius": [60.0] * len(devices),
        "gpu_row_remap_failure": worn,
    }
    write_table(folder / "telemetry" / "part.parquet", pa.table(telemetry), simulated=True)
    moment = pa.array([int((START + 30 * 3600) * 1e6)]).cast(pa.timestamp("us", tz="UTC"))
    failures = {"time": moment, "node": ["n"], "device": ["n/gpu0"], "cause": ["hbm_uncorrectable"]}
    write_table(folder / "failures.parquet", pa.table(failures), simulated=True)
    return History(folder)


def test_a_replay_is_judged_and_reported(history: History, tmp_path: Path) -> None:
    found = evaluate(history, {}, "gpu")
    assert found.simulated and not found.in_sample
    assert found.devices == 3
    assert found.overall.device_days == pytest.approx(6.0, rel=0.02)
    assert set(found.by_cause) == {"hbm_uncorrectable"}
    assert found.overall.false_alarms == 0
    assert json.loads(json.dumps(found.as_dict(), allow_nan=False))["overall"]["failures"] == 1
    text = markdown(found)
    assert SIMULATED in text and IN_SAMPLE not in text and "rules alone" in text
    report = tmp_path / "out" / "report.html"
    write_html(report, found)
    assert SIMULATED in report.read_text() and "data:image/png;base64," in report.read_text()


def test_nothing_after_the_end_is_said(history: History) -> None:
    with pytest.raises(InputError, match="nothing comes after"):
        evaluate(history, {}, "gpu", after=END)


def test_a_kind_that_is_not_there_is_said(history: History) -> None:
    with pytest.raises(InputError, match="no readings of kind disk"):
        evaluate(history, {}, "disk")
