"""The feature engine: same bits however a stream is cut, nothing from the future, nothing corrupted by bad stamps."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from forewarn.collectors.base import Device
from forewarn.collectors.errors import InputError, StorageError
from forewarn.models.features import (
    HORIZONS_S,
    FeatureEngine,
    FeatureTable,
    feature_names,
    monotone_constraints,
)

START = 1_700_000_000.0
DEVICES = ["n0/gpu0", "n0/gpu1", "n0/gpu2", "n1/gpu0"]
METRICS = [
    "gpu_temperature_celsius",
    "gpu_power_watts",
    "gpu_ecc_dram_corrected_total",
    "gpu_clock_event_reasons",
]
COUNTER = "gpu_ecc_dram_corrected_total"
SETTINGS = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@dataclass(frozen=True)
class Sweep:
    time: float
    devices: tuple[str, ...]
    metrics: tuple[str, ...]
    values: tuple[tuple[float, ...], ...]


def put(engine: FeatureEngine, sweep: Sweep) -> None:
    engine.apply(sweep.time, sweep.devices, sweep.metrics, np.array(sweep.values, float))


def put_bulk(engine: FeatureEngine, sweeps: list[Sweep]) -> None:
    """All of it in one call, over the union of the metrics."""
    times, devices, rows = [], [], []
    for sweep in sweeps:
        for device, values in zip(sweep.devices, sweep.values, strict=True):
            given = dict(zip(sweep.metrics, values, strict=True))
            times.append(sweep.time)
            devices.append(device)
            rows.append([given.get(m, math.nan) for m in METRICS])
    if times:
        engine.apply_bulk(np.array(times), engine.rows(devices), METRICS, np.array(rows))


def read(engine: FeatureEngine, now: float) -> dict[str, list[float]]:
    """Features by device as bit patterns, so that NaN equals NaN and -0 does not equal 0."""
    table = engine.features(now)
    return {d: v.view(np.uint32).tolist() for d, v in zip(table.devices, table.values, strict=True)}


def value(table: FeatureTable, device: str, name: str) -> float:
    return float(table.values[table.devices.index(device), table.names.index(name)])


def counted(table: FeatureTable, device: str, name: str) -> float:
    return math.expm1(value(table, device, name))


cells = st.one_of(st.just(math.nan), st.integers(0, 200).map(float), st.floats(0, 1e6, allow_nan=False))


@st.composite
def sweeps(draw: st.DrawFn) -> list[Sweep]:
    """Sweeps at any stamps, in any order, repeats among them."""
    found = []
    for _ in range(draw(st.integers(1, 25))):
        devices = tuple(draw(st.lists(st.sampled_from(DEVICES), min_size=1, max_size=4, unique=True)))
        metrics = tuple(draw(st.lists(st.sampled_from(METRICS), min_size=1, max_size=4, unique=True)))
        time = START + draw(st.one_of(st.integers(0, 4000), st.integers(0, 9 * 86_400)))
        values = tuple(tuple(draw(cells) for _ in metrics) for _ in devices)
        found.append(Sweep(time, devices, metrics, values))
    return found


@SETTINGS
@given(sweeps(), st.data())
def test_streaming_equals_batch_equals_replay(found: list[Sweep], data: st.DataObject) -> None:
    end = max(s.time for s in found) + 5
    halfway = START + data.draw(st.integers(0, 9 * 86_400))
    early, late = [s for s in found if s.time <= halfway], [s for s in found if s.time > halfway]

    stream = FeatureEngine("gpu")
    for sweep in found:
        put(stream, sweep)
    replay = FeatureEngine("gpu")
    put_bulk(replay, found)
    stepped = FeatureEngine("gpu")
    for sweep in early:
        put(stepped, sweep)
    read(stepped, halfway)
    cut = data.draw(st.integers(0, len(late)))
    put_bulk(stepped, late[:cut])
    for sweep in late[cut:]:
        put(stepped, sweep)
    # Sorting within the whole stream is what taking in does; flushing halfway must not change it.
    expected = read(stream, max(end, halfway))
    assert read(replay, max(end, halfway)) == expected
    assert read(stepped, max(end, halfway)) == expected


@SETTINGS
@given(sweeps(), sweeps(), st.integers(0, 9 * 86_400))
def test_no_feature_sees_the_future(found: list[Sweep], others: list[Sweep], at: int) -> None:
    now = START + at
    past = [s for s in found if s.time <= now]
    plain, mutated = FeatureEngine("gpu"), FeatureEngine("gpu")
    for sweep in past + [s for s in found if s.time > now]:
        put(plain, sweep)
    for sweep in past + [s for s in others if s.time > now]:
        put(mutated, sweep)
    mutated.apply_event(now + 1, "n0/gpu0", "xid", "79")
    mutated.apply_failure(now + 1, "n0/gpu0")
    assert read(plain, now) == read(mutated, now)


@SETTINGS
@given(sweeps(), st.integers(0, 9 * 86_400), st.data())
def test_state_survives_saving_at_any_moment(
    tmp_path_factory: pytest.TempPathFactory, found: list[Sweep], at: int, data: st.DataObject
) -> None:
    path = tmp_path_factory.mktemp("state") / "gpu.state"
    engine = FeatureEngine("gpu")
    cut = data.draw(st.integers(0, len(found)))
    for sweep in found[:cut]:
        put(engine, sweep)
    engine.apply_event(START + 100, "n1/gpu0", "xid", "63")
    engine.flush(START + at)
    engine.save(path)
    loaded = FeatureEngine.load(path)
    for sweep in found[cut:]:
        put(engine, sweep)
        put(loaded, sweep)
    now = START + 10 * 86_400
    assert read(loaded, now) == read(engine, now)
    assert loaded.counts() == engine.counts()


@SETTINGS
@given(sweeps())
def test_repeats_change_nothing(found: list[Sweep]) -> None:
    once, twice = FeatureEngine("gpu"), FeatureEngine("gpu")
    now = START + 10 * 86_400
    for sweep in sorted(found, key=lambda s: s.time):
        put(once, sweep)
        put(twice, sweep)
    expected = read(once, now)
    assert read(twice, now) == expected
    for sweep in found:
        put(twice, sweep)
    assert read(twice, now) == expected
    assert twice.counts()["late"] > once.counts()["late"] or all(
        math.isnan(v) for s in found for row in s.values for v in row
    )


def counter_run(values: list[float], step_s: float = 60.0) -> tuple[FeatureEngine, float]:
    engine = FeatureEngine("gpu")
    for i, v in enumerate(values):
        engine.apply(START + i * step_s, ["n0/gpu0"], [COUNTER], np.array([[v]]))
    return engine, START + (len(values) - 1) * step_s


@pytest.mark.parametrize(
    ("values", "increase"),
    [
        ([500, 500, 500], 0),  # the first sight of a counter is no increase
        ([500, 503, 510], 10),
        ([500, 510, 0, 2, 5], 15),  # a reset, confirmed: what came before, and after it
        ([500, 510, 3, 511, 512], 12),  # one stray reading
        ([500, 510, 3, 511, 4, 512, 5], 12),  # two clocks interleaved
        ([500, math.nan, 505], 5),
        ([500, math.inf, 505], 5),
    ],
)
def test_counter_increase(values: list[float], increase: float) -> None:
    engine, now = counter_run(values)
    assert counted(engine.features(now), "n0/gpu0", "ecc_dram_corrected.increase_1h") == pytest.approx(
        increase
    )


def test_windows_hold_what_happened_in_them() -> None:
    """One error a minute for eight days, against the counts that follow from it."""
    minutes = 8 * 1440
    engine, now = counter_run([float(i) for i in range(minutes)])
    table = engine.features(now)
    for window, expected, width in [
        ("15m", 15, 1),
        ("1h", 60, 5),
        ("6h", 360, 30),
        ("24h", 1440, 30),
        ("7d", 10_080, 360),
    ]:
        got = counted(table, "n0/gpu0", f"ecc_dram_corrected.increase_{window}")
        assert expected - width - 0.01 <= got <= expected + 0.01, window
    assert value(table, "n0/gpu0", "ecc_dram_corrected.active_7d") == 1
    assert value(table, "n0/gpu0", "ecc_dram_corrected.surprise_24h") == pytest.approx(0, abs=0.1)


def test_windows_empty_when_nothing_comes() -> None:
    engine, now = counter_run([0.0, 5.0, 9.0])
    table = engine.features(now + 3 * 86_400)
    assert math.isnan(value(table, "n0/gpu0", "ecc_dram_corrected.increase_1h"))
    assert counted(table, "n0/gpu0", "ecc_dram_corrected.increase_7d") == pytest.approx(9)
    assert value(table, "n0/gpu0", "telemetry.silence") > 5


@pytest.mark.parametrize("step_s", [1.0, 10.0, 60.0, 290.0])
def test_sampling_interval_does_not_matter(step_s: float) -> None:
    """The same physics, read more or less often, gives about the same features."""
    engine = FeatureEngine("gpu")
    for i in range(int(2 * 3600 / step_s)):
        t = i * step_s
        row = [60 + t / 3600, 500.0, math.floor(t / 30), 0.0]
        engine.apply(START + t, ["n0/gpu0"], METRICS, np.array([row]))
    table = engine.features(START + 2 * 3600)
    assert counted(table, "n0/gpu0", "ecc_dram_corrected.increase_1h") == pytest.approx(120, rel=0.12)
    assert value(table, "n0/gpu0", "temperature.slope_1h") == pytest.approx(1, abs=0.15)
    assert value(table, "n0/gpu0", "temperature.change_15m_24h") == pytest.approx(0.9, abs=0.2)
    assert value(table, "n0/gpu0", "telemetry.stale_share") == 0


def test_stepped_clock_and_late_samples_leave_the_state_whole() -> None:
    straight, stepped = FeatureEngine("gpu"), FeatureEngine("gpu")
    for i in range(120):
        sweep = Sweep(START + 30 * i, ("n0/gpu0",), (COUNTER,), ((float(i),),))
        put(straight, sweep)
        put(stepped, sweep)
        if i % 10 == 9:
            stepped.flush(sweep.time)
            # An hour back, with older and with newer counts; all of it too late.
            put(stepped, Sweep(sweep.time - 3600, ("n0/gpu0",), (COUNTER,), ((float(i + 1),),)))
            put(stepped, Sweep(sweep.time - 5, ("n0/gpu0",), (COUNTER,), ((2.0,),)))
    now = START + 30 * 120
    names = feature_names("gpu")
    a, b = straight.features(now), stepped.features(now)
    for name in (
        "ecc_dram_corrected.increase_1h",
        "ecc_dram_corrected.increase_7d",
        "ecc_dram_corrected.since_last",
    ):
        assert name in names
        assert value(a, "n0/gpu0", name) == value(b, "n0/gpu0", name)
    assert stepped.counts()["late"] == 24


def test_now_never_goes_back() -> None:
    engine, now = counter_run([0.0, 1.0, 2.0])
    after = engine.features(now)
    assert engine.features(now - 500).time == after.time


def test_replaced_serial_starts_anew_and_the_place_remembers() -> None:
    engine = FeatureEngine("gpu")
    engine.describe(Device("n0/gpu0", "gpu", "H100", "GPU-1"))
    for i in range(10):
        engine.apply(START + 60 * i, ["n0/gpu0"], [COUNTER], np.array([[float(5 * i)]]))
    engine.apply_failure(START + 500, "n0/gpu0")
    before = engine.features(START + 600)
    assert counted(before, "n0/gpu0", "ecc_dram_corrected.increase_1h") == pytest.approx(45)
    assert value(before, "n0/gpu0", "history.failures") > 0
    # A sample of the new board waits already when the description comes.
    engine.apply(START + 700, ["n0/gpu0"], [COUNTER], np.array([[7.0]]))
    engine.describe(Device("n0/gpu0", "gpu", "H100", "GPU-2"), time=START + 650)
    after = engine.features(START + 710)
    assert counted(after, "n0/gpu0", "ecc_dram_corrected.increase_1h") == 0
    assert value(after, "n0/gpu0", "history.failures") == 0
    assert value(after, "n0/gpu0", "history.slot_failures") > 0
    assert engine.latest("n0/gpu0")[COUNTER] == (7.0, START + 700)


def test_nothing_tells_a_device_by_its_name() -> None:
    """Other names, nodes' names and serials, in another order: the same features."""
    renamed = {"n0/gpu0": "zz/gpu7", "n0/gpu1": "zz/gpu3", "n0/gpu2": "zz/gpu1", "n1/gpu0": "aa/gpu0"}
    rng = np.random.default_rng(4)
    plain, other = FeatureEngine("gpu"), FeatureEngine("gpu")
    for engine, name in ((plain, lambda d: d), (other, renamed.__getitem__)):
        for d in DEVICES if engine is plain else reversed(DEVICES):
            engine.describe(Device(name(d), "gpu", "H100", f"serial of {name(d)}"))
    for i in range(50):
        values = rng.uniform(0, 90, (4, 4))
        plain.apply(START + 60 * i, DEVICES, METRICS, values)
        other.apply(START + 60 * i, [renamed[d] for d in DEVICES], METRICS, values)
    a, b = read(plain, START + 3000), read(other, START + 3000)
    assert {renamed[d]: v for d, v in a.items()} == b


def test_peers_at_equal_power() -> None:
    """A GPU that is hotter than its load explains stands out; one that only works harder does not."""
    engine = FeatureEngine("gpu")
    devices = [f"n{n}/gpu{g}" for n in range(4) for g in range(8)]
    rng = np.random.default_rng(1)
    for i in range(120):
        power = rng.uniform(200, 400, len(devices))
        power[9] = 650
        temperature = 30 + 0.05 * power + np.repeat([0, 4, 8, 12], 8)
        temperature[20] += 8
        values = np.stack([temperature, power], axis=1)
        engine.apply(START + 60 * i, devices, METRICS[:2], values)
    table = engine.features(START + 7200)
    excess = table.values[:, table.names.index("temperature.node_excess_1h")]
    assert excess[20] == pytest.approx(8, abs=1)
    assert np.abs(np.delete(excess, 20)).max() < 2


def test_missed_polls_and_silence() -> None:
    engine = FeatureEngine("gpu")
    for i in range(60):
        if i in (30, 31, 32, 33):
            continue
        engine.apply(START + 60 * i, ["n0/gpu0"], ["gpu_temperature_celsius"], np.array([[50.0]]))
    table = engine.features(START + 3600)
    assert counted(table, "n0/gpu0", "telemetry.missed_polls_1h") == pytest.approx(4, abs=0.1)
    assert counted(table, "n0/gpu0", "telemetry.silence") == pytest.approx(1, abs=0.1)


def test_what_the_agent_tells_of_its_own_polls_is_a_feature() -> None:
    engine = FeatureEngine("gpu")
    names = [f"n0/gpu{i}" for i in range(4)]
    told = np.array([[50.0, 10.0, 0.0]] * 3 + [[50.0, 40.0, 3.0]])
    metrics = ["gpu_temperature_celsius", "gpu_poll_gap_seconds", "gpu_metrics_missing"]
    engine.apply(START, names, metrics, told)
    table = engine.features(START + 1)
    assert counted(table, "n0/gpu3", "telemetry.metrics_missing") == pytest.approx(3)
    gap = table.values[table.row_of["n0/gpu3"], table.column_of["telemetry.poll_gap_ratio"]]
    assert gap == pytest.approx(np.log(4))


@pytest.mark.parametrize("kind", HORIZONS_S)
def test_names_and_directions(kind: str) -> None:
    names, directions = feature_names(kind), monotone_constraints(kind)
    assert len(names) == len(directions) == len(set(names)) > 20
    assert set(directions) <= {-1, 0, 1}
    assert FeatureEngine(kind).features(START).names == names
    for forbidden in ("serial", "name", "uuid", "slot_number", "pci_address"):
        assert not any(forbidden in n.split(".") for n in names)


def test_what_is_not_ours_is_passed_over_and_what_is_wrong_is_named() -> None:
    engine = FeatureEngine("gpu")
    engine.apply(START, ["n0/gpu0"], ["disk_temperature_celsius", "no_such_metric"], np.ones((1, 2)))
    assert engine.devices() == []
    with pytest.raises(InputError, match="values: shape"):
        engine.apply(START, ["n0/gpu0"], METRICS, np.ones((2, 4)))
    with pytest.raises(InputError, match="time"):
        engine.apply(math.nan, ["n0/gpu0"], METRICS, np.ones((1, 4)))
    with pytest.raises(InputError, match="time"):
        engine.apply(-1e300, ["n0/gpu0"], METRICS, np.ones((1, 4)))
    with pytest.raises(InputError, match="times"):
        engine.apply_bulk(np.array([math.inf]), engine.rows(["n0/gpu0"]), METRICS, np.ones((1, 4)))


@pytest.mark.parametrize("damage", ["cut", "flip", "empty", "other", "missing", "version"])
def test_damaged_state_is_a_storage_error(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "gpu.state"
    engine, now = counter_run([0.0, 4.0])
    engine.features(now)
    engine.save(path)
    data = bytearray(path.read_bytes())
    if damage == "cut":
        data = data[: len(data) // 2]
    elif damage == "flip":
        data[-100] ^= 1
    elif damage == "empty":
        data = bytearray()
    elif damage == "other":
        data = bytearray(b"PK\x03\x04 not a state")
    path.write_bytes(bytes(data))
    if damage == "missing":
        path.unlink()
    if damage == "version":
        FeatureEngine("disk").save(path)
        text = path.read_bytes().replace(b'"disk"', b'"gpu" ')
        path.write_bytes(text)
    with pytest.raises(StorageError, match=r"gpu\.state"):
        FeatureEngine.load(path)


def test_state_that_cannot_be_written_is_a_storage_error(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="could not be written"):
        FeatureEngine("gpu").save(tmp_path / "no" / "gpu.state")


def test_removed_devices_leave_no_trace() -> None:
    engine = FeatureEngine("gpu")
    engine.apply(START, DEVICES, METRICS, np.full((4, 4), 50.0))
    engine.features(START)
    engine.apply(START + 10, ["n0/gpu0"], METRICS, np.full((1, 4), 60.0))
    engine.remove("n0/gpu0")
    assert "n0/gpu0" not in engine.features(START + 20).devices
    engine.apply(START + 30, ["n9/gpu0"], [COUNTER], np.array([[1000.0]]))
    table = engine.features(START + 40)
    assert counted(table, "n9/gpu0", "ecc_dram_corrected.increase_1h") == 0


def test_events_count_once_and_by_class() -> None:
    engine = FeatureEngine("gpu")
    for _ in range(2):
        engine.apply_event(START + 5, "n0/gpu0", "xid", "63", "warning")
    engine.apply_event(START + 6, "n0/gpu0", "xid", "13", "warning")
    engine.apply_event(START + 7, "n0/gpu0", "xid", "74", "critical", count=3)
    table = engine.features(START + 60)
    assert counted(table, "n0/gpu0", "xid_memory.count_1h") == pytest.approx(1)
    assert counted(table, "n0/gpu0", "xid_app.count_24h") == pytest.approx(1)
    assert counted(table, "n0/gpu0", "xid_nvlink.count_7d") == pytest.approx(3)


def test_disks_read_weekly_have_their_increases() -> None:
    engine = FeatureEngine("disk")
    for week in range(12):
        values = np.array([[10_000.0 + 168 * week, max(0.0, 5.0 * (week - 8)), math.nan]])
        engine.apply(
            START + 7 * 86_400 * week,
            ["b/disk1"],
            ["disk_power_on_hours", "disk_reallocated_sectors", "disk_pending_sectors"],
            values,
        )
    table = engine.features(START + 7 * 86_400 * 11 + 60)
    assert counted(table, "b/disk1", "reallocated.increase_30d") == pytest.approx(15)
    assert counted(table, "b/disk1", "reallocated.increase_7d") == pytest.approx(5)
    assert counted(table, "b/disk1", "reallocated.level") == pytest.approx(15)
    assert math.isnan(value(table, "b/disk1", "pending.level"))


def test_clock_at_zero_then_set_right() -> None:
    """A node that boots without a clock reports from 1970 before it reports from today."""
    engine = FeatureEngine("gpu")
    for time, count in ((5.0, 10.0), (15.0, 12.0), (START, 13.0), (START + 10, 15.0)):
        engine.apply(time, ["n0/gpu0"], [COUNTER], np.array([[count]]))
    table = engine.features(START + 20)
    assert counted(table, "n0/gpu0", "ecc_dram_corrected.increase_1h") == pytest.approx(3)
    assert counted(table, "n0/gpu0", "ecc_dram_corrected.increase_7d") == pytest.approx(3)
