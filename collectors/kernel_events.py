"""From a matched kernel message to an event: codes, severities, addresses, disks. Pure.

Which messages are matched stands in `kernel_lines`.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import msgspec

from forewarn.collectors.base import Event
from forewarn.collectors.xids import RECOVERY_ACTIONS, Severity, sxid_fact, xid_fact

MAX_TEXT_CHARS = 512
"""An event's message is cut to this."""


class GpuAddress(msgspec.Struct, frozen=True):
    """The driver's own word on which GPU sits at which address (`dddd:bb:dd`)."""

    pci: str
    uuid: str


class Found(msgspec.Struct, frozen=True):
    """An event read from a message. `ident` tells apart two that share kind, code and address (a disk, a
    process). `implied` is true when another line may tell of the same incident: it then adds no count."""

    event: Event
    ident: str = ""
    implied: bool = False


Maker = Callable[["re.Match[str]", str], "Found | GpuAddress | None"]


BDF = r"(?:[0-9a-fA-F]{4,8}:)?[0-9a-fA-F]{2}:[0-9a-fA-F]{2}(?:\.[0-9a-fA-F])?"
_DISK = re.compile(
    r"^(nvme\d+)(?:c\d+)?(?:n\d+)?(?:p\d+)?$|^((?:sd|vd|xvd|hd)[a-z]+)\d*$|^(mmcblk\d+)(?:p\d+)?$"
)
_REMOVABLE = re.compile(r"^(?:sr|fd|loop|ram|zram|nbd)\d+$")


def address(text: str, *, function: bool) -> str:
    """A PCI address as `dddd:bb:dd`, with `.f` kept where `function` says so. The domain is added when absent."""
    text = text.lower()
    body, _, suffix = text.partition(".")
    parts = body.split(":")
    if len(parts) == 2 and len(parts[0]) == 4:
        parts = [parts[0][2:], parts[1]]  # oldest drivers: %04x:%02x, bus and device
    if len(parts) == 2:
        parts = ["0000", *parts]
    domain = parts[0].lstrip("0").rjust(4, "0")
    joined = ":".join((domain, *parts[1:]))
    return f"{joined}.{suffix}" if function and suffix else joined


def disk_of(name: str) -> str:
    """The disk a block device belongs to (`nvme0n1p1` to `nvme0`, `sda1` to `sda`); empty for md, dm and the like."""
    m = _DISK.match(name)
    return next((g for g in m.groups() if g), "") if m else ""


def _event(
    kind: str,
    code: str,
    severity: Severity,
    message: str,
    *,
    device: str = "",
    action: str = "",
    pci: str | None = None,
    count: int = 1,
    **labels: str | None,
) -> Event:
    return Event(
        device=device,
        kind=kind,
        code=code,
        severity=severity,
        message=" ".join(message.split())[:MAX_TEXT_CHARS],
        action=action,
        pci=pci,
        count=max(1, count),
        labels={k: v for k, v in labels.items() if v},
    )


# --- NVIDIA driver ---------------------------------------------------------------------------------------------

_XID_REST = re.compile(
    r"\s*pid='?(<unknown>|[^,'\s]{1,64})'?(?:,\s*name=(.{1,64}?))?(?:,\s|$)(.*)", re.DOTALL
)
_CAUSED = re.compile(r"caused by previous Xid (\d{1,5})")
_FATAL = re.compile(r"\b(non-?\s?fatal|fatal)\b", re.IGNORECASE)
_NVLINK5 = re.compile(r"^\s*([A-Z][A-Z0-9_/]{1,48})\s")
_LINK = re.compile(r"\blink (\d{1,3})\b", re.IGNORECASE)
_VERDICT = re.compile(r"\bto (?:0x([0-9a-fA-F]{1,4}))?\s*(?:\(([^)]{1,64})\))?")


def xid(m: re.Match[str], message: str) -> Found | None:
    number = int(m["number"])
    rest = m["rest"] or ""
    pid = name = None
    if p := _XID_REST.match(rest):
        pid, name, rest = p[1], p[2], p[3]
    fact = xid_fact(number)
    severity: Severity = fact.severity if fact else "warning"
    action = fact.action if fact else "CONTACT_SUPPORT"
    unit = link = None
    if number == 154:
        severity, action = _verdict(rest, severity)
    elif 144 <= number <= 150 or number == 74:
        if f := _FATAL.search(rest):
            severity = "warning" if f[1].lower().startswith("non") else "critical"
        unit = u[1] if number != 74 and (u := _NVLINK5.match(rest)) else None
        link = str(int(k[1])) if (k := _LINK.search(rest)) else None
    caused = _CAUSED.search(rest)
    event = _event(
        "xid",
        str(number),
        severity,
        m[0],
        action=action,
        pci=address(m["pci"], function=False),
        pid=None if pid in (None, "<unknown>") else pid,
        process=None if name in (None, "<unknown>") else name,
        gpu_instance=m["gi"],
        compute_instance=m["ci"],
        unit=unit,
        link=link,
        caused_by=caused[1] if caused else None,
    )
    return Found(event, ident="/".join(filter(None, (m["gi"], m["ci"]))))


def _verdict(rest: str, default: Severity) -> tuple[Severity, str]:
    """The action the driver now asks for: its words first, for the numbers changed their words between drivers."""
    m = _VERDICT.search(rest)
    if m is None or (m[1] is None and m[2] is None):
        return default, "CONTACT_SUPPORT"
    words = (m[2] or "").lower()
    number = int(m[1], 16) if m[1] else -1
    if "drain" in words and "reset" in words:
        action = "DRAIN_AND_RESET"
    elif "reboot" in words or "restart" in words:
        action = "RESTART_BM"
    elif "flr" in words or "reset" in words:
        action = "RESET_GPU"
    elif "imex" in words:
        action = "RECOVER_IMEX_DOMAIN"
    elif "drain" in words:
        action = "DRAIN_P2P"
    elif words == "none":
        action = "NONE"
    else:
        action = RECOVERY_ACTIONS.get(number, "CONTACT_SUPPORT")
    if action == "NONE":
        return "info", action
    return ("critical" if action in ("RESET_GPU", "RESTART_BM", "DRAIN_AND_RESET") else "error"), action


def off_bus(m: re.Match[str], message: str) -> Found:
    return Found(off_bus_event(m["pci"], message), implied=True)


def off_bus_event(pci: str, message: str) -> Event:
    """XID 79 without its number: some drivers only say that the GPU fell off the bus."""
    fact = xid_fact(79)
    return _event(
        "xid",
        "79",
        "critical",
        message,
        action=fact.action if fact else "",
        pci=address(pci, function=False),
        implied="1",
    )


def gpu_address(m: re.Match[str], message: str) -> GpuAddress:
    return GpuAddress(pci=address(m[1], function=False), uuid=m[2])


def init_failed(m: re.Match[str], message: str) -> Found:
    pci = address(m[1], function=False)
    return Found(_event("gpu_driver", "init_failed", "critical", message, action="RESET_GPU", pci=pci))


def sxid(m: re.Match[str], message: str) -> Found | None:
    rest = m["rest"].strip()
    if rest.startswith(("Data {", "Data[", "Severity ", "Engine instance")):
        return None  # goes on about the line before
    number = int(m["number"])
    fact = sxid_fact(number)
    severity: Severity = fact.severity if fact else "warning"
    word = _FATAL.match(rest)
    if word and word[1].lower() == "fatal":
        severity = "critical"
    elif word and severity == "critical":
        severity = "error"
    link = _LINK.search(rest)
    switch = "nvswitch" + m["switch"] if m["switch"] else None
    event = _event(
        "sxid",
        str(number),
        severity,
        m[0],
        action=fact.action if fact else "CONTACT_SUPPORT",
        pci=address(m["pci"], function=True),
        switch=switch,
        link=str(int(link[1])) if link else None,
    )
    return Found(event)


# --- PCIe, CPU, memory -----------------------------------------------------------------------------------------


def _aer_class(text: str) -> tuple[str, Severity]:
    low = text.lower()
    if "non-fatal" in low or "nonfatal" in low:
        return "nonfatal", "error"
    if "fatal" in low:
        return "fatal", "critical"
    if low.startswith(("uncorrect", "unrecover")):
        return "nonfatal", "error"
    return "corrected", "warning"


def aer_received(m: re.Match[str], message: str) -> Found:
    """`AER: Corrected error received: ...`: the port speaks, the source stands behind it (old drivers: id=bbdf)."""
    code, severity = _aer_class(m["class"])
    port = address(m["port"], function=True) if m["port"] else None
    source = port
    if m["source"]:
        source = address(m["source"], function=True)
    elif m["id"]:
        requester = int(m["id"], 16)
        domain = port.partition(":")[0] if port else "0000"
        source = f"{domain}:{requester >> 8:02x}:{requester >> 3 & 0x1F:02x}.{requester & 7}"
    event = _event("aer", code, severity, m[0], pci=source, port=port if port != source else None)
    return Found(event)


def aer_detail(m: re.Match[str], message: str) -> Found:
    code, severity = _aer_class(m["class"])
    return Found(_event("aer", code, severity, m[0], pci=address(m["pci"], function=True)), implied=True)


def aer_unrecoverable(m: re.Match[str], message: str) -> Found:
    return Found(_event("aer", "unrecoverable", "critical", m[0], pci=address(m[1], function=True)))


def dpc(m: re.Match[str], message: str) -> Found:
    return Found(_event("aer", "fatal", "critical", m[0], pci=address(m[1], function=True)))


def slot(m: re.Match[str], message: str) -> Found:
    code = "link_down" if "link" in m[2].lower() else "card_gone"
    return Found(_event("pcie", code, "error", m[0], pci=address(m[1], function=True)))


def pcie_gone(m: re.Match[str], message: str) -> Found:
    return Found(_event("pcie", "inaccessible", "error", m[0], pci=address(m[1], function=True)))


def mce_logged(m: re.Match[str], message: str) -> Found:
    return Found(_event("mce", "corrected", "warning", message), implied=True)


def mce_bank(m: re.Match[str], message: str) -> Found:
    status = int(m[3], 16)
    uncorrected = m[1] is not None or bool(status >> 61 & 1)
    code, severity = _mce(uncorrected)
    return Found(_event("mce", code, severity, message, bank=m[2]))


def _mce(uncorrected: bool) -> tuple[str, Severity]:
    return ("uncorrected", "critical") if uncorrected else ("corrected", "warning")


def mce_amd(m: re.Match[str], message: str) -> Found:
    if m[1].startswith("Corrected"):
        return Found(_event("mce", "corrected", "warning", message))
    severity: Severity = "error" if m[1].startswith("Deferred") else "critical"
    return Found(_event("mce", "uncorrected", severity, message))


def ghes(m: re.Match[str], message: str) -> Found | None:
    if m[1] == "info":
        return None
    code, severity = _mce(m[1] != "corrected")
    return Found(_event("mce", code, "error" if m[1] == "recoverable" else severity, message))


def mce_memory(m: re.Match[str], message: str) -> Found:
    return Found(_event("mce", "uncorrected", "critical", message))


def memory_failure(m: re.Match[str], message: str) -> Found:
    return Found(_event("mce", "uncorrected", "error", message), implied=True)


def edac_error(m: re.Match[str], message: str) -> Found:
    count = int(m["count"] or 1)
    label = m["dimm"] or None
    if m["class"] == "UE":
        event = _event("edac", "ue", "critical", message, count=count, controller=m["mc"], dimm=label)
    else:
        event = _event("edac", "ce", "warning", message, count=count, controller=m["mc"], dimm=label)
    return Found(event, ident=f"{m['mc']}/{label or ''}")


def throttle(m: re.Match[str], message: str) -> Found:
    return Found(_event("thermal", "throttle", "warning", message))


def hot_shutdown(m: re.Match[str], message: str) -> Found:
    return Found(_event("thermal", "shutdown", "critical", message))


# --- disks and file systems ------------------------------------------------------------------------------------


def nvme(code: str, severity: Severity) -> Maker:
    def make(m: re.Match[str], message: str) -> Found:
        disk = disk_of(m[1]) or m[1]
        return Found(_event("nvme", code, severity, message, device=disk, disk=m[1]), ident=disk)

    return make


def nvme_timeout(m: re.Match[str], message: str) -> Found:
    severity: Severity = "warning" if "completion polled" in m[0] else "error"
    return Found(_event("nvme", "timeout", severity, message, device=m[1], disk=m[1]), ident=m[1])


def ata(code: str, severity: Severity) -> Maker:
    def make(m: re.Match[str], message: str) -> Found:
        return Found(_event("ata", code, severity, message, port=m[1]), ident=m[1].partition(".")[0])

    return make


def block_device(code: str, severity: Severity) -> Maker:
    def make(m: re.Match[str], message: str) -> Found | None:
        name = m[1]
        if _REMOVABLE.match(name):
            return None  # an empty CD or floppy drive says this all day
        disk = disk_of(name)
        return Found(_event("disk_error", code, severity, message, device=disk, disk=name), ident=name)

    return make


def block_layer(m: re.Match[str], message: str) -> Found | None:
    code = "medium_error" if m[1].startswith("critical medium") else "io_error"
    name = m[2]
    if _REMOVABLE.match(name):
        return None
    event = _event("disk_error", code, "error", message, device=disk_of(name), disk=name)
    return Found(event, ident=name)


def beyond_end(m: re.Match[str], message: str) -> Found:
    return Found(_event("disk_error", "io_error", "error", message))


def raid(m: re.Match[str], message: str) -> Found:
    event = _event("disk_error", "raid_degraded", "critical", message, device=disk_of(m[1]), disk=m[1])
    return Found(event, ident=m[1])


def filesystem(code: str, severity: Severity) -> Maker:
    def make(m: re.Match[str], message: str) -> Found:
        name = next((g for g in m.groups() if g), "")
        device = disk_of(name)
        event = _event("filesystem", code, severity, message, device=device, disk=name or None)
        return Found(event, ident=name)

    return make


# --- network ---------------------------------------------------------------------------------------------------


def mlx5(code: str, severity: Severity) -> Maker:
    def make(m: re.Match[str], message: str) -> Found:
        pci = address(m["pci"], function=True) if m["pci"] else None
        return Found(_event("mlx5", code, severity, message, pci=pci))

    return make


def mlx5_module(m: re.Match[str], message: str) -> Found | None:
    pci = address(m["pci"], function=True) if m["pci"] else None
    what = m["what"].lower()
    if "high temperature" in what:
        code, severity = "module_temp", "error"
    elif m["error"]:
        code, severity = "module_error", "error"
    elif "unplugged" in what or "disabled" in what:
        code, severity = "module_unplugged", "warning"
    else:
        return None
    event = _event("mlx5", code, severity, message, pci=pci, module=m["module"])  # type: ignore[arg-type]  # literals above
    return Found(event, ident=m["module"])


def mlx5_link(m: re.Match[str], message: str) -> Found:
    up = m["state"].lower() == "up"
    pci = address(m["pci"], function=True) if m["pci"] else None
    code = "link_up" if up else "link_down"
    event = _event("mlx5", code, "info" if up else "error", message, pci=pci, interface=m["name"])
    return Found(event, ident=m["name"] or "")


def mlx5_health(m: re.Match[str], message: str) -> Found:
    pci = address(m["pci"], function=True) if m["pci"] else None
    return Found(_event("mlx5", "health", "critical", message, pci=pci), implied=True)


def mlx5_health_issue(m: re.Match[str], message: str) -> Found:
    pci = address(m["pci"], function=True) if m["pci"] else None
    level = (m["level"] or "").upper()
    severity: Severity = "critical"
    if level in ("WARNING", "NOTICE", "INFORMATIONAL", "DEBUG"):
        severity = "warning"
    elif level == "ERROR":
        severity = "error"
    return Found(_event("mlx5", "health", severity, message, pci=pci))


def efa(code: str, severity: Severity) -> Maker:
    def make(m: re.Match[str], message: str) -> Found:
        pci = address(m["pci"], function=True) if m["pci"] else None
        event = _event("efa", code, severity, message, device=m["name"] or "", pci=pci)
        return Found(event, ident=m["name"] or "")

    return make


def link_state(m: re.Match[str], message: str) -> Found:
    up = m["state"].lower() in ("up", "ready")
    pci = address(m["pci"], function=True) if m["pci"] else None
    kind = "link_up" if up else "link_down"
    severity: Severity = "info" if up else "warning"
    return Found(_event(kind, m["name"], severity, message, pci=pci, interface=m["name"]), ident=m["name"])


def slave_state(m: re.Match[str], message: str) -> Found:
    up = m[3] == "up"
    event = _event(
        "link_up" if up else "link_down", m[2], "info" if up else "warning", message, interface=m[2]
    )
    return Found(event, ident=m[2])


# --- processes and CPUs ----------------------------------------------------------------------------------------


def oom_kill(m: re.Match[str], message: str) -> Found:
    event = _event("oom", "kill", "warning", message, pid=m["pid"], process=m["name"])
    return Found(event, ident=m["pid"], implied=True)


def hung(m: re.Match[str], message: str) -> Found:
    event = _event("hung_task", "blocked", "error", message, process=m[1], pid=m[2], seconds=m[3])
    return Found(event, ident=f"{m[1]}:{m[2]}")


def lockup(code: str, severity: Severity) -> Maker:
    def make(m: re.Match[str], message: str) -> Found:
        return Found(_event("lockup", code, severity, message, cpu=m[1]), ident=m[1] or "")

    return make
