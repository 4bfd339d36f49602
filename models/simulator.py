"""A labelled synthetic history: a fleet with workloads, heat, ageing, failures and much that only looks like them.

It exists to prove the pipeline: whatever a model scores on it says nothing about skill in the field. Every parameter
is in docs/SIMULATOR.md with its source, or marked as an assumption.
"""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from forewarn.collectors.catalog import METRICS
from forewarn.collectors.errors import ConfigError, StorageError
from forewarn.models.history import write_table
from forewarn.models.simulator_benign import APP_XID_SHARES, APP_XIDS, application_xids, disturb, hump
from forewarn.models.simulator_faults import inject
from forewarn.models.simulator_jobs import Job, load_of, schedule
from forewarn.models.simulator_mechanisms import DAY_S, HOUR_S, Failure, draw_failures, hazard_of_age
from forewarn.models.simulator_physics import NodeState, Note, draw_traits, render
from forewarn.models.simulator_profiles import Board, Profile, draw

NODES_A_RACK = 8
VALUES_AT_ONCE = 120_000_000
"""Numbers held in memory at once; decides how many nodes are made together."""
DOUBLES = frozenset(
    {"gpu_energy_joules_total", "fabric_transmit_bytes_total", "gpu_nvlink_symbol_bit_error_ratio"}
)
"""Metrics that single precision would spoil."""
PORT_METRICS = {
    "symbol": "fabric_symbol_errors_total",
    "downs": "fabric_link_downs_total",
    "integrity": "fabric_local_integrity_errors_total",
    "recoveries": "fabric_link_recoveries_total",
    "receive": "fabric_receive_errors_total",
}
DEFAULT_START = 1_735_689_600.0
"""2025-01-01 UTC."""


@dataclass(frozen=True)
class Settings:
    """What to simulate. `start` is seconds since the epoch; `interval_s` None leaves it to the profile."""

    nodes: int = 64
    gpus_per_node: int = 8
    days: float = 14.0
    interval_s: float | None = None
    seed: int = 1
    failures_scale: float = 30.0
    profile: str = "h100"
    start: float = DEFAULT_START

    def __post_init__(self) -> None:
        for name, low, high in (
            ("nodes", 1, 20_000), ("gpus_per_node", 1, 16), ("days", 0.02, 730), ("failures_scale", 0, 1e5),
        ):  # fmt: skip
            value = getattr(self, name)
            if not low <= value <= high:
                raise ConfigError(f"--{name.replace('_', '-')} {value:g}: must be {low:g} to {high:g}")
        if self.interval_s is not None and not 1 <= self.interval_s <= 3600:
            raise ConfigError(f"--interval-s {self.interval_s:g}: must be 1 to 3600")
        if self.seed < 0:
            raise ConfigError(f"--seed {self.seed}: must be 0 or more")


@dataclass
class Summary:
    """What was written. All of it is synthetic."""

    path: str
    profile: str
    interval_s: float
    devices: int = 0
    rows: int = 0
    events: int = 0
    failures: int = 0
    with_precursor: int = 0
    causes: dict[str, int] = field(default_factory=dict)
    simulated: bool = True


@dataclass
class FleetPlan:
    """All that is settled for the whole fleet before single nodes are made."""

    settings: Settings
    profile: Profile
    boards: list[Board]
    noisy: NDArray[np.bool_]
    age_days: NDArray[np.float64]
    """(nodes x GPUs) at the start"""
    rack_c: NDArray[np.float64]
    hot_aisles: dict[int, list[tuple[float, float, float]]]
    jobs_of: list[list[Job]]
    failures: list[list[Failure]]
    app_xids: list[list[tuple[float, int, int]]]

    @property
    def end(self) -> float:
        return self.settings.start + self.settings.days * DAY_S


def plan(settings: Settings) -> FleetPlan:
    """Boards, jobs, failures and what strikes several nodes at once. Deterministic by the seed."""
    profile = draw(settings.profile, settings.seed, settings.interval_s)
    physics, nodes, gpus = profile.physics, settings.nodes, settings.gpus_per_node
    start, end = settings.start, settings.start + settings.days * DAY_S
    rng = np.random.default_rng([settings.seed, 1])
    boards = [profile.boards[n * len(profile.boards) // nodes] for n in range(nodes)]
    noisy = rng.random((nodes, gpus)) < physics.noisy_share
    racks = (nodes + NODES_A_RACK - 1) // NODES_A_RACK
    rack_c = rng.normal(0, physics.rack_spread_c, racks)
    hot: dict[int, list[tuple[float, float, float]]] = {}
    for rack in range(racks):
        for _ in range(int(rng.poisson(physics.hot_aisles_per_rack_day * settings.days))):
            length_s = float(rng.lognormal(np.log(4 * HOUR_S), 0.8))
            height_c = physics.hot_aisle_c * float(rng.uniform(0.4, 1.8))
            hot.setdefault(rack, []).append((float(rng.uniform(start, end)), length_s, height_c))
    rng = np.random.default_rng([settings.seed, 5])
    # Nodes were bought in few batches; single boards were replaced since.
    age_days = np.repeat(rng.choice(rng.uniform(20, 1100, 3), nodes)[:, None], gpus, axis=1)
    age_days = np.where(rng.random((nodes, gpus)) < 0.08, age_days * rng.random((nodes, gpus)), age_days)
    proneness = rng.normal(0, physics.frailty, (nodes, 1)) + rng.normal(0, physics.frailty, (nodes, gpus))
    weights = hazard_of_age(age_days) * np.exp(proneness)
    failures = draw_failures(
        nodes, gpus, start, end, settings.failures_scale, physics.growth, physics.lead_scale, noisy, weights,
        np.random.default_rng([settings.seed, 2]),
    )  # fmt: skip
    # A part that is not there does not fail.
    failures = [f for f in failures if f.mechanism.cause != "nvlink" or boards[f.node].nvlinks]
    jobs = schedule(physics, nodes, gpus, start, end, np.random.default_rng([settings.seed, 3]))
    jobs_of: list[list[Job]] = [[] for _ in range(nodes)]
    for job in jobs:
        for n in job.nodes:
            jobs_of[n].append(job)
    rng = np.random.default_rng([settings.seed, 4])
    app: list[list[tuple[float, int, int]]] = [[] for _ in range(nodes)]
    for _ in range(int(rng.poisson(physics.app_xids_per_gpu_hour * nodes * gpus * settings.days * 24))):
        node, gpu = int(rng.integers(nodes)), int(rng.integers(gpus))
        code = int(rng.choice(APP_XIDS, p=APP_XID_SHARES))
        app[node].append((float(rng.uniform(start, end)), gpu, code))
    blows = [(f.time, f.node) for f in failures if f.mechanism.cause != "silent_corruption"]
    blows += [(t, n) for n, moments in enumerate(app) for t, _, _ in moments]
    for moment, node in sorted(blows):
        for job in jobs_of[node]:
            if job.start <= moment < job.end:
                job.interruptions.append((moment, float(rng.uniform(600, 2400))))
    by_node: list[list[Failure]] = [[] for _ in range(nodes)]
    for failure in failures:
        by_node[failure.node].append(failure)
    return FleetPlan(settings, profile, boards, noisy, age_days, rack_c, hot, jobs_of, by_node, app)


@dataclass
class NodeData:
    """One node, rendered: rows are devices (GPUs, then the node, then its port), columns steps."""

    devices: list[str]
    times: NDArray[np.float64]
    stamps: NDArray[np.float64]
    present: NDArray[np.bool_]
    metrics: dict[str, tuple[slice, NDArray[np.floating]]]
    resent: list[tuple[int, int]]
    notes: list[Note]
    table: list[dict[str, object]]


def node_name(number: int) -> str:
    return f"sim-{number + 1:04d}"


def simulate_node(fleet: FleetPlan, number: int) -> NodeData:
    """All of one node. Failures of the plan get the real start of their precursors."""
    settings, physics, board = fleet.settings, fleet.profile.physics, fleet.boards[number]
    gpus = settings.gpus_per_node
    rng = np.random.default_rng([settings.seed, 11, number])
    steps = max(2, int(settings.days * DAY_S / physics.interval_s))
    grid = settings.start + np.arange(steps) * physics.interval_s
    jitter = np.abs(rng.normal(0, physics.jitter_s, steps)).clip(0, physics.interval_s * 0.3)
    times = grid + float(rng.uniform(0, physics.interval_s * 0.6)) + jitter
    use, share, memory = _load(fleet, number, times, rng)
    state = NodeState(number, board, times, physics.interval_s, gpus, rng, use, share, memory)
    traits = draw_traits(physics, board, gpus, float(fleet.rack_c[number // NODES_A_RACK]), rng)
    aged = 1 + physics.resistance_per_year * fleet.age_days[number] / 365
    traits = replace(traits, resistance=(traits.resistance * aged).astype(np.float32))
    for moment, length_s, height_c in fleet.hot_aisles.get(number // NODES_A_RACK, []):
        hump(state, moment, length_s, height_c)
    disturb(state, physics, fleet.noisy[number], settings.failures_scale)
    application_xids(state, physics, fleet.jobs_of[number], fleet.app_xids[number])
    for failure in fleet.failures[number]:
        inject(state, failure, physics)
    metrics = {k: (slice(0, gpus), v) for k, v in render(state, traits, physics).items()}
    metrics |= _host_metrics(state)
    present = np.repeat(~state.silent[None, :], gpus + 2, axis=0)
    present[:gpus] &= ~state.lost
    name = node_name(number)
    return NodeData(
        [f"{name}/gpu{g}" for g in range(gpus)] + [name, f"{name}/mlx5_0"],
        times,
        times + state.stamp_shift,
        present,
        metrics,
        state.resent,
        [n for n in state.notes if settings.start <= n.time < fleet.end],
        _table(fleet, number, rng),
    )


def _load(
    fleet: FleetPlan, number: int, times: NDArray[np.float64], rng: np.random.Generator
) -> tuple[NDArray[np.float32], NDArray[np.float32], NDArray[np.float32]]:
    gpus = fleet.settings.gpus_per_node
    use = np.zeros((gpus, len(times)), np.float32)
    share = np.zeros_like(use)
    memory = np.full_like(use, 0.01)
    for job in fleet.jobs_of[number]:
        a, b = np.searchsorted(times, [job.start, job.end])
        if b <= a:
            continue
        u, p, m = load_of(job, times[a:b], fleet.settings.seed)
        use[: job.gpus, a:b] = u
        share[: job.gpus, a:b] = p * (1 + rng.normal(0, 0.01, (job.gpus, 1)))
        memory[: job.gpus, a:b] = np.where(u > 0, m, 0.01)
    return use, np.clip(share, 0, 1.02), memory


def _host_metrics(state: NodeState) -> dict[str, tuple[slice, NDArray[np.floating]]]:
    """What the node itself and its network port report."""
    n, rng, gpus = state.steps, state.rng, state.gpus
    host, port = slice(gpus, gpus + 1), slice(gpus + 1, gpus + 2)
    busy = state.use.mean(axis=0)
    boot = np.full(n, state.times[0] - float(rng.uniform(1, 90)) * DAY_S)
    edac = np.cumsum(state.edac)
    for step in sorted(state.reboots):
        boot[step:] = state.times[step] - 180.0
        edac[step:] -= edac[step - 1] if step else 0
    resident = 4.2e7 + 1e6 * rng.random() + 2e5 * rng.standard_normal(n)
    cpu = np.clip(0.05 + 0.35 * busy + 0.03 * rng.standard_normal(n), 0, 1)
    values: dict[str, tuple[slice, NDArray[np.floating]]] = {
        "node_uptime_seconds": (host, state.times - boot),
        "node_load1": (host, np.round(np.maximum(0, 2 + 40 * busy + rng.standard_normal(n)), 2)),
        "node_cpu_utilization_ratio": (host, np.round(cpu, 3)),
        "node_cpu_temperature_celsius": (
            host,
            np.round(38 + 25 * cpu + state.inlet + rng.standard_normal(n)),
        ),
        "node_memory_total_bytes": (host, np.full(n, 2.16e12)),
        "node_memory_available_bytes": (host, np.round((1.9 - 0.8 * busy) * 1e12 / 2**30) * 2**30),
        "node_edac_corrected_errors_total": (host, edac),
        "agent_resident_bytes": (host, np.round(resident / 4096) * 4096),
        "fabric_port_up": (port, np.where(state.port_down, 0.0, 1.0)),
        "fabric_transmit_bytes_total": (port, np.cumsum(busy.astype(float) * 2e9 * state.step_s)),
    }
    for key, name in PORT_METRICS.items():
        values[name] = (port, np.cumsum(state.ports[key]))
    return {k: (rows, v[None, :]) for k, (rows, v) in values.items()}


def _table(fleet: FleetPlan, number: int, rng: np.random.Generator) -> list[dict[str, object]]:
    """Rows of devices.parquet: a place has one row for each board that was in it."""
    settings, name = fleet.settings, node_name(number)
    rows: list[dict[str, object]] = []

    def row(
        device: str, kind: str, model: str, serial: str, slot: int, since: float, until: float | None
    ) -> None:
        rows.append(
            {
                "device": device, "node": name, "kind": kind, "model": model, "serial": serial,
                "installed": since, "removed": until, "slot": slot, "rack": f"rack-{number // NODES_A_RACK + 1:03d}",
            }
        )  # fmt: skip

    for gpu in range(settings.gpus_per_node):
        since = settings.start - float(fleet.age_days[number, gpu]) * DAY_S
        swaps = [f for f in fleet.failures[number] if f.gpu == gpu and f.replaced and f.repaired < fleet.end]
        for failure in sorted(swaps, key=lambda f: f.repaired):
            row(
                f"{name}/gpu{gpu}",
                "gpu",
                fleet.boards[number].model,
                _serial(rng),
                gpu,
                since,
                failure.repaired,
            )
            since = failure.repaired
        row(f"{name}/gpu{gpu}", "gpu", fleet.boards[number].model, _serial(rng), gpu, since, None)
    since = settings.start - float(fleet.age_days[number].max()) * DAY_S
    row(name, "node", "simulated host", name, 0, since, None)
    row(f"{name}/mlx5_0", "nic", "simulated ConnectX-7", _serial(rng), 0, since, None)
    return rows


def _serial(rng: np.random.Generator) -> str:
    return f"SIM-{rng.integers(2**48):012x}"


def chunks(fleet: FleetPlan) -> Iterator[list[NodeData]]:
    """The fleet, as many nodes at once as fit into memory."""
    settings = fleet.settings
    steps = settings.days * DAY_S / fleet.profile.physics.interval_s
    size = int(np.clip(VALUES_AT_ONCE / (60 * steps * (settings.gpus_per_node + 2)), 1, 64))
    for first in range(0, settings.nodes, size):
        yield [simulate_node(fleet, n) for n in range(first, min(first + size, settings.nodes))]


def write(settings: Settings, out: Path, progress: Callable[[int, int], None] | None = None) -> Summary:
    """Simulate a fleet and write its history directory. `progress` is told (nodes done, nodes in all).

    Raises StorageError when `out` holds something already or cannot be written.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise StorageError(f"{out}: exists and is not empty; name a new folder")
    fleet = plan(settings)
    summary = Summary(str(out), settings.profile, fleet.profile.physics.interval_s)
    columns = _columns(fleet)
    notes: list[tuple[float, str, str, Note]] = []
    table: list[dict[str, object]] = []
    part = done = 0
    try:
        out.mkdir(parents=True, exist_ok=True)
        for nodes in chunks(fleet):
            for piece in _days(nodes, columns, settings.start, fleet.end):
                write_table(out / "telemetry" / f"part-{part:04d}.parquet", piece, simulated=True)
                part += 1
                summary.rows += piece.num_rows
            for data in nodes:
                name = data.devices[-2]
                notes += [(n.time, name, name if n.gpu < 0 else f"{name}/gpu{n.gpu}", n) for n in data.notes]
                table += data.table
                summary.devices += len(data.devices)
            done += len(nodes)
            if progress is not None:
                progress(done, settings.nodes)
        failures = sorted((f for fs in fleet.failures for f in fs), key=lambda f: (f.time, f.node, f.gpu))
        write_table(out / "events.parquet", _events(notes), simulated=True)
        write_table(out / "devices.parquet", _devices(table), simulated=True)
        write_table(out / "failures.parquet", _failures(failures), simulated=True)
    except OSError as error:
        raise StorageError(f"{out}: cannot be written: {error}") from error
    except BaseException:
        shutil.rmtree(out, ignore_errors=True)  # half a history would pass for a whole one
        raise
    summary.events, summary.failures = len(notes), len(failures)
    summary.with_precursor = sum(f.visible for f in failures)
    summary.causes = dict(sorted(Counter(f.mechanism.cause for f in failures).items()))
    return summary


_STAMP = pa.timestamp("us", tz="UTC")


def _stamps(seconds: NDArray[np.float64]) -> pa.Array:
    micro = np.round(np.nan_to_num(seconds) * 1e6).astype(np.int64)
    return pa.array(micro, pa.int64(), mask=np.isnan(seconds)).cast(_STAMP)


def _columns(fleet: FleetPlan) -> list[str]:
    """Metrics that some node of the fleet has, in the catalog's order: one tiny node of each board tells."""
    names: set[str] = set()
    for board in dict.fromkeys(fleet.boards):
        number = fleet.boards.index(board)
        small = Settings(1, fleet.settings.gpus_per_node, 0.05, 60.0, 1, 0.0)
        probe = plan(small)
        probe.boards = [fleet.boards[number]]
        probe.profile = Profile("probe", (board,), fleet.profile.physics)
        names |= set(simulate_node(probe, 0).metrics)
    return [m for m in METRICS if m in names]


def _days(nodes: list[NodeData], columns: list[str], start: float, end: float) -> Iterator[pa.Table]:
    """Tables of one day each, rows in the order in which they came in (stamps of a stepped clock may go back)."""
    per_node = len(nodes[0].devices)
    steps = len(nodes[0].times)
    names = np.array([d for n in nodes for d in n.devices])
    hosts = np.array([n.devices[-2] for n in nodes for _ in n.devices])
    days = int(np.ceil((end - start) / DAY_S))
    edges = [int(np.searchsorted(nodes[0].times, start + d * DAY_S)) for d in range(days)] + [steps]
    for a, b in pairwise(edges):
        if b <= a:
            continue
        width = b - a
        present = np.concatenate([n.present[:, a:b] for n in nodes])
        arrival = np.repeat(np.concatenate([n.times[None, a:b] for n in nodes]), per_node, axis=0)
        stamps = np.repeat(np.concatenate([n.stamps[None, a:b] for n in nodes]), per_node, axis=0)
        flat = np.flatnonzero(present)
        again = np.concatenate([_resent(n, i * per_node, per_node, a, b) for i, n in enumerate(nodes)])
        again = again[present.ravel()[again]]
        index = np.concatenate([flat, again])
        came = np.concatenate([arrival.ravel()[flat], arrival.ravel()[again] + 90.0])
        index = index[np.argsort(came, kind="stable")]
        row = index // width
        data = {
            "time": _stamps(stamps.ravel()[index]),
            "node": pa.DictionaryArray.from_arrays(row.astype(np.int32), hosts).cast(pa.string()),
            "device": pa.DictionaryArray.from_arrays(row.astype(np.int32), names).cast(pa.string()),
        }
        for name in columns:
            kind = np.float64 if name in DOUBLES else np.float32
            values = np.full((len(names), width), np.nan, kind)
            for i, node in enumerate(nodes):
                found = node.metrics.get(name)
                if found is not None:
                    rows, array = found
                    values[i * per_node + rows.start : i * per_node + rows.stop] = array[:, a:b]
            column = values.ravel()[index]
            data[name] = pa.array(column, from_pandas=True)
        yield pa.table(data)


def _resent(node: NodeData, first: int, per_node: int, a: int, b: int) -> NDArray[np.int64]:
    """Flat positions (within the day's block) of rows that come a second time."""
    found = [np.zeros(0, np.int64)]
    for x, y in node.resent:
        steps = np.arange(max(x, a), min(y, b)) - a
        if len(steps):
            rows = np.arange(first, first + per_node)
            found.append((rows[:, None] * (b - a) + steps[None, :]).ravel())
    return np.concatenate(found)


def _events(notes: list[tuple[float, str, str, Note]]) -> pa.Table:
    notes = sorted(notes, key=lambda n: (n[0], n[2], n[3].code))
    return pa.table(
        {
            "time": _stamps(np.array([n[0] for n in notes], float)),
            "node": pa.array([n[1] for n in notes], pa.string()),
            "device": pa.array([n[2] for n in notes], pa.string()),
            "kind": pa.array([n[3].kind for n in notes], pa.string()),
            "code": pa.array([n[3].code for n in notes], pa.string()),
            "severity": pa.array([n[3].severity for n in notes], pa.string()),
            "message": pa.array([n[3].message for n in notes], pa.string()),
            "count": pa.array([n[3].count for n in notes], pa.int64()),
        }
    )


def _devices(rows: list[dict[str, object]]) -> pa.Table:
    table: dict[str, pa.Array] = {}
    for name in ("device", "node", "kind", "model", "serial"):
        table[name] = pa.array([r[name] for r in rows], pa.string())
    for name in ("installed", "removed"):
        table[name] = _stamps(np.array([np.nan if r[name] is None else r[name] for r in rows], float))
    table["slot"] = pa.array([r["slot"] for r in rows], pa.int32())
    table["rack"] = pa.array([r["rack"] for r in rows], pa.string())
    table["simulated"] = pa.array([True] * len(rows), pa.bool_())
    return pa.table(table)


def _failures(failures: list[Failure]) -> pa.Table:
    names = [node_name(f.node) for f in failures]
    return pa.table(
        {
            "time": _stamps(np.array([f.time for f in failures], float)),
            "node": pa.array(names, pa.string()),
            "device": pa.array(
                [n if f.gpu < 0 else f"{n}/gpu{f.gpu}" for n, f in zip(names, failures, strict=True)],
                pa.string(),
            ),
            "cause": pa.array([f.mechanism.cause for f in failures], pa.string()),
            "precursor": pa.array([f.visible for f in failures], pa.bool_()),
            "precursor_start": _stamps(np.array([f.start for f in failures], float)),
            "growth": pa.array([f.growth if f.visible else "" for f in failures], pa.string()),
            "telemetry_signs_start": _stamps(np.array([f.structural_start for f in failures], float)),
            "repaired": _stamps(np.array([f.repaired for f in failures], float)),
            "replaced": pa.array([f.replaced for f in failures], pa.bool_()),
        }
    )
