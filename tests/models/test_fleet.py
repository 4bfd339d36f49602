"""The fleet as the service drives it: batches in, risk and reasons out, the same after a restart."""

from __future__ import annotations

import math
from pathlib import Path

import lightgbm
import numpy as np
import pytest

from forewarn.collectors.base import Device, Event
from forewarn.collectors.errors import InputError, StorageError
from forewarn.models import registry
from forewarn.models.features import HORIZONS_S, feature_names, monotone_constraints
from forewarn.models.fleet import Fleet, Reading, RiskTable
from forewarn.models.registry import Calibration, Manifest, ModelFile, RiskModel

START = 1_700_000_000.0
METRICS = [
    "gpu_temperature_celsius",
    "gpu_power_watts",
    "gpu_ecc_dram_corrected_total",
    "gpu_row_remap_pending",
    "gpu_row_remap_corrected_total",
]
SHARED = Path(__file__).resolve().parents[2].parent / "shared"


@pytest.fixture(scope="module")
def gpu_model(tmp_path_factory: pytest.TempPathFactory) -> RiskModel:
    """A model that learned that corrected errors come before failure; enough to see reasons."""
    names = feature_names("gpu")
    rng = np.random.default_rng(0)
    x = rng.exponential(1.0, size=(4000, len(names))).astype(np.float32)
    x[:, names.index("temperature.node_excess_1h")] = rng.normal(size=4000)
    errors = x[:, names.index("ecc_dram_corrected.increase_1h")]
    y = (errors + rng.normal(scale=0.3, size=4000) > 3).astype(int)
    settings = {
        "objective": "binary",
        "verbose": -1,
        "num_leaves": 7,
        "num_threads": 1,
        "monotone_constraints": monotone_constraints("gpu"),
    }
    text = lightgbm.train(settings, lightgbm.Dataset(x, y), 15).model_to_string()
    path = tmp_path_factory.mktemp("model") / "gpu"
    curve = Calibration([0.0, 1.0], [0.0, 1.0])
    models = [ModelFile(h, "", "", curve) for h in HORIZONS_S["gpu"]]
    registry.save(
        path, Manifest("gpu", list(names), models, simulated=True), dict.fromkeys(HORIZONS_S["gpu"], text)
    )
    return registry.load(path)


def devices_of(node: str) -> list[str]:
    return [f"{node}/gpu{i}" for i in range(8)]


def feed(fleet: Fleet, minutes: int, node: str = "n0", bad: int | None = None, start: int = 0) -> float:
    """Minutes of telemetry of one node; GPU `bad` has more corrected errors each minute."""
    for i in range(start, start + minutes):
        values = np.tile(np.array([55.0, 400.0, 3.0, 0.0, 0.0]), (8, 1))
        if bad is not None:
            values[bad, 2] += i * i / 4
            values[bad, 4] = 2.0
        time = START + 60 * i
        fleet.apply_batch(node, [Reading(time, devices_of(node), METRICS, values)])
    return START + 60 * (start + minutes)


def risk_of(table: RiskTable, device: str) -> list[float]:
    found: list[float] = table.risk[table.devices.index(device)].tolist()
    return found


def test_growing_errors_raise_the_risk_with_reasons(gpu_model: RiskModel) -> None:
    fleet = Fleet({"gpu": gpu_model})
    now = feed(fleet, 90, bad=3)
    table = fleet.score(now)["gpu"]
    assert risk_of(table, "n0/gpu3")[1] > 10 * risk_of(table, "n0/gpu2")[1]
    reasons = fleet.explain("n0/gpu3", now, 3600)
    assert reasons[0].feature.startswith("ecc_dram_corrected")
    assert "corrected DRAM errors in" in reasons[0].text and "none on its neighbours" in reasons[0].text
    assert reasons[0].since is not None and START < reasons[0].since < now
    assert reasons[0].evidence["node_median"] == 0
    assert reasons[0].contribution > 0
    assert (
        fleet.explain("n0/gpu2", now, 3600) == [] or fleet.explain("n0/gpu2", now, 3600)[0].contribution < 1
    )


def test_a_fatal_event_acts_before_the_next_cycle(gpu_model: RiskModel) -> None:
    fleet = Fleet({"gpu": gpu_model})
    now = feed(fleet, 10)
    event = Event(
        "n0/gpu5", "xid", "79", "critical", "GPU has fallen off the bus", time=now, action="RESTART_BM"
    )
    hits = fleet.apply_batch("n0", [], [event])
    assert [(h.device, h.rule, h.fatal) for h in hits] == [("n0/gpu5", "xid_79", True)]
    # The same event again, and another of its kind while it holds: nothing new.
    assert fleet.apply_batch("n0", [], [event]) == []
    later = Event("n0/gpu5", "xid", "79", "critical", "", time=now + 60)
    assert fleet.apply_batch("n0", [], [later]) == []
    tables = fleet.score(now + 61)
    assert min(risk_of(tables["gpu"], "n0/gpu5")) >= 0.99
    assert max(risk_of(tables["gpu"], "n0/gpu4")) < 0.5
    assert tables["node"].devices == ["n0"]
    first = fleet.explain("n0/gpu5", now + 61, 900)[0]
    assert first.feature == "rule.xid_79" and "power-cycle" in first.text and math.isinf(first.contribution)
    assert fleet.active_hits("n0/gpu5", now + 61)[0].time == now


def test_rules_end_by_return_replacement_clearing_and_time(gpu_model: RiskModel) -> None:
    def lost(fleet: Fleet, now: float) -> None:
        fleet.apply_batch("n0", [], [Event("n0/gpu5", "gpu_lost", "lost", "critical", "", time=now)])

    fleet = Fleet({"gpu": gpu_model})
    fleet.apply_batch("n0", [], [], [Device("n0/gpu5", "gpu", "H100", "GPU-a")])
    now = feed(fleet, 5)
    lost(fleet, now)
    fleet.apply_batch("n0", [], [Event("n0/gpu5", "gpu_returned", "returned", "info", "", time=now + 5)])
    assert fleet.active_hits("n0/gpu5", now + 6) == []
    lost(fleet, now + 10)
    fleet.describe(Device("n0/gpu5", "gpu", "H100", "GPU-b"), now + 20)
    assert fleet.active_hits("n0/gpu5", now + 21) == []
    lost(fleet, now + 30)
    fleet.clear("n0/gpu5")
    assert fleet.active_hits("n0/gpu5", now + 31) == []
    feed(fleet, 1, start=6)
    lost(fleet, now + 70)
    fleet.score(now + 71)
    assert fleet.active_hits("n0/gpu5", now + 71)
    # Silent ever since: it is still lost. It ends when the GPU reports again.
    assert fleet.active_hits("n0/gpu5", now + 3 * 86_400)
    feed(fleet, 2, start=3 * 1440)
    fleet.score(START + 60 * (3 * 1440 + 2))
    assert fleet.active_hits("n0/gpu5", START + 60 * (3 * 1440 + 2)) == []


@pytest.mark.parametrize("time", [-5.0, 1e300, 2e11])
def test_a_stamp_that_is_no_time_costs_nothing_else(time: float) -> None:
    fleet = Fleet({})
    values = np.tile(np.array([55.0, 400.0, 3.0, 0.0, 0.0]), (8, 1))
    good, bad = (Reading(t, devices_of("n0"), METRICS, values) for t in (START, time))
    hits = fleet.apply_batch(
        "n0",
        [bad, good],
        [Event("n0/gpu1", "xid", "79", "critical", "", time=t) for t in (time, START + 1)],
    )
    assert [h.time for h in hits] == [START + 1]
    assert fleet.score(START + 5)["gpu"].devices == devices_of("n0")


def test_a_reading_rule_holds_as_long_as_the_reading(gpu_model: RiskModel) -> None:
    fleet = Fleet({"gpu": gpu_model})
    now = feed(fleet, 5)
    values = np.tile(np.array([55.0, 400.0, 3.0, 0.0, 0.0]), (8, 1))
    values[2, 3] = 1
    fleet.apply_batch("n0", [Reading(now, devices_of("n0"), METRICS, values)])
    before = fleet.score(now)["gpu"]
    hits = fleet.active_hits("n0/gpu2", now)
    assert [h.rule for h in hits] == ["row_remap_pending"] and hits[0].time == now
    assert risk_of(before, "n0/gpu2")[2] >= 0.15
    fleet.score(now + 30)
    assert fleet.active_hits("n0/gpu2", now + 30)[0].time == now
    values[2, 3] = 0
    fleet.apply_batch("n0", [Reading(now + 60, devices_of("n0"), METRICS, values)])
    fleet.score(now + 60)
    assert fleet.active_hits("n0/gpu2", now + 60) == []


def test_rules_never_lower(gpu_model: RiskModel) -> None:
    fleet = Fleet({"gpu": gpu_model})
    now = feed(fleet, 90, bad=3)
    fleet.apply_batch("n0", [], [Event("n0/gpu3", "xid", "63", "warning", "", time=now)])
    table = fleet.score(now)["gpu"]
    assert (table.risk >= table.model_risk).all() and (table.risk >= table.rule_risk).all()
    assert table.rule_risk[table.devices.index("n0/gpu3")].max() > 0


def test_without_a_model_the_population_rate_and_the_rules_speak() -> None:
    fleet = Fleet({})
    now = feed(fleet, 3)
    metrics = ["disk_pending_sectors", "disk_power_on_hours"]
    fleet.apply_batch(
        "n0", [Reading(now, ["n0/sda", "n0/sdb"], metrics, np.array([[9.0, 100.0], [0.0, 100.0]]))]
    )
    tables = fleet.score(now)
    assert 0 < risk_of(tables["gpu"], "n0/gpu0")[2] < 0.001
    assert risk_of(tables["disk"], "n0/sda")[2] > 5 * risk_of(tables["disk"], "n0/sdb")[2]
    assert "sectors wait" in fleet.explain("n0/sda", now, 30 * 86_400)[0].text


def test_one_sweep_may_hold_devices_of_every_kind() -> None:
    fleet = Fleet({})
    nan = math.nan
    values = np.array([[50.0, nan, nan], [nan, 30.0, nan], [nan, nan, 5.0], [nan, nan, nan]])
    metrics = ["gpu_temperature_celsius", "disk_temperature_celsius", "agent_spool_batches"]
    fleet.apply_batch("n0", [Reading(START, ["n0/gpu0", "n0/9c6f", "n0", "n0/mlx5_0"], metrics, values)])
    tables = fleet.score(START)
    assert {k: t.devices for k, t in tables.items()} == {
        "gpu": ["n0/gpu0"],
        "disk": ["n0/9c6f"],
        "node": ["n0"],
    }
    assert fleet.latest("n0/9c6f") == {"disk_temperature_celsius": (30.0, START)}
    assert fleet.kind_of("n0/mlx5_0") == "nic"


def test_trouble_of_a_port_is_borne_by_its_node() -> None:
    fleet = Fleet({})
    feed(fleet, 2)
    hits = fleet.apply_batch(
        "n0", [], [Event("n0/mlx5_0", "mlx5", "health", "critical", "", time=START + 100)]
    )
    assert [h.device for h in hits] == ["n0"] and hits[0].evidence["device"] == "n0/mlx5_0"
    assert min(risk_of(fleet.score(START + 120)["node"], "n0")) >= 0.8


def test_bulk_history_equals_live_batches(gpu_model: RiskModel) -> None:
    live, bulk = Fleet({"gpu": gpu_model}), Fleet({"gpu": gpu_model})
    rng = np.random.default_rng(2)
    times, devices, rows = [], [], []
    for i in range(200):
        values = rng.uniform(0, 80, (8, 5)).round(1)
        live.apply_batch("n0", [Reading(START + 60 * i, devices_of("n0"), METRICS, values)])
        times += [START + 60 * i] * 8
        devices += devices_of("n0")
        rows.append(values)
    codes = np.array([devices_of("n0").index(d) for d in devices])
    bulk.apply_bulk(np.array(times), devices_of("n0"), METRICS, np.concatenate(rows), codes)
    now = START + 60 * 200
    a, b = live.score(now)["gpu"], bulk.score(now)["gpu"]
    assert a.devices == b.devices and a.risk.tobytes() == b.risk.tobytes()


def test_state_survives_a_restart(tmp_path: Path, gpu_model: RiskModel) -> None:
    fleet = Fleet({"gpu": gpu_model})
    fleet.describe(Device("n0/gpu1", "gpu", "H100", "GPU-x", labels={"installed": str(START - 86_400)}))
    now = feed(fleet, 60, bad=3)
    fleet.apply_batch("n0", [], [Event("n0/gpu5", "xid", "95", "critical", "", time=now)])
    fleet.score(now)
    fleet.save(tmp_path / "state")
    loaded = Fleet.load(tmp_path / "state", {"gpu": gpu_model})
    for one in (fleet, loaded):
        feed(one, 30, bad=3, start=60)
    a, b = fleet.score(now + 1800), loaded.score(now + 1800)
    assert {k: t.risk.tobytes() for k, t in a.items()} == {k: t.risk.tobytes() for k, t in b.items()}
    assert loaded.devices() == fleet.devices()
    assert loaded.explain("n0/gpu5", now + 1800, 900) == fleet.explain("n0/gpu5", now + 1800, 900)
    assert loaded.explain("n0/gpu3", now + 1800, 900) == fleet.explain("n0/gpu3", now + 1800, 900)
    (tmp_path / "state" / "fleet.state").write_bytes(b"\0" * 40)
    with pytest.raises(StorageError, match=r"fleet\.state"):
        Fleet.load(tmp_path / "state", {})


def test_wrong_clock_is_shifted_by_the_caller() -> None:
    ahead, right = Fleet({}), Fleet({})
    values = np.tile(np.array([55.0, 400.0, 3.0, 0.0, 0.0]), (8, 1))
    for i in range(5):
        right.apply_batch("n0", [Reading(START + 60 * i, devices_of("n0"), METRICS, values)])
        ahead.apply_batch(
            "n0", [Reading(START + 3600 + 60 * i, devices_of("n0"), METRICS, values)], shift_s=-3600.0
        )
    right.score(START + 300)
    ahead.score(START + 300)
    assert ahead.latest("n0/gpu0") == right.latest("n0/gpu0")


def test_charts_from_the_buckets() -> None:
    fleet = Fleet({})
    now = feed(fleet, 300, bad=3)
    fleet.score(now)
    times, values = fleet.series("n0/gpu3", "gpu_temperature_celsius")
    assert (np.diff(times) > 0).all() and len(times) > 30 and set(values.tolist()) == {55.0}
    # i * i / 4 errors by minute i: i / 2 a minute, 30 i an hour.
    times, rates = fleet.series("n0/gpu3", "gpu_ecc_dram_corrected_total")
    expected = 30 * (times - START) / 60
    assert np.abs(rates[5:-1] / expected[5:-1] - 1).max() < 0.2
    assert len(fleet.series("n0/gpu3", "no_such_metric")[0]) == 0


def test_events_need_a_time_and_models_their_kind(gpu_model: RiskModel) -> None:
    with pytest.raises(InputError, match=r"events\.time"):
        Fleet({}).apply_batch("n0", [], [Event("n0/gpu0", "xid", "79", "critical", "")])
    with pytest.raises(InputError, match="kind 'gpu' was given for 'disk'"):
        Fleet({"disk": gpu_model})
    with pytest.raises(InputError, match="kind 'toaster'"):
        Fleet({"toaster": None})


@pytest.mark.skipif(not (SHARED / "data" / "h100-telemetry").is_dir(), reason="real telemetry is not here")
def test_real_healthy_h100s_raise_no_rule() -> None:
    import pyarrow.parquet as pq

    fleet = Fleet({})
    for part in sorted((SHARED / "data" / "h100-telemetry" / "telemetry").glob("*.parquet")):
        frame = pq.read_table(part).to_pandas()
        metrics = [c for c in frame.columns if c.startswith("gpu_")]
        times = frame["time"].astype("int64").to_numpy() / (1e9 if "ns" in str(frame["time"].dtype) else 1e6)
        fleet.apply_bulk(times, frame["device"].tolist(), metrics, frame[metrics].to_numpy(np.float64))
        end = float(times.max())
        for now in np.linspace(float(times.min()), end + 60, 20):
            table = fleet.score(float(now))["gpu"]
            assert (table.rule_risk == 0).all()
        assert len(table.devices) >= 8
