"""The collector against stand-ins for smartctl: real processes that answer with recordings, hang, or talk nonsense."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from forewarn.collectors import smart_text
from forewarn.collectors.base import Collector, Reading
from forewarn.collectors.catalog import EVENTS, METRICS
from forewarn.collectors.clock import ManualClock
from forewarn.collectors.errors import ConfigError, UnavailableError
from forewarn.collectors.registry import Setup, create
from forewarn.collectors.smart import SmartCollector
from forewarn.collectors.smart_reading import DiskReading

CASES = Path(__file__).parents[1] / "cases" / "smart"

STAND_IN = """\
#!/bin/sh
cd '{folder}'
echo "$*" >> calls
for last in "$@"; do :; done
case "$*" in *--scan*) last=scan;; esac
name=$(basename "$last")
if [ -e "$name.hang" ]; then echo $$ > "$name.pid"; exec sleep 600; fi
case "$*" in *--json*) ;; *) [ -e "$name.text" ] && name="$name.text";; esac
[ -e "$name" ] && cat "$name"
[ -e "$name.status" ] && exit "$(cat "$name.status")"
exit 0
"""


class Smartctl:
    """A folder of answers and the program that gives them: one file a disk, `NAME.hang` makes it hang."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.program = folder / "smartctl"
        self.program.write_text(STAND_IN.format(folder=folder))
        self.program.chmod(0o755)
        self.clock = ManualClock()

    def lists(self, **types: str) -> None:
        devices = [{"name": f"/dev/{name}", "type": type_} for name, type_ in types.items()]
        self.answers("scan", json.dumps({"devices": devices, "smartctl": {"exit_status": 0}}))

    def answers(self, name: str, text: str | bytes, status: int = 0) -> None:
        (self.folder / name).write_bytes(text if isinstance(text, bytes) else text.encode())
        (self.folder / f"{name}.status").write_text(str(status))

    def case(self, name: str, file: str) -> None:
        self.answers(name, (CASES / file).read_bytes())

    def hangs(self, name: str) -> None:
        (self.folder / f"{name}.hang").touch()

    @property
    def calls(self) -> list[str]:
        path = self.folder / "calls"
        return path.read_text().splitlines() if path.exists() else []

    def collector(self, **options: Any) -> SmartCollector:
        options = {"smartctl": str(self.program), **options}
        return SmartCollector(Setup(self.clock, self.folder / "root"), **options)


@pytest.fixture
def smartctl(tmp_path: Path) -> Smartctl:
    return Smartctl(tmp_path)


def values(reading: Reading, device: str) -> dict[str, float]:
    return {s.metric: s.value for s in reading.samples if s.device == device}


def verdict(reading: Reading, device: str) -> str:
    found = [
        s.labels["verdict"] for s in reading.samples if s.device == device and s.metric == "disk_verdict"
    ]
    assert len(found) == 1
    return found[0]


def ata(*, rotational: bool = True, passed: bool = True, **attributes: int) -> str:
    names = {"Reallocated_Sector_Ct": 5, "Current_Pending_Sector": 197, "Command_Timeout": 188}
    table = [
        {"id": names[name], "name": name, "value": 100, "raw": {"value": raw, "string": str(raw)}}
        for name, raw in attributes.items()
    ]
    return json.dumps(
        {
            "device": {"name": "/dev/sda", "type": "sat", "protocol": "ATA"},
            "model_name": "TEST DISK",
            "serial_number": "S1",
            "rotation_rate": 7200 if rotational else 0,
            "smart_status": {"passed": passed},
            "temperature": {"current": 31},
            "ata_smart_attributes": {"table": table},
        }
    )


STANDBY = (CASES / "issues/constructed-standby-7.3.json").read_text()


def test_is_a_collector_and_made_by_name(smartctl: Smartctl) -> None:
    options = {
        "smartctl": str(smartctl.program),
        "devices": "/dev/bus/0:megaraid,5,/dev/sda",
        "wake": "false",
    }
    collector = create("smart", options)
    assert isinstance(collector, Collector)
    smartctl.answers("0", ata())
    smartctl.answers("sda", ata())
    assert {d.device for d in collector.collect().devices} == {"bus0-megaraid-5", "sda"}
    assert any("-d megaraid,5 /dev/bus/0" in call for call in smartctl.calls)


def test_a_disk_of_each_kind(smartctl: Smartctl) -> None:
    smartctl.lists(sda="scsi", sdb="scsi", nvme0="nvme")
    smartctl.case("sda", "scrutiny/smart-fail2.json")
    smartctl.case("sdb", "nasty/sas_seagate_failing.json")
    smartctl.case("nvme0", "nasty/nvme_goodram_irdm.json")
    reading = smartctl.collector().collect()
    assert not reading.errors
    assert verdict(reading, "sda") == "failing"
    assert verdict(reading, "sdb") == "at_risk"
    assert verdict(reading, "nvme0") == "healthy"
    assert values(reading, "nvme0")["disk_nvme_percentage_used_ratio"] == 0.16
    assert values(reading, "sda")["disk_standby"] == 0
    assert "disk_standby" not in values(reading, "nvme0")
    critical = next(e for e in reading.events if e.device == "sda")
    assert (
        critical.severity == "critical"
        and "1975 reallocated" in critical.message
        and "% a year" in critical.message
    )
    for sample in reading.samples:
        assert set(sample.labels) == set(METRICS[sample.metric].labels)
    assert all(e.kind in EVENTS for e in reading.events)
    nvme = next(d for d in reading.devices if d.device == "nvme0")
    assert (nvme.kind, nvme.labels["rotational"], nvme.labels["protocol"]) == ("disk", "false", "NVMe")


def test_only_spinning_disks_are_asked_not_to_wake_and_types_are_left_to_smartctl(smartctl: Smartctl) -> None:
    smartctl.lists(sda="scsi", nvme0="nvme", sdb="sat")
    for name in ("sda", "nvme0", "sdb"):
        smartctl.answers(name, ata())
    smartctl.collector(types={"/dev/sdb": "usbjmicron"}).collect()
    assert "--json --all -n standby /dev/sda" in smartctl.calls
    assert "--json --all -d nvme /dev/nvme0" in smartctl.calls
    assert "--json --all -n standby -d usbjmicron /dev/sdb" in smartctl.calls


def test_one_hanging_disk_does_not_delay_another(smartctl: Smartctl) -> None:
    smartctl.lists(sda="scsi", sdb="scsi", sdc="scsi")
    smartctl.answers("sda", ata())
    smartctl.answers("sdb", ata())
    smartctl.hangs("sdb")
    smartctl.answers("sdc", ata())
    collector = smartctl.collector(call_timeout_s=1.0, max_concurrent=1)
    reading = collector.collect()
    assert verdict(reading, "sda") == verdict(reading, "sdc") == "healthy"
    assert verdict(reading, "sdb") == "unavailable:timeout"
    assert [e.device for e in reading.errors] == ["sdb"] and "kernel log" in reading.errors[0].remedy
    pid = int((smartctl.folder / "sdb.pid").read_text())
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    # The slow one is asked last from now on, and serves nothing stale meanwhile.
    reading = collector.collect()
    assert smartctl.calls[-1].endswith("/dev/sdb")
    assert set(values(reading, "sdb")) == {"disk_verdict"}
    assert not [e for e in reading.events if e.device == "sdb"]
    (smartctl.folder / "sdb.hang").unlink()
    reading = collector.collect()
    assert [(e.device, e.code) for e in reading.events] == [("sdb", "healthy")]


class Unkillable:
    """What is left of a smartctl in an uninterruptible sleep."""

    returncode: int | None = None

    def poll(self) -> int | None:
        return self.returncode


def test_a_smartctl_that_cannot_be_killed_is_not_joined_by_a_second(smartctl: Smartctl) -> None:
    smartctl.lists(sda="scsi")
    smartctl.answers("sda", ata())
    collector = smartctl.collector()
    collector.collect()
    left = Unkillable()
    collector._disks["sda"].left = left  # type: ignore[assignment]  # no process can be made to hang so in a test
    asked = len(smartctl.calls)
    reading = collector.collect()
    assert len(smartctl.calls) == asked
    assert verdict(reading, "sda") == "unavailable:timeout"
    left.returncode = -9
    assert verdict(collector.collect(), "sda") == "healthy"


@pytest.mark.parametrize(
    "garbage",
    [
        b"",
        b"\x00\xff\xfe",
        b"{",
        b'{"device": ',
        b"Segmentation fault\n",
        b"[1, 2]",
        b'{"a":' * 100_000,
        b"9" * 70_000,
    ],
    ids=["nothing", "bytes", "brace", "cut", "words", "list", "deep", "digits"],
)
def test_garbage_of_one_disk_is_an_error_of_that_disk_alone(smartctl: Smartctl, garbage: bytes) -> None:
    smartctl.lists(sda="scsi", sdb="scsi")
    smartctl.answers("sda", garbage, 2)
    smartctl.answers("sdb", ata())
    reading = smartctl.collector().collect()
    assert verdict(reading, "sdb") == "healthy"
    assert verdict(reading, "sda") in ("unavailable:garbage", "unavailable:open_failed")
    assert [(e.source, e.device) for e in reading.errors] == [("smart", "sda")]
    assert set(values(reading, "sda")) <= {"disk_verdict", "disk_smartctl_exit_status"}


def test_endless_output_is_cut(smartctl: Smartctl, tmp_path: Path) -> None:
    program = tmp_path / "endless"
    program.write_text(
        '#!/bin/sh\ncase "$*" in *--scan*) echo "/dev/sda -d scsi # disk";; *) exec yes;; esac\n'
    )
    program.chmod(0o755)
    reading = smartctl.collector(smartctl=str(program)).collect()
    assert verdict(reading, "sda") == "unavailable:garbage"
    assert "megabytes" in reading.errors[0].message


def test_events_tell_of_changes_only(smartctl: Smartctl) -> None:
    smartctl.lists(sda="scsi")
    collector = smartctl.collector()
    told = []
    for pending in (0, 0, 8, 8, 200):
        smartctl.answers("sda", ata(Current_Pending_Sector=pending))
        told.append([e.code for e in collector.collect().events])
    assert told == [["healthy"], [], ["warning"], [], ["at_risk"]]


def test_a_sleeping_disk_keeps_its_counters_and_its_verdict(smartctl: Smartctl) -> None:
    smartctl.lists(sda="scsi")
    collector = smartctl.collector()
    smartctl.answers("sda", ata(Reallocated_Sector_Ct=304))
    awake = collector.collect()
    assert verdict(awake, "sda") == "warning"
    smartctl.answers("sda", STANDBY, 2)
    asleep = collector.collect()
    assert not asleep.events and not asleep.errors
    assert verdict(asleep, "sda") == "warning"
    kept = values(asleep, "sda")
    assert (kept["disk_standby"], kept["disk_reallocated_sectors"]) == (1, 304)
    assert "disk_temperature_celsius" not in kept  # it was true when it was read, not now
    assert asleep.devices[0].serial == "S1"


def test_a_solid_state_disk_that_answers_standby_is_not_skipped_for_ever(smartctl: Smartctl) -> None:
    smartctl.answers("sda", STANDBY, 2)
    collector = smartctl.collector(devices=["/dev/sda:megaraid,3"])
    assert verdict(collector.collect(), "sda-megaraid-3") == "asleep"
    assert any("--info" in call for call in smartctl.calls)
    smartctl.answers("sda", ata(rotational=False))
    collector.collect()
    collector.collect()
    assert "standby" not in smartctl.calls[-1]


def test_the_kernel_says_which_disk_spins(smartctl: Smartctl) -> None:
    smartctl.lists(sda="scsi")
    smartctl.answers("sda", ata(rotational=False))
    queue = smartctl.folder / "root/sys/block/sda/queue"
    queue.mkdir(parents=True)
    (queue / "rotational").write_text("0\n")
    smartctl.collector().collect()
    assert smartctl.calls[-1] == "--json --all /dev/sda"


def test_a_disk_that_vanishes_is_a_state_of_its_own(smartctl: Smartctl) -> None:
    smartctl.lists(sda="scsi", sdb="scsi")
    smartctl.answers("sda", ata())
    smartctl.answers("sdb", ata())
    collector = smartctl.collector()
    collector.collect()
    smartctl.case("sda", "local/no-such-device.json")
    reading = collector.collect()
    assert [(e.code, e.severity) for e in reading.events] == [("unavailable:vanished", "critical")]
    assert set(values(reading, "sda")) == {"disk_verdict"}
    assert reading.devices[0].serial == "S1"
    smartctl.lists(sdb="scsi")
    reading = collector.collect()
    assert verdict(reading, "sda") == "unavailable:vanished" and not reading.events
    smartctl.lists(sda="scsi", sdb="scsi")
    smartctl.answers("sda", ata())
    reading = collector.collect()
    assert [(e.device, e.code) for e in reading.events] == [("sda", "healthy")]


def test_a_disk_that_never_answered_did_not_vanish(smartctl: Smartctl) -> None:
    smartctl.lists(sda="scsi")
    smartctl.case("sda", "local/no-such-device.json")
    assert verdict(smartctl.collector().collect(), "sda") == "unavailable:open_failed"


@pytest.mark.parametrize(
    ("file", "type_", "capability"),
    [
        ("local/permission-denied-nvme.json", "nvme", "CAP_SYS_ADMIN"),
        ("local/permission-denied-sat.json", "sat", "CAP_SYS_RAWIO"),
    ],
)
def test_a_refusal_names_the_capability(smartctl: Smartctl, file: str, type_: str, capability: str) -> None:
    smartctl.lists(vda=type_)
    smartctl.case("vda", file)
    reading = smartctl.collector().collect()
    assert verdict(reading, "vda") == "unavailable:permission"
    assert capability in reading.errors[0].remedy
    assert reading.events[0].labels == {"why": "permission"}


def test_a_needed_type_is_hinted(smartctl: Smartctl) -> None:
    smartctl.lists(sda="scsi")
    smartctl.case("sda", "issues/constructed-dell-megaraid-needs-d.json")
    reading = smartctl.collector().collect()
    assert "megaraid,N" in reading.errors[0].remedy
    assert reading.events[0].labels == {"why": "device_type", "type_to_try": "megaraid,N"}


def test_a_smartctl_without_json_is_asked_in_words(smartctl: Smartctl) -> None:
    refusal = "smartctl 6.6\n\n=======> UNRECOGNIZED OPTION: json\n\nUse smartctl -h to get a usage summary\n"
    smartctl.answers("scan", refusal, 1)
    smartctl.answers("scan.text", "/dev/sda -d scsi # /dev/sda, SCSI device\n")
    smartctl.answers("sda", refusal, 1)
    text = next(CASES.glob("text/*sat_hdd_0_issue70*--all*"))
    smartctl.answers("sda.text", text.read_bytes())
    collector = smartctl.collector()
    reading = collector.collect()
    assert not reading.errors
    assert verdict(reading, "sda") == "healthy"
    assert values(reading, "sda")["disk_power_on_hours"] == 1380
    collector.collect()
    assert "--json" not in smartctl.calls[-1]  # it is not asked for JSON again


@pytest.mark.parametrize(
    "file",
    [
        "scrutiny/smart-fail2.json",
        "local/virtio-unable-detect.json",
        "issues/pysmart-82-standby.txt",
        "issues/usb-bridge-275.txt",
        "issues/constructed-pre73-pending-defect-prefix.json.txt",
    ],
)
def test_a_program_that_replays_one_answer_stands_for_one_disk(
    smartctl: Smartctl, tmp_path: Path, file: str
) -> None:
    program = tmp_path / "replay"
    program.write_text(f"#!/bin/sh\ncat '{CASES / file}'\n")
    program.chmod(0o755)
    reading = smartctl.collector(smartctl=str(program)).collect()
    assert len(reading.devices) == len([s for s in reading.samples if s.metric == "disk_verdict"]) == 1


def test_no_disks_is_no_error(smartctl: Smartctl) -> None:
    smartctl.answers(
        "scan", json.dumps({"smartctl": {"argv": ["smartctl", "--scan", "--json"], "exit_status": 0}})
    )
    assert smartctl.collector().collect() == Reading()


def test_a_missing_smartctl_says_how_to_get_it(smartctl: Smartctl) -> None:
    with pytest.raises(UnavailableError, match="apt-get install smartmontools"):
        smartctl.collector(smartctl="/nowhere/smartctl").collect()


def test_a_scan_that_cannot_be_read_is_unavailable(smartctl: Smartctl) -> None:
    smartctl.answers("scan", "bash: cannot do this\n", 126)
    with pytest.raises(UnavailableError, match="cannot do this"):
        smartctl.collector().collect()


def test_a_scan_that_hangs_leaves_the_known_disks_watched(smartctl: Smartctl) -> None:
    smartctl.lists(sda="scsi")
    smartctl.answers("sda", ata())
    collector = smartctl.collector(call_timeout_s=1.0, rescan_s=60)
    collector.collect()
    smartctl.hangs("scan")
    smartctl.clock.advance(60)
    assert verdict(collector.collect(), "sda") == "healthy"
    with pytest.raises(UnavailableError, match="did not answer in time"):
        smartctl.collector(call_timeout_s=1.0).collect()


def test_a_command_line_may_stand_before_smartctl(smartctl: Smartctl) -> None:
    smartctl.lists(sda="scsi")
    smartctl.answers("sda", ata())
    assert verdict(smartctl.collector(smartctl=f"env FOO=1 {smartctl.program}").collect(), "sda") == "healthy"


@pytest.mark.parametrize(
    ("entry", "id_", "arguments"),
    [
        ("/dev/sda", "sda", "/dev/sda"),
        ("/dev/nvme0n1", "nvme0", "/dev/nvme0n1"),
        ("/dev/sdb:sat", "sdb", "-d sat /dev/sdb"),
        ("/dev/sdb:scsi", "sdb", "-d scsi /dev/sdb"),
        ("/dev/bus/0:sat+megaraid,5", "bus0-megaraid-5", "-d sat+megaraid,5 /dev/bus/0"),
        ("/dev/sg2:areca,3/2", "sg2-areca-3-2", "-d areca,3/2 /dev/sg2"),
        ("/dev/twa0:3ware,1", "twa0-3ware-1", "-d 3ware,1 /dev/twa0"),
        ("/dev/cciss/c0d0:cciss,0", "c0d0-cciss-0", "-d cciss,0 /dev/cciss/c0d0"),
        (
            "/dev/disk/by-path/pci-0000:00:1f.2-ata-1",
            "pci-0000-00-1f.2-ata-1",
            "/dev/disk/by-path/pci-0000:00:1f.2-ata-1",
        ),
    ],
)
def test_disks_by_list(smartctl: Smartctl, entry: str, id_: str, arguments: str) -> None:
    smartctl.answers(entry.rpartition("/")[2].partition(":")[0], ata())
    reading = smartctl.collector(devices=[entry]).collect()
    assert [d.device for d in reading.devices] == [id_]
    assert smartctl.calls[0].endswith(arguments)
    assert ("-d" in smartctl.calls[0]) == ("-d" in arguments)


@pytest.mark.skipif(shutil.which("smartctl") is None, reason="needs smartmontools")
def test_the_real_smartctl_refuses_a_disk_that_is_none(tmp_path: Path) -> None:
    device = tmp_path / "no-disk"
    device.touch()
    collector = SmartCollector(
        Setup(ManualClock()), devices=[str(device), f"{device}:nvme", f"{device}:nonsense"]
    )
    reading = collector.collect()
    codes = {d.device: verdict(reading, d.device) for d in reading.devices}
    assert len(codes) == 3 and all(code.startswith("unavailable:") for code in codes.values())
    assert len(reading.errors) == 3 and all(e.message and e.remedy for e in reading.errors)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"devices": [":sat"]}, "devices"),
        ({"devices": ["-x"]}, "devices"),
        ({"call_timeout_s": 0}, "call_timeout_s"),
        ({"max_concurrent": 0}, "max_concurrent"),
    ],
)
def test_wrong_settings_are_named(smartctl: Smartctl, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        smartctl.collector(**options)


def test_pysmart_reads_plain_text_that_we_do_not_know(
    smartctl: Smartctl, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = next(CASES.glob("text/*sat_hdd_0_issue70*--all*"))
    smartctl.answers("scan", "/dev/sda -d sat # /dev/sda [SAT], ATA device\n")
    smartctl.answers("sda", text.read_bytes())
    monkeypatch.setattr(
        smart_text, "read", lambda text, exit_status=0: DiskReading("empty", exit_status=exit_status)
    )
    collector = smartctl.collector(json="never")
    reading = collector.collect()
    assert not reading.errors
    assert verdict(reading, "sda") == "healthy"
    assert values(reading, "sda")["disk_power_on_hours"] == 1380
    assert values(reading, "sda")["disk_temperature_celsius"] == 31
    assert len(smartctl.calls) == 2  # the scan and the one poll: pySMART starts none of its own


def test_pysmart_stays_out_of_this_process() -> None:
    code = "import sys, forewarn.collectors.smart; sys.exit('pySMART' in sys.modules or 'chardet' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_self_tests_run_only_when_asked_one_disk_a_poll(smartctl: Smartctl) -> None:
    smartctl.lists(sda="scsi", sdb="scsi", sdc="scsi")
    for name in ("sda", "sdb"):
        smartctl.answers(name, ata())
    smartctl.answers("sdc", STANDBY, 2)
    smartctl.collector().collect()
    assert not any(" -t " in f" {call}" for call in smartctl.calls)
    collector = smartctl.collector(self_test="short", self_test_every_h=2)
    for _ in range(3):
        collector.collect()
    tests = [call for call in smartctl.calls if call.startswith("-t")]
    assert tests == ["-t short /dev/sda", "-t short /dev/sdb"]
    smartctl.clock.advance(2 * 3600)
    smartctl.answers("sda", ata(), 4)
    reading = collector.collect()
    assert [e.device for e in reading.errors] == ["sda"] and "self-test did not start" in reading.errors[
        0
    ].message


def test_a_closed_collector_starts_nothing(smartctl: Smartctl) -> None:
    smartctl.lists(sda="scsi")
    smartctl.answers("sda", ata())
    collector = smartctl.collector()
    collector.collect()
    collector.close()
    asked = len(smartctl.calls)
    assert verdict(collector.collect(), "sda") == "unavailable:garbage"
    assert len(smartctl.calls) == asked
