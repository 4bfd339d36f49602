"""Reads GPUs through NVML in this process: what to call, what to make of each error, what not to ask again.

Runs in the child process of the collector, where a call that hangs harms nobody.
"""

from __future__ import annotations

import ctypes
import math
import struct
from collections.abc import Callable, Iterable
from typing import Any

import pynvml as nvml

from forewarn.collectors import nvml_fields as fields
from forewarn.collectors.clock import Clock
from forewarn.collectors.nvml_calls import ABSENT_CODES, CALLS, IN_FIELDS, Call, OpenGpu, Pairs
from forewarn.collectors.nvml_fields import Tier
from forewarn.collectors.nvml_protocol import Fault, Gpu, Part

RESTART_CODES = frozenset((1, 6, 9, 18))
"""UNINITIALIZED, NOT_FOUND, DRIVER_NOT_LOADED, LIB_RM_VERSION_MISMATCH: the session or its handles are void."""
FUNCTION_NOT_FOUND = 13
NO_PERMISSION = 4
GPU_IS_LOST = 15
RESET_REQUIRED = 16
NOT_READY = 27
FIELD_ABSENT_CODES = ABSENT_CODES | {6, FUNCTION_NOT_FOUND}
"""The same of one field: there NOT_FOUND speaks of the link, not of the handle."""
MAX_C2C_LINKS = 16
MAX_FAULTS_A_POLL = 3
"""A GPU that fails this many calls is left for the rest of the poll: each may have cost a driver timeout."""

_FIELD_VALUE = struct.Struct("<IIqqIiQ")
_DOUBLE = struct.Struct("<d")
_SIGNED = struct.Struct("<q")


class RestartError(Exception):
    """The session is void; `code` is the NVML code."""

    def __init__(self, code: int) -> None:
        super().__init__(f"NVML code {code}")
        self.code = code


class FieldBlock:
    """The fields of one tier of one GPU in one prepared array; those that are not supported drop out."""

    def __init__(self, entries: Iterable[tuple[int, int, Any]], probe_at: float) -> None:
        self.probe_at = probe_at
        self.chunks: list[tuple[Any, list[Any]]] = []
        self._prepare(list(entries))

    def _prepare(self, entries: list[tuple[int, int, Any]]) -> None:
        self.chunks = []
        for start in range(0, len(entries), fields.MAX_FIELDS_A_CALL):
            part = entries[start : start + fields.MAX_FIELDS_A_CALL]
            array = (nvml.c_nvmlFieldValue_t * len(part))()
            for place, (field, scope, _) in enumerate(part):
                array[place].fieldId, array[place].scopeId = field, scope
            self.chunks.append((array, [key for _, _, key in part]))

    def read(self, handle: Any) -> tuple[list[tuple[Any, int | float]], list[tuple[int, Any]]]:
        """(key, value) of what answered, and (code, key) of what failed. Raises NVMLError for the call as a whole."""
        values: list[tuple[Any, int | float]] = []
        failures: list[tuple[int, Any]] = []
        kept: list[tuple[int, int, Any]] = []
        for array, keys in self.chunks:
            for key, (field, scope, _, _, kind, code, bits) in zip(keys, _rows(handle, array), strict=True):
                if not code:
                    values.append((key, _value(kind, bits)))
                else:
                    failures.append((code, key))
                if code not in FIELD_ABSENT_CODES:
                    kept.append((field, scope, key))
        if len(kept) != sum(len(keys) for _, keys in self.chunks):
            self._prepare(kept)
        return values, failures


def _rows(handle: Any, array: Any) -> list[tuple[int, ...]]:
    """One call's entries as NVML filled them. Where it refuses the call as a whole, as a driver may that does not
    know one of the fields, each half is asked by itself, down to the field that is at fault."""
    # The array is made once and read as bytes: building and reading it field by field, as the wrapper of pynvml
    # does, costs more than all other calls of a poll together.
    code = nvml.nvmlLib.nvmlDeviceGetFieldValues(handle, ctypes.c_int(len(array)), array)
    if not code:
        return list(_FIELD_VALUE.iter_unpack(bytes(array)))
    if code not in ABSENT_CODES:
        raise nvml.NVMLError(code)
    if len(array) == 1:
        return [(array[0].fieldId, array[0].scopeId, 0, 0, 0, code, 0)]
    rows: list[tuple[int, ...]] = []
    middle = len(array) // 2
    for part in (array[:middle], array[middle:]):
        rows += _rows(handle, (nvml.c_nvmlFieldValue_t * len(part))(*part))
    return rows


def _value(kind: int, bits: int) -> int | float:
    """The union of a field value by its type; the upper bytes of a narrow type are not the driver's."""
    if kind == 3 or kind == 2:
        return bits
    if kind == 1:
        return bits & 0xFFFFFFFF
    if kind == 0:
        return float(_DOUBLE.unpack(bits.to_bytes(8, "little"))[0])
    if kind == 4:
        return int(_SIGNED.unpack(bits.to_bytes(8, "little"))[0])
    if kind == 5:
        return (bits & 0xFFFFFFFF) - ((bits & 0x80000000) << 1)
    return bits & 0xFFFF


def text(value: Any) -> str:
    """Text of NVML, which comes as str from some calls and as bytes from others."""
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)


def code_of(error: Exception) -> int:
    """The NVML code of an error. Errors of pynvml must not be compared or put into sets; their codes may."""
    if isinstance(error, nvml.NVMLLibraryMismatchError):
        return FUNCTION_NOT_FOUND  # raised, outside of NVMLError, when an unversioned call has no symbol
    return int(getattr(error, "value", 999))


def pci_address(bus_id: str) -> str | None:
    """`dddd:bb:dd` of NVML's `00000000:07:00.0`; longer domains (VMD) keep their digits."""
    domain, _, rest = bus_id.partition(":")
    try:
        bus, device = rest.split(".")[0].split(":")
        return f"{int(domain, 16):04x}:{int(bus, 16):02x}:{int(device, 16):02x}"
    except ValueError:
        return None


class Reader:
    """Reads open GPUs. Knows per GPU what is not supported and asks that again only after `probe_after_s`."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._calls = {tier: [call for call in CALLS if call.tier == tier] for tier in fields.TIERS}

    def read(self, gpu: OpenGpu, tiers: Iterable[Tier], now: float, probe_after_s: float) -> Part:
        """One GPU. Raises RestartError when the session is void."""
        part = Part(device=gpu.device, tiers=list(tiers), samples=[], faults=[], refused=[])
        started = self._clock.monotonic()
        for tier in tiers:
            if not self._read_tier(gpu, tier, now, probe_after_s, part):
                break
        part.samples.append(("gpu_nvml_call_seconds", self._clock.monotonic() - started, ""))
        return part

    def _read_tier(self, gpu: OpenGpu, tier: Tier, now: float, probe_after_s: float, part: Part) -> bool:
        """False when the GPU gave so much trouble that the rest of it must be left."""
        add = part.samples.append
        if not self._read_fields(gpu, tier, now, probe_after_s, part):
            return False
        answered = {metric for metric, _, _ in part.samples} if tier == "medium" else ()
        absent = gpu.absent
        for call in self._calls[tier]:
            name = call.name
            if absent and now < absent.get(name, now):
                continue
            if name in IN_FIELDS and (
                IN_FIELDS[call.name] in answered or gpu.device in self._served_by_fields(gpu, call.name)
            ):
                continue
            try:
                pairs = self._try_ways(gpu, call)
            except (nvml.NVMLError, nvml.NVMLLibraryMismatchError) as error:
                if not self._note(gpu, call.name, error, tier, now, probe_after_s, part):
                    return False
                continue
            for metric, value in pairs:
                add((metric, float(value), ""))
            if call.name == "mig" and pairs:
                self._mig(gpu, pairs[0][1])
        if tier == "medium":
            return self._read_link_states(gpu, now, probe_after_s, part)
        return True

    @staticmethod
    def _served_by_fields(gpu: OpenGpu, name: str) -> set[str]:
        """The GPU's name when a field block read in another tier holds this call's metric."""
        metric = IN_FIELDS[name]
        held = any(metric in keys for block in gpu.blocks.values() for _, keys in block.chunks)
        return {gpu.device} if held else set()

    @staticmethod
    def _mig(gpu: OpenGpu, enabled: float) -> None:
        if gpu.mig is not None and gpu.mig != enabled:
            gpu.forget()
        gpu.mig = enabled

    @staticmethod
    def _try_ways(gpu: OpenGpu, call: Call) -> Pairs:
        way = gpu.way.get(call.name, 0)
        while True:
            try:
                return call.ways[way](gpu)
            except (nvml.NVMLError, nvml.NVMLLibraryMismatchError) as error:
                if way + 1 == len(call.ways) or code_of(error) not in (*ABSENT_CODES, FUNCTION_NOT_FOUND):
                    raise
                way += 1
                gpu.way[call.name] = way

    @staticmethod
    def _note(
        gpu: OpenGpu, name: str, error: Exception, tier: Tier, now: float, probe_after_s: float, part: Part
    ) -> bool:
        """Remember what an error says. False when the rest of this GPU must be left."""
        code = code_of(error)
        if code in RESTART_CODES:
            raise RestartError(code)
        if code == FUNCTION_NOT_FOUND:
            gpu.absent[name] = math.inf
        elif code in ABSENT_CODES:
            gpu.absent[name] = now + probe_after_s
            gpu.way.pop(name, None)
        elif code == NO_PERMISSION:
            gpu.absent[name] = now + probe_after_s
            part.refused.append(name)
        elif code != NOT_READY:
            part.faults.append(Fault(code=code, call=name, message=str(error), tier=tier))
            return code != GPU_IS_LOST and len(part.faults) < MAX_FAULTS_A_POLL
        return True

    # ---- fields ----

    def _read_fields(self, gpu: OpenGpu, tier: Tier, now: float, probe_after_s: float, part: Part) -> bool:
        name = f"fields_{tier}"
        until = gpu.absent.get(name)
        if until is not None and now < until:
            return True
        block = gpu.blocks.get(tier)
        try:
            if block is None or now >= block.probe_at:
                if tier == "medium":
                    gpu.links = None  # what may be asked again includes whether there are links
                block = gpu.blocks[tier] = FieldBlock(self._entries(gpu, tier), now + probe_after_s)
            values, failures = block.read(gpu.handle)
        except AttributeError:
            gpu.absent[name] = math.inf  # no such symbol in this library
            return True
        except nvml.NVMLError as error:
            return self._note(gpu, name, error, tier, now, probe_after_s, part)
        links: dict[tuple[str, str], float] = {}
        pools: dict[str, str] = {}
        for key, value in values:
            if key.__class__ is fields.Field:
                part.samples.append((key.metric, value * key.scale, ""))
            else:
                metric, label, pool, packed = key
                number = fields.bit_error_rate(int(value)) if packed else float(value)
                if pool in ("bin", "total"):
                    links[metric, label] = links.get((metric, label), 0.0) + number
                else:
                    links.setdefault((metric, label), number)
                pools[metric] = pool
        _add_links(links, pools, part)
        return self._field_failures(failures, tier, part)

    @staticmethod
    def _field_failures(failures: list[tuple[int, Any]], tier: Tier, part: Part) -> bool:
        """What fields say of the GPU, once a code: they came with one call and cost nothing more."""
        told: set[int] = set()
        for code, key in failures:
            what = key.metric if isinstance(key, fields.Field) else key[0]
            if code == NO_PERMISSION and what not in part.refused:
                part.refused.append(what)
            if code in (*FIELD_ABSENT_CODES, NO_PERMISSION, NOT_READY) or code in told:
                continue
            if code in RESTART_CODES:
                raise RestartError(code)
            told.add(code)
            part.faults.append(
                Fault(code=code, call=f"field of {what}", message=str(nvml.NVMLError(code)), tier=tier)
            )
        return GPU_IS_LOST not in told

    def _entries(self, gpu: OpenGpu, tier: Tier) -> list[tuple[int, int, Any]]:
        """All fields of a tier: those that this GPU does not support drop out with the first answer."""
        entries: list[tuple[int, int, Any]] = [(f.id, 0, f) for f in fields.FIELDS if f.tier == tier]
        links = range(self._links(gpu))
        if tier == "medium":
            for metric, ids in fields.FLAT_LINK_FIELDS.items():
                entries += [(ids[n], 0, (metric, str(n), "sum", False)) for n in links if n < len(ids)]
            c2c = min(_field(gpu, 170) or 0, MAX_C2C_LINKS)
            entries += [
                (i, n, (m, "", "total", False)) for i, m in fields.C2C_FIELDS.items() for n in range(c2c)
            ]
        for f in fields.LINK_FIELDS:
            if f.tier == tier:
                entries += [(f.id, n, (f.metric, str(n), f.pool, f.packed)) for n in links]
        if tier == "slow":
            for place, field in enumerate(fields.FEC_FIELDS):
                entries += [
                    (field, n, ("gpu_nvlink_fec_codewords_total", str(place), "bin", False)) for n in links
                ]
        return entries

    def _links(self, gpu: OpenGpu) -> int:
        """How many NVLinks the GPU has."""
        if gpu.links is None:
            told = _field(gpu, 91)
            gpu.links = self._count_links(gpu) if told is None else min(told, nvml.NVML_NVLINK_MAX_LINKS)
        return gpu.links

    @staticmethod
    def _count_links(gpu: OpenGpu) -> int:
        """Older drivers do not say how many links there are: the first that is refused is one too many."""
        for link in range(nvml.NVML_NVLINK_MAX_LINKS):
            try:
                nvml.nvmlDeviceGetNvLinkState(gpu.handle, link)
            except nvml.NVMLError as error:
                if error.value in ABSENT_CODES or error.value == FUNCTION_NOT_FOUND:
                    return link
                raise
        return int(nvml.NVML_NVLINK_MAX_LINKS)

    def _read_link_states(self, gpu: OpenGpu, now: float, probe_after_s: float, part: Part) -> bool:
        until = gpu.absent.get("nvlink_state")
        if not gpu.links or (until is not None and now < until):
            return True
        try:
            up = sum(nvml.nvmlDeviceGetNvLinkState(gpu.handle, link) == 1 for link in range(gpu.links))
        except nvml.NVMLError as error:
            return self._note(gpu, "nvlink_state", error, "medium", now, probe_after_s, part)
        part.samples.append(("gpu_nvlink_links_active", float(up), ""))
        return True


def _field(gpu: OpenGpu, field: int) -> int | None:
    """One field by itself, None when it does not answer."""
    values, _ = FieldBlock([(field, 0, field)], 0.0).read(gpu.handle)
    return int(values[0][1]) if values else None


def _add_links(links: dict[tuple[str, str], float], pools: dict[str, str], part: Part) -> None:
    """Each link's own figure, and the GPU's: the sum, or the worst of a rate. Bins of a histogram have no sum."""
    whole: dict[str, float] = {}
    for (metric, label), number in links.items():
        if label:
            part.samples.append((metric, number, label))
        before = whole.get(metric, 0.0)
        whole[metric] = max(before, number) if pools[metric] == "max" else before + number
    part.samples.extend((metric, number, "") for metric, number in whole.items() if pools[metric] != "bin")


def open_gpu(index: int, names: dict[str, str], given: set[str]) -> tuple[OpenGpu | None, Gpu]:
    """Open GPU `index` and say what it is. A GPU that cannot be opened has no handle and an error code.

    `names` are local names by UUID and by `pci-ADDRESS`; `given` are those in use, and gains this one.
    Raises RestartError when the session is void.
    """
    try:
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
    except nvml.NVMLError as error:
        if error.value in (1, 18):
            raise RestartError(error.value) from error
        return None, Gpu(device="", uuid="", model="", pci=None, labels={}, error=error.value)
    uuid = _text_of(nvml.nvmlDeviceGetUUID, handle)
    bus_id = _text_of(lambda h: nvml.nvmlDeviceGetPciInfo_v3(h).busId, handle)
    pci = pci_address(bus_id)
    identity = uuid or f"pci-{pci}"
    # A new board in a known slot takes the slot's name; so does a known board whose UUID cannot be read just now.
    name = names.get(identity) or names.get(f"pci-{pci}") or f"gpu{index}"
    if name in given or (identity not in names and f"pci-{pci}" not in names and name in names.values()):
        name = next(
            n for n in map("gpu{}".format, range(index, 10_000)) if n not in given and n not in names.values()
        )
    given.add(name)
    labels = {
        "vbios": _text_of(nvml.nvmlDeviceGetVbiosVersion, handle),
        "inforom": _text_of(nvml.nvmlDeviceGetInforomImageVersion, handle),
        "gsp_firmware": _text_of(nvml.nvmlDeviceGetGspFirmwareVersion, handle),
        "board_serial": _text_of(nvml.nvmlDeviceGetSerial, handle),
    }
    gpu = Gpu(
        device=name,
        uuid=identity,
        model=_text_of(nvml.nvmlDeviceGetName, handle),
        pci=pci,
        labels={key: value for key, value in labels.items() if value},
    )
    return OpenGpu(gpu.device, handle), gpu


def _text_of(call: Callable[[Any], Any], handle: Any) -> str:
    """A text of the GPU, empty where it has none."""
    try:
        return text(call(handle)).strip("\0 ")
    except (nvml.NVMLError, nvml.NVMLLibraryMismatchError):
        return ""
