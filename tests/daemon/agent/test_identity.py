"""Which device an event is about, and which events are one."""

from __future__ import annotations

import pytest

from fakes_agent import renamed
from forewarn.collectors.base import Device, Event
from forewarn.daemon.agent.identity import PciMap, Twins, pci_key

XID = Event("", "xid", "79", "critical", "fallen off the bus", time=1000.0, pci="0000:3b:00")


@pytest.mark.parametrize(
    ("spelling", "key"),
    [
        ("0000:3b:00", "0000:3b:00"),
        ("00000000:3B:00.0", "0000:3b:00"),
        ("3b:00.0", "0000:3b:00"),
        ("0001:AF:1f", "0001:af:1f"),
        ("", ""),
        (None, ""),
        ("not an address", ""),
    ],
)
def test_every_spelling_of_an_address_is_one(spelling: str | None, key: str) -> None:
    assert pci_key(spelling) == key


def test_an_event_gets_its_device_by_address() -> None:
    pci = PciMap()
    pci.learn([Device("gpu3", "gpu", pci="00000000:3B:00.0")])
    assert pci.resolve(XID).device == "gpu3"
    assert pci.resolve(renamed(XID, device="gpu1")).device == "gpu1"
    assert pci.resolve(renamed(XID, pci="0000:99:00")).device == ""


def test_one_xid_told_by_two_sources_is_one() -> None:
    twins = Twins()
    assert not twins.is_repeat(XID, "kernel_log")
    assert twins.is_repeat(renamed(XID, time=1004.9, device="gpu3"), "nvml")


@pytest.mark.parametrize(
    "other",
    [{"time": 1005.1}, {"code": "48"}, {"pci": "0000:5e:00"}, {"kind": "sxid"}],
    ids=["later", "other code", "other GPU", "other kind"],
)
def test_what_differs_is_another_event(other: dict[str, object]) -> None:
    twins = Twins()
    twins.is_repeat(XID, "kernel_log")
    assert not twins.is_repeat(renamed(XID, **other), "nvml")


def test_two_xids_seen_by_both_sources_stay_two() -> None:
    twins = Twins()
    kept = [not twins.is_repeat(renamed(XID, time=t), "kernel_log") for t in (1000, 1001)]
    kept += [not twins.is_repeat(renamed(XID, time=t), "nvml") for t in (1000, 1001)]
    assert kept == [True, True, False, False]


def test_the_same_source_twice_is_twice() -> None:
    twins = Twins()
    assert not twins.is_repeat(XID, "kernel_log")
    assert not twins.is_repeat(XID, "kernel_log")
