"""The verdict on one disk from one reading, in words and with the evidence. Pure decisions."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from forewarn.collectors.smart_reading import (
    EXIT_ERROR_LOG,
    EXIT_FAILING,
    EXIT_PREFAIL_NOW,
    EXIT_SELF_TEST_LOG,
    EXIT_THRESHOLD_PAST,
    DiskReading,
)

VERDICTS = {
    "healthy": "info",
    "healthy_with_log_entries": "info",
    "warning": "warning",
    "at_risk": "error",
    "worn": "warning",
    "failing": "critical",
    "asleep": "info",
    "unknown": "info",
    "unavailable": "warning",
}
"""Every verdict with the severity of its event."""

ACTIONS = {"failing": "REPLACE_DISK", "at_risk": "PLAN_REPLACEMENT", "worn": "PLAN_REPLACEMENT"}
"""What to do about a verdict; the others need nothing done to the disk."""

RATE_AT_RISK_PER_YEAR = 1.0
"""Seen failures a drive-year at which one signal alone puts a disk at risk."""

NVME_SPARE_LOW = 0x01
NVME_TEMPERATURE = 0x02
NVME_RELIABILITY = 0x04
NVME_WARNINGS = {
    0x01: "spare below its threshold",
    0x02: "temperature outside its limits",
    0x04: "reliability degraded",
    0x08: "media read-only",
    0x10: "volatile memory backup failed",
    0x20: "persistent memory unreliable",
}


@dataclass(frozen=True)
class Verdict:
    """`code` is the verdict, with the reason behind a colon for `unavailable`; `message` says it in words."""

    verdict: str
    severity: str
    message: str
    why: str = ""

    @property
    def action(self) -> str:
        return ACTIONS.get(self.verdict, "")

    @property
    def code(self) -> str:
        return f"{self.verdict}:{self.why}" if self.verdict == "unavailable" and self.why else self.verdict


@dataclass(frozen=True)
class ObservedRate:
    """Failures a drive-year among spinning disks whose raw value lay in [low, high], with the 95 % interval."""

    low: float
    high: float
    rate: float
    rate_low: float
    rate_high: float


@cache
def observed_rates() -> dict[str, tuple[ObservedRate, ...]]:
    """The shipped table by metric, bins in order."""
    table: dict[str, list[ObservedRate]] = {}
    text = files("forewarn.collectors").joinpath("data/smart_observed_afr.tsv").read_text(encoding="utf-8")
    for line in text.splitlines():
        if line and not line.startswith(("#", "metric")):
            metric, *numbers = line.split("\t")
            table.setdefault(metric, []).append(ObservedRate(*map(float, numbers)))
    return {metric: tuple(rows) for metric, rows in table.items()}


def observed_rate(metric: str, value: float) -> ObservedRate | None:
    """The bin a raw value falls into; beyond the last bin, the last one. None without a table for the metric."""
    rows = observed_rates().get(metric, ())
    return next((row for row in rows if row.low <= value <= row.high), rows[-1] if rows else None)


def judge(reading: DiskReading) -> Verdict:
    """The verdict. A missing status is unknown, never failing; rates of spinning disks are not said of an SSD."""
    if reading.state == "asleep":
        return _verdict("asleep", "left sleeping; its last values stand")
    if reading.state == "unavailable":
        return _verdict(
            "unavailable", reading.message or "smartctl could not open it", reading.why or "open_failed"
        )
    if reading.state != "read":
        return _verdict("unknown", _nothing_told(reading), reading.state)
    failing = _failing(reading)
    signs = _signs(reading)
    worn = _worn(reading)
    if failing:
        return _verdict("failing", _join([*failing, *signs.words, *reading.notes]))
    if signs.at_risk:
        return _verdict("at_risk", _join([*signs.words, *_though(reading), *reading.notes]))
    if worn:
        return _verdict("worn", _join([*worn, *signs.words]))
    if signs.words:
        return _verdict("warning", _join([*signs.words, *_though(reading), *reading.notes]))
    if reading.passed is None:
        return _verdict(
            "unknown", "the disk gives no health status; nothing else speaks against it", "no_status"
        )
    entries = _log_entries(reading)
    if entries:
        return _verdict("healthy_with_log_entries", _join(entries))
    return _verdict("healthy", "the drive's own check passed and no counter speaks against it")


@dataclass(frozen=True)
class _Signs:
    words: list[str]
    at_risk: bool


def _signs(reading: DiskReading) -> _Signs:
    """What the counters say. Two that agree, or one at a rate seen to fail within the year, put a disk at risk."""
    values, words = reading.values, []
    agreeing, alarming = 0, False
    for metric, name in (
        ("disk_reallocated_sectors", "reallocated sectors"),
        ("disk_pending_sectors", "sectors pending reallocation"),
        ("disk_offline_uncorrectable", "sectors unreadable offline"),
        ("disk_reported_uncorrectable", "uncorrectable errors reported to the host"),
    ):
        count = values.get(metric, 0)
        if count <= 0:
            continue
        agreeing += 1
        if metric == "disk_reallocated_sectors" and "disk_grown_defects" in values:
            words.append(f"{count:.0f} grown defects")
            continue
        words.append(f"{count:.0f} {name}")
        rate = observed_rate(metric, count) if reading.rotational else None
        if rate is not None:
            words[-1] += (
                f" (spinning disks with as many failed at {100 * rate.rate:.0f} % a year, "
                f"{100 * rate.rate_low:.0f} to {100 * rate.rate_high:.0f} %)"
            )
            alarming = alarming or rate.rate >= RATE_AT_RISK_PER_YEAR
    uncorrected = values.get("disk_uncorrected_errors_total", 0)
    if uncorrected > 0:
        agreeing += 1
        writes = reading.uncorrected_writes or 0
        alarming = alarming or writes > 0  # a write that fails has found no spare sector to go to
        words.append(f"{uncorrected:.0f} uncorrected errors, {writes:.0f} of them in writes")
    media = values.get("disk_nvme_media_errors_total", 0)
    if media > 0:
        words.append(f"{media:.0f} media and data integrity errors")
    end_to_end = values.get("disk_end_to_end_errors", 0)
    if end_to_end > 0:
        words.append(f"{end_to_end:.0f} data path errors inside the drive")
    spare, threshold = values.get("disk_nvme_available_spare_ratio"), reading.spare_threshold_ratio
    if spare is not None and threshold is not None and spare < threshold:
        alarming = True
        words.append(f"spare {100 * spare:.0f} % is below its threshold of {100 * threshold:.0f} %")
    if int(values.get("disk_nvme_critical_warning", 0)) == NVME_TEMPERATURE:
        words.append("the drive warns of its temperature")
    return _Signs(words, alarming or agreeing > 1)


def _failing(reading: DiskReading) -> list[str]:
    words = []
    if reading.passed is False or reading.exit_status & EXIT_FAILING:
        bits = int(reading.values.get("disk_nvme_critical_warning", 0))
        only_worn = bits == NVME_RELIABILITY and bool(_worn(reading))
        if not only_worn and bits != NVME_TEMPERATURE:
            words.append("the drive itself says that it is failing")
            words += [name for bit, name in NVME_WARNINGS.items() if bits & bit]
    if reading.below_threshold:
        words.append(f"at or below the maker's threshold: {', '.join(reading.below_threshold[:8])}")
    elif reading.exit_status & EXIT_PREFAIL_NOW:
        words.append("a pre-failure attribute is at or below the maker's threshold")
    return words


def _worn(reading: DiskReading) -> list[str]:
    used = max(
        reading.values.get("disk_nvme_percentage_used_ratio", 0),
        reading.values.get("disk_endurance_used_ratio", 0),
    )
    if used < 1:
        return []
    words = [f"{100 * used:.0f} % of its rated endurance is used"]
    if reading.passed is False:
        words.append("the drive reports failure for that alone; its spare is not exhausted")
    return words


def _though(reading: DiskReading) -> list[str]:
    return ["the drive's own check still passes"] if reading.passed else []


def _log_entries(reading: DiskReading) -> list[str]:
    """NVMe drives log every refused command, so their error log is noise."""
    words = []
    status = reading.exit_status
    if status & EXIT_ERROR_LOG and reading.protocol != "NVMe":
        count = reading.error_log_entries
        words.append(f"{count:.0f} entries in the error log" if count else "entries in the error log")
    if status & EXIT_SELF_TEST_LOG:
        words.append("a self-test in the log found errors")
    if status & EXIT_THRESHOLD_PAST:
        words.append("an attribute was at or below its threshold in the past")
    return words


def _nothing_told(reading: DiskReading) -> str:
    if reading.state == "scan":
        return "asked for one disk, smartctl answered with a list of disks"
    if reading.state == "identity_only":
        return "the disk says who it is but gives no health data (a RAID volume, or SMART is off)"
    return "smartctl answered without health data"


def _verdict(verdict: str, message: str, why: str = "") -> Verdict:
    return Verdict(verdict, VERDICTS[verdict], message, why)


def _join(words: Iterable[str]) -> str:
    return "; ".join(words)
