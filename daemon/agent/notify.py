"""What systemd wants to know of a service: ready, alive, stopping. Silent where systemd did not ask."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping


def notify(message: str, environment: Mapping[str, str] | None = None) -> bool:
    """Send `READY=1`, `WATCHDOG=1` or `STOPPING=1`; true when someone was told."""
    environment = os.environ if environment is None else environment
    address = environment.get("NOTIFY_SOCKET", "")
    if not address:
        return False
    if address.startswith("@"):
        address = "\0" + address[1:]
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as door:
            door.setblocking(False)
            door.sendto(message.encode(), address)
    except OSError:
        return False
    return True


def watchdog_interval_s(environment: Mapping[str, str] | None = None) -> float | None:
    """How often to say WATCHDOG=1 (half of what systemd waits), None when it does not wait."""
    environment = os.environ if environment is None else environment
    period_us = environment.get("WATCHDOG_USEC", "")
    owner = environment.get("WATCHDOG_PID", "")
    if not period_us.isdigit() or int(period_us) == 0 or (owner and owner != str(os.getpid())):
        return None
    return int(period_us) / 2e6
