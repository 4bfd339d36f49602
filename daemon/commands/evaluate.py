"""Measure a model on a history: replay it through the code that serves, and hold alerts and risks against what failed.

Judge on time the model has not learned from: another history, or the same with --after.
"""

from __future__ import annotations

import argparse
import datetime
import json
from pathlib import Path

from forewarn.collectors.errors import InputError
from forewarn.daemon.commands.backtest import load_models
from forewarn.daemon.commands.progress import progress
from forewarn.daemon.config import Config
from forewarn.models.backtest import kinds_of
from forewarn.models.evaluation import evaluate
from forewarn.models.evaluation_report import markdown, write_html
from forewarn.models.features import HORIZONS_S
from forewarn.models.history import History


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--history", type=Path, metavar="DIR", required=True)
    parser.add_argument("--model", default="bundled", help="a model folder, a folder of them, or `bundled`")
    parser.add_argument("--kind", choices=list(HORIZONS_S), help="default: the kind of the model given")
    parser.add_argument("--after", metavar="TIME", help="judge only from this time on (ISO 8601, UTC)")
    parser.add_argument("--report", type=Path, metavar="FILE", help="write an HTML report with plots")
    parser.add_argument("--seed", type=int, default=1, help="of the intervals by bootstrap")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(arguments: argparse.Namespace, config: Config) -> int:
    history = History(arguments.history)
    after = _moment(arguments.after) if arguments.after else None
    models = load_models(arguments.model)
    kinds = kinds_of(history)
    kind = arguments.kind or next((k for k in kinds if models.get(k)), None)
    if kind is None or models.get(kind) is None:
        have = ", ".join(sorted(models)) or "none"
        raise InputError(
            f"--model {arguments.model}: no model of kind {kind or ' or '.join(kinds) or 'any'}; it has: {have}"
        )
    with progress() as show:
        found = evaluate(history, models, kind, after=after, seed=arguments.seed, watch=show)
    if arguments.report:
        write_html(arguments.report, found)
    print(json.dumps(found.as_dict(), indent=1) if arguments.json else markdown(found))
    return 0


def _moment(text: str) -> float:
    try:
        moment = datetime.datetime.fromisoformat(text)
    except ValueError as error:
        raise InputError(f"--after {text}: is no time; write it like 2026-01-31T00:00:00") from error
    return (moment if moment.tzinfo else moment.replace(tzinfo=datetime.UTC)).timestamp()
