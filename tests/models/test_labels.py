"""What counts as a failure."""

from __future__ import annotations

from pathlib import Path

import pytest

from forewarn.models.history import History
from forewarn.models.labels import cause_of, derive, failures_of
from support.histories import START_S, write_rows


@pytest.mark.parametrize(
    ("kind", "code", "cause"),
    [
        ("xid", "79", "gpu_off_bus"),
        ("xid", "48", "memory"),
        ("xid", "95", "memory"),
        ("xid", "74", "nvlink"),
        ("xid", "119", "gsp"),
        ("xid", "13", ""),
        ("xid", "31", ""),
        ("xid", "43", ""),
        ("xid", "45", ""),
        ("xid", "154", ""),
        ("xid", "99999", ""),
        ("xid", "", ""),
        ("gpu_lost", "", "gpu_off_bus"),
        ("nvme", "dead", "drive_failed"),
        ("ata", "disabled", "drive_failed"),
        ("ata", "io_error", ""),
        ("link_down", "1", ""),
    ],
)
def test_cause_of_an_event(kind: str, code: str, cause: str) -> None:
    severity = "critical" if kind == "xid" and cause else ""
    assert cause_of(kind, code, severity) == cause


def test_what_the_collector_called_harmless_is_no_failure() -> None:
    assert cause_of("xid", "79", "warning") == ""


def events(path: Path, *rows: tuple[float, str, str, str]) -> None:
    write_rows(
        path / "events.parquet",
        {
            "time": [START_S + r[0] for r in rows],
            "node": [r[1].split("/")[0] for r in rows],
            "device": [r[1] for r in rows],
            "kind": [r[2] for r in rows],
            "code": [r[3] for r in rows],
            "severity": ["critical"] * len(rows),
        },
    )


def test_signs_close_together_are_one_failure_and_the_first_names_it(tmp_path: Path) -> None:
    events(
        tmp_path,
        (0, "n/gpu0", "xid", "48"),
        (30, "n/gpu0", "xid", "79"),
        (31, "n/gpu1", "xid", "79"),
        (9_000, "n/gpu0", "xid", "79"),
    )
    found = derive(History(tmp_path))
    assert list(zip(found["time"] - START_S, found["device"], found["cause"], strict=True)) == [
        (0.0, "n/gpu0", "memory"),
        (31.0, "n/gpu1", "gpu_off_bus"),
        (9_000.0, "n/gpu0", "gpu_off_bus"),
    ]


def test_a_replaced_serial_is_a_failure_when_it_was_taken_out(tmp_path: Path) -> None:
    write_rows(
        tmp_path / "devices.parquet",
        {
            "device": ["n/gpu0", "n/gpu0", "n/gpu1"],
            "node": ["n"] * 3,
            "kind": ["gpu"] * 3,
            "serial": ["A", "B", "C"],
            "removed": [START_S, float("nan"), START_S],
        },
    )
    found = derive(History(tmp_path))
    assert found[["time", "device", "cause"]].to_numpy().tolist() == [[START_S, "n/gpu0", "replaced"]]


def test_nothing_to_derive_from_gives_no_failure(tmp_path: Path) -> None:
    events(tmp_path, (0, "n/gpu0", "xid", "13"))
    assert derive(History(tmp_path)).empty


def test_a_file_of_failures_wins_and_kinds_are_kept_apart(tmp_path: Path) -> None:
    events(tmp_path, (0, "n/gpu0", "xid", "79"))
    write_rows(
        tmp_path / "failures.parquet",
        {
            "time": [START_S, START_S],
            "node": ["n", "n"],
            "device": ["n/gpu3", "n/nvme0"],
            "cause": ["a", "b"],
        },
    )
    assert failures_of(History(tmp_path), "gpu")["device"].tolist() == ["n/gpu3"]
    assert failures_of(History(tmp_path), "disk")["device"].tolist() == ["n/nvme0"]
