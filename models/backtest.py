"""Replays a history through the fleet that serves, and writes down the alerts and risks it would have given.

Alerts are forecasts. When an event says that a device has failed (XID 79, say), there is nothing left to foresee: such
detections are counted apart, unless they are asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from forewarn.collectors.catalog import METRICS
from forewarn.collectors.errors import StorageError
from forewarn.models.alerts import AlertPolicy, AlertState
from forewarn.models.features import HORIZONS_S
from forewarn.models.fleet import Fleet, RiskTable
from forewarn.models.history import History
from forewarn.models.registry import RiskModel
from forewarn.models.replay import replay, spacing_of, step_of
from forewarn.models.rules import FAILED, IMMINENT, LIKELY

DOWN_S = 3600.0
"""After a failure was detected, its device raises no forecast for this long."""
REASONS = 3
FORECASTING = (LIKELY, IMMINENT)
"""Floors of rules that foresee; those below are left to the model, those above tell of what has happened."""

ALERT_SCHEMA = pa.schema(
    [
        ("time", pa.timestamp("us", tz="UTC")),
        ("device", pa.string()),
        ("horizon", pa.int64()),
        ("risk", pa.float64()),
        ("reason", pa.string()),
    ]
)
SCORE_SCHEMA = pa.schema(
    [
        ("time", pa.timestamp("us", tz="UTC")),
        ("device", pa.dictionary(pa.int32(), pa.string())),
        ("horizon", pa.int32()),
        ("risk", pa.float32()),
    ]
)


@dataclass(frozen=True)
class Alert:
    """One alert: `horizon` in seconds, `reason` in words."""

    time: float
    device: str
    horizon: int
    risk: float
    reason: str


@dataclass
class Result:
    """What a replay gave."""

    alerts: list[Alert] = field(default_factory=list)
    detections: list[Alert] = field(default_factory=list)
    moments: int = 0
    device_days: float = 0.0


class _Watcher:
    """Alert state of one kind; numbers devices."""

    def __init__(self, kind: str, model: RiskModel | None) -> None:
        self.horizons = HORIZONS_S[kind]
        parameters: Mapping[str, object] = model.manifest.parameters if model else {}
        cool_down_s = max(86_400.0, self.horizons[0])
        self.state = AlertState(AlertPolicy.of(parameters, self.horizons, cool_down_s), self.horizons)
        self._number: dict[str, int] = {}

    def rows(self, devices: list[str]) -> NDArray[np.int64]:
        number = self._number
        return np.array([number.setdefault(d, len(number)) for d in devices], np.int64)


def backtest(
    history: History,
    models: Mapping[str, RiskModel | None],
    *,
    scores: Path | None = None,
    detections: bool = False,
    step_s: float | None = None,
    watch: Callable[[float], None] | None = None,
) -> Result:
    """Replay `history` with `models` by kind. `scores`: a Parquet file for every risk. `step_s`: seconds between scores
    (default: by kind, see `replay.step_of`). Raises InputError and StorageError."""
    kinds = kinds_of(history)
    step = step_s or min((step_of(history, k) for k in kinds), default=300.0)
    spacing = {k: max(step, spacing_of(history, k)) for k in kinds}
    fleet = Fleet(models)
    watchers = {k: _Watcher(k, models.get(k)) for k in kinds}
    writer = _Scores(scores) if scores is not None else None
    result = Result()
    first, last = history.span
    down: dict[str, float] = {}
    try:
        for moment in replay(history, fleet, step):
            result.moments += 1
            for hit in moment.hits:
                if hit.floors == FAILED:
                    down[hit.device] = hit.time
                    horizon = HORIZONS_S.get(fleet.kind_of(hit.device), (900,))[0]
                    result.detections.append(Alert(hit.time, hit.device, horizon, hit.floors[0], hit.text))
            if kinds == ["disk"] and not moment.fresh:
                continue
            tables = fleet.score(moment.now)
            fresh = set(moment.fresh)
            for kind in kinds:
                table = tables[kind]
                if kind == "disk":
                    # A disk that is not read is not scored anew: its last score would only repeat itself.
                    table = only(table, [d in fresh for d in table.devices])
                result.device_days += len(table.devices) * spacing[kind] / 86_400.0
                result.alerts += _alerts(fleet, watchers[kind], table, down)
                if writer is not None:
                    writer.add(table)
            if watch is not None:
                watch((moment.now - first) / max(1.0, last - first))
    finally:
        if writer is not None:
            writer.close()
    if detections:
        result.alerts = sorted(result.alerts + result.detections, key=lambda a: (a.time, a.device))
    return result


def only(table: RiskTable, keep: list[bool]) -> RiskTable:
    """The rows of a table where `keep` is true."""
    if all(keep):
        return table
    rows = np.flatnonzero(np.array(keep, bool))
    devices = [table.devices[i] for i in rows.tolist()]
    return RiskTable(
        table.time, table.kind, devices, table.horizons_s, table.risk[rows], table.model_risk[rows],
        table.rule_risk[rows],
    )  # fmt: skip


def kinds_of(history: History) -> list[str]:
    """Kinds of device that the telemetry speaks of."""
    found = {METRICS[m].kind for m in history.metrics}
    return [k for k in HORIZONS_S if k in found]


def forecast_risk(fleet: Fleet, table: RiskTable) -> NDArray[np.float32]:
    """The model's risks, raised by the rules that foresee."""
    risk = table.model_risk.copy()
    row_of = {d: i for i, d in enumerate(table.devices)}
    for device in fleet.devices_with_hits(table.kind):
        row = row_of.get(device)
        if row is None:
            continue
        for hit in fleet.active_hits(device, table.time):
            if hit.floors in FORECASTING and not hit.fallback:
                risk[row] = np.maximum(risk[row], np.array(hit.floors, np.float32))
    return risk


def _alerts(fleet: Fleet, watcher: _Watcher, table: RiskTable, down: Mapping[str, float]) -> list[Alert]:
    if not table.devices:
        return []
    risk = forecast_risk(fleet, table)
    if down:
        failed = [i for i, d in enumerate(table.devices) if table.time - down.get(d, -np.inf) < DOWN_S]
        risk[failed] = 0.0
    rows = watcher.rows(table.devices)
    at = {int(r): i for i, r in enumerate(rows)}
    out = []
    for number, horizon in watcher.state.step(table.time, rows, risk):
        i = at[number]
        device, seconds = table.devices[i], table.horizons_s[horizon]
        reasons = fleet.explain(device, table.time, seconds, REASONS)
        text = "; ".join(r.text for r in reasons) or "unlike its peers"
        out.append(Alert(table.time, device, seconds, float(risk[i, horizon]), text))
    return out


class _Scores:
    """Writes every risk as it comes, so that memory stays bounded."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._writer = pq.ParquetWriter(path, SCORE_SCHEMA, compression="zstd")
        except OSError as error:
            raise StorageError(f"{path}: cannot be written: {error}") from error
        self._waiting: list[pa.RecordBatch] = []

    def add(self, table: RiskTable) -> None:
        n, h = table.risk.shape
        if not n:
            return
        names = pa.array(table.devices, pa.string())
        device = pa.DictionaryArray.from_arrays(pa.array(np.repeat(np.arange(n, dtype=np.int32), h)), names)
        stamp = pa.array(np.full(n * h, int(table.time * 1e6), np.int64)).cast(pa.timestamp("us", tz="UTC"))
        horizon = pa.array(np.tile(np.array(table.horizons_s, np.int32), n))
        columns = [stamp, device, horizon, pa.array(table.risk.astype(np.float32).ravel())]
        self._waiting.append(pa.RecordBatch.from_arrays(columns, schema=SCORE_SCHEMA))
        if sum(len(b) for b in self._waiting) > 1_000_000:
            self._flush()

    def _flush(self) -> None:
        if self._waiting:
            self._writer.write_table(pa.Table.from_batches(self._waiting).unify_dictionaries())
            self._waiting = []

    def close(self) -> None:
        self._flush()
        self._writer.close()


def write_alerts(path: Path, alerts: list[Alert]) -> None:
    """Write alerts as Parquet: time, device, horizon, risk, reason. Raises StorageError."""
    table = pa.table(
        {
            "time": pa.array([int(a.time * 1e6) for a in alerts], pa.int64()).cast(
                pa.timestamp("us", tz="UTC")
            ),
            "device": [a.device for a in alerts],
            "horizon": pa.array([a.horizon for a in alerts], pa.int64()),
            "risk": pa.array([a.risk for a in alerts], pa.float64()),
            "reason": [a.reason for a in alerts],
        },
        schema=ALERT_SCHEMA,
    )
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(table, path)
    except OSError as error:
        raise StorageError(f"{path}: cannot be written: {error}") from error
