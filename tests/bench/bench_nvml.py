"""What a poll of eight simulated GPUs costs in CPU, against the same readings by bare pynvml calls on the same driver.

CPU time of the agent's side and of its child process together, by the kernel's own count.
"""

from __future__ import annotations

import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

from forewarn.collectors.clock import ManualClock
from forewarn.collectors.errors import UnavailableError
from forewarn.collectors.nvml import NvmlCollector
from forewarn.collectors.registry import Setup
from simnvml import build
from simnvml.control import SimulatedDriver
from simnvml.layout import CALLS

GPUS = 8
ROUNDS = {"fast": 100, "all": 30}
BLOCKS = 7
POLL_BUDGET_MS = 20.0
RATIO_BUDGET = 1.5
RESIDENT_BUDGET_MB = 60.0
PEER_S = 4.0
STEP_S = {"fast": 0.001, "all": 1000.0}

BARE = """
import ctypes, sys, time
ctypes.CDLL(sys.argv[1])
import pynvml as n

rounds, everything = int(sys.argv[2]), sys.argv[3] == "all"
n.nvmlInit()
handles = [n.nvmlDeviceGetHandleByIndex(i) for i in range(n.nvmlDeviceGetCount())]
FAST = [82, 186, 74, 75, 269, 270, 271, 94, 230, 144, 145]
FLAT = [*range(32, 38), *range(96, 102), *range(39, 45), *range(102, 108), *range(46, 52), *range(108, 114),
        *range(53, 59), *range(114, 120)]
MEDIUM = [76, 77, 78, 79, 142, 143, 3, 4, 95, 169, *range(173, 184), *FLAT,
          *((field, link) for field in (161, 162, 163) for link in range(18))]
SLOW = [189, 91]
MEMBER = ["dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal"]

def read_fields(h, ids):
    values = n.nvmlDeviceGetFieldValues(h, ids)
    return {v.fieldId: getattr(v.value, MEMBER[v.valueType]) for v in values if not v.nvmlReturn}

def fast(h):
    out = read_fields(h, FAST)
    u, m = n.nvmlDeviceGetUtilizationRates(h), n.nvmlDeviceGetMemoryInfo(h, n.nvmlMemory_v2)
    return out, [n.nvmlDeviceGetTemperatureV(h, 0), n.nvmlDeviceGetPowerUsage(h),
        n.nvmlDeviceGetTotalEnergyConsumption(h),
        n.nvmlDeviceGetClockInfo(h, 1), n.nvmlDeviceGetClockInfo(h, 2), u.gpu, u.memory, m.used, m.total, m.reserved,
        n.nvmlDeviceGetCurrentClocksEventReasons(h), n.nvmlDeviceGetPerformanceState(h)]

def rest(h):
    out = read_fields(h, MEDIUM[:96]), read_fields(h, MEDIUM[96:]), read_fields(h, SLOW)
    s, f = n.c_nvmlEccSramErrorStatus_v1_t(), n.c_nvmlGpuFabricInfo_v3_t()
    n.nvmlDeviceGetSramEccErrorStatus(h, n.byref(s)); n.nvmlDeviceGetGpuFabricInfoV(h, n.byref(f))
    b = n.nvmlDeviceGetRowRemapperHistogram(h)
    return out, [n.nvmlDeviceGetEnforcedPowerLimit(h), n.nvmlDeviceGetMarginTemperature(h),
        n.nvmlDeviceGetEncoderUtilization(h), n.nvmlDeviceGetDecoderUtilization(h),
        *(n.nvmlDeviceGetMemoryErrorCounter(h, kind, 1, place) for kind in (0, 1) for place in (2, 7)),
        s.aggregateUncParity, s.aggregateUncSecDed, s.aggregateUncBucketL2, s.aggregateUncBucketSm,
        s.aggregateUncBucketPcie, s.aggregateUncBucketMcu, s.aggregateUncBucketOther, s.bThresholdExceeded,
        n.nvmlDeviceGetCurrPcieLinkGeneration(h), n.nvmlDeviceGetCurrPcieLinkWidth(h),
        f.state, f.healthMask, f.status, f.healthSummary, n.nvmlDeviceGetMigMode(h),
        len(n.nvmlDeviceGetComputeRunningProcesses_v3(h)), [n.nvmlDeviceGetNvLinkState(h, link) for link in range(18)],
        n.nvmlDeviceGetEccMode(h), n.nvmlDeviceGetPersistenceMode(h), n.nvmlDeviceGetGspFirmwareMode(h),
        b.max, b.high, b.partial, b.low, b.none, n.nvmlDeviceGetUnrepairableMemoryFlag_v1(h),
        n.nvmlDeviceGetMaxClockInfo(h, 1), n.nvmlDeviceGetTemperatureThreshold(h, 0),
        n.nvmlDeviceGetTemperatureThreshold(h, 1), n.nvmlDeviceGetMaxPcieLinkGeneration(h),
        n.nvmlDeviceGetMaxPcieLinkWidth(h)]

def poll():
    for h in handles:
        fast(h)
        if everything:
            rest(h)

poll()
print("ready", flush=True)
while sys.stdin.readline():
    began = time.process_time()
    for _ in range(rounds):
        poll()
    print((time.process_time() - began) / rounds * 1e3, flush=True)
"""


def cpu_of(pid: int) -> float:
    """CPU seconds of a process, all its threads (CPUCLOCK_SCHED of the process, to the nanosecond)."""
    return time.clock_gettime((~pid << 3) | 2)


def measure(driver: SimulatedDriver, tiers: str) -> tuple[float, float, float, int]:
    """CPU milliseconds a poll: ours and bare; resident MB of the child; samples a poll.

    Blocks of both alternate, so that what else the machine does falls on both; the median of each counts. Raises
    RuntimeError when the two do not make the same NVML calls.
    """
    clock = ManualClock()
    rounds = ROUNDS[tiers]
    collector = NvmlCollector(
        Setup(clock), library=str(driver.library), call_deadline_s=20, probe_interval_s=1e9
    )
    command = [sys.executable, "-c", BARE, str(driver.library), str(rounds), tiers]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as bare:
        assert bare.stdin is not None and bare.stdout is not None
        try:
            if bare.stdout.readline() != "ready\n":
                raise RuntimeError("the bare program did not start")
            for _ in range(3):  # finds out what is supported, and settles
                clock.advance(STEP_S[tiers])
                reading = collector.collect()
            assert collector._child is not None
            pid = collector._child.pid
            our_ms, bare_ms = [], []
            for _ in range(BLOCKS):
                calls = counts(driver)
                bare.stdin.write("\n")
                bare.stdin.flush()
                bare_ms.append(float(bare.stdout.readline()))
                bare_calls, calls = difference(driver, calls, rounds), counts(driver)
                began = time.process_time() + cpu_of(pid)
                for _ in range(rounds):
                    clock.advance(STEP_S[tiers])
                    reading = collector.collect()
                our_ms.append((time.process_time() + cpu_of(pid) - began) / rounds * 1e3)
                our_calls = difference(driver, calls, rounds)
                if our_calls != bare_calls:
                    both = {n: (our_calls.get(n), bare_calls.get(n)) for n in {*our_calls, *bare_calls}}
                    raise RuntimeError(
                        f"not the same calls: { ({n: d for n, d in both.items() if d[0] != d[1]}) }"
                    )
            resident_mb = int(Path(f"/proc/{pid}/status").read_text().split("VmRSS:")[1].split()[0]) / 1024
        finally:
            collector.close()
            bare.stdin.close()
    return statistics.median(our_ms), statistics.median(bare_ms), resident_mb, len(reading.samples)


def peer(driver: SimulatedDriver) -> tuple[float, int] | None:
    """nvitop-exporter on the same driver: CPU milliseconds an update (its GPU and host metrics; it has no switch for
    either), and how many GPU samples its page has. None when it is not installed."""
    program = shutil.which(
        "nvitop-exporter", path=f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}"
    )
    if program is None:
        return None
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [program, "--bind-address", "127.0.0.1", "--port", str(port), "--interval", "0.25"]
    environment = {**os.environ, "LD_LIBRARY_PATH": str(driver.library.parent)}
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as process:
        try:
            call = "nvmlDeviceGetPowerUsage"
            start = counts(driver)[call]
            limit = time.monotonic() + 60
            while counts(driver)[call] < start + 3 * GPUS:
                if time.monotonic() > limit or process.poll() is not None:
                    return None
                time.sleep(0.1)
            calls, cpu = counts(driver)[call], cpu_of(process.pid)
            time.sleep(PEER_S)
            updates = (counts(driver)[call] - calls) / GPUS
            used_ms = (cpu_of(process.pid) - cpu) * 1e3
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as page:
                lines = page.read().decode().splitlines()
        finally:
            process.terminate()
    return used_ms / updates, sum(line.startswith(("gpu_", "process_gpu_")) for line in lines)


def counts(driver: SimulatedDriver) -> dict[str, int]:
    return {name: sum(driver.calls(name, slot) for slot in range(GPUS)) for name in CALLS}


def difference(driver: SimulatedDriver, before: dict[str, int], rounds: int) -> dict[str, float]:
    after = counts(driver)
    return {name: (after[name] - before[name]) / rounds for name in CALLS if after[name] != before[name]}


def row(
    name: str, value: float, unit: str, floor: float | None, budget: float, judged: Callable[[Any], bool]
) -> dict[str, Any]:
    ratio = value / floor if floor else None
    return {
        "name": name, "value": value, "unit": unit, "floor": floor, "ratio": ratio, "budget": budget,
        "met": judged(ratio if budget == RATIO_BUDGET else value),
    }  # fmt: skip


def run() -> list[dict[str, Any]]:
    """Rows for `make bench`. Raises UnavailableError without gcc."""
    if build.missing():
        raise UnavailableError(build.missing())
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        driver = SimulatedDriver(Path(folder), GPUS, "H100")
        for tiers, words in (("fast", "fast tier"), ("all", "all tiers")):
            ours_ms, floor_ms, resident_mb, samples = measure(driver, tiers)
            name = f"nvml poll, {GPUS} simulated GPUs, {words}, {samples} samples"
            rows.append(
                row(f"{name}: CPU", ours_ms, "ms", floor_ms, POLL_BUDGET_MS, lambda v: v < POLL_BUDGET_MS)
            )
            rows.append(
                row(
                    f"{name}: against bare pynvml",
                    ours_ms,
                    "ms",
                    floor_ms,
                    RATIO_BUDGET,
                    lambda r: r <= RATIO_BUDGET,
                )
            )
        other = peer(driver)
        if other is not None:
            peer_ms, peer_samples = other
            words = f"nvitop-exporter with {peer_samples} GPU samples and its host metrics"
            name = f"nvml poll, all tiers, {samples} samples, against {words}"
            rows.append(row(name, ours_ms, "ms", peer_ms, peer_ms, lambda v: v < peer_ms))
        rows.append(
            row(
                "nvml child process: resident",
                resident_mb,
                "MB",
                None,
                RESIDENT_BUDGET_MB,
                lambda v: v < RESIDENT_BUDGET_MB,
            )
        )
    return rows
