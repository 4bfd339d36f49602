"""What can be collected on this host, and what to do about what cannot: the checks behind `forewarn doctor`.

Each check looks at one thing and changes nothing. Hardware that is not there is absent, not a problem.
"""

from __future__ import annotations

import ctypes
import http.client
import os
import shutil
import sqlite3
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import msgspec

from forewarn.collectors import registry
from forewarn.collectors.base import CollectionError, Reading
from forewarn.collectors.clock import SystemClock
from forewarn.collectors.errors import ConfigError, UnavailableError
from forewarn.daemon.agent.shipper import HttpTransport, read_token
from forewarn.daemon.agent.single import close_within, collect_within
from forewarn.daemon.config import AgentConfig, CollectorConfig

SERVICE_TIMEOUT_S = 5.0
CAPABILITIES = {"CAP_SYS_RAWIO": 17, "CAP_SYS_ADMIN": 21, "CAP_SYSLOG": 34}
"""Capability bits that sources need: SATA and SAS pass-through, NVMe admin commands, the kernel log."""
TIME_ERROR = 5
"""What adjtimex(2) returns while the clock is not synchronised."""


class Check(msgspec.Struct, frozen=True):
    """One finding. `ok`: works. `absent`: nothing of the kind here. `problem`: there, but not as it should be."""

    name: str
    status: Literal["ok", "absent", "problem"]
    detail: str
    remedy: str = ""


def all_checks(config: AgentConfig, token: str) -> Iterator[Check]:
    """Every check, one after the other, as it is done."""
    for name in registry.COLLECTORS:
        yield check_source(name, config)
    yield check_smartctl(config)
    yield check_capabilities()
    yield check_spool(config)
    yield check_clock()
    yield check_service(config, token)


def check_source(name: str, config: AgentConfig) -> Check:
    """Poll one collector as the agent would."""
    own = config.collectors.get(name, CollectorConfig())
    if not own.enabled:
        return Check(name, "absent", f"switched off by agent.collectors.{name}.enabled")
    root = Path(config.root)
    try:
        collector = registry.create(name, own.options, registry.Setup(SystemClock(), root))
    except (UnavailableError, ConfigError) as error:
        return _unavailable(name, CollectionError(name, str(error)), root)
    try:
        reading, failure = collect_within(collector, own.deadline_s or collector.deadline_s)
    finally:
        close_within(collector)
    if failure is not None:
        return _unavailable(name, failure, root)
    detail = summary(reading)
    if reading.errors:
        first = reading.errors[0]
        more = f" (and {len(reading.errors) - 1} more)" if len(reading.errors) > 1 else ""
        where = f"{first.device}: " if first.device else ""
        return Check(name, "problem", f"{detail}; {where}{first.message}{more}", first.remedy)
    if not (reading.samples or reading.devices or reading.events) and not hardware_of(name, root):
        return Check(name, "absent", ABSENT[name])
    return Check(name, "ok", detail)


def summary(reading: Reading) -> str:
    """How much a reading holds, in words."""
    devices = {s.device for s in reading.samples} | {d.device for d in reading.devices}
    metrics = {s.metric for s in reading.samples}
    simulated = " (simulated)" if any(d.simulated for d in reading.devices) else ""
    return (
        f"{_count(len(devices), 'device')}{simulated}, {_count(len(metrics), 'metric')}, "
        f"{_count(len(reading.events), 'event')}"
    )


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


ABSENT = {
    "nvml": "no NVIDIA GPU on the PCI bus",
    "dcgm": "no dcgm-exporter answers; it is optional",
    "smart": "no disk that speaks SMART",
    "kernel_log": "no kernel log",
    "fabric": "no InfiniBand, RoCE or network adapter",
    "host": "nothing below /proc",
    "training": "no training job reports at the moment",
}


def hardware_of(name: str, root: Path) -> bool:
    """Whether there is anything here that the source should see."""
    if name == "nvml":
        vendors = (root / "sys/bus/pci/devices").glob("*/vendor")
        return any(_text(v) == "0x10de" for v in vendors) or (root / "proc/driver/nvidia").exists()
    if name == "smart":
        disks = (root / "sys/block").glob("*")
        return any(d.name.startswith(("sd", "nvme", "hd")) for d in disks)
    if name == "fabric":
        return (root / "sys/class/infiniband").exists()
    return name in ("kernel_log", "host")


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _unavailable(name: str, error: CollectionError, root: Path) -> Check:
    if hardware_of(name, root):
        return Check(name, "problem", error.message, error.remedy)
    return Check(name, "absent", f"{ABSENT.get(name, 'not here')} ({error.message})", error.remedy)


def check_smartctl(config: AgentConfig) -> Check:
    """smartctl with JSON output (7.0 and later) is what reads disks well."""
    options = config.collectors.get("smart", CollectorConfig()).options
    program = str(options.get("smartctl", "smartctl"))
    found = shutil.which(program)
    if found is not None:
        return Check("smartctl", "ok", found)
    status: Literal["absent", "problem"] = "problem" if hardware_of("smart", Path(config.root)) else "absent"
    return Check(
        "smartctl",
        status,
        f"{program} is not installed",
        "install smartmontools 7 or later, or set agent.collectors.smart.options.smartctl to its path",
    )


def check_capabilities(status_file: Path = Path("/proc/self/status")) -> Check:
    """The capabilities that reading disks and the kernel log takes."""
    line = next((x for x in _text(status_file).splitlines() if x.startswith("CapEff:")), "CapEff: 0")
    held = int(line.split()[1], 16)
    missing = [name for name, bit in CAPABILITIES.items() if not held >> bit & 1]
    if not missing:
        return Check("capabilities", "ok", ", ".join(CAPABILITIES))
    return Check(
        "capabilities",
        "problem",
        f"missing: {', '.join(missing)}",
        f"run as root, or give the agent's unit AmbientCapabilities={' '.join(missing)}",
    )


def check_spool(config: AgentConfig) -> Check:
    """Whether batches can be kept where agent.spool says."""
    path = Path(config.spool)
    folder = next((p for p in path.parents if p.exists()), Path("/"))
    if not folder.is_dir():
        return Check("spool", "problem", f"{folder} is not a folder", "set agent.spool to a file in a folder")
    try:
        with tempfile.TemporaryFile(dir=folder):
            free = shutil.disk_usage(folder).free
    except OSError as error:
        return Check(
            "spool",
            "problem",
            f"{folder} cannot be written: {error.strerror}",
            "make it writable by the agent, or set agent.spool",
        )
    if path.exists():
        try:
            database = sqlite3.connect(f"file:{path}?mode=ro", uri=True, timeout=0.1)
            try:
                database.execute("SELECT count(*) FROM sqlite_master").fetchone()
            finally:
                database.close()
        except sqlite3.OperationalError as error:
            if "locked" in str(error):
                return Check("spool", "ok", f"{path} is in use by a running agent")
        except sqlite3.DatabaseError as error:
            return Check(
                "spool", "problem", f"{path}: {error}", "the agent will move it aside and begin a new one"
            )
    if free < config.spool_max_bytes:
        return Check(
            "spool",
            "problem",
            f"{folder} has {free >> 20} MiB free, agent.spool_max_bytes is {config.spool_max_bytes >> 20} MiB",
            "free space or lower agent.spool_max_bytes: telemetry is given up when the disk is full",
        )
    return Check("spool", "ok", f"{path}, {free >> 20} MiB free")


def check_clock() -> Check:
    """Whether the kernel believes its clock to be synchronised."""
    state = ctypes.CDLL(None, use_errno=True).adjtimex(ctypes.create_string_buffer(256))
    if state == TIME_ERROR:
        return Check(
            "clock",
            "problem",
            "the kernel's clock is not synchronised",
            "run chrony or systemd-timesyncd: times of readings and events are those of this clock",
        )
    if state < 0:
        return Check("clock", "absent", f"cannot be asked: {os.strerror(ctypes.get_errno())}")
    return Check("clock", "ok", "synchronised")


def check_service(config: AgentConfig, token: str) -> Check:
    """Whether the service answers and takes this agent's token. Sends an empty body, which it must refuse."""
    url = config.service_url
    try:
        transport = HttpTransport(
            url, read_token(token, config.token_file), ca_file=config.ca_file, timeout_s=SERVICE_TIMEOUT_S
        )
    except ConfigError as error:
        return Check("service", "problem", str(error))
    try:
        status = transport.post(b"", None).status
    except (OSError, http.client.HTTPException) as error:
        return Check(
            "service",
            "problem",
            f"{url} does not answer: {error or type(error).__name__}",
            "start `forewarn serve`, or set agent.service_url; readings wait in the spool meanwhile",
        )
    finally:
        transport.close()
    if status in (401, 403):
        return Check(
            "service",
            "problem",
            f"{url} answers, but refuses the token (HTTP {status})",
            "put a token of this node (forewarn token) into agent.token_file or FOREWARN_AGENT_TOKEN",
        )
    if status in (400, 411, 413, 415, 422):
        return Check("service", "ok", f"{url} answers and takes the token")
    return Check(
        "service", "problem", f"{url} answers with HTTP {status}", "is agent.service_url a Forewarn service?"
    )
