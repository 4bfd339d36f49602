"""The known traps of NVML and of its Python binding, each shown and shown to be avoided."""

from __future__ import annotations

import os
import stat
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pynvml
import pytest

from forewarn.collectors.base import Reading
from forewarn.collectors.clock import ManualClock
from forewarn.collectors.errors import UnavailableError
from forewarn.collectors.nvml import NvmlCollector
from forewarn.collectors.nvml_reader import code_of, pci_address, text
from forewarn.collectors.registry import Setup
from simnvml import build
from simnvml.control import SimulatedDriver

pytestmark = pytest.mark.skipif(bool(build.missing()), reason=build.missing())


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def start(clock: ManualClock) -> Iterator[Callable[..., NvmlCollector]]:
    made: list[NvmlCollector] = []

    def make(driver: SimulatedDriver, **options: Any) -> NvmlCollector:
        collector = NvmlCollector(
            Setup(clock), library=str(driver.library), **{"call_deadline_s": 20.0, **options}
        )
        made.append(collector)
        return collector

    yield make
    for collector in made:
        collector.close()


Start = Callable[..., NvmlCollector]


def values(reading: Reading, device: str = "gpu0") -> dict[str, float]:
    return {s.metric: s.value for s in reading.samples if s.device == device and not s.labels}


def test_1_a_missing_versioned_symbol_raises_outside_of_nvml_error(tmp_path: Path, start: Start) -> None:
    assert not issubclass(pynvml.NVMLLibraryMismatchError, pynvml.NVMLError)
    assert code_of(pynvml.NVMLLibraryMismatchError("no symbol")) == 13
    driver = SimulatedDriver(
        tmp_path, without=["nvmlDeviceGetComputeRunningProcesses_v3", "nvmlDeviceGetMemoryInfo_v2"]
    )
    reading = start(driver).collect()
    got = values(reading)
    assert "gpu_processes" not in got and "gpu_temperature_celsius" in got and not reading.errors
    assert "gpu_memory_used_bytes" in got, "the older call serves"
    assert "gpu_memory_reserved_bytes" not in got


def test_1_a_missing_symbol_is_not_looked_for_again(tmp_path: Path, start: Start, clock: ManualClock) -> None:
    driver = SimulatedDriver(tmp_path, without=["nvmlDeviceGetTemperatureV"])
    collector = start(driver)
    for _ in range(3):
        assert values(collector.collect())["gpu_temperature_celsius"] == 41
        clock.advance(5000)
    assert driver.calls("nvmlDeviceGetTemperature", 0) == 3


def test_2_errors_cannot_be_compared_or_hashed_and_their_codes_are_used(tmp_path: Path, start: Start) -> None:
    error = pynvml.NVMLError(3)
    with pytest.raises(TypeError):
        hash(error)
    with pytest.raises(AttributeError):
        error.__eq__("text")
    assert code_of(error) == 3 and code_of(pynvml.NVMLError(77)) == 77
    driver = SimulatedDriver(tmp_path, 2)
    driver.fail("nvmlDeviceGetPowerUsage", 77)
    driver.fail("nvmlDeviceGetClockInfo", 999)
    reading = start(driver).collect()
    assert {e.device for e in reading.errors} == {"gpu0", "gpu1"}


def test_3_structs_carry_the_version_that_the_driver_knows(tmp_path: Path, start: Start) -> None:
    driver = SimulatedDriver(tmp_path, 2)
    driver.set(1, fabric_versions=2)
    reading = start(driver).collect()
    assert values(reading)["gpu_ecc_sram_threshold_exceeded"] == 0
    assert values(reading)["gpu_fabric_health"] == 1
    older = values(reading, "gpu1")
    assert older["gpu_fabric_state"] == 3 and "gpu_fabric_health" not in older


def test_4_texts_come_as_bytes_or_str(tmp_path: Path, start: Start) -> None:
    assert text(b"570.1") == text("570.1") == "570.1"
    labels = start(SimulatedDriver(tmp_path)).collect().devices[0].labels
    assert labels["gsp_firmware"] == "570.86.15" and labels["vbios"] == "96.00.74.00.01"


def test_5_gsp_mode_of_one_gpu_is_not_that_of_another(tmp_path: Path, start: Start) -> None:
    driver = SimulatedDriver(tmp_path, 2)
    driver.set(1, gsp_mode=0)
    reading = start(driver).collect()
    assert values(reading)["gpu_gsp_enabled"] == 1 and values(reading, "gpu1")["gpu_gsp_enabled"] == 0


def test_6_a_driver_with_few_symbols_gives_what_it_has(tmp_path: Path, start: Start) -> None:
    driver = SimulatedDriver(
        tmp_path,
        without=[
            "nvmlDeviceGetFieldValues",
            "nvmlDeviceGetMarginTemperature",
            "nvmlDeviceGetCurrentClocksEventReasons",
            "nvmlDeviceGetSramEccErrorStatus",
            "nvmlDeviceGetGpuFabricInfoV",
            "nvmlDeviceGetUnrepairableMemoryFlag_v1",
            "nvmlDeviceGetRetiredPages_v2",
            "nvmlDeviceGetGspFirmwareMode",
            "nvmlDeviceGetGspFirmwareVersion",
            "nvmlDeviceGetMigMode",
            "nvmlDeviceGetTemperatureV",
            "nvmlEventSetWait_v2",
            "nvmlEventSetCreate",
        ],
    )
    driver.set(0, pcie_replay=4, remap_uncorrected=2)
    reading = start(driver).collect()
    got = values(reading)
    assert not reading.errors and not reading.events
    assert {"gpu_temperature_celsius", "gpu_power_watts", "gpu_clock_event_reasons"} <= set(got)
    assert got["gpu_pcie_replay_total"] == 4, "the call serves where the field does not"
    assert got["gpu_row_remap_uncorrected_total"] == 2


def test_7_an_upgraded_driver_needs_another_process(tmp_path: Path, start: Start, clock: ManualClock) -> None:
    driver = SimulatedDriver(tmp_path)
    collector = start(driver)
    collector.collect()
    assert collector._child is not None
    before = collector._child.pid
    driver.upgrade("580.65.06")
    clock.advance(5)
    assert collector.collect().samples
    assert collector._child.pid != before


def test_8_the_binding_opens_by_init_with_flags(tmp_path: Path, start: Start) -> None:
    assert start(SimulatedDriver(tmp_path / "a", without=["nvmlInit_v2"])).collect().samples
    with pytest.raises(UnavailableError, match="code 13"):
        start(SimulatedDriver(tmp_path / "b", without=["nvmlInitWithFlags"])).collect()


def test_9_the_package_is_nvidia_ml_py_and_not_its_redirector() -> None:
    with (Path(__file__).parents[2] / "pyproject.toml").open("rb") as file:
        extras = tomllib.load(file)["project"]["optional-dependencies"]
    names = [r.split(">")[0].split("=")[0] for group in extras.values() for r in group]
    assert "nvidia-ml-py" in extras["agent"][0] and "pynvml" not in names


def test_10_a_call_that_hangs_is_ended_with_its_process(
    tmp_path: Path, start: Start, clock: ManualClock
) -> None:
    driver = SimulatedDriver(tmp_path)
    collector = start(driver)
    collector.collect()
    assert collector._child is not None
    pid = collector._child.pid
    driver.hang("nvmlDeviceGetTemperatureV")
    collector._call_deadline_s = 0.2
    clock.advance(5)
    collector.collect()
    clock.advance(60)
    collector.collect()
    assert not Path(f"/proc/{pid}").exists()


def test_11_used_memory_does_not_hold_what_the_driver_keeps(tmp_path: Path, start: Start) -> None:
    driver = SimulatedDriver(tmp_path)
    driver.set(0, memory_used=1000, memory_reserved=234)
    driver.set_processes(0, [11, 12, 13])
    got = values(start(driver).collect())
    assert got["gpu_memory_used_bytes"] == 1000 and got["gpu_memory_reserved_bytes"] == 234
    assert got["gpu_processes"] == 3


def test_12_no_answer_is_itself_told(tmp_path: Path, start: Start, clock: ManualClock) -> None:
    driver = SimulatedDriver(tmp_path)
    driver.slow("nvmlDeviceGetFieldValues", 3_000_000)
    reading = start(driver, call_deadline_s=0.5).collect()
    assert [(e.kind, e.code) for e in reading.events] == [("collector_silent", "nvml")]


def test_13_nvml_is_opened_once_for_many_polls(tmp_path: Path, start: Start, clock: ManualClock) -> None:
    driver = SimulatedDriver(tmp_path)
    collector = start(driver)
    for _ in range(20):
        collector.collect()
        clock.advance(700)
    assert driver.calls("nvmlInitWithFlags") == 1 and driver.calls("nvmlShutdown") == 0


def test_14_nvidia_smi_is_never_run(tmp_path: Path, start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    trap = tmp_path / "bin" / "nvidia-smi"
    trap.parent.mkdir()
    trap.write_text(f"#!/bin/sh\ntouch {tmp_path}/ran\n")
    trap.chmod(trap.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{trap.parent}{os.pathsep}{os.environ['PATH']}")
    assert start(SimulatedDriver(tmp_path / "driver")).collect().samples
    assert not (tmp_path / "ran").exists()


def test_15_an_xid_keeps_its_device_when_look_ups_fail(
    tmp_path: Path, start: Start, clock: ManualClock
) -> None:
    driver = SimulatedDriver(tmp_path, 2)
    collector = start(driver)
    collector.collect()
    for call in ("nvmlDeviceGetUUID", "nvmlDeviceGetPciInfo_v3", "nvmlDeviceGetIndex"):
        driver.fail(call, 15)
    driver.xid(1, 79)
    events = []
    for _ in range(2000):
        clock.advance(0.01)
        events = collector.collect().events
        if events:
            break
    assert [(e.device, e.pci, e.code) for e in events] == [("gpu1", "0000:0f:00", "79")]


def test_15_a_gpu_whose_uuid_cannot_be_read_is_known_by_its_address(tmp_path: Path, start: Start) -> None:
    driver = SimulatedDriver(tmp_path, 2)
    driver.fail("nvmlDeviceGetUUID", 999, slot=1)
    devices = start(driver).collect().devices
    assert [(d.device, d.serial, d.pci) for d in devices] == [
        ("gpu0", "GPU-5151fa7e-0000-4000-8000-000000000000", "0000:07:00"),
        ("gpu1", "", "0000:0f:00"),
    ]


def test_16_what_happened_while_the_agent_was_away_shows_in_the_recovery_action(
    tmp_path: Path, start: Start
) -> None:
    driver = SimulatedDriver(tmp_path)
    driver.xid(0, 95)
    driver.set_field(0, 230, 1)
    reading = start(driver).collect()
    assert values(reading)["gpu_recovery_action"] == 1
    assert [(e.kind, e.code, e.action) for e in reading.events] == [
        ("gpu_event", "recovery_action", "RESET_GPU")
    ]


def test_17_each_init_has_its_shutdown(tmp_path: Path, start: Start) -> None:
    driver = SimulatedDriver(tmp_path)
    for _ in range(3):
        collector = start(driver)
        collector.collect()
        collector.close()
    assert driver.calls("nvmlInitWithFlags") == driver.calls("nvmlShutdown") == 3


@pytest.mark.parametrize(
    ("bus_id", "address"),
    [
        ("00000000:07:00.0", "0000:07:00"),
        ("00000000:C1:00.0", "0000:c1:00"),
        ("00010000:3B:00.0", "10000:3b:00"),
        ("0000:0A:1F.0", "0000:0a:1f"),
        ("", None),
        ("garbage", None),
        ("00000000:zz:00.0", None),
    ],
)
def test_bus_addresses(bus_id: str, address: str | None) -> None:
    assert pci_address(bus_id) == address
