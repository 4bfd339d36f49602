"""Write a labelled history of a fleet that never existed: telemetry, events, devices and failures.

All of it is SYNTHETIC. It proves that the pipeline works; what a model scores on it is no measure of skill in the
field. Rates follow field studies, times --failures-scale; docs/SIMULATOR.md names the source of each parameter.
"""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

from forewarn.collectors.errors import ConfigError
from forewarn.daemon.config import Config
from forewarn.models import simulator
from forewarn.models.simulator_profiles import PROFILES


def configure(parser: argparse.ArgumentParser) -> None:
    default = simulator.Settings()
    parser.add_argument("out", type=Path, metavar="OUT", help="folder to write; must be new or empty")
    parser.add_argument("--nodes", type=int, default=default.nodes, help="default %(default)s")
    parser.add_argument(
        "--gpus-per-node", type=int, default=default.gpus_per_node, help="default %(default)s"
    )
    parser.add_argument("--days", type=float, default=default.days, help="default %(default)s")
    parser.add_argument(
        "--interval-s",
        type=float,
        help="seconds between polls (default 60; with --profile random it is drawn, 10 to 300)",
    )
    parser.add_argument("--seed", type=int, default=default.seed, help="same seed, same history (default 1)")
    parser.add_argument(
        "--failures-scale",
        type=float,
        default=default.failures_scale,
        metavar="FACTOR",
        help="how much more often hardware fails than in the field (default %(default)s)",
    )
    parser.add_argument(
        "--profile",
        default=default.profile,
        metavar="NAME",
        help=f"boards and physics: {', '.join(PROFILES)} (default %(default)s)",
    )
    parser.add_argument("--start", metavar="ISO", help="first moment, UTC (default 2025-01-01)")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(arguments: argparse.Namespace, config: Config) -> int:
    for name in ("days", "failures_scale", "interval_s"):
        value = getattr(arguments, name)
        if value is not None and not math.isfinite(value):
            raise ConfigError(f"--{name.replace('_', '-')} {value}: must be a finite number")
    settings = simulator.Settings(
        nodes=arguments.nodes,
        gpus_per_node=arguments.gpus_per_node,
        days=arguments.days,
        interval_s=arguments.interval_s,
        seed=arguments.seed,
        failures_scale=arguments.failures_scale,
        profile=arguments.profile,
        start=_start(arguments.start),
    )
    console = Console(stderr=True)
    with Progress(console=console, disable=not console.is_terminal, transient=True) as bar:
        task = bar.add_task("simulating nodes", total=settings.nodes)
        summary = simulator.write(settings, arguments.out, lambda done, _: bar.update(task, completed=done))
    if arguments.json:
        print(json.dumps(asdict(summary), indent=1))
        return 0
    print(
        f"SYNTHETIC history in {summary.path} (profile {summary.profile}, a poll each {summary.interval_s:g} s): "
        f"{summary.devices} devices, {summary.rows} rows, {summary.events} events, "
        f"{summary.failures} failures, {summary.with_precursor} of them with a precursor."
    )
    for cause, count in summary.causes.items():
        print(f"  {cause:<20} {count:>5}")
    print("It proves the pipeline; scores on it say nothing about skill in the field.")
    return 0


def _start(text: str | None) -> float:
    if text is None:
        return simulator.DEFAULT_START
    try:
        moment = datetime.fromisoformat(text)
    except ValueError as error:
        raise ConfigError(f"--start {text}: must be a date or time such as 2025-01-01T00:00:00") from error
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
