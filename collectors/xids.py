"""What is known of XIDs (GPU errors) and SXids (NVSwitch errors): meaning, severity, what to do.

The tables lie in `data/`; nothing is read before the first question.
"""

from __future__ import annotations

import functools
from importlib import resources
from typing import Literal

import msgspec

Severity = Literal["info", "warning", "error", "critical"]


class XidFact(msgspec.Struct, frozen=True):
    """One XID. `hardware` says whether it points at hardware; `ends_app` whether the program on the GPU dies
    of it (`yes`, `no`, `maybe`, `unknown`). `action` is the first step, in NVIDIA's words (`RESET_GPU`)."""

    number: int
    mnemonic: str
    meaning: str
    category: str
    severity: Severity
    action: str
    hardware: Literal["yes", "no", "maybe"]
    ends_app: Literal["yes", "no", "maybe", "unknown"]
    note: str = ""


class SxidFact(msgspec.Struct, frozen=True):
    """One SXid. The severity is overridden by `Fatal` or `Non-fatal` in the log line itself."""

    number: int
    meaning: str
    category: str
    severity: Severity
    action: str


RECOVERY_ACTIONS: dict[int, str] = {
    0: "NONE",
    1: "RESET_GPU",
    2: "RESTART_BM",
    3: "DRAIN_P2P",
    4: "DRAIN_AND_RESET",
    5: "RECOVER_IMEX_DOMAIN",
}
"""The driver's recovery actions by number (XID 154, NVML field 230)."""


def xid_fact(number: int) -> XidFact | None:
    """The entry of an XID, None for a number the table does not know."""
    return _xids().get(number)


def sxid_fact(number: int) -> SxidFact | None:
    """The entry of an SXid, None for a number the table does not know."""
    return _sxids().get(number)


def known_xids() -> tuple[int, ...]:
    """Every XID in the table, ascending."""
    return tuple(sorted(_xids()))


def known_sxids() -> tuple[int, ...]:
    """Every SXid in the table, ascending."""
    return tuple(sorted(_sxids()))


@functools.cache
def _xids() -> dict[int, XidFact]:
    facts = msgspec.convert(_rows("xid.tsv"), list[XidFact], strict=False)
    return {fact.number: fact for fact in facts}


@functools.cache
def _sxids() -> dict[int, SxidFact]:
    facts = msgspec.convert(_rows("sxid.tsv"), list[SxidFact], strict=False)
    return {fact.number: fact for fact in facts}


def _rows(name: str) -> list[dict[str, str]]:
    text = resources.files("forewarn.collectors").joinpath("data", name).read_text(encoding="utf-8")
    lines = [line.split("\t") for line in text.splitlines() if line and not line.startswith("#")]
    header, *body = lines
    return [dict(zip(header, row, strict=True)) for row in body]
