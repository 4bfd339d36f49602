"""The framework callbacks, on small stand-ins: neither torch nor the frameworks are installed where these tests run.

The stand-ins have the names, arguments and order of hooks that the frameworks document, and nothing else of them.
"""

from __future__ import annotations

import socket
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from forewarn.collectors.clock import ManualClock
from forewarn.collectors.errors import ConfigError
from forewarn.collectors.training import Step, decode
from forewarn.daemon.controller import integrations


class Agent:
    """The agent's end of the socket."""

    def __init__(self) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        self._socket.bind(b"")
        self.path = "@" + self._socket.getsockname()[1:].decode()

    def told(self) -> list[Step]:
        found = []
        while True:
            try:
                found.append(decode(self._socket.recv(4096)))
            except BlockingIOError:
                return found

    def close(self) -> None:
        self._socket.close()


@pytest.fixture
def agent() -> Iterator[Agent]:
    made = Agent()
    yield made
    made.close()


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


class StandInCallback:
    """Stands in for both base classes: any hook that a callback does not define does nothing."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("on_"):
            return lambda *args, **kwargs: None
        raise AttributeError(name)


@pytest.fixture(params=["lightning.pytorch.callbacks", "pytorch_lightning.callbacks"])
def lightning(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = request.param.split(".")
    for end in range(1, len(parts) + 1):
        module = ModuleType(".".join(parts[:end]))
        monkeypatch.setitem(sys.modules, module.__name__, module)
    sys.modules[request.param].Callback = StandInCallback  # type: ignore[attr-defined]  # a stand-in module


@pytest.fixture
def transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("transformers")
    module.TrainerCallback = StandInCallback  # type: ignore[attr-defined]  # a stand-in module
    monkeypatch.setitem(sys.modules, "transformers", module)


# --- torch ---


@dataclass
class CudaEvent:
    """A CUDA event whose time is set by the test; `done` is what `query` says."""

    cuda: FakeCuda
    at_ms: float = 0.0

    def record(self) -> None:
        self.at_ms = self.cuda.now_ms

    def query(self) -> bool:
        return self.at_ms <= self.cuda.finished_ms

    def elapsed_time(self, end: CudaEvent) -> float:
        return end.at_ms - self.at_ms


@dataclass
class FakeCuda:
    available: bool = True
    now_ms: float = 0.0
    finished_ms: float = 0.0
    uuid: str | None = "5151fa7e-0000-4000-8000-000000000000"
    asked: list[str] = field(default_factory=list)

    def is_available(self) -> bool:
        return self.available

    def Event(self, enable_timing: bool) -> CudaEvent:  # torch's name
        assert enable_timing
        return CudaEvent(self)

    def current_device(self) -> int:
        return 0

    def get_device_properties(self, device: int) -> Any:
        return SimpleNamespace(uuid=self.uuid) if self.uuid else SimpleNamespace()


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    made = FakeCuda()
    module = ModuleType("torch")
    module.cuda = made  # type: ignore[attr-defined]  # a stand-in module
    monkeypatch.setitem(sys.modules, "torch", module)
    return made


def test_the_gpu_is_told_by_its_uuid(cuda: FakeCuda) -> None:
    assert integrations.torch_gpu() == "GPU-5151fa7e-0000-4000-8000-000000000000"
    cuda.uuid = None
    assert integrations.torch_gpu() == ""
    cuda.available = False
    assert integrations.torch_gpu() == ""


def test_a_gpu_timer_waits_for_nothing(cuda: FakeCuda) -> None:
    timer = integrations.GpuTimer(SimpleNamespace(cuda=cuda))
    timer.begin()
    cuda.now_ms = 800.0
    timer.end()
    assert timer.take() is None  # the GPU is not there yet
    cuda.finished_ms = 900.0
    assert timer.take() == 0.8
    assert timer.take() is None


@pytest.mark.parametrize("torch", [None, SimpleNamespace(cuda=FakeCuda(available=False))])
def test_without_cuda_nothing_is_measured(torch: Any) -> None:
    timer = integrations.GpuTimer(torch)
    timer.begin()
    timer.end()
    assert timer.take() is None


# --- Lightning ---


@dataclass
class LightningTrainer:
    """The order of hooks of a Lightning fit, two batches an optimizer step."""

    callback: Any
    clock: ManualClock
    cuda: FakeCuda | None = None
    global_rank: int = 3
    world_size: int = 8
    global_step: int = 0
    callback_metrics: dict[str, Any] = field(default_factory=dict)

    def batches(self, count: int) -> None:
        for number in range(count):
            self.callback.on_train_batch_start(self, None, None, number)
            if self.cuda is not None:
                self.cuda.now_ms += 300.0
            self.clock.advance(1.0)
            self.callback.on_before_backward(self, None, None)
            if self.cuda is not None:
                self.cuda.now_ms += 700.0
                self.cuda.finished_ms = self.cuda.now_ms
            if number % 2:
                self.global_step += 1
            self.callback.on_train_batch_end(self, None, None, None, number)


@pytest.mark.usefixtures("lightning")
def test_lightning_tells_steps_marks_and_the_end(agent: Agent, clock: ManualClock) -> None:
    callback = integrations.lightning_callback("llama", path=agent.path, clock=clock, environment={})
    assert isinstance(callback, StandInCallback)
    trainer = LightningTrainer(callback, clock, callback_metrics={"train_loss": 2.5})
    callback.on_fit_start(trainer, None)
    callback.on_train_start(trainer, None)
    trainer.batches(4)
    callback.on_validation_start(trainer, None)
    clock.advance(60.0)
    callback.on_validation_end(trainer, None)
    callback.on_save_checkpoint(trainer, None, {})
    clock.advance(30.0)
    trainer.batches(2)
    callback.on_train_end(trainer, None)
    told = agent.told()
    assert [(m.step, m.seconds, m.mark, m.done) for m in told] == [
        (1, None, "", False),
        (2, 2.0, "", False),
        (2, None, "evaluation", False),
        (2, None, "checkpoint", False),
        (3, 2.0, "", False),
        (3, None, "", True),
    ]
    assert {(m.job, m.rank) for m in told} == {("llama", 3)}
    assert (told[0].loss, told[0].world_size, told[0].compute) == (2.5, 8, None)


@pytest.mark.usefixtures("lightning")
def test_lightning_measures_each_ranks_own_time_on_the_gpu(
    agent: Agent, clock: ManualClock, cuda: FakeCuda
) -> None:
    callback = integrations.lightning_callback("llama", path=agent.path, clock=clock, environment={})
    trainer = LightningTrainer(callback, clock, cuda)
    callback.on_train_start(trainer, None)
    trainer.batches(2)
    callback.on_exception(trainer, None, RuntimeError())
    step, done = agent.told()
    assert step.compute == pytest.approx(0.3)
    assert step.gpu.startswith("GPU-5151")
    assert done.done


@pytest.mark.usefixtures("lightning")
def test_a_loss_on_the_gpu_is_not_waited_for(agent: Agent, clock: ManualClock) -> None:
    callback = integrations.lightning_callback("llama", path=agent.path, clock=clock, environment={})
    trainer = LightningTrainer(callback, clock, callback_metrics={"loss": SimpleNamespace(is_cuda=True)})
    callback.on_train_start(trainer, None)
    trainer.batches(2)
    assert agent.told()[0].loss is None
    callback.on_train_end(trainer, None)


# --- Hugging Face ---


@pytest.mark.usefixtures("transformers")
def test_the_trainer_tells_steps_losses_and_marks(agent: Agent, clock: ManualClock) -> None:
    callback = integrations.trainer_callback("llama", path=agent.path, clock=clock, environment={})
    args = SimpleNamespace(process_index=5, world_size=16)
    state, control = SimpleNamespace(global_step=0), SimpleNamespace(should_evaluate=False, should_save=False)
    callback.on_train_begin(args, state, control, model=None)
    for step in range(1, 5):
        callback.on_step_begin(args, state, control)
        clock.advance(2.0)
        state.global_step = step
        control.should_evaluate, control.should_save = step == 2, step in (2, 3)
        callback.on_step_end(args, state, control)
        callback.on_log(args, state, control, logs={"loss": 3.0 - step, "epoch": 0.1})
        if control.should_evaluate or control.should_save:
            clock.advance(50.0)
            callback.on_evaluate(args, state, control)
            callback.on_save(args, state, control)
    callback.on_train_end(args, state, control)
    told = agent.told()
    assert [(m.step, m.seconds, m.loss, m.mark, m.done) for m in told] == [
        (1, None, None, "", False),
        (2, 2.0, 2.0, "", False),
        (2, None, None, "evaluation", False),
        (3, 2.0, 1.0, "", False),
        (3, None, None, "checkpoint", False),
        (4, 2.0, 0.0, "", False),
        (4, None, None, "", True),
    ]
    assert {(m.rank, m.compute) for m in told} == {(5, None)}


# --- when they are not there ---


@pytest.mark.parametrize(
    ("make", "package"),
    [(integrations.lightning_callback, "lightning"), (integrations.trainer_callback, "transformers")],
)
def test_a_framework_that_is_not_installed_is_named(
    make: Any, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("lightning", "pytorch_lightning", "transformers"):
        monkeypatch.setitem(sys.modules, name, None)  # import fails, installed or not
    with pytest.raises(ConfigError, match=f"{package} is not installed"):
        make()
