"""What the demo tells: observations come in, each step is told once, with the time it happened. Pure."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from forewarn.collectors.clock import Clock

LEVELS = ("healthy", "watch", "warning", "critical")
STEPS = (
    "service_ready",
    "host_reported",
    "fleet_reported",
    "job_registered",
    "wear_begun",
    "risk_raised",
    "protection_made",
    "webhook_accepted",
    "checkpoint_saved",
    "acknowledged",
    "checkpoint_verified",
)
"""What must happen, in about this order."""


@dataclass(frozen=True)
class Line:
    """One line for the terminal. `who` is the part that did it; `simulated` marks what is not of real hardware."""

    seconds: float
    who: str
    text: str
    simulated: bool = False
    level: str = ""


@dataclass
class Story:
    """Keeps what happened and hands every new line to `tell`. Observations may come from several threads."""

    clock: Clock
    tell: Callable[[Line], None]
    job: str
    steps: dict[str, dict[str, Any]] = field(default_factory=dict)
    victim: str = ""
    protection: str = ""
    checkpoint: dict[str, Any] = field(default_factory=dict)
    _levels: dict[str, str] = field(default_factory=dict)
    _ended: str = ""
    _saved: tuple[dict[str, Any], float, float] | None = None
    _began: float = 0.0
    _lock: threading.RLock = field(default_factory=threading.RLock)

    def __post_init__(self) -> None:
        self._began = self.clock.monotonic()

    @property
    def seconds(self) -> float:
        """Since the start."""
        return self.clock.monotonic() - self._began

    @property
    def done(self) -> bool:
        return all(name in self.steps for name in STEPS)

    @property
    def missing(self) -> list[str]:
        return [name for name in STEPS if name not in self.steps]

    def say(self, who: str, text: str, *, simulated: bool = False, level: str = "") -> None:
        self.tell(Line(self.seconds, who, text, simulated, level))

    def step(
        self,
        name: str,
        who: str,
        text: str,
        *,
        simulated: bool = False,
        level: str = "",
        at: tuple[float, float] | None = None,
        **facts: Any,
    ) -> bool:
        """Tell a step unless it was told before; true when it is new. `at`: wall time, and seconds since the start."""
        moment, seconds = at or (self.clock.now(), self.seconds)
        with self._lock:
            if name in self.steps:
                return False
            self.steps[name] = {
                "at_seconds": round(seconds, 3),
                "time": datetime.fromtimestamp(moment, tz=UTC).isoformat(timespec="milliseconds"),
                **facts,
            }
        self.tell(Line(seconds, who, text, simulated, level))
        return True

    def on_risk(self, items: list[Mapping[str, Any]]) -> None:
        """Devices as `GET /v1/risk` lists them: a level that has risen is told."""
        for item in items:
            device, level = str(item["device"]), str(item.get("level", "healthy"))
            before = self._levels.get(device, "healthy")
            self._levels[device] = level
            if level not in LEVELS or LEVELS.index(level) <= LEVELS.index(before):
                continue
            simulated = bool(item.get("simulated"))
            odds = ", ".join(f"{p:.1%} in {span(int(h))}" for h, p in sorted_risk(item.get("risk", {})))
            reason = item.get("reason") or "no single reason yet"
            text = f"{device} is now {level}: {odds}; {reason}"
            if device == self.victim and self.step(
                "risk_raised",
                "service",
                text,
                simulated=simulated,
                level=level,
                device=device,
                risk=item.get("risk"),
                reason=reason,
            ):
                continue
            self.say("service", text, simulated=simulated, level=level)

    def on_protections(self, items: list[Mapping[str, Any]]) -> None:
        """Protections of the job, newest first; the oldest is the one that is followed."""
        mine = [item for item in items if item.get("job") == self.job]
        if not mine:
            return
        item = (
            mine[-1] if not self.protection else next((i for i in mine if i["id"] == self.protection), None)
        )
        if item is None:
            return
        self.protection = str(item["id"])
        simulated = bool(item.get("simulated", True))
        device = str(item.get("device", ""))
        self.step(
            "protection_made",
            "service",
            f"protects job {self.job} because of {device}: asks for {item.get('action', 'checkpoint')}",
            simulated=simulated,
            id=self.protection,
            device=device,
        )
        self._tell_saved()
        state = item.get("state")
        if item.get("acknowledged") or state in ("accepted", "completed"):
            self.step("webhook_accepted", "controller", "took the signed webhook and accepted it")
        if state == "completed":
            self.step(
                "acknowledged",
                "service",
                f"has the acknowledgement: step {item.get('step')}, saved in "
                f"{float(item.get('save_seconds') or 0.0) * 1000:.0f} ms",
                step=item.get("step"),
                save_seconds=item.get("save_seconds"),
                checkpoint=item.get("checkpoint"),
            )
        elif state in ("declined", "failed", "escalated") and self._ended != state:
            self._ended = state
            self.say("service", f"protection {self.protection} ended as {state}", level="critical")

    def on_fleet(self, line: Mapping[str, Any]) -> None:
        """A line of the simulated fleet's process."""
        event = line.get("event")
        if event == "history":
            self.say(
                "fleet",
                f"{line['nodes']} nodes with {line['devices']} GPUs; sent the last {line['hours']:g} h first, "
                "as agents that were offline would",
                simulated=True,
            )
        elif event == "wear":
            self.victim = str(line["device"])
            self.step(
                "wear_begun",
                "fleet",
                f"the memory of {self.victim} begins to wear out (hours of wear pass in about a minute)",
                simulated=True,
                device=self.victim,
            )
        elif event == "device_event":
            fatal = line.get("severity") == "critical" or (line.get("kind"), line.get("code")) == (
                "xid",
                "94",
            )
            text = f"{line['device']}: {line['message']}"  # which names kind and code
            if fatal and line["device"] == self.victim:
                self.step("fatal_event", "fleet", text, simulated=True, level="critical")
            else:
                self.say("fleet", text, simulated=True, level="critical" if fatal else "")
        elif event == "failed":
            self.say("fleet", str(line.get("error", "")), simulated=True, level="critical")

    def on_loop(self, line: Mapping[str, Any]) -> None:
        """A line of the training loop's process."""
        event = line.get("event")
        if event == "started":
            self.say("training", f"a real loop is training from step {line['step']}")
        elif event == "saved":
            # The loop is quicker than our look at the service: its line waits for the reason of the save.
            self._saved = self._saved or (dict(line), self.clock.now(), self.seconds)
            if "protection_made" in self.steps:
                self._tell_saved()
        elif event == "unreadable":
            self.say("training", f"{line['checkpoint']} cannot be read: {line['error']}", level="critical")

    def _tell_saved(self) -> None:
        if self._saved is None:
            return
        line, now, seconds = self._saved
        if self.step(
            "checkpoint_saved",
            "training",
            f"saved a checkpoint at step {line['step']} in {float(line['seconds']) * 1000:.0f} ms: "
            f"{line['checkpoint']}",
            at=(now, seconds),
            step=line["step"],
            save_seconds=line["seconds"],
            checkpoint=line["checkpoint"],
        ):
            self.checkpoint = line

    def summary(self) -> dict[str, Any]:
        """What `--once` prints."""
        made = self.steps.get("wear_begun", {}).get("at_seconds")
        fatal = self.steps.get("fatal_event", {}).get("at_seconds")
        saved = self.steps.get("checkpoint_saved", {}).get("at_seconds")
        return {
            "done": self.done,
            "missing": self.missing,
            "simulated_fleet": True,
            "job": self.job,
            "device": self.victim,
            "protection": self.protection,
            "seconds_from_wear_to_checkpoint": None
            if made is None or saved is None
            else round(saved - made, 3),
            "checkpoint_before_fatal_event": saved is not None and (fatal is None or saved < fatal),
            "steps": self.steps,
        }


def sorted_risk(risk: Mapping[str, float]) -> list[tuple[str, float]]:
    """Horizons in rising order."""
    return sorted(risk.items(), key=lambda pair: int(pair[0]))


def span(seconds: int) -> str:
    """`15 min`, `1 h`, `7 d`."""
    for size, name in ((86_400, "d"), (3600, "h"), (60, "min")):
        if seconds % size == 0:
            return f"{seconds // size} {name}"
    return f"{seconds} s"
