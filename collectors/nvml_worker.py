"""The child process that calls NVML: `python -m forewarn.collectors.nvml_worker BELL`, frames on stdin and stdout.

A byte on the pipe BELL says that there is something to read: a frame for each GPU must be out before the next GPU may
hang, and need not wake the agent each time. The child ends by itself when the agent closes the pipe or dies.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
from typing import Any

import msgspec
import pynvml as nvml

from forewarn.collectors.clock import Clock, SystemClock
from forewarn.collectors.nvml_calls import OpenGpu
from forewarn.collectors.nvml_protocol import (
    LENGTH,
    MAX_FRAME_BYTES,
    Done,
    Failed,
    Gpu,
    Hello,
    Notice,
    Part,
    Poll,
    Reply,
    Request,
    Start,
    frame,
)
from forewarn.collectors.nvml_reader import (
    Reader,
    RestartError,
    code_of,
    open_gpu,
    pci_address,
    text,
)

EVENT_WAIT_MS = 1000
"""How long the event thread waits at a time; it also looks then whether the agent still lives."""
WANTED_EVENTS = 0x8 | 0x2 | 0x100 | 0x200 | 0x400 | 0x800 | 0x1000 | 0x2000 | 0x4000 | 0x8000
"""XID, double bit ECC, MIG change, single bit storm, DRAM retirement and its failure, poison, GPU unavailable,
recovery action. Single bit errors are counted by the counters; clock and state changes are no trouble."""
TIMEOUT = 10
GPU_IS_LOST = 15
RING_BYTES = 32 << 10


class Pipe:
    """Frames to the agent; both threads write."""

    def __init__(self, output: int, bell: int) -> None:
        self._output = output
        self._bell = bell
        self._lock = threading.Lock()
        self._unrung = 0

    def send(self, message: Reply) -> None:
        """Write a frame, and ring unless it is a part of more to come."""
        data = frame(message)
        with self._lock:
            if self._unrung + len(data) > RING_BYTES:
                self._ring()  # before the pipe is full, or both sides would wait
            self._unrung += len(data)
            while data:
                data = data[os.write(self._output, data) :]
            if not isinstance(message, Part):
                self._ring()

    def _ring(self) -> None:
        self._unrung = 0
        os.write(self._bell, b"!")


def receive(source: int) -> Request | None:
    """The next request, None when the agent closed the pipe."""
    header = _exactly(source, LENGTH.size)
    if header is None:
        return None
    size = LENGTH.unpack(header)[0]
    body = _exactly(source, size) if size <= MAX_FRAME_BYTES else None
    return None if body is None else msgspec.msgpack.decode(body, type=Request)


def _exactly(source: int, size: int) -> bytes | None:
    data = b""
    while len(data) < size:
        piece = os.read(source, size - len(data))
        if not piece:
            return None
        data += piece
    return data


class Worker:
    """One NVML session, from init to shutdown."""

    def __init__(self, pipe: Pipe, clock: Clock) -> None:
        self._pipe = pipe
        self._clock = clock
        self._reader = Reader(clock)
        self._gpus: dict[str, OpenGpu] = {}
        self._by_handle: dict[int, Gpu] = {}
        self._event_set: Any = None

    def open(self, start: Start) -> bool:
        """Open NVML and say hello; False when it could not be opened."""
        try:
            if start.library:
                # Same soname: the binding, which loads the library by that name, gets this one.
                ctypes.CDLL(start.library)
            nvml.nvmlInit()
            given: set[str] = set()
            found = [open_gpu(index, start.names, given) for index in range(nvml.nvmlDeviceGetCount())]
            driver = text(nvml.nvmlSystemGetDriverVersion())
        except OSError as error:
            self._pipe.send(Failed(code=12, message=str(error)))
            return False
        except RestartError as error:
            self._pipe.send(Failed(code=error.code, message="the session ended while GPUs were being opened"))
            return False
        except (nvml.NVMLError, nvml.NVMLLibraryMismatchError) as error:
            self._pipe.send(Failed(code=code_of(error), message=str(error)))
            return False
        for gpu, facts in found:
            if gpu is not None:
                self._gpus[gpu.device] = gpu
                self._by_handle[_address(gpu.handle)] = facts
        self._listen()
        self._pipe.send(
            Hello(
                driver=driver,
                simulated=hasattr(nvml.nvmlLib, "forewarn_simulated_nvml"),
                gpus=[facts for _, facts in found],
                events=self._event_set is not None,
            )
        )
        return True

    def poll(self, request: Poll) -> None:
        """Read what is asked for, one frame a GPU, so that what was read before a hang is not lost."""
        restart = 0
        for name in request.devices:
            gpu = self._gpus.get(name)
            if gpu is None:
                continue
            try:
                part = self._reader.read(gpu, request.tiers, request.now, request.probe_after_s)
            except RestartError as error:
                restart = error.code
                break
            self._pipe.send(part)
        self._pipe.send(Done(restart=restart))

    def watch(self, parent: int) -> None:
        """Pass driver events on until the agent is gone."""
        while os.getppid() == parent:
            if self._event_set is None:
                self._clock.sleep(EVENT_WAIT_MS / 1000)
                continue
            try:
                data = nvml.nvmlEventSetWait_v2(self._event_set, EVENT_WAIT_MS)
            except (nvml.NVMLError, nvml.NVMLLibraryMismatchError) as error:
                code = code_of(error)
                if code == GPU_IS_LOST:
                    self._listen()  # to those that are left; the lost one can not be registered
                if code != TIMEOUT:
                    self._clock.sleep(EVENT_WAIT_MS / 1000)  # the main thread finds out what it means
                continue
            self._pipe.send(self._notice(data))
        os._exit(0)  # the main thread may hang in the driver

    def close(self) -> None:
        """Give the session back, as each init wants."""
        try:
            nvml.nvmlShutdown()
        except (nvml.NVMLError, nvml.NVMLLibraryMismatchError):
            return

    def _listen(self) -> None:
        """Register for the events of every GPU that allows it."""
        try:
            if self._event_set is not None:
                nvml.nvmlEventSetFree(self._event_set)
            self._event_set = None
            events = nvml.nvmlEventSetCreate()
        except nvml.NVMLError:
            return
        registered = False
        for gpu in self._gpus.values():
            try:
                wanted = nvml.nvmlDeviceGetSupportedEventTypes(gpu.handle) & WANTED_EVENTS
                if wanted:
                    nvml.nvmlDeviceRegisterEvents(gpu.handle, wanted, events)
                    registered = True
            except nvml.NVMLError:
                continue  # no events from this GPU; the kernel log still has its XIDs
        if registered:
            self._event_set = events
        else:
            nvml.nvmlEventSetFree(events)

    def _notice(self, data: Any) -> Notice:
        """An event with all that is known of its device: a look-up that fails must not lose it."""
        facts = self._by_handle.get(_address(data.device))
        device, pci = (facts.device, facts.pci) if facts else ("", None)
        if facts is None:
            try:
                pci = pci_address(text(nvml.nvmlDeviceGetPciInfo_v3(data.device).busId))
            except (nvml.NVMLError, nvml.NVMLLibraryMismatchError):
                pci = None
        none = 0xFFFFFFFF
        return Notice(
            device=device,
            pci=pci,
            event=data.eventType,
            data=data.eventData,
            seen=self._clock.monotonic(),
            gpu_instance=None if data.gpuInstanceId == none else data.gpuInstanceId,
            compute_instance=None if data.computeInstanceId == none else data.computeInstanceId,
        )


def _address(handle: Any) -> int:
    return ctypes.cast(handle, ctypes.c_void_p).value or 0


def main() -> int:
    """Serve the agent until it closes the pipe."""
    parent = os.getppid()
    source, pipe = sys.stdin.fileno(), Pipe(sys.stdout.fileno(), int(sys.argv[1]))
    start = receive(source)
    if not isinstance(start, Start):
        return 0
    worker = Worker(pipe, SystemClock())
    if not worker.open(start):
        return 1
    threading.Thread(target=worker.watch, args=(parent,), daemon=True).start()
    while isinstance(request := receive(source), Poll):
        worker.poll(request)
    worker.close()
    return 0


if __name__ == "__main__":
    try:
        code = main()
    except (BrokenPipeError, KeyboardInterrupt):
        code = 0
    os._exit(code)  # the event thread may sit in the driver; do not wait for it
