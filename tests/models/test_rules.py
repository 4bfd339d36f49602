"""Rules: fatal events at once, application errors never, floors only ever raise."""

from __future__ import annotations

import math

import numpy as np
import pytest

from forewarn.collectors.base import Event
from forewarn.models import rules
from forewarn.models.features import HORIZONS_S
from forewarn.models.rules import RuleHit

NOW = 1_700_000_000.0


def xid(
    code: int | str, severity: str = "", action: str = "", device: str = "n0/gpu3", time: float = NOW
) -> Event:
    return Event(device, "xid", str(code), severity, f"NVRM: Xid ...: {code}", time=time, action=action)


@pytest.mark.parametrize("code", [46, 48, 54, 62, 64, 74, 79, 94, 95, 119, 120, 136, 158, 167, 171, 172, 173])
def test_fatal_xids_are_acted_on_at_once(code: int) -> None:
    hit = rules.on_event(xid(code))
    assert hit is not None and hit.fatal
    assert min(hit.floors) >= 0.9
    assert hit.device == "n0/gpu3" and hit.time == NOW
    assert hit.expires is not None and hit.expires > NOW
    assert str(code) in hit.text and hit.action and hit.hardware


@pytest.mark.parametrize("code", [13, 31, 43, 45, 69, 68, 11, 32])
@pytest.mark.parametrize("severity", ["", "warning", "error", "critical"])
def test_application_xids_never_drain_a_node(code: int, severity: str) -> None:
    assert rules.on_event(xid(code, severity)) is None


@pytest.mark.parametrize("code", [14, 37, 106, 162, 174])
def test_harmless_xids_say_nothing(code: int) -> None:
    assert rules.on_event(xid(code)) is None


@pytest.mark.parametrize("code", [63, 92, 176])
def test_growing_trouble_raises_risk_and_is_not_fatal(code: int) -> None:
    hit = rules.on_event(xid(code, "warning"))
    assert hit is not None and not hit.fatal
    assert 0 < hit.floors[0] < 0.1


@pytest.mark.parametrize(
    ("action", "fatal"),
    [("NONE", False), ("", False), ("RESET_GPU", True), ("RESTART_BM", True), ("DRAIN_P2P", True)],
)
def test_recovery_action(action: str, fatal: bool) -> None:
    hit = rules.on_event(xid(154, "error", action))
    assert (hit is not None and hit.fatal) is fatal


def test_unknown_xid_follows_its_severity() -> None:
    assert rules.on_event(xid(999, "warning")) is None
    hit = rules.on_event(xid(999, "critical"))
    assert hit is not None and hit.fatal
    assert rules.on_event(xid("unknown", "info")) is None


@pytest.mark.parametrize(
    ("event", "fatal"),
    [
        (Event("n0/gpu1", "gpu_lost", "lost", "critical", "", time=NOW), True),
        (Event("n0/gpu1", "gpu_missing", "missing", "critical", "", time=NOW), True),
        (Event("n0/gpu1", "gpu_reset_required", "reset_required", "critical", "", time=NOW), True),
        (Event("n0/gpu1", "aer", "fatal", "critical", "", time=NOW), True),
        (Event("n0/gpu1", "aer", "nonfatal", "error", "", time=NOW), False),
        (Event("n0", "edac", "ue", "critical", "", time=NOW), True),
        (Event("n0", "mce", "uncorrected", "critical", "", time=NOW), True),
        (Event("n0", "lockup", "soft", "error", "", time=NOW), False),
        (Event("n0/nvme0", "nvme", "dead", "critical", "", time=NOW), True),
        (Event("n0/sda", "disk_error", "medium_error", "error", "", time=NOW), False),
        (Event("n0", "sxid", "20034", "critical", "", time=NOW), True),
    ],
)
def test_other_events(event: Event, fatal: bool) -> None:
    hit = rules.on_event(event)
    assert hit is not None and hit.fatal is fatal
    assert len(hit.floors) == 3 and list(hit.floors) == sorted(hit.floors)


@pytest.mark.parametrize(
    "event",
    [
        Event("n0/gpu1", "aer", "corrected", "warning", "", time=NOW),
        Event("n0", "edac", "ce", "warning", "", time=NOW),
        Event("n0", "oom", "kill", "warning", "", time=NOW),
        Event("n0", "hung_task", "blocked", "warning", "", time=NOW),
        Event("n0/mlx5_0", "link_up", "ib0", "info", "", time=NOW),
        Event("n0", "sxid", "20001", "warning", "", time=NOW),
        Event("n0", "agent_started", "1.0", "info", "", time=NOW),
    ],
)
def test_what_is_no_verdict(event: Event) -> None:
    assert rules.on_event(event) is None


GPU_FINE = {
    "gpu_row_remap_failure": 0.0,
    "gpu_row_remap_pending": 0.0,
    "gpu_row_remap_banks_none": 0.0,
    "gpu_ecc_sram_threshold_exceeded": 0.0,
    "gpu_recovery_action": 0.0,
    "gpu_temperature_celsius": 71.0,
    "gpu_temperature_shutdown_celsius": 92.0,
    "gpu_pcie_link_width": 16.0,
    "gpu_pcie_link_width_max": 16.0,
}


@pytest.mark.parametrize(
    ("kind", "change", "rule"),
    [
        ("gpu", {}, None),
        ("gpu", {"gpu_row_remap_failure": 1.0}, "row_remap_failure"),
        ("gpu", {"gpu_row_remap_pending": 1.0}, "row_remap_pending"),
        ("gpu", {"gpu_ecc_sram_threshold_exceeded": 1.0}, "sram_threshold"),
        ("gpu", {"gpu_recovery_action": 2.0}, "recovery_action"),
        ("gpu", {"gpu_temperature_celsius": 90.0}, "thermal_shutdown_near"),
        ("gpu", {"gpu_temperature_celsius": 90.0, "gpu_temperature_shutdown_celsius": math.nan}, None),
        ("gpu", {"gpu_pcie_link_width": 8.0}, "pcie_width"),
        ("disk", {}, None),
        ("disk", {"disk_smart_passed": 1.0}, None),
        ("disk", {"disk_smart_passed": 0.0}, "smart_failed"),
        ("disk", {"disk_nvme_critical_warning": 2.0}, None),
        ("disk", {"disk_nvme_critical_warning": 16.0}, None),
        ("disk", {"disk_nvme_critical_warning": 1.0}, "nvme_spare"),
        ("disk", {"disk_nvme_critical_warning": 6.0}, "nvme_reliability"),
        ("disk", {"disk_nvme_critical_warning": 8.0}, "nvme_media_read_only"),
        ("disk", {"disk_pending_sectors": 1.0}, "pending_some"),
        ("disk", {"disk_pending_sectors": 50.0}, "pending_many"),
        ("disk", {"disk_reallocated_sectors": 4.0}, None),
        ("disk", {"disk_reallocated_sectors": 40.0}, "reallocated"),
    ],
)
def test_readings(kind: str, change: dict[str, float], rule: str | None) -> None:
    latest = {**(GPU_FINE if kind == "gpu" else {}), **change}
    hits = rules.on_readings("n0/x", kind, NOW, latest)
    assert [h.rule for h in hits] == ([rule] if rule else [])
    metrics = rules.reading_metrics(kind)
    row = np.array([[latest.get(m, math.nan) for m in metrics]])
    assert bool(rules.candidates(kind, metrics, row)[0]) is (rule is not None)


def test_every_floor_rises_with_the_horizon() -> None:
    for kind, found in rules.READING_RULES.items():
        for rule in found:
            assert len(rule.floors) == len(HORIZONS_S[kind])
            assert list(rule.floors) == sorted(rule.floors) and rule.floors[0] > 0 and rule.floors[-1] < 1


def test_returned_gpu_and_reloaded_driver_end_what_they_end() -> None:
    def hit(rule: str, action: str, device: str = "n0/gpu3") -> RuleHit:
        return RuleHit(rule, device, NOW, "", action, rules.FAILED, "gpu", True)

    back = rules.clears(Event("n0/gpu3", "gpu_returned", "returned", "info", "", time=NOW))
    reload = rules.clears(Event("n0", "driver_reloaded", "reloaded", "info", "", time=NOW))
    assert back is not None and reload is not None
    assert back(hit("xid_79", "RESTART_BM")) and not back(hit("xid_79", "RESTART_BM", "n0/gpu4"))
    assert reload(hit("xid_119", "RESET_GPU")) and reload(hit("gpu_lost", "RESTART_BM"))
    assert not reload(hit("xid_64", "REPLACE_GPU")) and not reload(hit("xid_119", "RESET_GPU", "n1/gpu3"))
    assert rules.clears(xid(79)) is None


def test_xid_45_follows_from_what_came_just_before() -> None:
    first = rules.on_event(xid(79))
    assert rules.is_secondary(xid(45, time=NOW + 3), first)
    assert not rules.is_secondary(xid(45, time=NOW + 30), first)
    assert not rules.is_secondary(xid(45, time=NOW + 3), None)


@pytest.mark.parametrize(
    ("device", "kind"),
    [
        ("n0", "node"),
        ("n0/gpu12", "gpu"),
        ("n0/nvme0", "disk"),
        ("n0/sda", "disk"),
        ("n0/mlx5_0", "nic"),
        ("bb/9c6f6dcdca", ""),
    ],
)
def test_kind_from_the_id(device: str, kind: str) -> None:
    assert rules.kind_of(device) == kind


def test_rows_remapped_again_and_again_are_wear() -> None:
    event = Event(device="n1/gpu0", kind="xid", code="63", severity="warning", message="", time=1000.0)
    hit = rules.on_event(event)
    assert hit is not None
    assert rules.repeated(hit, 2).floors == hit.floors
    worn = rules.repeated(hit, 3)
    assert worn.floors > hit.floors
    assert not worn.fatal
    assert "3 times" in worn.text


@pytest.mark.parametrize(("kind", "code"), [("job_straggler", "compute"), ("job_stalled", "rank")])
def test_a_rank_that_stands_out_makes_its_gpu_a_modest_suspect(kind: str, code: str) -> None:
    event = Event("n0/gpu3", kind, code, "warning", "rank 3 on n0 computes 15 % longer", time=NOW)
    hit = rules.on_event(event)
    assert hit is not None and not hit.fatal and hit.device == "n0/gpu3"
    assert max(hit.floors) < 0.2
    assert "15 %" in hit.text
    ends = rules.clears(Event("n0/gpu3", "job_recovered", "straggler", "info", "even again", time=NOW + 60))
    assert ends is not None and ends(hit)
    assert not ends(rules.on_event(xid(79)) or hit)


@pytest.mark.parametrize(
    ("device", "kind"),
    [
        ("n0/llama.rank3", "job_straggler"),
        ("n0/llama.rank3", "job_slow"),
        ("n0/gpu3", "job_slow"),
        ("n0/gpu3", "job_loss"),
    ],
)
def test_a_slow_job_accuses_no_device(device: str, kind: str) -> None:
    assert rules.on_event(Event(device, kind, "job", "warning", "slower", time=NOW)) is None
