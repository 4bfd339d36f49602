"""Run everything on this machine: service, a real agent, a controller with a real training loop, a simulated fleet."""

from __future__ import annotations

import argparse
import json
import signal
import sys
import threading
from pathlib import Path

from rich.console import Console
from rich.text import Text

from forewarn.collectors.clock import SystemClock
from forewarn.daemon.config import Config
from forewarn.daemon.demo.stage import JOB, WATCH_INTERVAL_S, Stage
from forewarn.daemon.demo.story import Line, Story

ONCE_TIMEOUT_S = 120.0
LEVEL_STYLE = {"watch": "yellow", "warning": "dark_orange3", "critical": "bold red"}


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--once", action="store_true", help="end when the checkpoint is saved and verified")
    parser.add_argument("--port", type=int, default=8420, help="port of the service (default 8420)")
    parser.add_argument(
        "--data", metavar="DIR", type=Path, help="keep everything here (default: removed at the end)"
    )


def run(arguments: argparse.Namespace, config: Config) -> int:
    if not 1 <= arguments.port <= 65535:
        sys.stderr.write("forewarn demo: --port must be 1 to 65535\n")
        return 2
    # With --once standard output belongs to the summary.
    console = Console(stderr=arguments.once, highlight=False, soft_wrap=True)
    lock = threading.Lock()

    def tell(line: Line) -> None:
        with lock:
            console.print(rendered(line))

    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # under nohup a hang-up is to be ignored
            signal.signal(number, lambda *_: stop.set())
    clock = SystemClock()
    story = Story(clock, tell, JOB)
    stage = Stage(arguments.port, arguments.data, clock, story)
    story.say("demo", "starting; what is marked simulated is not of real hardware, the rest is")
    try:
        stage.open(stop)
        _follow(stage, stop, arguments.once)
    finally:
        story.say("demo", "ending all parts")
        stage.close()
    if arguments.once:
        print(json.dumps(story.summary(), indent=2), flush=True)
        return 0 if story.done else 1
    return 0


def _follow(stage: Stage, stop: threading.Event, once: bool) -> None:
    story, told = stage.story, False
    while not stop.is_set():
        stage.watch()
        if story.done and not told:
            told = True
            story.say("demo", f"done: the job was protected. The page is at {stage.url}/")
            if not once:
                story.say("demo", "everything goes on; Ctrl-C ends it")
        if not story.done and story.seconds > ONCE_TIMEOUT_S and not told:
            told = True
            missing = ", ".join(story.missing)
            story.say("demo", f"not done after {ONCE_TIMEOUT_S:g} s; missing: {missing}", level="critical")
        if once and told:
            return
        stop.wait(WATCH_INTERVAL_S)


def rendered(line: Line) -> Text:
    """A line with its time, its part and, where due, the mark of what is simulated."""
    text = Text()
    text.append(f"{line.seconds:6.1f} s  ", style="dim")
    text.append(f"{line.who:<10} ", style="bold cyan")
    if line.simulated:
        text.append("[simulated] ", style="magenta")
    text.append(line.text, style=LEVEL_STYLE.get(line.level, ""))
    return text
