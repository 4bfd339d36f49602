"""Disks through smartctl: finds them, asks each once within bounded time, and gives numbers and a verdict.

One disk's hang or garbage never delays another: each is asked by a process of its own that is stopped at its
limit, and one that cannot be stopped is left behind while its disk is reported silent.
"""

from __future__ import annotations

import shlex
import shutil
import subprocess
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from typing import Literal

from forewarn.collectors import smart_disks, smart_json, smart_pysmart
from forewarn.collectors.base import CollectionError, Device, Event, Reading, Sample
from forewarn.collectors.clock import SystemClock
from forewarn.collectors.errors import ConfigError, InputError, UnavailableError
from forewarn.collectors.registry import Setup
from forewarn.collectors.smart_calls import (
    Outcome,
    identity_arguments,
    outcome_of,
    poll_arguments,
    scan_problem,
    scanned,
    self_test_arguments,
    without_json,
)
from forewarn.collectors.smart_disks import DiskAddress
from forewarn.collectors.smart_failure import is_gone, remedy
from forewarn.collectors.smart_process import Answer, Runner
from forewarn.collectors.smart_reading import DiskReading
from forewarn.collectors.smart_verdict import Verdict, judge

SOURCE = "smart"
INTERVAL_S = 300.0
DEADLINE_S = 60.0
CALL_TIMEOUT_S = 20.0
SCAN_TIMEOUT_S = 10.0
RESCAN_S = 900.0
SELF_TEST_REFUSED = 0b111
"""Bits of smartctl's exit status that say that a command failed; the others speak of the disk's health."""
SELF_TEST_EVERY_H = 168.0
SECONDS_PER_HOUR = 3600.0
RESERVE_S = 5.0
"""What is left of the deadline for putting the reading together."""

NOT_KEPT_ASLEEP = frozenset({"disk_temperature_celsius", "disk_smartctl_exit_status", "disk_standby"})
"""Not said of a sleeping disk from memory: they were true of the moment they were read at."""


@dataclass
class _Disk:
    """What is kept of a disk between polls."""

    address: DiskAddress
    rotational: bool | None = None
    last: DiskReading | None = None  # the last that told something
    verdict: str = ""  # the code of the verdict in force
    left: subprocess.Popen[bytes] | None = None  # a smartctl that could not be stopped
    asking: Future[Outcome] | None = None
    wants_all: bool = False
    listed: bool = True
    slow: bool = False
    tested_at: float | None = None  # monotonic seconds


class SmartCollector:
    """Reads disks with smartctl.

    `smartctl` is the program, a path or a command line (`sudo -n smartctl`). `devices` names the disks instead of a
    scan: `/dev/sda`, `/dev/bus/0:megaraid,5`. `types` gives smartctl's `-d` by device (`{"/dev/sdb" = "sat"}`).
    A sleeping spinning disk is not woken unless `wake` is true. `json` is `auto`, or `never` for a smartctl
    whose JSON cannot be trusted. `self_test` (`short`, `long`, `conveyance`; off by default) has each disk test itself
    every `self_test_every_h` hours, first soon after the start; at most one is started a poll, none on a disk asleep.
    """

    name = SOURCE
    interval_s = INTERVAL_S
    deadline_s = DEADLINE_S

    def __init__(
        self,
        setup: Setup,
        *,
        smartctl: str = "smartctl",
        devices: list[str] | None = None,
        types: dict[str, str] | None = None,
        call_timeout_s: float = CALL_TIMEOUT_S,
        max_concurrent: int = 4,
        rescan_s: float = RESCAN_S,
        wake: bool = False,
        json: Literal["auto", "never"] = "auto",
        self_test: Literal["", "short", "long", "conveyance"] = "",
        self_test_every_h: float = SELF_TEST_EVERY_H,
    ) -> None:
        if not 0 < call_timeout_s <= DEADLINE_S - RESERVE_S:
            raise ConfigError(
                f"smart: call_timeout_s = {call_timeout_s:g} must lie in 0 to {DEADLINE_S - RESERVE_S:g}"
            )
        if self_test_every_h < 1:
            raise ConfigError(f"smart: self_test_every_h = {self_test_every_h:g} must be 1 or more")
        if not 1 <= max_concurrent <= 64:
            raise ConfigError(f"smart: max_concurrent = {max_concurrent} must lie in 1 to 64")
        self._clock = setup.clock
        self._real = SystemClock()  # processes live in real time
        self._root = setup.root
        self._smartctl = smartctl
        self._types = dict(types or {})
        self._configured = smart_disks.configured(devices, self._types) if devices else []
        self._call_timeout_s = call_timeout_s
        self._max_concurrent = max_concurrent
        self._rescan_s = rescan_s
        self._wake = wake
        self._json = json == "auto"
        self._self_test = self_test
        self._self_test_every_s = self_test_every_h * SECONDS_PER_HOUR
        self._runner = Runner()
        self._disks: dict[str, _Disk] = {}
        self._scanned_at: float | None = None

    def collect(self) -> Reading:
        """A reading of every disk that answered in time.

        Raises UnavailableError when there is no smartctl or when it cannot list the disks.
        """
        until = self._real.monotonic() + self.deadline_s - RESERVE_S
        command = self._command()
        reading = Reading(samples=[], events=[], devices=[], errors=[])
        self._discover(command)
        asked = self._ask_all(command, until)
        for disk in self._disks.values():
            outcome = asked.get(disk.address.id)
            if outcome is not None:
                self._report(disk, outcome, reading)
            elif not disk.listed:
                self._vanished(disk, "no scan finds it any more", reading)
            else:
                reading.errors.append(
                    CollectionError(
                        SOURCE,
                        "not asked this time: slow disks before it took up the deadline",
                        disk.address.id,
                        "raise max_concurrent or lower call_timeout_s in the smart settings",
                    )
                )
        self._start_self_test(command, until, reading)
        return reading

    def close(self) -> None:
        self._runner.close()

    # Finding smartctl and the disks

    def _command(self) -> list[str]:
        whole = shutil.which(self._smartctl)
        if whole:
            return [whole]
        try:
            words = shlex.split(self._smartctl)
        except ValueError as error:
            raise ConfigError(f"smart: smartctl = {self._smartctl!r} is no command line: {error}") from None
        program = shutil.which(words[0]) if words else None
        if program is None:
            raise UnavailableError(
                f"smart: no program {self._smartctl!r} that can be run; install it (apt-get install smartmontools, "
                "dnf install smartmontools) or set smartctl to its path"
            )
        return [program, *words[1:]]

    def _discover(self, command: list[str]) -> None:
        now = self._clock.monotonic()
        if self._scanned_at is not None and now - self._scanned_at < self._rescan_s:
            return
        found = self._configured or self._scan(command)
        self._scanned_at = now
        listed = {address.id for address in found}
        for disk in self._disks.values():
            disk.listed = disk.address.id in listed
        # A disk that never told anything and is no longer listed leaves no trace.
        self._disks = {i: d for i, d in self._disks.items() if d.listed or d.last is not None}
        for address in found:
            known = self._disks.get(address.id)
            if known is None:
                self._disks[address.id] = _Disk(address, self._rotational(address))
            else:
                known.address = address

    def _scan(self, command: list[str]) -> list[DiskAddress]:
        """The disks by scan. `--scan` opens no disk, so that none can hang it; the other forms are for when it
        gives nothing. A program that answers a scan with one disk's own answer stands for that one disk."""
        problems: list[str] = []
        single: tuple[str, str] | None = None
        empty = False
        forms = [[*form, "--json"] for form in (["--scan"], ["--scan-open"])] if self._json else []
        for arguments in [*forms, ["--scan"], ["--scan-open"]]:
            plain = "--json" not in arguments
            if plain and (empty or single):
                break
            answer = self._runner.run([*command, *arguments], min(SCAN_TIMEOUT_S, self._call_timeout_s))
            text = smart_json.decode(answer.output or answer.errors)
            entries, alone = scanned(text)
            if entries:
                return smart_disks.addresses(entries, self._types)
            single = single or alone
            if alone is None and not answer.problem and not answer.timed_out:
                empty = empty or entries is not None or (not text.strip() and answer.exit_status == 0)
            problems.append(scan_problem(answer, text))
            if answer.timed_out:
                break  # another form would hang as well, and the disks already known are waiting
        if single:
            return smart_disks.addresses([single], self._types)
        if empty:
            return []
        if self._disks:  # the scan failed this once; the disks are known
            return [disk.address for disk in self._disks.values() if disk.listed]
        why = next((p for p in problems if p), "it printed nothing that can be read")
        raise UnavailableError(
            f"smart: {self._smartctl} cannot list the disks: {why}; try `smartctl --scan` by hand, or name them in "
            "the setting devices"
        )

    def _rotational(self, address: DiskAddress) -> bool | None:
        """Whether the kernel calls the disk spinning; None where it does not say (behind a RAID controller)."""
        if address.is_nvme:
            return False
        if "-" in address.id or "/" in address.name.removeprefix("/dev/"):
            return None
        try:
            text = (self._root / "sys/block" / address.id / "queue/rotational").read_text().strip()
        except OSError:
            return None
        return {"0": False, "1": True}.get(text)

    # Asking

    def _ask_all(self, command: list[str], until: float) -> dict[str, Outcome]:
        """Ask every listed disk, a few at a time; those that were slow last time come last."""
        outcomes: dict[str, Outcome] = {}
        futures: dict[Future[Outcome], _Disk] = {}
        pool = ThreadPoolExecutor(self._max_concurrent, thread_name_prefix="smart")
        try:
            for disk in sorted(self._disks.values(), key=lambda d: d.slow):
                if not disk.listed:
                    continue
                if disk.asking is not None and disk.asking.done():
                    # It came after its deadline: too old to be served now, but its process may still hang.
                    late = None if disk.asking.cancelled() else disk.asking.result()
                    disk.left = late.left if late else None
                    disk.asking = None
                if disk.left is not None and disk.left.poll() is not None:
                    disk.left = None
                if disk.left is not None or disk.asking is not None:
                    outcomes[disk.address.id] = Outcome(
                        why="timeout", message="an earlier smartctl still hangs on it", left=disk.left
                    )
                    continue
                disk.asking = pool.submit(self._ask, command, disk, until)
                futures[disk.asking] = disk
            wait(futures, max(until - self._real.monotonic(), 0.0))
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
        for future, disk in futures.items():
            if future.cancelled():
                disk.asking = None
            elif future.done():
                outcomes[disk.address.id] = future.result()
                disk.asking = None
            else:
                outcomes[disk.address.id] = Outcome(why="timeout", message="it did not answer in time")
        return outcomes

    def _ask(self, command: list[str], disk: _Disk, until: float) -> Outcome:
        """Ask one disk; runs in a thread and changes nothing. Whatever goes wrong is this disk's alone."""
        try:
            return self._ask_once(command, disk, until)
        except InputError as error:
            return Outcome(why="garbage", message=str(error))
        except Exception as error:
            return Outcome(
                why="garbage", message=f"its answer could not be read: {type(error).__name__}: {error}"
            )

    def _ask_once(self, command: list[str], disk: _Disk, until: float) -> Outcome:
        timeout_s = min(self._call_timeout_s, until - self._real.monotonic())
        if timeout_s <= 0:
            return Outcome(why="timeout", message="no time was left to ask it")
        answer = self._runner.run([*command, *self._poll(disk, as_json=self._json)], timeout_s)
        outcome = outcome_of(answer, timeout_s)
        reading = outcome.reading
        if reading is not None and self._json and without_json(reading):
            # An old smartctl: it has to be asked in plain words from now on.
            timeout_s = min(self._call_timeout_s, until - self._real.monotonic())
            plain = self._runner.run([*command, *self._poll(disk, as_json=False)], max(timeout_s, 1))
            outcome = outcome_of(plain, timeout_s)
            if outcome.reading is not None and outcome.reading.why != "bad_command":
                self._json = False
            answer, reading = plain, outcome.reading
        if not self._json and reading is not None and reading.state in ("empty", "identity_only"):
            return self._second_opinion(disk, answer, until) or outcome
        if reading is not None and reading.state == "asleep" and reading.rotational is None:
            if disk.rotational is None:
                reading = replace(reading, rotational=self._spins(command, disk, until))
            return replace(outcome, reading=reading)
        return outcome

    def _poll(self, disk: _Disk, *, as_json: bool) -> list[str]:
        may_wake = self._wake or disk.rotational is False or disk.address.is_nvme
        return poll_arguments(disk.address, as_json=as_json, everything=disk.wants_all, may_wake=may_wake)

    def _second_opinion(self, disk: _Disk, answer: Answer, until: float) -> Outcome | None:
        """What pySMART makes of plain text that our own reader does not know; None when it knows it no better."""
        text = smart_json.decode(answer.output)
        timeout_s = min(self._call_timeout_s, until - self._real.monotonic())
        if timeout_s <= 0 or not text.startswith("smartctl "):
            return None
        child = smart_pysmart.command(disk.address.name, smart_pysmart.interface_of(disk.address.type, text))
        found = self._runner.run(child, timeout_s, text.encode())
        reading = None if found.timed_out or found.exit_status else smart_pysmart.reading_of(found.output)
        return None if reading is None else Outcome(replace(reading, exit_status=max(answer.exit_status, 0)))

    def _spins(self, command: list[str], disk: _Disk, until: float) -> bool | None:
        """Whether a sleeping disk spins at all. Only its identity is asked for, which does not start the motor."""
        timeout_s = min(self._call_timeout_s, until - self._real.monotonic())
        if timeout_s <= 0:
            return None
        answer = self._runner.run(
            [*command, *identity_arguments(disk.address, as_json=self._json)], timeout_s
        )
        found = outcome_of(answer, timeout_s).reading
        return found.rotational if found is not None else None

    def _start_self_test(self, command: list[str], until: float, reading: Reading) -> None:
        """Start at most one self-test, on the disk that has waited longest."""
        now, timeout_s = self._clock.monotonic(), min(self._call_timeout_s, until - self._real.monotonic())
        awake = {s.device for s in reading.samples if s.metric == "disk_smart_passed"} - {
            s.device for s in reading.samples if s.metric == "disk_standby" and s.value
        }
        due = [
            disk
            for disk in self._disks.values()
            if disk.address.id in awake
            and (disk.tested_at is None or now - disk.tested_at >= self._self_test_every_s)
        ]
        if not self._self_test or not due or timeout_s <= 0:
            return
        disk = min(due, key=lambda d: float("-inf") if d.tested_at is None else d.tested_at)
        disk.tested_at = now
        answer = self._runner.run([*command, *self_test_arguments(disk.address, self._self_test)], timeout_s)
        disk.left = answer.left or disk.left
        if answer.timed_out or answer.problem or answer.exit_status & SELF_TEST_REFUSED:
            said = answer.problem or " ".join(smart_json.decode(answer.output).split())[-200:]
            reading.errors.append(
                CollectionError(
                    SOURCE,
                    f"the {self._self_test} self-test did not start: {said or 'no answer'}",
                    disk.address.id,
                    "set self_test to a test that this disk knows, or to nothing",
                )
            )

    # Reporting

    def _report(self, disk: _Disk, outcome: Outcome, reading: Reading) -> None:
        id_ = disk.address.id
        disk.left = outcome.left
        disk.slow = outcome.why == "timeout"
        found = outcome.reading
        if found is None:
            words = f"{disk.address.name}: {outcome.message}"
            self._unavailable(disk, Verdict("unavailable", "error", words, outcome.why), reading)
            return
        if found.rotational is not None:
            disk.rotational = found.rotational
        if found.state == "unavailable" and disk.last is not None and is_gone(found.message):
            self._vanished(disk, found.message, reading)
            return
        if found.state == "read":
            disk.last = found
            disk.wants_all = found.protocol == "SCSI" and "disk_temperature_celsius" not in found.values
        known = disk.last if disk.last is not None else found
        reading.devices.append(_device(id_, known, disk.rotational))
        values = dict(found.values)
        if found.state == "asleep":
            values = {k: v for k, v in known.values.items() if k not in NOT_KEPT_ASLEEP}
            values["disk_standby"] = 1.0
        elif found.state == "read" and disk.rotational:
            values["disk_standby"] = 0.0
        if known.capacity_bytes:
            values["disk_capacity_bytes"] = known.capacity_bytes
        values["disk_smartctl_exit_status"] = float(found.exit_status)
        reading.samples += [Sample(id_, metric, value) for metric, value in sorted(values.items())]
        verdict = judge(found)
        if verdict.verdict == "unavailable":
            self._unavailable(disk, verdict, reading, found.hint)
            return
        if found.state == "scan":
            reading.errors.append(
                CollectionError(SOURCE, verdict.message, id_, remedy("", name="", type_="", hint=""))
            )
        if found.state == "asleep" and disk.verdict and not disk.verdict.startswith("unavailable"):
            reading.samples.append(_verdict_sample(id_, disk.verdict))  # sleep changes no verdict
            return
        self._announce(disk, verdict, reading)

    def _vanished(self, disk: _Disk, words: str, reading: Reading) -> None:
        self._scanned_at = None
        message = f"{disk.address.name} was there and is gone: {words}"
        self._unavailable(disk, Verdict("unavailable", "critical", message, "vanished"), reading)

    def _unavailable(self, disk: _Disk, verdict: Verdict, reading: Reading, hint: str = "") -> None:
        address = disk.address
        way_out = remedy(verdict.why, name=address.name, type_=address.type, hint=hint)
        reading.errors.append(CollectionError(SOURCE, verdict.message, address.id, way_out))
        if not any(d.device == address.id for d in reading.devices):
            known = disk.last or DiskReading("empty")
            reading.devices.append(_device(address.id, known, disk.rotational))
        self._announce(disk, verdict, reading, hint)

    def _announce(self, disk: _Disk, verdict: Verdict, reading: Reading, hint: str = "") -> None:
        """The verdict as a sample always, as an event when it is new."""
        id_ = disk.address.id
        reading.samples.append(_verdict_sample(id_, verdict.code))
        if verdict.code == disk.verdict:
            return
        disk.verdict = verdict.code
        labels = {k: v for k, v in (("why", verdict.why), ("type_to_try", hint)) if v}
        reading.events.append(
            Event(
                device=id_,
                kind="disk_verdict",
                code=verdict.code,
                severity=verdict.severity,
                message=f"{verdict.verdict}: {verdict.message}",
                action=verdict.action,
                labels=labels,
            )
        )


def _verdict_sample(id_: str, code: str) -> Sample:
    return Sample(id_, "disk_verdict", 1.0, {"verdict": code})


def _device(id_: str, reading: DiskReading, rotational: bool | None) -> Device:
    labels = {"firmware": reading.firmware, "protocol": reading.protocol}
    if reading.capacity_bytes:
        labels["capacity_bytes"] = f"{reading.capacity_bytes:.0f}"
    if rotational is not None:
        labels["rotational"] = "true" if rotational else "false"
    return Device(id_, "disk", reading.model, reading.serial, labels={k: v for k, v in labels.items() if v})
