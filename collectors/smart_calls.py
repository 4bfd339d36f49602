"""What smartctl is asked, and how each of its answers is taken: JSON, plain words, nothing, or nonsense."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass

from forewarn.collectors import smart_json, smart_text
from forewarn.collectors.errors import InputError
from forewarn.collectors.smart_disks import DiskAddress
from forewarn.collectors.smart_process import Answer
from forewarn.collectors.smart_reading import DiskReading

SELF_TESTS = ("short", "long", "conveyance")


@dataclass(frozen=True)
class Outcome:
    """What asking one disk gave: a reading, or a problem in words with its reason (`timeout`, `garbage`)."""

    reading: DiskReading | None = None
    why: str = ""
    message: str = ""
    left: subprocess.Popen[bytes] | None = None


def poll_arguments(address: DiskAddress, *, as_json: bool, everything: bool, may_wake: bool) -> list[str]:
    """smartctl's arguments to read one disk. `everything` takes longer: it is for a disk that hides its temperature."""
    words = ["--json"] if as_json else []
    words.append("--xall" if everything else "--all")
    return [*words, *([] if may_wake else ["-n", "standby"]), *_target(address)]


def identity_arguments(address: DiskAddress, *, as_json: bool) -> list[str]:
    """Arguments to ask who a disk is, which does not start its motor."""
    return [*(["--json"] if as_json else []), "--info", *_target(address)]


def self_test_arguments(address: DiskAddress, kind: str) -> list[str]:
    """Arguments to start a self-test, which the disk runs by itself beside its work."""
    return ["-t", kind, *_target(address)]


def _target(address: DiskAddress) -> list[str]:
    return [*(["-d", address.type] if address.type else []), address.name]


def read_answer(data: bytes, exit_status: int = 0) -> DiskReading:
    """The reading of whatever smartctl printed. Raises InputError for JSON that is damaged."""
    text = smart_json.decode(data)
    document = smart_json.find_document(text)
    return (
        smart_json.read(document, exit_status) if document is not None else smart_text.read(text, exit_status)
    )


def outcome_of(answer: Answer, timeout_s: float) -> Outcome:
    if answer.problem:
        return Outcome(why="garbage", message=f"smartctl could not be started: {answer.problem}")
    if answer.timed_out:
        return Outcome(
            why="timeout", message=f"smartctl gave no answer within {timeout_s:.0f} s", left=answer.left
        )
    if answer.cut:
        return Outcome(
            why="garbage", message="smartctl printed megabytes; that is no answer", left=answer.left
        )
    data = answer.output if answer.output.strip() else answer.errors
    if not data.strip():
        return Outcome(why="garbage", message=f"smartctl printed nothing (exit status {answer.exit_status})")
    reading = read_answer(data, max(answer.exit_status, 0))
    if reading.state == "empty" and not reading.name and b"smartctl" not in data:
        start = " ".join(smart_json.decode(data[:200]).split())
        return Outcome(why="garbage", message=f"its answer is not smartctl's: {start[:80]!r}")
    return Outcome(reading)


def without_json(reading: DiskReading) -> bool:
    return (
        reading.why == "bad_command"
        and "json" in reading.message.lower()
        and "option" in reading.message.lower()
    )


def scanned(text: str) -> tuple[list[tuple[str, str]] | None, tuple[str, str] | None]:
    """(the list when the text is a scan's, the one disk when it is a disk's own answer)."""
    try:
        document = smart_json.find_document(text)
    except InputError:
        return None, None
    if document is not None:
        entries = smart_json.scan_entries(document)
        if entries is not None:
            return entries, None
        if smart_json.read(document).why == "bad_command" and smart_json.is_scan_command(document):
            return None, None
        return None, smart_json.replayed_name(document)
    entries = smart_text.scan_entries(text)
    if entries:
        return entries, None
    if text.lstrip().startswith("# No devices"):
        return [], None
    reading = smart_text.read(text)
    if reading.why == "bad_command" or (reading.state == "empty" and not smart_text.replayed_name(text)):
        return None, None
    return None, (smart_text.replayed_name(text) or "/dev/disk0", "")


def scan_problem(answer: Answer, text: str) -> str:
    if answer.problem:
        return answer.problem
    if answer.timed_out:
        return "it did not answer in time"
    return " ".join((smart_text.message(text) or text).split())[:160]
