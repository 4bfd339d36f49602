"""Create, list and revoke access tokens. Works on the database itself; the service may be running."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from forewarn.collectors.clock import SystemClock
from forewarn.daemon.config import Config
from forewarn.daemon.service import tokens
from forewarn.daemon.service.database import open_database
from forewarn.daemon.service.times import iso


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--data", metavar="DIR", help="data folder of the service")
    parser.add_argument("--json", action="store_true", help="print JSON")
    actions = parser.add_subparsers(dest="action", required=True, metavar="create|list|revoke")
    create = actions.add_parser("create", help="make a token; its text is shown once, and stored nowhere")
    create.add_argument("--role", choices=tokens.ROLES, required=True)
    create.add_argument("--node", default="", help="the node that an agent's token speaks for; '*': any node")
    create.add_argument("--name", default="", help="a note on what it is for")
    create.add_argument("--days", type=float, help="days until it expires; default: never")
    actions.add_parser("list", help="show all tokens, without their texts")
    revoke = actions.add_parser("revoke", help="refuse a token from now on")
    revoke.add_argument("id", help="the id, as `forewarn token list` shows it")
    for parser_of_action in (create, revoke, actions.choices["list"]):
        parser_of_action.add_argument(
            "--json", action="store_true", default=argparse.SUPPRESS, help="print JSON"
        )
        parser_of_action.add_argument(
            "--data", metavar="DIR", default=argparse.SUPPRESS, help=argparse.SUPPRESS
        )


def run(arguments: argparse.Namespace, config: Config) -> int:
    clock = SystemClock()
    database = open_database(Path(arguments.data or config.service.data), config.service.database_url)
    try:
        if arguments.action == "create":
            text = tokens.create(
                database, clock, arguments.role, node=arguments.node, name=arguments.name, days=arguments.days
            )
            print(
                json.dumps({"token": text, "role": arguments.role, "node": arguments.node})
                if arguments.json
                else text
            )
        elif arguments.action == "revoke":
            tokens.revoke(database, clock, arguments.id)
            print(json.dumps({"revoked": arguments.id}) if arguments.json else f"revoked {arguments.id}")
        else:
            _show(tokens.listing(database), arguments.json)
    finally:
        database.close()
    return 0


def _show(rows: list[dict[str, object]], as_json: bool) -> None:
    times = ("created", "expires", "revoked")
    shown = [{k: iso(v) if k in times and isinstance(v, float) else v for k, v in r.items()} for r in rows]
    if as_json:
        print(json.dumps(shown))
        return
    columns = ("id", "role", "node", "name", "created", "expires", "revoked")
    lines = [columns, *(tuple(str(r[c] or "-") for c in columns) for r in shown)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(columns))]
    for line in lines:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())
