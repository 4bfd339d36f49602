"""List the models of a store, promote a challenger, or go back to the champion before."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from forewarn.collectors.errors import ConfigError
from forewarn.daemon.config import Config
from forewarn.models import registry
from forewarn.models.registry import Store, StoredModel


def configure(parser: argparse.ArgumentParser) -> None:
    """Options of `forewarn models`."""
    parser.add_argument(
        "--store", metavar="DIR", type=Path, help="folder of models (default: service.models)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    listing = actions.add_parser("list", help="show every model, its kind and its state")
    add = actions.add_parser("add", help="copy a model folder in as a challenger")
    add.add_argument("folder", type=Path, metavar="FOLDER")
    add.add_argument("--name", help="name in the store (default: its kind and digest)")
    promote = actions.add_parser("promote", help="make a model the champion of its kind")
    promote.add_argument("model", metavar="NAME")
    rollback = actions.add_parser("rollback", help="back to the champion before")
    rollback.add_argument("kind", metavar="KIND", choices=("gpu", "disk", "node"))
    for one in (listing, add, promote, rollback):
        # Accepted behind the action as well; absent there, what stood before it holds.
        one.add_argument("--json", action="store_true", default=argparse.SUPPRESS, help="print JSON")


def run(arguments: argparse.Namespace, config: Config) -> int:
    """Carry out one action; returns the exit code."""
    store = Store(_path(arguments.store, config, arguments.action))
    if arguments.action == "list":
        found = store.models()
        _say(
            arguments.json,
            {"store": str(store.path), "models": [registry.as_dict(m) for m in found]},
            _table(found),
        )
        return 1 if any(m.error for m in found) else 0
    if arguments.action == "add":
        name = store.add(arguments.folder, arguments.name)
        _say(
            arguments.json, {"added": name}, f"added {name}: promote it with `forewarn models promote {name}`"
        )
    elif arguments.action == "promote":
        kind = store.promote(arguments.model)
        _say(
            arguments.json,
            {"promoted": arguments.model, "kind": kind},
            f"{arguments.model} is the champion for {kind}",
        )
    else:
        name = store.rollback(arguments.kind)
        _say(
            arguments.json,
            {"promoted": name, "kind": arguments.kind},
            f"back to {name} as the champion for {arguments.kind}",
        )
    return 0


def _path(given: Path | None, config: Config, action: str) -> Path:
    if given is not None:
        return given
    if config.service.models:
        return Path(config.service.models)
    if action == "list":
        return registry.bundled_path()
    raise ConfigError("service.models: no folder of models is set: set it, or give --store DIR")


def _say(as_json: bool, value: object, text: str) -> None:
    print(json.dumps(value, indent=1) if as_json else text)


def _table(models: list[StoredModel]) -> str:
    if not models:
        return "no models"
    rows = [("NAME", "KIND", "STATE", "TRAINED ON", "DIGEST")]
    for m in models:
        if m.error:
            rows.append((m.name, "-", "damaged", m.error, "-"))
            continue
        span = f"{m.trained_from[:10]}..{m.trained_to[:10]}" if m.trained_from else "unknown span"
        rows.append((m.name, m.kind, m.state, f"{'simulated, ' if m.simulated else ''}{span}", m.digest[:12]))
    widths = [max(len(r[i]) for r in rows) for i in range(5)]
    return "\n".join("  ".join(c.ljust(w) for c, w in zip(r, widths, strict=True)).rstrip() for r in rows)
