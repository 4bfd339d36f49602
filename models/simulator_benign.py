"""What looks like trouble in a simulated fleet and is none: noisy boards, hot aisles, reloads, gaps, clock steps."""

from __future__ import annotations

import numpy as np

from forewarn.models.simulator_faults import xid
from forewarn.models.simulator_jobs import Job
from forewarn.models.simulator_mechanisms import DAY_S, HOUR_S, course
from forewarn.models.simulator_physics import NodeState
from forewarn.models.simulator_profiles import Physics

APP_XIDS = (13, 31, 43, 45, 69)
APP_XID_SHARES = (0.25, 0.45, 0.12, 0.16, 0.02)
MINUTE_S = 60.0


def disturb(state: NodeState, physics: Physics, noisy: np.ndarray, scale: float) -> None:
    """Put all harmless things into a node. `noisy` (GPUs): boards with a history of corrected errors; `scale`: how
    much more often than in the field hardware fails, which single row remaps follow."""
    _background(state, physics)
    for gpu in np.flatnonzero(noisy):
        _noisy_memory(state, physics, int(gpu))
    _remaps(state, physics, scale)
    _noisy_links(state, physics)
    _heat(state, physics)
    _power_caps(state, physics)
    _reloads(state, physics)
    _recable(state, physics)
    _slow_calls(state, physics)
    _gaps(state, physics)
    _clock(state, physics)


def _times(state: NodeState, per_day: float) -> list[float]:
    """Moments of something that happens at random `per_day`."""
    first, last = float(state.times[0]), float(state.times[-1])
    n = int(state.rng.poisson(per_day * (last - first) / DAY_S))
    return sorted(float(t) for t in state.rng.uniform(first, last, n))


def _background(state: NodeState, physics: Physics) -> None:
    rates = {
        "gpu_ecc_dram_corrected_total": physics.corrected_per_gpu_hour,
        "gpu_ecc_sram_corrected_total": physics.sram_corrected_per_gpu_hour,
        "gpu_pcie_replay_total": physics.replays_per_gpu_hour,
        "gpu_nvlink_crc_flit_errors_total": physics.nvlink_crc_per_gpu_hour,
        "gpu_nvlink_replay_errors_total": physics.nvlink_crc_per_gpu_hour * 0.3,
    }
    for counter, rate in rates.items():
        for gpu in range(state.gpus):
            state.sprinkle(counter, gpu, rate)
    for _ in range(int(state.rng.poisson(0.02 * state.steps * state.step_s / DAY_S))):
        state.edac[int(state.rng.integers(state.steps))] += 1
    for _ in range(int(state.rng.poisson(0.3 * state.steps * state.step_s / DAY_S))):
        state.ports["symbol"][int(state.rng.integers(state.steps))] += float(state.rng.integers(1, 5))


def _noisy_memory(state: NodeState, physics: Physics, gpu: int) -> None:
    """A healthy board that corrects errors: steadily, or in bursts over one to three weeks."""
    rng, counter = state.rng, state.counts["gpu_ecc_dram_corrected_total"][gpu]
    if rng.random() < 0.35:
        rate = physics.noisy_errors_per_hour * float(rng.lognormal(-1.0, 0.8))
        state.sprinkle("gpu_ecc_dram_corrected_total", gpu, rate)
        return
    begin = float(rng.uniform(state.times[0] - 14 * DAY_S, state.times[-1]))
    a, b = state.step_at(begin), state.step_at(begin + float(rng.uniform(7, 21)) * DAY_S)
    if b <= a:
        return
    blocks = max(1, int((b - a) * state.step_s / (2 * HOUR_S)))
    on = (rng.random(blocks) < float(rng.uniform(0.05, 0.4))) * rng.lognormal(0, 0.9, blocks)
    per_hour = np.repeat(on, int(np.ceil((b - a) / blocks)))[: b - a] * physics.noisy_errors_per_hour * 3
    counter[a:b] += rng.poisson(per_hour * state.step_s / HOUR_S)


def _remaps(state: NodeState, physics: Physics, scale: float) -> None:
    """A row is remapped after a few errors, and that is the end of it."""
    if not state.board.banks:
        return
    per_day = physics.remaps_per_gpu_hour * scale * 24
    for gpu in range(state.gpus):
        for moment in _times(state, per_day):
            step = state.step_at(moment)
            word = "corrected" if state.rng.random() < 0.6 else "uncorrected"
            state.counts["gpu_ecc_dram_corrected_total"][gpu, max(0, step - 3) : step] += state.rng.integers(
                0, 4
            )
            state.counts[f"gpu_row_remap_{word}_total"][gpu, step] += 1
            xid(state, moment, gpu, 63)
            until = state.step_at(moment + float(state.rng.exponential(2 * DAY_S)))
            state.pending.setdefault(gpu, []).append((step, until))


def _noisy_links(state: NodeState, physics: Physics) -> None:
    rng = state.rng
    for gpu in range(state.gpus):
        if rng.random() < physics.replay_noisy_share:
            _waves(state, "gpu_pcie_replay_total", gpu, physics.replay_noisy_per_hour)
            if rng.random() < 0.4:
                _waves(state, "gpu_pcie_correctable_errors_total", gpu, physics.replay_noisy_per_hour)
            for moment in _times(state, 0.1):
                state.note(moment, gpu, "aer", "corrected", "warning", "PCIe corrected error (simulated)")
        if rng.random() < physics.nvlink_noisy_share:
            _waves(state, "gpu_nvlink_crc_flit_errors_total", gpu, physics.nvlink_noisy_per_hour)
            if rng.random() < 0.5:
                _waves(state, "gpu_nvlink_replay_errors_total", gpu, physics.nvlink_noisy_per_hour * 0.5)


def _waves(state: NodeState, counter: str, gpu: int, rate_per_hour: float) -> None:
    """Errors of a healthy but noisy link: steady, or now and then, always at about the same level."""
    rng = state.rng
    level = rate_per_hour * float(rng.lognormal(0, 0.8))
    if rng.random() < 0.5:
        state.sprinkle(counter, gpu, level)
        return
    for moment in _times(state, float(rng.uniform(0.3, 2))):
        length_s = float(rng.uniform(0.2, 8)) * HOUR_S
        a, b = state.step_at(moment), state.step_at(moment + length_s)
        state.sprinkle(counter, gpu, level * float(rng.uniform(1, 5)), a, b)


def _heat(state: NodeState, physics: Physics) -> None:
    """Trouble with the fans of a whole node: all its GPUs get hotter, and cool down again."""
    for moment in _times(state, physics.fan_troubles_per_node_day):
        hours = float(state.rng.uniform(1, 72))
        hump(state, moment, hours * HOUR_S, float(state.rng.uniform(4, 14)))


def hump(state: NodeState, moment: float, length_s: float, height_c: float) -> None:
    """Hotter inlet for a while, with soft edges."""
    a, b = state.step_at(moment), state.step_at(moment + length_s)
    if b > a:
        u = (state.times[a:b] - moment) / length_s
        state.inlet[a:b] += (height_c * np.clip(np.minimum(u, 1 - u) * 8, 0, 1)).astype(np.float32)


def _power_caps(state: NodeState, physics: Physics) -> None:
    for moment in _times(state, physics.power_caps_per_node_day):
        a = state.step_at(moment)
        b = state.step_at(moment + float(state.rng.uniform(0.5, 24)) * HOUR_S)
        state.cap[a:b] = float(state.rng.uniform(0.55, 0.9))


def _quiet(state: NodeState, a: int, b: int) -> None:
    state.use[:, a:b] = 0
    state.share[:, a:b] = 0
    state.memory[:, a:b] = 0.01


def _reloads(state: NodeState, physics: Physics) -> None:
    """The driver is loaded anew: energy and volatile counters begin at 0, links retrain with a burst of replays."""
    for moment in _times(state, physics.reloads_per_node_day):
        step = state.step_at(moment)
        if step >= state.steps:
            continue
        away = int(np.ceil(float(state.rng.uniform(30, 400)) / state.step_s))
        _quiet(state, step, step + away)
        state.silent[step : step + away] = True
        after = min(step + away, state.steps - 1)
        for gpu in range(state.gpus):
            state.resets.append((gpu, after, False))
            if state.rng.random() < 0.3:
                state.counts["gpu_pcie_replay_total"][gpu, after : after + 3] += state.rng.integers(1, 30)
            spans = state.pending.get(gpu, [])
            state.pending[gpu] = [(x, min(y, after)) if x < after else (x, y) for x, y in spans]
        state.note(
            float(state.times[after]),
            -1,
            "driver_reloaded",
            "reloaded",
            "info",
            "driver reloaded (simulated)",
        )


def _recable(state: NodeState, physics: Physics) -> None:
    """Somebody works on the cables: a burst of link errors, a link down and up."""
    for moment in _times(state, physics.recablings_per_node_day):
        a = state.step_at(moment)
        b = min(state.steps, a + int(np.ceil(float(state.rng.uniform(5, 60)) * MINUTE_S / state.step_s)))
        _quiet(state, a, b)
        state.note(moment, -1, "link_down", "interface", "warning", "ib0: link down (simulated)")
        state.note(
            float(state.times[min(b, state.steps - 1)]),
            -1,
            "link_up",
            "interface",
            "info",
            "ib0: link up (simulated)",
        )
        state.ports["symbol"][a:b] += state.rng.poisson(3.0, b - a).astype(np.float32)
        state.ports["downs"][min(a, state.steps - 1)] += 1
        if state.rng.random() < 0.4 and b > a:
            gpu = int(state.rng.integers(state.gpus))
            strength = course("bursts", b - a, state.rng) * 5
            state.counts["gpu_nvlink_crc_flit_errors_total"][gpu, a:b] += state.rng.poisson(strength)


def _slow_calls(state: NodeState, physics: Physics) -> None:
    """The driver is slow for a while, on one GPU or all: a profiler, a debugger, a busy host."""
    for moment in _times(state, physics.slow_calls_per_node_day):
        a = state.step_at(moment)
        b = min(state.steps, a + max(1, int(float(state.rng.uniform(1, 60)) * MINUTE_S / state.step_s)))
        alone = state.rng.random() < 0.3
        chosen = [int(state.rng.integers(state.gpus))] if alone else range(state.gpus)
        for gpu in chosen:
            factor = state.call.setdefault(gpu, np.ones(state.steps, np.float32))
            factor[a:b] *= np.exp(state.rng.uniform(0.3, 3.0, b - a)).astype(np.float32)


def _gaps(state: NodeState, physics: Physics) -> None:
    rng = state.rng
    state.silent |= rng.random(state.steps) < physics.missing_poll
    for gpu in range(state.gpus):  # one GPU's poll fails by itself
        state.lost[gpu] |= rng.random(state.steps) < physics.missing_poll * 0.1
    for moment in _times(state, physics.gaps_per_node_day):
        a = state.step_at(moment)
        b = state.step_at(moment + float(rng.lognormal(np.log(4 * MINUTE_S), 1.0)))
        state.silent[a:b] = True
        if b < state.steps:
            state.note(
                float(state.times[b]), -1, "agent_started", "0.1.0", "info", "agent started (simulated)"
            )
    for moment in _times(state, physics.maintenance_per_node_day):
        a, b = state.step_at(moment), state.step_at(moment + float(rng.uniform(1, 10)) * HOUR_S)
        _quiet(state, a, b)
        state.silent[a:b] = True
        if b < state.steps:
            state.reboots.append(b)
            state.resets.extend((gpu, b, False) for gpu in range(state.gpus))


def _clock(state: NodeState, physics: Physics) -> None:
    """The node's clock runs off and is set right; batches are sent twice."""
    for moment in _times(state, physics.clock_steps_per_node_day):
        a = state.step_at(moment)
        b = state.step_at(moment + float(state.rng.uniform(0.1, 6)) * HOUR_S)
        state.stamp_shift[a:b] += float(state.rng.choice([-1, 1])) * float(
            np.exp(state.rng.uniform(0, np.log(120)))
        )
    for moment in _times(state, physics.resends_per_node_day):
        a = state.step_at(moment)
        state.resent.append((a, min(state.steps, a + int(state.rng.integers(1, 6)))))


def application_xids(
    state: NodeState, physics: Physics, jobs: list[Job], moments: list[tuple[float, int, int]]
) -> None:
    """XIDs of the users' programs (moment, gpu, code); the peers of the same job often report the like."""
    for moment, gpu, code in moments:
        xid(state, moment, gpu, code)
        if state.rng.random() < 0.15 and any(j.start <= moment < j.end for j in jobs):
            for other in range(state.gpus):
                if other != gpu:
                    xid(state, moment + float(state.rng.uniform(0, 3)), other, 45)
