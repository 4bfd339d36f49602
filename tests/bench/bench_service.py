"""The service at full size: ingest over HTTP beside a bare route, queries and fatal events with 80,000 devices loaded.

Server and load generator share this machine, so the throughput is that of both together; the floor has the same load.
"""

from __future__ import annotations

import asyncio
import functools
import os
import resource
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import msgspec
import numpy as np

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

from forewarn.collectors.base import Device, Sample  # noqa: E402
from forewarn.collectors.clock import SystemClock  # noqa: E402
from forewarn.daemon import wire  # noqa: E402
from forewarn.daemon.service import tokens  # noqa: E402
from forewarn.daemon.service.database import open_database  # noqa: E402
from forewarn.daemon.service.server import SWITCH_INTERVAL_S  # noqa: E402
from service_bench import Bench, batch, eventually, make_settings, xid  # noqa: E402

NODES, GPUS = 10_000, 8
CONNECTIONS, SECONDS = 32, 4.0
PACE_PER_S = 1000
"""What 10,000 nodes send that report every 10 s."""
QUERIES, FATAL_EVENTS = 300, 30
METRIC_NAMES = (
    "gpu_temperature_celsius",
    "gpu_memory_temperature_celsius",
    "gpu_power_watts",
    "gpu_sm_clock_hertz",
    "gpu_utilization_ratio",
    "gpu_memory_used_bytes",
    "gpu_ecc_dram_corrected_total",
    "gpu_ecc_dram_uncorrected_total",
    "gpu_ecc_sram_corrected_total",
    "gpu_ecc_sram_uncorrected_total",
    "gpu_row_remap_corrected_total",
    "gpu_row_remap_uncorrected_total",
    "gpu_row_remap_pending",
    "gpu_row_remap_failure",
    "gpu_pcie_replay_total",
    "gpu_pcie_link_generation",
    "gpu_pcie_link_width",
    "gpu_nvlink_crc_flit_errors_total",
    "gpu_nvlink_replay_errors_total",
    "gpu_nvlink_recovery_errors_total",
    "gpu_violation_power_seconds_total",
    "gpu_violation_thermal_seconds_total",
    "gpu_energy_joules_total",
    "gpu_clock_event_reasons",
    "gpu_memory_clock_hertz",
)

HEALTHY = {
    "gpu_temperature_celsius": 60.0,
    "gpu_power_watts": 500.0,
    "gpu_sm_clock_hertz": 1.7e9,
    "gpu_utilization_ratio": 1.0,
}

BARE = """
import asyncio, sys, msgspec, uvicorn
from starlette.applications import Starlette
from starlette.responses import Response
from starlette.routing import Route
from forewarn.daemon import wire
async def take(request):
    batch = wire.decode(wire.decompress(await request.body(), request.headers.get("content-encoding")))
    return Response(msgspec.json.encode(wire.Answer(batch.stream, batch.sequence)))
uvicorn.run(Starlette(routes=[Route("/v1/ingest", take, methods=["POST"])]), port=int(sys.argv[1]), log_config=None,
            access_log=False)
"""


def row(
    name: str,
    value: float,
    unit: str,
    floor: float | None,
    budget: float | None,
    more_is_better: bool = False,
) -> dict[str, Any]:
    """A row; `ratio` is value over floor."""
    met = None if budget is None else (value >= budget if more_is_better else value <= budget)
    ratio = None if not floor else value / floor
    return {
        "name": name,
        "value": value,
        "unit": unit,
        "floor": floor,
        "ratio": ratio,
        "budget": budget,
        "met": met,
    }


def report(node: int, sequence: int) -> bytes:
    """The request of one node with eight GPUs, as it goes over the connection (headers without the token)."""
    now = time.time()
    names = [f"n{node}/gpu{i}" for i in range(GPUS)]
    samples = [Sample(d, m, HEALTHY.get(m, 0.0)) for d in names for m in METRIC_NAMES]
    sent = wire.Batch(f"n{node}", "s", sequence, sent=now, frames=[wire.pack_samples(now, samples)])
    return wire.encode(sent)


class Load:
    """Keep-alive connections that post as fast as answers come, over plain sockets: httpx would be the bottleneck."""

    def __init__(self, port: int, token: str) -> None:
        self._port, self._token = port, token
        self.latencies: list[float] = []
        self._sequence = 0

    async def _connection(self, number: int, end: float, interval_s: float) -> None:
        """One node. Its values are packed once: packing is the agent's work, and not what is measured here."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        plain = msgspec.msgpack.decode(report(number, 1), type=wire.Batch)
        due = time.perf_counter() + interval_s * number / CONNECTIONS
        while time.perf_counter() < end:
            if interval_s:
                await asyncio.sleep(max(0.0, due - time.perf_counter()))
                due += interval_s
            self._sequence += 1
            sent = msgspec.structs.replace(plain, sequence=self._sequence, sent=time.time())
            body, encoding = wire.compress(wire.encode(sent))
            head = (
                f"POST /v1/ingest HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {self._token}\r\n"
                f"Content-Length: {len(body)}\r\n"
                + (f"Content-Encoding: {encoding}\r\n" if encoding else "")
                + "\r\n"
            )
            began = time.perf_counter()
            writer.write(head.encode() + body)
            answer = await reader.readuntil(b"\r\n\r\n")
            length = int(answer.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
            await reader.readexactly(length)
            assert answer.startswith(b"HTTP/1.1 200"), answer
            self.latencies.append(time.perf_counter() - began)
        writer.close()

    async def run(self, seconds: float, rate: float = 0.0) -> float:
        """Requests a second; with `rate` no more than so many are sent."""
        self.latencies.clear()
        interval_s = CONNECTIONS / rate if rate else 0.0
        end = time.perf_counter() + seconds
        began = time.perf_counter()
        await asyncio.gather(*(self._connection(i, end, interval_s) for i in range(CONNECTIONS)))
        return len(self.latencies) / (time.perf_counter() - began)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        port: int = sock.getsockname()[1]
        return port


def measured(command: list[str], port: int, token: str, environment: dict[str, str]) -> tuple[float, float]:
    """Requests a second and p99 in ms of a server that is started for it and ended after."""
    process = subprocess.Popen(command, env=os.environ | environment, stderr=subprocess.DEVNULL)
    try:
        eventually(lambda: reachable(port), 60)
        load = Load(port, token)
        asyncio.run(load.run(0.5))
        rate = asyncio.run(load.run(SECONDS))
        asyncio.run(load.run(SECONDS, PACE_PER_S))
        return rate, float(np.percentile(load.latencies, 99) * 1e3)
    finally:
        process.terminate()
        process.wait(20)


def reachable(port: int) -> bool:
    try:
        return httpx.get(f"http://127.0.0.1:{port}/readyz", timeout=2).status_code in (200, 404)
    except httpx.HTTPError:
        return False


def throughput(folder: Path) -> list[dict[str, Any]]:
    """Ingest with everything on beside a bare route that decodes and answers."""
    port = free_port()
    floor, floor_p99 = measured([sys.executable, "-c", BARE, str(port)], port, "none", {})
    data = folder / "ingest"
    database = open_database(data)
    token = tokens.create(database, SystemClock(), "agent", node="*")
    database.close()
    port = free_port()
    environment = {"FOREWARN_SERVICE_LISTEN": f"127.0.0.1:{port}", "FOREWARN_SERVICE_DATA": str(data)}
    rate, p99 = measured([sys.executable, "-m", "forewarn.daemon.cli", "serve"], port, token, environment)
    return [
        row(
            "ingest, durable, with scoring (8 GPUs x 25 metrics a request)",
            rate,
            "requests/s",
            floor,
            1000,
            True,
        ),
        row(f"ingest p99 at {PACE_PER_S} requests/s", p99, "ms", floor_p99, 50.0),
    ]


def percentile(function: Callable[[int], object], times: int) -> float:
    """The 99th percentile of the duration in seconds."""
    took = []
    for i in range(times):
        began = time.perf_counter()
        function(i)
        took.append(time.perf_counter() - began)
    return float(np.percentile(took, 99))


def loaded(folder: Path) -> list[dict[str, Any]]:
    """Queries and fatal events with the whole fleet in memory."""
    sys.setswitchinterval(SWITCH_INTERVAL_S)  # as `forewarn serve` does
    bench = Bench(make_settings(folder, cycle_interval_s=10.0), None)
    try:
        load_s = fill(bench)
        before = bench.service.engine.view.number
        bench.service.engine.score_soon()
        eventually(lambda: bench.service.engine.view.number > before + 1, 120)
        cycle_s = bench.service.engine.last_cycle_s
        devices = len(bench.service.engine.view.devices)
        query_s = percentile(lambda i: bench.get("/v1/risk", min_risk=0.0001 * (i % 7), limit=100), QUERIES)
        floor_s = percentile(lambda i: bench.client.get("/healthz"), QUERIES)
        seen_s, protected_s = fatal(bench)
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024**2
        what = f"{devices} devices"
        return [
            row(f"applying one sweep of {what}", load_s, "s", None, 10.0),
            row(f"one scoring cycle, {what}", cycle_s, "s", None, 5.0),
            row(f"resident memory, {what} (bench included)", memory, "GB", None, 8.0),
            row(f"GET /v1/risk?min_risk= p99, {what}", query_s * 1e3, "ms", floor_s * 1e3, 50.0),
            row(f"fatal event to updated risk p99, {what}", seen_s, "s", None, 1.0),
            row(f"fatal event to webhook p99, {what}", protected_s, "s", None, 1.0),
        ]
    finally:
        bench.stop()


def fill(bench: Bench) -> float:
    """Put the fleet in through the thread that owns it; seconds for one sweep of all after the first."""
    service = bench.service
    for sequence in (1, 2):
        took = 0.0
        for start in range(0, NODES, 500):
            records = []
            for node in range(start, start + 500):
                sent = msgspec.msgpack.decode(report(node, sequence), type=wire.Batch)
                described = [Device(d, "gpu", "H100", d, simulated=True) for d in sent.frames[0].devices]
                sent = msgspec.structs.replace(sent, devices=described if sequence == 1 else [])
                records.append(service_record(sent))
            began = time.perf_counter()
            service.engine.call(functools.partial(service.engine.replay, records)).result(120)
            took += time.perf_counter() - began
    return took


def service_record(sent: wire.Batch) -> Any:
    from forewarn.daemon.service.journal import BATCH, Record

    return Record(BATCH, time.time(), b"", sent)


def fatal(bench: Bench) -> tuple[float, float]:
    """p99 from sending a fatal event until the risk shows it, and until the webhook is there; each its own job."""
    for i in range(FATAL_EVENTS):
        bench.put_job(f"job{i}", nodes=[f"n{i}"])
    seen, hooked = [], []
    for i in range(FATAL_EVENTS):
        device, hooks = f"n{i}/gpu0", len(bench.hooks)
        sent = batch(f"n{i}", 1, stream="fatal", gpus=1, events=[xid(device)])
        began = time.perf_counter()
        bench.send(sent)
        eventually(functools.partial(shows, bench, device))
        seen.append(time.perf_counter() - began)
        eventually(functools.partial(hooked_since, bench, hooks))
        hooked.append(time.perf_counter() - began)
        time.sleep(0.05)
    return float(np.percentile(seen, 99)), float(np.percentile(hooked, 99))


def shows(bench: Bench, device: str) -> bool:
    return bench.service.engine.view.risks(device).get(900, 0.0) > 0.9


def hooked_since(bench: Bench, count: int) -> bool:
    return len(bench.hooks) > count


def run() -> list[dict[str, Any]]:
    """All rows."""
    with tempfile.TemporaryDirectory() as name:
        return throughput(Path(name)) + loaded(Path(name) / "loaded")


if __name__ == "__main__":
    for found in run():
        print(found)
