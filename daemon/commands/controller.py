"""Receive protections for a training job, have it save, and acknowledge. Runs beside the job until it is stopped."""

from __future__ import annotations

import argparse
import signal
import threading
from pathlib import Path

from forewarn.collectors.errors import ConfigError
from forewarn.daemon.config import Config, ControllerConfig
from forewarn.daemon.controller import logs
from forewarn.daemon.controller.mailbox import Mailbox, Outcome
from forewarn.daemon.controller.sidecar import Controller, new_secret


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--listen", metavar="HOST:PORT", help="address to receive webhooks on")
    parser.add_argument("--state", metavar="DIR", help="folder shared with the training loop")
    parser.add_argument(
        "--new-secret", metavar="FILE", type=Path, help="write a fresh webhook secret and end"
    )
    parser.add_argument(
        "--report",
        choices=("completed", "failed", "declined"),
        help="for loops in any language: answer the open requests of the state folder and end",
    )
    parser.add_argument("--checkpoint", metavar="PATH", help="with --report completed: where it was saved")
    parser.add_argument("--step", type=int, help="with --report: the step of the checkpoint")
    parser.add_argument("--seconds", type=float, help="with --report completed: how long the save took")
    parser.add_argument("--reason", default=None, help="with --report failed or declined: why")


def run(arguments: argparse.Namespace, config: Config) -> int:
    settings = config.controller
    if arguments.listen:
        settings.listen = arguments.listen
    if arguments.state:
        settings.state = arguments.state
    if arguments.new_secret:
        new_secret(arguments.new_secret)
        print(f"wrote {arguments.new_secret}")
        return 0
    if arguments.report:
        return _report(arguments, settings)
    logs.set_up(config.log_level)
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    with Controller(settings) as controller:
        print(f"receiving at {controller.url}; state in {settings.state}", flush=True)
        stop.wait()
    return 0


def _report(arguments: argparse.Namespace, settings: ControllerConfig) -> int:
    """Close the open requests by hand; the running controller (or the next one) tells the service."""
    if arguments.report == "completed" and not arguments.checkpoint:
        raise ConfigError("--report completed needs --checkpoint PATH")
    if arguments.report != "completed" and not arguments.reason:
        raise ConfigError(f"--report {arguments.report} needs --reason TEXT")
    mailbox = Mailbox(settings.state)
    try:
        waiting = [request.protection for request in mailbox.open_requests()]
        outcome = Outcome(
            state=arguments.report,
            checkpoint=arguments.checkpoint,
            step=arguments.step,
            duration_seconds=arguments.seconds,
            reason=arguments.reason,
        )
        mailbox.finish(waiting, outcome)
    finally:
        mailbox.close()
    print(f"{len(waiting)} request(s) reported as {arguments.report}")
    return 0
