"""The node itself: CPU, memory, pressure, host memory errors, temperatures, clock, kernel taint.

Reads /proc and /sys below `setup.root`; disks and file systems stand in `host_storage`. Without the first there
is no reading; everything else is absent where the kernel does not give it.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

from forewarn.collectors.base import Device, Reading, Sample
from forewarn.collectors.errors import UnavailableError
from forewarn.collectors.host_storage import DiskLatency, FileSystems
from forewarn.collectors.registry import Setup
from forewarn.collectors.sysfs import entries, number, pairs, read_number, read_text

SOURCE = "host"
CLOCK_STEP_S = 0.5
"""Wall and monotonic time may drift apart by slewing (500 ppm at most: 15 ms in 30 s); more is a step."""
_CPU_SENSORS = ("coretemp", "k10temp", "zenpower", "cpu_thermal", "x86_pkg_temp", "soc_thermal")
_STA_UNSYNC = 0x0040
_STA_NANO = 0x2000
_PRESSURE = {
    ("cpu", "some"): "node_pressure_cpu_waiting_seconds_total",
    ("memory", "some"): "node_pressure_memory_waiting_seconds_total",
    ("memory", "full"): "node_pressure_memory_stalled_seconds_total",
    ("io", "some"): "node_pressure_io_waiting_seconds_total",
    ("io", "full"): "node_pressure_io_stalled_seconds_total",
}


class _Timex(ctypes.Structure):
    """struct timex of adjtimex(2), as far as it is read here."""

    _fields_ = (
        ("modes", ctypes.c_uint),
        ("offset", ctypes.c_long),
        ("freq", ctypes.c_long),
        ("maxerror", ctypes.c_long),
        ("esterror", ctypes.c_long),
        ("status", ctypes.c_int),
        ("constant", ctypes.c_long),
        ("precision", ctypes.c_long),
        ("tolerance", ctypes.c_long),
        ("time_sec", ctypes.c_long),
        ("time_usec", ctypes.c_long),
        ("tick", ctypes.c_long),
        ("rest", ctypes.c_long * 24),
    )


class HostCollector:
    """Metrics of the node (device ""), and I/O latency of its disks (`nvme0`, `sda`).

    `mounts` limits the file systems that are looked at (default: all on local disks). The clock's offset comes
    from adjtimex(2), so it is this host's own whatever `setup.root` is; with another root it is left out.
    """

    name = SOURCE

    def __init__(
        self,
        setup: Setup,
        *,
        interval_s: float = 15.0,
        deadline_s: float = 5.0,
        mounts: list[str] | None = None,
    ) -> None:
        self.interval_s = interval_s
        self.deadline_s = deadline_s
        self._setup = setup
        self._proc = setup.root / "proc"
        self._sys = setup.root / "sys"
        self._cpu_before: tuple[float, ...] | None = None
        self._clocks_before: tuple[float, float] | None = None
        self._steps = 0
        self._read_before: float | None = None
        self._packages: list[Path] | None = None
        self._disks = DiskLatency(self._proc / "diskstats")
        self._filesystems = FileSystems(setup.root, mounts)

    def collect(self) -> Reading:
        """One reading. Raises UnavailableError when there is no /proc."""
        stat = read_text(self._proc / "stat")
        if stat is None:
            raise UnavailableError(f"host: {self._proc}/stat cannot be read: is /proc mounted there?")
        reading = Reading(samples=[], events=[], devices=[], errors=[])
        values: dict[str, float | None] = {}
        self._cpu(stat, values)
        self._load(values)
        self._memory(values)
        self._pressure(values)
        self._edac(values)
        self._heat(values, reading.samples)
        self._kernel(values)
        self._clock(values)
        reading.samples.extend(Sample("", k, v) for k, v in values.items() if v is not None)
        samples, events = self._filesystems.read()
        reading.samples.extend(samples)
        reading.events.extend(events)
        now = self._setup.clock.monotonic()
        elapsed, self._read_before = now - self._read_before if self._read_before is not None else None, now
        reading.samples.extend(self._disks.read(elapsed))
        reading.devices.append(self._node())
        return reading

    def close(self) -> None:
        pass

    def _cpu(self, stat: str, values: dict[str, float | None]) -> None:
        cpus = 0
        for line in stat.splitlines():
            name, *words = line.split()
            if name == "cpu":
                now = tuple(number(w) or 0.0 for w in words[:8])
                if len(now) == 8:
                    self._cpu_shares(now, values)
            elif name.startswith("cpu"):
                cpus += 1
            elif name == "procs_blocked" and words:
                values["node_processes_blocked"] = number(words[0])
        if cpus:
            values["node_cpus"] = float(cpus)

    def _cpu_shares(self, now: tuple[float, ...], values: dict[str, float | None]) -> None:
        before, self._cpu_before = self._cpu_before, now
        if before is None:
            return
        spent = [max(0.0, b - a) for a, b in zip(before, now, strict=True)]
        total = sum(spent)
        if total <= 0:
            return
        _user, _nice, _system, idle, iowait, _irq, _softirq, steal = spent
        values["node_cpu_utilization_ratio"] = (total - idle - iowait) / total
        values["node_cpu_iowait_ratio"] = iowait / total
        values["node_cpu_steal_ratio"] = steal / total

    def _load(self, values: dict[str, float | None]) -> None:
        values["node_load1"] = read_number(self._proc / "loadavg")
        values["node_uptime_seconds"] = read_number(self._proc / "uptime")

    def _memory(self, values: dict[str, float | None]) -> None:
        names = {
            "MemTotal": "node_memory_total_bytes",
            "MemAvailable": "node_memory_available_bytes",
            "HardwareCorrupted": "node_memory_corrupted_bytes",
            "Dirty": "node_memory_dirty_bytes",
        }
        for name, value in pairs(read_text(self._proc / "meminfo") or ""):
            if name in names and (kib := number(value.split()[0] if value else "")) is not None:
                values[names[name]] = kib * 1024
        for line in (read_text(self._proc / "vmstat") or "").splitlines():
            name, _, count = line.partition(" ")
            if name == "oom_kill":
                values["node_oom_kills_total"] = number(count)

    def _pressure(self, values: dict[str, float | None]) -> None:
        for resource in ("cpu", "memory", "io"):
            for line in (read_text(self._proc / "pressure" / resource) or "").splitlines():
                kind, _, rest = line.partition(" ")
                metric = _PRESSURE.get((resource, kind))
                total = rest.rpartition("total=")[2]
                if metric and (microseconds := number(total)) is not None:
                    values[metric] = microseconds / 1e6

    def _edac(self, values: dict[str, float | None]) -> None:
        for file, metric in (
            ("ce_count", "node_edac_corrected_errors_total"),
            ("ue_count", "node_edac_uncorrected_errors_total"),
        ):
            counts = [
                read_number(c / file) for c in entries(self._sys / "devices/system/edac/mc", "mc[0-9]*")
            ]
            known = [c for c in counts if c is not None]
            if known:
                values[metric] = sum(known)

    def _heat(self, values: dict[str, float | None], samples: list[Sample]) -> None:
        hottest: list[float] = []
        for zone in entries(self._sys / "class/thermal", "thermal_zone[0-9]*"):
            degrees = _milli(read_number(zone / "temp"))
            if degrees is not None:
                kind = read_text(zone / "type") or "unknown"
                samples.append(
                    Sample("", "node_thermal_zone_celsius", degrees, {"zone": zone.name, "type": kind})
                )
                if kind in _CPU_SENSORS:
                    hottest.append(degrees)
        for chip in entries(self._sys / "class/hwmon", "hwmon[0-9]*"):
            if read_text(chip / "name") in _CPU_SENSORS:
                readings = (_milli(read_number(sensor)) for sensor in entries(chip, "temp[0-9]*_input"))
                hottest.extend(degrees for degrees in readings if degrees is not None)
        if hottest:
            values["node_cpu_temperature_celsius"] = max(hottest)
        values["node_cpu_throttles_total"] = self._throttles()

    def _throttles(self) -> float | None:
        """Thermal throttles of each CPU package, from the first CPU of each (all of one give the same)."""
        if self._packages is None:
            first: dict[str, Path] = {}
            for cpu in entries(self._sys / "devices/system/cpu", "cpu[0-9]*"):
                package = read_text(cpu / "topology/physical_package_id")
                counter = cpu / "thermal_throttle/package_throttle_count"
                if package is not None and package not in first and counter.exists():
                    first[package] = counter
            self._packages = list(first.values())
        counts = [c for path in self._packages if (c := read_number(path)) is not None]
        return sum(counts) if counts else None

    def _kernel(self, values: dict[str, float | None]) -> None:
        values["node_kernel_taint"] = read_number(self._proc / "sys/kernel/tainted")
        words = (read_text(self._proc / "sys/fs/file-nr") or "").split()
        if len(words) == 3:
            used, limit = number(words[0]), number(words[2])
            if used is not None and limit:
                values["node_open_files_ratio"] = min(1.0, used / limit)

    def _clock(self, values: dict[str, float | None]) -> None:
        now, monotonic = self._setup.clock.now(), self._setup.clock.monotonic()
        if self._clocks_before is not None:
            wall, running = now - self._clocks_before[0], monotonic - self._clocks_before[1]
            if abs(wall - running) > CLOCK_STEP_S:
                self._steps += 1
        self._clocks_before = (now, monotonic)
        values["node_clock_steps_total"] = float(self._steps)
        if self._setup.root == Path("/") and (timex := _adjtimex()) is not None:
            unit = 1e-9 if timex.status & _STA_NANO else 1e-6
            synchronized = not timex.status & _STA_UNSYNC
            values["node_clock_synchronized"] = float(synchronized)
            if synchronized:
                values["node_clock_offset_seconds"] = abs(timex.offset * unit)
                values["node_clock_error_seconds"] = timex.maxerror * 1e-6

    def _node(self) -> Device:
        dmi = self._sys / "class/dmi/id"
        vendor, product = read_text(dmi / "sys_vendor") or "", read_text(dmi / "product_name") or ""
        labels = {
            "kernel": read_text(self._proc / "sys/kernel/osrelease") or "",
            "boot": read_text(self._proc / "sys/kernel/random/boot_id") or "",
        }
        return Device(
            device="",
            kind="node",
            model=f"{vendor} {product}".strip(),
            serial=read_text(dmi / "product_serial") or "",
            labels={k: v for k, v in labels.items() if v},
        )


def _milli(value: float | None) -> float | None:
    """Thousandths of a degree to degrees; None for what no sensor of a running machine gives."""
    if value is None:
        return None
    degrees = value / 1000
    return degrees if -40.0 <= degrees <= 150.0 and degrees != 0.0 else None


def _adjtimex() -> _Timex | None:
    """The kernel clock's state; reading it (modes 0) needs no right."""
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        timex = _Timex()
        return timex if libc.adjtimex(ctypes.byref(timex)) >= 0 else None
    except (OSError, AttributeError):
        return None
