"""Watch this node: poll every source, keep the readings on disk, ship them to the service, serve /metrics."""

from __future__ import annotations

import argparse
import gc
import logging
import os
import sys
from pathlib import Path

from forewarn import __version__
from forewarn.collectors.errors import ConfigError
from forewarn.daemon import config as configuration
from forewarn.daemon.agent import main as agent_main
from forewarn.daemon.agent.logs import configure as configure_logs
from forewarn.daemon.agent.logs import log


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--once", action="store_true", help="poll everything one time, ship, and end")
    parser.add_argument(
        "--replay", type=Path, metavar="FILE", help="play a recording of `forewarn record` instead of polling"
    )
    parser.add_argument("--speed", type=float, default=1.0, metavar="FACTOR", help="how fast to replay")


def run(arguments: argparse.Namespace, config: configuration.Config) -> int:
    if arguments.speed <= 0:
        raise ConfigError("--speed: must be above 0")
    if arguments.once and arguments.replay:
        raise ConfigError("--once and --replay exclude each other")
    configure_logs(config.log_level)
    # An unreadable token file is said once, here; the agent goes on collecting and the file is read at each sending.
    try:
        token = configuration.read_secret("FOREWARN_AGENT_TOKEN", "")
        if not token:
            configuration.read_secret("FOREWARN_AGENT_TOKEN", config.agent.token_file)
    except ConfigError as error:
        log(logging.WARNING, "token_unreadable", reason=str(error))
    agent = agent_main.build(config.agent, token, recording=arguments.replay, speed=arguments.speed)
    log(
        logging.INFO,
        "agent_started",
        node=agent.node,
        version=__version__,
        service=config.agent.service_url,
        spool=config.agent.spool,
        collectors=",".join(slot.name for slot in agent.scheduler.slots),
        simulated=config.agent.simulated or None,
    )
    if arguments.once:
        return 0 if agent.once() else 1
    server = agent_main.serve_metrics(agent)
    agent.on_signals(lambda: _sound(arguments.config))
    # What is loaded by now stays for good; looking through it again and again is CPU for nothing.
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 50)
    agent.run()
    if server is not None:
        server.stop()
    sys.stderr.flush()
    if agent.restart:
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])  # noqa: S606  # itself again
    # Abandoned polls may hang in a driver for ever: end without waiting for their threads.
    os._exit(0)


def _sound(path: Path | None) -> bool:
    """Whether the settings can be read again; what is wrong with them is logged, and the old ones stay."""
    environment = {k: v for k, v in os.environ.items() if k != "FOREWARN_CONFIG"}
    if path is None and os.environ.get("FOREWARN_CONFIG"):
        path = Path(os.environ["FOREWARN_CONFIG"])
    try:
        configuration.load(path, environment)
    except ConfigError as error:
        log(logging.ERROR, "reload_refused", reason=str(error))
        return False
    return True
