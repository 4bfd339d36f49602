"""The batch simulator: physics, rates, labels, and the history it writes."""

from __future__ import annotations

import hashlib
from dataclasses import fields
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from numpy.typing import NDArray

from forewarn.collectors.catalog import METRICS
from forewarn.collectors.errors import StorageError
from forewarn.daemon.cli import main
from forewarn.models import simulator
from forewarn.models.history import History
from forewarn.models.simulator import Settings, plan, simulate_node
from forewarn.models.simulator_mechanisms import (
    GROWTHS,
    MECHANISMS,
    Failure,
    Mechanism,
    course,
    draw_failures,
)
from forewarn.models.simulator_profiles import PROFILES, Physics, draw

SMALL = Settings(nodes=4, gpus_per_node=4, days=4, interval_s=120, seed=7, failures_scale=2000)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("simulated") / "history"
    simulator.write(SMALL, out)
    return out


def digest(folder: Path) -> str:
    return hashlib.sha256(b"".join(p.read_bytes() for p in sorted(folder.rglob("*.parquet")))).hexdigest()


def test_same_seed_same_history(folder: Path, tmp_path: Path) -> None:
    simulator.write(SMALL, tmp_path / "again")
    assert digest(tmp_path / "again") == digest(folder)


def test_other_seed_other_history(folder: Path, tmp_path: Path) -> None:
    simulator.write(Settings(**{**vars(SMALL), "seed": 8}), tmp_path / "other")
    assert digest(tmp_path / "other") != digest(folder)


def test_nodes_do_not_depend_on_how_many_are_made_at_once(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(simulator, "VALUES_AT_ONCE", 1)
    simulator.write(SMALL, tmp_path / "single")

    def rows(path: Path) -> pd.DataFrame:
        table = pd.concat([pd.read_parquet(p) for p in sorted((path / "telemetry").glob("*.parquet"))])
        return table.sort_values(["device", "time"], kind="stable").reset_index(drop=True)

    pd.testing.assert_frame_equal(rows(folder), rows(tmp_path / "single"))


def test_history_opens_and_says_that_it_is_simulated(folder: Path) -> None:
    history = History(folder)
    assert history.simulated
    assert history.has_failures
    assert history.interval_s == pytest.approx(120, abs=3)
    assert set(history.metrics) <= set(METRICS)
    assert history.devices["simulated"].all()
    assert set(history.events["device"]) | set(history.failures["device"]) <= set(history.devices["device"])
    assert {"gpu", "node", "nic"} == set(history.devices["kind"])
    start, end = SMALL.start, SMALL.start + SMALL.days * 86_400
    for table in (history.events, history.failures):
        assert table["time"].between(start, end).all()
    assert len(history.failures) > 20


def test_precursors_begin_before_their_failures(folder: Path) -> None:
    failures = History(folder).failures
    starts = pd.to_datetime(failures["precursor_start"], utc=True)
    seconds = starts.astype("datetime64[us, UTC]").astype("int64") / 1e6
    assert (starts.notna() == failures["precursor"]).all()
    assert failures["precursor"].any()
    known = failures["precursor"].to_numpy(bool)
    assert (seconds[known] <= failures["time"][known]).all()


def test_a_replaced_board_has_a_new_serial_from_its_repair(folder: Path) -> None:
    history = History(folder)
    swapped = history.failures[history.failures["replaced"]]
    devices = history.devices
    assert len(swapped)
    repaired = (
        pd.to_datetime(swapped["repaired"], utc=True).astype("datetime64[us, UTC]").astype("int64") / 1e6
    )
    for device, moment in zip(swapped["device"], repaired, strict=True):
        if moment >= SMALL.start + SMALL.days * 86_400:
            continue
        places = devices[devices["device"] == device]
        assert places["serial"].nunique() == len(places) > 1
        assert np.isclose(places["removed"], moment, atol=1e-3).any()
        assert np.isclose(places["installed"], moment, atol=1e-3).any()


@pytest.mark.parametrize("cause", ["hbm_uncorrectable", "nvlink", "gpu_off_bus", "thermal_interface"])
def test_without_the_failure_the_node_is_the_same_until_the_precursor(cause: str) -> None:
    """What a precursor adds lies between its start and the failure: nothing shows before."""
    families = {
        "hbm_uncorrectable": ("gpu_ecc_dram_corrected", "gpu_row_remap_c"),
        "nvlink": ("gpu_nvlink_crc", "gpu_nvlink_replay", "gpu_nvlink_recovery"),
        "gpu_off_bus": ("gpu_pcie_replay", "gpu_pcie_correctable"),
        "thermal_interface": (),
    }
    fleet = plan(Settings(nodes=1, gpus_per_node=4, days=6, seed=3, failures_scale=0))
    mechanism = next(m for m in MECHANISMS if m.cause == cause)
    end = fleet.end
    failure = draw_one(mechanism, time=end - 86_400.0, start=end - 3 * 86_400.0)
    plain = simulate_node(fleet, 0)
    fleet.failures[0].append(failure)
    broken = simulate_node(fleet, 0)
    before = broken.times < failure.start
    during = ~before & (broken.times < failure.time)
    assert end - 3 * 86_400.0 <= failure.start < failure.time
    family = families[cause]
    if family:
        plain_rise, broken_rise = (
            np.sum([_rise(v[1]) for k, (_, v) in d.metrics.items() if k.startswith(family)], axis=0)
            for d in (plain, broken)
        )
        assert np.array_equal(plain_rise[before], broken_rise[before])
        assert broken_rise[during].sum() >= plain_rise[during].sum() + 3
        assert broken_rise[during][0] > 0
    else:
        heat = [d.metrics["gpu_temperature_celsius"][1] for d in (plain, broken)]
        assert np.abs(heat[0][1][before] - heat[1][1][before]).mean() < 1.0
        last = broken.times > failure.time - 6 * 3600
        last &= during
        load = plain.metrics["gpu_power_watts"][1][1] > 300
        if (last & load).any():
            assert (heat[1][1] - heat[0][1])[last & load].mean() > 0.3


def _rise(total: NDArray[np.floating]) -> NDArray[np.floating]:
    return np.diff(total, prepend=total[0])


def draw_one(mechanism: Mechanism, time: float, start: float) -> Failure:
    return Failure(time, 0, 1, mechanism, start, "exponential", time + 4 * 3600, False)


def test_temperature_follows_power_with_a_lag() -> None:
    fleet = plan(Settings(nodes=1, gpus_per_node=2, days=2, interval_s=10, seed=5, failures_scale=0))
    data = simulate_node(fleet, 0)
    power = data.metrics["gpu_power_watts"][1][0].astype(float)
    heat = data.metrics["gpu_temperature_celsius"][1][0].astype(float)
    assert power.std() > 50
    rises = np.diff(power)
    changes = [
        np.corrcoef(rises[: len(rises) - lag], np.diff(heat)[lag:] if lag else np.diff(heat))[0, 1]
        for lag in range(0, 7)
    ]
    assert np.corrcoef(power, heat)[0, 1] > 0.85
    # Right after a jump of power the heat is still on its way for several steps.
    assert sum(c > 0.02 for c in changes[1:]) >= 3


def test_counters_fall_only_at_resets() -> None:
    settings = Settings(nodes=3, gpus_per_node=4, days=5, seed=11, failures_scale=200)
    fleet = plan(settings)
    for n in range(settings.nodes):
        data = simulate_node(fleet, n)
        allowed = {f.repaired for f in fleet.failures[n] if f.replaced}
        for name, (_, values) in data.metrics.items():
            if METRICS[name].type != "counter" or not name.startswith(("gpu_ecc_dram", "gpu_row_remap")):
                continue
            for row in np.nan_to_num(values):
                falls = data.times[1:][np.diff(row) < 0]
                assert all(any(abs(t - r) <= 2 * 60 for r in allowed) for t in falls), name


def test_what_a_board_does_not_report_is_absent() -> None:
    def metrics(profile: str) -> set[str]:
        return set(simulate_node(plan(Settings(nodes=1, days=0.1, profile=profile)), 0).metrics)

    assert not any(m.startswith("gpu_nvlink") for m in metrics("l40s"))
    assert "gpu_memory_temperature_celsius" not in metrics("l40s")
    assert "gpu_temperature_margin_celsius" in metrics("h100") - metrics("a100")
    assert "gpu_nvlink_symbol_errors_total" in metrics("b200")
    assert "gpu_nvlink_crc_flit_errors_total" not in metrics("b200")


def test_rates_are_those_of_the_table() -> None:
    nodes, gpus, days, scale = 500, 8, 30.0, 3.0
    noisy = np.zeros((nodes, gpus), bool)
    weights = np.random.default_rng(1).lognormal(0, 1, (nodes, gpus))
    found = draw_failures(
        nodes, gpus, 0.0, days * 86_400, scale, (1, 1, 1, 1), 1.0, noisy, weights, np.random.default_rng(2)
    )
    hours = nodes * gpus * days * 24
    for mechanism in MECHANISMS:
        own = [f for f in found if f.mechanism is mechanism]
        expected = mechanism.rate_per_gpu_hour * scale * hours
        groups = float(np.mean(np.square(mechanism.group)) / np.mean(mechanism.group))
        assert abs(len(own) - expected) < 4.5 * np.sqrt(expected * groups) + 1, mechanism.cause
        share = np.mean([f.visible for f in own])
        error = 4.5 * np.sqrt(max(mechanism.visible * (1 - mechanism.visible), 1e-9) * groups / len(own))
        assert abs(share - mechanism.visible) <= error + 1e-9, mechanism.cause


@pytest.mark.parametrize("growth", GROWTHS)
@pytest.mark.parametrize("n", [1, 2, 50, 5000])
def test_courses_have_mean_one(growth: str, n: int) -> None:
    y = course(growth, n, np.random.default_rng(n))
    assert len(y) == n
    assert (y >= 0).all()
    assert y.mean() == pytest.approx(1.0)


def test_random_profiles_differ_and_every_profile_runs(tmp_path: Path) -> None:
    drawn = [draw("random", seed) for seed in range(12)]
    assert len({p.physics.interval_s for p in drawn}) > 6
    assert all(10 <= p.physics.interval_s <= 300 for p in drawn)
    assert len({p.physics.unsupported for p in drawn}) > 3
    for profile in PROFILES:
        settings = Settings(nodes=4, gpus_per_node=2, days=0.5, seed=2, profile=profile, failures_scale=2000)
        summary = simulator.write(settings, tmp_path / profile)
        assert summary.simulated
        assert summary.rows > 0
        assert History(tmp_path / profile).failures["cause"].isin([m.cause for m in MECHANISMS]).all()


def test_boards_without_nvlink_have_no_nvlink_failures() -> None:
    settings = Settings(nodes=20, days=20, profile="l40s", failures_scale=500)
    causes = {f.mechanism.cause for fs in plan(settings).failures for f in fs}
    assert "hbm_uncorrectable" in causes
    assert "nvlink" not in causes


def test_command_says_that_it_is_synthetic(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = str(tmp_path / "h")
    words = [
        "simulate",
        out,
        "--nodes",
        "2",
        "--gpus-per-node",
        "2",
        "--days",
        "0.2",
        "--start",
        "2025-03-01",
    ]
    assert main(words) == 0
    told = capsys.readouterr()
    assert "SYNTHETIC" in told.out
    assert "nothing about skill in the field" in told.out
    assert told.err == ""
    assert main(words) == 1
    assert "not empty" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--nodes", "0"], "--nodes 0"),
        (["--days", "nan"], "--days nan"),
        (["--profile", "v100"], "must be one of"),
        (["--start", "soon"], "--start soon"),
        (["--interval-s", "0.1"], "--interval-s"),
        (["--seed", "-1"], "--seed"),
    ],
)
def test_wrong_arguments_are_named(
    words: list[str], told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["simulate", str(tmp_path / "x"), *words]) == 2
    assert told in capsys.readouterr().err
    assert not (tmp_path / "x").exists()


def test_a_folder_in_use_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "kept").write_text("mine")
    with pytest.raises(StorageError, match="not empty"):
        simulator.write(Settings(nodes=1, days=0.1), tmp_path)
    assert (tmp_path / "kept").read_text() == "mine"


def test_every_parameter_is_documented() -> None:
    text = (Path(__file__).parents[2] / "docs" / "SIMULATOR.md").read_text()
    for item in fields(Physics):
        assert f"| `{item.name}` |" in text, item.name
    for mechanism in MECHANISMS:
        row = next(line for line in text.splitlines() if line.startswith(f"| `{mechanism.cause}` |"))
        cells = [c.strip().split(" ")[0] for c in row.split("|")[2:4]]
        assert float(cells[0]) == mechanism.rate_per_gpu_hour, mechanism.cause
        assert float(cells[1]) == mechanism.visible, mechanism.cause
