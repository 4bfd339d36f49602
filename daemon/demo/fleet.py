"""The demo's simulated nodes: what their agents would send, over the same HTTP ingest, every device marked simulated.

`python -m forewarn.daemon.demo.fleet --url URL --token-file FILE` prints one JSON object a line.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import threading
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

import httpx
import msgspec
import stamina

from forewarn import __version__
from forewarn.collectors.base import Device, Reading
from forewarn.collectors.clock import Clock, SystemClock
from forewarn.collectors.errors import ForewarnError, UnavailableError
from forewarn.daemon import wire
from forewarn.daemon.demo.gpus import SimulatedFleet

POLL_INTERVAL_S = 2.0
HISTORY_STEP_S = 60.0
FRAMES_A_BATCH = 60
SEND_TIMEOUT_S = 10.0


def say(event: str, **facts: object) -> None:
    """One line for whoever started us."""
    sys.stdout.write(json.dumps({"event": event, **facts}) + "\n")
    sys.stdout.flush()


class RefusedError(ForewarnError):
    """The service refused a batch."""


class SimulatedAgent:
    """One node's agent, without a spool: what is not acknowledged is sent again, in order, with its sequence."""

    def __init__(self, node: str, client: httpx.Client, clock: Clock) -> None:
        self.node = node
        self._client = client
        self._clock = clock
        self._stream = uuid.uuid4().hex
        self._sequence = 0
        self._waiting: list[wire.Batch] = []

    def add(self, readings: Sequence[tuple[float, Reading]]) -> None:
        """Put readings with their times into a batch."""
        self._sequence += 1
        frames, events = [], []
        devices: dict[str, Device] = {}
        for moment, reading in readings:
            samples = [
                msgspec.structs.replace(s, device=wire.full_id(self.node, s.device)) for s in reading.samples
            ]
            if samples:
                frames.append(wire.pack_samples(moment, samples))
            for event in reading.events:
                stamp = moment if event.time is None else event.time
                where = wire.full_id(self.node, event.device)
                events.append(msgspec.structs.replace(event, device=where, time=stamp))
            for device in reading.devices:
                where = wire.full_id(self.node, device.device)
                devices[where] = msgspec.structs.replace(device, device=where, simulated=True)
        self._waiting.append(
            wire.Batch(
                node=self.node,
                stream=self._stream,
                sequence=self._sequence,
                agent_version=f"{__version__} (simulated)",
                devices=list(devices.values()),
                frames=frames,
                events=events,
            )
        )

    def ship(self) -> int:
        """Send what waits; returns how many batches are left. Raises RefusedError when one is refused for good."""
        while self._waiting:
            batch = msgspec.structs.replace(self._waiting[0], sent=self._clock.now())
            body, encoding = wire.compress(wire.encode(batch))
            headers = {"Content-Type": wire.CONTENT_TYPE}
            if encoding:
                headers["Content-Encoding"] = encoding
            try:
                answer = self._client.post("/v1/ingest", content=body, headers=headers)
            except httpx.HTTPError:
                break
            if answer.status_code in (400, 401, 403, 413, 422):
                raise RefusedError(
                    f"simulated fleet: {self.node} was refused: {answer.status_code} {answer.text}"
                )
            if not answer.is_success:
                break
            self._waiting.pop(0)
        return len(self._waiting)


def send_history(
    fleet: SimulatedFleet, agents: Sequence[SimulatedAgent], clock: Clock, history_s: float
) -> None:
    """What happened before now, with true past stamps, as agents that had been offline would send it."""
    now = clock.now()
    steps = int(history_s // HISTORY_STEP_S)
    moments = [now - (steps - i) * HISTORY_STEP_S for i in range(steps)]
    for start in range(0, steps, FRAMES_A_BATCH):
        part = moments[start : start + FRAMES_A_BATCH]
        # All nodes keep step: the simulation has one time.
        rows = [[(moment, fleet.poll(agent.node, moment)) for agent in agents] for moment in part]
        for index, agent in enumerate(agents):
            agent.add([row[index] for row in rows])
            for attempt in stamina.retry_context(on=UnavailableError, attempts=20, timeout=60.0):
                with attempt:
                    if agent.ship():
                        raise UnavailableError("simulated fleet: the service does not take the history")


def main(words: Sequence[str] | None = None) -> int:
    """Report until stopped."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", required=True)
    parser.add_argument("--token-file", type=Path, required=True)
    parser.add_argument("--nodes", type=int, default=16)
    parser.add_argument("--gpus", type=int, default=8)
    parser.add_argument("--seed", type=int, default=20)
    parser.add_argument("--history-hours", type=float, default=1.0)
    parser.add_argument("--wear-after-seconds", type=float, default=8.0)
    arguments = parser.parse_args(words)
    stop = threading.Event()

    def end(_number: int, _frame: FrameType | None) -> None:
        stop.set()

    signal.signal(signal.SIGTERM, end)
    signal.signal(signal.SIGINT, end)
    clock = SystemClock()
    start = clock.now() - arguments.history_hours * 3600
    fleet = SimulatedFleet(arguments.nodes, arguments.gpus, arguments.seed, start)
    token = arguments.token_file.read_text(encoding="utf-8").strip()
    headers = {"Authorization": f"Bearer {token}"}
    try:
        with httpx.Client(
            base_url=arguments.url, headers=headers, timeout=SEND_TIMEOUT_S, trust_env=False
        ) as client:
            agents = [SimulatedAgent(node, client, clock) for node in fleet.nodes]
            send_history(fleet, agents, clock, arguments.history_hours * 3600)
            devices = arguments.nodes * arguments.gpus
            say("history", hours=arguments.history_hours, devices=devices, nodes=arguments.nodes)
            _report(fleet, agents, clock, stop, arguments.wear_after_seconds)
    except ForewarnError as error:
        say("failed", error=str(error))
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


def _report(
    fleet: SimulatedFleet,
    agents: Sequence[SimulatedAgent],
    clock: Clock,
    stop: threading.Event,
    wear_after_s: float,
) -> None:
    began = time.monotonic()
    victim = ""
    while not stop.is_set():
        round_began = time.monotonic()
        if not victim and round_began - began >= wear_after_s:
            victim = fleet.wear_out(clock.now())
            say("wear", device=victim)
        now = clock.now()
        for agent in agents:
            if stop.is_set():
                return
            reading = fleet.poll(agent.node, now)
            for event in reading.events:
                say(
                    "device_event",
                    device=wire.full_id(agent.node, event.device),
                    kind=event.kind,
                    code=event.code,
                    severity=event.severity,
                    message=event.message,
                )
            agent.add([(now, reading)])
            agent.ship()
        stop.wait(max(0.05, POLL_INTERVAL_S - (time.monotonic() - round_began)))


if __name__ == "__main__":
    sys.exit(main())
