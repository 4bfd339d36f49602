"""Rules for what is known to be fatal or nearly so. Pure: an event or readings in, hits out. A rule raises a risk to a
floor, never lowers it, and says which part to look at and what to do.

Sources: the facts of XIDs and SXids in `collectors/data`, NVIDIA's limits for row remapping, retired pages and SRAM
errors, the NVMe specification's critical warning, and failure rates by SMART value that Backblaze published.
"""

# ruff: noqa: E501  # tables: one rule a line

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from forewarn.collectors.base import Event
from forewarn.collectors.xids import xid_fact
from forewarn.models.features import HORIZONS_S

HOUR_S, YEAR_S = 3600.0, 365 * 86_400.0

FAILED = (0.99, 0.99, 0.99)
"""It is broken now."""
IMMINENT = (0.8, 0.9, 0.95)
LIKELY = (0.1, 0.2, 0.5)
ELEVATED = (0.02, 0.05, 0.15)
DISK_FAILED = (0.9, 0.97, 0.99)
DISK_LIKELY = (0.1, 0.3, 0.6)

FATAL_LASTS_S = 24 * HOUR_S
"""A fatal event holds this long unless a reset, a return or a replacement ends it before."""
WARNING_LASTS_S = 12 * HOUR_S
SECONDARY_WITHIN_S = 5.0
"""XID 45 this soon after another event of the same GPU follows from it."""

APPLICATION_XIDS = frozenset({13, 31, 43, 45, 69})
"""What a program does to itself; never a hit, whatever severity a log line gives."""
CONTAINED_XID, RECOVERY_XID = 94, 154
GROWING_XIDS = {
    63: "a memory row was remapped; the remap takes effect at the next GPU reset",
    92: "corrected memory errors come at a high rate",
    176: "correctable PCIe errors crossed a limit",
}
"""Not fatal, yet known to come before what is."""
SHUTDOWN_MARGIN_CELSIUS = 3.0
RETIRED_PAGES_LIMIT = 60
"""NVIDIA's replacement limit for GPUs that retire pages."""

_LOCAL = (
    (re.compile(r"gpu\d+"), "gpu"),
    (re.compile(r"(nvme|sd|hd|vd|disk|scsi|bus|megaraid|da|ada)[\w.,:-]*"), "disk"),
    (re.compile(r"(mlx|ib|hfi|eth|en[ospx]|bnxt|roce|irdma|cxi|efa)[\w.:-]*"), "nic"),
)

_PART_OF_CATEGORY = {
    "memory": "gpu memory",
    "nvlink": "nvlink",
    "c2c": "nvlink",
    "pcie": "gpu or pcie slot",
    "thermal": "cooling",
    "power": "power",
    "gsp": "gpu firmware",
    "microcontroller": "gpu",
    "inforom": "gpu",
    "driver": "gpu or driver",
}


@dataclass(frozen=True)
class RuleHit:
    """A rule that holds for a device from `time` to `expires` (None: until reset, repair or replacement).

    `floors` are least risks for the horizons of the device's kind. `fatal`: act at once, without waiting for a cycle.
    `fallback`: a population's rate, meant for devices that no model speaks for.
    """

    rule: str
    device: str
    time: float
    text: str
    action: str
    floors: tuple[float, ...]
    hardware: str
    fatal: bool
    expires: float | None = None
    fallback: bool = False
    evidence: dict[str, object] = field(default_factory=dict)


def kind_of(device: str) -> str:
    """`gpu`, `disk`, `nic` or `node`, from the id (`NODE/gpu3`, `NODE/nvme0`, `NODE`); '' when it does not tell."""
    _, slash, local = device.partition("/")
    if not slash or not local:
        return "node"
    return next((kind for pattern, kind in _LOCAL if pattern.fullmatch(local)), "")


def _hit(
    event: Event,
    rule: str,
    text: str,
    action: str,
    floors: tuple[float, ...],
    hardware: str,
    lasts_s: float | None = FATAL_LASTS_S,
) -> RuleHit:
    time = event.time if event.time is not None else math.nan
    evidence: dict[str, object] = {"event": event.kind, "code": event.code, "message": event.message}
    if event.pci:
        evidence["pci"] = event.pci
    if event.count > 1:
        evidence["count"] = event.count
    return RuleHit(
        rule=rule,
        device=event.device,
        time=time,
        text=text,
        action=action,
        floors=floors,
        hardware=hardware,
        fatal=floors in (FAILED, IMMINENT, DISK_FAILED),
        expires=None if lasts_s is None else time + lasts_s,
        evidence=evidence,
    )


def _xid(event: Event) -> RuleHit | None:
    number = int(event.code) if event.code.isdigit() else -1
    fact = xid_fact(number)
    if number in APPLICATION_XIDS or (fact is not None and fact.category == "user_app"):
        return None
    rule = f"xid_{event.code}"
    part = _PART_OF_CATEGORY.get(fact.category, "gpu") if fact else "gpu"
    meaning = fact.meaning if fact else "an error the table does not know"
    action = event.action or (fact.action if fact else "")
    text = f"XID {event.code}: {meaning}"
    if number == RECOVERY_XID:
        if action in ("", "NONE", "FROM_MESSAGE"):
            return None
        return _hit(event, rule, f"the driver asks for recovery: {action}", action, FAILED, "gpu")
    if number == CONTAINED_XID:
        # The program is lost and the GPU goes on: the risk is for what runs on it now.
        return _hit(event, rule, text, action, FAILED, part, HOUR_S)
    if number in GROWING_XIDS:
        said = f"XID {event.code}: {GROWING_XIDS[number]}"
        return _hit(event, rule, said, action, ELEVATED, part, WARNING_LASTS_S)
    severity = event.severity or (fact.severity if fact else "")
    if severity == "critical":
        return _hit(event, rule, text, action, FAILED, part)
    if fact is not None and fact.hardware == "yes" and severity == "error":
        return _hit(event, rule, text, action, LIKELY, part, WARNING_LASTS_S)
    return None


_EVENT_RULES: dict[tuple[str, str], tuple[str, str, tuple[float, ...], str, float]] = {
    # (kind, code or *): text, action, floors, part, lasts
    ("gpu_lost", "*"): ("the driver lost the GPU", "RESTART_BM", FAILED, "gpu or pcie slot", FATAL_LASTS_S),
    ("gpu_missing", "*"): ("the GPU does not answer any more", "RESTART_BM", FAILED, "gpu or pcie slot", FATAL_LASTS_S),
    ("gpu_reset_required", "*"): ("the driver says that the GPU needs a reset", "RESET_GPU", FAILED, "gpu", FATAL_LASTS_S),
    ("aer", "fatal"): ("a fatal PCIe error", "CHECK_MECHANICALS", IMMINENT, "pcie", FATAL_LASTS_S),
    ("aer", "unrecoverable"): ("PCIe error recovery failed", "RESTART_BM", FAILED, "pcie", FATAL_LASTS_S),
    ("aer", "nonfatal"): ("an uncorrected PCIe error", "CHECK_MECHANICALS", ELEVATED, "pcie", WARNING_LASTS_S),
    ("edac", "ue"): ("an uncorrected host memory error", "REPLACE_DIMM", IMMINENT, "host memory", FATAL_LASTS_S),
    ("mce", "uncorrected"): ("an uncorrected machine check", "CHECK_HOST", IMMINENT, "cpu or host memory", FATAL_LASTS_S),
    ("thermal", "shutdown"): ("the host shuts down for heat", "CHECK_THERMALS", FAILED, "cooling", FATAL_LASTS_S),
    ("lockup", "hard"): ("a CPU is stuck for good", "RESTART_BM", FAILED, "cpu or kernel", FATAL_LASTS_S),
    ("lockup", "soft"): ("a CPU was stuck", "CHECK_HOST", LIKELY, "cpu or kernel", WARNING_LASTS_S),
    ("mlx5", "health"): ("the network adapter reports a fatal state", "CHECK_NIC", IMMINENT, "network adapter", FATAL_LASTS_S),
    ("filesystem", "read_only"): ("a file system went read-only", "CHECK_DISK", LIKELY, "disk", WARNING_LASTS_S),
}  # fmt: skip

_DISK_EVENT_RULES: dict[tuple[str, str], tuple[str, str, tuple[float, ...], str, float]] = {
    ("nvme", "dead"): ("the drive was given up by the kernel", "REPLACE_DISK", DISK_FAILED, "disk", FATAL_LASTS_S),
    ("ata", "disabled"): ("the drive was disabled by the kernel", "REPLACE_DISK", DISK_FAILED, "disk", FATAL_LASTS_S),
    ("disk_error", "medium_error"): ("the drive could not read a sector", "REPLACE_DISK", DISK_LIKELY, "disk", 7 * 24 * HOUR_S),
    ("nvme", "reset"): ("the drive had to be reset", "CHECK_DISK", ELEVATED, "disk", 24 * HOUR_S),
}  # fmt: skip


_JOB_RULES = {
    "job_straggler": "its rank computes longer than its peers",
    "job_stalled": "its rank finishes no more steps",
}
"""What a job's progress says of one GPU: worth a look and a save where that is cheap, never alone a reason to leave."""


def _job(event: Event) -> RuleHit | None:
    if kind_of(event.device) != "gpu":
        return None
    text = event.message or _JOB_RULES[event.kind]
    return _hit(event, event.kind, text, event.action or "CHECK_GPU", ELEVATED, "gpu", WARNING_LASTS_S)


def on_event(event: Event) -> RuleHit | None:
    """What an event alone says, at once. Application XIDs say nothing."""
    if event.kind == "xid":
        return _xid(event)
    if event.kind in _JOB_RULES:
        return _job(event)
    if event.kind == "sxid":
        if event.severity != "critical":
            return None
        text = f"SXid {event.code}: {event.message or 'a fatal error of an NVSwitch'}"
        return _hit(event, f"sxid_{event.code}", text, event.action or "RESTART_BM", FAILED, "nvswitch")
    tables = (_DISK_EVENT_RULES,) if kind_of(event.device) == "disk" else (_EVENT_RULES,)
    for table in tables:
        found = table.get((event.kind, event.code)) or table.get((event.kind, "*"))
        if found:
            text, action, floors, part, lasts_s = found
            name = event.kind if (event.kind, "*") in table else f"{event.kind}_{event.code}"
            return _hit(event, name, text, event.action or action, floors, part, lasts_s)
    return None


REPEATS_OF_GROWING = 3
"""So many rows remapped while the first still counts, and the memory is wearing out, not mending."""


def repeated(hit: RuleHit, times: int) -> RuleHit:
    """What a rule says when its event has come `times` times while it held. Wear that goes on is likely to end badly:
    more than a few remaps a day are far above what healthy memory needs in its life."""
    said = replace(hit, evidence={**hit.evidence, "times": times})
    if hit.floors != ELEVATED or times < REPEATS_OF_GROWING or not hit.rule.startswith("xid_"):
        return said
    return replace(said, floors=LIKELY, text=f"{hit.text}; {times} times so far")


def clears(event: Event) -> Callable[[RuleHit], bool] | None:
    """Which hits an event ends; None: none. A GPU that is back was reset; a new driver means every GPU was."""
    if event.kind == "gpu_returned":
        return lambda hit: hit.device == event.device
    if event.kind == "job_recovered":
        return lambda hit: hit.device == event.device and hit.rule in _JOB_RULES
    if event.kind == "driver_reloaded":
        node = event.device.partition("/")[0]
        return lambda hit: (
            hit.device.startswith(f"{node}/")
            and (hit.action == "RESET_GPU" or hit.rule in ("gpu_missing", "gpu_lost", "gpu_reset_required"))
        )
    return None


def is_secondary(event: Event, earlier_hit: RuleHit | None) -> bool:
    """True for XID 45 right after a hit on the same GPU: the driver ends the channels of what that hit killed."""
    if earlier_hit is None or event.kind != "xid" or event.code != "45" or event.time is None:
        return False
    return 0 <= event.time - earlier_hit.time <= SECONDARY_WITHIN_S


@dataclass(frozen=True)
class _ReadingRule:
    """A rule on the last value of one metric: it holds from `least` up (or, with `most`, down to it)."""

    rule: str
    metric: str
    least: float
    text: str
    action: str
    floors: tuple[float, ...]
    hardware: str
    most: float = math.inf
    against: str = ""
    """Another metric that the value is taken as a difference to (value less that)."""
    fallback: bool = False
    fatal: bool = False
    bits: int = 0
    """Bits of a mask of which any must be set (then `least` is 1)."""

    def holds(self, value: float, other: float) -> bool:
        return bool(self.mask(np.array([value]), np.array([other]) if self.against else None)[0])

    def mask(self, values: NDArray[np.float64], others: NDArray[np.float64] | None) -> NDArray[np.bool_]:
        """Where it holds; NaN never does."""
        x = values - others if others is not None else values
        if self.bits:
            x = (np.nan_to_num(values).astype(np.int64) & self.bits != 0).astype(np.float64)
        with np.errstate(invalid="ignore"):
            return np.asarray((x >= self.least) & (x <= self.most))


def yearly(rate: float, kind: str = "disk") -> tuple[float, ...]:
    """Probability of failure within each horizon at a constant rate of failures a year."""
    return tuple(1 - math.exp(-rate * h / YEAR_S) for h in HORIZONS_S[kind])


_GPU_READINGS = (
    _ReadingRule("row_remap_failure", "gpu_row_remap_failure", 1, "remapping a memory row failed: no spare row is left for it", "REPLACE_GPU", IMMINENT, "gpu memory", fatal=True),
    _ReadingRule("row_remap_pending", "gpu_row_remap_pending", 1, "a memory row waits to be remapped until the GPU is reset", "RESET_GPU", ELEVATED, "gpu memory"),
    _ReadingRule("row_remap_banks_none", "gpu_row_remap_banks_none", 1, "banks of memory without any spare row: {value:.0f}", "REPLACE_GPU", LIKELY, "gpu memory"),
    _ReadingRule("sram_threshold", "gpu_ecc_sram_threshold_exceeded", 1, "SRAM errors passed the vendor's replacement limit", "REPLACE_GPU", LIKELY, "gpu"),
    _ReadingRule("recovery_action", "gpu_recovery_action", 1, "the driver asks for a recovery action (number {value:.0f})", "RESET_GPU", FAILED, "gpu", fatal=True),
    _ReadingRule("retired_pages_pending", "gpu_retired_pages_pending", 1, "a memory page waits to be retired until the GPU is reset", "RESET_GPU", ELEVATED, "gpu memory"),
    _ReadingRule("retired_pages_limit", "gpu_retired_pages_dbe_total", RETIRED_PAGES_LIMIT, "{value:.0f} memory pages were retired: the replacement limit", "REPLACE_GPU", LIKELY, "gpu memory"),
    _ReadingRule("thermal_shutdown_near", "gpu_temperature_celsius", -SHUTDOWN_MARGIN_CELSIUS, "{value:.0f} C: within 3 C of shutting down", "CHECK_THERMALS", IMMINENT, "cooling", against="gpu_temperature_shutdown_celsius", fatal=True),
    _ReadingRule("pcie_width", "gpu_pcie_link_width", -math.inf, "the PCIe link runs at {value:.0f} lanes", "CHECK_MECHANICALS", ELEVATED, "gpu or pcie slot", most=-1, against="gpu_pcie_link_width_max"),
)  # fmt: skip

_DISK_READINGS = (
    _ReadingRule("smart_failed", "disk_smart_passed", -math.inf, "the drive's own health check fails", "REPLACE_DISK", DISK_LIKELY, "disk", most=0.5),
    _ReadingRule("nvme_media_read_only", "disk_nvme_critical_warning", 1, "the drive's media is read-only (critical warning {value:.0f})", "REPLACE_DISK", DISK_FAILED, "disk", fatal=True, bits=0x08),
    _ReadingRule("nvme_reliability", "disk_nvme_critical_warning", 1, "the drive's reliability is degraded (critical warning {value:.0f})", "REPLACE_DISK", DISK_LIKELY, "disk", bits=0x04),
    _ReadingRule("nvme_spare", "disk_nvme_critical_warning", 1, "the drive's spare is below its threshold (critical warning {value:.0f})", "REPLACE_DISK", (0.02, 0.1, 0.25), "disk", bits=0x01),
    _ReadingRule("pending_some", "disk_pending_sectors", 1, "{value:.0f} sectors wait to be remapped", "CHECK_DISK", yearly(0.34), "disk", most=1, fallback=True),
    _ReadingRule("pending", "disk_pending_sectors", 2, "{value:.0f} sectors wait to be remapped", "REPLACE_DISK", yearly(0.68), "disk", most=39, fallback=True),
    _ReadingRule("pending_many", "disk_pending_sectors", 40, "{value:.0f} sectors wait to be remapped", "REPLACE_DISK", yearly(1.65), "disk", fallback=True),
    _ReadingRule("offline_uncorrectable", "disk_offline_uncorrectable", 1, "{value:.0f} sectors cannot be read", "REPLACE_DISK", yearly(0.81), "disk", fallback=True),
    _ReadingRule("reported_uncorrectable", "disk_reported_uncorrectable", 1, "{value:.0f} uncorrectable errors reported", "REPLACE_DISK", yearly(0.34), "disk", most=34, fallback=True),
    _ReadingRule("reported_uncorrectable_many", "disk_reported_uncorrectable", 35, "{value:.0f} uncorrectable errors reported", "REPLACE_DISK", yearly(1.44), "disk", fallback=True),
    _ReadingRule("uncorrected", "disk_uncorrected_errors_total", 1, "{value:.0f} uncorrected read or write errors", "REPLACE_DISK", yearly(0.34), "disk", fallback=True),
    _ReadingRule("reallocated", "disk_reallocated_sectors", 16, "{value:.0f} sectors were reallocated", "CHECK_DISK", yearly(0.24), "disk", most=259, fallback=True),
    _ReadingRule("reallocated_many", "disk_reallocated_sectors", 260, "{value:.0f} sectors were reallocated", "REPLACE_DISK", yearly(0.57), "disk", fallback=True),
)  # fmt: skip

READING_RULES: dict[str, tuple[_ReadingRule, ...]] = {
    "gpu": _GPU_READINGS,
    "disk": _DISK_READINGS,
    "node": (),
}


def reading_metrics(kind: str) -> tuple[str, ...]:
    """Metrics that the rules of a kind look at."""
    names = dict.fromkeys(r.metric for r in READING_RULES[kind])
    names.update(dict.fromkeys(r.against for r in READING_RULES[kind] if r.against))
    return tuple(names)


def on_readings(device: str, kind: str, time: float, latest: Mapping[str, float]) -> list[RuleHit]:
    """What the last readings of one device say. `time` becomes the hits' own; they hold as long as the readings do."""
    hits = []
    for rule in READING_RULES[kind]:
        value, other = latest.get(rule.metric, math.nan), latest.get(rule.against, math.nan)
        if not rule.holds(value, other):
            continue
        evidence: dict[str, object] = {"metric": rule.metric, "value": value}
        if rule.against:
            evidence[rule.against] = other
        hits.append(
            RuleHit(
                rule=rule.rule,
                device=device,
                time=time,
                text=rule.text.format(value=value),
                action=rule.action,
                floors=rule.floors,
                hardware=rule.hardware,
                fatal=rule.fatal,
                fallback=rule.fallback,
                evidence=evidence,
            )
        )
    return hits


def candidates(kind: str, metrics: tuple[str, ...], values: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Which rows of `values` (devices x metrics, as `reading_metrics` names them) any rule holds for."""
    found = np.zeros(len(values), np.bool_)
    at = {m: i for i, m in enumerate(metrics)}
    for rule in READING_RULES[kind]:
        others = values[:, at[rule.against]] if rule.against else None
        found |= rule.mask(values[:, at[rule.metric]], others)
    return found
