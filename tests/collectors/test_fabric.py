"""InfiniBand, RoCE and network interfaces on a tree of /sys that stands in tests/cases/sysfs."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forewarn.collectors.base import Collector, Event, Reading
from forewarn.collectors.catalog import EVENTS, METRICS
from forewarn.collectors.clock import ManualClock
from forewarn.collectors.errors import UnavailableError
from forewarn.collectors.fabric import FabricCollector
from forewarn.collectors.registry import Setup, create

CASE = Path(__file__).parents[1] / "cases" / "sysfs" / "fabric.txt"
PORT = "class/infiniband/mlx5_0/ports/1"
NET = "class/net/ens1f0np0"


def _unpack(case: Path, sys: Path) -> None:
    for line in case.read_text().splitlines():
        if line.startswith("#"):
            continue
        name, linked, target = line.partition(" -> ")
        if linked:
            (sys / name).parent.mkdir(parents=True, exist_ok=True)
            (sys / name).symlink_to(target)
            continue
        name, _, content = line.partition(" = ")
        (sys / name).parent.mkdir(parents=True, exist_ok=True)
        (sys / name).write_text(content.replace("\\n", "\n") + "\n")


@pytest.fixture
def sys(tmp_path: Path) -> Path:
    _unpack(CASE, tmp_path / "sys")
    return tmp_path / "sys"


def _collector(sys: Path, **options: object) -> FabricCollector:
    return FabricCollector(Setup(ManualClock(), sys.parent), **options)  # type: ignore[arg-type]  # options of the test


def _of(reading: Reading, device: str) -> dict[str, float]:
    return {s.metric: s.value for s in reading.samples if s.device == device}


def _short(events: list[Event]) -> list[tuple[str, str, str, int]]:
    return [(e.kind, e.device, e.severity, e.count) for e in events]


def test_an_infiniband_port(sys: Path) -> None:
    reading = _collector(sys).collect()
    assert _of(reading, "mlx5_0") == {
        "fabric_port_up": 1,
        "fabric_port_state": 4,
        "fabric_port_physical_state": 5,
        "fabric_port_rate_bytes_per_second": 50e9,
        "fabric_symbol_errors_total": 3,
        "fabric_link_recoveries_total": 0,
        "fabric_link_downs_total": 2,
        "fabric_receive_errors_total": 1,
        "fabric_transmit_bytes_total": 4000,
        "fabric_receive_bytes_total": 1e13,
        "fabric_transmit_wait_ticks_total": 77,
        "fabric_out_of_sequence_total": 12,
    }
    device = next(d for d in reading.devices if d.device == "mlx5_0")
    assert (device.kind, device.model, device.serial) == (
        "nic",
        "MT4129 MT_0000000838",
        "a088:c203:00ab:cdef",
    )
    assert device.pci == "0000:18:00.0"
    assert device.labels == {"link_layer": "InfiniBand", "firmware": "28.39.1002"}


def test_a_second_port_that_is_down_has_no_rate(sys: Path) -> None:
    got = _of(_collector(sys).collect(), "mlx5_0.2")
    assert got == {"fabric_port_up": 0, "fabric_port_state": 1, "fabric_port_physical_state": 3}


def test_a_roce_port(sys: Path) -> None:
    reading = _collector(sys).collect()
    assert _of(reading, "mlx5_bond_0")["fabric_congestion_notifications_sent_total"] == 40
    assert next(d for d in reading.devices if d.device == "mlx5_bond_0").labels["link_layer"] == "Ethernet"


def test_a_network_interface(sys: Path) -> None:
    reading = _collector(sys).collect()
    assert _of(reading, "ens1f0np0") == {
        "fabric_interface_up": 1,
        "fabric_interface_speed_bytes_per_second": 12.5e9,
        "fabric_interface_carrier_changes_total": 3,
        "fabric_interface_receive_errors_total": 5,
        "fabric_interface_transmit_errors_total": 0,
        "fabric_interface_receive_drops_total": 9,
        "fabric_interface_crc_errors_total": 4,
        "fabric_interface_receive_bytes_total": 1000,
        "fabric_interface_transmit_bytes_total": 2000,
    }
    device = next(d for d in reading.devices if d.device == "ens1f0np0")
    assert (device.serial, device.pci) == ("a0:88:c2:00:00:01", "0000:9c:00.0")


def test_only_physical_devices_that_are_switched_on(sys: Path) -> None:
    names = {d.device for d in _collector(sys).collect().devices}
    assert names == {"mlx5_0", "mlx5_0.2", "mlx5_bond_0", "ens1f0np0"}
    assert "mlx5_9" in {d.device for d in _collector(sys, virtual_functions=True).collect().devices}


def test_devices_can_be_left_out(sys: Path) -> None:
    names = {d.device for d in _collector(sys, exclude=["mlx5_0", "ens1f0np0"]).collect().devices}
    assert names == {"mlx5_bond_0"}


def test_every_sample_is_in_the_catalog(sys: Path) -> None:
    for sample in _collector(sys).collect().samples:
        assert METRICS[sample.metric].kind == "nic"


# --- links that change ---


def test_what_is_down_from_the_start_is_no_event(sys: Path) -> None:
    (sys / PORT / "state").write_text("1: DOWN\n")
    collector = _collector(sys)
    assert collector.collect().events == []
    assert collector.collect().events == []


def test_a_port_that_goes_down_and_comes_back(sys: Path) -> None:
    collector = _collector(sys)
    collector.collect()
    (sys / PORT / "state").write_text("1: DOWN\n")
    (sys / PORT / "counters/link_downed").write_text("3\n")
    events = collector.collect().events
    assert _short(events) == [("link_down", "mlx5_0", "error", 1)]
    assert events[0].kind in EVENTS
    assert collector.collect().events == []
    (sys / PORT / "state").write_text("4: ACTIVE\n")
    assert _short(collector.collect().events) == [("link_up", "mlx5_0", "info", 1)]
    assert collector.collect().events == []


def test_flaps_between_two_polls_are_counted(sys: Path) -> None:
    collector = _collector(sys)
    collector.collect()
    (sys / PORT / "counters/link_downed").write_text("5\n")
    (sys / NET / "carrier_down_count").write_text("2\n")
    assert _short(collector.collect().events) == [
        ("link_down", "mlx5_0", "warning", 3),
        ("link_down", "ens1f0np0", "warning", 1),
    ]
    assert collector.collect().events == []


def test_flaps_of_an_older_kernel_are_counted_by_carrier_changes(sys: Path) -> None:
    (sys / NET / "carrier_down_count").unlink()
    collector = _collector(sys)
    collector.collect()
    (sys / NET / "carrier_changes").write_text("7\n")
    assert _short(collector.collect().events) == [("link_down", "ens1f0np0", "warning", 2)]


def test_counters_that_start_anew_are_no_flap(sys: Path) -> None:
    collector = _collector(sys)
    collector.collect()
    (sys / PORT / "counters/link_downed").write_text("0\n")
    assert collector.collect().events == []


def test_an_interface_without_carrier(sys: Path) -> None:
    collector = _collector(sys)
    collector.collect()
    (sys / NET / "carrier").write_text("0\n")
    reading = collector.collect()
    assert _short(reading.events) == [("link_down", "ens1f0np0", "error", 1)]
    assert _of(reading, "ens1f0np0")["fabric_interface_up"] == 0
    assert "fabric_interface_speed_bytes_per_second" not in _of(reading, "ens1f0np0")


def test_an_interface_that_is_switched_off_is_no_fault(sys: Path) -> None:
    collector = _collector(sys)
    collector.collect()
    (sys / NET / "flags").write_text("0x1002\n")
    assert collector.collect().events == []
    (sys / NET / "flags").write_text("0x1003\n")
    assert collector.collect().events == []


def test_an_adapter_that_vanishes_and_returns(sys: Path, tmp_path: Path) -> None:
    collector = _collector(sys)
    collector.collect()
    adapter, away = sys / "class/infiniband/mlx5_0", tmp_path / "away"
    shutil.move(adapter, away)
    events = collector.collect().events
    assert _short(events) == [("link_down", "mlx5_0", "error", 1)]
    assert "gone" in events[0].message
    assert collector.collect().events == []
    shutil.move(away, adapter)
    assert _short(collector.collect().events) == [("link_up", "mlx5_0", "info", 1)]


# --- the rest ---


def test_a_host_without_such_devices_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "sys/class").mkdir(parents=True)
    reading = _collector(tmp_path / "sys").collect()
    assert (reading.samples, reading.errors) == ([], [])


def test_without_sys_it_says_so(tmp_path: Path) -> None:
    with pytest.raises(UnavailableError, match="/sys"):
        _collector(tmp_path / "sys").collect()


def test_is_made_by_name(sys: Path) -> None:
    made = create("fabric", {"exclude": "mlx5_0, mlx5_bond_0"}, Setup(ManualClock(), sys.parent))
    assert isinstance(made, Collector)
    assert {d.device for d in made.collect().devices} == {"ens1f0np0"}
    made.close()


_FILES = sorted(
    line.partition(" = ")[0]
    for line in CASE.read_text().splitlines()
    if " = " in line and not line.startswith("#")
)


@settings(max_examples=80, deadline=None)
@given(
    name=st.sampled_from(_FILES),
    content=st.one_of(
        st.text(max_size=60), st.sampled_from(["-1", "1e400", "18446744073709551615", "4:", ": ", "0x"])
    ),
)
def test_any_content_of_any_file_is_read(
    tmp_path_factory: pytest.TempPathFactory, name: str, content: str
) -> None:
    sys = tmp_path_factory.mktemp("fabric") / "sys"
    _unpack(CASE, sys)
    collector = _collector(sys)
    collector.collect()
    (sys / name).write_text(content, encoding="utf-8")
    for sample in collector.collect().samples:
        assert sample.metric in METRICS
        assert sample.value == sample.value
