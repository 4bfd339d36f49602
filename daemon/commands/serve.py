"""Run the service: take batches, score the fleet, protect jobs, answer the API and the page."""

from __future__ import annotations

import argparse

from forewarn.daemon.config import Config
from forewarn.daemon.service.server import configure_logs, serve


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--listen", metavar="HOST:PORT", help="address of API and page")
    parser.add_argument("--data", metavar="DIR", help="folder of log, snapshots, history and database")
    parser.add_argument("--models", metavar="DIR", help="folder of models")


def run(arguments: argparse.Namespace, config: Config) -> int:
    settings = config.service
    settings.listen = arguments.listen or settings.listen
    settings.data = arguments.data or settings.data
    settings.models = arguments.models or settings.models
    configure_logs(config.log_level)
    serve(settings)
    return 0
