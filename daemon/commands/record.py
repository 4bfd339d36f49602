"""Record this node's readings into a file that can be handed on: serial numbers and names are replaced."""

from __future__ import annotations

import argparse
import signal
import socket
import sys
import threading
from pathlib import Path
from types import FrameType

from forewarn.collectors.clock import SystemClock
from forewarn.daemon.agent.logs import configure as configure_logs
from forewarn.daemon.agent.main import SETTLE_MAX_S, make_slots, node_name
from forewarn.daemon.agent.recording import Recorder
from forewarn.daemon.agent.scheduler import Scheduler, ThreadRunner
from forewarn.daemon.agent.single import close_within
from forewarn.daemon.config import Config


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--out", type=Path, required=True, metavar="FILE", help="JSON lines; gzip when the name ends in .gz"
    )
    parser.add_argument("--duration", type=float, metavar="SECONDS", help="default: until Ctrl-C")
    parser.add_argument(
        "--keep-identities", action="store_true", help="keep serial numbers, addresses and the node's name"
    )


def run(arguments: argparse.Namespace, config: Config) -> int:
    configure_logs(config.log_level if config.log_level != "info" else "warning")
    clock = SystemClock()
    node = node_name(config.agent)
    host = socket.gethostname()
    recorder = Recorder(
        arguments.out,
        node,
        clock,
        scrub=not arguments.keep_identities,
        names=[host, host.partition(".")[0], socket.getfqdn()],
    )
    wake = threading.Event()
    scheduler = Scheduler(make_slots(config.agent, clock), clock, ThreadRunner(), wake=wake.set)
    stopped = threading.Event()

    def stop(number: int, frame: FrameType | None) -> None:
        stopped.set()
        wake.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    begun = clock.monotonic()
    end = begun + arguments.duration if arguments.duration is not None else float("inf")
    settled = False
    print(f"recording to {arguments.out}; Ctrl-C ends it", file=sys.stderr)
    try:
        while not stopped.is_set() and clock.monotonic() < end:
            for outcome in scheduler.step():
                recorder.add(outcome)
            if not settled and (scheduler.settled or clock.monotonic() - begun > SETTLE_MAX_S):
                settled = True
                recorder.settle()
            wake.wait(min(scheduler.wait_s(), max(0.0, end - clock.monotonic())))
            wake.clear()
    finally:
        recorder.close()
        for slot in scheduler.slots:
            close_within(slot.collector, 0.2)
    print(f"{recorder.entries} readings in {arguments.out}", file=sys.stderr)
    return 0
