"""Say what can be collected on this host, and what to do about what cannot."""

from __future__ import annotations

import argparse
import logging
import sys

import msgspec

from forewarn.collectors.errors import ConfigError
from forewarn.daemon import config as configuration
from forewarn.daemon.agent.checks import Check, all_checks

MARKS = {"ok": "ok", "absent": "-", "problem": "PROBLEM"}


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(arguments: argparse.Namespace, config: configuration.Config) -> int:
    logging.basicConfig(stream=sys.stderr, level=logging.ERROR, format="forewarn: %(message)s")
    checks: list[Check] = []
    try:
        token = configuration.read_secret("FOREWARN_AGENT_TOKEN", config.agent.token_file)
    except ConfigError as error:
        token = ""
        checks.append(Check("token", "problem", str(error), "create it with `forewarn token`"))
        if not arguments.json:
            _show(checks[-1])
    for check in all_checks(config.agent, token):
        checks.append(check)
        if not arguments.json:
            _show(check)
    problems = sum(c.status == "problem" for c in checks)
    if arguments.json:
        print(
            msgspec.json.format(
                msgspec.json.encode({"checks": checks, "problems": problems}), indent=1
            ).decode()
        )
    else:
        print("all is well" if not problems else f"{problems} to look at")
    return 1 if problems else 0


def _show(check: Check) -> None:
    print(f"{MARKS[check.status]:<8} {check.name:<13} {check.detail}", flush=True)
    if check.remedy and check.status != "ok":
        print(f"{'':<8} {'':<13} -> {check.remedy}", flush=True)
