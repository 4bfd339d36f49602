"""What stands before a kernel message in logs of every make: stamps, hosts, tags, facilities, callers.

Nothing here knows what a message means; see `kernel_lines`. Nothing here reads a clock or a file.
"""

from __future__ import annotations

import re
import time
from datetime import datetime

import msgspec

MAX_MESSAGE_CHARS = 4096
"""Longer messages are cut: no kernel record of interest comes near."""
_MAX_PREFIXES = 12
_DAY_S = 86_400.0


class Prefixed(msgspec.Struct, frozen=True):
    """A line taken apart. `message` is the kernel's own text.

    `time` is seconds since the epoch where the line gives a wall time, `boot_s` seconds since boot where it
    gives those. `from_kernel` is false when the line says that a program in user space wrote it.
    """

    message: str
    time: float | None = None
    boot_s: float | None = None
    from_kernel: bool = True


_MONTHS = {
    m: i
    for i, m in enumerate(
        ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec"), start=1
    )
}
_LEVELS = r"(?:emerg|alert|crit|err|error|warn|warning|notice|info|debug)"
_FACILITIES = r"(kern|user|mail|daemon|auth|syslog|lpr|news|uucp|cron|authpriv|ftp|local[0-7])"

_RAW = re.compile(r"(\d{1,5}),\d{1,20},(\d{1,20}),[^;\n]{0,200};")
_PRIORITY = re.compile(r"<(\d{1,3})>")
_BOOT = re.compile(r"\[\s{0,12}(\d{1,10}\.\d{1,9})(?:\s{1,4}<[^>\]]{0,24}>)?\]:?")
_NO_TIME = re.compile(r"\[(?:\s{0,12}[+-]\d{1,10}\.\d{1,9}|\.\.\.|<[^>\]]{0,24}>)\]:?")
_CALLER = re.compile(r"\[\s{0,12}[TC]\d{1,10}\]")
_CTIME = re.compile(
    r"\[?(?:[A-Z][a-z]{2}) ([A-Z][a-z]{2})\s{1,2}(\d{1,2}) (\d{2}):(\d{2}):(\d{2})(?:\.\d{1,9})?"
    r"(?: (\d{4}))?\]?:?(?=\s|\[|$)"
)
_ISO = re.compile(
    r"\[?(\d{4}-\d{2}-\d{2})[T ](\d{2}:\d{2}:\d{2})(?:([.,])(\d{1,9}))?(?:(Z)|([+-]\d{2}):?(\d{2}))?\]?:?(?=\s|\[|$)"
)
_SYSLOG = re.compile(r"([A-Z][a-z]{2})\s{1,2}(\d{1,2}) (\d{2}):(\d{2}):(\d{2})(?:\.\d{1,9})?(?=\s)")
_FACILITY = re.compile(_FACILITIES + r"\s{0,10}:\s{0,10}" + _LEVELS + r"\s{0,10}:(?=\s|$)")
_ADDRESS = re.compile(r"(?:\d{1,3}\.){3}\d{1,3}:(?=\s)")
_KERNEL_TAG = re.compile(r"(?:[^\s:]{1,255} )?(?:kernel:|\[kernel\])(?=\s|$)")
_HOST_AND_TAG = re.compile(r"([^\s:]{1,255}) ([^\s:\[]{1,128})(\[\d{1,10}\])?:\s")

_DRIVER_WORDS = frozenset(
    (
        *("nvidia", "pcieport", "nvme", "block", "mlx5_core", "ata", "sd", "EDAC", "XFS", "BTRFS", "Buffer"),
        *(
            "Aborting",
            "Out",
            "Memory",
            "message",
            "INFO",
            "thermal",
            "bond0",
            "igb",
            "ice",
            "bnxt_en",
            "i40e",
        ),
        *("ixgbe", "e1000e", "r8169", "tg3", "Hardware", "infiniband", "task"),
    )
)
"""First words of kernel messages that would else be taken for a host name before a program's tag."""


def strip_prefix(line: str, now: float) -> Prefixed:
    """Take a line apart. `now` (epoch seconds) settles the year where a stamp has none.

    Stamps without a zone are read in this host's zone, as every local logger writes them.
    """
    text = line[:MAX_MESSAGE_CHARS].strip("\r\n\t\x00 ")
    stamp: float | None = None
    boot: float | None = None
    from_kernel = True
    stamped_by_logger = False
    for _ in range(_MAX_PREFIXES):
        text = text.lstrip(" \t")
        if m := _BOOT.match(text):
            boot = boot if boot is not None else float(m[1])
        elif m := _NO_TIME.match(text) or _CALLER.match(text) or _ADDRESS.match(text):
            pass
        elif m := _RAW.match(text):
            from_kernel = from_kernel and int(m[1]) >> 3 == 0
            boot = int(m[2]) / 1e6
        elif m := _PRIORITY.match(text):
            from_kernel = from_kernel and int(m[1]) >> 3 == 0
        elif m := _CTIME.match(text):
            stamp = _named_month(m[1], m[2], m[3], m[4], m[5], m[6], now)
        elif m := _ISO.match(text):
            stamp = _iso(m)
            stamped_by_logger = m[3] != ","  # a comma is dmesg's own, and dmesg gives no host
        elif m := _SYSLOG.match(text):
            stamp = _named_month(m[1], m[2], m[3], m[4], m[5], None, now)
            stamped_by_logger = True
        elif m := _FACILITY.match(text):
            from_kernel = from_kernel and m[1] == "kern"
        elif m := _KERNEL_TAG.match(text):
            stamped_by_logger = False
        else:
            break
        text = text[m.end() :]
    if stamped_by_logger and (m := _HOST_AND_TAG.match(text)) and (m[3] or m[1] not in _DRIVER_WORDS):
        # `HOST PROGRAM[PID]: text`: whatever the text says, the kernel did not say it.
        from_kernel = False
    return Prefixed(message=text.strip(), time=stamp, boot_s=boot, from_kernel=from_kernel)


def _named_month(
    month: str, day: str, hour: str, minute: str, second: str, year: str | None, now: float
) -> float | None:
    number = _MONTHS.get(month)
    if number is None:
        return None

    def at(y: int) -> float | None:
        try:
            datetime(y, number, int(day), int(hour), int(minute), min(int(second), 59))  # noqa: DTZ001 - a check
            return time.mktime((y, number, int(day), int(hour), int(minute), int(second), 0, 0, -1))
        except (ValueError, OverflowError):
            return None

    if year is not None:
        return at(int(year))
    this_year = time.localtime(now).tm_year
    guess = at(this_year)
    if guess is None or guess > now + _DAY_S:
        return at(this_year - 1)
    return guess


def _iso(m: re.Match[str]) -> float | None:
    text = f"{m[1]}T{m[2]}"
    try:
        if m[5]:
            moment = datetime.fromisoformat(text + "+00:00")
        elif m[6]:
            moment = datetime.fromisoformat(f"{text}{m[6]}:{m[7]}")
        else:
            moment = datetime.fromisoformat(text).astimezone()
        return moment.timestamp() + (float(f"0.{m[4]}") if m[4] else 0.0)
    except (ValueError, OverflowError, OSError):
        return None
