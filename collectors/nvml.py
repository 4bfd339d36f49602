"""GPUs through NVML, read in a child process so that a driver that hangs never hangs the agent.

The child reads and forgets; what was seen, what is due and what to tell is decided here.
"""

from __future__ import annotations

import msgspec

from forewarn.collectors.base import CollectionError, Device, Event, Reading, Sample
from forewarn.collectors.catalog import METRICS
from forewarn.collectors.clock import SystemClock
from forewarn.collectors.errors import UnavailableError
from forewarn.collectors.nvml_child import Child, ChildGoneError
from forewarn.collectors.nvml_conditions import LABELS, Conditions, Memory, coalesce, describe
from forewarn.collectors.nvml_fields import TIERS, Tier
from forewarn.collectors.nvml_protocol import Done, Failed, Hello, Notice, Part, Poll, Reply, Start
from forewarn.collectors.registry import Setup

DRIVER_NOT_LOADED = 9
LIBRARY_NOT_FOUND = 12
MISMATCH = 18
NO_PERMISSION = 4
RETRY_FIRST_S = 15.0
RETRY_MOST_S = 300.0
QUARANTINE_FIRST_S = 60.0
QUARANTINE_MOST_S = 600.0
SILENT_WAIT_S = 0.2
"""How long a poll waits for a child that is already late."""

_REMEDIES = {
    LIBRARY_NOT_FOUND: "install the NVIDIA driver, or in a container mount its library (--gpus all, or the NVIDIA "
    "container toolkit); on a node without GPUs switch the collector off",
    DRIVER_NOT_LOADED: "load the driver (modprobe nvidia) and look for NVRM lines in the kernel log",
    MISMATCH: "the driver was upgraded while its old kernel module is loaded: reboot, or unload and load the module",
    NO_PERMISSION: "let the agent's user open /dev/nvidiactl and /dev/nvidia* (group video, or the device cgroup)",
}
_MEANINGS = {
    LIBRARY_NOT_FOUND: "libnvidia-ml.so.1 is not found",
    DRIVER_NOT_LOADED: "the NVIDIA driver is not loaded",
    MISMATCH: "the NVML library and the loaded driver are of different versions",
    NO_PERMISSION: "the driver's device files may not be opened",
}


class NvmlCollector:
    """Every signal of NVML, in three tiers, and the events the driver pushes.

    A poll that does not end within `call_deadline_s` is told as `collector_silent`, once; what was read before it
    is kept. A child that stays silent for `abandon_after_s` is killed, or left behind when even that hangs, at most
    `max_abandoned` of them. The GPU it hung on is then left out for a while and the others are read on.
    """

    name = "nvml"

    def __init__(
        self,
        setup: Setup,
        *,
        library: str = "",
        fast_interval_s: float = 5.0,
        medium_interval_s: float = 30.0,
        slow_interval_s: float = 600.0,
        call_deadline_s: float = 4.0,
        start_deadline_s: float = 30.0,
        abandon_after_s: float = 15.0,
        rescan_interval_s: float = 300.0,
        probe_interval_s: float = 3600.0,
        max_abandoned: int = 3,
    ) -> None:
        self.interval_s = fast_interval_s
        self.deadline_s = (
            3 * call_deadline_s + 3.0
        )  # to open NVML, to read, and once more when the session was void
        self._clock = setup.clock
        self._library = library
        self._tier_interval_s: dict[Tier, float] = {
            "fast": 0.0,
            "medium": medium_interval_s,
            "slow": slow_interval_s,
        }
        self._call_deadline_s = call_deadline_s
        self._start_deadline_s = start_deadline_s
        self._abandon_after_s = abandon_after_s
        self._rescan_interval_s = rescan_interval_s
        self._probe_interval_s = probe_interval_s
        self._max_abandoned = max_abandoned

        self._conditions = Conditions()
        self._child: Child | None = None
        self._abandoned: list[Child] = []
        self._ready = False
        self._asked_at: float | None = None
        """When the child was given what it has not answered yet."""
        self._overdue = False
        """Whether that was in an earlier poll than this one."""
        self._started_at = 0.0
        self._due: dict[Tier, float] = {}
        self._tiers: list[Tier] = []
        self._order: list[str] = []
        self._parts: list[Part] = []
        self._hangs: dict[str, int] = {}
        self._skip_until: dict[str, float] = {}
        self._silent: set[str] = set()
        self._pushed: list[Event] = []
        """Events of the driver that no reading has had yet."""
        self._refused: set[str] = set()
        self._failure: UnavailableError | CollectionError | None = None
        self._failures = 0
        self._retry_at = 0.0
        self._describe = True
        self._reload_told = False

    def collect(self) -> Reading:
        """Read what is due. Silence, a crash of the child, a GPU in trouble are errors in the reading.

        Raises UnavailableError when NVML cannot be opened here and there is nothing new to tell.
        """
        reading = Reading(samples=[], events=[], devices=[], errors=[])
        self._abandoned = [child for child in self._abandoned if child.status is None]
        failure = self._collect(reading)
        reading.events = coalesce([*reading.events, *self._pushed])
        self._pushed.clear()
        if isinstance(failure, UnavailableError):
            if not reading.events and not reading.samples:
                raise failure
            reading.errors.append(CollectionError(source=self.name, message=str(failure)))
        elif failure is not None:
            reading.errors.append(failure)
        return reading

    def state(self) -> dict[str, object]:
        """What a later run of the agent should know: which GPUs there are, and what was told of them."""
        memory: dict[str, object] = msgspec.to_builtins(self._conditions.memory())
        return memory

    def restore(self, state: dict[str, object]) -> None:
        """Go on where an earlier run left off. A state that cannot be read is passed over: all begins anew."""
        try:
            self._conditions.recall(msgspec.convert(state, Memory))
        except msgspec.ValidationError:
            return

    def close(self) -> None:
        """End the child. Never waits for one that hangs."""
        if self._child is not None:
            self._child.close()
            self._child = None
        for child in self._abandoned:
            child.kill()
        self._abandoned.clear()

    # ---- one poll ----

    def _collect(self, reading: Reading) -> UnavailableError | CollectionError | None:
        for _ in range(2):  # a session that is found void is opened anew at once
            now = self._clock.monotonic()
            if self._child is not None and self._ready and self._asked_at is None and self._wants_rescan(now):
                self._end_child()
            if self._child is None:
                failure = self._start(now)
                if failure is not None:
                    return failure
            try:
                if self._serve(reading):
                    return self._judge_silence(reading)
            except ChildGoneError as error:
                return self._crashed(str(error))
            if self._failure is not None:
                return self._failure
        return self._crashed("each session is void as soon as it is opened")

    def _serve(self, reading: Reading) -> bool:
        """Talk to the child until the poll is done or late. False when the child was ended and another is needed."""
        assert self._child is not None
        silent = self._overdue
        wait = SystemClock()
        # Without persistence mode the driver wakes each GPU when it is opened, which takes a second or more of each.
        patience_s = self._call_deadline_s if self._ready else 2 * self._call_deadline_s
        until = wait.monotonic() + (SILENT_WAIT_S if silent else patience_s)
        if self._ready and self._asked_at is None:
            self._ask()
        while True:
            left = until - wait.monotonic()
            replies = self._child.receive(max(0.0, left))
            if not replies:
                return True
            done: bool | None = None
            for reply in replies:
                outcome = self._take(reply, reading)
                if outcome is not None:
                    done = outcome  # go on: events may have come behind the end of the poll
                if isinstance(reply, Hello):
                    until = wait.monotonic() + self._call_deadline_s
            if done is not None:
                return done
            if wait.monotonic() > until:  # a storm of events must not keep the poll for ever
                return True

    def _take(self, reply: Reply, reading: Reading) -> bool | None:
        """One message of the child. None: go on listening; True: the poll is over; False: another child is needed."""
        match reply:
            case Notice():
                self._notice(reply)
            case Hello():
                self._hello(reply, reading)
                self._ask()
            case Failed():
                self._end_child()
                self._could_not_open(reply, reading)
                return False
            case Part():
                self._parts.append(reply)
                self._part(reply, reading)
            case Done():
                return self._done(reply, reading)
        return None

    def _notice(self, notice: Notice) -> None:
        age_s = max(0.0, SystemClock().monotonic() - notice.seen)
        event = self._conditions.notice(notice, self._clock.now() - age_s)
        if event is not None:
            self._pushed.append(event)

    def _ask(self) -> None:
        assert self._child is not None
        now = self._clock.monotonic()
        self._tiers = [tier for tier in TIERS if now >= self._due.get(tier, now)]
        names = [device.device for device in self._conditions.present()]
        able = [name for name in names if now >= self._skip_until.get(name, now)]
        # One that hung before comes last, so that the others are read before it may hang again.
        self._order = sorted(able, key=lambda name: self._hangs.get(name, 0))
        self._parts = []
        self._asked_at, self._overdue = now, False
        self._child.send(
            Poll(tiers=self._tiers, devices=self._order, now=now, probe_after_s=self._probe_interval_s)
        )

    def _hello(self, hello: Hello, reading: Reading) -> None:
        self._ready = True
        self._asked_at, self._overdue = None, False
        self._failure, self._failures = None, 0
        events = self._conditions.hello(hello)
        if any(event.kind == "driver_reloaded" for event in events):
            if self._reload_told:
                events = [event for event in events if event.kind != "driver_reloaded"]
            self._reload_told = False
        reading.events += events
        reading.errors += [
            CollectionError(
                source=self.name,
                message=f"NVML counts {len(hello.gpus)} GPUs and cannot open one of them: code {gpu.error}",
                remedy="look for NVRM lines in the kernel log; reset the GPU or reboot the node",
            )
            for gpu in hello.gpus
            if gpu.error
        ]
        self._due = {}
        self._describe = True

    def _part(self, part: Part, reading: Reading) -> None:
        device = part.device
        reading.samples += [
            Sample(device, metric, value, {METRICS[metric].labels[0]: label})
            if label
            else Sample(device, metric, value)
            for metric, value, label in part.samples
        ]
        reading.events += self._conditions.part(part)
        if part.faults:
            reading.errors.append(
                CollectionError(
                    source=self.name, device=device, message=f"NVML calls failed: {describe(part.faults)}"
                )
            )
        for call in part.refused:
            if call not in self._refused:
                self._refused.add(call)
                reading.errors.append(
                    CollectionError(
                        source=self.name,
                        device=device,
                        message=f"NVML does not allow this user to read {call}",
                        remedy="run the agent with the right to read it, or live without this reading",
                    )
                )

    def _done(self, done: Done, reading: Reading) -> bool:
        late = self._overdue
        self._asked_at, self._overdue = None, False
        if done.restart:
            self._end_child()
            if done.restart == MISMATCH:
                reading.events += self._upgraded()
            return False
        now = self._clock.monotonic()
        for tier in self._tiers:
            self._due[tier] = now + self._tier_interval_s[tier]
        reading.events += self._conditions.energies(self._parts)
        if self._describe or "slow" in self._tiers:
            reading.devices = self._devices()
            self._describe = False
        if not late:
            for device in sorted(self._silent & {"", *self._order}):
                self._silent.discard(device)
                self._hangs.pop(device, None)
                self._skip_until.pop(device, None)
                reading.events.append(
                    self._event(device, "collector_recovered", self.name, "info", "NVML answers again")
                )
        return True

    def _devices(self) -> list[Device]:
        return self._conditions.present()

    # ---- silence ----

    def _judge_silence(self, reading: Reading) -> CollectionError | None:
        """After listening: if an answer is still owed, tell it once, and give the child up when it is owed too long."""
        if self._asked_at is None:
            return None
        self._overdue = True
        owed_s = self._clock.monotonic() - self._asked_at
        if not self._ready and owed_s < self._start_deadline_s and not self._silent:
            return CollectionError(
                source=self.name, message="the driver is being opened and has not answered yet"
            )
        device = self._hanging()
        where = f" for {device}" if device else ""
        if device not in self._silent and "" not in self._silent:
            self._silent.add(device)
            reading.events.append(
                self._event(
                    device,
                    "collector_silent",
                    self.name,
                    "error",
                    f"NVML has not answered{where} within {self._call_deadline_s:g} s",
                )
            )
        error = CollectionError(
            source=self.name,
            device=device,
            message=f"the driver has not answered{where}",
            remedy="look for NVRM lines in the kernel log and tasks in state D (ps -eo state,pid,cmd); "
            "a GPU reset or a reboot may be needed",
        )
        if owed_s >= self._abandon_after_s:
            self._leave(device, error)
        return error

    def _hanging(self) -> str:
        """The GPU that the child is at, empty when it is at none."""
        if not self._ready:
            return ""
        answered = {part.device for part in self._parts}
        return next((name for name in self._order if name not in answered), "")

    def _leave(self, device: str, why: CollectionError) -> None:
        """Give up a child that hangs, and leave the GPU it hangs on alone for a while."""
        now = self._clock.monotonic()
        if device:
            hangs = self._hangs[device] = self._hangs.get(device, 0) + 1
            self._skip_until[device] = now + min(QUARANTINE_MOST_S, QUARANTINE_FIRST_S * 2 ** (hangs - 1))
        else:
            self._postpone(why)
        child, self._child = self._child, None
        self._asked_at, self._overdue = None, False
        if child is not None:
            self._last_words(child)
            if not child.kill():
                self._abandoned.append(child)

    # ---- the child's life ----

    def _start(self, now: float) -> UnavailableError | CollectionError | None:
        if len(self._abandoned) >= self._max_abandoned:
            return CollectionError(
                source=self.name,
                message=f"{len(self._abandoned)} processes hang in the driver and cannot be killed; "
                "no more are started",
                remedy="reboot the node",
            )
        if now < self._retry_at:
            return self._failure
        self._failure = None
        self._ready = False
        self._started_at = self._asked_at = now
        self._overdue = False
        try:
            self._child = Child()
            self._child.send(Start(library=self._library, names=self._conditions.names))
        except OSError as error:
            return self._crashed(f"the NVML process cannot be started: {error}")
        except ChildGoneError as error:
            return self._crashed(str(error))
        return None

    def _end_child(self) -> None:
        child, self._child = self._child, None
        self._ready = False
        self._asked_at, self._overdue = None, False
        if child is not None:
            self._last_words(child)
            if not child.close():
                self._abandoned.append(child)

    def _last_words(self, child: Child) -> None:
        """Events that lie in the pipe of a child that is given up."""
        try:
            replies = child.receive(0.0)
        except ChildGoneError:
            return
        for reply in replies:
            if isinstance(reply, Notice):
                self._notice(reply)

    def _wants_rescan(self, now: float) -> bool:
        return self._conditions.troubled and now - self._started_at >= self._rescan_interval_s

    def _could_not_open(self, failed: Failed, reading: Reading) -> None:
        if failed.code == MISMATCH:
            reading.events += self._upgraded()
        else:
            reading.events += self._conditions.all_missing()
        what = _MEANINGS.get(failed.code, f"NVML could not be opened: {failed.message} (code {failed.code})")
        if failed.code == LIBRARY_NOT_FOUND and self._library:
            what = f"the library {self._library} cannot be loaded: {failed.message}"
        self._fail(f"nvml: {what}", _REMEDIES.get(failed.code, "look for NVRM lines in the kernel log"))

    def _upgraded(self) -> list[Event]:
        """The loaded library and the driver differ. Whether the library on disk fits is for a new child to find."""
        if self._reload_told or not self._conditions.known:
            return []
        self._reload_told = True
        self._conditions.forget_energy()
        return [self._event("", "driver_reloaded", "upgraded", "warning", _MEANINGS[MISMATCH])]

    def _fail(self, what: str, remedy: str) -> None:
        self._postpone(UnavailableError(f"{what}. Way out: {remedy}"))

    def _crashed(self, what: str) -> CollectionError:
        """The child is gone without a reason of its own."""
        self._end_child()
        error = CollectionError(
            source=self.name,
            message=what,
            remedy="if it repeats, look for NVRM lines and crashes in the kernel log",
        )
        self._postpone(error)
        return error

    def _postpone(self, failure: UnavailableError | CollectionError) -> None:
        """Ask no sooner than after a while, which grows; until then, this is why."""
        self._failures += 1
        self._retry_at = self._clock.monotonic() + self._backoff()
        self._failure = failure

    def _backoff(self) -> float:
        return min(RETRY_MOST_S, RETRY_FIRST_S * 2.0 ** (self._failures - 1))

    def _event(self, device: str, kind: str, code: str, severity: str, message: str) -> Event:
        return Event(device=device, kind=kind, code=code, severity=severity, message=message, labels=LABELS)
