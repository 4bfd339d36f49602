"""The agent's end of the NVML child process: start it, send, receive with a deadline, leave it when it hangs.

Nothing here waits without a bound: a process stuck in the driver may not even die of SIGKILL.
"""

from __future__ import annotations

import os
import select
import subprocess
import sys

import msgspec

from forewarn.collectors.clock import Clock, SystemClock
from forewarn.collectors.nvml_protocol import LENGTH, MAX_FRAME_BYTES, Reply, Request, frame

CLOSE_WAIT_S = 0.5
MODULE = "forewarn.collectors.nvml_worker"


class ChildGoneError(Exception):
    """The child process ended or spoke nonsense."""


class Child:
    """One child process. Waiting is measured on the machine's clock, whatever clock the collector was given."""

    def __init__(self, clock: Clock | None = None) -> None:
        self._clock = clock or SystemClock()
        self._buffer = bytearray()
        self._decoder = msgspec.msgpack.Decoder(Reply)
        # One malloc arena: two threads do not need more, and the child stays small.
        environment = {**os.environ, "MALLOC_ARENA_MAX": "1"}
        self._bell, bell = os.pipe()
        try:
            self._process = subprocess.Popen(
                # -P: nothing is imported from the working directory.
                [sys.executable, "-P", "-m", MODULE, str(bell)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env=environment,
                pass_fds=(bell,),
                start_new_session=True,  # an interrupt at the terminal is for the agent, which then closes the pipe
            )
        except OSError:
            os.close(self._bell)
            raise
        finally:
            os.close(bell)
        assert self._process.stdin is not None and self._process.stdout is not None
        self._input = self._process.stdin
        self._output = self._process.stdout
        os.set_blocking(self._output.fileno(), False)
        os.set_blocking(self._input.fileno(), False)
        os.set_blocking(self._bell, False)
        self._poller = select.poll()
        self._poller.register(self._bell, select.POLLIN)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def status(self) -> int | None:
        """Its exit status, None while it runs; asking also buries it."""
        return self._process.poll()

    def send(self, message: Request) -> None:
        """Send a request. Raises ChildGoneError when nobody takes it."""
        data = frame(message)
        try:
            if os.write(self._input.fileno(), data) != len(data):
                raise ChildGoneError("the NVML process does not take requests")
        except BrokenPipeError as error:
            raise ChildGoneError(self._ended()) from error
        except OSError as error:  # a pipe that is full because nobody reads
            raise ChildGoneError(f"the NVML process does not take requests: {error}") from error

    def receive(self, wait_s: float) -> list[Reply]:
        """What has come, waiting up to `wait_s` for the first of it; empty when nothing came in time.

        Raises ChildGoneError when the child ended and all it said was given.
        """
        until = self._clock.monotonic() + wait_s
        while True:
            ended = self._fill()
            replies = self._take()
            if replies:
                return replies
            if ended:
                raise ChildGoneError(self._ended())
            left = until - self._clock.monotonic()
            if left <= 0:
                return []
            if self._poller.poll(left * 1000):
                self._drain_bell()

    def close(self) -> bool:
        """Ask it to end, then make it. True when it is gone; False when it hangs and must be left behind."""
        self._close_pipes()
        if self._wait(CLOSE_WAIT_S) is not None:
            return True
        return self.kill()

    def kill(self) -> bool:
        """End it now. True when it is gone."""
        self._close_pipes()
        self._process.kill()
        return self._wait(CLOSE_WAIT_S) is not None

    def _ended(self) -> str:
        return f"the NVML process ended with status {self._wait(CLOSE_WAIT_S)}"

    def _close_pipes(self) -> None:
        for pipe in (self._input, self._output):
            try:
                pipe.close()
            except OSError:
                continue
        if self._bell >= 0:
            os.close(self._bell)
            self._bell = -1

    def _drain_bell(self) -> None:
        try:
            os.read(self._bell, 1 << 12)
        except BlockingIOError:
            return

    def _wait(self, seconds: float) -> int | None:
        try:
            return self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None

    def _fill(self) -> bool:
        """Read all there is; True at the end of the stream."""
        while True:
            try:
                piece = os.read(self._output.fileno(), 1 << 16)
            except BlockingIOError:
                return False
            if not piece:
                return True
            self._buffer += piece

    def _take(self) -> list[Reply]:
        replies: list[Reply] = []
        start = 0
        while len(self._buffer) - start >= LENGTH.size:
            size = LENGTH.unpack_from(self._buffer, start)[0]
            if size > MAX_FRAME_BYTES:
                raise ChildGoneError(f"the NVML process sent a frame of {size} bytes")
            end = start + LENGTH.size + size
            if end > len(self._buffer):
                break
            try:
                replies.append(self._decoder.decode(bytes(self._buffer[start + LENGTH.size : end])))
            except msgspec.MsgspecError as error:
                raise ChildGoneError(f"the NVML process sent nonsense: {error}") from error
            start = end
        del self._buffer[:start]
        return replies
