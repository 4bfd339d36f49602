"""Every recorded answer of smartctl gives the reading written beside it: each column, each file."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from forewarn.collectors.smart_calls import read_answer
from forewarn.collectors.smart_reading import DiskReading
from forewarn.collectors.smart_verdict import judge

OWN = Path(__file__).parents[1] / "cases" / "smart"
SHARED = Path(__file__).parents[2].parent / "shared" / "cases" / "smart"

COLUMNS = {
    "temperature_c": ("disk_temperature_celsius", 1),
    "power_on_hours": ("disk_power_on_hours", 1),
    "reallocated_or_grown": ("disk_reallocated_sectors", 1),
    "pending": ("disk_pending_sectors", 1),
    "reported_uncorrectable": ("disk_reported_uncorrectable", 1),
    "crc_errors": ("disk_crc_errors_total", 1),
    "nvme_critical_warning": ("disk_nvme_critical_warning", 1),
    "nvme_percentage_used": ("disk_nvme_percentage_used_ratio", 100),
    "nvme_available_spare": ("disk_nvme_available_spare_ratio", 100),
    "nvme_media_errors": ("disk_nvme_media_errors_total", 1),
    "nvme_unsafe_shutdowns": ("disk_nvme_unsafe_shutdowns_total", 1),
}

RIGHT: dict[tuple[str, str], float | None] = {
    # The notes beside these rows say that the figure in the column is no reading.
    ("nasty/sas_toshiba_mg08_padded.json", "power_on_hours"): None,
    ("scrutiny/smart-raid.json", "temperature_c"): None,
    ("starosdev/smart-ata-issue587-realssd-m4.json", "temperature_c"): None,
}

HOURS_IN_TEXT = {
    # The index cut these at the separators of other locales (narrow space, dot, apostrophe, a byte of cp1252).
    "multiple_devices___-d_nvme_--all__dev_nvme0": 1998,
    "multiple_devices___-d_nvme_--all__dev_nvme1": 2144,
    "nvme_11_issue_75": 10188,
    "nvme_7_issue_63": 3457,
    "nvme_8___": 3457,
    "nvme_9_issue_72": 3387,
}


def cases() -> list[tuple[Path, dict[str, str]]]:
    found = []
    for folder in (OWN, SHARED):
        if (folder / "INDEX.tsv").exists():
            with (folder / "INDEX.tsv").open(newline="") as lines:
                found += [(folder, row) for row in csv.DictReader(lines, delimiter="\t")]
    return found


CASES = cases()
IDS = [f"{'shared' if folder == SHARED else 'own'}:{row['file'][:80]}" for folder, row in CASES]


def reading_of(folder: Path, row: dict[str, str]) -> DiskReading:
    return read_answer((folder / row["file"]).read_bytes())


def wanted(row: dict[str, str], column: str) -> float | None:
    if (row["file"], column) in RIGHT:
        return RIGHT[row["file"], column]
    if column == "power_on_hours":
        for part, hours in HOURS_IN_TEXT.items():
            if row["file"].startswith("text/") and part in row["file"]:
                return float(hours)
    text = row[column].replace(",", "")
    return float(int(text, 0)) if text else None


def test_own_cases_are_there() -> None:
    assert sum(folder == OWN for folder, _ in CASES) > 20


@pytest.mark.parametrize(("folder", "row"), CASES, ids=IDS)
def test_values(folder: Path, row: dict[str, str]) -> None:
    reading = reading_of(folder, row)
    is_text = row["provenance"] == "real-text"  # its rows hold only part of what the text says
    uncorrected = (
        "disk_uncorrected_errors_total" if row["protocol"] == "SCSI" else "disk_offline_uncorrectable"
    )
    for column, (metric, factor) in {**COLUMNS, "uncorrectable": (uncorrected, 1)}.items():
        right = wanted(row, column)
        if right is None and is_text:
            continue
        got = reading.values.get(metric)
        assert (None if got is None else round(got * factor, 9)) == right, f"{column} of {row['file']}"


@pytest.mark.parametrize(("folder", "row"), CASES, ids=IDS)
def test_identity_and_status(folder: Path, row: dict[str, str]) -> None:
    reading = reading_of(folder, row)
    if row["model"]:
        assert reading.model == row["model"].strip()
    if row["protocol"] in ("ATA", "NVMe", "SCSI"):
        assert (reading.protocol, reading.type) == (row["protocol"], row["device_type"])
    assert {None: "", True: "True", False: "False"}[reading.passed] == row["passed"]
    assert reading.values.get("disk_smart_passed") == (
        None if reading.passed is None else float(reading.passed)
    )
    if row["exit_status"]:
        assert reading.exit_status == int(row["exit_status"].split(":")[0])


@pytest.mark.parametrize(("folder", "row"), CASES, ids=IDS)
def test_verdict(folder: Path, row: dict[str, str]) -> None:
    reading = reading_of(folder, row)
    right = row["verdict"].partition(" (")[0].partition("(")[0]
    if right == "scan_list":
        assert reading.state == "scan"
    elif right == "identity_only":
        assert (reading.state, judge(reading).code) == ("identity_only", "unknown")
    elif right == "text-case":
        assert judge(reading).code == ("healthy" if row["passed"] == "True" else "unknown")
    else:
        assert judge(reading).code == right
    assert judge(reading).message
