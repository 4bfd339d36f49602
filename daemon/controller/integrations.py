"""Progress as callbacks of training frameworks: PyTorch Lightning and the Hugging Face Trainer.

Neither framework, nor torch, is needed to import this: the callback's base class is looked up when one is made.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from typing import Any

from forewarn.collectors.errors import ConfigError
from forewarn.daemon.controller.progress import Progress

LIGHTNING = ("lightning.pytorch.callbacks", "pytorch_lightning.callbacks")
TRANSFORMERS = ("transformers",)


class GpuTimer:
    """Time of a part of a step on the GPU, by CUDA events: asked for later, so that nothing waits for the GPU.

    Without CUDA nothing is measured: a launch returns long before its work is done, so the CPU's clock would lie.
    """

    def __init__(self, torch: Any) -> None:
        """`torch`: the module, or None."""
        self._cuda = torch.cuda if torch is not None and torch.cuda.is_available() else None
        self._begun: Any = None
        self._waiting: list[tuple[Any, Any]] = []

    def begin(self) -> None:
        """The part begins here."""
        if self._cuda is not None:
            self._begun = self._cuda.Event(enable_timing=True)
            self._begun.record()

    def end(self) -> None:
        """The part ends here."""
        if self._cuda is not None and self._begun is not None:
            ended = self._cuda.Event(enable_timing=True)
            ended.record()
            self._waiting.append((self._begun, ended))
            self._begun = None

    def take(self) -> float | None:
        """The newest part that the GPU has finished since the last call, in seconds; None when there is none."""
        found = None
        while self._waiting and self._waiting[0][1].query():
            begun, ended = self._waiting.pop(0)
            found = float(begun.elapsed_time(ended)) / 1000.0
        return found


def torch_gpu() -> str:
    """The UUID of the GPU that torch uses in this process; empty without torch, CUDA or a torch that tells it."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available():
        return ""
    uuid = getattr(torch.cuda.get_device_properties(torch.cuda.current_device()), "uuid", None)
    return f"GPU-{str(uuid).removeprefix('GPU-')}" if uuid else ""


def lightning_callback(job: str = "", **fields: Any) -> Any:
    """A callback for `lightning.Trainer(callbacks=[...])`, for `lightning` or `pytorch_lightning`.

    Tells each optimizer step, the loss, validation and saving, and, with CUDA, each rank's own time in the forward
    pass, which is over before gradients are shared: that tells a slow GPU from those that wait for it. `fields` go
    to `Progress`. Raises ConfigError when Lightning is not installed.
    """
    return _made(_Lightning, "Callback", LIGHTNING, "lightning", job, fields)


def trainer_callback(job: str = "", **fields: Any) -> Any:
    """A callback for `transformers.Trainer(callbacks=[...])`.

    Tells each optimizer step, the logged loss, evaluation and saving. The Trainer has no hook between a rank's own
    work and the sharing of gradients, so it tells no stragglers apart. `fields` go to `Progress`. Raises ConfigError
    when transformers is not installed.
    """
    return _made(_HuggingFace, "TrainerCallback", TRANSFORMERS, "transformers", job, fields)


def _made(
    hooks: type, base: str, modules: tuple[str, ...], package: str, job: str, fields: dict[str, Any]
) -> Any:
    for name in modules:
        try:
            found = getattr(importlib.import_module(name), base)
        except ModuleNotFoundError as error:
            if error.name is not None and not name.startswith(error.name):
                raise  # installed, and lacks something of its own
            continue
        return type("ProgressCallback", (hooks, found), {})(job, fields)
    raise ConfigError(
        f"{package} is not installed: pip install {package}, or call Progress.step in the loop yourself"
    )


class _Hooks:
    """What both have: a Progress made when training starts, since ranks are not known before."""

    def __init__(self, job: str, fields: dict[str, Any]) -> None:
        super().__init__()
        self._make: Callable[..., Progress] = lambda **more: Progress(job, **{**more, **fields})
        self._progress: Progress | None = None

    def _start(self, rank: int, world_size: int) -> Progress:
        self._stop()
        gpu = torch_gpu()
        more = {"gpu": gpu} if gpu else {}
        self._progress = self._make(rank=rank, world_size=world_size, **more)
        return self._progress

    def _stop(self) -> None:
        if self._progress is not None:
            self._progress.close()
            self._progress = None


class _Lightning(_Hooks):
    """Hooks of a Lightning callback. `global_step` counts optimizer steps: batches that only gather gradients are
    part of the step that they lead to."""

    def __init__(self, job: str, fields: dict[str, Any]) -> None:
        super().__init__(job, fields)
        self._timer = GpuTimer(None)
        self._step = -1
        self._compute_s: float | None = None

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._start(trainer.global_rank, trainer.world_size)
        self._timer = GpuTimer(sys.modules.get("torch"))
        self._step = trainer.global_step

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self._end()
        self._timer.begin()

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Any) -> None:
        self._timer.end()

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        measured = self._timer.take()
        self._compute_s = measured if measured is not None else self._compute_s
        if self._progress is None or trainer.global_step == self._step:
            return
        self._step = trainer.global_step
        self._progress.step(self._step, compute=self._compute_s, loss=_logged(trainer))
        self._compute_s = None

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        self._begin("evaluation")

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        self._end()

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: Any) -> None:
        # Lightning has no hook for the end of a save: it lasts until the next batch.
        self._begin("checkpoint")

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self._stop()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self._stop()

    def _begin(self, mark: str) -> None:
        if self._progress is not None:
            self._progress.begin(mark)

    def _end(self) -> None:
        if self._progress is not None:
            self._progress.end()


def _logged(trainer: Any) -> float | None:
    """The loss as the loop logged it; None when it is in a GPU's memory, where it would have to be waited for."""
    metrics = trainer.callback_metrics
    loss = next((metrics[n] for n in ("train_loss", "loss", "train_loss_step") if n in metrics), None)
    if loss is None or getattr(loss, "is_cuda", False):
        return None
    return float(loss)


class _HuggingFace(_Hooks):
    """Hooks of a `TrainerCallback`."""

    def __init__(self, job: str, fields: dict[str, Any]) -> None:
        super().__init__(job, fields)
        self._loss: float | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._start(args.process_index, args.world_size)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._progress is not None:
            self._progress.end()

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        loss = (logs or {}).get("loss")
        self._loss = float(loss) if isinstance(loss, int | float) else None

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._progress is None:
            return
        self._progress.step(state.global_step, loss=self._loss)
        self._loss = None
        # What the Trainer does next stands in `control`: its own callbacks come before ours.
        if control.should_evaluate:
            self._progress.begin("evaluation")
        elif control.should_save:
            self._progress.begin("checkpoint")

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._stop()
