"""Train models on history directories: one kind of device at a time, a model folder each.

Trees, calibration and alert thresholds are chosen on later time than they were learned on. The same data and seed
give the same model.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from forewarn.collectors.errors import InputError
from forewarn.daemon.commands.progress import progress
from forewarn.daemon.config import Config
from forewarn.models.backtest import kinds_of
from forewarn.models.features import HORIZONS_S
from forewarn.models.history import History
from forewarn.models.labels import failures_of
from forewarn.models.training import LEAST_FAILURES, Options, train_to


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--history",
        type=Path,
        metavar="DIR",
        action="append",
        required=True,
        help="may be given more than once",
    )
    parser.add_argument("--out", type=Path, metavar="MODEL", required=True, help="folder to write")
    parser.add_argument(
        "--kind", choices=list(HORIZONS_S), help="default: the kind with failures to learn from"
    )
    parser.add_argument("--rows", type=int, default=Options.rows, help="rows to learn from per history")
    parser.add_argument(
        "--budget", type=float, help="false alarms allowed per 1,000 device-days; default: by kind of device"
    )
    parser.add_argument(
        "--credit", action="append", default=[], metavar="TEXT", help="source of the data, for the manifest"
    )
    parser.add_argument(
        "--card", type=Path, metavar="FILE", help="model card to put into the folder as card.md"
    )
    parser.add_argument("--seed", type=int, default=Options.seed)
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(arguments: argparse.Namespace, config: Config) -> int:
    histories = [History(path) for path in arguments.history]
    kind = arguments.kind or _kind(histories)
    options = Options(
        seed=arguments.seed, rows=arguments.rows, budget=arguments.budget, credits=arguments.credit
    )
    extra = {} if arguments.card is None else {"card.md": _card(arguments.card)}
    with progress() as show:
        manifest = train_to(arguments.out, histories, kind, options, show, extra)
    report = {
        "model": str(arguments.out),
        "kind": kind,
        "simulated": manifest.simulated,
        "trained_from": manifest.trained_from,
        "trained_to": manifest.trained_to,
        "metrics": manifest.metrics,
        "parameters": manifest.parameters,
    }
    if arguments.json:
        print(json.dumps(report, indent=1))
        return 0
    print(
        f"wrote {arguments.out}: {kind} model, learned from {manifest.trained_from} to {manifest.trained_to}"
    )
    if manifest.simulated:
        print("learned from SIMULATED data: its scores say nothing of a real fleet")
    for name, value in manifest.metrics.items():
        print(f"  {name} {value:.3g}")
    return 0


def _card(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise InputError(f"--card {path}: cannot be read: {error.strerror or error}") from error


def _kind(histories: list[History]) -> str:
    """The first kind that the telemetry speaks of and that has failures enough."""
    kinds = [k for h in histories for k in kinds_of(h)]
    for kind in dict.fromkeys(kinds):
        if sum(len(failures_of(h, kind)) for h in histories) >= LEAST_FAILURES:
            return kind
    return kinds[0] if kinds else "gpu"
