"""Failures put into a simulated node: their precursors, the events they end in, and the repair afterwards."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from forewarn.collectors.xids import xid_fact
from forewarn.models.simulator_mechanisms import DAY_S, HOUR_S, LEAST_SIGNS, Failure, course
from forewarn.models.simulator_physics import NodeState
from forewarn.models.simulator_profiles import Physics

MINUTE_S = 60.0


def xid(state: NodeState, time: float, gpu: int, code: int, count: int = 1) -> None:
    """Note an XID as the kernel collector would tell it."""
    fact = xid_fact(code)
    severity = fact.severity if fact else "error"
    meaning = fact.meaning if fact else "unknown"
    state.note(time, gpu, "xid", str(code), severity, f"Xid {code}: {meaning} (simulated)", count)


def inject(state: NodeState, failure: Failure, physics: Physics) -> None:
    """Put one failure into its node. `failure.start` becomes the time of the first reading or event that shows it,
    NaN when none does."""
    begin = state.step_at(failure.start) if failure.visible else state.steps
    end = state.step_at(failure.time)
    if failure.visible:
        first = (
            _PRECURSORS[failure.mechanism.cause](state, failure, begin, end, physics) if end > begin else None
        )
        failure.start = float("nan") if first is None else min(first, failure.time)
    if failure.visible and _unseen(state, failure.mechanism.cause, physics):
        failure.start = float("nan")
    if failure.structural:
        _falter(state, failure, end)
    _END[failure.mechanism.cause](state, failure, end)
    _repair(state, failure, end)


_SHOWN_BY = {
    "sram_uncorrectable": ("gpu_ecc_sram_corrected_total", "gpu_ecc_volatile_corrected_total"),
    "gsp_timeout": ("gpu_nvml_call_seconds",),
}
"""Metrics of which one must be collected for a precursor to be seen at all, where fleets differ in that."""


def _unseen(state: NodeState, cause: str, physics: Physics) -> bool:
    absent = state.board.missing | physics.unsupported
    return cause in _SHOWN_BY and all(m in absent for m in _SHOWN_BY[cause])


# Precursors: each returns the time of the first sign, None without one ------------------------------------------------


def _total(state: NodeState, median: float, physics: Physics) -> float:
    return max(LEAST_SIGNS, float(state.rng.lognormal(np.log(median), 1.1)) * physics.precursor_size)


def _grow(
    state: NodeState, failure: Failure, target: NDArray[np.float32], begin: int, end: int, total: float
) -> int | None:
    """Spread about `total` errors over steps begin..end of `target` (steps); the first step that has one."""
    strength = course(failure.growth, end - begin, state.rng)
    errors = state.rng.poisson(strength * total / (end - begin))
    if not errors.any():
        errors[-1] = 1
    target[begin:end] += errors
    return begin + int(np.argmax(errors > 0))


def _time(state: NodeState, step: int | None) -> float | None:
    return None if step is None else float(state.times[step])


def _first(*steps: int | None) -> int | None:
    known = [s for s in steps if s is not None]
    return min(known) if known else None


def _hbm(state: NodeState, failure: Failure, begin: int, end: int, physics: Physics) -> float | None:
    rng, gpu = state.rng, failure.gpu
    first = _grow(
        state,
        failure,
        state.counts["gpu_ecc_dram_corrected_total"][gpu],
        begin,
        end,
        _total(state, 60, physics),
    )
    rows = int(rng.poisson(1.2))
    for _ in range(rows):
        step = int(begin + (end - begin) * rng.beta(2.5, 1.2))
        if step >= end or step < (first or 0):
            continue
        word = "corrected" if rng.random() < 0.6 else "uncorrected"
        state.counts[f"gpu_row_remap_{word}_total"][gpu, step] += 1
        state.pending.setdefault(gpu, []).append((step, end))
        if state.board.banks:
            xid(state, float(state.times[step]) - state.step_s * float(rng.random()), gpu, 63)
    errors = state.counts["gpu_ecc_dram_corrected_total"][gpu, begin:end]
    storms = np.flatnonzero(errors > max(20.0, 3.0 * state.step_s / MINUTE_S))
    for step in storms[: int(rng.integers(0, 4))]:
        xid(state, float(state.times[begin + step]), gpu, 92)
    return _time(state, first)


def _sram(state: NodeState, failure: Failure, begin: int, end: int, physics: Physics) -> float | None:
    counter = state.counts["gpu_ecc_sram_corrected_total"][failure.gpu]
    first = _grow(state, failure, counter, begin, end, _total(state, 25, physics))
    if state.rng.random() < 0.25:
        since = begin if first is None else first
        state.threshold[failure.gpu] = since + int((end - since) * state.rng.uniform(0.5, 1.0))
    return _time(state, first)


def _off_bus(state: NodeState, failure: Failure, begin: int, end: int, physics: Physics) -> float | None:
    rng, gpu = state.rng, failure.gpu
    total = _total(state, 80, physics)
    first = _grow(state, failure, state.counts["gpu_pcie_replay_total"][gpu], begin, end, total)
    since = begin if first is None else first  # replays before are not of this failure
    replays = state.counts["gpu_pcie_replay_total"][gpu, since:end]
    state.counts["gpu_pcie_correctable_errors_total"][gpu, since:end] += np.round(
        replays * rng.uniform(0.3, 1.5)
    )
    if rng.random() < 0.25:
        step = since + int((end - since) * rng.uniform(0.3, 1.0))
        lanes = np.full(state.steps, 16, np.float32)
        lanes[step:end] = float(rng.choice([8, 4]))
        state.width[gpu] = np.minimum(state.width.get(gpu, lanes), lanes)
    if rng.random() < 0.5 and first is not None:
        when = np.sort(
            failure.time - (failure.time - state.times[first]) * rng.beta(1, 2, int(rng.integers(1, 8)))
        )
        for moment in when:
            state.note(float(moment), gpu, "aer", "corrected", "warning", "PCIe corrected error (simulated)")
    return _time(state, first)


def _nvlink(state: NodeState, failure: Failure, begin: int, end: int, physics: Physics) -> float | None:
    rng, gpu = state.rng, failure.gpu
    total = _total(state, 70, physics)
    first = _grow(state, failure, state.counts["gpu_nvlink_crc_flit_errors_total"][gpu], begin, end, total)
    if rng.random() < 0.6:
        other = state.counts["gpu_nvlink_replay_errors_total"][gpu]
        first = _first(first, _grow(state, failure, other, begin, end, total * float(rng.uniform(0.2, 1.0))))
    if rng.random() < 0.5:
        other = state.counts["gpu_nvlink_recovery_errors_total"][gpu]
        late = begin + (end - begin) // 2
        if end > late:
            first = _first(first, _grow(state, failure, other, late, end, total * 0.05 + 1))
    if rng.random() < 0.3:
        other = state.counts["gpu_nvlink_crc_data_errors_total"][gpu]
        first = _first(first, _grow(state, failure, other, begin, end, total * 0.3))
    return _time(state, first)


def _gsp(state: NodeState, failure: Failure, begin: int, end: int, physics: Physics) -> float | None:
    factor = state.call.setdefault(failure.gpu, np.ones(state.steps, np.float32))
    factor[begin:end] *= np.exp(state.rng.uniform(1.5, 5, end - begin))
    return float(state.times[begin])


def _thermal(state: NodeState, failure: Failure, begin: int, end: int, physics: Physics) -> float | None:
    """Resistance grows: +0.3 to 1 C a day at full power."""
    a_day = float(state.rng.uniform(0.3, 1.0)) * physics.precursor_size**0.5
    led_s = failure.time - failure.start
    # A precursor that began before the history has already come some way.
    before_s = max(0.0, float(state.rng.uniform(7, 21)) * DAY_S - led_s) if begin == 0 else 0.0
    days = (state.times[begin:end] - state.times[begin] + before_s) / DAY_S
    extra = state.heat.setdefault(failure.gpu, np.zeros(state.steps, np.float32))
    extra[begin:end] += (a_day * days * np.where(days > 5, 1 + (days - 5) * 0.08, 1)).astype(np.float32)
    return float(state.times[begin])


def _power(state: NodeState, failure: Failure, begin: int, end: int, physics: Physics) -> float | None:
    rng = state.rng
    strength = (
        course(failure.growth, end - begin, rng) * float(rng.uniform(0.05, 0.3)) * physics.precursor_size
    )
    on = rng.random(end - begin) < np.clip(strength * 2, 0.02, 0.9)
    on[-1] = True
    brake = state.brake.setdefault(failure.gpu, np.zeros(state.steps, np.float32))
    brake[begin:end] += (on * rng.uniform(0.05, 0.8, end - begin)).astype(np.float32)
    return float(state.times[begin + int(np.argmax(on))])


def _fabric(state: NodeState, failure: Failure, begin: int, end: int, physics: Physics) -> float | None:
    rng = state.rng
    total = _total(state, 60, physics)
    first = _grow(state, failure, state.ports["symbol"], begin, end, total)
    first = _first(first, _grow(state, failure, state.ports["receive"], begin, end, total * 0.3))
    if rng.random() < 0.5:
        first = _first(first, _grow(state, failure, state.ports["integrity"], begin, end, total * 0.05 + 1))
    flaps = int(rng.integers(0, 6))
    seen = _time(state, first)
    if seen is not None:
        for u in np.sort(rng.beta(2, 1, flaps)):
            moment = seen + (failure.time - seen) * float(u)
            state.note(moment, -1, "link_down", "interface", "warning", "ib0: link down (simulated)")
            state.ports["downs"][min(state.step_at(moment), state.steps - 1)] += 1
    return seen


def _host(state: NodeState, failure: Failure, begin: int, end: int, physics: Physics) -> float | None:
    rng = state.rng
    first = _grow(state, failure, state.edac, begin, end, _total(state, 40, physics))
    seen = _time(state, first)
    if seen is not None:
        for u in np.sort(rng.beta(2, 1, int(rng.integers(1, 8)))):
            moment = seen + (failure.time - seen) * float(u)
            if rng.random() < 0.6:
                state.note(moment, -1, "mce", "corrected", "warning", "machine check, corrected (simulated)")
            else:
                state.note(moment, -1, "nvme", "timeout", "warning", "nvme0: timeout (simulated)")
    return seen


def _never(state: NodeState, failure: Failure, begin: int, end: int, physics: Physics) -> float | None:
    return None


_PRECURSORS = {
    "hbm_uncorrectable": _hbm,
    "sram_uncorrectable": _sram,
    "gpu_off_bus": _off_bus,
    "nvlink": _nvlink,
    "gsp_timeout": _gsp,
    "thermal_interface": _thermal,
    "power_delivery": _power,
    "pmu_spi": _never,
    "silent_corruption": _never,
    "nic_or_fabric": _fabric,
    "host_other": _host,
}


def _falter(state: NodeState, failure: Failure, end: int) -> None:
    """Telemetry that falters before an off-bus: metrics vanish, polls fail, calls are slow."""
    rng, gpu = state.rng, failure.gpu
    begin = state.step_at(failure.time - float(rng.gamma(1.5, 1.0)) * HOUR_S)
    if end <= begin:
        failure.structural = False
        return
    failure.structural_start = float(state.times[begin])
    if rng.random() < 0.6:
        factor = state.call.setdefault(gpu, np.ones(state.steps, np.float32))
        factor[begin:end] *= np.exp(rng.uniform(0.5, 3.5, end - begin)).astype(np.float32)
    if rng.random() < 0.6:
        state.lost[gpu, begin:end] |= rng.random(end - begin) < float(rng.uniform(0.05, 0.5))
    if rng.random() < 0.5:
        step = begin + int((end - begin) * rng.uniform(0, 0.9))
        state.blanks.append((gpu, step, end))


# What the failure looks like ------------------------------------------------------------------------------------------


def _now(failure: Failure, after_s: float = 0.0) -> float:
    return failure.time + after_s


def _end_hbm(state: NodeState, failure: Failure, end: int) -> None:
    rng, gpu = state.rng, failure.gpu
    if end < state.steps:
        state.counts["gpu_ecc_dram_uncorrected_total"][gpu, end] += 1
    contained = rng.random() < 0.65
    if rng.random() < 0.5 or not contained:
        xid(state, _now(failure), gpu, 48)
    xid(state, _now(failure, 0.2), gpu, 94 if contained else 95)
    if state.board.banks:
        if rng.random() < 0.15:
            state.remap_failed[gpu] = end
            xid(state, _now(failure, 0.9), gpu, 64)
        else:
            if end < state.steps:
                state.counts["gpu_row_remap_uncorrected_total"][gpu, end] += 1
            xid(state, _now(failure, 0.9), gpu, 63)
            state.pending.setdefault(gpu, []).append((end, state.step_at(failure.repaired)))
    _ask(state, failure, end, 1)


def _end_sram(state: NodeState, failure: Failure, end: int) -> None:
    gpu = failure.gpu
    if end < state.steps:
        state.counts["gpu_ecc_sram_uncorrected_total"][gpu, end] += 1
    xid(state, _now(failure), gpu, 48)
    xid(state, _now(failure, 0.1), gpu, int(state.rng.choice([94, 95])))
    if state.rng.random() < 0.3:
        xid(state, _now(failure, 0.3), gpu, 172)
    _ask(state, failure, end, 1)


def _gone(state: NodeState, failure: Failure, end: int) -> None:
    """The GPU answers no more: its rows stop."""
    back = state.step_at(failure.repaired)
    state.lost[failure.gpu, end:back] = True
    state.note(
        _now(failure, 1.5), failure.gpu, "gpu_lost", "lost", "critical", "NVML: GPU is lost (simulated)"
    )


def _end_off_bus(state: NodeState, failure: Failure, end: int) -> None:
    if state.rng.random() < 0.85:
        xid(state, _now(failure), failure.gpu, 79)
    _gone(state, failure, end)
    if state.rng.random() < 0.6:
        xid(state, _now(failure, 2.0), failure.gpu, 154)


def _end_nvlink(state: NodeState, failure: Failure, end: int) -> None:
    rng, gpu = state.rng, failure.gpu
    code = 74 if state.board.nvlink_generation < 5 else int(rng.choice([145, 149]))
    xid(state, _now(failure), gpu, code)
    if rng.random() < 0.3 and state.gpus > 1:
        xid(
            state,
            _now(failure, float(rng.uniform(0, 2))),
            int((gpu + 1 + rng.integers(state.gpus - 1)) % state.gpus),
            code,
        )
    gone = state.links.setdefault(gpu, np.zeros(state.steps, np.float32))
    gone[end : state.step_at(failure.repaired)] += 1
    _ask(state, failure, end, 1)


def _end_gsp(state: NodeState, failure: Failure, end: int) -> None:
    xid(state, _now(failure), failure.gpu, int(state.rng.choice([119, 120], p=[0.85, 0.15])))
    xid(state, _now(failure, 0.5), failure.gpu, 154)
    state.lost[failure.gpu, end : state.step_at(failure.repaired)] |= state.rng.random() < 0.7
    _ask(state, failure, end, 1)


def _end_thermal(state: NodeState, failure: Failure, end: int) -> None:
    """Often nothing tells it in the log: the operator takes the hot board out."""
    luck = state.rng.random()
    if luck < 0.2:
        xid(state, _now(failure), failure.gpu, 62)
    elif luck < 0.4:
        xid(state, _now(failure), failure.gpu, 79)
        _gone(state, failure, end)


def _end_power(state: NodeState, failure: Failure, end: int) -> None:
    if state.rng.random() < 0.7:
        xid(state, _now(failure), failure.gpu, 79)
        _gone(state, failure, end)
    else:
        xid(state, _now(failure), failure.gpu, 54)


def _end_pmu(state: NodeState, failure: Failure, end: int) -> None:
    xid(state, _now(failure), failure.gpu, 122)
    if state.rng.random() < 0.85:
        xid(state, _now(failure, 0.05), failure.gpu, 31)


def _end_silent(state: NodeState, failure: Failure, end: int) -> None:
    """Wrong results: nothing here shows it."""


def _end_fabric(state: NodeState, failure: Failure, end: int) -> None:
    state.note(_now(failure), -1, "link_down", "interface", "error", "ib0: link down (simulated)")
    state.note(_now(failure, 0.3), -1, "mlx5", "link_down", "error", "mlx5_0: port 1 down (simulated)")
    if end < state.steps:
        state.ports["downs"][end] += 1
    state.port_down[end : state.step_at(failure.repaired)] = True
    if failure.repaired < state.times[-1]:
        state.note(failure.repaired, -1, "link_up", "interface", "info", "ib0: link up (simulated)")


def _end_host(state: NodeState, failure: Failure, end: int) -> None:
    if state.rng.random() < 0.4:
        state.note(
            _now(failure), -1, "mce", "uncorrected", "critical", "machine check, uncorrected (simulated)"
        )
    back = state.step_at(failure.repaired)
    state.silent[end:back] = True
    if back < state.steps:
        state.reboots.append(back)
        state.resets.extend((gpu, back, False) for gpu in range(state.gpus))


_END = {
    "hbm_uncorrectable": _end_hbm,
    "sram_uncorrectable": _end_sram,
    "gpu_off_bus": _end_off_bus,
    "nvlink": _end_nvlink,
    "gsp_timeout": _end_gsp,
    "thermal_interface": _end_thermal,
    "power_delivery": _end_power,
    "pmu_spi": _end_pmu,
    "silent_corruption": _end_silent,
    "nic_or_fabric": _end_fabric,
    "host_other": _end_host,
}


def _ask(state: NodeState, failure: Failure, end: int, action: int) -> None:
    back = state.step_at(failure.repaired)
    state.action.setdefault(failure.gpu, []).append((end, back, action))


def _repair(state: NodeState, failure: Failure, end: int) -> None:
    """The node has no job until it is repaired; a new board starts its counters at 0, a reset the volatile ones."""
    back = state.step_at(failure.repaired)
    state.use[:, end:back] = 0
    state.share[:, end:back] = 0
    state.memory[:, end:back] = 0.01
    if failure.gpu < 0 or back >= state.steps:
        return
    state.resets.append((failure.gpu, back, failure.replaced))
    if failure.gpu in state.remap_failed and not failure.replaced:
        failure.replaced = True  # a board out of spare rows does not go back
        state.resets[-1] = (failure.gpu, back, True)
    if failure.replaced:
        away = max(end, state.step_at(failure.repaired - float(state.rng.uniform(20, 90)) * MINUTE_S))
        state.silent[away:back] = True
        state.reboots.append(back)
        state.resets.extend((gpu, back, False) for gpu in range(state.gpus) if gpu != failure.gpu)
    state.note(
        failure.repaired, failure.gpu, "gpu_returned", "returned", "info", "the GPU is back (simulated)"
    )
