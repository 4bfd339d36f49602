"""Agent and service as separate processes, fed with recordings of real machines, up to the signed webhook.

The GPUs' driver is the simulated one (no GPU here); kernel log lines, SMART documents and the exporter page are real.
"""

from __future__ import annotations

import datetime
import functools
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from simnvml import build
from simnvml.control import SimulatedDriver
from support.deployment import Deployment, deployment, wait_for
from support.standins import http_server, url_of, write_smartctl

CASES = Path(__file__).parent.parent / "cases" / "e2e"
NODE = "gpu-node-000"
SECRET = "whsec_" + "Zm9yZXdhcm4tZm9yZXdhcm4tZm9yZXdhcm4="
BACKLOG = """\
NVRM: GPU at PCI:0000:07:00: GPU-5151fa7e-0000-4000-8000-000000000000
[74785.660366] pcieport 0000:00:02.0: AER: Corrected error received: id=0010
[ 1108.858286] nvidia-nvswitch0: SXid (PCI:0000:c3:00.0): 22013, Non-fatal, Link 28 Minion Link DLREQ interrupt
[ 130.456250] [ T1946] NVRM: Xid (PCI:0000:0f:00): 31, pid=1942, name=llama-bench, channel 0x00000002, intr 00000000. MMU Fault: ENGINE GRAPHICS GPC6 GPCCLIENT_T1_13 faulted @ 0x6f6f_320c2000. Fault is of type FAULT_PDE ACCESS_TYPE_VIRT_READ
"""  # noqa: E501  # one kernel record a line, as recorded
FATAL = "[1084456.074562] NVRM: Xid (PCI:0000:0f:00): 79, pid=0, GPU has fallen off the bus.\n"

pytestmark = pytest.mark.skipif(bool(build.missing()), reason=build.missing() or "gcc is there")


@dataclass
class Node:
    """One node's stand-ins and the deployment it reports to."""

    forewarn: Deployment
    driver: SimulatedDriver
    kernel_log: Path
    settings: str
    webhooks: list[dict[str, Any]]
    webhook_url: str

    def start_agent(self) -> None:
        self.forewarn.start_agent(NODE, self.settings)

    def register_job(self) -> None:
        an_hour_ago = datetime.datetime.now(datetime.UTC) - datetime.timedelta(hours=1)
        job = {
            "nodes": [NODE],
            "webhook": {"url": self.webhook_url, "secret": SECRET},
            "checkpoint_seconds": 30,
            "restart_seconds": 300,
            "last_checkpoint": an_hour_ago.isoformat(),
        }
        response = self.forewarn.request("PUT", "/v1/jobs/llm", json=job)
        assert response.status_code in (200, 201), response.text

    def fail(self) -> None:
        with self.kernel_log.open("a") as log:
            log.write(FATAL)

    def events(self) -> set[tuple[str, str, str]]:
        return {(e["device"], e["kind"], e["code"]) for e in self.forewarn.items("/v1/events")}

    def has_xid(self, gpu: str, code: int) -> bool:
        return (f"{NODE}/{gpu}", "xid", str(code)) in self.events()


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    driver = SimulatedDriver(tmp_path / "driver", gpus=2, profile="H100")
    kernel_log = tmp_path / "kernel.log"
    kernel_log.write_text(BACKLOG)
    smartctl = write_smartctl(
        tmp_path / "smartctl",
        {
            "/dev/sda": (CASES / "ST3500418AS_12.json", "sat", "ATA"),
            "/dev/sdb": (CASES / "sas_seagate_failing.json", "scsi", "SCSI"),
            "/dev/nvme0": (CASES / "nvme-null-INTEL_SSDPE2KX010T8-nvme1.json", "nvme", "NVMe"),
        },
    )
    page = (CASES / "exporter-h100-00.prom").read_bytes()
    with (
        http_server(page) as exporter,
        http_server(secret=SECRET) as receiver,
        deployment(tmp_path) as forewarn,
    ):
        settings = (
            f'[agent.collectors.nvml]\ninterval_s = 1.0\noptions = {{ library = "{driver.library}" }}\n'
            f'[agent.collectors.kernel_log]\ninterval_s = 0.5\noptions = {{ path = "{kernel_log}" }}\n'
            f'[agent.collectors.smart]\ninterval_s = 5.0\noptions = {{ smartctl = "{smartctl}" }}\n'
            f'[agent.collectors.dcgm]\ninterval_s = 1.0\noptions = {{ url = "{url_of(exporter, "/metrics")}" }}\n'
            "[agent.collectors.host]\ninterval_s = 2.0\n"
        )
        forewarn.start_service()
        yield Node(forewarn, driver, kernel_log, settings, receiver.received, url_of(receiver, "/protect"))


def test_recordings_become_events_readings_risk_and_one_protection(node: Node) -> None:
    forewarn = node.forewarn
    node.start_agent()

    gpu = f"{NODE}/gpu1"
    expected = {
        (gpu, "xid", "31"),
        (f"{NODE}/sda", "disk_verdict", "warning"),
        (f"{NODE}/sdb", "disk_verdict", "at_risk"),
        (f"{NODE}/nvme0", "disk_verdict", "healthy"),
    }
    wait_for(lambda: expected <= node.events(), f"the events {expected}")
    kinds = {(kind, code) for _, kind, code in node.events()}
    assert ("aer", "corrected") in kinds
    assert ("sxid", "22013") in kinds

    def readings(device: str) -> dict[str, float]:
        latest = forewarn.get(f"/v1/risk/{device}")["latest"]
        return {metric: entry["value"] for metric, entry in latest.items()}

    wait_for(
        lambda: f"{NODE}/sda" in {r["device"] for r in forewarn.items("/v1/risk")}, "the disks to be scored"
    )
    disk = readings(f"{NODE}/sda")
    assert disk["disk_reallocated_sectors"] == 304
    assert disk["disk_power_on_hours"] == 44668
    assert disk["disk_temperature_celsius"] == 33
    assert readings(f"{NODE}/sdb")["disk_grown_defects"] == 9
    assert readings(f"{NODE}/nvme0")["disk_nvme_percentage_used_ratio"] == pytest.approx(0.73)

    rows = {row["device"]: row for row in forewarn.items("/v1/risk")}
    assert rows[gpu]["simulated"] is True
    assert rows[f"{NODE}/sda"]["simulated"] is False
    # An application's XID is no reason to fear for the hardware.
    assert rows[gpu]["level"] == "healthy"
    assert rows[f"{NODE}/sdb"]["max_risk"] > rows[f"{NODE}/nvme0"]["max_risk"]

    node.register_job()
    node.fail()
    wait_for(lambda: node.webhooks, "the webhook")
    found = forewarn.get(f"/v1/risk/{gpu}")
    assert found["level"] == "critical"
    assert any("79" in reason["text"] for reason in found["reasons"]), found["reasons"]
    webhook = node.webhooks[0]
    assert webhook["genuine"]
    body = webhook["body"]
    assert "llm" in json.dumps(body)
    assert gpu in json.dumps(body)

    protections = forewarn.items("/v1/protections")
    assert [p["job"] for p in protections] == ["llm"]
    done = {"state": "completed", "checkpoint": "/checkpoints/7", "step": 7, "duration_seconds": 21.5}
    for _ in range(2):  # an acknowledgement that comes twice counts once
        answer = forewarn.request("POST", f"/v1/protections/{protections[0]['id']}/ack", json=done)
        assert answer.status_code == 200, answer.text
    (protection,) = forewarn.items("/v1/protections")
    assert (protection["state"], protection["checkpoint"], protection["step"]) == (
        "completed",
        "/checkpoints/7",
        7,
    )
    assert len({w["id"] for w in node.webhooks}) == 1


@pytest.mark.parametrize("victim", ["service", NODE])
def test_kill_nine_at_any_point_loses_nothing_and_doubles_nothing(node: Node, victim: str) -> None:
    forewarn = node.forewarn
    node.register_job()
    node.start_agent()
    wait_for(lambda: (f"{NODE}/gpu1", "xid", "31") in node.events(), "the first event")

    def restart() -> None:
        forewarn.kill(victim)
        if victim == "service":
            forewarn.start_service()
        else:
            node.start_agent()

    codes = [13, 43, 45, 69, 31]
    for round_number, code in enumerate(codes):
        with node.kernel_log.open("a") as log:
            log.write(
                f"[{2000 + 60 * round_number}.5] NVRM: Xid (PCI:0000:07:00): {code}, pid={round_number}, Ch 00000001\n"
            )
        if round_number % 2:  # at another moment each round: at once, or when the event has just arrived
            wait_for(functools.partial(node.has_xid, "gpu0", code), f"XID {code}")
        restart()
    node.fail()
    restart()
    wait_for(lambda: (f"{NODE}/gpu1", "xid", "79") in node.events(), "the fatal XID")
    wait_for(lambda: node.webhooks, "the webhook")
    restart()
    wait_for(lambda: forewarn.items("/v1/protections"), "the protection to be there still")

    events = [(e["device"], e["kind"], e["code"]) for e in forewarn.items("/v1/events")]
    xids = sorted(e for e in events if e[1] == "xid")
    assert xids == sorted(
        [(f"{NODE}/gpu0", "xid", str(code)) for code in codes]
        + [(f"{NODE}/gpu1", "xid", c) for c in ("31", "79")]
    )
    assert len(forewarn.items("/v1/protections")) == 1
    assert len({w["id"] for w in node.webhooks}) == 1
    assert all(w["genuine"] for w in node.webhooks)
