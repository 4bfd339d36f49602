"""The node's own metrics, on trees of /proc and /sys that the tests write."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forewarn.collectors.base import Collector, Reading
from forewarn.collectors.catalog import METRICS
from forewarn.collectors.clock import ManualClock, SystemClock
from forewarn.collectors.errors import UnavailableError
from forewarn.collectors.host import HostCollector
from forewarn.collectors.registry import Setup, create
from forewarn.collectors.sysfs import number, read_number, read_text

TREE = {
    "proc/stat": "cpu  100 0 100 800 0 0 0 0 0 0\ncpu0 50 0 50 400 0 0 0 0 0 0\ncpu1 50 0 50 400 0 0 0 0 0 0\n"
    "procs_blocked 3\n",
    "proc/loadavg": "12.50 9.00 8.00 3/900 4242\n",
    "proc/uptime": "86400.55 1000.00\n",
    "proc/meminfo": "MemTotal:       1000 kB\nMemAvailable:    250 kB\nDirty:  4 kB\n"
    "HardwareCorrupted:     8 kB\nBroken\nX: \n",
    "proc/vmstat": "nr_free_pages 5\noom_kill 7\n",
    "proc/pressure/cpu": "some avg10=0.00 avg60=0.00 avg300=0.00 total=5000000\nfull avg10=0.00 total=0\n",
    "proc/pressure/memory": "some avg10=0.00 total=2000000\nfull avg10=0.00 total=1000000\n",
    "proc/pressure/io": "some avg10=0.00 total=400000\nfull avg10=0.00 total=300000\n",
    "proc/sys/kernel/tainted": "4097\n",
    "proc/sys/kernel/osrelease": "6.8.0-45-generic\n",
    "proc/sys/kernel/random/boot_id": "b-1\n",
    "proc/sys/fs/file-nr": "1000\t0\t4000\n",
    "proc/diskstats": " 259 0 nvme0n1 1000 0 0 2000 500 0 0 1000 0 1500 0\n"
    "   8 0 sda 10 0 0 100 0 0 0 0 0 50 0\n   8 1 sda1 10 0 0 100 0 0 0 0 0 50 0\n"
    "   7 0 loop0 9 0 0 9 9 0 0 9 0 9 0\n",
    "sys/devices/system/edac/mc/mc0/ce_count": "12\n",
    "sys/devices/system/edac/mc/mc0/ue_count": "0\n",
    "sys/devices/system/edac/mc/mc1/ce_count": "3\n",
    "sys/devices/system/edac/mc/mc1/ue_count": "1\n",
    "sys/class/thermal/thermal_zone0/temp": "47000\n",
    "sys/class/thermal/thermal_zone0/type": "acpitz\n",
    "sys/class/thermal/thermal_zone1/temp": "61000\n",
    "sys/class/thermal/thermal_zone1/type": "x86_pkg_temp\n",
    "sys/class/thermal/thermal_zone2/temp": "-274000\n",
    "sys/class/hwmon/hwmon0/name": "coretemp\n",
    "sys/class/hwmon/hwmon0/temp1_input": "64000\n",
    "sys/class/hwmon/hwmon1/name": "nvme\n",
    "sys/class/hwmon/hwmon1/temp1_input": "80000\n",
    "sys/devices/system/cpu/cpu0/topology/physical_package_id": "0\n",
    "sys/devices/system/cpu/cpu0/thermal_throttle/package_throttle_count": "5\n",
    "sys/devices/system/cpu/cpu1/topology/physical_package_id": "0\n",
    "sys/devices/system/cpu/cpu1/thermal_throttle/package_throttle_count": "5\n",
    "sys/devices/system/cpu/cpu2/topology/physical_package_id": "1\n",
    "sys/devices/system/cpu/cpu2/thermal_throttle/package_throttle_count": "2\n",
    "sys/class/dmi/id/sys_vendor": "Supermicro\n",
    "sys/class/dmi/id/product_name": "AS-8125GS-TNHR\n",
}  # fmt: skip


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for name, text in TREE.items():
        _write(tmp_path, name, text)
    _write(tmp_path, "proc/mounts", "/dev/nvme0n1p1 / ext4 rw,relatime 0 0\nnfs:/home /home nfs4 rw 0 0\n")
    return tmp_path


def _write(root: Path, name: str, text: str) -> None:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def _values(reading: Reading) -> dict[str, float]:
    return {s.metric: s.value for s in reading.samples if s.device == "" and not s.labels}


def test_a_node_in_catalog_units(root: Path) -> None:
    reading = HostCollector(Setup(ManualClock(), root)).collect()
    values = _values(reading)
    space = {k: values.pop(k) for k in list(values) if k.startswith("node_filesystem")}
    assert values == pytest.approx(
        {
            "node_cpus": 2,
            "node_processes_blocked": 3,
            "node_load1": 12.5,
            "node_uptime_seconds": 86400.55,
            "node_memory_total_bytes": 1024000,
            "node_memory_available_bytes": 256000,
            "node_memory_dirty_bytes": 4096,
            "node_memory_corrupted_bytes": 8192,
            "node_oom_kills_total": 7,
            "node_pressure_cpu_waiting_seconds_total": 5,
            "node_pressure_memory_waiting_seconds_total": 2,
            "node_pressure_memory_stalled_seconds_total": 1,
            "node_pressure_io_waiting_seconds_total": 0.4,
            "node_pressure_io_stalled_seconds_total": 0.3,
            "node_edac_corrected_errors_total": 15,
            "node_edac_uncorrected_errors_total": 1,
            "node_cpu_temperature_celsius": 64,
            "node_cpu_throttles_total": 7,
            "node_kernel_taint": 4097,
            "node_open_files_ratio": 0.25,
            "node_clock_steps_total": 0,
        }
    )
    assert 0 < space["node_filesystem_used_max_ratio"] <= 1
    assert space["node_filesystems_read_only"] == 0
    zones = {s.labels["zone"]: s.value for s in reading.samples if s.metric == "node_thermal_zone_celsius"}
    assert zones == {"thermal_zone0": 47.0, "thermal_zone1": 61.0}
    (node,) = reading.devices
    assert (node.kind, node.model) == ("node", "Supermicro AS-8125GS-TNHR")
    assert node.labels == {"kernel": "6.8.0-45-generic", "boot": "b-1"}


def test_every_sample_is_in_the_catalog(root: Path) -> None:
    collector = HostCollector(Setup(ManualClock(), root))
    collector.collect()
    _write(root, "proc/diskstats", TREE["proc/diskstats"].replace("1000 0 0 2000", "1010 0 0 2100"))
    for sample in collector.collect().samples:
        metric = METRICS[sample.metric]
        assert metric.kind == ("disk" if sample.device else "node")
        assert set(sample.labels) <= set(metric.labels)


def test_cpu_shares_are_of_the_time_since_the_last_poll(root: Path) -> None:
    collector = HostCollector(Setup(ManualClock(), root))
    assert "node_cpu_utilization_ratio" not in _values(collector.collect())
    _write(root, "proc/stat", "cpu  150 0 120 810 10 0 0 10 0 0\n")
    values = _values(collector.collect())
    assert values["node_cpu_utilization_ratio"] == pytest.approx(0.8)
    assert values["node_cpu_iowait_ratio"] == pytest.approx(0.1)
    assert values["node_cpu_steal_ratio"] == pytest.approx(0.1)


def test_disk_latency_between_two_polls(root: Path) -> None:
    clock = ManualClock()
    collector = HostCollector(Setup(clock, root))
    assert not [s for s in collector.collect().samples if s.device]
    clock.advance(10.0)
    _write(
        root,
        "proc/diskstats",
        " 259 0 nvme0n1 1100 0 0 2500 600 0 0 3000 0 6500 0\n   8 0 sda 10 0 0 100 0 0 0 0 0 50 0\n"
        " 259 1 nvme1n1 5 0 0 5 5 0 0 5 0 5 0\n",
    )
    got = {(s.device, s.metric): s.value for s in collector.collect().samples if s.device}
    assert got == pytest.approx(
        {
            ("nvme0", "disk_read_latency_seconds"): 0.005,
            ("nvme0", "disk_write_latency_seconds"): 0.02,
            ("nvme0", "disk_busy_ratio"): 0.5,
            ("sda", "disk_busy_ratio"): 0.0,
        }
    )


def test_a_replaced_disk_gives_no_negative_latency(root: Path) -> None:
    clock = ManualClock()
    collector = HostCollector(Setup(clock, root))
    collector.collect()
    clock.advance(10.0)
    _write(root, "proc/diskstats", " 259 0 nvme0n1 1 0 0 2 5 0 0 1 0 1 0\n")
    assert not [s for s in collector.collect().samples if s.device]


def test_a_file_system_that_turns_read_only_is_one_event(root: Path) -> None:
    collector = HostCollector(Setup(ManualClock(), root))
    assert collector.collect().events == []
    _write(root, "proc/mounts", "/dev/nvme0n1p1 / ext4 ro,relatime 0 0\n")
    reading = collector.collect()
    (event,) = reading.events
    assert (event.kind, event.code, event.severity, event.device) == (
        "filesystem",
        "read_only",
        "critical",
        "nvme0",
    )
    assert _values(reading)["node_filesystems_read_only"] == 1
    assert collector.collect().events == []


def test_one_that_was_always_read_only_is_none(root: Path) -> None:
    _write(root, "proc/mounts", "/dev/nvme0n1p1 / ext4 ro,relatime 0 0\n")
    assert HostCollector(Setup(ManualClock(), root)).collect().events == []


def test_network_mounts_are_never_touched(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def statvfs(path: Path) -> None:
        asked.append(str(path))
        raise OSError

    monkeypatch.setattr("forewarn.collectors.host_storage.os.statvfs", statvfs)
    HostCollector(Setup(ManualClock(), root)).collect()
    assert asked == [str(root)]


def test_clock_steps_are_counted_and_slews_are_not(root: Path) -> None:
    clock = ManualClock()
    collector = HostCollector(Setup(clock, root))
    collector.collect()
    clock.advance(15.0)
    clock.step(0.007)
    assert _values(collector.collect())["node_clock_steps_total"] == 0
    clock.advance(15.0)
    clock.step(-4.0)
    assert _values(collector.collect())["node_clock_steps_total"] == 1


def test_without_proc_it_says_so(tmp_path: Path) -> None:
    with pytest.raises(UnavailableError, match="proc"):
        HostCollector(Setup(ManualClock(), tmp_path)).collect()


def test_what_is_not_there_is_absent(tmp_path: Path) -> None:
    _write(tmp_path, "proc/stat", "")
    reading = HostCollector(Setup(ManualClock(), tmp_path)).collect()
    assert _values(reading) == {"node_clock_steps_total": 0.0}
    assert reading.errors == []


def test_this_host_can_be_read() -> None:
    made = create("host", {}, Setup(SystemClock()))
    assert isinstance(made, Collector)
    made.collect()
    values = _values(made.collect())
    assert values["node_memory_total_bytes"] > 0
    assert values["node_clock_synchronized"] in (0.0, 1.0)
    made.close()


@pytest.mark.parametrize(
    ("word", "value"), [("12", 12.0), ("0x1F", 31.0), ("-3", -3.0), ("nan", None), ("x", None), ("", None)]
)
def test_numbers(word: str, value: float | None) -> None:
    assert number(word) == value


def test_files_that_cannot_be_read_are_none(tmp_path: Path) -> None:
    assert read_text(tmp_path) is None
    assert read_text(tmp_path / "none") is None
    (tmp_path / "empty").touch()
    assert read_number(tmp_path / "empty") is None
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\x00")
    assert read_number(tmp_path / "bytes") is None


@settings(max_examples=80, deadline=None)
@given(
    name=st.sampled_from(sorted(TREE)),
    content=st.one_of(st.text(max_size=200), st.just("1 " * 500), st.just("1e999")),
)
def test_any_content_of_any_file_is_read(
    tmp_path_factory: pytest.TempPathFactory, name: str, content: str
) -> None:
    root = tmp_path_factory.mktemp("host")
    for file, text in TREE.items():
        _write(root, file, text)
    collector = HostCollector(Setup(ManualClock(), root))
    collector.collect()
    (root / name).write_text(content, encoding="utf-8")
    for sample in collector.collect().samples:
        assert sample.metric in METRICS
        assert sample.value == sample.value
