"""How simulated hardware fails: mechanisms, their rates, warnings and what follows. Rates are per GPU-hour and come
from field studies as listed in docs/SIMULATOR.md; the courses of precursors are assumptions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

HOUR_S, DAY_S = 3600.0, 86_400.0
LEAST_SIGNS = 6
"""Expected signs that a visible precursor has at least: fewer could not be told from noise by anybody."""
GROWTHS = ("exponential", "steps", "bursts", "plateau")


def _lognormal(median_s: float, sigma: float) -> Callable[[np.random.Generator], float]:
    return lambda rng: float(rng.lognormal(np.log(median_s), sigma))


def _gamma(mean_s: float, shape: float = 1.5) -> Callable[[np.random.Generator], float]:
    return lambda rng: float(rng.gamma(shape, mean_s / shape))


def _uniform(low_s: float, high_s: float) -> Callable[[np.random.Generator], float]:
    return lambda rng: float(rng.uniform(low_s, high_s))


@dataclass(frozen=True)
class Mechanism:
    """One way to fail. `lead` draws seconds from the first sign to the failure, where there are signs at all."""

    cause: str
    rate_per_gpu_hour: float
    visible: float
    """Chance that there is a precursor."""
    lead: Callable[[np.random.Generator], float]
    replaced: float
    """Chance that the part is replaced rather than reset."""
    repair_median_h: float
    of_node: bool = False
    """Strikes the node rather than one GPU."""
    group: tuple[int, ...] = (1,)
    """How many GPUs of a node go at once, drawn evenly."""


MECHANISMS = (
    Mechanism("hbm_uncorrectable", 5e-6, 0.45, _lognormal(24 * HOUR_S, 1.2), 0.5, 4),
    Mechanism("sram_uncorrectable", 9e-7, 0.15, _lognormal(24 * HOUR_S, 1.2), 0.7, 5),
    Mechanism("gpu_off_bus", 2e-6, 0.35, _gamma(6 * HOUR_S), 0.4, 6),
    Mechanism("nvlink", 3e-6, 0.5, _lognormal(6 * HOUR_S, 1.2), 0.2, 3),
    Mechanism("gsp_timeout", 8e-7, 0.2, _uniform(1, 60), 0.02, 1),
    Mechanism("thermal_interface", 3e-7, 0.9, _uniform(7 * DAY_S, 21 * DAY_S), 0.5, 12),
    Mechanism("power_delivery", 3e-7, 0.4, _lognormal(1.5 * HOUR_S, 1.0), 0.2, 8, group=(1, 1, 1, 2, 3)),
    Mechanism("pmu_spi", 3e-7, 0.0, _uniform(0, 0), 0.3, 3),
    Mechanism("silent_corruption", 2.8e-7, 0.0, _uniform(0, 0), 0.8, 24),
    Mechanism("nic_or_fabric", 2e-6, 0.5, _lognormal(4 * HOUR_S, 1.3), 0.0, 2, of_node=True),
    Mechanism("host_other", 1e-6, 0.4, _lognormal(12 * HOUR_S, 1.2), 0.0, 6, of_node=True),
)


@dataclass
class Failure:
    """One failure to come. `gpu` is -1 for the node itself. Times in seconds since the epoch.

    `start` is when its precursor begins (NaN: none); it is moved to the first real sign once that is known.
    """

    time: float
    node: int
    gpu: int
    mechanism: Mechanism
    start: float
    growth: str
    repaired: float
    replaced: bool
    structural: bool = False
    """No precursor in numbers, but telemetry that falters before an off-bus."""
    structural_start: float = float("nan")

    @property
    def visible(self) -> bool:
        return self.start == self.start  # NaN alone differs from itself


def hazard_of_age(days: NDArray[np.float64]) -> NDArray[np.float64]:
    """How much likelier than at its best a board of that age is to fail: high when new and when worn."""
    return 1.0 + 1.5 * np.exp(-days / 30.0) + np.maximum(0.0, days / 365.0 - 2.0)


def draw_failures(
    nodes: int,
    gpus_per_node: int,
    start: float,
    end: float,
    scale: float,
    growth: tuple[float, ...],
    lead_scale: float,
    noisy: NDArray[np.bool_],
    weights: NDArray[np.float64],
    rng: np.random.Generator,
) -> list[Failure]:
    """Failures of a fleet by time. `noisy` (nodes x gpus): boards with a history of corrected errors, to which half
    of the visible memory failures go; `weights` (same shape): how likely each board is to be the one that fails,
    against the others; the rate of the fleet does not depend on it. A failure that falls in the repair of another
    at the same place is left out.
    """
    gpu_hours = nodes * gpus_per_node * (end - start) / HOUR_S
    found: list[Failure] = []
    offenders = np.argwhere(noisy)
    reach = np.cumsum(weights.ravel()) / weights.sum()
    chances = np.array(growth) / np.sum(growth)
    for mechanism in MECHANISMS:
        mean_size = float(np.mean(mechanism.group))
        for _ in range(int(rng.poisson(mechanism.rate_per_gpu_hour * scale * gpu_hours / mean_size))):
            time = float(rng.uniform(start, end))
            place = min(int(np.searchsorted(reach, rng.random())), reach.size - 1)
            node, gpu = divmod(place, gpus_per_node)
            visible = rng.random() < mechanism.visible
            if mechanism.cause == "hbm_uncorrectable" and visible and len(offenders) and rng.random() < 0.5:
                node, gpu = (int(v) for v in offenders[int(rng.integers(len(offenders)))])
            size = min(int(rng.choice(mechanism.group)), gpus_per_node)
            repair_s = float(rng.lognormal(np.log(mechanism.repair_median_h * HOUR_S), 0.6))
            lead_s = mechanism.lead(rng) * (lead_scale if mechanism.cause != "gsp_timeout" else 1.0)
            for k in range(size):
                moment = time + k * float(rng.uniform(0.5, 5.0))
                found.append(
                    Failure(
                        time=moment,
                        node=node,
                        gpu=-1 if mechanism.of_node else (gpu + k) % gpus_per_node,
                        mechanism=mechanism,
                        start=max(start, moment - lead_s) if visible else float("nan"),
                        growth=str(rng.choice(GROWTHS, p=chances)),
                        repaired=time + repair_s,
                        replaced=bool(rng.random() < mechanism.replaced),
                        structural=bool(
                            mechanism.cause == "gpu_off_bus" and not visible and rng.random() < 0.3
                        ),
                    )
                )
    return _apart([f for f in found if f.time < end])


def _apart(failures: list[Failure]) -> list[Failure]:
    """Failures by time without those that strike what is being repaired; precursors start after the repair before."""
    back: dict[tuple[int, int], float] = {}
    kept: list[Failure] = []
    for failure in sorted(failures, key=lambda f: (f.time, f.node, f.gpu)):
        places = [(failure.node, failure.gpu), (failure.node, -1)]
        ready = max((back.get(p, -np.inf) for p in places), default=-np.inf)
        if failure.time <= ready + HOUR_S:
            continue
        if failure.visible:
            failure.start = max(failure.start, ready + HOUR_S / 2)
        back[(failure.node, failure.gpu)] = failure.repaired
        kept.append(failure)
    return kept


def course(growth: str, n: int, rng: np.random.Generator) -> NDArray[np.float64]:
    """Strength of a precursor over its `n` steps, mean 1: how it grows towards the failure."""
    u = (np.arange(n) + 0.5) / max(1, n)
    if growth == "exponential":
        y = np.exp(rng.uniform(1.5, 5.0) * u)
    elif growth == "steps":
        edges = np.sort(rng.uniform(0, 1, int(rng.integers(2, 6))))
        factors = np.concatenate([[1.0], np.cumprod(rng.uniform(1.5, 3.5, len(edges)))])
        y = factors[np.searchsorted(edges, u)]
    elif growth == "bursts":
        blocks = int(np.clip(n, 1, 40))
        on = rng.random(blocks) < np.linspace(0.15, 0.75, blocks)
        on[-1] = True
        size = on * rng.lognormal(0.0, 0.7, blocks)
        y = size[np.minimum((u * blocks).astype(int), blocks - 1)]
    else:
        y = np.minimum(1.0, u / 0.15)
    mean = float(y.mean())
    return np.asarray(y / mean if mean > 0 else np.ones(n), float)
