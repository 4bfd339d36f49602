"""What a test holds: a simulated driver in a folder of its own, whose state it may change while others read it."""

from __future__ import annotations

import ctypes
import mmap
import shutil
import struct
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from simnvml import build
from simnvml.layout import (
    CALLS,
    LAYOUT_VERSION,
    MAGIC,
    MAX_EVENTS,
    MAX_GPUS,
    VALUE_TYPES,
    VALUES,
    Cell,
    Fault,
    Gpu,
    State,
)
from simnvml.profiles import FLAT_LINK_FIELDS, PROFILES, Profile

NOT_SUPPORTED = 3
MARK = "-simulated"
DRIVER = "570.86.15"
UNKNOWN_DEVICE = MAX_GPUS + 7
_CALL = {name: number for number, name in enumerate(CALLS)}
_VALUE = {name: number for number, name in enumerate(VALUES)}


class SimulatedDriver:
    """A driver with `gpus` GPUs of the named profiles. `library` is what to load; the state lies beside it.

    `without` names symbols an older driver does not have. Everything may be changed at any time.
    """

    def __init__(
        self,
        folder: Path,
        gpus: int | Iterable[str] = 1,
        profile: str = "H100",
        *,
        without: Iterable[str] = (),
        driver: str = DRIVER,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.library = folder / build.SONAME
        shutil.copyfile(build.library(without), self.library)
        path = folder / "state"
        with path.open("wb") as file:
            file.truncate(ctypes.sizeof(State))
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), ctypes.sizeof(State))
        self.state = State.from_buffer(self._memory)
        self.state.magic, self.state.version = MAGIC, LAYOUT_VERSION
        self.state.library_version = self.state.kernel_version = f"{driver}{MARK}".encode()
        for slot in range(MAX_GPUS):
            self._blank(self.state.gpu[slot])
        for slot, name in enumerate([profile] * gpus if isinstance(gpus, int) else gpus):
            self.insert(slot, PROFILES[name])

    # ---- whole GPUs ----

    def insert(self, slot: int, profile: Profile) -> None:
        """Put a GPU into a slot; the UUID and the bus address follow from the slot."""
        gpu = self.state.gpu[slot]
        with self.update():
            self._blank(gpu)
            gpu.domain, gpu.bus, gpu.device = 0, 0x07 + 8 * slot, 0
            gpu.uuid = f"GPU-5151fa7e-0000-4000-8000-{slot:012x}".encode()
            gpu.name = profile.name.encode()
            for member, text in profile.texts.items():
                setattr(gpu, member, text.encode())
            gpu.links = profile.links
            for fan, percent in enumerate(profile.fans):
                gpu.fan_pct[fan] = percent
            for name, value in profile.values.items():
                self._put(gpu.value[_VALUE[name]], value, "uint")
            for field, value in profile.fields.items():
                self._put(gpu.field[0][field], value, "ull")
            for field, value in profile.link_fields.items():
                for link in range(profile.links):
                    self._put(gpu.field[link][field], value, "ull")
            for location in profile.ecc_locations:
                for kind in (0, 1):
                    for counter in (0, 1):
                        self._put(gpu.ecc[kind][counter][location], 0, "ull")
            gpu.present = 1

    def remove(self, slot: int) -> None:
        """The GPU falls off the bus: its handle is lost, and the next init does not count it."""
        self.state.gpu[slot].present = 0

    def restore(self, slot: int) -> None:
        """The GPU is back; those who hold the library open see it once they open it anew."""
        self.state.gpu[slot].present = 1

    def break_gpu(self, slot: int, error: int) -> None:
        """Every call for this GPU answers `error` (15 lost, 16 reset required); 0 heals."""
        self.state.gpu[slot].error = error

    # ---- readings ----

    def set(self, slot: int, **values: int) -> None:
        """Set readings by name, all at once for a reader."""
        with self.update():
            for name, value in values.items():
                self._put(self.state.gpu[slot].value[_VALUE[name]], value, "uint")

    def unsupport(self, slot: int, *names: str, error: int = NOT_SUPPORTED) -> None:
        """Readings that answer with an error from now on."""
        for name in names:
            self.state.gpu[slot].value[_VALUE[name]].ret = error

    def set_field(
        self, slot: int, field: int, value: float, *, link: int = 0, type: str = "ull", error: int = 0
    ) -> None:
        """Set what a field answers: its value in an NVML value type, or an error."""
        with self.update():
            self._put(self.state.gpu[slot].field[link][field], value, type)
            self.state.gpu[slot].field[link][field].ret = error

    def set_link_errors(self, slot: int, link: int, **counts: int) -> None:
        """Per-link counters up to NVLink 4: crc_flit, crc_data, replay, recovery; link below 12."""
        for name, count in counts.items():
            self.set_field(slot, FLAT_LINK_FIELDS[name][link], count)

    def set_ecc(
        self, slot: int, *, uncorrected: bool, location: int, count: int, aggregate: bool = True
    ) -> None:
        """Set one ECC counter by location (2 DRAM, 7 SRAM)."""
        self._put(self.state.gpu[slot].ecc[int(uncorrected)][int(aggregate)][location], count, "ull")

    def set_processes(self, slot: int, pids: list[int], used_bytes: int = 1 << 30) -> None:
        gpu = self.state.gpu[slot]
        with self.update():
            gpu.processes = len(pids)
            for place, pid in enumerate(pids):
                gpu.process[place].pid, gpu.process[place].used = pid, used_bytes

    # ---- trouble ----

    def fail(self, call: str, error: int, slot: int | None = None) -> None:
        """Let a call answer `error`, for one GPU or for all; 0 heals."""
        self._fault(call, slot).error = error

    def hang(self, call: str, slot: int | None = None) -> None:
        """Let a call hang until `release`."""
        self._fault(call, slot).hang = 1

    def release(self, call: str, slot: int | None = None) -> None:
        self._fault(call, slot).hang = 0

    def slow(self, call: str, microseconds: int, slot: int | None = None) -> None:
        self._fault(call, slot).latency_us = microseconds

    def calls(self, call: str, slot: int | None = None) -> int:
        """How often a call was made so far, by every process."""
        return int(self._fault(call, slot).calls)

    def raise_event(self, slot: int, type: int, data: int = 0) -> None:
        """An event for those who wait on an event set; `UNKNOWN_DEVICE` as slot cannot be looked up."""
        place = self.state.event[self.state.events % MAX_EVENTS]
        place.type, place.data, place.slot = type, data, slot
        place.gpu_instance = place.compute_instance = 0xFFFFFFFF
        self.state.events += 1

    def xid(self, slot: int, number: int) -> None:
        self.raise_event(slot, 0x8, number)

    def reload(self) -> None:
        """The driver is loaded anew: open sessions end, energy and volatile counters begin at zero."""
        with self.update():
            self.state.generation += 1
            for gpu in self.state.gpu:
                if gpu.present:
                    gpu.value[_VALUE["energy_mj"]].value = 0
                    gpu.field[0][83].value = 0

    def upgrade(self, version: str, *, library_too: bool = True) -> None:
        """Another driver version is loaded; processes that hold the old library get a version mismatch."""
        self.reload()
        with self.update():
            self.state.kernel_version = f"{version}{MARK}".encode()
            if library_too:
                self.state.library_version = f"{version}{MARK}".encode()

    @contextmanager
    def update(self) -> Iterator[None]:
        """Changes made inside are seen by readers together or not at all. May be nested."""
        outer = not self.state.sequence & 1
        if outer:
            self.state.sequence += 1
        try:
            yield
        finally:
            if outer:
                self.state.sequence += 1

    def _fault(self, call: str, slot: int | None) -> Fault:
        owner = self.state if slot is None else self.state.gpu[slot]
        fault: Fault = owner.fault[_CALL[call]]
        return fault

    @staticmethod
    def _put(cell: Cell, value: float, type: str) -> None:
        bits = (
            struct.pack("<d", value)
            if type == "double"
            else (int(value) & (1 << 64) - 1).to_bytes(8, "little")
        )
        cell.ret, cell.type, cell.value = 0, VALUE_TYPES[type], int.from_bytes(bits, "little")

    @staticmethod
    def _blank(gpu: Gpu) -> None:
        ctypes.memset(ctypes.addressof(gpu), 0, ctypes.sizeof(gpu))
        refused = Cell(NOT_SUPPORTED, 0, 0)
        for cells in (gpu.value, gpu.field[0]):
            for place in range(len(cells)):
                cells[place] = refused
        row = bytes(gpu.field[0])
        for link in range(1, len(gpu.field)):
            ctypes.memmove(ctypes.addressof(gpu.field[link]), row, len(row))
        for kind in (0, 1):
            for counter in (0, 1):
                for location in range(len(gpu.ecc[0][0])):
                    gpu.ecc[kind][counter][location] = refused
