"""The NVML collector as the agent uses it, on the simulated driver: readings, trouble, hangs, and getting over them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from forewarn.collectors.base import Collector, Event, Reading
from forewarn.collectors.catalog import EVENTS, METRICS
from forewarn.collectors.clock import ManualClock
from forewarn.collectors.errors import UnavailableError
from forewarn.collectors.nvml import NvmlCollector
from forewarn.collectors.registry import Setup, create
from simnvml import build
from simnvml.control import UNKNOWN_DEVICE, SimulatedDriver

pytestmark = pytest.mark.skipif(bool(build.missing()), reason=build.missing())

POLL_S = 5.0
Make = Callable[..., NvmlCollector]


class Bench:
    """A driver, a clock and collectors on both."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.clock = ManualClock()
        self.made: list[NvmlCollector] = []

    def driver(self, *args: Any, **options: Any) -> SimulatedDriver:
        return SimulatedDriver(self.folder, *args, **options)

    def collector(self, driver: SimulatedDriver, **options: Any) -> NvmlCollector:
        collector = NvmlCollector(
            Setup(self.clock), library=str(driver.library), **{"call_deadline_s": 20.0, **options}
        )
        self.made.append(collector)
        return collector

    def again(self, collector: NvmlCollector, after_s: float = POLL_S) -> Reading:
        self.clock.advance(after_s)
        return collector.collect()

    def until_events(self, collector: NvmlCollector, count: int = 1) -> list[Event]:
        """Events come through a thread of the child: poll until enough are there."""
        events: list[Event] = []
        limit = time.monotonic() + 20
        while sum(e.count for e in events) < count:
            assert time.monotonic() < limit, f"only {events}"
            events += self.again(collector, 0.01).events
        return events


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    made = Bench(tmp_path)
    yield made
    for collector in made.made:
        collector.close()


def values(reading: Reading, device: str = "gpu0") -> dict[str, float]:
    """What a reading says of a device, metrics without labels."""
    return {s.metric: s.value for s in reading.samples if s.device == device and not s.labels}


def kinds(events: list[Event]) -> list[tuple[str, str, str]]:
    return [(e.device, e.kind, e.code) for e in events]


def complaint(reading: Reading) -> str:
    """The one thing that a reading without samples complains of."""
    assert not reading.samples and not reading.events
    (error,) = reading.errors
    assert error.source == "nvml"
    return f"{error.device} {error.message} {error.remedy}"


# ---- what is read ----


def test_keeps_to_the_protocol_and_the_catalog(bench: Bench) -> None:
    collector = bench.collector(bench.driver(["A100", "H100", "B200", "GH200", "V100", "GEFORCE"]))
    reading = collector.collect()
    assert isinstance(collector, Collector)
    assert not reading.errors
    for sample in reading.samples:
        assert METRICS[sample.metric].kind == "gpu"
        assert set(sample.labels) <= set(METRICS[sample.metric].labels)
        assert sample.value == sample.value and sample.value >= 0
    assert {s.device for s in reading.samples} == {f"gpu{n}" for n in range(6)}
    keys = [(s.device, s.metric, *s.labels.items()) for s in reading.samples]
    assert len(keys) == len(set(keys))


def test_units_are_base_units(bench: Bench) -> None:
    driver = bench.driver(profile="H100")
    driver.set(
        0, temperature_c=83, power_mw=312_400, clock_sm_mhz=1755, utilization_gpu_pct=55, energy_mj=7_500
    )
    driver.set_field(0, 270, 2_500_000_000)
    got = values(bench.collector(driver).collect())
    assert got["gpu_temperature_celsius"] == 83
    assert got["gpu_power_watts"] == pytest.approx(312.4)
    assert got["gpu_power_instant_watts"] == pytest.approx(73.25)
    assert got["gpu_sm_clock_hertz"] == 1755e6
    assert got["gpu_utilization_ratio"] == pytest.approx(0.55)
    assert got["gpu_energy_joules_total"] == pytest.approx(7.5)
    assert got["gpu_slowdown_hardware_thermal_seconds_total"] == pytest.approx(2.5)
    assert got["gpu_memory_total_bytes"] == 80 << 30
    assert got["gpu_power_limit_watts"] == 700


@pytest.mark.parametrize(
    ("profile", "has", "lacks"),
    [
        (
            "A100",
            [
                "gpu_row_remap_pending",
                "gpu_ecc_dram_corrected_total",
                "gpu_row_remap_banks_none",
                "gpu_nvlink_links_active",
            ],
            [
                "gpu_temperature_margin_celsius",
                "gpu_fabric_state",
                "gpu_recovery_action",
                "gpu_retired_pages_sbe_total",
            ],
        ),
        (
            "H100",
            [
                "gpu_temperature_margin_celsius",
                "gpu_fabric_health",
                "gpu_recovery_action",
                "gpu_ecc_sram_threshold_exceeded",
            ],
            ["gpu_fan_speed_ratio", "gpu_nvlink_symbol_errors_total", "gpu_c2c_crc_errors_total"],
        ),
        (
            "B200",
            [
                "gpu_nvlink_symbol_errors_total",
                "gpu_nvlink_effective_bit_error_ratio",
                "gpu_nvlink_recovery_failed_total",
            ],
            ["gpu_nvlink_crc_flit_errors_total", "gpu_nvlink_replay_errors_total"],
        ),
        ("GH200", ["gpu_c2c_crc_errors_total", "gpu_c2c_links_total"], ["gpu_retired_pages_dbe_total"]),
        (
            "V100",
            ["gpu_retired_pages_dbe_total", "gpu_retired_pages_pending", "gpu_ecc_sram_corrected_total"],
            ["gpu_row_remap_pending", "gpu_mig_enabled", "gpu_gsp_enabled"],
        ),
        (
            "GEFORCE",
            ["gpu_temperature_celsius", "gpu_power_watts", "gpu_clock_event_reasons", "gpu_fan_speed_ratio"],
            [
                "gpu_ecc_dram_corrected_total",
                "gpu_row_remap_pending",
                "gpu_nvlink_links_active",
                "gpu_memory_temperature_celsius",
            ],
        ),
    ],
)
def test_what_a_part_does_not_support_is_absent(
    bench: Bench, profile: str, has: list[str], lacks: list[str]
) -> None:
    reading = bench.collector(bench.driver(profile=profile)).collect()
    got = values(reading)
    assert set(has) <= set(got)
    assert not set(lacks) & {s.metric for s in reading.samples}
    assert not reading.errors and not reading.events


def test_old_nvlink_counters_come_by_link_and_as_a_sum(bench: Bench) -> None:
    driver = bench.driver(profile="A100")
    driver.set_link_errors(0, 3, crc_flit=5, replay=2)
    driver.set_link_errors(0, 11, crc_flit=7)
    driver.set_field(0, 165, 0, link=4)
    reading = bench.collector(driver).collect()
    by_link = {
        s.labels["link"]: s.value
        for s in reading.samples
        if s.metric == "gpu_nvlink_crc_flit_errors_total" and s.labels
    }
    assert len(by_link) == 12 and by_link["3"] == 5 and by_link["11"] == 7 and by_link["0"] == 0
    got = values(reading)
    assert got["gpu_nvlink_crc_flit_errors_total"] == 12
    assert got["gpu_nvlink_replay_errors_total"] == 2
    assert got["gpu_nvlink_links_active"] == 11


def test_links_beyond_the_twelfth_are_counted_by_scope(bench: Bench) -> None:
    driver = bench.driver(profile="H100")
    driver.set_field(0, 161, 4, link=17)
    reading = bench.collector(driver).collect()
    by_link = {
        s.labels["link"]: s.value
        for s in reading.samples
        if s.metric == "gpu_nvlink_replay_errors_total" and s.labels
    }
    assert len(by_link) == 18 and by_link["17"] == 4
    assert values(reading)["gpu_nvlink_replay_errors_total"] == 4


def test_nvlink_5_takes_the_worst_rate_and_unpacks_it(bench: Bench) -> None:
    driver = bench.driver(profile="B200")
    driver.set_field(0, 220, 3 << 8 | 12, link=2)  # 3e-12
    driver.set_field(0, 220, 7 << 8 | 9, link=5)  # 7e-9
    driver.set_field(0, 221, 40, link=5)
    driver.set_field(0, 250, 9, link=1)
    driver.set_field(0, 250, 2, link=8)
    reading = bench.collector(driver).collect()
    got = values(reading)
    assert got["gpu_nvlink_effective_bit_error_ratio"] == pytest.approx(7e-9)
    assert got["gpu_nvlink_symbol_errors_total"] == 40
    bins = {s.labels["bin"]: s.value for s in reading.samples if s.metric == "gpu_nvlink_fec_codewords_total"}
    assert bins["15"] == 11 and len(bins) == 16


def test_memory_wear_is_read(bench: Bench) -> None:
    driver = bench.driver(profile="H100")
    driver.set_field(0, 143, 3)
    driver.set_field(0, 145, 1)
    driver.set(
        0,
        banks_max=600,
        banks_low=2,
        banks_none=1,
        sram_threshold_exceeded=1,
        sram_bucket_sm=4,
        unrepairable_memory=1,
    )
    driver.set_ecc(0, uncorrected=True, location=7, count=6)
    driver.set_ecc(0, uncorrected=False, location=2, count=900)
    got = values(bench.collector(driver).collect())
    assert got["gpu_row_remap_uncorrected_total"] == 3 and got["gpu_row_remap_failure"] == 1
    assert got["gpu_row_remap_banks_low"] == 2 and got["gpu_row_remap_banks_none"] == 1
    assert got["gpu_ecc_sram_threshold_exceeded"] == 1 and got["gpu_ecc_sram_sm_uncorrected_total"] == 4
    assert got["gpu_ecc_sram_uncorrected_total"] == 6 and got["gpu_ecc_dram_corrected_total"] == 900
    assert got["gpu_memory_unrepairable"] == 1


def test_retired_pages_and_sram_by_unit_on_older_parts(bench: Bench) -> None:
    driver = bench.driver(profile="V100")
    driver.set(0, retired_sbe=3, retired_dbe=4, retired_pending=1)
    driver.set_ecc(0, uncorrected=True, location=1, count=5)  # L2
    driver.set_ecc(0, uncorrected=True, location=3, count=2)  # register file
    got = values(bench.collector(driver).collect())
    assert (got["gpu_retired_pages_sbe_total"], got["gpu_retired_pages_dbe_total"]) == (3, 4)
    assert got["gpu_retired_pages_pending"] == 1
    assert got["gpu_ecc_sram_uncorrected_total"] == 7


@pytest.mark.parametrize(
    ("type", "raw", "expected"),
    [
        ("double", 41.5, 41.5),
        ("sint", -3, -3),
        ("ushort", 0x1_0007, 7),
        ("uint", 0x7_0000_0009, 9),
        ("sll", -8, -8),
    ],
)
def test_field_values_are_read_by_their_type(bench: Bench, type: str, raw: float, expected: float) -> None:
    driver = bench.driver(profile="H100")
    driver.set_field(0, 82, raw, type=type)
    assert values(bench.collector(driver).collect())["gpu_memory_temperature_celsius"] == expected


@pytest.mark.parametrize("count", [0, 1, 16])
def test_zero_to_sixteen_gpus(bench: Bench, count: int) -> None:
    reading = bench.collector(bench.driver(count)).collect()
    assert [d.device for d in reading.devices] == [f"gpu{n}" for n in range(count)]
    assert not reading.errors and not reading.events


def test_devices_say_who_they_are_and_that_they_are_simulated(bench: Bench) -> None:
    device = bench.collector(bench.driver(2)).collect().devices[1]
    assert device.model == "NVIDIA H100 80GB HBM3" and device.kind == "gpu"
    assert device.serial == "GPU-5151fa7e-0000-4000-8000-000000000001"
    assert device.pci == "0000:0f:00"
    assert device.simulated
    assert device.labels["driver"].endswith("-simulated") and device.labels["vbios"] == "96.00.74.00.01"


def test_tiers_are_read_at_their_own_intervals(bench: Bench) -> None:
    collector = bench.collector(bench.driver(), medium_interval_s=30, slow_interval_s=600)
    assert {"gpu_temperature_celsius", "gpu_power_limit_watts", "gpu_ecc_enabled"} <= set(
        values(collector.collect())
    )
    fast = values(bench.again(collector))
    assert "gpu_temperature_celsius" in fast and "gpu_power_limit_watts" not in fast
    medium = values(bench.again(collector, 25))
    assert "gpu_power_limit_watts" in medium and "gpu_ecc_enabled" not in medium
    assert "gpu_ecc_enabled" in values(bench.again(collector, 575))


def test_what_is_not_supported_is_remembered_and_asked_again_after_an_hour(bench: Bench) -> None:
    driver = bench.driver(profile="GEFORCE")
    collector = bench.collector(driver)
    for _ in range(5):
        bench.again(collector, 700)
    assert driver.calls("nvmlDeviceGetEccMode", 0) == 1
    driver.set(0, ecc_mode=1)
    assert values(bench.again(collector, 3600))["gpu_ecc_enabled"] == 1


def test_a_driver_that_refuses_a_call_for_one_unknown_field_still_gives_the_others(bench: Bench) -> None:
    driver = bench.driver(profile="H100")
    driver.state.gpu[0].field_limit = 200
    collector = bench.collector(driver)
    reading = collector.collect()
    got = values(reading)
    assert got["gpu_memory_temperature_celsius"] == 47 and got["gpu_pcie_correctable_errors_total"] == 0
    assert "gpu_recovery_action" not in got and not reading.errors
    before = driver.calls("nvmlDeviceGetFieldValues", 0)
    bench.again(collector)
    assert driver.calls("nvmlDeviceGetFieldValues", 0) == before + 1, "it is found out once"


def test_a_field_that_becomes_supported_is_found_after_an_hour(bench: Bench) -> None:
    driver = bench.driver(profile="GEFORCE")
    collector = bench.collector(driver)
    collector.collect()
    driver.set_field(0, 82, 77)
    assert "gpu_memory_temperature_celsius" not in values(bench.again(collector))
    assert values(bench.again(collector, 3600))["gpu_memory_temperature_celsius"] == 77


def test_switching_mig_asks_everything_again(bench: Bench) -> None:
    driver = bench.driver(profile="A100")
    collector = bench.collector(driver)
    driver.set(0, mig_mode=1)
    driver.unsupport(0, "utilization_gpu_pct")
    for field in (142, 143, 144, 145):
        driver.set_field(0, field, 0, error=3)
    driver.unsupport(0, "remap_corrected")
    got = values(collector.collect())
    assert (
        got["gpu_mig_enabled"] == 1
        and "gpu_row_remap_pending" not in got
        and "gpu_utilization_ratio" not in got
    )
    driver.set(0, mig_mode=0, utilization_gpu_pct=50, remap_corrected=0)
    for field in (142, 143, 144, 145):
        driver.set_field(0, field, 0)
    bench.again(collector, 30)
    got = values(bench.again(collector, 30))
    assert got["gpu_row_remap_pending"] == 0 and got["gpu_utilization_ratio"] == pytest.approx(0.5)


# ---- events ----


def test_an_xid_comes_with_device_address_and_what_to_do(bench: Bench) -> None:
    driver = bench.driver(2)
    collector = bench.collector(driver)
    collector.collect()
    driver.xid(1, 79)
    (event,) = bench.until_events(collector)
    assert (event.device, event.kind, event.code, event.pci) == ("gpu1", "xid", "79", "0000:0f:00")
    assert event.severity == "critical" and event.action and event.labels["source"] == "nvml"
    assert event.time is not None and abs(event.time - bench.clock.now()) < 30


def test_an_xid_of_a_device_that_cannot_be_looked_up_is_not_lost(bench: Bench) -> None:
    driver = bench.driver()
    collector = bench.collector(driver)
    collector.collect()
    driver.xid(UNKNOWN_DEVICE, 79)
    (event,) = bench.until_events(collector)
    assert (event.device, event.kind, event.code) == ("", "xid", "79")


def test_an_event_that_comes_right_behind_a_poll_is_not_lost(bench: Bench) -> None:
    """Poll after poll with an event each, as close together as can be."""
    driver = bench.driver()
    collector = bench.collector(driver)
    collector.collect()
    events: list[Event] = []
    for number in range(60):
        driver.xid(0, 1000 + number)
        events += bench.again(collector, 0.001).events
    events += bench.until_events(collector, 60 - len(events)) if len(events) < 60 else []
    assert [e.code for e in events] == [str(1000 + number) for number in range(60)]


def test_events_of_a_session_that_ends_are_not_lost(bench: Bench) -> None:
    driver = bench.driver()
    collector = bench.collector(driver)
    collector.collect()
    before = driver.calls("nvmlEventSetWait_v2")
    driver.xid(0, 119)
    limit = time.monotonic() + 20
    while driver.calls("nvmlEventSetWait_v2") < before + 2:  # the event was taken, and the next is waited for
        assert time.monotonic() < limit
        time.sleep(0.01)
    driver.reload()
    assert ("gpu0", "xid", "119") in kinds(bench.again(collector).events)


def test_a_lost_gpu_does_not_end_the_events_of_the_others(bench: Bench) -> None:
    driver = bench.driver(2)
    collector = bench.collector(driver)
    collector.collect()
    driver.remove(1)
    driver.fail("nvmlEventSetWait_v2", 15)
    created = driver.calls("nvmlEventSetCreate")
    limit = time.monotonic() + 20
    while driver.calls("nvmlEventSetCreate") == created:
        assert time.monotonic() < limit
        time.sleep(0.01)
    driver.fail("nvmlEventSetWait_v2", 0)
    waits = driver.calls("nvmlEventSetWait_v2")
    while driver.calls("nvmlEventSetWait_v2") == waits:
        assert time.monotonic() < limit
        time.sleep(0.01)
    driver.xid(0, 119)
    assert ("gpu0", "xid", "119") in kinds(bench.until_events(collector, 2))


def test_repeats_become_one_event_with_a_count(bench: Bench) -> None:
    driver = bench.driver()
    collector = bench.collector(driver)
    collector.collect()
    for _ in range(40):
        driver.xid(0, 31)
    driver.xid(0, 43)
    events = bench.until_events(collector, 41)
    assert {e.code for e in events} == {"31", "43"}
    assert sum(e.count for e in events if e.code == "31") == 40
    assert len(events) < 20


@pytest.mark.parametrize(
    ("type", "code"),
    [
        (0x2, "double_bit_ecc"),
        (0x100, "mig_changed"),
        (0x200, "single_bit_ecc_storm"),
        (0x400, "dram_retirement"),
        (0x800, "dram_retirement_failure"),
        (0x1000, "poison_nonfatal"),
        (0x2000, "poison_fatal"),
        (0x4000, "gpu_unavailable"),
    ],
)
def test_newer_events(bench: Bench, type: int, code: str) -> None:
    driver = bench.driver()
    collector = bench.collector(driver)
    collector.collect()
    driver.raise_event(0, type)
    assert kinds(bench.until_events(collector)) == [("gpu0", "gpu_event", code)]


def test_a_recovery_action_is_told_when_it_appears(bench: Bench) -> None:
    driver = bench.driver()
    driver.set_field(0, 230, 1)  # it was asked for while no agent ran
    collector = bench.collector(driver)
    (event,) = collector.collect().events
    assert (event.kind, event.code, event.action) == ("gpu_event", "recovery_action", "RESET_GPU")
    assert not bench.again(collector).events


def test_events_while_a_call_hangs_are_not_lost(bench: Bench) -> None:
    driver = bench.driver()
    collector = bench.collector(driver, call_deadline_s=0.2)
    collector.collect()
    driver.hang("nvmlDeviceGetFieldValues", 0)
    assert kinds(bench.again(collector).events) == [("gpu0", "collector_silent", "nvml")]
    driver.xid(0, 119)
    limit = time.monotonic() + 20
    events: list[Event] = []
    while not events and time.monotonic() < limit:
        events = bench.again(collector, 0.01).events
    assert kinds(events) == [("gpu0", "xid", "119")]
    driver.release("nvmlDeviceGetFieldValues", 0)


# ---- trouble ----


def test_a_lost_gpu_is_told_once_and_the_others_are_read_on(bench: Bench) -> None:
    driver = bench.driver(3)
    collector = bench.collector(driver)
    collector.collect()
    driver.break_gpu(1, 15)
    reading = bench.again(collector)
    assert kinds(reading.events) == [("gpu1", "gpu_lost", "lost")]
    assert reading.events[0].severity == "critical" and reading.events[0].pci == "0000:0f:00"
    assert "gpu_temperature_celsius" in values(reading, "gpu2")
    assert "gpu_temperature_celsius" not in values(reading, "gpu1")
    assert not bench.again(collector).events
    driver.break_gpu(1, 0)
    assert kinds(bench.again(collector).events) == [("gpu1", "gpu_returned", "returned")]


def test_a_gpu_that_needs_a_reset_is_told_once(bench: Bench) -> None:
    driver = bench.driver()
    collector = bench.collector(driver)
    collector.collect()
    driver.break_gpu(0, 16)
    assert kinds(bench.again(collector).events) == [("gpu0", "gpu_reset_required", "reset_required")]
    assert not bench.again(collector).events


@pytest.mark.parametrize(("error", "code"), [(10, "timeout"), (999, "unknown"), (17, "17")])
def test_calls_that_keep_failing_are_told_once(bench: Bench, error: int, code: str) -> None:
    driver = bench.driver()
    collector = bench.collector(driver)
    collector.collect()
    driver.fail("nvmlDeviceGetPowerUsage", error)
    seen = [kinds(bench.again(collector).events) for _ in range(6)]
    assert seen == [[], [], [("gpu0", "gpu_driver_error", code)], [], [], []]


def test_one_failing_call_costs_only_its_own_reading(bench: Bench) -> None:
    driver = bench.driver()
    driver.fail("nvmlDeviceGetPowerUsage", 999)
    reading = bench.collector(driver).collect()
    assert "gpu_power_watts" not in values(reading) and "gpu_temperature_celsius" in values(reading)
    assert reading.errors[0].device == "gpu0" and "power" in reading.errors[0].message


def test_a_refused_reading_is_absent_and_told_once(bench: Bench) -> None:
    driver = bench.driver(2)
    driver.fail("nvmlDeviceGetTotalEnergyConsumption", 4)
    collector = bench.collector(driver)
    reading = collector.collect()
    assert len(reading.errors) == 1 and "energy" in reading.errors[0].message and reading.errors[0].remedy
    assert "gpu_energy_joules_total" not in values(reading)
    assert not bench.again(collector).errors


def test_a_gpu_that_vanishes_and_returns_keeps_its_name(bench: Bench) -> None:
    driver = bench.driver(3)
    collector = bench.collector(driver, rescan_interval_s=300)
    collector.collect()
    driver.remove(1)
    assert kinds(bench.again(collector).events) == [("gpu1", "gpu_lost", "lost")]
    reading = bench.again(collector, 300)  # NVML opened anew counts two: index 1 is now the third board
    assert [d.device for d in reading.devices] == ["gpu0", "gpu2"]
    assert values(reading, "gpu2") and not reading.events
    driver.restore(1)
    reading = bench.again(collector, 300)
    assert kinds(reading.events) == [("gpu1", "gpu_returned", "returned")]
    assert [(d.device, d.serial[-1]) for d in reading.devices] == [
        ("gpu0", "0"),
        ("gpu1", "1"),
        ("gpu2", "2"),
    ]


def test_a_gpu_that_is_gone_after_the_session_was_opened_anew_is_missing(bench: Bench) -> None:
    driver = bench.driver(2)
    collector = bench.collector(driver)
    collector.collect()
    driver.remove(0)
    driver.reload()
    events = bench.again(collector).events
    assert ("gpu0", "gpu_missing", "missing") in kinds(events)
    assert ("", "driver_reloaded", "reloaded") not in kinds(events) or len(events) == 2


def test_a_gpu_that_was_lost_before_the_agent_came_is_told(bench: Bench) -> None:
    driver = bench.driver(2)
    driver.break_gpu(1, 15)
    collector = bench.collector(driver)
    reading = collector.collect()
    assert kinds(reading.events) == [("", "gpu_lost", "lost")]
    assert "cannot open" in reading.errors[0].message
    assert "gpu_temperature_celsius" in values(reading)
    assert not bench.again(collector).events


def test_a_driver_reload_opens_a_new_session(bench: Bench) -> None:
    driver = bench.driver(2)
    collector = bench.collector(driver)
    collector.collect()
    driver.reload()
    reading = bench.again(collector)
    assert kinds(reading.events) == [("", "driver_reloaded", "reloaded")]
    assert "gpu_temperature_celsius" in values(reading)
    assert not bench.again(collector).events


def test_an_energy_counter_that_begins_anew_tells_a_reset_of_one_gpu(bench: Bench) -> None:
    driver = bench.driver(2)
    collector = bench.collector(driver)
    collector.collect()
    driver.set(1, energy_mj=10)
    assert kinds(bench.again(collector).events) == [("gpu1", "gpu_reset", "reset")]


def test_a_driver_upgrade_starts_a_new_process(bench: Bench) -> None:
    driver = bench.driver()
    collector = bench.collector(driver)
    collector.collect()
    driver.upgrade("580.65.06")
    reading = bench.again(collector)
    assert kinds(reading.events) == [("", "driver_reloaded", "upgraded")]
    assert reading.devices[0].labels["driver"] == "580.65.06-simulated"
    assert not bench.again(collector).events


def test_a_half_done_upgrade_is_told_with_the_way_out(bench: Bench) -> None:
    driver = bench.driver()
    collector = bench.collector(driver)
    collector.collect()
    driver.upgrade("580.65.06", library_too=False)
    reading = bench.again(collector)
    assert kinds(reading.events) == [("", "driver_reloaded", "upgraded")]
    with pytest.raises(UnavailableError, match=r"different versions.*reboot"):
        bench.again(collector)


def test_without_a_driver_it_says_the_way_out(bench: Bench, tmp_path: Path) -> None:
    collector = NvmlCollector(Setup(bench.clock), library=str(tmp_path / "none.so"))
    bench.made.append(collector)
    with pytest.raises(UnavailableError, match=r"nvml: .*none\.so.*--gpus all"):
        collector.collect()


def test_a_host_without_nvml_says_so(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    try:
        import ctypes

        ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        collector = NvmlCollector(Setup(bench.clock))
        bench.made.append(collector)
        with pytest.raises(
            UnavailableError, match=r"nvml: libnvidia-ml\.so\.1 is not found.*install the NVIDIA driver"
        ):
            collector.collect()
    else:
        pytest.skip("this host has an NVIDIA driver")


def test_a_driver_that_is_not_loaded(bench: Bench) -> None:
    driver = bench.driver()
    driver.fail("nvmlInitWithFlags", 9)
    collector = bench.collector(driver)
    with pytest.raises(UnavailableError, match=r"not loaded.*modprobe"):
        collector.collect()
    driver.fail("nvmlInitWithFlags", 0)
    with pytest.raises(UnavailableError, match="not loaded"):
        bench.again(collector)  # it is not asked again at every poll
    assert values(bench.again(collector, 60))


def test_a_driver_that_goes_away_takes_its_gpus_with_it(bench: Bench) -> None:
    driver = bench.driver(2)
    collector = bench.collector(driver)
    collector.collect()
    driver.fail("nvmlInitWithFlags", 9)
    driver.reload()
    reading = bench.again(collector)
    assert kinds(reading.events) == [("gpu0", "gpu_missing", "missing"), ("gpu1", "gpu_missing", "missing")]
    with pytest.raises(UnavailableError):
        bench.again(collector)
    driver.fail("nvmlInitWithFlags", 0)
    returned = kinds(bench.again(collector, 600).events)
    assert sorted(returned) == [("gpu0", "gpu_returned", "returned"), ("gpu1", "gpu_returned", "returned")]


def test_an_option_may_come_as_text(bench: Bench) -> None:
    driver = bench.driver()
    collector = create("nvml", {"library": str(driver.library), "call_deadline_s": "20"}, Setup(bench.clock))
    try:
        assert collector.collect().samples
    finally:
        collector.close()


# ---- from one run of the agent to the next ----


def next_run(bench: Bench, driver: SimulatedDriver, before: NvmlCollector) -> NvmlCollector:
    """The agent is restarted; its state went through a file in between."""
    state = json.loads(json.dumps(before.state()))
    before.close()
    collector = bench.collector(driver)
    collector.restore(state)
    return collector


def test_a_gpu_that_is_gone_when_the_agent_comes_back_is_missing_and_names_stay(bench: Bench) -> None:
    driver = bench.driver(3)
    collector = bench.collector(driver)
    collector.collect()
    driver.remove(1)
    collector = next_run(bench, driver, collector)
    reading = collector.collect()
    assert kinds(reading.events) == [("gpu1", "gpu_missing", "missing")]
    assert [d.device for d in reading.devices] == ["gpu0", "gpu2"]
    reading = next_run(bench, driver, collector).collect()
    assert not reading.events, "it was told; a board that was taken out is let go"
    assert [d.device for d in reading.devices] == ["gpu0", "gpu2"]


def test_a_reload_while_the_agent_was_away_is_told(bench: Bench) -> None:
    driver = bench.driver(2)
    collector = bench.collector(driver)
    collector.collect()
    driver.reload()
    assert kinds(next_run(bench, driver, collector).collect().events) == [("", "driver_reloaded", "reloaded")]


def test_what_was_told_is_not_told_again_by_the_next_run(bench: Bench) -> None:
    driver = bench.driver()
    driver.set_field(0, 230, 1)
    collector = bench.collector(driver)
    assert collector.collect().events
    assert not next_run(bench, driver, collector).collect().events


def test_a_new_board_in_a_slot_takes_the_slots_name(bench: Bench) -> None:
    driver = bench.driver(2)
    collector = bench.collector(driver)
    collector.collect()
    driver.state.gpu[0].uuid = b"GPU-another-board"
    reading = next_run(bench, driver, collector).collect()
    assert [(d.device, d.serial[:11]) for d in reading.devices] == [
        ("gpu0", "GPU-another"),
        ("gpu1", "GPU-5151fa7"),
    ]
    assert not reading.events


@pytest.mark.parametrize("state", [{}, {"known": 3}, {"known": {"a": {"device": 5}}}, {"raised": ["x"]}])
def test_a_state_that_cannot_be_read_is_passed_over(bench: Bench, state: dict[str, object]) -> None:
    collector = bench.collector(bench.driver())
    collector.restore(state)
    assert [d.device for d in collector.collect().devices] == ["gpu0"]


# ---- hangs ----


def test_a_gpu_that_hangs_is_told_left_out_and_taken_back(bench: Bench) -> None:
    driver = bench.driver(3)
    collector = bench.collector(driver, call_deadline_s=0.3, abandon_after_s=15)
    collector.collect()
    driver.hang("nvmlDeviceGetFieldValues", 1)
    reading = bench.again(collector)
    assert kinds(reading.events) == [("gpu1", "collector_silent", "nvml")]
    assert "gpu_temperature_celsius" in values(reading, "gpu0"), "what was read before the hang is kept"
    for _ in range(3):
        assert complaint(bench.again(collector)).startswith("gpu1 the driver has not answered for gpu1")
    reading = bench.again(collector)  # the child was killed; its successor leaves gpu1 alone
    assert values(reading, "gpu0") and values(reading, "gpu2") and not values(reading, "gpu1")
    assert not reading.events
    driver.release("nvmlDeviceGetFieldValues", 1)
    assert kinds(bench.again(collector, 120).events) == [("gpu1", "collector_recovered", "nvml")]
    assert values(bench.again(collector), "gpu1")


def test_a_gpu_that_hangs_again_is_left_out_longer_and_told_no_second_time(bench: Bench) -> None:
    driver = bench.driver(2)
    collector = bench.collector(driver, call_deadline_s=0.3, abandon_after_s=1)
    collector.collect()
    driver.hang("nvmlDeviceGetFieldValues", 0)
    events: list[Event] = []
    read = 0
    for _ in range(40):
        reading = bench.again(collector, 10)
        events += reading.events
        read += "gpu_temperature_celsius" in values(reading, "gpu1")
    assert kinds(events) == [("gpu0", "collector_silent", "nvml")]
    assert read > 30, "the healthy GPU is read on"
    driver.release("nvmlDeviceGetFieldValues", 0)


def test_a_late_answer_is_used_and_an_answer_in_time_ends_the_silence(bench: Bench) -> None:
    driver = bench.driver()
    collector = bench.collector(driver, call_deadline_s=0.3, abandon_after_s=600)
    collector.collect()
    driver.hang("nvmlDeviceGetPowerUsage", 0)
    assert kinds(bench.again(collector).events) == [("gpu0", "collector_silent", "nvml")]
    driver.release("nvmlDeviceGetPowerUsage", 0)
    limit = time.monotonic() + 20
    late: Reading | None = None
    while late is None and time.monotonic() < limit:
        reading = bench.again(collector, 0.01)
        late = reading if reading.samples else None
    assert late is not None and "gpu_power_watts" in values(late) and not late.events
    assert kinds(bench.again(collector).events) == [("gpu0", "collector_recovered", "nvml")]


def test_a_driver_that_hangs_while_it_is_opened(bench: Bench) -> None:
    driver = bench.driver()
    driver.hang("nvmlInitWithFlags")
    collector = bench.collector(driver, call_deadline_s=0.2, start_deadline_s=30, abandon_after_s=60)
    assert "being opened" in complaint(collector.collect())
    assert kinds(bench.again(collector, 31).events) == [("", "collector_silent", "nvml")]
    assert "has not answered" in complaint(bench.again(collector, 31))
    driver.release("nvmlInitWithFlags")
    assert "has not answered" in complaint(bench.again(collector, 1)), "it is not asked again at once"
    collector._call_deadline_s = 20
    assert kinds(bench.again(collector, 600).events) == [("", "collector_recovered", "nvml")]


def test_no_more_children_than_the_limit_are_left_behind(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process in state D does not die of SIGKILL: here SIGKILL is kept from it."""
    from forewarn.collectors.nvml_child import Child

    left: list[Child] = []

    def kill(self: Child) -> bool:
        left.append(self)
        return False

    driver = bench.driver()
    collector = bench.collector(
        driver, call_deadline_s=0.2, abandon_after_s=1, start_deadline_s=1, max_abandoned=2
    )
    with monkeypatch.context() as patch:
        patch.setattr(Child, "kill", kill)
        driver.hang("nvmlInitWithFlags")
        for _ in range(12):
            assert not bench.again(collector, 400).samples
        assert len(left) == 2 and len(collector._abandoned) == 2
        assert "2 processes hang in the driver" in complaint(bench.again(collector, 400))
    for child in left:
        assert child.kill()
    driver.release("nvmlInitWithFlags")
    collector._call_deadline_s = 20
    assert bench.again(collector, 400).samples, "once they are gone it goes on"


def test_a_child_that_dies_is_replaced(bench: Bench) -> None:
    driver = bench.driver()
    collector = bench.collector(driver)
    collector.collect()
    assert collector._child is not None
    os.kill(collector._child.pid, signal.SIGSEGV)
    reading = bench.again(collector)
    for _ in range(200):  # the signal may take a moment to arrive
        if reading.errors:
            break
        reading = bench.again(collector, 0.01)
    assert "ended with status" in reading.errors[0].message and reading.errors[0].remedy
    assert values(bench.again(collector, 60))


def test_the_child_ends_with_the_agent_even_when_it_hangs(bench: Bench) -> None:
    """The agent is killed and cannot say good-bye; its child sits in the driver."""
    driver = bench.driver()
    code = (
        "import sys\n"
        "from forewarn.collectors.registry import create\n"
        "collector = create('nvml', {'library': sys.argv[1], 'call_deadline_s': 0.2})\n"
        "for _ in range(50):\n"
        "    try:\n"
        "        if collector.collect().samples: break\n"
        "    except Exception: pass\n"
        "print(collector._child.pid, flush=True)\n"
        "sys.stdin.readline()\n"
        "try: collector.collect()\n"
        "except Exception: pass\n"
        "print('hangs', flush=True)\n"
        "sys.stdin.readline()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(driver.library)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as agent:
        assert agent.stdin is not None and agent.stdout is not None
        child = int(agent.stdout.readline())
        driver.hang("nvmlDeviceGetFieldValues")
        agent.stdin.write("\n")
        agent.stdin.flush()
        assert agent.stdout.readline() == "hangs\n"
        agent.kill()
    limit = time.monotonic() + 20
    while running(child):
        assert time.monotonic() < limit, "the child outlives its agent"
        time.sleep(0.05)


def running(pid: int) -> bool:
    """Whether a process lives; a zombie that nobody buries does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_close_leaves_no_process_behind(bench: Bench) -> None:
    driver = bench.driver()
    collector = bench.collector(driver)
    collector.collect()
    assert collector._child is not None
    pid = collector._child.pid
    before = driver.calls("nvmlShutdown")
    collector.close()
    assert not running(pid)
    assert driver.calls("nvmlShutdown") == before + 1, "each init has its shutdown"
    collector.close()


def test_hundreds_of_polls_leave_no_files_open(bench: Bench) -> None:
    driver = bench.driver(2)
    collector = bench.collector(driver, rescan_interval_s=1)
    collector.collect()
    driver.break_gpu(1, 15)
    bench.again(collector)
    before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(10):  # each opens NVML anew, to look for the lost one
        bench.again(collector)
    for _ in range(200):
        bench.again(collector, 0.001)
    assert len(list(Path("/proc/self/fd").iterdir())) <= before


@pytest.mark.slow
def test_a_simulated_day_does_not_grow(bench: Bench) -> None:
    """24 hours of polls at the default interval: memory of both sides, threads and files stay where they are."""
    driver = bench.driver(8)
    collector = bench.collector(driver)

    def footprint() -> tuple[int, int, int, int]:
        assert collector._child is not None
        child = Path(f"/proc/{collector._child.pid}")
        files = len(list(Path("/proc/self/fd").iterdir())), len(list((child / "fd").iterdir()))
        return (
            resident_kb(child),
            resident_kb(Path("/proc/self")),
            sum(files),
            len(list((child / "task").iterdir())),
        )

    for _ in range(2000):
        bench.again(collector)
    child_kb, own_kb, files, threads = footprint()
    for poll in range(int(24 * 3600 / POLL_S) - 2000):
        if poll % 100 == 0:
            driver.xid(poll // 100 % 8, 31)
        bench.again(collector)
    child_after_kb, own_after_kb, files_after, threads_after = footprint()
    assert (files_after, threads_after) == (files, threads)
    assert child_after_kb < child_kb + 512 and own_after_kb < own_kb + 2048
    assert driver.calls("nvmlInitWithFlags") == 1


def resident_kb(process: Path) -> int:
    return int((process / "status").read_text().split("VmRSS:")[1].split()[0])


def test_every_event_kind_is_in_the_catalog() -> None:
    text = "".join(path.read_text() for path in Path(__file__).parents[2].glob("collectors/nvml*.py"))
    for kind in (
        "gpu_lost",
        "gpu_missing",
        "gpu_returned",
        "gpu_reset",
        "gpu_reset_required",
        "gpu_driver_error",
        "gpu_event",
        "driver_reloaded",
        "collector_silent",
        "collector_recovered",
    ):
        assert f'"{kind}"' in text and kind in EVENTS
