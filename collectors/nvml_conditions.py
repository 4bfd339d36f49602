"""What is wrong with GPUs as NVML tells it, as events: each trouble is told once, and once more when it is over.

Pure decisions: what the child process said goes in, events come out.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from forewarn.collectors.base import Device, Event
from forewarn.collectors.nvml_fields import Tier
from forewarn.collectors.nvml_protocol import Fault, Hello, Notice, Part
from forewarn.collectors.xids import RECOVERY_ACTIONS, xid_fact

LABELS = {"source": "nvml"}
GPU_IS_LOST = 15
RESET_REQUIRED = 16
TIMEOUT = 10
UNKNOWN = 999
REPEATS_THAT_COUNT = 3
"""Polls in a row with failing calls before it is told: one may be chance."""

_NOTICES: dict[int, tuple[str, str, str, str]] = {
    0x2: ("double_bit_ecc", "error", "RESET_GPU", "uncorrectable memory error"),
    0x100: ("mig_changed", "info", "", "MIG was configured anew"),
    0x200: ("single_bit_ecc_storm", "warning", "", "storm of corrected memory errors"),
    0x400: ("dram_retirement", "warning", "", "memory was retired"),
    0x800: ("dram_retirement_failure", "error", "REPLACE_GPU", "memory could not be retired"),
    0x1000: ("poison_nonfatal", "warning", "RESTART_APP", "poisoned data was used; contained"),
    0x2000: ("poison_fatal", "critical", "RESET_GPU", "poisoned data was used; not contained"),
    0x4000: ("gpu_unavailable", "critical", "RESET_GPU", "the driver gave the GPU up"),
    0x8000: ("recovery_action", "error", "", "the driver asks for a recovery action"),
}
"""NVML event type to code, severity, action, meaning. XIDs have a table of their own."""


class Memory(msgspec.Struct):
    """What is kept between runs of the agent: GPUs by UUID, what was told, the last energies."""

    known: dict[str, Device] = {}
    missing: list[str] = []
    raised: list[tuple[str, str]] = []
    energy: dict[str, float] = {}
    recovery: dict[str, int] = {}
    driver: str = ""


class Conditions:
    """Remembers which GPUs were seen and what was already told of them."""

    def __init__(self) -> None:
        self.known: dict[str, Device] = {}
        """Every GPU ever seen, by UUID."""
        self._missing: set[str] = set()
        self._raised: set[tuple[str, str]] = set()
        self._streaks: dict[tuple[str, str], int] = {}
        """Polls in a row in which a call of a GPU failed, by device and call."""
        self._streak_tier: dict[tuple[str, str], Tier] = {}
        self._energy: dict[str, float] = {}
        self._recovery: dict[str, int] = {}
        self._driver = ""

    @property
    def names(self) -> dict[str, str]:
        """Local name of every GPU ever seen, by UUID and by slot (`pci-ADDRESS`)."""
        slots = {f"pci-{device.pci}": device.device for device in self.known.values() if device.pci}
        return {**slots, **{uuid: device.device for uuid, device in self.known.items()}}

    @property
    def troubled(self) -> bool:
        """Whether some GPU is away or lost: only a new NVML session can find it again."""
        return bool(self._missing) or any(kind == "gpu_lost" for _, kind in self._raised)

    def hello(self, hello: Hello) -> list[Event]:
        """NVML was opened: who is there, who is not, is the driver another."""
        events: list[Event] = []
        if self._driver and hello.driver != self._driver:
            events.append(
                _event(
                    "",
                    "driver_reloaded",
                    "upgraded",
                    "warning",
                    f"the NVIDIA driver is now {hello.driver}, it was {self._driver}",
                )
            )
            self._energy.clear()
        self._driver = hello.driver
        present = set()
        first = not self.known
        for gpu in hello.gpus:
            if gpu.error:
                if first:  # a known one is told as missing, by name
                    events += self._unreachable(gpu.error)
                continue
            present.add(gpu.uuid)
            for other in [u for u, d in self.known.items() if d.device == gpu.device and u != gpu.uuid]:
                del self.known[other]  # another board in its slot, or the same one by another identity
                self._missing.discard(other)
                self._energy.pop(gpu.device, None)
            labels = {"driver": hello.driver, **gpu.labels}
            self.known[gpu.uuid] = Device(
                device=gpu.device,
                kind="gpu",
                model=gpu.model,
                serial="" if gpu.uuid.startswith("pci-") else gpu.uuid,
                pci=gpu.pci,
                simulated=hello.simulated,
                labels=labels,
            )
        if not any(gpu.error for gpu in hello.gpus):
            self._raised.discard(("", "gpu_lost"))
        for uuid in present & self._missing:
            device = self.known[uuid]
            self._missing.discard(uuid)
            self._raised.discard((device.device, "gpu_lost"))
            self._energy.pop(device.device, None)  # it was reset on the way; its own return says enough
            events.append(
                _event(device.device, "gpu_returned", "returned", "info", "the GPU is back", device.pci)
            )
        return events + self.missing(set(self.known) - present)

    def memory(self) -> Memory:
        """What a later run should know."""
        return Memory(
            known=self.known,
            missing=sorted(self._missing),
            raised=sorted(self._raised),
            energy=self._energy,
            recovery=self._recovery,
            driver=self._driver,
        )

    def recall(self, memory: Memory) -> None:
        """Go on from an earlier run. A GPU that was told to be missing then is let go: it may never come back."""
        self.known = {uuid: device for uuid, device in memory.known.items() if uuid not in memory.missing}
        names = {device.device for device in self.known.values()}
        self._raised = {(device, kind) for device, kind in memory.raised if device in names}
        self._energy = {name: value for name, value in memory.energy.items() if name in names}
        self._recovery = {name: value for name, value in memory.recovery.items() if name in names}
        self._driver = memory.driver

    def all_missing(self) -> list[Event]:
        """NVML cannot be opened any more: every GPU that was there is away."""
        return self.missing(self.known)

    def missing(self, uuids: Iterable[str]) -> list[Event]:
        """These GPUs are not there. One that was told to be lost is not told to be missing as well."""
        events = []
        for uuid in sorted(uuids, key=lambda u: self.known[u].device):
            device = self.known[uuid]
            if uuid not in self._missing and (device.device, "gpu_lost") not in self._raised:
                events.append(
                    _event(
                        device.device,
                        "gpu_missing",
                        "missing",
                        "critical",
                        f"the GPU {uuid} was there before and is not found any more",
                        device.pci,
                        "RESTART_BM",
                    )
                )
            self._missing.add(uuid)
        return events

    def present(self) -> list[Device]:
        """The GPUs that are there now."""
        there = [device for uuid, device in self.known.items() if uuid not in self._missing]
        return sorted(there, key=lambda device: (len(device.device), device.device))

    def part(self, part: Part) -> list[Event]:
        """One GPU was read."""
        events: list[Event] = []
        pci = self._pci(part.device)
        if part.faults or self._raised or self._streaks:
            codes = {fault.code for fault in part.faults}
            events += self._edge(part.device, pci, "gpu_lost", GPU_IS_LOST in codes, "lost", "RESTART_BM")
            events += self._edge(
                part.device, pci, "gpu_reset_required", RESET_REQUIRED in codes, "reset_required", "RESET_GPU"
            )
            events += self._failing(part, pci)
        recovery = next((int(v) for metric, v, _ in part.samples if metric == "gpu_recovery_action"), None)
        if recovery is not None and recovery != self._recovery.get(part.device, 0):
            self._recovery[part.device] = recovery
            if recovery:
                events.append(_recovery_event(part.device, pci, recovery))
        return events

    def energies(self, parts: Iterable[Part]) -> list[Event]:
        """Energy counters only grow while a driver is loaded: all anew is a driver reload, one of several a reset."""
        fallen, steady = [], 0
        for part in parts:
            energy = next((v for metric, v, _ in part.samples if metric == "gpu_energy_joules_total"), None)
            if energy is None:
                continue
            before = self._energy.get(part.device)
            self._energy[part.device] = energy
            if before is None:
                continue
            if energy < before:
                fallen.append(part.device)
            else:
                steady += 1
        if not fallen:
            return []
        if not steady and (len(fallen) > 1 or len(self.known) == 1):
            return [
                _event(
                    "", "driver_reloaded", "reloaded", "warning", "the energy counters of all GPUs began anew"
                )
            ]
        return [
            _event(
                device, "gpu_reset", "reset", "warning", "its energy counter began anew", self._pci(device)
            )
            for device in fallen
        ]

    def forget_energy(self) -> None:
        """A reload was told already: counters that begin anew are no news."""
        self._energy.clear()

    def notice(self, notice: Notice, time: float) -> Event | None:
        """An event the driver pushed, with all that is known of its device."""
        device, pci = notice.device, notice.pci
        if not device and pci:
            device = next((d.device for d in self.known.values() if d.pci == pci), "")
        labels = dict(LABELS)
        if notice.gpu_instance is not None:
            labels["gpu_instance"] = str(notice.gpu_instance)
        if notice.compute_instance is not None:
            labels["compute_instance"] = str(notice.compute_instance)
        if notice.event == 0x8:
            fact = xid_fact(notice.data)
            return Event(
                device=device,
                kind="xid",
                code=str(notice.data),
                severity=fact.severity if fact else "warning",
                message=f"XID {notice.data}: {fact.meaning if fact else 'not in the table of known XIDs'}",
                time=time,
                action=fact.action if fact else "",
                pci=pci,
                labels=labels,
            )
        if notice.event == 0x8000 and device:
            self._recovery[device] = notice.data
            event = _recovery_event(device, pci, notice.data)
            return msgspec.structs.replace(event, time=time, labels=labels) if notice.data else None
        if notice.event not in _NOTICES:
            return None
        code, severity, action, meaning = _NOTICES[notice.event]
        return Event(
            device=device,
            kind="gpu_event",
            code=code,
            severity=severity,
            message=meaning,
            time=time,
            action=action,
            pci=pci,
            labels=labels,
        )

    def _unreachable(self, error: int) -> list[Event]:
        """A GPU that NVML counts and cannot open; which one it is cannot be known from it."""
        kind = "gpu_reset_required" if error == RESET_REQUIRED else "gpu_lost"
        if ("", kind) in self._raised:
            return []
        self._raised.add(("", kind))
        return [
            _event(
                "",
                kind,
                "reset_required" if error == RESET_REQUIRED else "lost",
                "critical",
                f"NVML counts a GPU that it cannot open (code {error})",
                None,
                "RESET_GPU" if error == RESET_REQUIRED else "RESTART_BM",
            )
        ]

    def _edge(
        self, device: str, pci: str | None, kind: str, now: bool, code: str, action: str
    ) -> list[Event]:
        key = (device, kind)
        if now and key not in self._raised:
            self._raised.add(key)
            what = "is lost" if kind == "gpu_lost" else "needs a reset"
            return [_event(device, kind, code, "critical", f"NVML says that the GPU {what}", pci, action)]
        if not now and key in self._raised:
            self._raised.discard(key)
            if kind == "gpu_lost":
                return [_event(device, "gpu_returned", "returned", "info", "the GPU answers again", pci)]
        return []

    def _failing(self, part: Part, pci: str | None) -> list[Event]:
        faults = [f for f in part.faults if f.code not in (GPU_IS_LOST, RESET_REQUIRED)]
        failing = {(part.device, fault.call): fault for fault in faults}
        for key in [k for k in self._streaks if k[0] == part.device and k not in failing]:
            if self._streak_tier[key] in part.tiers:  # it was called and did not fail
                del self._streaks[key], self._streak_tier[key]
        worst = None
        for key, fault in failing.items():
            self._streak_tier[key] = fault.tier
            self._streaks[key] = self._streaks.get(key, 0) + 1
            if self._streaks[key] == REPEATS_THAT_COUNT and worst is None:
                worst = fault
        if worst is None:
            return []
        code = {TIMEOUT: "timeout", UNKNOWN: "unknown"}.get(worst.code, str(worst.code))
        message = f"NVML calls keep failing: {describe(faults)}"
        return [_event(part.device, "gpu_driver_error", code, "error", message, pci)]

    def _pci(self, device: str) -> str | None:
        return next((d.pci for d in self.known.values() if d.device == device), None)


def describe(faults: Iterable[Fault]) -> str:
    """Failing calls in a few words."""
    return ", ".join(f"{fault.call} ({fault.message})" for fault in faults)


def coalesce(events: Iterable[Event]) -> list[Event]:
    """Repeats of one event of one device become one, the first, with a count."""
    kept: dict[tuple[str, str | None, str, str], Event] = {}
    for event in events:
        key = (event.device, event.pci, event.kind, event.code)
        first = kept.get(key)
        kept[key] = (
            event if first is None else msgspec.structs.replace(first, count=first.count + event.count)
        )
    return list(kept.values())


def _recovery_event(device: str, pci: str | None, number: int) -> Event:
    action = RECOVERY_ACTIONS.get(number, str(number))
    return _event(
        device,
        "gpu_event",
        "recovery_action",
        "error",
        f"the driver asks for {action} (number {number})",
        pci,
        action,
    )


def _event(
    device: str, kind: str, code: str, severity: str, message: str, pci: str | None = None, action: str = ""
) -> Event:
    return Event(
        device=device,
        kind=kind,
        code=code,
        severity=severity,
        message=message,
        action=action,
        pci=pci,
        labels=LABELS,
    )
