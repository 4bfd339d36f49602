"""The node's own page: names by the book, only what is there, nothing for who asks wrongly."""

from __future__ import annotations

import shutil
import subprocess
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from fakes_agent import gpu_reading
from forewarn.collectors.base import Device, Reading, Sample
from forewarn.collectors.catalog import METRICS, exposed_name
from forewarn.collectors.clock import ManualClock
from forewarn.collectors.errors import StorageError
from forewarn.daemon.agent.exposition import MetricsServer, Page, render
from forewarn.daemon.agent.intake import Intake
from forewarn.daemon.agent.scheduler import Outcome


def page_of(*readings: Reading, own: list[Sample] | None = None) -> Page:
    clock = ManualClock()
    intake = Intake("n1", clock)
    for i, reading in enumerate(readings):
        intake.take(Outcome(f"source{i}", "reading", clock.now(), 0.1, reading))
    return Page("n1", intake, lambda: own or [])


def whole_catalog() -> Reading:
    names = {"gpu": "gpu0", "disk": "sda", "nic": "mlx5_0", "node": "", "job": "gpu0"}
    samples = [Sample(names[m.kind], m.name, 1.0, dict.fromkeys(m.labels, "a")) for m in METRICS.values()]
    devices = [Device(names[k], k, f"model of {k}", f"serial-{k}") for k in ("gpu", "disk", "nic", "node")]
    return Reading(samples, devices=devices)


UNPACKED = Path(__file__).parents[3] / "build/debian/usr/bin/promtool"
"""Where scripts/setup.sh puts it."""
PROMTOOL = shutil.which("promtool") or (str(UNPACKED) if UNPACKED.exists() else "")


@pytest.mark.skipif(not PROMTOOL, reason="promtool is not installed")
def test_promtool_finds_nothing_to_say_about_the_whole_catalog() -> None:
    checked = subprocess.run(
        [PROMTOOL, "check", "metrics"],
        input=render(page_of(whole_catalog())),
        capture_output=True,
        check=False,
    )
    assert (checked.returncode, checked.stdout + checked.stderr) == (0, b"")


def test_every_metric_has_a_name_of_its_own() -> None:
    assert len({exposed_name(m) for m in METRICS.values()}) == len(METRICS)


def test_values_labels_and_units() -> None:
    reading = gpu_reading(41.5)
    reading.samples.append(Sample("sda", "disk_power_on_hours", 2.0))
    reading.samples.append(Sample("gpu0", "gpu_ecc_dram_corrected_total", 3.0))
    text = render(page_of(reading)).decode()
    assert 'forewarn_gpu_temperature_celsius{device="gpu0",node="n1",uuid="GPU-gpu0"} 41.5' in text
    assert 'forewarn_disk_power_on_seconds{device="sda",node="n1"} 7200.0' in text
    assert 'forewarn_gpu_ecc_dram_corrected_total{device="gpu0",node="n1",uuid="GPU-gpu0"} 3.0' in text
    assert 'forewarn_device_info{device="gpu0",kind="gpu",model="H100",node="n1"' in text
    families = {f.name: f for f in text_string_to_metric_families(text)}
    assert families["forewarn_gpu_ecc_dram_corrected"].type == "counter"
    assert (
        families["forewarn_gpu_temperature_celsius"].documentation == METRICS["gpu_temperature_celsius"].help
    )


def test_a_sum_does_not_stand_beside_its_parts() -> None:
    name = "gpu_nvlink_replay_errors_total"
    reading = Reading(
        [Sample("gpu0", name, 3.0), Sample("gpu0", name, 1.0, {"link": "0"}), Sample("gpu1", name, 9.0)]
    )
    lines = [
        line
        for line in render(page_of(reading)).decode().splitlines()
        if line.startswith("forewarn_gpu_nvlink")
    ]
    assert sorted(float(line.split()[-1]) for line in lines) == [1.0, 9.0]


def test_odd_text_in_a_model_name_is_escaped() -> None:
    reading = Reading(devices=[Device("", "node", model='a "b"\\c\nd')])
    text = render(page_of(reading)).decode()
    [sample] = [
        s for f in text_string_to_metric_families(text) if f.name == "forewarn_device_info" for s in f.samples
    ]
    assert sample.labels["model"] == 'a "b"\\c\nd'


def test_served_over_http() -> None:
    health = [(True, "ok")]
    server = MetricsServer("127.0.0.1", 0, page_of(gpu_reading()), lambda: health[0])
    server.start()
    base = f"http://127.0.0.1:{server.port}"
    try:
        with urllib.request.urlopen(f"{base}/metrics", timeout=5) as answer:
            assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
            assert b"forewarn_gpu_power_watts" in answer.read()
        with urllib.request.urlopen(f"{base}/healthz", timeout=5) as answer:
            assert answer.read() == b"ok\n"
        health[0] = (False, "main loop silent for 99 s")
        with pytest.raises(urllib.error.HTTPError, match="503"):
            urllib.request.urlopen(f"{base}/healthz", timeout=5)
        with pytest.raises(urllib.error.HTTPError, match="404"):
            urllib.request.urlopen(f"{base}/", timeout=5)
        with pytest.raises(StorageError, match=r"agent\.listen"):
            MetricsServer("127.0.0.1", server.port, page_of(), lambda: (True, "ok"))
    finally:
        server.stop()
