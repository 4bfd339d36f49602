"""Why a disk could not be read: smartctl's own words turned into a reason, a hint and the way out."""

from __future__ import annotations

import re
from dataclasses import dataclass

_PERMISSION = re.compile(
    r"permission denied|operation not permitted|requires? root|\bEACCES\b|\bEPERM\b", re.I
)
_DEVICE_TYPE = re.compile(
    r"unable to detect device type|unknown usb bridge|unsupported usb bridge|specify device type"
    r"|try adding|please try|unknown device type|megaraid controller|unsupported (?:scsi|raid)",
    re.I,
)
_BAD_COMMAND = re.compile(r"unrecognized option|invalid argument|requires an argument|option .* not", re.I)
_ASLEEP = re.compile(
    r"\bin (?:\w+ )?(?:standby|sleep)\w*(?: \w+)? mode|^\s*device is in standby", re.I | re.M
)
_OPEN_FAILED = re.compile(
    r"open device:.*failed|no such (?:device|file)|device identity failed|inquiry failed|cannot open"
    r"|input/output error|failed: ",
    re.I,
)
_GONE = re.compile(
    r"no such (?:device|file)|no medium|no device (?:detected|found)|device (?:is )?gone", re.I
)
_TYPE_HINT = re.compile(r"-d ?([A-Za-z0-9_+,]+)")


@dataclass(frozen=True)
class Failure:
    """`why` is permission, device_type, open_failed or bad_command; `hint` a `-d` type to try, where smartctl names
    one; `gone` when the words say that the device is not there."""

    why: str
    message: str
    hint: str = ""
    gone: bool = False


def is_asleep(text: str) -> bool:
    """Whether smartctl says that it left the disk sleeping."""
    return bool(_ASLEEP.search(text))


def is_gone(text: str) -> bool:
    """Whether smartctl says that the device is not there."""
    return bool(_GONE.search(text))


def failure_of(text: str, exit_status: int) -> Failure | None:
    """The reason in smartctl's messages, or None where neither they nor the exit status name one."""
    message = " ".join(text.split())[:300]
    why = ""
    if _PERMISSION.search(text):
        why = "permission"
    elif _DEVICE_TYPE.search(text):
        why = "device_type"
    elif _BAD_COMMAND.search(text):
        why = "bad_command"
    elif _OPEN_FAILED.search(text) or exit_status & 2:
        why = "open_failed"
    elif exit_status & 1:
        why = "bad_command"
    if not why:
        return None
    hint = _TYPE_HINT.search(text)
    name = hint.group(1) if hint and why == "device_type" and hint.group(1) not in ("option", "TYPE") else ""
    return Failure(why, message, name)


def remedy(why: str, *, name: str, type_: str, hint: str) -> str:
    """What the operator can do about it, in one sentence."""
    if why == "permission":
        nvme = "nvme" in name.lower() or "nvme" in type_.lower() or type_.lower().startswith("snt")
        capability = "CAP_SYS_ADMIN" if nvme else "CAP_SYS_RAWIO"
        kind = "NVMe" if nvme else "SATA and SAS"
        return (
            f"run as root, or give the agent {capability} ({kind} disks need it) with AmbientCapabilities={capability} "
            "in its unit, and let it read the device node"
        )
    if why == "device_type":
        tried = hint or "sat, nvme, megaraid,N, cciss,N, areca,N or 3ware,N"
        return (
            f"name the type: types = {{ {name or '/dev/...'!r} = '...' }} in the smart settings; try {tried}"
        )
    if why == "open_failed":
        return "check that the disk and its controller's device node exist and that the driver is loaded"
    if why == "bad_command":
        return "use smartmontools 7.0 or newer, or check the device and type in the smart settings"
    if why == "timeout":
        return "the disk or its controller hangs: look for resets in the kernel log; the agent asks again"
    if why == "vanished":
        return "the disk was there before: check the slot, its cable, its backplane and the kernel log"
    return "run smartctl by hand on this disk and see what it answers"
