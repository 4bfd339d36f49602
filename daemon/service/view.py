"""The risk of the whole fleet as of one cycle: made once by the scoring thread, then only read. Pure.

Sorted, filtered and paged here, so that a query over 80,000 devices touches arrays and makes only the rows it shows.
"""

from __future__ import annotations

import base64
import binascii
import bisect
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from forewarn.collectors.base import Device
from forewarn.collectors.errors import InputError
from forewarn.daemon.service.progress import JobState
from forewarn.models.fleet import RiskTable

LEVELS = ("healthy", "watch", "warning", "critical")
LEVEL_FLOORS = (0.0, 0.05, 0.2, 0.5)
"""A device has the highest level whose floor its risk reaches at its decisive horizon."""
DECISIVE = 1
"""The horizon that levels go by, as an index: the middle one (1 h for GPUs, 7 d for disks)."""


def level_of(risk: float) -> str:
    """The level of a probability."""
    return LEVELS[int(np.searchsorted(LEVEL_FLOORS, risk, side="right")) - 1]


@dataclass(frozen=True)
class KindRisk:
    """Devices of one kind: `risk` (devices x horizons)."""

    kind: str
    horizons_s: tuple[int, ...]
    devices: list[str]
    risk: NDArray[np.float32]
    first_row: int


@dataclass(frozen=True)
class NodeRow:
    """One node in a view. `devices` counts its parts, not the node itself; its risk counts both."""

    node: str
    devices: int
    max_risk: float
    level: str
    simulated: bool


@dataclass(frozen=True)
class View:
    """One cycle. Rows are all devices, in the order of `devices`; arrays are by row."""

    number: int
    time: float
    kinds: tuple[KindRisk, ...]
    devices: list[str]
    described: Mapping[str, Device]
    worst: NDArray[np.float32]
    """The highest risk over the horizons."""
    decisive: NDArray[np.float32]
    """The risk that the level goes by."""
    order: NDArray[np.int64]
    """Rows by falling `worst`, then by device."""
    rank: NDArray[np.int64]
    """Place of each row when sorted by name."""
    row_of: Mapping[str, int]
    rows_of_node: Mapping[str, NDArray[np.int64]]
    reasons: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Texts for the devices that have been explained: those that stand out."""
    jobs: Mapping[str, JobState] = field(default_factory=dict)
    """Progress of the training jobs that report, by name."""

    def kind_of_row(self, row: int) -> KindRisk:
        return next(k for k in reversed(self.kinds) if row >= k.first_row)

    def risks(self, device: str) -> dict[int, float]:
        """Horizon in seconds to probability; empty for an unknown device."""
        row = self.row_of.get(device)
        if row is None:
            return {}
        kind = self.kind_of_row(row)
        return {h: float(p) for h, p in zip(kind.horizons_s, kind.risk[row - kind.first_row], strict=True)}

    def node(self, name: str) -> NodeRow | None:
        """One node; None when none of its devices has been scored. Made when asked for: most are not, each cycle."""
        rows = self.rows_of_node.get(name)
        if rows is None:
            return None
        devices = [self.devices[r] for r in rows.tolist()]
        return NodeRow(
            node=name,
            devices=sum(1 for d in devices if d != name),
            max_risk=float(self.worst[rows].max()),
            level=level_of(float(self.decisive[rows].max())),
            simulated=any(self.simulated(d) for d in devices),
        )

    def simulated(self, device: str) -> bool:
        found = self.described.get(device)
        return found is not None and found.simulated

    def row(self, row: int) -> dict[str, Any]:
        """One device as the API shows it."""
        name = self.devices[row]
        kind = self.kind_of_row(row)
        described = self.described.get(name)
        risk = kind.risk[row - kind.first_row]
        reasons = self.reasons.get(name, ())
        return {
            "device": name,
            "node": node_of(name),
            "kind": kind.kind,
            "model": described.model if described else "",
            "serial": described.serial if described else "",
            "simulated": bool(described and described.simulated),
            "risk": {str(h): round(float(p), 6) for h, p in zip(kind.horizons_s, risk, strict=True)},
            "max_risk": round(float(self.worst[row]), 6),
            "level": level_of(float(self.decisive[row])),
            "reason": reasons[0] if reasons else "",
        }


_NO_RISK, _NO_ROWS = np.empty(0, np.float32), np.empty(0, np.int64)
EMPTY = View(0, 0.0, (), [], {}, _NO_RISK, _NO_RISK, _NO_ROWS, _NO_ROWS, {}, {})
"""Before the first cycle."""


@dataclass(frozen=True)
class Layout:
    """What depends on the set of devices alone; kept from one cycle to the next while that does not change."""

    key: tuple[tuple[str, int, int], ...]
    devices: list[str]
    row_of: dict[str, int]
    rows_of_node: dict[str, NDArray[np.int64]]
    rank: NDArray[np.int64]
    """Place of each row when sorted by name."""


def raised(view: View, floors: Mapping[str, tuple[Sequence[float], str]]) -> View:
    """The view with some devices raised to least risks, and why: for what cannot wait for the next cycle."""
    rows = {device: view.row_of[device] for device in floors if device in view.row_of}
    if not rows:
        return view
    kinds = [replace(k, risk=k.risk.copy()) for k in view.kinds]
    worst, decisive = view.worst.copy(), view.decisive.copy()
    reasons = dict(view.reasons)
    for device, row in rows.items():
        least, text = floors[device]
        kind = next(k for k in reversed(kinds) if row >= k.first_row)
        mine = kind.risk[row - kind.first_row]
        count = min(len(mine), len(least))
        mine[:count] = np.maximum(mine[:count], np.asarray(least[:count], np.float32))
        worst[row], decisive[row] = mine.max(), mine[min(DECISIVE, len(mine) - 1)]
        reasons[device] = (text, *(t for t in reasons.get(device, ()) if t != text))
    order = np.lexsort((view.rank, -worst))
    return replace(view, kinds=tuple(kinds), worst=worst, decisive=decisive, order=order, reasons=reasons)


@dataclass(frozen=True)
class Past:
    """What is kept of a cycle for the course of risk: half the precision, and the layout shared with its neighbours."""

    time: float
    row_of: Mapping[str, int]
    kinds: tuple[tuple[int, tuple[int, ...], NDArray[np.float16]], ...]
    """First row, horizons, risk."""

    def risks(self, device: str) -> dict[int, float]:
        """Horizon in seconds to probability; empty for a device that was not there."""
        row = self.row_of.get(device)
        if row is None:
            return {}
        first, horizons, risk = next(k for k in reversed(self.kinds) if row >= k[0])
        return {h: round(float(p), 4) for h, p in zip(horizons, risk[row - first], strict=True)}


def past_of(view: View) -> Past:
    """The part of a view that is kept."""
    return Past(
        view.time,
        view.row_of,
        tuple((k.first_row, k.horizons_s, k.risk.astype(np.float16)) for k in view.kinds),
    )


def node_of(device: str) -> str:
    """The node of a device id."""
    return device.partition("/")[0]


def make_view(
    number: int,
    time: float,
    tables: Mapping[str, RiskTable],
    described: Mapping[str, Device],
    layout: Layout | None = None,
) -> tuple[View, Layout]:
    """Put the tables of one `Fleet.score` together."""
    kinds: list[KindRisk] = []
    row = 0
    for name, table in sorted(tables.items()):
        if table.devices:
            kinds.append(KindRisk(name, tuple(table.horizons_s), table.devices, table.risk, row))
            row += len(table.devices)
    key = tuple((k.kind, len(k.devices), hash(tuple(k.devices))) for k in kinds)
    if layout is None or layout.key != key:
        layout = _layout(key, kinds)
    worst = np.concatenate([_NO_RISK, *(k.risk.max(axis=1) for k in kinds)])
    decisive = np.concatenate([_NO_RISK, *(k.risk[:, min(DECISIVE, k.risk.shape[1] - 1)] for k in kinds)])
    order = np.lexsort((layout.rank, -worst))
    view = View(
        number,
        time,
        tuple(kinds),
        layout.devices,
        described,
        worst,
        decisive,
        order,
        layout.rank,
        layout.row_of,
        layout.rows_of_node,
    )
    return view, layout


def _layout(key: tuple[tuple[str, int, int], ...], kinds: Sequence[KindRisk]) -> Layout:
    devices = [d for k in kinds for d in k.devices]
    rows: dict[str, list[int]] = {}
    for i, device in enumerate(devices):
        rows.setdefault(node_of(device), []).append(i)
    rank = np.empty(len(devices), np.int64)
    rank[np.argsort(np.array(devices, dtype=np.str_), kind="stable")] = np.arange(len(devices))
    return Layout(
        key,
        devices,
        {d: i for i, d in enumerate(devices)},
        {n: np.array(r, np.int64) for n, r in rows.items()},
        rank,
    )


@dataclass(frozen=True)
class Query:
    """What `GET /v1/risk` asks for. `devices`: only these (a job's). `horizon_s`: judge and sort by this horizon."""

    node: str = ""
    device: str = ""
    kind: str = ""
    devices: frozenset[str] | None = None
    min_risk: float = 0.0
    horizon_s: int | None = None
    limit: int = 100
    after: tuple[float, str] | None = None


def select(view: View, query: Query) -> tuple[list[int], tuple[float, str] | None]:
    """Rows that match, by falling risk, and where the next page starts (None: this was the last)."""
    risk, order = _by_horizon(view, query.horizon_s)
    keep = _mask(view, query, risk)
    chosen = order[keep[order]] if keep is not None else order
    if query.min_risk > 0 or query.horizon_s is not None:
        chosen = chosen[risk[chosen] >= max(query.min_risk, 0.0)]
    if query.after is not None:
        chosen = chosen[_start(view, risk, chosen, query.after) :]
    page = [int(r) for r in chosen[: query.limit]]
    if len(chosen) <= query.limit:
        return page, None
    last = page[-1]
    return page, (float(risk[last]), view.devices[last])


def _by_horizon(view: View, horizon_s: int | None) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    if horizon_s is None:
        return view.worst, view.order
    risk = np.full(len(view.devices), -1.0, np.float32)
    for kind in view.kinds:
        if horizon_s in kind.horizons_s:
            part = kind.risk[:, kind.horizons_s.index(horizon_s)]
            risk[kind.first_row : kind.first_row + len(part)] = part
    return risk, np.lexsort((view.rank, -risk))


def _mask(view: View, query: Query, risk: NDArray[np.float32]) -> NDArray[np.bool_] | None:
    rows: set[int] | None = None
    if query.node:
        rows = {int(r) for r in view.rows_of_node.get(query.node, ())}
    if query.device:
        row = view.row_of.get(query.device)
        found = set() if row is None else {row}
        rows = found if rows is None else rows & found
    if query.devices is not None:
        found = {view.row_of[d] for d in query.devices if d in view.row_of}
        rows = found if rows is None else rows & found
    if rows is None and not query.kind:
        return None
    mask = np.ones(len(risk), np.bool_)
    if rows is not None:
        mask[:] = False
        mask[list(rows)] = True
    if query.kind:
        for kind in view.kinds:
            if kind.kind != query.kind:
                mask[kind.first_row : kind.first_row + len(kind.devices)] = False
    return mask


def _start(view: View, risk: NDArray[np.float32], chosen: NDArray[np.int64], after: tuple[float, str]) -> int:
    """The first place behind `after` in the order of falling risk, then device."""
    value, name = np.float32(after[0]), after[1]
    falling = -risk[chosen]
    first = int(np.searchsorted(falling, -value, side="left"))
    end = int(np.searchsorted(falling, -value, side="right"))
    return bisect.bisect_right(chosen.tolist(), name, first, end, key=lambda row: view.devices[row])


def write_cursor(*parts: str | int | float) -> str:
    """An opaque text for `next`."""
    return base64.urlsafe_b64encode(json.dumps(parts).encode()).decode().rstrip("=")


def read_cursor(text: str, *kinds: type) -> list[Any]:
    """The parts of a cursor. Raises InputError when it is not one of ours."""
    try:
        parts = json.loads(base64.urlsafe_b64decode(text + "=" * (-len(text) % 4)))
    except (ValueError, binascii.Error, RecursionError):
        parts = None
    if not isinstance(parts, list) or len(parts) != len(kinds):
        raise InputError("cursor: not one that this service gave; start without it")
    for part, kind in zip(parts, kinds, strict=True):
        allowed = (int, float) if kind is float else (kind,)
        if not isinstance(part, allowed) or isinstance(part, bool):
            raise InputError("cursor: not one that this service gave; start without it")
    return parts
