from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from forewarn.collectors.errors import InputError, StorageError
from forewarn.daemon.demo import network


def test_resumed_run_equals_one_that_never_stopped_to_the_bit(tmp_path: Path) -> None:
    steps, cut = 150, 70  # over the end of an epoch (64 steps), so that the data order matters too
    whole = network.start()
    expected = [network.train_step(whole) for _ in range(steps)]
    job = network.start()
    losses = [network.train_step(job) for _ in range(cut)]
    resumed = network.load(network.save(job, tmp_path))
    losses += [network.train_step(resumed) for _ in range(steps - cut)]
    assert losses == expected
    assert (resumed.step, resumed.position) == (whole.step, whole.position)
    for name, weight in whole.weights.items():
        assert weight.tobytes() == resumed.weights[name].tobytes()


def test_training_learns() -> None:
    job = network.start()
    losses = [network.train_step(job) for _ in range(400)]
    assert np.mean(losses[-50:]) < 0.5 * np.mean(losses[:10])


def test_damaged_and_missing_checkpoints_are_named(tmp_path: Path) -> None:
    path = network.save(network.start(), tmp_path)
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])
    with pytest.raises(InputError, match=r"step-00000000\.npz: not a complete checkpoint"):
        network.load(path)
    with pytest.raises(StorageError, match=r"gone\.npz"):
        network.load(tmp_path / "gone.npz")
    np.savez(tmp_path / "other.npz", x=np.zeros(3))
    with pytest.raises(InputError, match=r"other\.npz"):
        network.load(tmp_path / "other.npz")
