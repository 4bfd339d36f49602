"""What the agent costs at rest: CPU share and memory, with every collector on, on a simulated 8-GPU driver.

The floor is a bare program that makes the same NVML calls through pynvml as often as the agent made them in the window:
in one go, with warm caches, and with nothing done with the answers. All else the agent does stands above it.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parents[1]
sys.path.insert(0, str(TESTS))

from fakes_agent import FakeService, wait_until  # noqa: E402
from forewarn.collectors.errors import UnavailableError  # noqa: E402
from forewarn.daemon.agent import usage  # noqa: E402
from simnvml import build  # noqa: E402
from simnvml.control import SimulatedDriver  # noqa: E402
from simnvml.layout import CALLS  # noqa: E402

GPUS = 8
WARM_UP_S = 12.0
WINDOW_S = 30.0
CPU_BUDGET_PERCENT = 0.5
MEMORY_BUDGET_MB = 60.0

BARE = """
import json, sys, time, pynvml
from pathlib import Path
library, seconds, calls = sys.argv[1], float(sys.argv[2]), json.loads(sys.argv[3])
pynvml._LoadNvmlLibrary = lambda: setattr(pynvml, "nvmlLib", pynvml.CDLL(library))
pynvml.nvmlInit()
handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
SM, MEM = pynvml.NVML_CLOCK_SM, pynvml.NVML_CLOCK_MEM
more = {
    "nvmlDeviceGetTemperatureV": lambda h: pynvml.nvmlDeviceGetTemperatureV(h, 0),
    "nvmlDeviceGetClockInfo": lambda h: pynvml.nvmlDeviceGetClockInfo(h, SM),
    "nvmlDeviceGetMemoryInfo_v2": lambda h: pynvml.nvmlDeviceGetMemoryInfo(h, version=pynvml.nvmlMemory_v2),
    "nvmlDeviceGetFieldValues": lambda h: pynvml.nvmlDeviceGetFieldValues(h, list(range(72, 92))),
    "nvmlDeviceGetMemoryErrorCounter": lambda h: pynvml.nvmlDeviceGetMemoryErrorCounter(h, 0, 1, 1),
}
work, made = [], 0
for name, count in calls.items():
    call = more.get(name) or getattr(pynvml, name, None)
    try:
        call(handles[0])
    except Exception:
        continue
    work.append((call, max(1, round(count / len(handles)))))
    made += count
begun = time.process_time()
for call, count in work:
    for _ in range(count):
        for handle in handles:
            call(handle)
print(json.dumps({"cpu_s": time.process_time() - begun, "made": made}))
"""


def run() -> list[dict[str, Any]]:
    """Rows for CPU share and memory of the agent and its children."""
    if missing := build.missing():
        raise UnavailableError(missing)
    with tempfile.TemporaryDirectory() as folder:
        return _measure(Path(folder))


def _measure(folder: Path) -> list[dict[str, Any]]:
    driver = SimulatedDriver(folder / "driver", GPUS)
    service = FakeService()
    exporter = _exporter()
    config = folder / "forewarn.toml"
    config.write_text(
        f"[agent]\nnode = 'bench'\nservice_url = '{service.url}'\nspool = '{folder / 'spool.db'}'\n"
        f"listen = '127.0.0.1:0'\n[agent.collectors.nvml.options]\nlibrary = '{driver.library}'\n"
        f"[agent.collectors.dcgm.options]\nurl = 'http://127.0.0.1:{exporter.server_address[1]}/metrics'\n"
    )
    command = [sys.executable, "-m", "forewarn.daemon.cli", "agent", "--config", str(config)]
    with (folder / "log").open("wb") as log:
        agent = subprocess.Popen(command, stderr=log)
    try:
        if not wait_until(lambda: len(service.applied) > 0, 60):
            raise UnavailableError(f"the agent sent nothing: {(folder / 'log').read_text()[-500:]}")
        time.sleep(WARM_UP_S)
        pids = [agent.pid, *usage.children(agent.pid)]
        calls_before = {name: driver.calls(name) for name in CALLS}
        cpu_before, begun = _cpu_s(pids), time.monotonic()
        time.sleep(WINDOW_S)
        seconds, cpu_s = time.monotonic() - begun, _cpu_s(pids) - cpu_before
        calls = {name: driver.calls(name) - calls_before[name] for name in CALLS}
        memory_mb = sum(_pss_bytes(pid) for pid in [agent.pid, *usage.children(agent.pid)]) / 1e6
        resident_mb = sum(map(usage.resident_bytes, pids)) / 1e6
    finally:
        agent.terminate()
        agent.wait(timeout=10)
        service.close()
        exporter.shutdown()
        exporter.server_close()
    made = {name: count for name, count in calls.items() if count and name.startswith("nvmlDevice")}
    bare = _bare(driver, seconds, made)
    share, floor = 100 * cpu_s / seconds, 100 * bare["cpu_s"] / seconds
    return [
        {
            "name": f"agent at rest, {GPUS} simulated GPUs, all collectors: CPU share of one core",
            "value": share,
            "unit": "%",
            "floor": floor,
            "ratio": share / floor if floor else None,
            "budget": CPU_BUDGET_PERCENT,
            "met": share < CPU_BUDGET_PERCENT,
        },
        {
            "name": "agent at rest: memory of agent and child (proportional share)",
            "value": memory_mb,
            "unit": "MB",
            "floor": None,
            "ratio": None,
            "budget": MEMORY_BUDGET_MB,
            "met": memory_mb < MEMORY_BUDGET_MB,
        },
        {
            "name": "agent at rest: resident memory, shared pages counted in each process",
            "value": resident_mb,
            "unit": "MB",
            "floor": None,
            "ratio": None,
            "budget": MEMORY_BUDGET_MB,
            "met": resident_mb < MEMORY_BUDGET_MB,
        },
    ]


def _exporter() -> ThreadingHTTPServer:
    """A dcgm-exporter page over HTTP, so that this source is on as well; an empty page without the case."""
    pages = sorted((TESTS / "cases").rglob("*.prom"))
    page = pages[0].read_bytes() if pages else b""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/plain; version=0.0.4")
            self.send_header("Content-Length", str(len(page)))
            self.end_headers()
            self.wfile.write(page)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server


def _bare(driver: SimulatedDriver, seconds: float, calls: dict[str, int]) -> dict[str, float]:
    command = [sys.executable, "-c", BARE, str(driver.library), str(seconds), json.dumps(calls)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    told: dict[str, float] = json.loads(done.stdout)
    return told


def _cpu_s(pids: list[int]) -> float:
    """CPU time of processes to the nanosecond, over all their threads."""
    total = 0
    for pid in pids:
        for task in Path(f"/proc/{pid}/task").iterdir():
            total += int((task / "schedstat").read_text().split()[0])
    return total / 1e9


def _pss_bytes(pid: int) -> int:
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024
    return 0


if __name__ == "__main__":
    for row in run():
        print(row)
