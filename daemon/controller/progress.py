"""The training loop's own progress, told to this node's agent: a call a step, which never waits and never raises.

Standard library and `collectors/training` alone, so that a loop pays next to nothing for the import.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator, Mapping
from types import TracebackType

from forewarn.collectors.clock import Clock, SystemClock
from forewarn.collectors.training import MARKS, ProgressSender, Step

RANK_VARIABLES = ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK")
LOCAL_RANK_VARIABLES = ("LOCAL_RANK", "SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID")
WORLD_VARIABLES = ("WORLD_SIZE", "SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")


class Progress:
    """Tells the agent of each step, from any loop:

        with Progress(job="llama") as progress:
            for step in range(start, steps):
                loss = train(step)
                progress.step(step, loss=loss)
                if step % 1000 == 0:
                    with progress.marked("checkpoint"):
                        save(step)

    The time of a step runs from the end of the one before; what happens in `marked` is no part of it. `computed`,
    called right before the first collective of a step, tells ranks apart that otherwise share their step time; a
    time measured elsewhere (CUDA events, say) is given to `step` instead. `loss` must be a plain number: taking one
    from a GPU tensor waits for the GPU. What is left empty comes from the launcher's environment: job (FOREWARN_JOB,
    or Slurm's job id), rank, world size and GPU. `role` tells ranks apart that compute different things, such as
    pipeline stages. Nothing here raises or waits, with an agent or without; `dropped` counts what no agent took.
    """

    def __init__(
        self,
        job: str = "",
        rank: int | None = None,
        *,
        role: str = "",
        gpu: str = "",
        world_size: int = 0,
        path: str | None = None,
        clock: Clock | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """`path`: the agent's socket, else FOREWARN_TRAINING_SOCKET, else the agent's default."""
        found = os.environ if environment is None else environment
        self.job = job or job_of(found)
        self.rank = max(0, (_number(found, RANK_VARIABLES) or 0) if rank is None else rank)
        self.role, self.gpu = role, gpu or gpu_of(found)
        self.world_size = max(0, world_size or _number(found, WORLD_VARIABLES) or 0)
        self._sender = ProgressSender(path)
        self._monotonic = (clock or SystemClock()).monotonic
        self._ended: float | None = None
        self._paused_s = 0.0
        self._compute_s: float | None = None
        self._began: float | None = None
        self._last = 0

    @property
    def dropped(self) -> int:
        """Messages that were not taken: no agent, its queue full, or no such socket."""
        return self._sender.dropped

    def step(
        self,
        step: int,
        *,
        loss: float | None = None,
        samples: float | None = None,
        seconds: float | None = None,
        compute: float | None = None,
        mark: str = "",
    ) -> None:
        """A step has ended. `samples`: how many this rank worked off in it. `seconds`: its time, when the caller has
        measured it. `mark`: one of `collectors.training.MARKS` for a step that is long on purpose."""
        now = self._monotonic()
        self.end()
        if seconds is None and self._ended is not None:
            seconds = now - self._ended - self._paused_s
        rate = samples / seconds if samples is not None and seconds is not None and seconds > 0 else None
        self._send(step, seconds, self._compute_s if compute is None else compute, rate, loss, mark)
        self._ended, self._paused_s, self._compute_s = now, 0.0, None

    def computed(self) -> None:
        """The step's own work is done: what follows is waiting for other ranks."""
        if self._ended is not None:
            self._compute_s = self._monotonic() - self._ended - self._paused_s

    @contextlib.contextmanager
    def marked(self, mark: str) -> Iterator[None]:
        """Around a checkpoint, an evaluation or a warm-up between two steps: no slow step and no hang."""
        self.begin(mark)
        try:
            yield
        finally:
            self.end()

    def begin(self, mark: str) -> None:
        """The same for callbacks that cannot use `with`: from here to `end`, or to the next step."""
        self._began = self._monotonic()
        self._send(self._last, None, None, None, None, mark or MARKS[0])

    def end(self) -> None:
        """What `begin` began is over."""
        if self._began is not None:
            self._paused_s += self._monotonic() - self._began
            self._began = None

    def close(self) -> None:
        """This rank ends as it should: nobody need look for it."""
        self._sender.send(Step(step=self._last, job=self.job, rank=self.rank, done=True))
        self._sender.close()

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _send(
        self,
        step: int,
        seconds: float | None,
        compute: float | None,
        rate: float | None,
        loss: float | None,
        mark: str,
    ) -> None:
        self._last = step
        self._sender.send(
            Step(
                step=step,
                job=self.job,
                rank=self.rank,
                seconds=seconds,
                compute=compute,
                samples_per_second=rate,
                loss=loss,
                loss_bad=loss is not None and not math.isfinite(loss),
                mark=mark,
                gpu=self.gpu,
                role=self.role,
                world_size=self.world_size,
            )
        )


def job_of(environment: Mapping[str, str]) -> str:
    """The job's name by the environment: FOREWARN_JOB, or `slurm-ID`; empty when neither tells."""
    slurm = environment.get("SLURM_JOB_ID", "")
    return environment.get("FOREWARN_JOB", "") or (f"slurm-{slurm}" if slurm else "")


def gpu_of(environment: Mapping[str, str]) -> str:
    """This process' GPU: a UUID or `gpuN` as CUDA_VISIBLE_DEVICES and the local rank tell; empty when they don't.

    An index counts as the driver does only with CUDA_DEVICE_ORDER=PCI_BUS_ID or with GPUs all alike, and not inside
    containers that see some GPUs only: name the UUID there.
    """
    local = _number(environment, LOCAL_RANK_VARIABLES)
    visible = [v.strip() for v in environment.get("CUDA_VISIBLE_DEVICES", "").split(",") if v.strip()]
    if local is None:
        chosen = visible[0] if len(visible) == 1 else ""
    elif visible:
        # A launcher that shows each process one GPU alone leaves nothing to choose.
        chosen = visible[local] if local < len(visible) else visible[0] if len(visible) == 1 else ""
    else:
        chosen = str(local)
    return f"gpu{chosen}" if chosen.isdigit() else chosen


def _number(environment: Mapping[str, str], names: tuple[str, ...]) -> int | None:
    for name in names:
        text = environment.get(name, "")
        if text.isdigit():
            return int(text)
    return None
