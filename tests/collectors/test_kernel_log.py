"""Reading the kernel's log: once, in order, over restarts, rotations, overruns and suspends."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forewarn.collectors.base import Collector, Event
from forewarn.collectors.clock import ManualClock
from forewarn.collectors.coalescing import COALESCE_S
from forewarn.collectors.errors import UnavailableError
from forewarn.collectors.kernel_log import KernelLogCollector
from forewarn.collectors.registry import Setup, create

XID = "NVRM: Xid (PCI:0000:{bus}:00): {number}, pid=1, name=python3, text"


def _xid(bus: str = "05", number: int = 31) -> str:
    return XID.format(bus=bus, number=number)


def _at_boot(uptime_s: float) -> ManualClock:
    clock = ManualClock(1_790_000_000.0)
    clock.advance(uptime_s)
    return clock


class Device:
    """Stands in for /dev/kmsg: one record a read, then EAGAIN; an OSError in the list is raised."""

    def __init__(self) -> None:
        self.records: list[bytes | int] = []

    def __call__(self, fd: int, size: int) -> bytes:
        if not self.records:
            raise BlockingIOError(errno.EAGAIN, "nothing")
        record = self.records.pop(0)
        if isinstance(record, int):
            raise OSError(record, os.strerror(record))
        return record


@pytest.fixture
def root(tmp_path: Path) -> Path:
    boot = tmp_path / "proc/sys/kernel/random"
    boot.mkdir(parents=True)
    (boot / "boot_id").write_text("11111111-aaaa\n")
    return tmp_path


def _kmsg(root: Path, clock: ManualClock, device: Device, **options: object) -> KernelLogCollector:
    """A collector on a character device (/dev/null opens as one) whose reads the test gives."""
    collector = KernelLogCollector(Setup(clock, root), **options)  # type: ignore[arg-type]  # options of the test
    collector._path = Path("/dev/null")
    collector._read = device
    return collector


def _record(sequence: int, text: str, at_us: int = 0, priority: int = 4) -> bytes:
    return f"{priority},{sequence},{at_us},-;{text}\n SUBSYSTEM=pci\n DEVICE=+pci:0000:05:00.0\n".encode()


def _file(root: Path, text: str = "", name: str = "kern.log") -> Path:
    path = root / "var/log" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def _on_file(root: Path, clock: ManualClock | None = None, **options: object) -> KernelLogCollector:
    made = KernelLogCollector(Setup(clock or ManualClock(), root), path="/var/log/kern.log", **options)  # type: ignore[arg-type]  # as above
    return made


def _codes(events: list[Event]) -> list[tuple[str, str, int]]:
    return [(e.kind, e.code, e.count) for e in events]


# --- the device ---


def test_device_backlog_is_read_once_and_stamped_from_the_boot_clock(root: Path) -> None:
    clock, device = _at_boot(1000.0), Device()
    device.records = [_record(7, _xid(), at_us=400_000_000)]
    collector = _kmsg(root, clock, device)
    (event,) = collector.collect().events
    assert event.time == pytest.approx(clock.now() - 600.0)
    assert (event.kind, event.code, event.pci, event.device) == ("xid", "31", "0000:05:00", "")
    assert collector.collect().events == []


def test_times_stay_right_after_a_wall_clock_step(root: Path) -> None:
    clock, device = _at_boot(100.0), Device()
    collector = _kmsg(root, clock, device)
    collector.collect()
    clock.step(-3600.0)
    device.records = [_record(1, _xid(), at_us=99_000_000)]
    (event,) = collector.collect().events
    assert event.time == pytest.approx(clock.now() - 1.0)


def test_times_stay_right_after_suspend(root: Path) -> None:
    """In suspend wall time goes on while the kernel's log clock and the monotonic clock stand still."""
    clock, device = _at_boot(100.0), Device()
    collector = _kmsg(root, clock, device)
    collector.collect()
    clock.step(8 * 3600.0)
    clock.advance(2.0)
    device.records = [_record(1, _xid(), at_us=101_000_000)]
    (event,) = collector.collect().events
    assert event.time == pytest.approx(clock.now() - 1.0)


@pytest.mark.parametrize(
    "marks",
    [
        ["PM: Timekeeping suspended for 28800.000 seconds", "PM: suspend exit"],
        ["PM: suspend exit"],
        ["Timekeeping suspended for 28800.000 seconds"],
    ],
)
def test_backlog_from_before_a_suspend_keeps_its_time(root: Path, marks: list[str]) -> None:
    clock, device = _at_boot(100.0), Device()
    logged = clock.now() - 50.0
    clock.step(8 * 3600.0)  # asleep
    clock.advance(20.0)
    (root / "proc/uptime").write_text(f"{120.0 + 8 * 3600} 0.0\n")
    device.records = [
        _record(1, _xid("01"), at_us=50_000_000),
        *(_record(2 + i, mark, at_us=100_000_000) for i, mark in enumerate(marks)),
        _record(9, _xid("02"), at_us=110_000_000),
    ]
    before, after = _kmsg(root, clock, device).collect().events
    assert before.time == pytest.approx(logged)
    assert after.time == pytest.approx(clock.now() - 10.0)


def test_a_suspend_while_the_agent_runs_is_told_from_an_earlier_one(root: Path) -> None:
    clock, device = _at_boot(100.0), Device()
    (root / "proc/uptime").write_text("5100.0 0.0\n")  # slept 5000 s before
    collector = _kmsg(root, clock, device)
    collector.collect()
    clock.advance(1.0)
    logged = clock.now()
    device.records = [
        _record(1, _xid("01"), at_us=101_000_000),
        _record(2, "PM: suspend exit", at_us=101_500_000),
    ]
    clock.step(600.0)
    clock.advance(1.0)
    (root / "proc/uptime").write_text("5702.0 0.0\n")
    (event,) = collector.collect().events
    assert event.time == pytest.approx(logged)


def test_several_sleeps_of_unknown_length_change_no_time(root: Path) -> None:
    clock, device = _at_boot(100.0), Device()
    (root / "proc/uptime").write_text("900.0 0.0\n")
    device.records = [
        _record(1, _xid("01"), at_us=50_000_000),
        _record(2, "PM: suspend exit", at_us=60_000_000),
        _record(3, "PM: suspend exit", at_us=70_000_000),
    ]
    (event,) = _kmsg(root, clock, device).collect().events
    assert event.time == pytest.approx(clock.now() - 50.0)


def test_records_of_programs_are_forgeries(root: Path) -> None:
    device = Device()
    device.records = [_record(1, _xid(number=79), priority=12), _record(2, _xid(number=31), priority=4)]
    assert _codes(_kmsg(root, _at_boot(9.0), device).collect().events) == [("xid", "31", 1)]


def test_records_of_programs_are_let_in_when_asked(root: Path) -> None:
    device = Device()
    device.records = [_record(1, _xid(number=79), priority=12)]
    collector = _kmsg(root, _at_boot(9.0), device, user_records=True)
    assert _codes(collector.collect().events) == [("xid", "79", 1)]


def test_a_device_named_like_an_xid_is_no_xid(root: Path) -> None:
    device = Device()
    device.records = [_record(1, "usb 1-1: Product: " + _xid(number=79))]
    assert _kmsg(root, _at_boot(9.0), device).collect().events == []


def test_overrun_is_reported_and_reading_goes_on(root: Path) -> None:
    device = Device()
    collector = _kmsg(root, _at_boot(9.0), device)
    device.records = [_record(10, "x"), errno.EPIPE, _record(25, _xid(number=79))]
    gap, xid = collector.collect().events
    assert (gap.kind, gap.code, gap.count) == ("log_gap", "overrun", 14)
    assert "14 kernel messages" in gap.message
    assert (xid.kind, xid.code) == ("xid", "79")


def test_escaped_line_breaks_of_a_record_are_read(root: Path) -> None:
    device = Device()
    device.records = [
        _record(
            1,
            r"NVRM: The NVIDIA GPU 0000:b3:00.0\x0a NVRM: installed in this system has\x0a NVRM: fallen off the bus",
        )
    ]
    assert _codes(_kmsg(root, _at_boot(9.0), device).collect().events) == [("xid", "79", 1)]


@pytest.mark.parametrize(
    "raw", [b"", b"no separator", b"a,b,c;x", b"4,1;x", b"\xff\xfe;\xff", b"4,9,0,-;" + b"x" * 9000]
)
def test_malformed_records_do_no_harm(root: Path, raw: bytes) -> None:
    device = Device()
    device.records = [raw, *([_record(50, _xid())] if raw else [])]
    collector = _kmsg(root, _at_boot(9.0), device)
    collector.collect()
    device.records.append(_record(51, _xid("06")))
    assert _codes(collector.collect().events) == [("xid", "31", 1)]


def test_a_restart_does_not_report_the_backlog_twice(root: Path) -> None:
    clock, device = _at_boot(9.0), Device()
    device.records = [_record(1, _xid("01")), _record(2, _xid("02"))]
    first = _kmsg(root, clock, device)
    assert len(first.collect().events) == 2
    state = first.state()
    first.close()
    device.records = [_record(1, _xid("01")), _record(2, _xid("02")), _record(3, _xid("03"))]
    second = _kmsg(root, clock, device)
    second.restore(state)
    assert [e.pci for e in second.collect().events] == ["0000:03:00"]


def test_another_boot_is_read_whole(root: Path) -> None:
    clock, device = _at_boot(9.0), Device()
    device.records = [_record(900, _xid("01"))]
    first = _kmsg(root, clock, device)
    first.collect()
    state = first.state()
    (root / "proc/sys/kernel/random/boot_id").write_text("22222222-bbbb\n")
    device.records = [_record(1, _xid("02"))]
    second = _kmsg(root, clock, device)
    second.restore(state)
    assert [e.pci for e in second.collect().events] == ["0000:02:00"]


@pytest.mark.parametrize(
    "state", [{}, {"boot_id": 3}, {"sequence": "x"}, {"unknown": 1}, {"offset": -5, "path": "x"}]
)
def test_a_damaged_cursor_is_passed_over(root: Path, state: dict[str, object]) -> None:
    device = Device()
    device.records = [_record(1, _xid())]
    collector = _kmsg(root, _at_boot(9.0), device)
    collector.restore(state)
    assert len(collector.collect().events) == 1


# --- repeats ---


def test_repeats_are_coalesced_with_a_count(root: Path) -> None:
    clock, device = _at_boot(100.0), Device()
    collector = _kmsg(root, clock, device)
    device.records = [_record(i, _xid(), at_us=99_000_000 + i) for i in range(1000)]
    assert _codes(collector.collect().events) == [("xid", "31", 1000)]
    clock.advance(1.0)
    device.records = [_record(2000 + i, _xid(), at_us=100_500_000) for i in range(50)]
    assert collector.collect().events == []
    clock.advance(COALESCE_S)
    assert _codes(collector.collect().events) == [("xid", "31", 50)]
    clock.advance(COALESCE_S)
    assert collector.collect().events == []


def test_what_differs_is_not_coalesced(root: Path) -> None:
    device = Device()
    texts = [
        _xid("01", 31), _xid("02", 31), _xid("01", 43),
        "NVRM: Xid (PCI:0000:01:00): 149, NETIR_LINK_EVT Nonfatal XC0 i0 Link 01 (0x0)",
        "NVRM: Xid (PCI:0000:01:00): 149, NETIR_LINK_EVT Fatal XC0 i0 Link 01 (0x0)",
        "NVRM: Xid (PCI:0000:01:00): 154, GPU recovery action changed from 0x0 (None) to 0x1 (PF FLR)",
        "NVRM: Xid (PCI:0000:01:00): 154, GPU recovery action changed from 0x1 (PF FLR) to 0x2 (Node Reboot Required)",
    ]  # fmt: skip
    device.records = [_record(i, t, at_us=1_000_000) for i, t in enumerate(texts)]
    assert len(_kmsg(root, _at_boot(9.0), device).collect().events) == len(texts)


def test_two_lines_of_one_incident_count_once(root: Path) -> None:
    device = Device()
    device.records = [
        _record(1, "NVRM: Xid (PCI:0000:01:00): 79, GPU has fallen off the bus.", at_us=1),
        _record(2, "NVRM: GPU 0000:01:00.0: GPU has fallen off the bus.", at_us=2),
        _record(3, "oom-kill:constraint=CONSTRAINT_NONE,task_memcg=/x,task=perl,pid=14,uid=2", at_us=3),
        _record(4, "Out of memory: Killed process 14 (perl) total-vm:1kB", at_us=4),
    ]
    assert _codes(_kmsg(root, _at_boot(9.0), device).collect().events) == [
        ("xid", "79", 1),
        ("oom", "kill", 1),
    ]


# --- which device ---


def test_events_find_their_gpu_by_address_and_their_uuid_by_the_drivers_word(root: Path) -> None:
    device = Device()
    device.records = [
        _record(1, "NVRM: GPU at PCI:0000:05:00: GPU-509665ad-b600-ac93-3616-d754b23d636d"),
        _record(2, _xid("05")),
        _record(3, "nvidia 0000:05:00.0: AER: can't recover (no error_detected callback)"),
    ]
    collector = _kmsg(root, _at_boot(9.0), device, pci_map={"0000:05:00": "gpu3"})
    xid, aer = collector.collect().events
    assert (xid.device, aer.device) == ("gpu3", "gpu3")
    assert xid.labels["uuid"] == "GPU-509665ad-b600-ac93-3616-d754b23d636d"
    assert collector.gpu_uuids() == {"0000:05:00": "GPU-509665ad-b600-ac93-3616-d754b23d636d"}


# --- files ---


def test_a_file_is_read_whole_and_then_followed(root: Path) -> None:
    path = _file(root, _xid("01") + "\n" + _xid("02") + "\n")
    collector = _on_file(root)
    assert [e.pci for e in collector.collect().events] == ["0000:01:00", "0000:02:00"]
    with path.open("a") as log:
        log.write(_xid("03") + "\n")
    assert [e.pci for e in collector.collect().events] == ["0000:03:00"]


def test_a_last_line_without_its_end_is_read_once(root: Path) -> None:
    path = _file(root, "noise\n" + _xid("01"))
    collector = _on_file(root)
    assert [e.pci for e in collector.collect().events] == ["0000:01:00"]
    assert collector.collect().events == []
    with path.open("a") as log:
        log.write(" and more\n" + _xid("02") + "\n")
    assert [e.pci for e in collector.collect().events] == ["0000:02:00"]


def test_a_line_written_in_pieces_is_read_when_it_says_something(root: Path) -> None:
    path = _file(root, "NVRM: Xid (PCI:0000")
    collector = _on_file(root)
    assert collector.collect().events == []
    with path.open("a") as log:
        log.write(":05:00): 79, GPU has")
    assert _codes(collector.collect().events) == [("xid", "79", 1)]
    with path.open("a") as log:
        log.write(" fallen off the bus.\n")
    assert collector.collect().events == []


def test_rotation_loses_nothing(root: Path) -> None:
    path = _file(root, _xid("01") + "\n")
    collector = _on_file(root)
    collector.collect()
    with path.open("a") as log:
        log.write(_xid("02") + "\n")
    path.rename(path.with_suffix(".log.1"))
    _file(root, _xid("03") + "\n")
    assert [e.pci for e in collector.collect().events] == ["0000:02:00", "0000:03:00"]


def test_rotation_without_a_new_file_yet_goes_on(root: Path) -> None:
    path = _file(root, _xid("01") + "\n")
    collector = _on_file(root)
    collector.collect()
    path.rename(path.with_suffix(".log.1"))
    assert collector.collect().events == []
    _file(root, _xid("03") + "\n")
    assert [e.pci for e in collector.collect().events] == ["0000:03:00"]


def test_truncation_starts_anew(root: Path) -> None:
    path = _file(root, "x" * 500 + "\n" + _xid("01") + "\n")
    collector = _on_file(root)
    collector.collect()
    path.write_text(_xid("02") + "\n")
    assert [e.pci for e in collector.collect().events] == ["0000:02:00"]


def test_truncation_that_grew_past_the_old_end_starts_anew(root: Path) -> None:
    path = _file(root, _xid("01") + "\n")
    collector = _on_file(root)
    collector.collect()
    path.write_text(_xid("02") + "\n" + "x" * 5000 + "\n")
    assert [e.pci for e in collector.collect().events] == ["0000:02:00"]


def test_a_file_goes_on_after_a_restart(root: Path) -> None:
    path = _file(root, _xid("01") + "\n")
    first = _on_file(root)
    first.collect()
    state = first.state()
    first.close()
    with path.open("a") as log:
        log.write(_xid("02") + "\n")
    second = _on_file(root)
    second.restore(state)
    assert [e.pci for e in second.collect().events] == ["0000:02:00"]


def test_without_backlog_only_news_count(root: Path) -> None:
    path = _file(root, _xid("01") + "\n")
    collector = _on_file(root, backlog=False)
    assert collector.collect().events == []
    with path.open("a") as log:
        log.write(_xid("02") + "\n")
    assert [e.pci for e in collector.collect().events] == ["0000:02:00"]


def test_file_lines_with_boot_stamps_are_of_this_boot_or_of_none(root: Path) -> None:
    clock = _at_boot(100.0)
    _file(root, f"[   40.5] {_xid('01')}\n[  400.5] {_xid('02')}\n")
    first, second = _on_file(root, clock).collect().events
    assert first.time == pytest.approx(clock.now() - 59.5)
    assert second.time is None


def test_lines_without_times_are_only_folded_when_the_same(root: Path) -> None:
    a, b = "nvme nvme0: resetting controller", "ata1: hard resetting link"
    _file(
        root,
        "\n".join([a, a, b, XID.format(bus="01", number=31), XID.format(bus="01", number=31) + " other"]),
    )
    events = _on_file(root).collect().events
    assert _codes(events) == [("nvme", "reset", 2), ("ata", "reset", 1), ("xid", "31", 1), ("xid", "31", 1)]


def test_utf16_is_named(root: Path) -> None:
    _file(root).write_bytes(_xid().encode("utf-16"))
    (error,) = _on_file(root).collect().errors
    assert "UTF-16" in error.message
    assert error.source == "kernel_log"


def test_a_fifo_is_followed(root: Path) -> None:
    path = root / "var/log/kern.log"
    path.parent.mkdir(parents=True)
    os.mkfifo(path)
    collector = _on_file(root)
    assert collector.collect().events == []
    writer = os.open(path, os.O_WRONLY | os.O_NONBLOCK)
    os.write(writer, (_xid("01") + "\n").encode())
    assert [e.pci for e in collector.collect().events] == ["0000:01:00"]
    os.close(writer)
    assert collector.collect().events == []
    collector.close()


# --- what cannot be read ---


def test_missing_log_names_the_way_out(root: Path) -> None:
    with pytest.raises(UnavailableError, match=r"/var/log/kern\.log does not exist.*set path"):
        _on_file(root).collect()


def test_a_log_that_appears_later_is_read(root: Path) -> None:
    collector = _on_file(root)
    with pytest.raises(UnavailableError):
        collector.collect()
    _file(root, _xid("01") + "\n")
    assert len(collector.collect().events) == 1


@pytest.mark.parametrize("code", [errno.EACCES, errno.EPERM])
def test_forbidden_log_names_the_capability(root: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    def refuse(*_args: object) -> int:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr("forewarn.collectors.kernel_log.os.open", refuse)
    with pytest.raises(UnavailableError, match=r"CAP_SYSLOG.*dmesg_restrict|dmesg_restrict.*CAP_SYSLOG"):
        _on_file(root).collect()


def test_a_directory_is_refused(root: Path) -> None:
    (root / "var/log/kern.log").mkdir(parents=True)
    with pytest.raises(UnavailableError, match="directory"):
        _on_file(root).collect()


def test_other_read_errors_name_the_log(root: Path) -> None:
    device = Device()
    device.records = [errno.EIO]
    with pytest.raises(UnavailableError, match="/dev/kmsg"):
        _kmsg(root, _at_boot(9.0), device).collect()


# --- the rest ---


def test_is_a_collector_and_is_made_by_name(root: Path) -> None:
    _file(root, _xid("01"))
    made = create(
        "kernel_log", {"path": "/var/log/kern.log", "pci_map": "0000:01:00=gpu0"}, Setup(ManualClock(), root)
    )
    assert isinstance(made, Collector)
    assert [e.device for e in made.collect().events] == ["gpu0"]
    made.close()


@pytest.fixture
def no_leak() -> Iterator[None]:
    before = sum(1 for _ in Path("/proc/self/fd").iterdir())
    yield
    assert sum(1 for _ in Path("/proc/self/fd").iterdir()) == before


@pytest.mark.usefixtures("no_leak")
def test_files_are_closed_over_many_rotations(root: Path) -> None:
    _file(root)
    collector = _on_file(root)
    for i in range(20):
        _file(root, _xid(f"{i:02x}") + "\n").rename(root / f"var/log/old.{i}")
        _file(root, "")
        collector.collect()
    collector.close()


@settings(max_examples=80, deadline=None)
@given(pieces=st.lists(st.binary(max_size=200), max_size=6))
def test_any_bytes_in_a_file_are_read_to_the_end(
    tmp_path_factory: pytest.TempPathFactory, pieces: list[bytes]
) -> None:
    root = tmp_path_factory.mktemp("log")
    path = _file(root)
    collector = _on_file(root)
    for piece in pieces:
        with path.open("ab") as log:
            log.write(piece)
        collector.collect()
    with path.open("ab") as log:
        log.write(("\n" + _xid("7f", 79) + "\n").encode())
    assert ("xid", "79", "0000:7f:00") in [(e.kind, e.code, e.pci) for e in collector.collect().events]
    collector.close()


@settings(max_examples=150, deadline=None)
@given(
    raw=st.lists(
        st.one_of(st.binary(max_size=300), st.text(max_size=100).map(lambda t: _record(5, t))), max_size=10
    )
)
def test_any_records_of_the_device_are_read(
    tmp_path_factory: pytest.TempPathFactory, raw: list[bytes]
) -> None:
    device = Device()
    device.records = [r for r in raw if r]
    _kmsg(tmp_path_factory.mktemp("kmsg"), _at_boot(9.0), device).collect()
