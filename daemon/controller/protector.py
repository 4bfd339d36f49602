"""The training loop's side: one call a step, and a save when one is wanted.

A watcher thread looks at the flag file; the loop itself only reads an attribute, so an idle step costs next to
nothing. Signals and threads only set that attribute: the save runs in the loop, between two steps.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType, TracebackType

import structlog

from forewarn.collectors.clock import Clock, SystemClock
from forewarn.collectors.errors import StorageError
from forewarn.collectors.training import ProgressSender, Step
from forewarn.daemon.controller.mailbox import Mailbox, Outcome

WATCH_INTERVAL_S = 0.2
"""How often the watcher looks at the flag file."""

_log = structlog.get_logger("forewarn.controller")

Save = Callable[[], Path | str]
"""Saves the loop's state as of this step; returns where. Raising means that the save failed."""


class Saved:
    """What `Protector.step` returns after a save it made."""

    __slots__ = ("checkpoint", "duration_s", "protections", "step")

    def __init__(self, step: int, checkpoint: str, duration_s: float, protections: list[str]) -> None:
        self.step = step
        self.checkpoint = checkpoint
        self.duration_s = duration_s
        self.protections = protections


class Protector:
    """Protects any loop:

        with Protector(state="/var/lib/forewarn/controller") as protector:
            for step in range(start, steps):
                train(step)
                protector.step(step, save=lambda: save_checkpoint(step))

    A save that fails is reported and training goes on; the error is not raised. `watch=False` starts no thread:
    the caller then calls `look` itself. With `progress` every step is also told to this node's agent, which can
    then see a straggler or a hang; nothing waits for the agent, and nothing fails without one.
    """

    def __init__(
        self,
        state: Path | str | Mailbox,
        *,
        clock: Clock | None = None,
        watch: bool = True,
        watch_interval_s: float = WATCH_INTERVAL_S,
        progress: ProgressSender | None = None,
        job: str = "",
        rank: int = 0,
    ) -> None:
        """Raises StorageError when the state folder cannot be used."""
        self.mailbox = state if isinstance(state, Mailbox) else Mailbox(state)
        self._owns_mailbox = not isinstance(state, Mailbox)
        self._clock = clock or SystemClock()
        self._flag = os.fspath(self.mailbox.flag)
        self._wanted = False
        self._by_hand = False
        self._progress, self._job, self._rank = progress, job, rank
        self._last_step: float | None = None
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self.look()
        if watch:
            self._thread = threading.Thread(
                target=self._watch, args=(watch_interval_s,), name="forewarn-protector", daemon=True
            )
            self._thread.start()

    def step(self, step: int, save: Save) -> Saved | None:
        """Call once at each step boundary. Saves when a save is wanted; None when it was not, or failed."""
        if self._progress is None:
            return self._save(step, save) if self._wanted else None
        now = self._clock.monotonic()
        seconds = None if self._last_step is None else now - self._last_step
        self._progress.send(Step(step=step, job=self._job, rank=self._rank, seconds=seconds))
        saved = self._save(step, save) if self._wanted else None
        # The next step begins when this call ends: a save is no part of it.
        self._last_step = self._clock.monotonic() if saved else now
        return saved

    def note_checkpoint(self, step: int, checkpoint: Path | str) -> None:
        """Tell of a save the loop made on its own account: the service then knows how much work is at stake."""
        try:
            self.mailbox.note_checkpoint(self._clock.now(), step, os.fspath(checkpoint))
        except StorageError as error:
            _log.error("state_unusable", error=str(error))

    def request(self) -> None:
        """Ask for a save at the next step boundary from inside the process; safe in a signal handler."""
        self._by_hand = True
        self._wanted = True

    def on_signal(self, number: int = signal.SIGUSR1) -> None:
        """Let a signal ask for a save (main thread only)."""

        def handle(_number: int, _frame: FrameType | None) -> None:
            self.request()

        signal.signal(number, handle)

    def look(self) -> bool:
        """Look at the flag file once; true when a save is wanted."""
        if os.path.exists(self._flag):  # noqa: PTH110 - runs often; a Path costs more than the call itself
            self._wanted = True
        return self._wanted

    def close(self) -> None:
        """Stop watching. Requests that are open stay open for the next start."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._progress is not None:
            self._progress.send(Step(step=0, job=self._job, rank=self._rank, done=True))
            self._progress.close()
            self._progress = None
        if self._owns_mailbox:
            self.mailbox.close()

    def __enter__(self) -> Protector:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _watch(self, interval_s: float) -> None:
        while not self._stop.wait(interval_s):
            self.look()

    def _save(self, step: int, save: Save) -> Saved | None:
        """Save once for all that is asked by now; what arrives meanwhile is served by the next step."""
        by_hand, self._by_hand, self._wanted = self._by_hand, False, False
        try:
            asked = self._due()
            if not asked and not by_hand:
                return None
            self.mailbox.begin(asked)
            if self._progress is not None:
                self._progress.send(Step(step=step, job=self._job, rank=self._rank, mark="checkpoint"))
            began = self._clock.monotonic()
            try:
                checkpoint = os.fspath(save())
            except Exception as error:  # whatever the loop's own code raises: training must go on
                _log.error("save_failed", step=step, protections=asked, error=str(error))
                reason = f"{type(error).__name__}: {error}"
                self.mailbox.finish(asked, Outcome(state="failed", step=step, reason=reason))
                return None
            duration_s = self._clock.monotonic() - began
            outcome = Outcome(
                state="completed", checkpoint=checkpoint, step=step, duration_seconds=round(duration_s, 6)
            )
            self.mailbox.finish(asked, outcome)
            self.mailbox.note_checkpoint(self._clock.now(), step, checkpoint)
        except StorageError as error:
            # The request stays open and the flag stays: the next look tries again.
            _log.error("state_unusable", error=str(error))
            return None
        _log.info("saved", step=step, checkpoint=checkpoint, seconds=round(duration_s, 3), protections=asked)
        return Saved(step, checkpoint, duration_s, asked)

    def _due(self) -> list[str]:
        """Open protections; those whose deadline has passed are closed as failed, since nobody waits any more."""
        now = self._clock.now()
        due = []
        for request in self.mailbox.open_requests():
            if request.deadline is not None and request.deadline < now:
                reason = f"the deadline passed {now - request.deadline:.0f} s before the loop came to a step boundary"
                self.mailbox.finish([request.protection], Outcome(state="failed", reason=reason))
            else:
                due.append(request.protection)
        return due
