"""A history played moment by moment: nothing lost, nothing early."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from forewarn.models.fleet import Fleet
from forewarn.models.history import History
from forewarn.models.replay import LIVE_STEP_S, replay, spacing_of, step_of
from support.histories import DAY_S, START_S, write_disks, write_rows


def test_disks_are_scored_on_the_days_they_are_read(tmp_path: Path) -> None:
    history = History(write_disks(tmp_path, drives=6, days=29, failing=1, every_days=7))
    assert step_of(history, "disk") == DAY_S
    assert spacing_of(history, "disk") == 7 * DAY_S
    days = [(m.now - START_S) / DAY_S for m in replay(history, Fleet({}), DAY_S) if m.fresh]
    assert days == [0, 7, 14, 21, 28]


def test_gpus_are_scored_every_five_minutes(tmp_path: Path) -> None:
    times = START_S + np.arange(20) * 60.0
    columns = {"time": times, "node": ["n"] * 20, "device": ["n/gpu0"] * 20, "gpu_power_watts": [300.0] * 20}
    write_rows(tmp_path / "telemetry" / "a.parquet", columns)
    assert step_of(History(tmp_path), "gpu") == LIVE_STEP_S
    assert spacing_of(History(tmp_path), "gpu") == LIVE_STEP_S


@pytest.mark.parametrize("rows_at_once", [7, 50, 10_000])
@pytest.mark.parametrize("shift_s", [0.0, 45_000.0])
def test_every_reading_is_fresh_once_however_the_history_is_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows_at_once: int, shift_s: float
) -> None:
    monkeypatch.setattr("forewarn.models.history.ROWS_AT_ONCE", rows_at_once)
    history = History(write_disks(tmp_path, drives=5, days=20, failing=1, start_s=START_S + shift_s))
    fleet = Fleet({})
    fresh = [(m.now, d) for m in replay(history, fleet, DAY_S) for d in m.fresh]
    assert len(fresh) == len(set(fresh)) == history.rows
    fleet.engines["disk"].flush(history.span[1])
    assert fleet.engines["disk"].counts()["queued"] == 0


def test_a_moment_knows_what_was_read_up_to_it_and_nothing_later(tmp_path: Path) -> None:
    history = History(write_disks(tmp_path, drives=4, days=30, failing=1))
    fleet = Fleet({})
    for moment in replay(history, fleet, DAY_S):
        fleet.score(moment.now)
        for device in moment.fresh:
            hours, stamp = fleet.latest(device)["disk_power_on_hours"]
            assert stamp <= moment.now
            assert hours > 0


def test_events_come_in_their_turn_and_their_rules_are_told(tmp_path: Path) -> None:
    times = START_S + np.arange(60) * 60.0
    columns = {"time": times, "node": ["n"] * 60, "device": ["n/gpu0"] * 60, "gpu_power_watts": [300.0] * 60}
    write_rows(tmp_path / "telemetry" / "a.parquet", columns)
    write_rows(
        tmp_path / "events.parquet",
        {"time": [START_S + 1_000], "node": ["n"], "device": ["n/gpu0"], "kind": ["xid"], "code": ["79"]},
    )
    hits = [(m.now - START_S, h.device) for m in replay(History(tmp_path), Fleet({}), 300.0) for h in m.hits]
    assert hits == [(1_200.0, "n/gpu0")]


def test_capacity_comes_from_the_list_of_devices_when_telemetry_lacks_it(tmp_path: Path) -> None:
    fleet = Fleet({})
    for moment in replay(History(write_disks(tmp_path, drives=4, days=3, failing=0)), fleet, DAY_S):
        fleet.score(moment.now)
    assert fleet.latest("n0/disk0")["disk_capacity_bytes"][0] == 3e12
    assert fleet.latest("n1/disk1")["disk_capacity_bytes"][0] == 4e12


def test_a_removed_device_is_gone_from_then_on(tmp_path: Path) -> None:
    write_disks(tmp_path, drives=4, days=20, failing=0)
    write_rows(
        tmp_path / "devices.parquet",
        {
            "device": ["n0/disk0"],
            "node": ["n0"],
            "kind": ["disk"],
            "model": ["M"],
            "serial": ["S"],
            "removed": [START_S + 19 * DAY_S],
        },
    )
    fleet = Fleet({})
    there = {}
    for moment in replay(History(tmp_path), fleet, DAY_S):
        there[(moment.now - START_S) / DAY_S] = "n0/disk0" in fleet.score(moment.now)["disk"].devices
    assert there[18] and not there[19]
