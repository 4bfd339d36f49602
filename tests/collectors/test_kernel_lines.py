"""Every kind of kernel line, in the wordings drivers and kernels have used: code, address and severity."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forewarn.collectors.base import SEVERITIES, Event
from forewarn.collectors.catalog import EVENTS
from forewarn.collectors.kernel_events import Found, GpuAddress, address, disk_of
from forewarn.collectors.kernel_lines import RULES, Conversation, classify
from forewarn.collectors.kernel_prefix import strip_prefix

NOW = 1_790_000_000.0
CASES = Path(__file__).parents[1] / "cases" / "kmsg"
SHARED = Path(__file__).parents[3] / "shared" / "cases" / "kmsg" / "lines.tsv"


def _rows(path: Path) -> list[dict[str, str]]:
    header, *lines = path.read_text(encoding="utf-8").splitlines()
    names = header.split("\t")
    return [dict(zip(names, line.split("\t"), strict=True)) for line in lines]


def _read(line: str) -> list[Found | GpuAddress]:
    parts = strip_prefix(line, NOW)
    return Conversation().read(parts.message) if parts.from_kernel else []


def _events(line: str) -> list[Event]:
    return [f.event for f in _read(line) if isinstance(f, Found)]


def _key(event: Event) -> tuple[str, str, str, str]:
    return (event.kind, event.code, event.pci or "", event.severity)


@pytest.mark.parametrize("row", _rows(CASES / "kinds.tsv"), ids=lambda row: row["line"][:70])
def test_line_gives_its_event(row: dict[str, str]) -> None:
    expected = [] if row["severity"] == "none" else [(row["kind"], row["code"], row["pci"], row["severity"])]
    assert [_key(e) for e in _events(row["line"])] == expected


@pytest.mark.skipif(not SHARED.exists(), reason="the shared cases are not beside this checkout")
def test_shared_lines_give_what_stands_beside_them() -> None:
    rows = _rows(SHARED)
    assert rows
    for row in rows:
        read = _read(row["line"])
        if row["kind"] == "map":
            assert read == [GpuAddress(row["pci"], row["line"].rpartition(" ")[2])], row["line"]
        elif row["kind"] == "sxid_data":
            assert read == [], row["line"]
        else:
            kind = "xid" if row["kind"] == "xid_implied" else row["kind"]
            assert [_key(e) for e in _events(row["line"])] == [
                (kind, row["code"], row["pci"], row["severity"])
            ], row["line"]


def test_every_event_is_in_the_catalog() -> None:
    for row in _rows(CASES / "kinds.tsv"):
        for event in _events(row["line"]):
            assert event.kind in EVENTS
            assert event.severity in SEVERITIES
            named = EVENTS[event.kind].codes
            assert event.code in named or event.kind in ("xid", "sxid", "link_up", "link_down")


@pytest.mark.parametrize(
    ("line", "labels"),
    [
        (
            "NVRM: Xid (PCI:0000:dc:00): 45, pid=18, name=python3, Ch 00000001 caused by previous Xid 149",
            {"pid": "18", "process": "python3", "caused_by": "149"},
        ),
        (
            "NVRM: Xid (PCI:0000:3b:00 GPU-I:01 GPU-CI:02): 13, pid=9, name=a b, Graphics Exception",
            {"pid": "9", "process": "a b", "gpu_instance": "01", "compute_instance": "02"},
        ),
        (
            "NVRM: Xid (PCI:0018:01:00): 145, RLW_RXPIPE Nonfatal XC0 i0 Link 13 (0x04 0x08)",
            {"unit": "RLW_RXPIPE", "link": "13"},
        ),
        ("NVRM: Xid (PCI:0000:c6:00): 79, pid=11, name=nvc:[driver], GPU has fallen off the bus.",
         {"pid": "11", "process": "nvc:[driver]"}),
        ("NVRM: Xid (PCI:0000:05:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.", {}),
    ],
)  # fmt: skip
def test_xid_labels(line: str, labels: dict[str, str]) -> None:
    (event,) = _events(line)
    assert event.labels == labels


@pytest.mark.parametrize(
    ("words", "action"),
    [
        ("0x1 (GPU Reset Required)", "RESET_GPU"),
        ("0x1 (PF FLR)", "RESET_GPU"),
        ("0x2 (Node Reboot Required)", "RESTART_BM"),
        ("0x2 (OS Reboot)", "RESTART_BM"),
        ("0x3 (Drain P2P)", "DRAIN_P2P"),
        ("0x4 (Drain and Reset)", "DRAIN_AND_RESET"),
        ("0x5 (Recover IMEX Domain)", "RECOVER_IMEX_DOMAIN"),
        ("0x0 (None)", "NONE"),
        ("0x2", "RESTART_BM"),
        ("(GPU Reset Required)", "RESET_GPU"),
        ("0x9 (Words of a later driver)", "CONTACT_SUPPORT"),
    ],
)
def test_verdict_gives_the_action_in_its_words(words: str, action: str) -> None:
    (event,) = _events(
        f"NVRM: Xid (PCI:0000:0d:00): 154, GPU recovery action changed from 0x0 (None) to {words}"
    )
    assert event.action == action


def test_off_bus_over_three_records_is_one_event() -> None:
    talk = Conversation()
    assert talk.read("NVRM: The NVIDIA GPU 0000:b3:00.0", strict=True) == []
    assert talk.read("NVRM: (PCI ID: 10de:26b5) installed in this system has", strict=True) == []
    (found,) = talk.read("NVRM: fallen off the bus and is not responding to commands.", strict=True)
    assert isinstance(found, Found)
    assert _key(found.event) == ("xid", "79", "0000:b3:00", "critical")


def test_off_bus_words_without_an_address_say_nothing() -> None:
    assert Conversation().read("NVRM: fallen off the bus and is not responding to commands.") == []


def test_record_of_several_lines_with_its_xid_counts_the_xid() -> None:
    events = _events(
        "NVRM: The NVIDIA GPU 0000:b3:00.0\\n NVRM: installed in this system has\\n"
        " NVRM: fallen off the bus and is not responding to commands.\\n"
        "NVRM: Xid (PCI:0000:b3:00.0): 79, pid=12345, GPU has fallen off the bus."
    )
    assert {_key(e) for e in events} == {("xid", "79", "0000:b3:00", "critical")}


def test_repeats_that_the_logger_folded_are_counted() -> None:
    (event,) = _events("kernel: message repeated 9 times: [ block nvme0n1: no available path - failing I/O]")
    assert (event.kind, event.count) == ("nvme", 9)


def test_edac_takes_its_own_count() -> None:
    (event,) = _events("EDAC MC0: 32 CE memory read error on DIMM_A1 (channel:1 slot:0)")
    assert (event.count, event.labels["dimm"]) == (32, "DIMM_A1")


def test_strict_takes_a_message_by_its_beginning_only() -> None:
    line = "x NVRM: Xid (PCI:0000:05:00): 79, GPU has fallen off the bus."
    assert classify(line) is not None
    assert classify(line, strict=True) is None


@pytest.mark.parametrize(
    ("text", "plain", "with_function"),
    [
        ("0000:DC:00.0", "0000:dc:00", "0000:dc:00.0"),
        ("00000000:04:00.0", "0000:04:00", "0000:04:00.0"),
        ("00010000:04:00.1", "10000:04:00", "10000:04:00.1"),
        ("18:00.0", "0000:18:00", "0000:18:00.0"),
        ("0002:00", "0000:02:00", "0000:02:00"),
    ],
)
def test_addresses_take_one_form(text: str, plain: str, with_function: str) -> None:
    assert address(text, function=False) == plain
    assert address(text, function=True) == with_function


@pytest.mark.parametrize(
    ("name", "disk"),
    [
        ("nvme0n1p1", "nvme0"),
        ("nvme1c2n1", "nvme1"),
        ("sda1", "sda"),
        ("sdaa", "sdaa"),
        ("dm-0", ""),
        ("md0", ""),
    ],
)
def test_disk_of_a_block_device(name: str, disk: str) -> None:
    assert disk_of(name) == disk


@pytest.mark.parametrize(
    ("line", "time"),
    [
        ("2024-04-29T14:55:41,679685+02:00 x", 1714395341.679685),
        ("[2026-04-22T21:25:20.466440686Z]: x", 1776893120.466440686),
        ("2026-04-22 21:25:20.5+00:00 x", 1776893120.5),
    ],
)
def test_wall_times(line: str, time: float) -> None:
    assert strip_prefix(line, NOW).time == pytest.approx(time)


def test_stamp_without_a_year_is_not_in_the_future(monkeypatch: pytest.MonkeyPatch) -> None:
    for line in ("Jan  1 00:00:00 h kernel: x", "Dec 31 23:59:59 h kernel: x", "[Sun Jun 14 10:00:00] x"):
        stamp = strip_prefix(line, NOW).time
        assert stamp is not None
        assert NOW - 367 * 86400 < stamp <= NOW + 86400


_WORDS = st.sampled_from(
    [
        *(rule.needle for rule in RULES),
        "NVRM: ", "Xid (PCI:0000:05:00): ", "79, ", "pid=", "name=", "nvidia-nvswitch0: ", "0000:05:00.0", ": ",
        "mlx5_core ", "EXT4-fs ", "(device sda1)", "error", "[", "]", "\\n", "\n", " ", "oom-kill:constraint=",
        "pcieport 0000:00:01.0: AER: ", "task=", ",", "XFS (sda1): ", "Dec  1 13:00:00 ", "kernel: ", "\x00", "é",
    ]
)  # fmt: skip


@settings(max_examples=300, deadline=None)
@given(
    st.one_of(
        st.text(max_size=300), st.lists(st.one_of(_WORDS, st.text(max_size=8)), max_size=40).map("".join)
    )
)
def test_any_text_is_read_without_a_crash(line: str) -> None:
    parts = strip_prefix(line, NOW)
    for found in Conversation().read(parts.message):
        if isinstance(found, Found):
            assert found.event.kind in EVENTS
            assert found.event.severity in SEVERITIES
            assert found.event.count >= 1


@settings(max_examples=60, deadline=None)
@given(word=_WORDS, times=st.integers(100, 4000), tail=_WORDS)
def test_long_repetitions_end(word: str, times: int, tail: str) -> None:
    """Patterns bound every run, so a hostile line costs little; a hang would end the suite's time limit."""
    Conversation().read(strip_prefix(word * times + tail, NOW).message)
