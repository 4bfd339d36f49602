"""The workload of a simulated fleet: jobs over one or many nodes, with ramps, checkpoints, phases and idle time."""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from forewarn.models.simulator_profiles import Physics

HOUR_S, DAY_S = 3600.0, 86_400.0
Singles = NDArray[np.float32]
LEAST_FILLER_S = 1800.0


@dataclass
class Job:
    """One job: the same load on all its nodes at the same time, until it is interrupted."""

    number: int
    start: float
    end: float
    nodes: tuple[int, ...]
    gpus: int
    inference: bool
    interruptions: list[tuple[float, float]] = field(default_factory=list)
    """(moment, seconds until it runs again)"""


def schedule(
    physics: Physics, nodes: int, gpus_per_node: int, start: float, end: float, rng: np.random.Generator
) -> list[Job]:
    """Jobs that fill the fleet from `start` to `end` (seconds since the epoch), by start of allocation."""
    free = [(start - float(rng.uniform(0, 20 * HOUR_S)), n) for n in range(nodes)]
    heapq.heapify(free)
    jobs: list[Job] = []
    widths = [w for w in (1, 1, 1, 2, 2, 4, 8, 16, 32, 64, 128) if w <= nodes]
    idle_mean_s = physics.job_median_h * HOUR_S * 1.3 * physics.idle_share / (1 - physics.idle_share)
    while free and free[0][0] < end:
        width = int(rng.choice(widths))
        taken = [heapq.heappop(free) for _ in range(min(width, len(free)))]
        begin = max(t for t, _ in taken)
        for since, n in taken:  # small jobs fill the wait for the last node of a wide one
            if begin - since > LEAST_FILLER_S and rng.random() > physics.idle_share:
                jobs.append(Job(len(jobs), since, begin - 300.0, (n,), gpus_per_node, False))
        begin += float(rng.exponential(idle_mean_s))
        length = float(np.clip(rng.lognormal(np.log(physics.job_median_h), 1.0), 0.3, 200.0)) * HOUR_S
        inference = width <= 2 and rng.random() < physics.inference_share
        gpus = gpus_per_node
        if width == 1 and gpus_per_node > 1 and rng.random() < 0.25:
            gpus = int(rng.integers(1, gpus_per_node + 1))
        members = tuple(n for _, n in taken)
        jobs.append(Job(len(jobs), begin, begin + length, members, gpus, inference))
        for n in members:
            heapq.heappush(free, (begin + length, n))
    return jobs


def load_of(job: Job, times: NDArray[np.float64], seed: int) -> tuple[Singles, Singles, float]:
    """(utilisation 0..1, power as a share of what the board can draw, memory share) of a job at `times`.

    The same for every node of the job: it depends on the job's number, not on who asks.
    """
    rng = np.random.default_rng([seed, 7, job.number])
    level = float(rng.uniform(0.55, 1.0))
    busy = float(rng.uniform(0.85, 1.0))
    memory = float(rng.uniform(0.35, 0.95))
    ramp_s = float(rng.uniform(60, 900))
    save_every_s = float(rng.uniform(0.25, 4) * HOUR_S)
    save_s = float(rng.uniform(20, 240))
    wave_s = float(rng.uniform(300, 4000))
    evaluate_every_s = float(rng.uniform(3, 12) * HOUR_S)
    since = times - job.start
    for moment, delay_s in job.interruptions:
        since = np.where(times >= moment, times - moment - delay_s, since)
    running = (since >= 0) & (times >= job.start) & (times < job.end)
    if job.inference:
        hour = (times % DAY_S) / DAY_S
        day = 0.55 + 0.35 * np.sin(2 * np.pi * (hour - float(rng.uniform(0.2, 0.5))))
        slow = 0.15 * np.sin(2 * np.pi * times / wave_s)
        shape = np.clip(day + slow, 0.05, 1.0)
        use, power = shape * busy, shape * level
    else:
        saving = (since % save_every_s) < save_s
        evaluating = (since % evaluate_every_s) < 600.0
        dip = np.where(saving, 0.25, np.where(evaluating & (since > evaluate_every_s), 0.7, 1.0))
        ramp = np.clip(since / ramp_s, 0.1, 1.0)
        wave = 1.0 + 0.02 * np.sin(2 * np.pi * since / wave_s)
        power = level * dip * ramp * wave
        use = busy * np.where(saving, 0.3, 1.0) * np.where(ramp < 1, 0.6, 1.0)
    return (
        np.where(running, use, 0).astype(np.float32),
        np.where(running, power, 0).astype(np.float32),
        memory,
    )
