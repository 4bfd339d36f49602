"""How unlike its peers a device behaves, for sites that have no failures to learn from. A score, not a probability:
it says where to look first, never that something will fail.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from forewarn.models.features import FeatureTable, monotone_constraints

CLIP_Z = 20.0
"""One feature alone counts at most this many deviations."""
LEAST_SPREAD = 0.25
"""Least robust deviation of a feature: counters at 0 everywhere have none."""
LEAST_PEERS = 8
STRONGEST = 5
"""The score is the mean of this many largest deviations of a device."""


@dataclass(frozen=True)
class Novelty:
    """`score` (devices): 0 alike, above 3 unlike its peers. `strongest` names the feature behind it."""

    devices: list[str]
    score: NDArray[np.float32]
    strongest: list[str]


def novelty(table: FeatureTable) -> Novelty:
    """Robust distance to the fleet in the direction of trouble, over the features that have such a direction.

    A feature that fewer than LEAST_PEERS devices know says nothing. Past failures are left out: they are history,
    not behaviour.
    """
    directions = np.array(monotone_constraints(table.kind), np.float32)
    used = np.array(
        [d != 0 and not n.startswith("history.") for n, d in zip(table.names, directions, strict=True)]
    )
    names = [n for n, u in zip(table.names, used, strict=True) if u]
    values = table.values[:, used] * directions[used]
    known = (~np.isnan(values)).sum(axis=0) >= LEAST_PEERS
    if not len(values) or not known.any():
        return Novelty(table.devices, np.zeros(len(table.devices), np.float32), [""] * len(table.devices))
    values, names = values[:, known], [n for n, k in zip(names, known, strict=True) if k]
    middle = np.nanmedian(values, axis=0)
    spread = np.maximum(1.4826 * np.nanmedian(np.abs(values - middle), axis=0), LEAST_SPREAD)
    z = np.clip(np.nan_to_num((values - middle) / spread), 0, CLIP_Z)
    most = min(STRONGEST, z.shape[1])
    top = np.partition(z, z.shape[1] - most, axis=1)[:, -most:]
    score = top.mean(axis=1).astype(np.float32)
    return Novelty(table.devices, score, [names[int(i)] for i in z.argmax(axis=1)])
