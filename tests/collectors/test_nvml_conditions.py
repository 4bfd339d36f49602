"""What is told of GPUs, decided without any GPU: each trouble once, its end once."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forewarn.collectors.base import Event
from forewarn.collectors.nvml_child import Child, ChildGoneError
from forewarn.collectors.nvml_conditions import Conditions, coalesce
from forewarn.collectors.nvml_fields import FIELDS, FLAT_LINK_FIELDS, LINK_FIELDS, Tier, bit_error_rate
from forewarn.collectors.nvml_protocol import LENGTH, Done, Fault, Gpu, Hello, Notice, Part, Reply, frame


def hello(*names: str, driver: str = "570.1", error: int = 0) -> Hello:
    gpus = [Gpu(device=n, uuid=f"GPU-{n}", model="m", pci=f"0000:0{n[-1]}:00", labels={}) for n in names]
    if error:
        gpus.append(Gpu(device="", uuid="", model="", pci=None, labels={}, error=error))
    return Hello(driver=driver, simulated=True, gpus=gpus, events=True)


def part(device: str, *codes: int, tier: str = "fast", **metrics: float) -> Part:
    own: Tier = "medium" if tier == "medium" else "fast"
    return Part(
        device=device,
        tiers=["fast", "medium"] if tier == "medium" else ["fast"],
        samples=[(name, value, "") for name, value in metrics.items()],
        faults=[Fault(code=c, call=f"call{c}", message="m", tier=own) for c in codes],
        refused=[],
    )


def told(events: list[Event]) -> list[tuple[str, str, str]]:
    return [(e.device, e.kind, e.code) for e in events]


def test_a_gpu_that_is_away_is_missing_once_and_returns_once() -> None:
    state = Conditions()
    assert not state.hello(hello("gpu0", "gpu1"))
    assert told(state.hello(hello("gpu0"))) == [("gpu1", "gpu_missing", "missing")]
    assert state.troubled and [d.device for d in state.present()] == ["gpu0"]
    assert not state.hello(hello("gpu0"))
    assert told(state.hello(hello("gpu0", "gpu1"))) == [("gpu1", "gpu_returned", "returned")]
    assert not state.troubled


def test_a_lost_gpu_is_not_missing_as_well() -> None:
    state = Conditions()
    state.hello(hello("gpu0", "gpu1"))
    assert told(state.part(part("gpu1", 15))) == [("gpu1", "gpu_lost", "lost")]
    assert not state.hello(hello("gpu0"))
    assert told(state.hello(hello("gpu0", "gpu1"))) == [("gpu1", "gpu_returned", "returned")]


def test_a_known_gpu_that_cannot_be_opened_is_told_by_name() -> None:
    state = Conditions()
    state.hello(hello("gpu0", "gpu1"))
    assert told(state.hello(hello("gpu0", error=15))) == [("gpu1", "gpu_missing", "missing")]


@pytest.mark.parametrize(("error", "kind"), [(15, "gpu_lost"), (16, "gpu_reset_required")])
def test_an_unknown_gpu_that_cannot_be_opened_is_told_once(error: int, kind: str) -> None:
    state = Conditions()
    assert [e.kind for e in state.hello(hello("gpu0", error=error))] == [kind]
    assert not state.hello(hello("gpu0", error=error))


def test_failing_calls_of_a_slower_tier_count_their_own_polls() -> None:
    """Between two polls of the medium tier there are many of the fast one, and they say nothing of it."""
    state = Conditions()
    state.hello(hello("gpu0"))
    seen = []
    for _ in range(3):
        seen += state.part(part("gpu0", 999, tier="medium"))
        for _ in range(5):
            seen += state.part(part("gpu0"))
    assert told(seen) == [("gpu0", "gpu_driver_error", "unknown")]


def test_failing_calls_that_succeed_between_are_not_told() -> None:
    state = Conditions()
    state.hello(hello("gpu0"))
    seen = []
    for _ in range(10):
        seen += state.part(part("gpu0", 10)) + state.part(part("gpu0", 10)) + state.part(part("gpu0"))
    assert not seen


def energies(state: Conditions, **joules: float) -> list[tuple[str, str, str]]:
    return told(state.energies([part(d, gpu_energy_joules_total=v) for d, v in joules.items()]))


def test_energy_that_begins_anew() -> None:
    state = Conditions()
    state.hello(hello("gpu0", "gpu1", "gpu2"))
    assert not energies(state, gpu0=10, gpu1=10, gpu2=10)
    assert not energies(state, gpu0=11, gpu1=10, gpu2=12)
    assert energies(state, gpu0=12, gpu1=1, gpu2=13) == [("gpu1", "gpu_reset", "reset")]
    assert energies(state, gpu0=1, gpu1=0, gpu2=2) == [("", "driver_reloaded", "reloaded")]
    assert not energies(state, gpu0=2, gpu1=3, gpu2=4)


def test_another_driver_version_is_told_and_its_energies_are_no_news() -> None:
    state = Conditions()
    state.hello(hello("gpu0", "gpu1"))
    energies(state, gpu0=10, gpu1=10)
    assert told(state.hello(hello("gpu0", "gpu1", driver="580.1"))) == [("", "driver_reloaded", "upgraded")]
    assert not energies(state, gpu0=1, gpu1=1)


def test_the_recovery_action_is_told_at_each_change_and_not_when_it_goes() -> None:
    state = Conditions()
    state.hello(hello("gpu0"))
    actions = [e.action for n in (0, 1, 1, 4, 0, 1) for e in state.part(part("gpu0", gpu_recovery_action=n))]
    assert actions == ["RESET_GPU", "DRAIN_AND_RESET", "RESET_GPU"]


def notice(**more: object) -> Notice:
    plain = {"type": "notice", "device": "", "pci": None, "event": 8, "data": 79, "seen": 0.0}
    return msgspec.convert({**plain, **more}, Notice)


def test_an_xid_is_matched_by_address_when_the_handle_is_unknown() -> None:
    state = Conditions()
    state.hello(hello("gpu0", "gpu1"))
    event = state.notice(notice(pci="0000:01:00"), 5.0)
    assert event is not None and (event.device, event.time) == ("gpu1", 5.0)


def test_an_xid_outside_of_the_table_is_told_all_the_same() -> None:
    event = Conditions().notice(notice(data=99999), 1.0)
    assert event is not None and (event.code, event.severity) == ("99999", "warning")


def test_mig_instances_are_named() -> None:
    event = Conditions().notice(notice(gpu_instance=1, compute_instance=0), 1.0)
    assert event is not None and event.labels == {
        "source": "nvml",
        "gpu_instance": "1",
        "compute_instance": "0",
    }


def test_a_pushed_recovery_action_is_not_told_again_by_the_poll() -> None:
    state = Conditions()
    state.hello(hello("gpu0"))
    event = state.notice(notice(device="gpu0", event=0x8000, data=1), 1.0)
    assert event is not None and event.action == "RESET_GPU"
    assert not state.part(part("gpu0", gpu_recovery_action=1))


def test_events_that_nobody_asked_for_are_left_alone() -> None:
    assert Conditions().notice(notice(event=0x4), 1.0) is None


def test_coalescing_keeps_the_first_and_counts() -> None:
    one = Event(device="gpu0", kind="xid", code="31", severity="warning", message="m", time=1.0)
    later = msgspec.structs.replace(one, time=2.0, count=3)
    other = msgspec.structs.replace(one, device="gpu1")
    assert coalesce([one, other, later]) == [msgspec.structs.replace(one, count=4), other]


@pytest.mark.parametrize(
    ("packed", "rate"), [(0x30C, 3e-12), (0xF0F, 15e-15), (0x100, 1.0), (0, 0.0), (0x0FF, 0.0)]
)
def test_bit_error_rates(packed: int, rate: float) -> None:
    assert bit_error_rate(packed) == pytest.approx(rate)


def test_no_field_is_asked_twice() -> None:
    ids = (
        [f.id for f in FIELDS]
        + [f.id for f in LINK_FIELDS]
        + [i for flat in FLAT_LINK_FIELDS.values() for i in flat]
    )
    assert len(ids) == len(set(ids))


# ---- the pipe ----


@pytest.fixture
def child(monkeypatch: pytest.MonkeyPatch) -> Iterator[Child]:
    """A child whose words the test puts into its mouth."""
    real = subprocess.Popen

    def popen(command: list[str], **options: object) -> subprocess.Popen[bytes]:
        return real([sys.executable, "-c", "import sys; sys.stdin.read()"], **options)  # type: ignore[call-overload, no-any-return]  # options are the child's own

    monkeypatch.setattr(subprocess, "Popen", popen)
    made = Child()
    yield made
    made.kill()


def say(child: Child, data: bytes) -> list[Reply]:
    source, sink = os.pipe()
    os.write(sink, data)
    os.close(sink)
    os.dup2(source, child._output.fileno())
    os.close(source)
    os.set_blocking(child._output.fileno(), False)
    return child.receive(0.0)


def test_whole_frames_are_read_from_pieces(child: Child) -> None:
    assert say(child, frame(Done(restart=0)) + frame(Done(restart=18))[:3]) == [Done(restart=0)]
    assert say(child, frame(Done(restart=18))[3:]) == [Done(restart=18)]


@pytest.mark.parametrize(
    "data",
    [LENGTH.pack(1 << 31) + b"x", LENGTH.pack(3) + b"abc", LENGTH.pack(1) + b"\xc0"],
    ids=["huge", "bytes", "null"],
)
def test_nonsense_ends_the_child(child: Child, data: bytes) -> None:
    with pytest.raises(ChildGoneError, match="sent"):
        say(child, data)


@given(st.binary(max_size=200))
def test_any_bytes_give_frames_or_the_one_error(data: bytes) -> None:
    child = Child.__new__(Child)
    child._buffer = bytearray(data)
    child._decoder = msgspec.msgpack.Decoder(Reply)
    try:
        child._take()
    except ChildGoneError as error:
        assert "the NVML process sent" in str(error)
