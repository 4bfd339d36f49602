"""One simulated node over time: load, power, heat, clocks and counters as arrays (GPUs x steps)."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import scipy.signal
from numpy.typing import NDArray

from forewarn.models.simulator_profiles import Board, Physics

HOUR_S, DAY_S = 3600.0, 86_400.0
Singles = NDArray[np.float32]

COUNTERS = (
    "gpu_ecc_dram_corrected_total",
    "gpu_ecc_dram_uncorrected_total",
    "gpu_ecc_sram_corrected_total",
    "gpu_ecc_sram_uncorrected_total",
    "gpu_row_remap_corrected_total",
    "gpu_row_remap_uncorrected_total",
    "gpu_pcie_replay_total",
    "gpu_pcie_correctable_errors_total",
    "gpu_nvlink_crc_flit_errors_total",
    "gpu_nvlink_crc_data_errors_total",
    "gpu_nvlink_replay_errors_total",
    "gpu_nvlink_recovery_errors_total",
)
"""Counters made of single errors; the others follow from power and heat."""
LASTING = frozenset(c for c in COUNTERS if c.startswith(("gpu_ecc", "gpu_row")))
"""Kept on the board over resets of GPU and driver."""
NVLINK5 = {
    "gpu_nvlink_crc_flit_errors_total": "gpu_nvlink_effective_errors_total",
    "gpu_nvlink_crc_data_errors_total": "gpu_nvlink_receive_errors_total",
    "gpu_nvlink_replay_errors_total": "gpu_nvlink_symbol_errors_total",
    "gpu_nvlink_recovery_errors_total": "gpu_nvlink_recovery_events_total",
}
"""Under what name NVLink 5 counts the like."""
NODE_COUNTERS = ("node_edac_corrected_errors_total",)
IDLE, POWER_CAP, HW_SLOWDOWN, SW_THERMAL, HW_THERMAL, POWER_BRAKE = 0x1, 0x4, 0x8, 0x20, 0x40, 0x80
MOST_ROWS_A_BANK = 8


@dataclass
class Note:
    """An event to be written. `gpu` is -1 for the node."""

    time: float
    gpu: int
    kind: str
    code: str
    severity: str
    message: str
    count: int = 1


@dataclass
class NodeState:
    """All of one node that mechanisms may touch before it is rendered. Arrays are (GPUs x steps) unless said."""

    number: int
    board: Board
    times: NDArray[np.float64]
    step_s: float
    gpus: int
    rng: np.random.Generator
    use: Singles
    share: Singles
    """Power as a share of what the board can draw above idle."""
    memory: Singles
    counts: dict[str, Singles] = field(default_factory=dict)
    heat: dict[int, Singles] = field(default_factory=dict)
    """Degrees above what power and inlet explain at full power, per GPU (steps)."""
    inlet: Singles = field(default_factory=lambda: np.zeros(0, np.float32))
    """Degrees on top of the inlet, all GPUs (steps)."""
    cap: Singles = field(default_factory=lambda: np.ones(0, np.float32))
    brake: dict[int, Singles] = field(default_factory=dict)
    call: dict[int, Singles] = field(default_factory=dict)
    """Factor on the time of NVML calls, per GPU (steps)."""
    width: dict[int, Singles] = field(default_factory=dict)
    links: dict[int, Singles] = field(default_factory=dict)
    lost: NDArray[np.bool_] = field(default_factory=lambda: np.zeros((0, 0), bool))
    silent: NDArray[np.bool_] = field(default_factory=lambda: np.zeros(0, bool))
    blanks: list[tuple[int, int, int]] = field(default_factory=list)
    """(gpu, from, to): polls in which some metrics do not come."""
    resets: list[tuple[int, int, bool]] = field(default_factory=list)
    """(gpu, step, board replaced): where counters begin anew."""
    pending: dict[int, list[tuple[int, int]]] = field(default_factory=dict)
    remap_failed: dict[int, int] = field(default_factory=dict)
    threshold: dict[int, int] = field(default_factory=dict)
    action: dict[int, list[tuple[int, int, int]]] = field(default_factory=dict)
    edac: Singles = field(default_factory=lambda: np.zeros(0, np.float32))
    ports: dict[str, Singles] = field(default_factory=dict)
    port_down: NDArray[np.bool_] = field(default_factory=lambda: np.zeros(0, bool))
    reboots: list[int] = field(default_factory=list)
    stamp_shift: NDArray[np.float64] = field(default_factory=lambda: np.zeros(0))
    resent: list[tuple[int, int]] = field(default_factory=list)
    notes: list[Note] = field(default_factory=list)
    used: bool = True
    """Boards have a past: their lasting counters do not begin at 0."""
    warmth: Singles | None = None
    """Die temperatures before the first step (GPUs), where known; after `render` those of the last."""

    def __post_init__(self) -> None:
        n = len(self.times)
        self.counts = {c: np.zeros((self.gpus, n), np.float32) for c in COUNTERS}
        self.inlet = np.zeros(n, np.float32)
        self.cap = np.ones(n, np.float32)
        self.lost = np.zeros((self.gpus, n), bool)
        self.silent = np.zeros(n, bool)
        self.edac = np.zeros(n, np.float32)
        self.port_down = np.zeros(n, bool)
        self.stamp_shift = np.zeros(n)
        self.ports = {
            p: np.zeros(n, np.float32) for p in ("symbol", "downs", "integrity", "recoveries", "receive")
        }

    @property
    def steps(self) -> int:
        return len(self.times)

    def step_at(self, time: float) -> int:
        """The first step at or after `time`; `steps` when there is none."""
        return int(np.searchsorted(self.times, time, "left"))

    def sprinkle(
        self, counter: str, gpu: int, rate_per_hour: float, begin: int = 0, end: int | None = None
    ) -> None:
        """Single errors at a steady rate over steps begin..end."""
        end = self.steps if end is None else min(end, self.steps)
        if end <= begin:
            return
        n = int(self.rng.poisson(rate_per_hour * (end - begin) * self.step_s / HOUR_S))
        if n:
            where = self.rng.integers(begin, end, n)
            np.add.at(self.counts[counter][gpu], where, 1.0)

    def note(
        self, time: float, gpu: int, kind: str, code: str, severity: str, message: str, count: int = 1
    ) -> None:
        self.notes.append(Note(time, gpu, kind, code, severity, message, count))


@dataclass(frozen=True)
class Traits:
    """What sets the boards of one node apart: arrays over GPUs."""

    resistance: Singles
    offset_c: Singles
    tau_s: Singles
    power: Singles
    rack_c: float
    swing_phase: float


def draw_traits(physics: Physics, board: Board, gpus: int, rack_c: float, rng: np.random.Generator) -> Traits:
    slots = np.linspace(-1, 1, gpus) if gpus > 1 else np.zeros(1)
    return Traits(
        resistance=(board.resistance_c_per_w * np.exp(rng.normal(0, physics.resistance_spread, gpus))).astype(
            np.float32
        ),
        offset_c=(slots * physics.slot_spread_c + rng.normal(0, 0.4, gpus)).astype(np.float32),
        tau_s=(physics.time_constant_s * np.exp(rng.normal(0, 0.15, gpus))).astype(np.float32),
        power=np.exp(rng.normal(0, physics.power_spread, gpus)).astype(np.float32),
        rack_c=rack_c,
        swing_phase=float(rng.uniform(-0.03, 0.03)),
    )


def render(state: NodeState, traits: Traits, physics: Physics) -> dict[str, NDArray[np.floating]]:
    """Metrics of the node's GPUs, name to array (GPUs x steps), NaN where a board does not report one."""
    board, rng, g, n = state.board, state.rng, state.gpus, state.steps
    dt = np.float32(state.step_s)

    def noise(scale: float) -> Singles:
        return rng.standard_normal((g, n), dtype=np.float32) * np.float32(scale)

    limit = (board.limit_w * state.cap)[None, :].astype(np.float32)
    watts = board.idle_w + (board.limit_w * 0.99 - board.idle_w) * state.share * traits.power[:, None]
    watts *= 1 + noise(physics.power_noise) * (0.3 + 0.7 * state.use)
    brake = np.zeros((g, n), np.float32)
    for gpu, strength in state.brake.items():
        brake[gpu] = np.minimum(1.0, strength)
    watts *= 1 - 0.45 * brake
    capped = watts > limit * 0.985
    watts = np.minimum(watts, limit * (1 + noise(0.004)))

    day = 2 * np.pi * (state.times / DAY_S + traits.swing_phase)
    inlet = physics.inlet_c + traits.rack_c + physics.daily_swing_c * np.sin(day) + state.inlet
    full = board.limit_w - board.idle_w
    resistance = np.repeat(traits.resistance[:, None], n, axis=1)
    for gpu, extra in state.heat.items():
        resistance[gpu] += extra / np.float32(full)
    target = inlet[None, :] + traits.offset_c[:, None] + resistance * watts
    heat = _lag(target, traits.tau_s, float(dt), state.warmth)
    over = np.maximum(0, heat - (board.slowdown_c - 2))
    heat = heat - 0.75 * over
    state.warmth = heat[:, -1].astype(np.float32)
    held = np.minimum(1, over / 6)
    watts = watts * (1 - 0.35 * held)
    hard = np.maximum(0, np.minimum(1, (heat - board.slowdown_c) / 3)).astype(np.float32)
    temperature = np.round(heat + noise(physics.temperature_noise_c))
    rise = 1.5 + board.memory_rise_c * (watts / board.limit_w)
    memory_temperature = np.round(heat + rise + noise(physics.temperature_noise_c))

    busy = state.use > 0.02
    clock = board.clock_max_hz * (1 - 0.10 * state.share) * (1 - 0.12 * capped) * (1 - 0.3 * held)
    clock = clock * (1 - 0.5 * brake) + noise(6e6)
    clock = np.where(busy, np.minimum(clock, board.clock_max_hz), board.clock_idle_hz)
    clock = np.round(clock / 15e6) * 15e6
    reasons = np.where(busy, 0, IDLE).astype(np.int32)
    reasons |= np.where(capped & busy, POWER_CAP, 0)
    reasons |= np.where(held > 0.05, SW_THERMAL, 0)
    reasons |= np.where(hard > 0.05, HW_SLOWDOWN | HW_THERMAL, 0)
    reasons |= np.where(brake > rng.random((g, n), dtype=np.float32), HW_SLOWDOWN | POWER_BRAKE, 0)

    use = np.clip(state.use + noise(0.015) * busy, 0, 1)
    out: dict[str, NDArray[np.floating]] = {
        "gpu_temperature_celsius": temperature,
        "gpu_memory_temperature_celsius": memory_temperature,
        "gpu_temperature_margin_celsius": board.slowdown_c - temperature,
        "gpu_temperature_slowdown_celsius": _level(board.slowdown_c, g, n),
        "gpu_power_watts": np.round(watts, 1),
        "gpu_power_limit_watts": np.repeat(np.round(limit), g, axis=0),
        "gpu_sm_clock_hertz": clock,
        "gpu_sm_clock_max_hertz": _level(board.clock_max_hz, g, n),
        "gpu_memory_clock_hertz": _level(board.memory_clock_hz, g, n),
        "gpu_utilization_ratio": np.round(use, 2),
        "gpu_memory_utilization_ratio": np.round(np.clip(use * 0.45 + noise(0.03) * busy, 0, 1), 2),
        "gpu_memory_used_bytes": np.round(state.memory * board.memory_bytes / 2**26) * 2**26,
        "gpu_memory_total_bytes": _level(board.memory_bytes, g, n),
        "gpu_clock_event_reasons": reasons.astype(np.float32),
        "gpu_ecc_enabled": _level(1, g, n),
        "gpu_nvml_call_seconds": _calls(state, physics),
        "gpu_ecc_sram_threshold_exceeded": _from(state.threshold, g, n),
        "gpu_row_remap_failure": _from(state.remap_failed, g, n),
        "gpu_row_remap_pending": _spans(state.pending, g, n),
        "gpu_recovery_action": _actions(state),
    }
    if board.fan:
        out["gpu_fan_speed_ratio"] = np.round(np.clip((heat - 30) / 60, 0.3, 1.0), 2)
    rates = {
        "gpu_energy_joules_total": watts.astype(np.float64) * state.step_s,
        "gpu_violation_power_seconds_total": capped * dt * np.float32(0.6),
        "gpu_violation_thermal_seconds_total": held * dt,
        "gpu_slowdown_software_thermal_seconds_total": held * dt,
        "gpu_slowdown_hardware_thermal_seconds_total": hard * dt,
        "gpu_slowdown_power_brake_seconds_total": brake * dt,
    }
    for name, increase in rates.items():
        out[name] = np.round(_accumulate(state, increase, 0.0, lasting=False), 1)
    for name, increase in state.counts.items():
        lasting = name in LASTING
        start = _history(name, state) if lasting and state.used else 0.0
        out[name] = _accumulate(state, increase, start, lasting)
    volatile = {
        "corrected": ("dram_corrected", "sram_corrected"),
        "uncorrected": ("dram_uncorrected", "sram_uncorrected"),
    }
    for word, parts in volatile.items():
        both = sum(state.counts[f"gpu_ecc_{p}_total"] for p in parts)
        out[f"gpu_ecc_volatile_{word}_total"] = _accumulate(state, np.asarray(both), 0.0, lasting=False)
    spare_rows(out, board)
    _links(out, state)
    for name in board.missing | physics.unsupported:
        out.pop(name, None)
    _blank(out, state)
    return out


def _level(value: float, g: int, n: int) -> Singles:
    return np.broadcast_to(np.float32(value), (g, n))


def _lag(target: NDArray[np.floating], tau_s: Singles, dt: float, before: Singles | None) -> Singles:
    """First-order lag of each row, from `before` or in equilibrium."""
    out = np.empty(target.shape, np.float32)
    for i, row in enumerate(target):
        keep = float(np.exp(-dt / tau_s[i]))
        initial = row[0] if before is None else before[i]
        filtered, _ = scipy.signal.lfilter([1 - keep], [1, -keep], row, zi=[keep * initial])
        out[i] = filtered
    return out


def _calls(state: NodeState, physics: Physics) -> Singles:
    rng = state.rng
    base = physics.nvml_call_s * np.exp(rng.normal(0, 0.2))
    out = base * np.exp(rng.standard_normal((state.gpus, state.steps), dtype=np.float32) * 0.25)
    for gpu, factor in state.call.items():
        out[gpu] *= factor
    return np.asarray(np.round(out, 5), np.float32)


def _from(at: dict[int, int], g: int, n: int) -> Singles:
    out = np.zeros((g, n), np.float32)
    for gpu, step in at.items():
        out[gpu, step:] = 1
    return out


def _spans(spans: dict[int, list[tuple[int, int]]], g: int, n: int) -> Singles:
    out = np.zeros((g, n), np.float32)
    for gpu, pairs in spans.items():
        for begin, end in pairs:
            out[gpu, begin:end] = 1
    return out


def _actions(state: NodeState) -> Singles:
    out = np.zeros((state.gpus, state.steps), np.float32)
    for gpu, spans in state.action.items():
        for begin, end, value in spans:
            out[gpu, begin:end] = value
    return out


def _history(name: str, state: NodeState) -> Singles:
    """What the counters of boards in use already show."""
    rng = state.rng
    if "uncorrected" in name:
        return (rng.random(state.gpus) < 0.01).astype(np.float32)[:, None]
    some = rng.random(state.gpus) < 0.05
    scale = 2.0 if "remap" in name else 40.0
    return (some * np.floor(rng.exponential(scale, state.gpus))).astype(np.float32)[:, None]


def _accumulate(
    state: NodeState, increase: NDArray[np.floating], start: Singles | float, lasting: bool
) -> NDArray[np.floating]:
    """Running totals that begin anew at resets: of lasting counters only where the board was replaced."""
    total = np.cumsum(increase, axis=1, dtype=np.float64) + start
    for gpu, step, replaced in sorted(state.resets):
        if 0 < step < state.steps and (replaced or not lasting):
            total[gpu, step:] -= total[gpu, step - 1]
    return total


def spare_rows(out: dict[str, NDArray[np.floating]], board: Board) -> None:
    """The histogram of spare rows that fits the rows remapped so far: first one bank loses rows, then others too."""
    if not board.banks:
        for name in [k for k in out if "row_remap" in k]:
            del out[name]
        return
    rows = out["gpu_row_remap_corrected_total"] + out["gpu_row_remap_uncorrected_total"]
    failed = out["gpu_row_remap_failure"] > 0
    worst = np.minimum(rows, MOST_ROWS_A_BANK)
    out["gpu_row_remap_banks_none"] = (failed | (worst >= 8)).astype(np.float32)
    low = (worst >= 6) & ~(out["gpu_row_remap_banks_none"] > 0)
    partial = (worst >= 3) & ~low & ~(out["gpu_row_remap_banks_none"] > 0)
    high = (worst >= 1) & ~partial & ~low & ~(out["gpu_row_remap_banks_none"] > 0)
    out["gpu_row_remap_banks_low"] = low.astype(np.float32)
    out["gpu_row_remap_banks_partial"] = partial.astype(np.float32)
    out["gpu_row_remap_banks_high"] = high + np.floor(np.maximum(0, rows - MOST_ROWS_A_BANK) / 2)
    taken = np.sum([out[f"gpu_row_remap_banks_{w}"] for w in ("none", "low", "partial", "high")], axis=0)
    out["gpu_row_remap_banks_max"] = board.banks - taken


def _links(out: dict[str, NDArray[np.floating]], state: NodeState) -> None:
    board, g, n = state.board, state.gpus, state.steps
    busy = state.use > 0.02
    if not board.fan:
        out["gpu_pcie_link_generation"] = _level(board.pcie_generation, g, n)
    else:  # cards of workstations step down at idle
        out["gpu_pcie_link_generation"] = np.where(busy, board.pcie_generation, 1).astype(np.float32)
    width = np.full((g, n), 16, np.float32)
    for gpu, lanes in state.width.items():
        width[gpu] = np.minimum(width[gpu], lanes)
    out["gpu_pcie_link_width"] = width
    out["gpu_pcie_link_width_max"] = _level(16, g, n)
    nvlink = [k for k in out if k.startswith("gpu_nvlink")]
    if not board.nvlinks:
        for name in nvlink:
            del out[name]
        return
    if board.nvlink_generation >= 5:
        for name in nvlink:
            out[NVLINK5[name]] = out.pop(name)
        recent = np.diff(out["gpu_nvlink_symbol_errors_total"], axis=1, prepend=0).clip(0)
        out["gpu_nvlink_symbol_bit_error_ratio"] = 1e-15 * (1 + recent)
    active = np.full((g, n), board.nvlinks, np.float32)
    for gpu, gone in state.links.items():
        active[gpu] -= gone
    out["gpu_nvlink_links_active"] = np.maximum(active, 0)
    out["gpu_nvlink_links_total"] = _level(board.nvlinks, g, n)


def _blank(out: dict[str, NDArray[np.floating]], state: NodeState) -> None:
    if not state.blanks:
        return
    names = sorted(out)
    for gpu, begin, end in state.blanks:
        for name in state.rng.choice(names, max(1, len(names) // 3), replace=False):
            out[name] = np.array(out[name], dtype=out[name].dtype)
            out[name][gpu, begin:end] = np.nan
