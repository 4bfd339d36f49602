"""Run one collector once and print what it reads."""

from __future__ import annotations

import argparse
import logging
import sys
from pathlib import Path
from typing import Any

import msgspec

from forewarn.collectors import registry
from forewarn.collectors.base import CollectionError, Collector, Reading
from forewarn.collectors.clock import SystemClock
from forewarn.collectors.errors import ConfigError, UnavailableError
from forewarn.daemon.agent.main import node_name
from forewarn.daemon.agent.single import close_within, collect_within, named
from forewarn.daemon.config import CollectorConfig, Config


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="NAME", help=f"one of: {', '.join(registry.COLLECTORS)}")
    parser.add_argument(
        "--set",
        dest="options",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="an option of the collector; may be given more than once",
    )
    parser.add_argument("--deadline", type=float, metavar="SECONDS", help="default: the collector's own")
    parser.add_argument("--node", default="", help="name to put before devices; default: agent.node")
    parser.add_argument("--json", action="store_true", help="print JSON")


def parse_options(words: list[str]) -> dict[str, str]:
    """`KEY=VALUE` words as a dict. Raises ConfigError for a word without `=`."""
    options = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals or not key:
            raise ConfigError(f"--set {word}: must be KEY=VALUE, for example --set path=/dev/kmsg")
        options[key] = value
    return options


def run(arguments: argparse.Namespace, config: Config) -> int:
    logging.basicConfig(stream=sys.stderr, level=logging.WARNING, format="forewarn: %(message)s")
    clock = SystemClock()
    node = arguments.node or node_name(config.agent)
    own = config.agent.collectors.get(arguments.name, CollectorConfig())
    options = {**own.options, **parse_options(arguments.options)}
    failure: CollectionError | None
    collector: Collector | None = None
    try:
        setup = registry.Setup(clock, Path(config.agent.root))
        collector = registry.create(arguments.name, options, setup)
    except UnavailableError as error:
        reading, failure = Reading(), CollectionError(arguments.name, str(error))
    else:
        deadline_s = arguments.deadline or own.deadline_s or collector.deadline_s
        reading, failure = collect_within(collector, deadline_s)
    if failure is not None:
        reading = Reading(errors=[failure])
    told = named(reading, node, clock)
    if arguments.json:
        print(msgspec.json.format(msgspec.json.encode(told), indent=1).decode())
    else:
        _show(told)
    if failure is not None:
        print(f"forewarn: {failure.message}", file=sys.stderr)
        if failure.remedy:
            print(f"forewarn: {failure.remedy}", file=sys.stderr)
    if collector is not None:
        close_within(collector)
    return 1 if failure is not None else 0


def _show(told: dict[str, Any]) -> None:
    for device in told["devices"]:
        words = [device["kind"], device["model"], device["serial"], device["pci"] or ""]
        mark = " (simulated)" if device["simulated"] else ""
        print(f"{device['device']:<24} {' '.join(w for w in words if w)}{mark}")
    for s in told["samples"]:
        labels = ",".join(f"{k}={v}" for k, v in s["labels"].items())
        metric = s["metric"] + (f"{{{labels}}}" if labels else "")
        print(f"{s['device']:<24} {metric:<52} {s['value']:.10g}")
    for e in told["events"]:
        count = f" x{e['count']}" if e["count"] > 1 else ""
        print(f"{e['device']:<24} event {e['kind']} {e['code']} {e['severity']}{count}: {e['message']}")
    for e in told["errors"]:
        print(f"{e['device']:<24} error: {e['message']}" + (f" ({e['remedy']})" if e["remedy"] else ""))
    if not any(told.values()):
        print("nothing to report")
