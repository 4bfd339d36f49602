"""What every collector must keep to, run over each that is registered. A new source gets one entry in SOURCES."""

from __future__ import annotations

import importlib
import math
import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from forewarn.collectors import registry
from forewarn.collectors.base import SEVERITIES, Collector, Reading
from forewarn.collectors.catalog import EVENTS, METRICS
from forewarn.collectors.clock import SystemClock
from forewarn.collectors.errors import UnavailableError
from forewarn.daemon.agent.single import collect_within
from forewarn.daemon.agent.usage import children
from simnvml import build
from simnvml.control import SimulatedDriver
from support.standins import http_server, url_of, write_smartctl

CASES = Path(__file__).parents[1] / "cases"
DEVICE_KINDS = {"gpu", "disk", "nic", "node", "job"}
PCI = re.compile(r"[0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}(\.[0-7])?")
NO_GCC = build.missing()


@dataclass
class Bench:
    """A folder for inputs, and an end for what is started."""

    folder: Path
    stack: ExitStack = field(default_factory=ExitStack)

    def create(self, name: str, *, root: str | Path = "/", **options: Any) -> Collector:
        collector = registry.create(name, options, registry.Setup(SystemClock(), Path(root)))
        self.stack.callback(collector.close)
        return collector

    def silent_port(self) -> int:
        """A port where connections are taken and nothing is ever said."""
        server = self.stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        return int(server.getsockname()[1])

    def program(self, text: str) -> Path:
        path = self.folder / "program"
        path.write_text(text)
        path.chmod(0o755)
        return path


# Each source: well (its input is there), absent (it is not), and hung (it never answers), where that can be made.


def nvml_well(bench: Bench) -> Collector:
    driver = SimulatedDriver(bench.folder / "driver", ["H100", "A100", "GEFORCE"])
    driver.xid(0, 79)
    return bench.create("nvml", library=str(driver.library))


def nvml_hung(bench: Bench) -> Collector:
    driver = SimulatedDriver(bench.folder / "driver", 2)
    driver.hang("nvmlDeviceGetPowerUsage")
    bench.stack.callback(driver.release, "nvmlDeviceGetPowerUsage")
    return bench.create("nvml", library=str(driver.library), call_deadline_s=0.5)


def dcgm_well(bench: Bench) -> Collector:
    page = (CASES / "dcgm" / "default.prom").read_bytes()
    server = bench.stack.enter_context(http_server(page))
    return bench.create("dcgm", url=url_of(server, "/metrics"))


def dcgm_hung(bench: Bench) -> Collector:
    return bench.create("dcgm", url=f"http://127.0.0.1:{bench.silent_port()}/metrics", timeout_s=0.5)


def smart_well(bench: Bench) -> Collector:
    recordings = CASES / "e2e"
    disks = {
        "/dev/sda": (recordings / "ST3500418AS_12.json", "sat", "ATA"),
        "/dev/sdb": (recordings / "sas_seagate_failing.json", "scsi", "SCSI"),
        "/dev/nvme0": (recordings / "nvme-null-INTEL_SSDPE2KX010T8-nvme1.json", "nvme", "NVMe"),
    }
    return bench.create("smart", smartctl=str(write_smartctl(bench.folder / "smartctl", disks)))


def smart_hung(bench: Bench) -> Collector:
    program = bench.program("#!/bin/sh\nexec sleep 600\n")
    return bench.create("smart", smartctl=str(program), devices=["/dev/sda"], call_timeout_s=0.5)


def kernel_log_well(bench: Bench) -> Collector:
    lines = [line.split("\t")[0] for line in (CASES / "kmsg" / "kinds.tsv").read_text().splitlines()[1:]]
    path = bench.folder / "kern.log"
    path.write_text("".join(f"{line}\n" for line in lines))
    return bench.create("kernel_log", path=str(path))


def kernel_log_hung(bench: Bench) -> Collector:
    path = bench.folder / "pipe"
    os.mkfifo(path)
    return bench.create("kernel_log", path=str(path))


def fabric_well(bench: Bench) -> Collector:
    for line in (CASES / "sysfs" / "fabric.txt").read_text().splitlines():
        name, linked, target = line.partition(" -> ")
        value = ""
        if not linked:
            name, _, value = line.partition(" = ")
        if line.startswith("#"):
            continue
        path = bench.folder / "sys" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if linked:
            path.symlink_to(target)
        else:
            path.write_text(value.replace("\\n", "\n") + "\n")
    return bench.create("fabric", root=bench.folder)


def training_well(bench: Bench) -> Collector:
    folder = bench.folder / "progress"
    folder.mkdir()
    (folder / "rank3.json").write_text('{"job": "llama", "rank": 3, "step": 12, "seconds": 1.9, "loss": 2.1}')
    return bench.create("training", path=str(bench.folder / "socket"), folder=str(folder))


def training_absent(bench: Bench) -> Collector:
    (bench.folder / "file").touch()
    return bench.create("training", path=str(bench.folder / "file" / "socket"), folder="")


@dataclass(frozen=True)
class Source:
    """How to put one collector before an input that is well, absent or hung."""

    well: Callable[[Bench], Collector]
    absent: Callable[[Bench], Collector]
    hung: Callable[[Bench], Collector] | None = None
    gcc: bool = False


SOURCES = {
    "nvml": Source(
        nvml_well,
        lambda b: b.create("nvml", library=str(b.folder / "libnvidia-ml.so.1"), start_deadline_s=5.0),
        nvml_hung,
        gcc=True,
    ),
    "dcgm": Source(dcgm_well, lambda b: b.create("dcgm", url="http://127.0.0.1:9/metrics"), dcgm_hung),
    "smart": Source(smart_well, lambda b: b.create("smart", smartctl=str(b.folder / "none")), smart_hung),
    "kernel_log": Source(
        kernel_log_well, lambda b: b.create("kernel_log", path=str(b.folder / "none")), kernel_log_hung
    ),
    "fabric": Source(fabric_well, lambda b: b.create("fabric", root=b.folder / "none")),
    "training": Source(training_well, training_absent),
    "host": Source(lambda b: b.create("host"), lambda b: b.create("host", root=b.folder / "none")),
}

EVERY = pytest.mark.parametrize("name", registry.COLLECTORS)


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    bench = Bench(tmp_path)
    with bench.stack:
        yield bench


def source_of(name: str) -> Source:
    source = SOURCES[name]
    if source.gcc and NO_GCC:
        pytest.skip(NO_GCC)
    return source


def read(collector: Collector, passes: int = 3) -> list[Reading]:
    """A few passes: some sources give rates and events only from the second on."""
    readings = []
    for _ in range(passes):
        readings.append(collector.collect())
        time.sleep(0.05)
    assert any(r.samples or r.events or r.devices for r in readings), (
        "the input that should be well gave nothing"
    )
    return readings


def test_every_registered_collector_is_held_to_this() -> None:
    assert set(SOURCES) == set(registry.COLLECTORS)


@EVERY
def test_it_is_a_collector(bench: Bench, name: str) -> None:
    collector = source_of(name).well(bench)
    assert isinstance(collector, Collector)
    assert collector.name == name
    assert collector.interval_s > 0
    assert 0 < collector.deadline_s <= 60


@EVERY
def test_names_are_those_of_the_catalog(bench: Bench, name: str) -> None:
    for reading in read(source_of(name).well(bench)):
        for s in reading.samples:
            assert s.metric in METRICS, s
            assert set(s.labels) <= set(METRICS[s.metric].labels), s
        for e in reading.events:
            assert e.kind in EVENTS, e
            assert e.severity in SEVERITIES, e
            assert e.count >= 1 and e.code and e.message, e
            assert e.pci is None or PCI.fullmatch(e.pci), e
        for d in reading.devices:
            assert d.kind in DEVICE_KINDS, d
            assert d.pci is None or PCI.fullmatch(d.pci), d
        for error in reading.errors:
            assert error.source == name and error.message, error


@EVERY
def test_devices_are_local_names_and_fit_their_metrics(bench: Bench, name: str) -> None:
    for reading in read(source_of(name).well(bench)):
        told = {d.device: d for d in reading.devices}
        names = {r.device for r in reading.samples} | {r.device for r in reading.events} | set(told)
        assert not [n for n in names if "/" in n or any(c.isspace() for c in n)]
        for s in reading.samples:
            kind = METRICS[s.metric].kind
            assert (s.device == "") == (kind == "node") or kind == "job", s
            if s.device in told:
                assert told[s.device].kind == kind or kind == "job", s


@EVERY
def test_one_value_for_each_device_metric_and_labels(bench: Bench, name: str) -> None:
    for reading in read(source_of(name).well(bench)):
        keys = [(s.device, s.metric, *sorted(s.labels.items())) for s in reading.samples]
        assert len(keys) == len(set(keys)), sorted(k for k in keys if keys.count(k) > 1)


@EVERY
def test_values_are_sane_in_their_unit(bench: Bench, name: str) -> None:
    for reading in read(source_of(name).well(bench)):
        for s in reading.samples:
            metric = METRICS[s.metric]
            assert math.isfinite(s.value), s
            if metric.type == "counter":
                assert s.value >= 0, s
            if metric.unit == "ratio":
                assert 0 <= s.value <= (3 if "used" in metric.name else 1), s
            if metric.unit == "celsius":
                assert -60 < s.value < 200, s
            if metric.unit == "hertz" and s.value:
                assert 1e6 < s.value < 1e11, s
            if metric.unit == "watts":
                assert 0 <= s.value < 20_000, s
            if metric.help.startswith("1 "):
                assert s.value in (0, 1), s


@EVERY
def test_counters_do_not_fall_between_passes(bench: Bench, name: str) -> None:
    last: dict[tuple[Any, ...], float] = {}
    for reading in read(source_of(name).well(bench)):
        for s in reading.samples:
            if METRICS[s.metric].type == "counter":
                key = (s.device, s.metric, *sorted(s.labels.items()))
                assert s.value >= last.get(key, 0), s
                last[key] = s.value


@EVERY
def test_an_absent_source_is_unavailable_with_a_way_out_and_never_zero(bench: Bench, name: str) -> None:
    collector = source_of(name).absent(bench)
    for _ in range(2):
        with pytest.raises(UnavailableError) as caught:
            collector.collect()
        text = str(caught.value)
        assert re.search(name.replace("_", "[ _]"), text, re.IGNORECASE) and len(text) > 30, text


@pytest.mark.parametrize("name", [n for n, s in SOURCES.items() if s.hung is not None])
def test_a_hung_source_keeps_the_deadline(bench: Bench, name: str) -> None:
    """The collector itself ends in its time: with what it has, or as unavailable; never by being abandoned."""
    hung = source_of(name).hung
    assert hung is not None
    collector = hung(bench)
    for _ in range(2):
        _, failure = collect_within(collector, collector.deadline_s)
        assert failure is None or "the source hangs" not in failure.message
        assert failure is None or "this is a bug" not in failure.remedy, failure


@EVERY
def test_nothing_is_printed(bench: Bench, name: str, capfd: pytest.CaptureFixture[str]) -> None:
    collector = source_of(name).well(bench)
    capfd.readouterr()
    read(collector)
    collector.close()
    assert capfd.readouterr() == ("", "")


@EVERY
def test_close_gives_everything_back_and_may_be_called_again(bench: Bench, name: str) -> None:
    def held() -> tuple[int, set[int], set[str]]:
        threads = {t.name for t in threading.enumerate()}
        return len(list(Path("/proc/self/fd").iterdir())), set(children()), threads

    collector = source_of(name).well(bench)
    before = held()
    read(collector)
    collector.close()
    collector.close()
    end = time.monotonic() + 10
    while held() != before and time.monotonic() < end:
        time.sleep(0.05)
    files, processes, threads = held()
    assert processes <= before[1]
    assert threads <= before[2]
    assert files <= before[0]


@EVERY
def test_it_imports_nothing_of_the_centre(name: str) -> None:
    module = registry.COLLECTORS[name].partition(":")[0]
    script = f"import sys, {module}; print(*sys.modules)"
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    loaded = set(run.stdout.split())
    assert not {m for m in loaded if m.startswith(("forewarn.models", "forewarn.daemon"))}
    assert not loaded & {"numpy", "pandas", "pydantic", "httpx", "sqlalchemy", "fastapi", "structlog"}


@EVERY
def test_it_says_what_it_is_in_its_docstring(name: str) -> None:
    module, _, class_name = registry.COLLECTORS[name].partition(":")
    loaded = importlib.import_module(module)
    assert (loaded.__doc__ or "").strip() and (getattr(loaded, class_name).__doc__ or "").strip()


@pytest.mark.skipif(bool(NO_GCC), reason=NO_GCC or "gcc is there")
def test_what_a_gpu_does_not_support_is_absent(bench: Bench) -> None:
    driver = SimulatedDriver(bench.folder / "driver", ["H100", "GEFORCE"])
    collector = bench.create("nvml", library=str(driver.library))
    of = {"gpu0": set[str](), "gpu1": set[str]()}
    for reading in read(collector):
        for s in reading.samples:
            of[s.device].add(s.metric)
    server_only = {"gpu_ecc_dram_uncorrected_total", "gpu_row_remap_pending", "gpu_nvlink_links_active"}
    assert server_only <= of["gpu0"]
    assert not server_only & of["gpu1"]


def test_what_a_drive_does_not_have_is_absent(bench: Bench) -> None:
    reading = smart_well(bench).collect()
    of: dict[str, set[str]] = {}
    for s in reading.samples:
        of.setdefault(s.device, set()).add(s.metric)
    assert not {m for m in of["sda"] | of["sdb"] if "nvme" in m}
    assert "disk_pending_sectors" not in of["nvme0"] and "disk_pending_sectors" not in of["sdb"]
    assert "disk_grown_defects" not in of["sda"]
