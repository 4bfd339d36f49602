"""The training job's own progress: what each rank says of its steps, over a Unix socket or in a small file.

A message is one datagram holding one map, in MessagePack or JSON, with the fields of `Step`; only `step` must be
there. From a shell: `echo '{"job": "llama", "rank": 0, "step": 12, "seconds": 1.9}'` sent as one datagram to the
socket, or written to a file of any name ending in `.json` in the folder (write it beside and rename it).
The sender never waits: `ProgressSender.send` drops the message when the agent is away or behind.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import re
import select
import socket
import stat
import statistics
import struct
import threading
from pathlib import Path
from typing import Annotated

import msgspec

from forewarn.collectors.base import CollectionError, Device, Event, Reading, Sample
from forewarn.collectors.errors import UnavailableError
from forewarn.collectors.registry import Setup

SOURCE = "training"
SOCKET_VARIABLE = "FOREWARN_TRAINING_SOCKET"
DEFAULT_SOCKET = "/run/forewarn/training.sock"
DEFAULT_FOLDER = "/run/forewarn/progress"
MAX_MESSAGE_BYTES = 4096
MAX_RANKS = 1024
"""Ranks on one node, of all its jobs."""
MAX_STEPS_KEPT = 4096
"""Steps of one rank between two polls that its median is taken of."""
FORGET_AFTER_S = 6 * 3600.0
"""A rank that has said nothing for so long, not even goodbye, is gone."""
MARKS = ("checkpoint", "evaluation", "warmup")
"""Steps that take their time for a known reason, and are left out of the iteration time."""
SAME_SENDER = 3
"""So many messages of one process make it the rank's own; a shell that sends one message and ends is not."""
_CREDENTIALS = struct.Struct("3i")
"""Process, user, group: what the kernel says of a sender."""

Text = Annotated[str, msgspec.Meta(max_length=128)]
_JOB = re.compile(r"[^A-Za-z0-9_.-]+")


class Step(msgspec.Struct, frozen=True, omit_defaults=True):
    """One step of one rank.

    `seconds` is the whole iteration, `compute` the part of it before the first collective (that is what tells
    ranks apart: the rest they wait for each other). `samples_per_second` is of this rank. `loss` may be NaN
    (in JSON: null, with `loss_bad` true). `mark` is one of MARKS for a step that is long on purpose, or tells, with
    the last step's number, that such a phase begins; the next step without a mark ends it. `gpu` is the local device
    (`gpu3`) or the GPU's UUID. `done` says that the rank ends as it should.
    """

    step: Annotated[int, msgspec.Meta(ge=0)]
    job: Text = ""
    rank: Annotated[int, msgspec.Meta(ge=0, lt=10_000_000)] = 0
    seconds: float | None = None
    compute: float | None = None
    samples_per_second: float | None = None
    loss: float | None = None
    loss_bad: bool = False
    mark: Text = ""
    gpu: Text = ""
    role: Text = ""
    world_size: int = 0
    done: bool = False


_encoder = msgspec.msgpack.Encoder()
_from_msgpack = msgspec.msgpack.Decoder(Step)
_from_json = msgspec.json.Decoder(Step)


def job_label(job: str) -> str:
    """A job's name as it stands in device ids: letters, digits, dot, dash and underscore."""
    return _JOB.sub("_", job)


def encode(step: Step) -> bytes:
    """The message for one step."""
    return _encoder.encode(step)


def decode(message: bytes) -> Step:
    """A step from a message, MessagePack or JSON. Raises msgspec.DecodeError (ValidationError is one)."""
    if len(message) > MAX_MESSAGE_BYTES:
        raise msgspec.DecodeError(f"the message is longer than {MAX_MESSAGE_BYTES} bytes")
    try:
        return _from_json.decode(message) if message[:1] in b"{ \t\r\n" else _from_msgpack.decode(message)
    except (UnicodeDecodeError, RecursionError) as error:
        raise msgspec.DecodeError(str(error)) from error


def socket_address(path: str) -> str | bytes:
    """The address of a socket path; `@name` is one in the abstract namespace (no file, this network namespace)."""
    return b"\0" + path[1:].encode() if path.startswith("@") else path


class ProgressSender:
    """The job's end. Nothing here waits, raises, or needs the agent to be there.

    `path` is the agent's socket (default: the environment's FOREWARN_TRAINING_SOCKET, else DEFAULT_SOCKET).
    """

    def __init__(self, path: str | None = None) -> None:
        self._address = socket_address(path or os.environ.get(SOCKET_VARIABLE) or DEFAULT_SOCKET)
        self._socket = socket.socket(
            socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC
        )
        self.dropped = 0

    def send(self, step: Step) -> bool:
        """Send one step; false when it was dropped (no agent, its queue full, or no such path)."""
        try:
            self._socket.sendto(_encoder.encode(step), socket.MSG_DONTWAIT, self._address)
        except (OSError, ValueError):
            self.dropped += 1
            return False
        return True

    def close(self) -> None:
        self._socket.close()


class _Rank(msgspec.Struct):
    """What is known of one rank between polls."""

    step: int
    heard: float
    last: Step
    seconds: list[float] = []
    compute: list[float] = []
    rates: list[float] = []
    loss: float | None = None
    bad_losses: int = 0
    marked: int = 0
    process: int = 0
    told_by_it: int = 0

    def sent_by(self, process: int) -> None:
        """Note who sent a message; 0: not known."""
        self.told_by_it = self.told_by_it + 1 if process == self.process else 1
        self.process = process

    def take(self, message: Step, now: float) -> None:
        if message.step != self.step:
            self.heard = now
        self.step = message.step
        self.last = message
        if message.loss_bad or (message.loss is not None and not math.isfinite(message.loss)):
            self.bad_losses += 1
        elif message.loss is not None:
            self.loss = message.loss
        if message.mark:
            self.marked += 1
            return
        for value, kept in (
            (message.seconds, self.seconds),
            (message.compute, self.compute),
            (message.samples_per_second, self.rates),
        ):
            if value is not None and math.isfinite(value) and value > 0 and len(kept) < MAX_STEPS_KEPT:
                kept.append(value)

    def clear(self) -> None:
        self.seconds, self.compute, self.rates = [], [], []


class TrainingCollector:
    """What the ranks on this node told since the last poll, one device a rank (`JOB.rank3`, kind `job`).

    Times are medians over the steps since the last poll, marked ones left out. `path` is the socket
    (`@name` for one without a file), `folder` that of progress files; either may be empty for none. A rank whose
    process ended without a word is told once, and forgotten.
    """

    name = SOURCE

    def __init__(
        self,
        setup: Setup,
        *,
        path: str = DEFAULT_SOCKET,
        folder: str = DEFAULT_FOLDER,
        interval_s: float = 5.0,
        deadline_s: float = 2.0,
        socket_mode: int = 0o666,
    ) -> None:
        self.interval_s = interval_s
        self.deadline_s = deadline_s
        self._setup = setup
        self._path = path if path.startswith("@") or not path else str(setup.root / path.lstrip("/"))
        self._folder = setup.root / folder.lstrip("/") if folder else None
        self._mode = socket_mode
        self._socket: socket.socket | None = None
        self._wake: tuple[int, int] | None = None
        self._listener: threading.Thread | None = None
        self._lock = threading.Lock()
        self._ranks: dict[tuple[str, int], _Rank] = {}
        self._bad = 0
        self._first_bad = ""
        self._left_out = 0
        self._files: dict[str, tuple[int, int]] = {}

    def collect(self) -> Reading:
        """What came since the last call. Raises UnavailableError when the socket cannot be made."""
        self._listen()
        reading = Reading(samples=[], events=[], devices=[], errors=[])
        now = self._setup.clock.monotonic()
        with self._lock:
            self._drain()
            self._read_folder(now)
            for (job, number), rank in list(self._ranks.items()):
                if now - rank.heard > FORGET_AFTER_S:
                    del self._ranks[job, number]
                    continue
                local = _local(job, number)
                if rank.told_by_it >= SAME_SENDER and self._is_gone(rank.process):
                    reading.events.append(_died(local, number, rank))
                    del self._ranks[job, number]
                    continue
                reading.samples.extend(_samples(local, number, rank, now))
                reading.devices.append(_device(local, job, number, rank.last))
                rank.clear()
            self._trouble(reading)
        return reading

    def _is_gone(self, process: int) -> bool:
        """Whether a process of this host has ended; never when that cannot be told."""
        proc = self._setup.root / "proc"
        return process > 0 and (proc / "self").exists() and not (proc / str(process)).exists()

    def close(self) -> None:
        """Stop listening and take the socket away."""
        if self._wake is not None:
            os.write(self._wake[1], b"x")
        if self._listener is not None:
            self._listener.join(5)
        for fd in self._wake or ():
            os.close(fd)
        if self._socket is not None:
            self._socket.close()
            if self._path and not self._path.startswith("@"):
                with contextlib.suppress(OSError):
                    Path(self._path).unlink()
        self._wake = self._listener = self._socket = None

    # -- the socket --

    def _listen(self) -> None:
        """Make the socket, and a thread that empties it: the kernel queues as few as ten datagrams."""
        if self._socket is not None or not self._path:
            return
        made = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
        try:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
            self._bind(made)
        except OSError as error:
            made.close()
            raise UnavailableError(
                f"training: the socket {self._path} cannot be made ({error.strerror or error}):"
                " create its folder (RuntimeDirectory=forewarn in the agent's unit) or set path"
            ) from error
        except UnavailableError:
            made.close()
            raise
        self._socket = made
        self._wake = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._listener = threading.Thread(
            target=self._run, args=(made, self._wake[0]), name="training", daemon=True
        )
        self._listener.start()

    def _bind(self, made: socket.socket) -> None:
        address = socket_address(self._path)
        if not self._path.startswith("@"):
            path = Path(self._path)
            path.parent.mkdir(parents=True, exist_ok=True)
            if path.exists() and not stat.S_ISSOCK(path.stat().st_mode):
                raise UnavailableError(f"training: {path} exists and is not a socket: remove it, or set path")
            if path.exists():
                self._remove_stale(path)
        try:
            made.bind(address)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise UnavailableError(
                    f"training: another agent listens on {self._path}: stop it, or set path"
                ) from error
            raise
        if not self._path.startswith("@"):
            Path(self._path).chmod(self._mode)

    def _remove_stale(self, path: Path) -> None:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as probe:
            try:
                probe.connect(str(path))
            except OSError:
                path.unlink()  # of an agent that was killed
                return
        raise UnavailableError(f"training: another agent listens on {path}: stop it, or set path")

    def _run(self, listening: socket.socket, wake: int) -> None:
        waiting = select.poll()
        waiting.register(listening, select.POLLIN)
        waiting.register(wake, select.POLLIN)
        while True:
            if any(fd == wake for fd, _ in waiting.poll()):
                return
            with self._lock:
                self._drain()

    def _drain(self) -> None:
        """Take what waits in the socket. The lock is held."""
        if self._socket is None:
            return
        now = self._setup.clock.monotonic()
        for _ in range(MAX_STEPS_KEPT):
            try:
                message, told, _, _ = self._socket.recvmsg(
                    MAX_MESSAGE_BYTES + 1, socket.CMSG_SPACE(_CREDENTIALS.size)
                )
            except (BlockingIOError, InterruptedError):
                return
            self._take(message, "a message", now, _sender_of(told))

    def _take(self, message: bytes, what: str, now: float, process: int = 0) -> None:
        try:
            step = decode(message)
        except msgspec.DecodeError as error:
            self._refuse(f"{what}: {error}")
            return
        key = (job_label(step.job), step.rank)
        rank = self._ranks.get(key)
        if step.done:
            self._ranks.pop(key, None)
            return
        if rank is None:
            if len(self._ranks) >= MAX_RANKS:
                self._left_out += 1
                return
            rank = self._ranks[key] = _Rank(step=-1, heard=now, last=step)
        rank.sent_by(process)
        rank.take(step, now)

    # -- progress files --

    def _read_folder(self, now: float) -> None:
        if self._folder is None:
            return
        try:
            names = sorted(e.name for e in os.scandir(self._folder) if e.name.endswith(".json"))[:MAX_RANKS]
        except OSError:
            return  # nobody uses it
        for name in names:
            path = self._folder / name
            try:
                status = path.stat()
            except OSError:
                continue
            shape = (status.st_mtime_ns, status.st_size)
            if self._files.get(name) != shape and stat.S_ISREG(status.st_mode):
                self._files[name] = shape
                try:
                    self._take(_read(path), str(path), now)
                except OSError as error:
                    self._refuse(f"{path}: {error.strerror}")
        self._files = {n: s for n, s in self._files.items() if n in names}

    def _refuse(self, why: str) -> None:
        self._bad += 1
        self._first_bad = self._first_bad or why

    def _trouble(self, reading: Reading) -> None:
        if self._bad:
            reading.errors.append(
                CollectionError(
                    SOURCE, f"{self._bad} messages could not be read, the first: {self._first_bad}"
                )
            )
        if self._left_out:
            reading.errors.append(
                CollectionError(
                    SOURCE, f"{self._left_out} messages of more than {MAX_RANKS} ranks were left out"
                )
            )
        self._bad, self._first_bad, self._left_out = 0, "", 0


def _read(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(MAX_MESSAGE_BYTES + 1)


def _sender_of(told: list[tuple[int, int, bytes]]) -> int:
    """The process that sent a message, by the kernel's word; 0 when it does not say."""
    for level, kind, data in told:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_CREDENTIALS) and len(data) >= _CREDENTIALS.size:
            return int(_CREDENTIALS.unpack_from(data)[0])
    return 0


def _died(local: str, number: int, rank: _Rank) -> Event:
    return Event(
        device=local,
        kind="job_ended",
        code="unannounced",
        severity="info",
        message=f"rank {number} ended after step {rank.step} without saying so (process {rank.process})",
    )


def _local(job: str, rank: int) -> str:
    return f"{job}.rank{rank}" if job else f"rank{rank}"


def _samples(local: str, number: int, rank: _Rank, now: float) -> list[Sample]:
    values: dict[str, float | None] = {
        "training_step_total": float(rank.step),
        "training_rank": float(number),
        "training_idle_seconds": max(0.0, now - rank.heard),
        "training_iteration_seconds": _median(rank.seconds),
        "training_compute_seconds": _median(rank.compute),
        "training_samples_per_second": _median(rank.rates),
        "training_loss": rank.loss,
        "training_bad_losses_total": float(rank.bad_losses),
        "training_marked_steps_total": float(rank.marked),
        "training_marked": float(bool(rank.last.mark)),
    }
    return [Sample(local, k, v) for k, v in values.items() if v is not None]


def _median(values: list[float]) -> float | None:
    return statistics.median(values) if values else None


def _device(local: str, job: str, number: int, last: Step) -> Device:
    labels = {
        "job": job,
        "rank": str(number),
        "role": last.role,
        "gpu": last.gpu,
        "world_size": str(last.world_size) if last.world_size else "",
    }
    return Device(device=local, kind="job", labels={k: v for k, v in labels.items() if v})
