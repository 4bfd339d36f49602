"""Comparison with peers: medians over groups (same node, same model) and what is left at equal load."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from forewarn.models.compiled import jit

Singles = NDArray[np.float32]

LEAST_PEERS = 3
"""Fewer known values than this make no median to compare with."""


@dataclass(frozen=True)
class Groups:
    """Rows sorted by group: `order[start[g]:start[g + 1]]` are the rows of group g."""

    order: NDArray[np.int64]
    start: NDArray[np.int64]

    @classmethod
    def of(cls, labels: NDArray[np.int64]) -> Groups:
        """Groups of equal labels (any integers)."""
        order = np.argsort(labels, kind="stable")
        ordered = labels[order]
        edges = np.flatnonzero(np.diff(ordered)) + 1
        start = np.concatenate(([0], edges, [len(labels)])) if len(labels) else np.zeros(1, np.int64)
        return cls(order, start.astype(np.int64))


@jit
def _median(order: Any, start: Any, values: Any, least: Any, out: Any) -> None:
    for g in range(start.shape[0] - 1):
        low, high = start[g], start[g + 1]
        known = np.empty(high - low, np.float32)
        n = 0
        for i in range(low, high):
            v = values[order[i]]
            if not np.isnan(v):
                known[n] = v
                n += 1
        if n < least:
            m = np.float32(np.nan)
        else:
            part = np.sort(known[:n])
            half = n // 2
            m = part[half] if n % 2 else np.float32((part[half - 1] + part[half]) * 0.5)
        for i in range(low, high):
            out[order[i]] = m


def median(groups: Groups, values: Singles, least: int = LEAST_PEERS) -> Singles:
    """For each row the median of its group (itself included), NaN where fewer than `least` are known."""
    out = np.empty(len(values), np.float32)
    _median(groups.order, groups.start, np.ascontiguousarray(values, np.float32), least, out)
    return out


def difference(groups: Groups, values: Singles, least: int = LEAST_PEERS) -> Singles:
    """Value less the median of the group."""
    return (values - median(groups, values, least)).astype(np.float32)


@jit
def _slopes(order: Any, start: Any, x: Any, y: Any, floor: Any, out: Any) -> None:
    for g in range(start.shape[0] - 1):
        sxx, sxy = 0.0, 0.0
        for i in range(start[g], start[g + 1]):
            dx, dy = x[order[i]], y[order[i]]
            if np.isnan(dx) or np.isnan(dy):
                continue
            sxx += dx * dx
            sxy += dx * dy
        slope = np.float32(sxy / (sxx + floor)) if sxx > 0.0 else np.float32(0.0)
        for i in range(start[g], start[g + 1]):
            out[order[i]] = slope


def excess(
    nodes: Groups, models: Groups, value: Singles, load: Singles, floor: float, least: int = LEAST_PEERS
) -> Singles:
    """What `value` exceeds its node's median by, beyond what the difference in `load` explains.

    The slope is pooled over all devices of one model, within nodes, so that a hot aisle shifts nothing; `floor`
    (in squared units of load) keeps it near 0 where loads do not differ.
    """
    return unexplained(models, difference(nodes, value, least), difference(nodes, load, least), floor)


def unexplained(models: Groups, dy: Singles, dx: Singles, floor: float) -> Singles:
    """What of a difference `dy` the difference in load `dx` leaves over; the slope is pooled over each model."""
    slope = np.empty(len(dy), np.float32)
    _slopes(models.order, models.start, np.ascontiguousarray(dx), np.ascontiguousarray(dy), floor, slope)
    dx = np.where(np.isnan(dx), np.float32(0), dx)
    return (dy - np.maximum(slope, 0) * dx).astype(np.float32)


def robust_z(groups: Groups, values: Singles, least: float, peers: int = LEAST_PEERS) -> Singles:
    """Distance from the group's median in robust deviations (1.4826 x MAD), which are at least `least`."""
    distance = difference(groups, values, peers)
    spread = 1.4826 * median(groups, np.abs(distance), peers)
    z: Singles = (distance / np.maximum(spread, least)).astype(np.float32)
    return z
