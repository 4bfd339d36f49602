"""Physics of simulated fleets: the boards, the levels and noises of their readings, and how often harmless things
happen. docs/SIMULATOR.md gives the source of each figure, or says that it is an assumption.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import numpy as np

from forewarn.collectors.errors import ConfigError

PROFILES = ("h100", "a100", "b200", "l40s", "mixed", "random")
MEGA, GIGA = 1e6, 1e9


@dataclass(frozen=True)
class Board:
    """One kind of GPU board. Power in W, clocks in Hz, temperatures in C, resistance (die to inlet) in C/W."""

    model: str
    idle_w: float
    limit_w: float
    clock_max_hz: float
    clock_idle_hz: float
    memory_clock_hz: float
    memory_bytes: float
    resistance_c_per_w: float
    memory_rise_c: float
    """How much hotter the memory is than the die at full power."""
    slowdown_c: float
    shutdown_c: float
    pcie_generation: int
    nvlinks: int
    nvlink_generation: int
    banks: int
    fan: bool = False
    missing: frozenset[str] = frozenset()
    """Catalog metrics that this board does not report."""


_NO_AER = frozenset({"gpu_pcie_correctable_errors_total"})
_MARGIN = frozenset({"gpu_temperature_margin_celsius"})
_NO_SLOWDOWN_FIELDS = frozenset(
    {
        "gpu_slowdown_software_thermal_seconds_total",
        "gpu_slowdown_hardware_thermal_seconds_total",
        "gpu_slowdown_power_brake_seconds_total",
    }
)

BOARDS = {
    "h100": Board(
        "NVIDIA H100 80GB HBM3", 70, 700, 1980 * MEGA, 345 * MEGA, 2619 * MEGA, 85.52 * GIGA,
        0.062, 9, 87, 92, 5, 18, 4, 640,
    ),
    "a100": Board(
        "NVIDIA A100-SXM4-80GB", 55, 400, 1410 * MEGA, 210 * MEGA, 1593 * MEGA, 85.90 * GIGA,
        0.085, 8, 87, 92, 4, 12, 3, 640, missing=_MARGIN | _NO_AER | _NO_SLOWDOWN_FIELDS,
    ),
    "b200": Board(
        "NVIDIA B200", 140, 1000, 1965 * MEGA, 120 * MEGA, 3996 * MEGA, 192.0 * GIGA,
        0.040, 10, 90, 95, 5, 18, 5, 1024,
    ),
    "l40s": Board(
        "NVIDIA L40S", 35, 350, 2520 * MEGA, 210 * MEGA, 9001 * MEGA, 48.3 * GIGA,
        0.120, 6, 88, 92, 4, 0, 0, 192, missing=frozenset({"gpu_memory_temperature_celsius"}) | _MARGIN,
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Physics:
    """Levels, noises and rates of one fleet. Rates are of harmless things unless said otherwise."""

    interval_s: float = 60.0
    jitter_s: float = 0.4
    inlet_c: float = 25.0
    daily_swing_c: float = 1.5
    rack_spread_c: float = 1.2
    slot_spread_c: float = 2.5
    resistance_spread: float = 0.05
    """Standard deviation of the logarithm of thermal resistance between boards."""
    time_constant_s: float = 90.0
    temperature_noise_c: float = 0.5
    power_noise: float = 0.02
    power_spread: float = 0.02
    idle_share: float = 0.12
    """Share of time in which a node has no job."""
    job_median_h: float = 14.0
    inference_share: float = 0.15

    missing_poll: float = 0.002
    """Chance that one poll of one node is lost."""
    gaps_per_node_day: float = 0.05
    maintenance_per_node_day: float = 0.01
    reloads_per_node_day: float = 0.03
    clock_steps_per_node_day: float = 0.02
    resends_per_node_day: float = 0.05
    hot_aisles_per_rack_day: float = 0.06
    hot_aisle_c: float = 6.0
    fan_troubles_per_node_day: float = 0.006
    power_caps_per_node_day: float = 0.02
    recablings_per_node_day: float = 0.004
    nvml_call_s: float = 0.004
    slow_calls_per_node_day: float = 0.1

    app_xids_per_gpu_hour: float = 1e-4
    noisy_share: float = 0.05
    noisy_errors_per_hour: float = 3.0
    corrected_per_gpu_hour: float = 2e-4
    sram_corrected_per_gpu_hour: float = 2e-4
    remaps_per_gpu_hour: float = 4e-6
    """Single row remaps without a failure; scaled with the failures so that their ratio stays as in the field."""
    replays_per_gpu_hour: float = 0.02
    replay_noisy_share: float = 0.04
    replay_noisy_per_hour: float = 1.5
    nvlink_crc_per_gpu_hour: float = 0.02
    nvlink_noisy_share: float = 0.04
    nvlink_noisy_per_hour: float = 2.0

    frailty: float = 0.6
    """Standard deviation of the logarithm of how prone nodes and boards are to fail, each."""
    resistance_per_year: float = 0.02
    """Growth of thermal resistance with age, as a share."""

    precursor_size: float = 1.0
    """Factor on the size of precursors of failures."""
    lead_scale: float = 1.0
    """Factor on their length."""
    growth: tuple[float, ...] = (0.3, 0.25, 0.3, 0.15)
    """How often a precursor grows exponentially, in steps, in bursts, or stays on a plateau."""
    unsupported: frozenset[str] = frozenset()
    """Metrics that the collectors of this fleet do not give, whatever the board."""


_SPARED = {"interval_s", "growth", "unsupported", "app_xids_per_gpu_hour", "noisy_share", "inlet_c"}
_WIDE = {  # how far `random` may go from the default, as a factor either way
    "jitter_s": 4.0, "daily_swing_c": 3.0, "rack_spread_c": 2.5, "slot_spread_c": 3.0, "resistance_spread": 2.0,
    "time_constant_s": 3.5, "temperature_noise_c": 3.0, "power_noise": 2.5, "power_spread": 2.5,
    "idle_share": 3.0, "job_median_h": 5.0, "inference_share": 3.0, "missing_poll": 8.0, "hot_aisle_c": 1.8,
    "nvml_call_s": 5.0, "noisy_errors_per_hour": 8.0, "precursor_size": 4.0, "lead_scale": 2.0,
    "replay_noisy_share": 2.5, "nvlink_noisy_share": 2.5, "frailty": 1.6,
}  # fmt: skip
_OTHER_FACTOR = 4.0
_OPTIONAL = (
    frozenset({"gpu_memory_temperature_celsius"}),
    frozenset({"gpu_temperature_margin_celsius"}),
    _NO_AER,
    _NO_SLOWDOWN_FIELDS,
    frozenset({"gpu_violation_power_seconds_total", "gpu_violation_thermal_seconds_total"}),
    frozenset({"gpu_ecc_volatile_corrected_total", "gpu_ecc_volatile_uncorrected_total"}),
    frozenset({"gpu_ecc_sram_corrected_total", "gpu_ecc_sram_uncorrected_total"}),
    frozenset(f"gpu_row_remap_banks_{w}" for w in ("max", "high", "partial", "low", "none")),
    frozenset({"gpu_nvlink_crc_data_errors_total"}),
    frozenset({"gpu_nvlink_links_active"}),
    frozenset({"gpu_nvml_call_seconds"}),
    frozenset({"gpu_clock_event_reasons"}),
    frozenset({"gpu_memory_clock_hertz", "gpu_memory_utilization_ratio"}),
    frozenset({"gpu_pcie_link_generation", "gpu_pcie_link_width", "gpu_pcie_link_width_max"}),
    frozenset({"gpu_ecc_sram_threshold_exceeded"}),
    frozenset({"gpu_energy_joules_total"}),
)
"""Groups of metrics that a random fleet may lack."""
OPTIONAL_MISSING = 0.2
MOST_LOG_INTERVAL, LEAST_LOG_INTERVAL = np.log(300.0), np.log(10.0)


@dataclass(frozen=True)
class Profile:
    """What one fleet is made of: nodes take the boards in turn."""

    name: str
    boards: tuple[Board, ...]
    physics: Physics


def draw(name: str, seed: int, interval_s: float | None = None) -> Profile:
    """The profile of that name; `random` is drawn by the seed. `interval_s` overrides the poll interval.

    Raises ConfigError for a name that is none of PROFILES.
    """
    if name not in PROFILES:
        raise ConfigError(f"--profile {name}: must be one of {', '.join(PROFILES)}")
    physics = Physics()
    if name == "random":
        physics, boards = _random(np.random.default_rng([seed, 101]))
    elif name == "mixed":
        boards = tuple(BOARDS.values())
    else:
        boards = (BOARDS[name],)
    if interval_s is not None:
        physics = replace(physics, interval_s=interval_s)
    return Profile(name, boards, physics)


def _random(rng: np.random.Generator) -> tuple[Physics, tuple[Board, ...]]:
    base = Physics()
    drawn: dict[str, float] = {}
    for item in fields(Physics):
        if item.name in _SPARED:
            continue
        reach = np.log(_WIDE.get(item.name, _OTHER_FACTOR))
        drawn[item.name] = float(getattr(base, item.name) * np.exp(rng.uniform(-reach, reach)))
    drawn["idle_share"] = min(drawn["idle_share"], 0.5)
    gone = [group for group in _OPTIONAL if rng.random() < OPTIONAL_MISSING]
    physics = replace(
        base,
        **drawn,
        interval_s=float(np.round(np.exp(rng.uniform(LEAST_LOG_INTERVAL, MOST_LOG_INTERVAL)))),
        inlet_c=float(rng.uniform(17, 34)),
        noisy_share=float(rng.uniform(0.02, 0.1)),
        app_xids_per_gpu_hour=float(10 ** rng.uniform(-4.6, -3.1)),
        growth=tuple(float(g) for g in rng.dirichlet((1.5, 1.5, 1.5, 1.0))),
        unsupported=frozenset().union(*gone),
    )
    return physics, tuple(_random_board(rng) for _ in range(int(rng.integers(1, 3))))


def _random_board(rng: np.random.Generator) -> Board:
    """A board like one of the named, its levels moved."""
    base = BOARDS[str(rng.choice(list(BOARDS)))]

    def near(value: float, reach: float) -> float:
        return float(value * np.exp(rng.uniform(-np.log(reach), np.log(reach))))

    return replace(
        base,
        idle_w=near(base.idle_w, 1.6),
        limit_w=float(np.round(near(base.limit_w, 1.4))),
        clock_max_hz=near(base.clock_max_hz, 1.2),
        resistance_c_per_w=near(base.resistance_c_per_w, 1.35),
        memory_rise_c=near(base.memory_rise_c, 1.8),
        slowdown_c=float(np.round(rng.uniform(83, 95))),
        shutdown_c=float(np.round(rng.uniform(96, 105))),
        fan=bool(base.nvlinks == 0 and rng.random() < 0.5),
    )
