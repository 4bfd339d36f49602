"""A table of the fleet from a running service: risk, protections, alerts. `--watch` keeps it up to date."""

from __future__ import annotations

import argparse
import json
import os
import time
from typing import Any

import httpx
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from forewarn.collectors.errors import UnavailableError
from forewarn.daemon.config import Config, read_secret

TIMEOUT_S = 5.0
LEVEL_STYLES = {"healthy": "green", "watch": "yellow", "warning": "dark_orange", "critical": "bold red"}


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--url", metavar="URL", help="the service; default: http:// and service.listen")
    parser.add_argument(
        "--token-file", metavar="FILE", default="", help="a reader's token; FOREWARN_TOKEN overrides it"
    )
    parser.add_argument("--min-risk", type=float, default=0.0, help="show devices from this risk on")
    parser.add_argument("--limit", type=int, default=20, help="devices shown")
    parser.add_argument("--watch", action="store_true", help="show it again every two seconds until Ctrl-C")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(arguments: argparse.Namespace, config: Config) -> int:
    token = read_secret("FOREWARN_TOKEN", arguments.token_file, os.environ)
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    url = arguments.url or f"http://{config.service.listen}"
    with httpx.Client(base_url=url, headers=headers, timeout=TIMEOUT_S) as client:
        if arguments.json:
            print(json.dumps(read(client, arguments)))
            return 0
        console = Console()
        if not arguments.watch:
            console.print(show(read(client, arguments)))
            return 0
        with Live(show(read(client, arguments)), console=console, screen=False) as live:
            while True:
                time.sleep(2.0)
                live.update(show(read(client, arguments)))


def read(client: httpx.Client, arguments: argparse.Namespace) -> dict[str, Any]:
    """What the table shows. Raises UnavailableError."""
    query = {"limit": arguments.limit, "min_risk": arguments.min_risk}
    return {
        "ready": _get(client, "/readyz"),
        "risk": _get(client, "/v1/risk", query)["items"],
        "protections": _get(client, "/v1/protections", {"limit": 10})["items"],
        "alerts": _get(client, "/v1/alerts", {"limit": 10})["items"],
    }


def _get(client: httpx.Client, path: str, query: dict[str, Any] | None = None) -> dict[str, Any]:
    try:
        answer = client.get(path, params=query)
        content: dict[str, Any] = answer.json()
    except (httpx.HTTPError, ValueError) as error:
        raise UnavailableError(
            f"service: {client.base_url} does not answer ({error}): is `forewarn serve` running there?"
        ) from error
    if answer.is_success:
        return content
    remedy = "; give a reader's token in --token-file or FOREWARN_TOKEN" if answer.status_code == 401 else ""
    raise UnavailableError(
        f"service: {client.base_url}{path.lstrip('/')}: {content.get('detail', answer.status_code)}{remedy}"
    )


def show(state: dict[str, Any]) -> Group:
    """The tables."""
    ready = state["ready"]
    parts: list[Any] = [
        Text(f"{ready['devices']} devices, cycle {ready['cycle']} took {ready['cycle_seconds']:.2f} s")
    ]
    devices = Table(title="Risk", title_justify="left")
    for column in ("device", "kind", "level", "risk", "why"):
        devices.add_column(column)
    for row in state["risk"]:
        name = row["device"] + (" (simulated)" if row["simulated"] else "")
        risks = "  ".join(f"{_span(int(h))} {p:.1%}" for h, p in row["risk"].items())
        devices.add_row(
            name, row["kind"], Text(row["level"], LEVEL_STYLES.get(row["level"], "")), risks, row["reason"]
        )
    parts.append(devices)
    if state["protections"]:
        table = Table("protection", "job", "state", "action", "device", "created", title="Protections")
        for row in state["protections"]:
            table.add_row(row["id"], row["job"], row["state"], row["action"], row["device"], row["created"])
        parts.append(table)
    if state["alerts"]:
        table = Table("alert", "level", "what", "why", title="Open alerts")
        for row in state["alerts"]:
            table.add_row(str(row["id"]), row["level"], row["title"], row["reason"])
        parts.append(table)
    return Group(*parts)


def _span(seconds: int) -> str:
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= size and seconds % size == 0:
            return f"{seconds // size} {unit}"
    return f"{seconds} s"
