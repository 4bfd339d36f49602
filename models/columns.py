"""The feature columns of each kind of device, made from one view of the state. Each has a name, a direction for
LightGBM's monotone constraints (+1 more is worse, -1 less is worse, 0 free) and its values.

Nothing here is fixed for a device: no serial, no host name, no level that only tells devices apart. What can be is
set against the device's own longer past and against its peers, so that it means the same in another fleet.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from forewarn.models import peers
from forewarn.models.buckets import ACTIVE, DEVIATION, KNOWN, MEAN, SLOPE, SUM
from forewarn.models.peers import Groups
from forewarn.models.signals import COUNTER, HOUR_S, Scheme

Doubles = NDArray[np.float64]
Singles = NDArray[np.float32]

LONGEST_H = 30 * 24.0
"""Times since something are capped here: never, or longer ago than anybody keeps."""
POWER_FLOOR_W2 = 2500.0
"""Squared watts that steady the slope of temperature over power."""
LOAD_FLOOR = 0.05
"""Squared utilisation that steadies the slope of clocks over utilisation."""
BUSY = 0.3
"""Utilisation above which clocks are compared."""


@dataclass
class View:
    """What the columns are made from; n devices. Arrays are (n), (n x signals), (n x metrics) or windows."""

    now: float
    scheme: Scheme
    windows: Singles
    last_value: Doubles
    last_time: Doubles
    interval: Singles
    total: Doubles
    first: Doubles
    recent: Doubles
    most: Singles
    seen: Doubles
    nodes: Groups
    models: Groups
    installed: Doubles
    failures: Doubles
    last_failure: Doubles
    slot_failures: Doubles
    node_failures: Doubles

    def window(self, signal: str, window: str, what: int) -> Singles:
        """One statistic of one signal over one window."""
        values: Singles = self.windows[:, self.scheme.signal(signal), self.scheme.window(window), what]
        return values

    def level(self, metric: str) -> Singles:
        """Last value of a metric."""
        return self.last_value[:, self.scheme.metrics.index(metric)].astype(np.float32)

    def hours_since(self, stamps: Doubles) -> Singles:
        """log1p of hours since, capped; never counts as the cap."""
        hours = np.clip((self.now - stamps) / HOUR_S, 0, LONGEST_H)
        return np.log1p(np.where(np.isnan(hours), LONGEST_H, hours)).astype(np.float32)


@dataclass
class Columns:
    """Columns as they are collected."""

    names: list[str] = field(default_factory=list)
    directions: list[int] = field(default_factory=list)
    values: list[Singles] = field(default_factory=list)

    def add(self, name: str, direction: int, values: NDArray[np.floating]) -> None:
        self.names.append(name)
        self.directions.append(direction)
        self.values.append(values.astype(np.float32))


def log1p(values: NDArray[np.floating]) -> Singles:
    """log(1 + x) of what is 0 or more, float32."""
    logs: Singles = np.log1p(np.maximum(values, 0)).astype(np.float32)
    return logs


def _ratio(a: Singles, b: Singles) -> Singles:
    """log(a / b), NaN where either is not above 0."""
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = np.log(a / b)
    return np.where((a > 0) & (b > 0), ratio, np.nan).astype(np.float32)


def surprise(count: Singles, expected: Singles) -> Singles:
    """How far a count lies above what was expected, in deviations of a Poisson count (by Anscombe's transform)."""
    far: Singles = (2 * (np.sqrt(count + 0.375) - np.sqrt(expected + 0.375))).astype(np.float32)
    return far


@dataclass(frozen=True)
class _Count:
    """Increase and known buckets of one or several counters over each window."""

    increase: dict[str, Singles]
    known: dict[str, Singles]


def _count(v: View, signals: Sequence[str]) -> _Count:
    """Counters together: increases added, the best known one says how much of a window is known."""
    increase, known = {}, {}
    for w in v.scheme.windows:
        if len(signals) == 1:
            increase[w.name] = v.window(signals[0], w.name, SUM)
            known[w.name] = v.window(signals[0], w.name, KNOWN)
            continue
        parts = np.stack([v.window(s, w.name, SUM) for s in signals])
        seen = np.stack([v.window(s, w.name, KNOWN) for s in signals])
        none = np.isnan(parts).all(axis=0)
        increase[w.name] = np.where(none, np.nan, np.nansum(parts, axis=0)).astype(np.float32)
        known[w.name] = np.where(none, np.nan, np.nan_to_num(seen).max(axis=0, initial=0)).astype(np.float32)
    return _Count(increase, known)


def _past(v: View, count: _Count, short: str, long: str) -> Singles:
    """What the long window less the short one makes one expect of the short one; NaN with less past than present."""
    windows = v.scheme.windows
    a, b = windows[v.scheme.window(short)], windows[v.scheme.window(long)]
    width_a, width_b = v.scheme.levels[a.level].width_s, v.scheme.levels[b.level].width_s
    # The bucket under way is covered so far; of a window that began within a bucket, half of that one is taken.
    present_s = (a.buckets - 1) * width_a + v.now % width_a
    known = count.known[long]
    covered_s = (known - 1) * width_b + v.now % width_b - np.where(known < b.buckets, width_b / 2, 0)
    past_s = covered_s - present_s
    rate = (count.increase[long] - np.nan_to_num(count.increase[short])) / past_s
    return np.where(past_s >= present_s, np.maximum(rate, 0) * present_s, np.nan).astype(np.float32)


def _increases(c: Columns, v: View, name: str, count: _Count) -> None:
    """Increase over every window; against the device's own past; against its node."""
    names = [w.name for w in v.scheme.windows]
    for w in names:
        c.add(f"{name}.increase_{w}", 1, log1p(count.increase[w]))
    for short, long in zip(names[:-1], names[2:] + names[-1:], strict=True):
        c.add(f"{name}.surprise_{short}", 1, surprise(count.increase[short], _past(v, count, short, long)))
    for w in (names[1], names[-2]):
        middle = peers.median(v.nodes, count.increase[w])
        c.add(f"{name}.node_surprise_{w}", 1, surprise(count.increase[w], middle))


def _counter(c: Columns, v: View, signal: str) -> None:
    """One counter: increases, how spread out they are, and since when."""
    _increases(c, v, signal, _count(v, [signal]))
    for w in v.scheme.windows[-2:]:
        c.add(f"{signal}.active_{w.name}", 1, v.window(signal, w.name, ACTIVE) / w.buckets)
    c.add(f"{signal}.since_last", -1, v.hours_since(v.recent[:, v.scheme.signal(signal)]))


def _events(c: Columns, v: View, signal: str, direction: int = 1) -> None:
    """Counts over the windows and the time since the last."""
    for w in v.scheme.windows[1:]:
        c.add(f"{signal}.count_{w.name}", direction, log1p(np.nan_to_num(v.window(signal, w.name, SUM))))
    c.add(f"{signal}.since_last", -direction, v.hours_since(v.recent[:, v.scheme.signal(signal)]))


def _rhythm(c: Columns, v: View) -> None:
    """Health of the telemetry: silence, missed polls, metrics that no longer come."""
    usual = np.nanmin(np.where(np.isnan(v.interval), np.inf, v.interval), axis=1, initial=np.inf)
    usual = np.where(np.isinf(usual), np.nan, usual)
    silence = log1p((v.now - v.seen) / usual)
    c.add("telemetry.silence", 1, silence)
    c.add("telemetry.silence_node_excess", 1, peers.difference(v.nodes, silence))
    with np.errstate(invalid="ignore"):
        known = np.isfinite(v.last_time)
        stale = known & ((v.now - v.last_time) > np.maximum(4 * v.interval, 120.0))
    had = known.sum(axis=1)
    share = np.where(had > 0, stale.sum(axis=1) / np.maximum(had, 1), np.nan)
    c.add("telemetry.stale_share", 1, share)
    for w in v.scheme.windows[1:]:
        c.add(f"telemetry.missed_polls_{w.name}", 1, log1p(v.window("missed_polls", w.name, SUM)))
    long = v.scheme.windows[-2].name
    missed = log1p(v.window("missed_polls", long, SUM))
    c.add(f"telemetry.missed_polls_node_excess_{long}", 1, peers.difference(v.nodes, missed))


def _history(c: Columns, v: View) -> None:
    """Age and failures before."""
    c.add("history.age_days", 0, np.log1p(np.maximum(v.now - v.installed, 0) / 86_400))
    c.add("history.failures", 1, log1p(v.failures))
    c.add("history.since_failure", 0, v.hours_since(v.last_failure))
    c.add("history.slot_failures", 1, log1p(v.slot_failures))
    c.add("history.node_failures", 1, log1p(v.node_failures))


def _gpu(c: Columns, v: View) -> None:
    for signal in (s.name for s in v.scheme.signals if s.type == COUNTER and s.metrics):
        _counter(c, v, signal)
    for signal in (s.name for s in v.scheme.signals if not s.metrics and s.name != "missed_polls"):
        _events(c, v, signal)
    # Kinds of trouble whatever counter a fleet reports them by. The volatile counter repeats the lasting ones.
    lasting, volatile = (
        _count(v, ["ecc_dram_corrected", "ecc_sram_corrected"]),
        _count(v, ["ecc_volatile_corrected"]),
    )
    corrected = _Count(
        {w: np.fmax(lasting.increase[w], volatile.increase[w]) for w in lasting.increase},
        {w: np.fmax(lasting.known[w], volatile.known[w]) for w in lasting.known},
    )
    _increases(c, v, "ecc_corrected", corrected)
    _increases(c, v, "pcie", _count(v, ["pcie_replays", "pcie_errors", "aer"]))
    _increases(c, v, "nvlink", _count(v, ["nvlink_crc_errors", "nvlink_replays", "nvlink_recoveries"]))
    _gpu_levels(c, v)
    _gpu_thermal(c, v)
    _gpu_load(c, v)
    _gpu_told(c, v)
    _rhythm(c, v)
    _history(c, v)


def _gpu_told(c: Columns, v: View) -> None:
    """What the agent tells of its own polls of a GPU: GPUs that are about to be lost answer late and in part."""
    gap = v.level("gpu_poll_gap_seconds")
    c.add("telemetry.poll_gap_ratio", 1, _ratio(gap, peers.median(v.nodes, gap)))
    c.add("telemetry.metrics_missing", 1, log1p(v.level("gpu_metrics_missing")))


def _gpu_levels(c: Columns, v: View) -> None:
    """What the card itself keeps count of."""
    remapped = v.level("gpu_row_remap_corrected_total"), v.level("gpu_row_remap_uncorrected_total")
    c.add("row_remaps.level", 1, log1p(np.fmax(remapped[0] + remapped[1], np.fmax(*remapped))))
    c.add("row_remaps.uncorrected_level", 1, log1p(remapped[1]))
    retired = v.level("gpu_retired_pages_sbe_total"), v.level("gpu_retired_pages_dbe_total")
    c.add("retired_pages.level", 1, log1p(np.fmax(retired[0] + retired[1], np.fmax(*retired))))
    sram, dram = v.level("gpu_ecc_sram_uncorrected_total"), v.level("gpu_ecc_dram_uncorrected_total")
    c.add("ecc_uncorrected.level", 1, log1p(np.fmax(sram + dram, np.fmax(sram, dram))))
    for metric in (
        "gpu_row_remap_pending",
        "gpu_row_remap_failure",
        "gpu_retired_pages_pending",
        "gpu_ecc_sram_threshold_exceeded",
        "gpu_recovery_action",
    ):
        c.add(f"{metric.removeprefix('gpu_')}.level", 1, v.level(metric))
    for spare in ("partial", "low", "none"):
        c.add(f"row_remap_banks_{spare}.level", 1, log1p(v.level(f"gpu_row_remap_banks_{spare}")))
    widest = np.fmax(v.level("gpu_pcie_link_width_max"), v.most[:, v.scheme.signal("pcie_width")])
    c.add("pcie_width.lost", 1, 1 - v.level("gpu_pcie_link_width") / widest)
    links = np.fmax(v.level("gpu_nvlink_links_total"), v.most[:, v.scheme.signal("nvlink_active")])
    c.add("nvlink_active.lost", 1, links - v.level("gpu_nvlink_links_active"))


def _gpu_thermal(c: Columns, v: View) -> None:
    """Temperature against the device's past and, at equal power, against its node."""
    for signal in ("temperature", "memory_temperature"):
        mean = {w.name: v.window(signal, w.name, MEAN) for w in v.scheme.windows}
        c.add(f"{signal}.change_15m_24h", 1, mean["15m"] - mean["24h"])
        c.add(f"{signal}.change_24h_7d", 1, mean["24h"] - mean["7d"])
        c.add(f"{signal}.slope_1h", 1, v.window(signal, "1h", SLOPE))
        c.add(f"{signal}.slope_24h", 1, v.window(signal, "24h", SLOPE))
        c.add(f"{signal}.deviation_1h", 0, v.window(signal, "1h", DEVIATION))
        power = {w.name: v.window("power", w.name, MEAN) for w in v.scheme.windows}
        excess = {w: peers.excess(v.nodes, v.models, mean[w], power[w], POWER_FLOOR_W2) for w in mean}
        for w in ("15m", "1h", "6h", "24h"):
            c.add(f"{signal}.node_excess_{w}", 1, excess[w])
        for short, long in (("15m", "6h"), ("15m", "24h"), ("1h", "24h"), ("1h", "7d"), ("24h", "7d")):
            c.add(f"{signal}.excess_drift_{short}_{long}", 1, excess[short] - excess[long])
        for w in ("15m", "1h"):
            c.add(f"{signal}.excess_z_{w}", 1, peers.robust_z(v.models, excess[w], 1.0))
        for short, long in (("15m", "24h"), ("1h", "7d")):
            own = peers.unexplained(
                v.models, mean[short] - mean[long], power[short] - power[long], POWER_FLOOR_W2
            )
            c.add(f"{signal}.own_excess_{short}_{long}", 1, own)
    core, memory = v.window("temperature", "1h", MEAN), v.window("memory_temperature", "1h", MEAN)
    gap = memory - core
    c.add("memory_temperature.over_core_node_excess", 1, peers.difference(v.nodes, gap))
    margin = v.level("gpu_temperature_margin_celsius")
    slowdown = v.level("gpu_temperature_slowdown_celsius") - v.level("gpu_temperature_celsius")
    c.add("temperature.margin", -1, np.fmin(margin, np.fmin(slowdown, np.float32(60))))
    for w in ("15m", "1h", "24h"):
        c.add(f"hw_slowdown.share_{w}", 1, v.window("hw_slowdown", w, MEAN))
        c.add(f"sw_thermal.share_{w}", 1, v.window("sw_thermal", w, MEAN))
    c.add("fan_speed.node_excess_1h", 1, peers.difference(v.nodes, v.window("fan_speed", "1h", MEAN)))


def _gpu_load(c: Columns, v: View) -> None:
    """Clocks, power and use against peers and past; time of driver calls."""
    for w in ("15m", "1h", "24h"):
        use = v.window("utilization", w, MEAN)
        clock = v.window("sm_clock", w, MEAN)
        busy = np.where(use > BUSY, clock, np.nan).astype(np.float32)
        c.add(f"sm_clock.node_ratio_{w}", -1, _ratio(busy, peers.median(v.nodes, busy)))
        c.add(f"utilization.node_excess_{w}", 0, peers.difference(v.nodes, use))
        power = v.window("power", w, MEAN)
        c.add(
            f"power.node_excess_ratio_{w}",
            0,
            peers.excess(v.nodes, v.models, power, use, LOAD_FLOOR)
            / np.maximum(peers.median(v.nodes, power), 1),
        )
        calls = v.window("nvml_call", w, MEAN)
        c.add(f"nvml_call.node_ratio_{w}", 1, _ratio(calls, peers.median(v.nodes, calls)))
    for signal in ("sm_clock", "power", "nvml_call", "memory_clock"):
        direction = {"nvml_call": 1, "sm_clock": -1}.get(signal, 0)
        recent, past = v.window(signal, "15m", MEAN), v.window(signal, "24h", MEAN)
        c.add(f"{signal}.change_ratio_15m_24h", direction, _ratio(recent, past))
        c.add(
            f"{signal}.deviation_ratio_1h",
            0,
            v.window(signal, "1h", DEVIATION) / np.maximum(v.window(signal, "1h", MEAN), 1e-9),
        )
    c.add(
        "utilization.change_15m_24h",
        0,
        v.window("utilization", "15m", MEAN) - v.window("utilization", "24h", MEAN),
    )
    limit, default = v.level("gpu_power_limit_watts"), v.level("gpu_power_limit_default_watts")
    c.add("power.limit_ratio", 0, limit / default)


def _disk(c: Columns, v: View) -> None:
    for signal in v.scheme.signals:
        column = v.scheme.signal(signal.name)
        if signal.type == COUNTER and signal.metrics:
            _disk_counter(c, v, signal.name, signal.metrics, column)
        elif signal.type == COUNTER and signal.name != "missed_polls":
            _events(c, v, signal.name)
    for name in ("pending", "offline_uncorrectable"):
        level = v.level(f"disk_{name}" + ("_sectors" if name == "pending" else ""))
        c.add(f"{name}.level", 1, log1p(level))
        c.add(f"{name}.most", 1, log1p(v.most[:, v.scheme.signal(name)]))
        for w in ("7d", "30d", "90d"):
            c.add(f"{name}.change_{w}", 1, log1p(level) - log1p(v.window(name, w, MEAN)))
        c.add(f"{name}.model_excess", 1, peers.difference(v.models, log1p(level)))
    temperature = {w.name: v.window("temperature", w.name, MEAN) for w in v.scheme.windows}
    for w in ("1d", "7d", "30d"):
        c.add(f"temperature.model_excess_{w}", 0, peers.difference(v.models, temperature[w]))
    c.add("temperature.change_1d_30d", 0, temperature["1d"] - temperature["30d"])
    c.add("temperature.deviation_7d", 0, v.window("temperature", "7d", DEVIATION))
    rate = v.level("disk_read_error_rate_normalized")
    c.add("read_error_rate.level", -1, rate)
    c.add("read_error_rate.model_excess", -1, peers.difference(v.models, rate))
    c.add("read_error_rate.change_30d", -1, rate - v.window("read_error_rate", "30d", MEAN))
    c.add("read_error_rate.deviation_7d", 0, v.window("read_error_rate", "7d", DEVIATION))
    raw = v.level("disk_read_error_rate_raw")
    c.add("read_error_rate_raw.level", 0, log1p(raw))
    c.add("read_error_rate_raw.model_excess", 0, peers.difference(v.models, log1p(raw)))
    hours = v.level("disk_power_on_hours")
    c.add("power_on_hours.level", 0, log1p(hours))
    c.add("power_on_hours.model_excess", 0, peers.difference(v.models, log1p(hours)))
    c.add("capacity.level", 0, log1p(v.level("disk_capacity_bytes") / 1e12))
    c.add("smart_passed.level", -1, v.level("disk_smart_passed"))
    used = np.fmax(v.level("disk_endurance_used_ratio"), v.level("disk_nvme_percentage_used_ratio"))
    c.add("endurance_used.level", 1, used)
    c.add("spare.level", -1, v.level("disk_nvme_available_spare_ratio"))
    c.add("spare.change_30d", -1, v.level("disk_nvme_available_spare_ratio") - v.window("spare", "30d", MEAN))
    _disk_model(c, v)
    _rhythm(c, v)
    _history(c, v)


def _disk_counter(c: Columns, v: View, signal: str, metrics: tuple[str, ...], column: int) -> None:
    """Level, increase over the windows, since when, and against drives of the same model."""
    direction = 0 if signal in ("power_cycles", "unsafe_shutdowns") else 1
    level = v.level(metrics[0])
    for metric in metrics[1:]:
        level = np.fmax(level, v.level(metric))
    c.add(f"{signal}.level", direction, log1p(level))
    for w in v.scheme.windows:
        c.add(f"{signal}.increase_{w.name}", direction, log1p(v.window(signal, w.name, SUM)))
    c.add(f"{signal}.active_90d", direction, v.window(signal, "90d", ACTIVE))
    c.add(f"{signal}.since_last", -direction, v.hours_since(v.recent[:, column]))
    c.add(f"{signal}.since_first", 0, v.hours_since(v.first[:, column]))
    c.add(f"{signal}.model_excess", direction, peers.difference(v.models, log1p(level)))
    if signal == "command_timeouts":
        # Some vendors pack three counts into one number; the low 16 bits are the plain count.
        low = np.where(np.isnan(level), np.nan, np.mod(level, 65536))
        c.add(f"{signal}.low_word", 0, log1p(low.astype(np.float32)))


def _disk_model(c: Columns, v: View) -> None:
    """How many signs of trouble a drive shows at once."""
    signs = [
        v.level("disk_reallocated_sectors"),
        v.level("disk_pending_sectors"),
        v.level("disk_offline_uncorrectable"),
        v.level("disk_reported_uncorrectable"),
        v.level("disk_spin_retries"),
        v.level("disk_high_fly_writes"),
    ]
    known = np.stack([~np.isnan(s) for s in signs], axis=1) if len(v.seen) else np.zeros((0, 6), np.bool_)
    bad = (
        np.stack([np.nan_to_num(s) > 0 for s in signs], axis=1) if len(v.seen) else np.zeros((0, 6), np.bool_)
    )
    c.add("signs.count", 1, bad[:, :4].sum(axis=1))
    c.add("signs.known", 0, known.sum(axis=1))
    grown = sum(
        (np.nan_to_num(v.window(s, "30d", SUM)) > 0).astype(np.float32)
        for s in ("reallocated", "reallocation_events", "reported_uncorrectable", "command_timeouts")
    )
    c.add("signs.growing_30d", 1, np.asarray(grown, np.float32))


def _node(c: Columns, v: View) -> None:
    _counter(c, v, "errors")
    for signal in (s.name for s in v.scheme.signals if not s.metrics and s.name != "missed_polls"):
        _events(c, v, signal)
    _rhythm(c, v)
    _history(c, v)


def build(view: View) -> Columns:
    """All columns for a view."""
    columns = Columns()
    with np.errstate(all="ignore"):
        {"gpu": _gpu, "disk": _disk, "node": _node}[view.scheme.kind](columns, view)
    return columns
