"""The `forewarn` command. Each subcommand is a module of `daemon/commands`, imported only when it is called."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from forewarn import __version__
from forewarn.collectors.errors import ConfigError, ForewarnError
from forewarn.daemon import config as configuration

EXIT_DONE, EXIT_FAILED, EXIT_USAGE = 0, 1, 2

COMMANDS = {
    "agent": "watch this node and report to the service",
    "serve": "run the service",
    "controller": "receive protections for a training job",
    "demo": "run everything on this machine with a simulated fleet",
    "doctor": "say what can be collected here, and what to do about what cannot",
    "collect": "run one collector once and print what it reads",
    "record": "record this node's readings into a file, identities replaced",
    "status": "a table of the fleet from the service",
    "train": "train models on a history directory",
    "evaluate": "measure a model on a history directory",
    "backtest": "replay a history through the code that serves",
    "simulate": "write a labelled synthetic history",
    "simulate-goodput": "replay a failure trace against checkpoint policies",
    "label": "derive failures from a history's events",
    "models": "list, promote or roll back models",
    "token": "create, list and revoke access tokens",
}
"""Every command and its one-line help, in the order `forewarn --help` shows them."""

EXTRA_OF_COMMAND = {
    **dict.fromkeys(("agent", "collect", "doctor", "record"), "agent"),
    "controller": "controller",
}


def load_command(name: str) -> ModuleType:
    """The module of a command. A missing optional dependency names the extra to install."""
    try:
        return importlib.import_module(f"forewarn.daemon.commands.{name.replace('-', '_')}")
    except ModuleNotFoundError as error:
        if error.name and error.name.startswith("forewarn"):
            raise
        extra = EXTRA_OF_COMMAND.get(name, "service")
        raise ConfigError(
            f"forewarn {name} needs the package {error.name!r}: pip install 'forewarn[{extra}]'"
        ) from error


def _top_parser() -> argparse.ArgumentParser:
    listing = "\n".join(f"  {name:<17} {text}" for name, text in COMMANDS.items())
    parser = argparse.ArgumentParser(
        prog="forewarn",
        usage="forewarn COMMAND [OPTIONS]",
        description="GPU health monitoring and failure prediction for training clusters.",
        epilog=f"commands:\n{listing}\n\n`forewarn COMMAND --help` tells more of each.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"forewarn {__version__}")
    parser.add_argument("command", choices=COMMANDS, metavar="COMMAND", help="one of the commands below")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit code: 0 done, 1 failed, 2 usage."""
    words = list(sys.argv[1:] if argv is None else argv)
    top = _top_parser()
    if not words:
        top.print_help()
        return EXIT_USAGE
    name = top.parse_args(words[:1]).command
    try:
        module = load_command(name)
        # Taken out beforehand, so that it may stand anywhere: `forewarn token create --config FILE` too.
        common = argparse.ArgumentParser(prog=f"forewarn {name}", add_help=False, allow_abbrev=False)
        common.add_argument("--config", metavar="FILE", type=Path, help="settings (TOML)")
        settings, rest = common.parse_known_args(words[1:])
        parser = argparse.ArgumentParser(
            prog=f"forewarn {name}", description=module.__doc__, parents=[common]
        )
        module.configure(parser)
        arguments = parser.parse_args(rest, settings)
        path = arguments.config
        if path is None and os.environ.get("FOREWARN_CONFIG"):
            path = Path(os.environ["FOREWARN_CONFIG"])
        environment = {k: v for k, v in os.environ.items() if k != "FOREWARN_CONFIG"}
        return int(module.run(arguments, configuration.load(path, environment)))
    except ConfigError as error:
        print(f"forewarn: {error}", file=sys.stderr)
        return EXIT_USAGE
    except ForewarnError as error:
        print(f"forewarn: {error}", file=sys.stderr)
        return EXIT_FAILED
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader went away (`forewarn ... | head`): no fault of ours, and nothing left to say.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_DONE


if __name__ == "__main__":
    sys.exit(main())
