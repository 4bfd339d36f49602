"""Readings in, batches out: names, times, twins, what is missing."""

from __future__ import annotations

import array
import math

from fakes_agent import gpu_reading
from forewarn.collectors.base import Device, Event, Reading, Sample
from forewarn.collectors.clock import ManualClock
from forewarn.daemon import wire
from forewarn.daemon.agent.intake import DEVICES_EVERY_S, Intake
from forewarn.daemon.agent.scheduler import Outcome
from forewarn.daemon.agent.spool import Parts


def took(intake: Intake, clock: ManualClock, reading: Reading, name: str = "nvml", **more: object) -> None:
    intake.take(Outcome(name, "reading", clock.now(), 0.01, reading, **more))  # type: ignore[arg-type]


def cut(intake: Intake) -> Parts:
    parts = intake.cut()
    assert parts is not None
    return parts


def values(frame: wire.Frame) -> dict[tuple[str, str], float]:
    cells = array.array("d", frame.values)
    wide = len(frame.metrics)
    return {
        (d, m): cells[i * wide + j]
        for i, d in enumerate(frame.devices)
        for j, m in enumerate(frame.metrics)
        if not math.isnan(cells[i * wide + j])
    }


def shown(intake: Intake) -> dict[tuple[str, str], float]:
    return {(device, metric): value for (device, metric, _), value in intake.latest()}


def test_a_reading_becomes_a_frame_with_full_ids() -> None:
    clock = ManualClock()
    intake = Intake("n1", clock)
    took(intake, clock, gpu_reading(41.0))
    [frame] = cut(intake).frames
    assert frame.time == clock.now()
    assert values(frame)["n1/gpu0", "gpu_temperature_celsius"] == 41.0
    assert intake.cut() is None


def test_every_batch_decodes_at_the_service() -> None:
    clock = ManualClock()
    intake = Intake("n1", clock)
    events = [
        Event("", "xid", "79", "critical", "m", pci="0000:3b:00"),
        Event("n1", "telemetry_dropped", "x", "error", ""),
    ]
    took(intake, clock, gpu_reading(events=events))
    parts = cut(intake)
    batch = wire.Batch("n1", "s", 1, devices=parts.devices, frames=parts.frames, events=parts.events)
    assert wire.decode(wire.encode(batch)).events[0].device in ("n1", "n1/gpu0")


def test_events_get_a_time_and_a_device() -> None:
    clock = ManualClock()
    intake = Intake("n1", clock)
    # The kernel tells first; NVML names the GPU in the same batch.
    took(
        intake,
        clock,
        Reading(events=[Event("", "xid", "48", "critical", "m", pci="0000:3b:00")]),
        "kernel_log",
    )
    assert intake.urgent
    took(intake, clock, gpu_reading())
    [event] = cut(intake).events
    assert (event.device, event.time) == ("n1/gpu0", clock.now())
    assert not intake.urgent


def test_an_xid_of_nvml_and_of_the_kernel_counts_once_and_the_kernel_speaks() -> None:
    clock = ManualClock()
    intake = Intake("n1", clock)
    took(
        intake,
        clock,
        gpu_reading(events=[Event("gpu0", "xid", "31", "error", "", time=100.0, pci="0000:3b:00")]),
    )
    kernel = Event("", "xid", "31", "error", "MMU fault of pid 7", time=101.0, pci="0000:3b:00")
    took(intake, clock, Reading(events=[kernel]), "kernel_log")
    assert [e.message for e in cut(intake).events] == ["MMU fault of pid 7"]


def test_twins_are_found_across_batches() -> None:
    clock = ManualClock()
    intake = Intake("n1", clock)
    event = Event("gpu0", "xid", "31", "error", "m", time=100.0, pci="0000:3b:00")
    took(intake, clock, gpu_reading(events=[event]))
    assert len(cut(intake).events) == 1
    took(intake, clock, Reading(events=[event]), "kernel_log")
    assert cut(intake).events == [] if intake._states else True
    parts = intake.cut()
    assert parts is None or parts.events == []


def test_devices_are_described_once_then_on_change_then_now_and_again() -> None:
    clock = ManualClock()
    intake = Intake("n1", clock, simulated=True)
    took(intake, clock, gpu_reading())
    [device] = cut(intake).devices
    assert (device.device, device.serial, device.simulated) == ("n1/gpu0", "GPU-gpu0", True)
    took(intake, clock, gpu_reading())
    assert cut(intake).devices == []
    took(intake, clock, Reading(devices=[Device("gpu0", "gpu", "H100", "GPU-swapped", "0000:3b:00")]))
    assert [d.serial for d in cut(intake).devices] == ["GPU-swapped"]
    clock.advance(DEVICES_EVERY_S)
    took(intake, clock, gpu_reading())
    assert len(cut(intake).devices) == 1


def test_a_simulated_device_stays_simulated_on_a_real_agent() -> None:
    clock = ManualClock()
    intake = Intake("n1", clock)
    took(intake, clock, Reading(devices=[Device("gpu0", "gpu", simulated=True)]))
    took(intake, clock, Reading(devices=[Device("gpu0", "gpu", model="H100")]), "dcgm")
    [device] = cut(intake).devices
    assert device.simulated and device.model == "H100"


def test_a_late_reading_keeps_its_events_and_loses_its_numbers() -> None:
    clock = ManualClock()
    intake = Intake("n1", clock)
    took(intake, clock, gpu_reading(events=[Event("", "oom", "kill", "error", "m")]), late=True)
    parts = cut(intake)
    assert parts.frames == [] and len(parts.events) == 1


def test_what_dcgm_and_nvml_both_give_is_taken_from_nvml() -> None:
    clock = ManualClock()
    intake = Intake("n1", clock)
    took(intake, clock, gpu_reading(41.0))
    other = [Sample("gpu0", "gpu_temperature_celsius", 99.0), Sample("gpu0", "gpu_tensor_active_ratio", 0.5)]
    took(intake, clock, Reading(samples=other), "dcgm")
    frames = cut(intake).frames
    assert values(frames[1]).keys() & {("n1/gpu0", "gpu_temperature_celsius")} == set()
    assert values(frames[1])["n1/gpu0", "gpu_tensor_active_ratio"] == 0.5
    # Once NVML is silent, DCGM is believed.
    intake.take(Outcome("nvml", "silent", clock.now(), 1.0, Reading()))
    took(intake, clock, Reading(samples=other), "dcgm")
    assert shown(intake)["gpu0", "gpu_temperature_celsius"] == 99.0


def test_the_page_forgets_a_device_that_is_gone_and_a_source_that_fails() -> None:
    clock = ManualClock()
    intake = Intake("n1", clock)
    both = gpu_reading()
    both.samples.extend(gpu_reading(device="gpu1").samples)
    took(intake, clock, both)
    clock.advance(10)
    took(intake, clock, gpu_reading())
    assert {device for device, _ in shown(intake)} == {"gpu0"}
    intake.take(Outcome("nvml", "failed", clock.now(), 0.1, Reading()))
    assert shown(intake) == {}


def test_a_metric_read_more_seldom_stays_on_the_page_between_its_readings() -> None:
    clock = ManualClock()
    intake = Intake("n1", clock)
    slow = Sample("gpu0", "gpu_ecc_enabled", 1.0)
    for i in range(13):
        reading = gpu_reading()
        if i % 6 == 0:
            reading.samples.append(slow)
        took(intake, clock, reading)
        assert shown(intake)["gpu0", "gpu_ecc_enabled"] == 1.0
        clock.advance(10)
    for _ in range(30):  # it never comes again
        took(intake, clock, gpu_reading())
        clock.advance(10)
    assert ("gpu0", "gpu_ecc_enabled") not in shown(intake)


def test_labels_that_do_not_come_again_are_gone() -> None:
    clock = ManualClock()
    intake = Intake("n1", clock)
    for verdict in ("healthy", "at_risk"):
        took(intake, clock, Reading([Sample("sda", "disk_verdict", 1.0, {"verdict": verdict})]), "smart")
        clock.advance(60)
    assert [labels for (_, _, labels), _ in intake.latest()] == [(("verdict", "at_risk"),)]


def test_gaps_and_missing_metrics_of_a_gpu_are_signals() -> None:
    clock = ManualClock()
    intake = Intake("n1", clock)
    for _ in range(3):
        took(intake, clock, gpu_reading())
        clock.advance(10)
    clock.advance(50)
    took(intake, clock, Reading(samples=gpu_reading().samples[:1]))
    last = values(cut(intake).frames[-1])
    assert last["n1/gpu0", "gpu_poll_gap_seconds"] == 60.0
    assert last["n1/gpu0", "gpu_metrics_missing"] == 1.0
    assert intake.missing_devices() == 0


def test_a_device_that_disappears_is_counted_until_it_returns() -> None:
    clock = ManualClock()
    intake = Intake("n1", clock)
    for _ in range(3):
        took(intake, clock, gpu_reading())
        clock.advance(10)
    for _ in range(6):
        took(intake, clock, Reading())
        clock.advance(10)
    assert intake.missing_devices() == 1
    took(intake, clock, gpu_reading())
    assert intake.missing_devices() == 0


def test_an_outage_does_not_become_usual() -> None:
    clock = ManualClock()
    intake = Intake("n1", clock)
    for _ in range(10):
        took(intake, clock, gpu_reading())
        clock.advance(10)
    clock.advance(3600)
    took(intake, clock, gpu_reading())
    clock.advance(100)
    assert intake.missing_devices() == 1


def test_states_travel_with_the_batch_of_their_events() -> None:
    clock = ManualClock()
    intake = Intake("n1", clock)
    took(intake, clock, Reading(), "kernel_log", state={"place": 1})
    assert cut(intake).states == {"kernel_log": {"place": 1}}
