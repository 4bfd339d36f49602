"""The agent as one program: polls, keeps, ships, shows, and ends when told. Each of these lives in a file beside this.

One thread, the main one, steps the scheduler and cuts batches. It touches no source, no socket and no network.
"""

from __future__ import annotations

import logging
import queue
import signal
import socket
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from forewarn import __version__
from forewarn.collectors import registry
from forewarn.collectors.base import Collector, Device, Event, Reading, Sample
from forewarn.collectors.clock import Clock, SystemClock
from forewarn.collectors.errors import ConfigError, UnavailableError
from forewarn.daemon.agent import usage
from forewarn.daemon.agent.exposition import MetricsServer, Page
from forewarn.daemon.agent.intake import Intake
from forewarn.daemon.agent.logs import log
from forewarn.daemon.agent.notify import notify, watchdog_interval_s
from forewarn.daemon.agent.recording import Replay
from forewarn.daemon.agent.scheduler import Outcome, Runner, Scheduler, Slot, ThreadRunner
from forewarn.daemon.agent.shipper import HttpTransport, Shipper, read_token
from forewarn.daemon.agent.spool import Spool
from forewarn.daemon.config import AgentConfig, CollectorConfig, parse_address

SHIP_GRACE_S = 0.8
"""At the end: how long to try to ship what waits. What is left waits on disk for the next start."""
CLOSE_GRACE_S = 0.5
"""At the end: how long collectors may take to give up what they hold."""
SETTLE_MAX_S = 15.0
"""The first batch waits this long at most for every source's first answer, so that devices have their names."""
HEALTHY_SILENCE_S = 60.0
"""The main loop counts as stuck when it has not gone round for this long past its wait."""


def node_name(config: AgentConfig) -> str:
    """The node's name: the setting, or the host name up to the first dot. Raises ConfigError for an unfit one."""
    name = config.node or socket.gethostname().partition(".")[0]
    if not name or "/" in name or any(c.isspace() for c in name):
        raise ConfigError(f"agent.node: {name!r} must be a name without slashes and spaces")
    return name


class LateCollector:
    """Stands in for a collector that cannot be made yet; tries again at each poll."""

    interval_s = 60.0
    deadline_s = 20.0

    def __init__(self, name: str, make: Callable[[], Collector], first: UnavailableError) -> None:
        self.name, self._make, self._first = name, make, first
        self._made: Collector | None = None

    def collect(self) -> Reading:
        if self._made is None:
            self._made = self._make()
        return self._made.collect()

    def state(self) -> Any:
        take = getattr(self._made, "state", None)
        return take() if callable(take) else None

    def close(self) -> None:
        if self._made is not None:
            self._made.close()


def make_slots(
    config: AgentConfig,
    clock: Clock,
    *,
    create: Callable[..., Collector] = registry.create,
    state_of: Callable[[str], Any] = lambda name: None,
) -> list[Slot]:
    """A slot for each collector that is on. A missing package turns one source off; a wrong setting is an error."""
    for name in config.collectors:
        if name not in registry.COLLECTORS:
            raise ConfigError(
                f"agent.collectors.{name}: no such collector; known: {', '.join(registry.COLLECTORS)}"
            )
    setup = registry.Setup(clock, Path(config.root))
    slots = []
    for name in registry.COLLECTORS:
        own = config.collectors.get(name, CollectorConfig())
        if not own.enabled:
            log(
                logging.INFO,
                "collector_off",
                collector=name,
                reason=f"agent.collectors.{name}.enabled = false",
            )
            continue

        def make(name: str = name, options: Mapping[str, Any] = own.options) -> Collector:
            made = create(name, options, setup)
            restore = getattr(made, "restore", None)
            if callable(restore) and (state := state_of(name)) is not None:
                restore(state)
            return made

        collector: Collector
        try:
            collector = make()
        except UnavailableError as error:
            collector = LateCollector(name, make, error)
        except ConfigError as error:
            if not isinstance(error.__cause__, ModuleNotFoundError):
                raise
            log(logging.WARNING, "collector_off", collector=name, reason=str(error))
            continue
        slots.append(
            Slot(collector, own.interval_s or collector.interval_s, own.deadline_s or collector.deadline_s)
        )
    return slots


class Agent:
    """All parts joined. `run` blocks until `stop`; `once` polls everything one time."""

    def __init__(
        self,
        config: AgentConfig,
        slots: list[Slot],
        spool: Spool,
        shipper: Shipper,
        *,
        clock: Clock | None = None,
        runner: Runner | None = None,
        replay: Replay | None = None,
    ) -> None:
        self.node, self.config = spool.node, config
        self.clock = clock or SystemClock()
        self.spool, self.shipper = spool, shipper
        self.runner = runner or ThreadRunner()
        self._inbox: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.scheduler = replay or Scheduler(
            slots, self.clock, self.runner, wake=lambda: self._inbox.put("poll")
        )
        self._replay = replay
        self.intake = Intake(self.node, self.clock, simulated=config.simulated or replay is not None)
        self.page = Page(self.node, self.intake, self.own_samples)
        self.restart = False
        """Set by a reload: the program should start itself anew."""
        self._stopping = False
        self._reload: Callable[[], bool] = lambda: False
        self._started = self.clock.monotonic()
        self._next_cut = self._started
        self._cuts = 0
        self._last_round = self._started
        self._worst_poll_s = self._worst_late_s = 0.0
        self._describe_node()

    def _describe_node(self) -> None:
        simulated = self.config.simulated or self._replay is not None
        device = Device("", "node", model="", serial=_machine_id(), simulated=simulated)
        self.intake.take(
            Outcome(
                "agent",
                "reading",
                self.clock.now(),
                0.0,
                Reading(
                    devices=[device],
                    events=[Event("", "agent_started", __version__, "info", f"agent {__version__} started")],
                ),
            )
        )

    # One round

    def step(self) -> float:
        """Do all that is due; gives the seconds until there is something to do again."""
        self._last_round = now = self.clock.monotonic()
        for outcome in self.scheduler.step():
            self.intake.take(outcome)
            self._watch(outcome)
        ready = self.scheduler.settled or now - self._started > SETTLE_MAX_S
        if ready and (self.intake.urgent or now >= self._next_cut):
            self.cut()
        until_cut = self._next_cut - now if ready else SETTLE_MAX_S - (now - self._started) + 0.001
        return max(0.0, min(self.scheduler.wait_s(), max(until_cut, 0.0)))

    def cut(self) -> None:
        """Put everything that was read since the last time into the spool, and have it shipped."""
        urgent = self.intake.urgent
        now = self.clock.monotonic()
        self._next_cut = now + self.config.ship_interval_s
        for event in self.spool.notices:
            self.intake.add_event(event)
        self.spool.notices.clear()
        self.intake.add_samples(s for s in self.own_samples() if not s.labels)
        self._worst_poll_s = self._worst_late_s = 0.0
        parts = self.intake.cut()
        if parts is not None:
            self.spool.append(parts)
            self._cuts += 1
        self.shipper.wake(urgent=urgent)

    def _watch(self, outcome: Outcome) -> None:
        self._worst_poll_s = max(self._worst_poll_s, outcome.duration_s)
        slot = next((s for s in self.scheduler.slots if s.name == outcome.name), None)
        if slot is not None and outcome.kind == "reading":
            self._worst_late_s = max(self._worst_late_s, slot.gap_s - slot.interval_s)

    def own_samples(self) -> list[Sample]:
        """The health of the monitoring itself, as samples of the node; labelled ones stay on the node's own page."""
        slots = self.scheduler.slots
        samples: list[Sample] = []
        for slot in slots:
            labels = {"collector": slot.name}
            if slot.up is not None:
                samples.append(Sample("", "collector_up", float(slot.up), labels))
                samples.append(Sample("", "collector_poll_seconds", slot.duration_s, labels))
            samples.append(Sample("", "collector_errors_total", slot.errors, labels))
            samples.append(Sample("", "collector_timeouts_total", slot.timeouts, labels))
        spool = self.spool.status
        resident, cpu_s = usage.total()
        own = {
            "agent_spool_batches": spool.batches,
            "agent_spool_bytes": spool.bytes,
            "agent_spool_dropped_total": spool.dropped,
            "agent_spool_degraded": float(bool(spool.degraded)),
            "agent_batches_refused_total": spool.refused,
            "agent_resident_bytes": resident,
            "agent_cpu_seconds_total": cpu_s,
            "agent_devices_missing": self.intake.missing_devices(),
            "agent_collectors_down": sum(slot.up is False and slot.last_good is not None for slot in slots),
            "agent_poll_seconds_max": self._worst_poll_s,
            "agent_poll_lateness_seconds_max": max(0.0, self._worst_late_s),
            "agent_collection_errors_total": sum(slot.errors for slot in slots),
            "agent_collection_timeouts_total": sum(slot.timeouts for slot in slots),
        }
        return samples + [Sample("", name, float(value)) for name, value in own.items()]

    # The loop

    def run(self) -> None:
        """Go round until `stop`. The service, the sources and the disk may all fail without ending it."""
        watchdog_s = watchdog_interval_s()
        notify("READY=1")
        self.shipper.start()
        while not self._stopping:
            wait_s = self.step()
            if self._replay is not None and self._replay.done:
                break
            if watchdog_s is not None:
                notify("WATCHDOG=1")
                wait_s = min(wait_s, watchdog_s)
            self._sleep(wait_s)
        notify("STOPPING=1")
        self.close()

    def once(self) -> bool:
        """Poll every source one time and ship; true when the service has it all."""
        while not self.scheduler.settled and self.clock.monotonic() - self._started < SETTLE_MAX_S * 4:
            for outcome in self.scheduler.step():
                self.intake.take(outcome)
                self._watch(outcome)
            if not self.scheduler.settled:
                self._sleep(self.scheduler.wait_s())
        self.cut()
        while (wait_s := self.shipper.step()) == 0.0:
            continue
        done = wait_s is None
        self.close()
        return done

    def _sleep(self, seconds: float) -> None:
        try:
            word = self._inbox.get(timeout=seconds)
        except queue.Empty:
            return
        if word == "stop":
            self._stopping = True
        elif word == "reload" and self._reload():
            self.restart = self._stopping = True

    def stop(self) -> None:
        """End soon. May be called from a signal handler or another thread."""
        self._stopping = True
        self._inbox.put("stop")

    def on_signals(self, reload: Callable[[], bool]) -> None:
        """SIGTERM and SIGINT end the agent; SIGHUP starts it anew when `reload` finds the settings sound."""
        self._reload = reload
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: self.stop())
        signal.signal(signal.SIGHUP, lambda *_: self._inbox.put("reload"))

    def healthy(self) -> tuple[bool, str]:
        """Whether the main loop still goes round, and a word on why not."""
        silent_s = self.clock.monotonic() - self._last_round
        limit_s = HEALTHY_SILENCE_S + max(self.config.ship_interval_s, 0.0)
        return (True, "ok") if silent_s < limit_s else (False, f"main loop silent for {silent_s:.0f} s")

    def close(self) -> None:
        """Spool what is left, try to ship it, and let everything go; takes two seconds at most."""
        self.cut()
        closers = [threading.Thread(target=_close, args=(s,), daemon=True) for s in self.scheduler.slots]
        for thread in closers:
            thread.start()
        self.shipper.stop(SHIP_GRACE_S)
        deadline = self.clock.monotonic() + CLOSE_GRACE_S
        for thread in closers:
            thread.join(max(0.0, deadline - self.clock.monotonic()))
        usage.kill_children()
        self.spool.close()
        log(logging.INFO, "agent_stopped", node=self.node, waiting=self.spool.status.batches)


def _close(slot: Slot) -> None:
    try:
        slot.collector.close()
    except Exception as error:  # a source that cannot be closed must not hold up the end
        log(logging.WARNING, "close_failed", collector=slot.name, reason=str(error))


def _machine_id() -> str:
    try:
        return Path("/etc/machine-id").read_text().strip()
    except OSError:
        return ""


def build(config: AgentConfig, token: str, *, recording: Path | None = None, speed: float = 1.0) -> Agent:
    """An agent of these settings for this host, or one that replays a recording. Raises ConfigError, InputError
    or StorageError."""
    clock = SystemClock()
    replay = None if recording is None else Replay(recording, clock, speed=speed)
    node = node_name(config)
    transport = HttpTransport(
        config.service_url, read_token(token, config.token_file), ca_file=config.ca_file
    )
    spool = Spool(
        Path(config.spool), node, clock, max_bytes=config.spool_max_bytes, agent_version=__version__
    )
    slots = [] if replay is not None else make_slots(config, clock, state_of=spool.state)
    shipper = Shipper(spool, transport, clock, url=config.service_url)
    return Agent(config, slots, spool, shipper, clock=clock, replay=replay)


def serve_metrics(agent: Agent) -> MetricsServer | None:
    """Start the node's own page, unless `agent.listen` is empty."""
    if not agent.config.listen:
        return None
    host, port = parse_address(agent.config.listen, "agent.listen")
    server = MetricsServer(host, port, agent.page, agent.healthy)
    server.start()
    log(logging.INFO, "metrics_listening", address=f"{host}:{server.port}")
    return server
