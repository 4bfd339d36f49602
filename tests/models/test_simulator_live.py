"""The fleet that answers poll by poll."""

from __future__ import annotations

import pytest

from forewarn.collectors.base import Reading
from forewarn.collectors.catalog import METRICS
from forewarn.collectors.clock import ManualClock
from forewarn.collectors.errors import InputError
from forewarn.models.simulator_live import LiveFleet


def of(reading: Reading, device: str) -> dict[str, float]:
    return {s.metric: s.value for s in reading.samples if s.device == device}


def test_polls_are_catalog_metrics_of_simulated_devices() -> None:
    fleet = LiveFleet(2, 4, 5, ManualClock())
    reading = fleet.poll("sim-02")
    assert all(d.simulated for d in reading.devices)
    assert {d.device for d in reading.devices} == {"", "gpu0", "gpu1", "gpu2", "gpu3"}
    assert {s.metric for s in reading.samples} <= set(METRICS)
    assert all(s.value == s.value for s in reading.samples)


def test_same_seed_and_times_give_the_same_polls() -> None:
    def run() -> list[Reading]:
        clock = ManualClock()
        fleet = LiveFleet(1, 2, 9, clock)
        found = []
        for _ in range(5):
            clock.advance(10)
            found.append(fleet.poll("sim-01"))
        return found

    assert run() == run()


def test_wear_grows_remaps_and_ends_in_a_contained_error() -> None:
    clock = ManualClock()
    fleet = LiveFleet(1, 4, 3, clock)
    fleet.poll("sim-01")
    fleet.wear_out("sim-01/gpu2", 100.0)
    corrected, codes = [], []
    for _ in range(30):
        clock.advance(5)
        reading = fleet.poll("sim-01")
        worn, sound = of(reading, "gpu2"), of(reading, "gpu1")
        corrected.append(worn["gpu_ecc_dram_corrected_total"])
        assert sound["gpu_ecc_dram_corrected_total"] == 0
        codes += [e.code for e in reading.events if e.device == "gpu2"]
    assert corrected == sorted(corrected)
    assert corrected[19] > 10 * corrected[9]
    assert corrected[-1] == corrected[20]
    assert codes == ["63"] * 6 + ["94"]
    assert worn["gpu_row_remap_pending"] == 1
    assert worn["gpu_row_remap_banks_max"] < sound["gpu_row_remap_banks_max"]
    assert worn["gpu_utilization_ratio"] == 0 < sound["gpu_utilization_ratio"]
    assert worn["gpu_temperature_celsius"] < sound["gpu_temperature_celsius"] - 5


def test_energy_is_power_times_time() -> None:
    clock = ManualClock()
    fleet = LiveFleet(1, 1, 3, clock)
    before = of(fleet.poll("sim-01"), "gpu0")
    clock.advance(60)
    after = of(fleet.poll("sim-01"), "gpu0")
    gained = after["gpu_energy_joules_total"] - before["gpu_energy_joules_total"]
    assert gained == pytest.approx(after["gpu_power_watts"] * 60, rel=1e-3)


@pytest.mark.parametrize("device", ["sim-09/gpu0", "sim-01/gpu7", "sim-01"])
def test_unknown_devices_are_refused(device: str) -> None:
    with pytest.raises(InputError, match="no such GPU"):
        LiveFleet(1, 2, 1, ManualClock()).wear_out(device, 60)
