"""The tables of XIDs and SXids: whole, well formed, and right where it matters most."""

from __future__ import annotations

import pytest

from forewarn.collectors import xids
from forewarn.collectors.base import SEVERITIES


def test_every_row_of_both_tables_is_read() -> None:
    assert xids.known_xids() == tuple(range(1, 177))
    assert len(xids.known_sxids()) >= 45
    for number in xids.known_xids():
        fact = xids.xid_fact(number)
        assert fact is not None
        assert fact.severity in SEVERITIES
        assert fact.mnemonic.isupper()
        assert fact.meaning
        assert fact.action


@pytest.mark.parametrize(
    ("number", "severity", "action", "hardware"),
    [
        (13, "warning", "RESTART_APP", "maybe"),
        (31, "warning", "RESTART_APP", "maybe"),
        (43, "warning", "IGNORE", "no"),
        (45, "info", "WORKFLOW_XID_45", "no"),
        (48, "critical", "WORKFLOW_XID_48", "yes"),
        (63, "warning", "IGNORE", "yes"),
        (64, "critical", "RESET_GPU", "yes"),
        (79, "critical", "RESTART_BM", "yes"),
        (94, "error", "RESTART_APP", "yes"),
        (95, "critical", "RESET_GPU", "yes"),
        (119, "critical", "RESET_GPU", "maybe"),
    ],
)
def test_xid_of_note(number: int, severity: str, action: str, hardware: str) -> None:
    fact = xids.xid_fact(number)
    assert fact is not None
    assert (fact.severity, fact.action, fact.hardware) == (severity, action, hardware)


def test_sxids_cover_their_ranges() -> None:
    for number in (23001, 23009, 23017, 27001, 27007):
        fact = xids.sxid_fact(number)
        assert fact is not None
        assert fact.severity == "critical"
    fact = xids.sxid_fact(22013)
    assert fact is not None
    assert fact.severity == "info"


def test_unknown_numbers_are_none() -> None:
    assert xids.xid_fact(0) is None
    assert xids.xid_fact(999) is None
    assert xids.sxid_fact(1) is None
