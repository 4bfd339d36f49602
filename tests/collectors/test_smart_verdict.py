"""Single rules of the verdict and of the vendors' encodings, each on the smallest reading that shows it."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest

from forewarn.collectors.smart_calls import read_answer
from forewarn.collectors.smart_reading import DiskReading, grouped_number
from forewarn.collectors.smart_verdict import judge, observed_rate, observed_rates


def disk(values: dict[str, float] | None = None, **changes: Any) -> DiskReading:
    return DiskReading("read", **{"passed": True, "rotational": True, "values": values or {}, **changes})


@pytest.mark.parametrize(
    ("reading", "verdict"),
    [
        (disk(), "healthy"),
        (disk(passed=None), "unknown"),
        (disk({"disk_temperature_celsius": 30}, passed=None), "unknown"),
        (disk(passed=False), "failing"),
        (disk(exit_status=8, passed=None), "failing"),
        (disk(exit_status=16), "failing"),
        (disk(below_threshold=("Spin_Retry_Count",)), "failing"),
        (disk(exit_status=4), "healthy"),
        (disk(exit_status=32), "healthy_with_log_entries"),
        (disk(exit_status=64), "healthy_with_log_entries"),
        (disk(exit_status=64, protocol="NVMe", rotational=False), "healthy"),
        (disk(exit_status=128), "healthy_with_log_entries"),
        (disk({"disk_crc_errors_total": 3_118_119}), "healthy"),  # a cable, not the disk
        (disk({"disk_command_timeouts": 22}), "healthy"),
        (disk({"disk_reallocated_sectors": 304}), "warning"),
        (disk({"disk_reallocated_sectors": 2000}), "at_risk"),
        (disk({"disk_reallocated_sectors": 2000}, rotational=False), "warning"),  # no such rates for SSDs
        (disk({"disk_pending_sectors": 1}), "warning"),
        (disk({"disk_pending_sectors": 1, "disk_reported_uncorrectable": 1}), "at_risk"),
        (disk({"disk_uncorrected_errors_total": 1}, uncorrected_writes=1), "at_risk"),
        (disk({"disk_uncorrected_errors_total": 1}, uncorrected_writes=0), "warning"),
        (disk({"disk_nvme_critical_warning": 1}, passed=False), "failing"),
        (disk({"disk_nvme_critical_warning": 8}, passed=False), "failing"),
        (disk({"disk_nvme_critical_warning": 2}, passed=False), "warning"),  # hot, not broken
        (disk({"disk_nvme_critical_warning": 4}, passed=False), "failing"),
        (
            disk({"disk_nvme_critical_warning": 4, "disk_nvme_percentage_used_ratio": 1.04}, passed=False),
            "worn",
        ),
        (
            disk({"disk_nvme_critical_warning": 6, "disk_nvme_percentage_used_ratio": 1.04}, passed=False),
            "failing",
        ),
        (disk({"disk_nvme_percentage_used_ratio": 1.0}), "worn"),
        (disk({"disk_nvme_percentage_used_ratio": 0.99}), "healthy"),
        (disk({"disk_nvme_available_spare_ratio": 0.04}, spare_threshold_ratio=0.05), "at_risk"),
        (disk({"disk_nvme_media_errors_total": 7}), "warning"),
    ],
)
def test_rules(reading: DiskReading, verdict: str) -> None:
    assert judge(reading).code == verdict


def test_observed_rates_are_bins_in_order() -> None:
    assert len(observed_rates()) == 4
    for rows in observed_rates().values():
        assert all(row.rate_low <= row.rate <= row.rate_high and row.low <= row.high for row in rows)
        assert all(a.high <= b.high for a, b in itertools.pairwise(rows))
    one = observed_rate("disk_reported_uncorrectable", 1)
    assert one is not None and one.rate == 0.339
    beyond = observed_rate("disk_pending_sectors", 10**6)
    assert beyond is not None and beyond.low == 650
    assert observed_rate("disk_crc_errors_total", 5) is None


def table(id_: int, name: str, value: int, text: str, **row: Any) -> dict[str, float]:
    entry = {"id": id_, "name": name, "value": 100, "raw": {"value": value, "string": text}, **row}
    return read_answer(json.dumps({"ata_smart_attributes": {"table": [entry]}}).encode()).values


@pytest.mark.parametrize(
    ("id_", "name", "value", "text", "metric", "right"),
    [
        (188, "Command_Timeout", 94490722326, "22 22 22", "disk_command_timeouts", 22),
        (188, "Command_Timeout", 4295032833, "1 1 1", "disk_command_timeouts", 1),
        (5, "Reallocated_Sector_Ct", 815071299647, "2111 (12437 0)", "disk_reallocated_sectors", 2111),
        (9, "Power_On_Hours", 63943, "37054h+12m+58.233s", "disk_power_on_hours", 37054),
        (194, "Temperature_Celsius", 85900656665, "25 (Min/Max 20/30)", "disk_temperature_celsius", 25),
        (189, "Factory_Bad_Block_Ct", 300, "300", "disk_high_fly_writes", None),
        (5, "Unknown_SSD_Attribute", 300, "300", "disk_reallocated_sectors", None),
        (197, "Unknown_SSD_Attribute", 300, "300", "disk_pending_sectors", None),
        (194, "Temperature_Celsius", 0, "0", "disk_temperature_celsius", None),
        (199, "UDMA_CRC_Error_Count", -1, "-1", "disk_crc_errors_total", None),
    ],
)
def test_vendor_encodings(
    id_: int, name: str, value: int, text: str, metric: str, right: float | None
) -> None:
    assert table(id_, name, value, text).get(metric) == right


@pytest.mark.parametrize("celsius", [0, -93, 255, 2**40, None, True, "40", 1e400])
def test_absurd_temperatures_are_refused(celsius: Any) -> None:
    document = {"smart_status": {"passed": True}, "temperature": {"current": celsius}}
    assert "disk_temperature_celsius" not in read_answer(json.dumps(document).encode()).values


def test_plain_text_of_a_failing_disk() -> None:
    text = (
        "smartctl 6.6 2017-11-05\n\n=== START OF INFORMATION SECTION ===\nDevice Model:     OLD DISK\n"
        "=== START OF READ SMART DATA SECTION ===\nSMART overall-health self-assessment test result: FAILED!\n"
        "ID# ATTRIBUTE_NAME          FLAG     VALUE WORST THRESH TYPE      UPDATED  WHEN_FAILED RAW_VALUE\n"
        "  5 Reallocated_Sector_Ct   0x0033   001   001   036    Pre-fail  Always   FAILING_NOW 4095\n"
        "188 Command_Timeout         0x0032   100   099   000    Old_age   Always       -       1 1 3\n"
    )
    reading = read_answer(text.encode(), 24)
    assert (reading.passed, reading.exit_status) == (False, 24)
    assert reading.below_threshold == ("Reallocated_Sector_Ct",)
    assert reading.values["disk_reallocated_sectors"] == 4095
    assert reading.values["disk_command_timeouts"] == 3
    assert judge(reading).code == "failing"


@pytest.mark.parametrize(
    ("text", "right"),
    [
        ("1,562", 1562),
        ("1.562", 1562),
        ("1 562", 1562),
        ("1\u2019562", 1562),
        ("1\u202f562", 1562),
        ("1\u00a0562\u00a0789", 1562789),
        ("7 681 501 126 656 bytes [7,68 TB]", 7681501126656),
        ("662", 662),
        ("16%", 16),
        ("", None),
        ("none", None),
    ],
)
def test_numbers_of_any_locale(text: str, right: float | None) -> None:
    assert grouped_number(text) == right
