"""Replay a history through the code that serves, as fast as it can, and write the alerts it would have given."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from forewarn.daemon.commands.progress import progress
from forewarn.daemon.config import Config
from forewarn.models import registry
from forewarn.models.backtest import backtest, write_alerts
from forewarn.models.history import History
from forewarn.models.registry import RiskModel


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--history", type=Path, metavar="DIR", required=True)
    parser.add_argument("--model", default="bundled", help="a model folder, a folder of them, or `bundled`")
    parser.add_argument(
        "--alerts", type=Path, metavar="FILE", required=True, help="Parquet file for the alerts"
    )
    parser.add_argument("--scores", type=Path, metavar="FILE", help="Parquet file for every risk")
    parser.add_argument("--step-seconds", type=float, help="time between scores; default: by kind of device")
    parser.add_argument(
        "--detections", action="store_true", help="also write alerts for failures that had happened when seen"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def load_models(name: str) -> dict[str, RiskModel | None]:
    """Models by kind: the bundled ones, a model folder, or a folder of them."""
    path = registry.bundled_path() if name == "bundled" else Path(name)
    return dict(registry.load_all(path))


def run(arguments: argparse.Namespace, config: Config) -> int:
    history = History(arguments.history)
    models = load_models(arguments.model)
    with progress() as show:
        result = backtest(
            history,
            models,
            scores=arguments.scores,
            detections=arguments.detections,
            step_s=arguments.step_seconds,
            watch=lambda share: show("replaying", share),
        )
        write_alerts(arguments.alerts, result.alerts)
    report = {
        "alerts": len(result.alerts),
        "detections": len(result.detections),
        "moments": result.moments,
        "device_days": round(result.device_days, 2),
        "file": str(arguments.alerts),
        "simulated": history.simulated,
    }
    if arguments.json:
        print(json.dumps(report, indent=1))
    else:
        print(
            f"{report['alerts']} alerts and {report['detections']} detections in {report['device_days']} device-days; "
            f"wrote {arguments.alerts}"
        )
    return 0
