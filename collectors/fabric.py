"""InfiniBand and RoCE ports, and the physical network interfaces: state, rate, errors, flaps.

Reads /sys/class/infiniband and /sys/class/net below `setup.root`. A link that goes down or comes up is one
event; one that did both between two polls is seen by its counters.
"""

from __future__ import annotations

import re
from pathlib import Path

import msgspec

from forewarn.collectors.base import Device, Event, Reading, Sample
from forewarn.collectors.errors import UnavailableError
from forewarn.collectors.registry import Setup
from forewarn.collectors.sysfs import entries, pairs, read_number, read_text

SOURCE = "fabric"
MAX_PORTS = 128
_ACTIVE = 4
_PORT_DATA_BYTES = 4
"""port_xmit_data and port_rcv_data count words of four bytes."""
_IFF_UP = 0x1
_UNKNOWN_SPEED = 4_294_967_295.0

_COUNTERS: dict[str, tuple[str, float]] = {
    "counters/symbol_error": ("fabric_symbol_errors_total", 1),
    "counters/link_error_recovery": ("fabric_link_recoveries_total", 1),
    "counters/link_downed": ("fabric_link_downs_total", 1),
    "counters/port_rcv_errors": ("fabric_receive_errors_total", 1),
    "counters/port_rcv_remote_physical_errors": ("fabric_receive_remote_physical_errors_total", 1),
    "counters/local_link_integrity_errors": ("fabric_local_integrity_errors_total", 1),
    "counters/excessive_buffer_overrun_errors": ("fabric_buffer_overruns_total", 1),
    "counters/port_xmit_discards": ("fabric_transmit_discards_total", 1),
    "counters/port_xmit_wait": ("fabric_transmit_wait_ticks_total", 1),
    "counters/port_xmit_data": ("fabric_transmit_bytes_total", _PORT_DATA_BYTES),
    "counters/port_rcv_data": ("fabric_receive_bytes_total", _PORT_DATA_BYTES),
    "hw_counters/out_of_sequence": ("fabric_out_of_sequence_total", 1),
    "hw_counters/packet_seq_err": ("fabric_packet_sequence_errors_total", 1),
    "hw_counters/local_ack_timeout_err": ("fabric_ack_timeouts_total", 1),
    "hw_counters/rnr_nak_retry_err": ("fabric_receiver_not_ready_errors_total", 1),
    "hw_counters/roce_adp_retrans": ("fabric_adaptive_retransmissions_total", 1),
    "hw_counters/rx_icrc_encapsulated": ("fabric_icrc_errors_total", 1),
    "hw_counters/out_of_buffer": ("fabric_out_of_buffer_total", 1),
    "hw_counters/np_cnp_sent": ("fabric_congestion_notifications_sent_total", 1),
    "hw_counters/rp_cnp_handled": ("fabric_congestion_notifications_handled_total", 1),
}
_INTERFACE_COUNTERS = {
    "carrier_changes": "fabric_interface_carrier_changes_total",
    "statistics/rx_errors": "fabric_interface_receive_errors_total",
    "statistics/tx_errors": "fabric_interface_transmit_errors_total",
    "statistics/rx_dropped": "fabric_interface_receive_drops_total",
    "statistics/rx_crc_errors": "fabric_interface_crc_errors_total",
    "statistics/rx_bytes": "fabric_interface_receive_bytes_total",
    "statistics/tx_bytes": "fabric_interface_transmit_bytes_total",
}
_RATE = re.compile(r"([0-9.]{1,10})\s*Gb/sec")
_PCI = re.compile(r"^[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]$")


class _Link(msgspec.Struct):
    """What was last seen of a link. `downs` counts the times it went down, where the driver counts them."""

    up: bool
    downs: float | None
    what: str


class FabricCollector:
    """Samples and link events of ports (`mlx5_0`; a second port is `mlx5_0.2`) and interfaces (`eth0`).

    `exclude` leaves out devices by name. On some systems firmware guards the adapters that serve the NVLink
    fabric, and reading their counters only fills the kernel log with `ACCESS_REG ... failed`: name those here.
    `virtual_functions` true takes in SR-IOV virtual functions, which share their port with the physical one.
    """

    name = SOURCE

    def __init__(
        self,
        setup: Setup,
        *,
        interval_s: float = 10.0,
        deadline_s: float = 5.0,
        exclude: list[str] | None = None,
        virtual_functions: bool = False,
    ) -> None:
        self.interval_s = interval_s
        self.deadline_s = deadline_s
        self._sys = setup.root / "sys"
        self._exclude = frozenset(exclude or ())
        self._virtual_functions = virtual_functions
        self._links: dict[str, _Link] = {}
        self._gone: set[str] = set()
        self._off: set[str] = set()

    def collect(self) -> Reading:
        """One reading; empty on a host without such devices. Raises UnavailableError when there is no /sys."""
        if not (self._sys / "class").is_dir():
            raise UnavailableError(f"fabric: {self._sys}/class is not there: is /sys mounted?")
        reading = Reading(samples=[], events=[], devices=[], errors=[])
        seen: dict[str, _Link] = {}
        self._off = set()
        for adapter in entries(self._sys / "class/infiniband"):
            if adapter.name not in self._exclude and self._wanted(adapter):
                for port in entries(adapter / "ports"):
                    if len(seen) < MAX_PORTS:
                        self._port(adapter, port, reading, seen)
        for interface in entries(self._sys / "class/net"):
            if (
                interface.name not in self._exclude
                and (interface / "device").exists()
                and self._wanted(interface)
            ):
                self._interface(interface, reading, seen)
        reading.events.extend(self._changes(seen))
        self._links = seen
        return reading

    def close(self) -> None:
        pass

    def _wanted(self, device: Path) -> bool:
        return self._virtual_functions or not (device / "device/physfn").exists()

    # -- InfiniBand and RoCE ports --

    def _port(self, adapter: Path, port: Path, reading: Reading, seen: dict[str, _Link]) -> None:
        local = adapter.name if port.name == "1" else f"{adapter.name}.{port.name}"
        state = read_number_before_colon(port / "state")
        if state is None:
            return
        values: dict[str, float | None] = {
            "fabric_port_up": float(state == _ACTIVE),
            "fabric_port_state": state,
            "fabric_port_physical_state": read_number_before_colon(port / "phys_state"),
            "fabric_port_rate_bytes_per_second": _rate(read_text(port / "rate"), state),
        }
        for file, (metric, factor) in _COUNTERS.items():
            if (count := read_number(port / file)) is not None and count >= 0:
                values[metric] = count * factor
        reading.samples.extend(Sample(local, k, v) for k, v in values.items() if v is not None)
        layer = read_text(port / "link_layer") or "InfiniBand"
        reading.devices.append(_adapter(local, adapter, layer))
        seen[local] = _Link(state == _ACTIVE, values.get("fabric_link_downs_total"), f"{layer} port")

    # -- network interfaces --

    def _interface(self, interface: Path, reading: Reading, seen: dict[str, _Link]) -> None:
        local = interface.name
        flags = read_number(interface / "flags")
        if flags is None or not int(flags) & _IFF_UP:
            self._off.add(local)  # by the administrator: nothing to expect of it
            return
        carrier = read_number(interface / "carrier")
        values: dict[str, float | None] = {"fabric_interface_up": carrier}
        speed = read_number(interface / "speed")
        if carrier and speed is not None and 0 < speed < _UNKNOWN_SPEED:
            values["fabric_interface_speed_bytes_per_second"] = speed * 1e6 / 8
        for file, metric in _INTERFACE_COUNTERS.items():
            values[metric] = read_number(interface / file)
        reading.samples.extend(Sample(local, k, v) for k, v in values.items() if v is not None)
        driver = _target(interface / "device/driver")
        reading.devices.append(
            Device(
                device=local,
                kind="nic",
                serial=read_text(interface / "address") or "",
                pci=_pci(interface / "device"),
                labels={"driver": driver} if driver else {},
            )
        )
        if carrier is not None:
            downs = read_number(interface / "carrier_down_count")
            changes = values["fabric_interface_carrier_changes_total"]
            if downs is None and changes is not None:
                downs = changes // 2
            seen[local] = _Link(bool(carrier), downs, "interface")

    # -- what changed --

    def _changes(self, seen: dict[str, _Link]) -> list[Event]:
        events: list[Event] = []
        for local, before in self._links.items():
            now = seen.get(local)
            if now is None:
                if before.up and local not in self._off:
                    events.append(_event("link_down", local, "error", f"{before.what} {local} is gone"))
                continue
            downs = 0
            if now.downs is not None and before.downs is not None and now.downs > before.downs:
                downs = int(now.downs - before.downs)
            if before.up and not now.up:
                events.append(
                    _event("link_down", local, "error", f"{now.what} {local} went down", max(1, downs))
                )
            elif now.up and not before.up:
                events.append(_event("link_up", local, "info", f"{now.what} {local} came up"))
            elif now.up and downs:
                text = f"{now.what} {local} went down and came up again since the last look"
                events.append(_event("link_down", local, "warning", text, downs))
        events.extend(
            _event("link_up", local, "info", f"{now.what} {local} is back")
            for local, now in seen.items()
            if now.up and local in self._gone
        )
        gone = {local for local, before in self._links.items() if before.up and local not in seen} - self._off
        self._gone = (self._gone | gone) - seen.keys()
        return events


def read_number_before_colon(path: Path) -> float | None:
    """`4: ACTIVE` as 4."""
    text = read_text(path) or ""
    digits = text.partition(":")[0].strip()
    return float(digits) if digits.isdecimal() and len(digits) < 4 else None


def _rate(text: str | None, state: float) -> float | None:
    """`400 Gb/sec (4X NDR)` in bytes a second. A port that is down gives a rate of its own fancy: absent."""
    m = _RATE.match(text or "")
    if m is None or state != _ACTIVE:
        return None
    try:
        return float(m[1]) * 1e9 / 8
    except ValueError:
        return None


def _adapter(local: str, adapter: Path, layer: str) -> Device:
    firmware = read_text(adapter / "fw_ver")
    model = (read_text(adapter / "hca_type") or "") + " " + (read_text(adapter / "board_id") or "")
    labels = {"link_layer": layer, "firmware": firmware or ""}
    return Device(
        device=local,
        kind="nic",
        model=model.strip(),
        serial=read_text(adapter / "node_guid") or "",
        pci=_pci(adapter / "device"),
        labels={k: v for k, v in labels.items() if v},
    )


def _pci(link: Path) -> str | None:
    """The PCI address a `device` link leads to, else the one its uevent names."""
    target = _target(link)
    if _PCI.match(target):
        return target
    for name, value in pairs(read_text(link / "uevent") or "", "="):
        if name == "PCI_SLOT_NAME" and _PCI.match(value.lower()):
            return value.lower()
    return None


def _target(link: Path) -> str:
    try:
        return link.readlink().name.lower()
    except OSError:
        return ""


def _event(kind: str, local: str, severity: str, message: str, count: int = 1) -> Event:
    return Event(device=local, kind=kind, code=local, severity=severity, message=message, count=count)
