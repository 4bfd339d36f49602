"""The demo's training job, a process of its own: trains, saves when asked, resumes from its newest checkpoint.

`python -m forewarn.daemon.demo.training_loop --state DIR --checkpoints DIR` prints one JSON object a line.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from forewarn.collectors.errors import ForewarnError
from forewarn.collectors.training import ProgressSender
from forewarn.daemon.controller import checkpoints, logs
from forewarn.daemon.controller.protector import Protector
from forewarn.daemon.demo import network

KEEP = 3
REPORT_INTERVAL_S = 5.0


def say(event: str, **facts: object) -> None:
    """One line for whoever started us."""
    sys.stdout.write(json.dumps({"event": event, **facts}) + "\n")
    sys.stdout.flush()


def resume(folder: Path) -> network.Job:
    """The newest checkpoint that can be read, or a new job. Unreadable ones are told, not deleted."""
    for path in checkpoints.complete_ones(folder):
        try:
            job = network.load(path)
        except ForewarnError as error:
            say("unreadable", checkpoint=str(path), error=str(error))
            continue
        say("resumed", checkpoint=str(path), step=job.step)
        return job
    return network.start()


def main(words: Sequence[str] | None = None) -> int:
    """Train until stopped (SIGTERM, Ctrl-C) or for `--steps`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--state", type=Path, required=True, help="the controller's state folder")
    parser.add_argument("--checkpoints", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=0, help="end at this step; 0: go on")
    parser.add_argument("--step-seconds", type=float, default=0.05, help="least time of a step")
    parser.add_argument("--job", default="demo-training")
    parser.add_argument(
        "--progress", metavar="SOCKET", help="tell the agent of each step through this socket"
    )
    parser.add_argument("--save-every-seconds", type=float, default=600.0, help="regular checkpoints")
    arguments = parser.parse_args(words)
    logs.set_up("warning")
    stop = threading.Event()

    def end(_number: int, _frame: FrameType | None) -> None:
        stop.set()

    signal.signal(signal.SIGTERM, end)
    signal.signal(signal.SIGINT, end)
    job = resume(arguments.checkpoints)

    def save() -> Path:
        path = network.save(job, arguments.checkpoints)
        checkpoints.prune(arguments.checkpoints, KEEP)
        return path

    progress = ProgressSender(arguments.progress) if arguments.progress else None
    with Protector(arguments.state, progress=progress, job=arguments.job) as protector:
        protector.on_signal()
        regular = reported = time.monotonic()
        protector.note_checkpoint(job.step, save())
        say("started", step=job.step)
        while not stop.is_set() and not (arguments.steps and job.step >= arguments.steps):
            began = time.monotonic()
            loss = network.train_step(job)
            saved = protector.step(job.step, save)
            if saved is not None:
                regular = time.monotonic()
                say(
                    "saved",
                    step=saved.step,
                    checkpoint=saved.checkpoint,
                    seconds=saved.duration_s,
                    protections=saved.protections,
                    loss=loss,
                )
            elif began - regular >= arguments.save_every_seconds:
                regular = began
                protector.note_checkpoint(job.step, save())
            if began - reported >= REPORT_INTERVAL_S:
                reported = began
                say("training", step=job.step, loss=round(loss, 5))
            stop.wait(max(0.0, arguments.step_seconds - (time.monotonic() - began)))
        say("stopped", step=job.step)
    return 0


if __name__ == "__main__":
    sys.exit(main())
