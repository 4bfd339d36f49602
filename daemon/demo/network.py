"""A small real training job in numpy: a multi-layer perceptron on generated data, SGD with momentum.

Its state is complete: weights, momentum, random generator, order of the data and position in it. So a run that is
cut and resumed gives the same losses to the last bit as one that never stopped.
"""

from __future__ import annotations

import io
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from forewarn.collectors.errors import InputError, StorageError
from forewarn.daemon.controller import checkpoints

INPUTS, HIDDEN, CLASSES = 32, 64, 8
ROWS = 4096
BATCH_ROWS = 64
LEARNING_RATE, MOMENTUM = 0.05, 0.9
FORMAT_VERSION = 1

Singles = NDArray[np.float32]
SHAPES: dict[str, tuple[int, ...]] = {
    "w1": (INPUTS, HIDDEN),
    "b1": (HIDDEN,),
    "w2": (HIDDEN, HIDDEN),
    "b2": (HIDDEN,),
    "w3": (HIDDEN, CLASSES),
    "b3": (CLASSES,),
}


def make_data(seed: int = 7) -> tuple[Singles, NDArray[np.int64]]:
    """Rows with labels from a fixed random teacher; the same for the same seed."""
    random = np.random.default_rng(seed)
    rows = random.standard_normal((ROWS, INPUTS)).astype(np.float32)
    teacher = random.standard_normal((INPUTS, CLASSES)).astype(np.float32)
    return rows, np.argmax(np.tanh(rows) @ teacher, axis=1)


@dataclass
class Job:
    """The whole state of the training: nothing outside it changes what the next step gives."""

    weights: dict[str, Singles]
    momentum: dict[str, Singles]
    random: np.random.Generator
    order: NDArray[np.int64]
    position: int = 0
    step: int = 0
    data: tuple[Singles, NDArray[np.int64]] = field(default_factory=make_data)


def start(seed: int = 1) -> Job:
    """A job at step 0."""
    random = np.random.default_rng(seed)
    weights = {}
    for name, shape in SHAPES.items():
        scale = (2.0 / shape[0]) ** 0.5 if name.startswith("w") else 0.0
        weights[name] = (random.standard_normal(shape) * scale).astype(np.float32)
    momentum = {name: np.zeros(shape, np.float32) for name, shape in SHAPES.items()}
    return Job(weights, momentum, random, random.permutation(ROWS))


def train_step(job: Job) -> float:
    """One step of SGD; returns the loss on its batch (mean cross entropy, nats)."""
    if job.position + BATCH_ROWS > ROWS:
        job.order, job.position = job.random.permutation(ROWS), 0
    chosen = job.order[job.position : job.position + BATCH_ROWS]
    job.position += BATCH_ROWS
    x, y = job.data[0][chosen], job.data[1][chosen]
    w = job.weights
    h1 = np.maximum(x @ w["w1"] + w["b1"], 0)
    h2 = np.maximum(h1 @ w["w2"] + w["b2"], 0)
    logits = h2 @ w["w3"] + w["b3"]
    logits -= logits.max(axis=1, keepdims=True)
    odds = np.exp(logits)
    chances = odds / odds.sum(axis=1, keepdims=True)
    picked = np.arange(BATCH_ROWS)
    loss = float(-np.log(np.maximum(chances[picked, y], 1e-12)).mean())
    d3 = chances
    d3[picked, y] -= 1
    d3 /= BATCH_ROWS
    d2 = (d3 @ w["w3"].T) * (h2 > 0)
    d1 = (d2 @ w["w2"].T) * (h1 > 0)
    gradients = {
        "w1": x.T @ d1,
        "b1": d1.sum(axis=0),
        "w2": h1.T @ d2,
        "b2": d2.sum(axis=0),
        "w3": h2.T @ d3,
        "b3": d3.sum(axis=0),
    }
    for name, gradient in gradients.items():
        job.momentum[name] = (MOMENTUM * job.momentum[name] + gradient).astype(np.float32)
        w[name] -= np.float32(LEARNING_RATE) * job.momentum[name]
    job.step += 1
    return loss


def save(job: Job, folder: Path) -> Path:
    """Write a checkpoint, whole or not at all. Raises StorageError."""
    arrays: dict[str, NDArray[np.generic]] = {f"weight_{k}": v for k, v in job.weights.items()}
    arrays |= {f"momentum_{k}": v for k, v in job.momentum.items()}
    arrays["order"] = job.order
    facts = {
        "version": FORMAT_VERSION,
        "step": job.step,
        "position": job.position,
        "random": job.random.bit_generator.state,
    }
    arrays["facts"] = np.frombuffer(json.dumps(facts).encode(), np.uint8)

    def write(stream: BinaryIO) -> None:
        np.savez(stream, allow_pickle=False, **arrays)

    return checkpoints.write_whole(checkpoints.path_of(folder, job.step, "npz"), write)


def load(path: Path) -> Job:
    """Read what `save` wrote. Raises StorageError when it cannot be read, InputError when it is not a checkpoint."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise StorageError(f"{path}: the checkpoint cannot be read: {error}") from error
    try:
        with np.load(io.BytesIO(content), allow_pickle=False) as arrays:
            facts = json.loads(arrays["facts"].tobytes())
            if facts["version"] != FORMAT_VERSION:
                raise InputError(f"{path}: version {facts['version']} of the checkpoint is not known here")
            random = np.random.default_rng()
            random.bit_generator.state = facts["random"]
            job = Job(
                weights={name: arrays[f"weight_{name}"] for name in SHAPES},
                momentum={name: arrays[f"momentum_{name}"] for name in SHAPES},
                random=random,
                order=arrays["order"],
                position=facts["position"],
                step=facts["step"],
            )
    except InputError:
        raise
    except Exception as error:  # zip, npy and JSON readers each have errors of their own
        raise InputError(f"{path}: not a complete checkpoint: {error}") from error
    for name, shape in SHAPES.items():
        if job.weights[name].shape != shape or job.momentum[name].shape != shape:
            raise InputError(f"{path}: {name} has another shape than this network's {shape}")
    return job
