"""The simulated driver itself: its ABI against nvidia-ml-py, its injections, no half changes."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest

from simnvml import build
from simnvml.control import SimulatedDriver
from simnvml.layout import CALLS

pytestmark = pytest.mark.skipif(bool(build.missing()), reason=build.missing())

PRELUDE = """
import ctypes, sys
ctypes.CDLL(sys.argv[1])
import pynvml as n
def code(f, *a):
    try:
        f(*a)
    except n.NVMLError as e:
        return e.value
    return 0
n.nvmlInit()
h = n.nvmlDeviceGetHandleByIndex(0) if n.nvmlDeviceGetCount() else None
"""


def run(driver: SimulatedDriver, code: str) -> str:
    """Output of a program that uses the driver through pynvml, in a process of its own as pynvml never unloads."""
    done = subprocess.run(
        [sys.executable, "-c", PRELUDE + code, str(driver.library)],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_structs_have_the_sizes_that_the_binding_uses(tmp_path: Path) -> None:
    """A struct of another size or version would be refused with 25, or come out shifted."""
    driver = SimulatedDriver(tmp_path, profile="H100")
    driver.set(0, temperature_c=63, margin_c=24, banks_low=2, fabric_health_summary=2, sram_bucket_sm=5)
    driver.set_processes(0, [4242, 4243], used_bytes=123)
    out = run(
        driver,
        "m = n.nvmlDeviceGetMemoryInfo(h, n.nvmlMemory_v2); s = n.c_nvmlEccSramErrorStatus_v1_t()\n"
        "f = n.c_nvmlGpuFabricInfo_v3_t(); n.nvmlDeviceGetGpuFabricInfoV(h, n.byref(f))\n"
        "n.nvmlDeviceGetSramEccErrorStatus(h, n.byref(s))\n"
        "p = n.nvmlDeviceGetComputeRunningProcesses_v3(h); v = n.nvmlDeviceGetFieldValues(h, [186, (165, 17)])\n"
        "print(n.nvmlDeviceGetTemperatureV(h, 0), n.nvmlDeviceGetMarginTemperature(h), m.total - m.free - m.used,\n"
        " n.nvmlDeviceGetRowRemapperHistogram(h).low, f.state, f.healthSummary, s.aggregateUncBucketSm,\n"
        " [(q.pid, q.usedGpuMemory) for q in p], [x.value.ullVal for x in v], n.nvmlDeviceGetPciInfo(h).busId)",
    )
    assert out == f"63 24 {1 << 29} 2 3 2 5 [(4242, 123), (4243, 123)] [73250, 1] 00000000:07:00.0"


def test_a_wrong_struct_version_is_refused(tmp_path: Path) -> None:
    driver = SimulatedDriver(tmp_path, profile="H100")
    out = run(
        driver,
        "s = n.c_nvmlEccSramErrorStatus_v1_t(); s.version = 0\n"
        "print(code(n.nvmlDeviceGetSramEccErrorStatus, h, n.byref(s)))",
    )
    assert out == "25"


@pytest.mark.parametrize("count", [0, 1, 16])
def test_counts(tmp_path: Path, count: int) -> None:
    assert run(SimulatedDriver(tmp_path, count), "print(n.nvmlDeviceGetCount())") == str(count)


def test_a_symbol_that_is_left_out_is_not_found(tmp_path: Path) -> None:
    driver = SimulatedDriver(tmp_path, without=["nvmlDeviceGetTemperatureV"])
    assert (
        run(driver, "print(code(n.nvmlDeviceGetTemperatureV, h, 0), n.nvmlDeviceGetTemperature(h, 0))")
        == "13 41"
    )


def test_unknown_symbols_cannot_be_left_out() -> None:
    with pytest.raises(ValueError, match="nvmlNoSuch"):
        build.library(["nvmlNoSuch"])


def test_every_listed_call_is_exported(tmp_path: Path) -> None:
    driver = SimulatedDriver(tmp_path)
    out = run(driver, f"print([c for c in {list(CALLS)} if not hasattr(n.nvmlLib, c)])")
    assert out == "[]"


def test_errors_are_injected_for_one_gpu_or_all(tmp_path: Path) -> None:
    driver = SimulatedDriver(tmp_path, 2)
    driver.fail("nvmlDeviceGetPowerUsage", 999, slot=0)
    driver.fail("nvmlDeviceGetUUID", 4)
    driver.break_gpu(1, 15)
    out = run(
        driver,
        "print(code(n.nvmlDeviceGetPowerUsage, h), code(n.nvmlDeviceGetUUID, h), code(n.nvmlDeviceGetName, h),\n"
        " code(n.nvmlDeviceGetHandleByIndex, 1))",
    )
    assert out == "999 4 0 15"
    assert driver.calls("nvmlDeviceGetPowerUsage", 0) == 1


def test_reload_ends_the_session_and_upgrade_needs_a_new_process(tmp_path: Path) -> None:
    driver = SimulatedDriver(tmp_path)
    program = (
        "print(code(n.nvmlDeviceGetName, h), flush=True)\n"
        "name = lambda: code(n.nvmlDeviceGetName, h)\n"
        "sys.stdin.readline(); print(name(), code(n.nvmlInit), name(), flush=True)\n"
        "sys.stdin.readline(); print(name(), code(n.nvmlInit), flush=True)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", PRELUDE + program, str(driver.library)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        assert process.stdout.readline() == "0\n"
        driver.reload()
        process.stdin.write("\n")
        process.stdin.flush()
        assert process.stdout.readline() == "1 0 0\n"
        driver.upgrade("580.65.06")
        process.stdin.write("\n")
        process.stdin.flush()
        assert process.stdout.readline() == "18 18\n"
    assert run(driver, "print(n.nvmlSystemGetDriverVersion())") == "580.65.06-simulated"


def test_a_reader_never_sees_half_a_change(tmp_path: Path) -> None:
    driver = SimulatedDriver(tmp_path)
    driver.set(0, utilization_gpu_pct=0, utilization_memory_pct=0)
    stop = threading.Event()

    def change() -> None:
        number = 0
        while not stop.is_set():
            number = (number + 1) % 1_000_000
            driver.set(0, utilization_gpu_pct=number, utilization_memory_pct=number)

    writer = threading.Thread(target=change)
    writer.start()
    try:
        out = run(
            driver,
            "pairs = [(u.gpu, u.memory) for u in (n.nvmlDeviceGetUtilizationRates(h) for _ in range(20000))]\n"
            "print(sum(a != b for a, b in pairs), len(set(pairs)) > 1)",
        )
    finally:
        stop.set()
        writer.join()
    assert out == "0 True"


def test_a_writer_that_died_inside_a_change_does_not_hang_readers(tmp_path: Path) -> None:
    driver = SimulatedDriver(tmp_path)
    driver.state.sequence = 1
    assert run(driver, "print(n.nvmlDeviceGetUtilizationRates(h).gpu)") == "97"
