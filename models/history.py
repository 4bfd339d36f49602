"""The history directory: the one exchange format for training, evaluation, back-testing and import.

`telemetry/*.parquet` is wide (time, node, device, catalog metrics); beside it lie events, devices and failures.
Rows may come in any order, twice, with gaps, other time units, columns we do not know. Real faults raise InputError.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import duckdb
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from forewarn.collectors.catalog import METRICS
from forewarn.collectors.errors import InputError, StorageError

KEYS = ("time", "node", "device")
PROVENANCE_KEY = b"forewarn.simulated"
"""Key in the Parquet metadata that is `true` when a simulator wrote the file."""
ROWS_AT_ONCE = 2_000_000
"""Rows of telemetry held in memory at once, roughly."""


@dataclass(frozen=True)
class Slice:
    """Telemetry with start <= time < end, any order; `codes` (n) index `devices` (sorted), `values` (n x metrics)."""

    start: float
    end: float
    times: NDArray[np.float64]
    codes: NDArray[np.int32]
    devices: list[str]
    metrics: list[str]
    values: NDArray[np.float64]


class History:
    """A history directory, opened for reading. Nothing is read before it is asked for."""

    def __init__(self, path: Path) -> None:
        self.path = path
        if not path.is_dir():
            raise InputError(
                f"{path}: is no history directory; it should hold telemetry/*.parquet and failures.parquet"
            )
        self._files = sorted((path / "telemetry").rglob("*.parquet"))
        if not self._files and not any(
            (path / f"{n}.parquet").exists() for n in ("events", "failures", "devices")
        ):
            raise InputError(
                f"{path}: holds none of telemetry/*.parquet, events, failures or devices.parquet"
            )

    # Telemetry -----------------------------------------------------------------------------------------------------

    @cached_property
    def metrics(self) -> list[str]:
        """Catalog metrics that the telemetry has as columns, in catalog order."""
        columns: set[str] = set()
        for file in self._files:
            schema = _schema(file)
            missing = [k for k in KEYS if k not in schema.names]
            if missing:
                raise InputError(
                    f"{file}: has no column {missing[0]!r}; it has {', '.join(schema.names[:12])}"
                )
            for name in schema.names:
                if name in METRICS and _is_number(schema.field(name).type):
                    columns.add(name)
                elif name in METRICS:
                    raise InputError(
                        f"{file}: column {name!r} must be a number, but is {schema.field(name).type}"
                    )
        return [m for m in METRICS if m in columns]

    @cached_property
    def simulated(self) -> bool:
        """True when the files say that a simulator wrote them."""
        files = [*self._files[:1], self.path / "failures.parquet"]
        return any((_schema(f).metadata or {}).get(PROVENANCE_KEY) == b"true" for f in files if f.exists())

    @cached_property
    def span(self) -> tuple[float, float]:
        """First and last time of the telemetry, else of events and failures; seconds since the epoch."""
        if self._files:
            self.metrics  # noqa: B018  # names a file that is no telemetry before DuckDB stumbles over it
            ((low, high),) = self._query("SELECT min(time), max(time) FROM telemetry").fetchall()
            if low is not None:
                return float(low), float(high)
        stamps = np.concatenate([self.events["time"].to_numpy(float), self.failures["time"].to_numpy(float)])
        if not len(stamps):
            raise InputError(f"{self.path}: holds no row with a time")
        return float(stamps.min()), float(stamps.max())

    @cached_property
    def rows(self) -> int:
        """Rows of telemetry."""
        return sum(_rows(f) for f in self._files)

    @cached_property
    def device_count(self) -> int:
        """Distinct devices in the telemetry, else in devices.parquet."""
        if not self._files:
            return len(self.devices)
        ((count,),) = self._query("SELECT approx_count_distinct(device) FROM telemetry").fetchall()
        return int(count)

    @cached_property
    def interval_s(self) -> float:
        """Usual seconds between two readings of a device: the median over some devices. NaN without telemetry."""
        if not self._files:
            return float("nan")
        text = (
            "SELECT median(gap) FROM (SELECT time - lag(time) OVER (PARTITION BY device ORDER BY time) AS gap "
            "FROM telemetry WHERE device IN (SELECT DISTINCT device FROM telemetry ORDER BY hash(device) LIMIT 50)) "
            "WHERE gap > 0"
        )
        ((gap,),) = self._query(text).fetchall()
        return float("nan") if gap is None else float(gap)

    def slices(self, step_s: float, start: float | None = None, end: float | None = None) -> Iterator[Slice]:
        """Telemetry in slices of time that follow each other; each is a whole number of `step_s` long (aligned to the
        epoch) and holds about ROWS_AT_ONCE rows."""
        if not self._files:
            return
        first, last = self.span
        first, last = first if start is None else start, last if end is None else end
        rows_a_step = max(1.0, self.rows * step_s / max(step_s, self.span[1] - self.span[0]))
        steps = max(1, int(ROWS_AT_ONCE / rows_a_step))
        width = steps * step_s
        moment = float(np.floor(first / step_s) * step_s)
        while moment <= last:
            yield self._slice(moment, moment + width)
            moment += width

    def _slice(self, start: float, end: float) -> Slice:
        names = self.metrics
        columns = "".join(f', CAST("{m}" AS DOUBLE) AS "{m}"' for m in names)
        table: pa.Table = self._query(
            f"SELECT time, device{columns} FROM telemetry WHERE time >= {start!r} AND time < {end!r}"  # noqa: S608  # own numbers and catalog names
        ).to_arrow_table()
        device = table["device"].combine_chunks()
        if isinstance(device, pa.ChunkedArray):
            device = pa.concat_arrays(device.chunks) if device.num_chunks else pa.array([], pa.string())
        encoded = device.dictionary_encode()
        # By name, so that the order of the rows in the files makes no difference to what is learned from them.
        order = np.argsort(np.array(encoded.dictionary.to_pylist(), object), kind="stable")
        number = np.empty(len(order), np.int32)
        number[order] = np.arange(len(order), dtype=np.int32)
        values = np.empty((table.num_rows, len(names)))
        for i, name in enumerate(names):
            values[:, i] = table[name].to_numpy()
        times = table["time"].to_numpy().astype(float)
        codes = number[np.asarray(encoded.indices.to_numpy(zero_copy_only=False), np.int64)]
        devices = encoded.dictionary.take(pa.array(order, pa.int64())).to_pylist()
        return Slice(start, end, times, codes, devices, names, values)

    def _query(self, text: str) -> duckdb.DuckDBPyRelation:
        """A query over `telemetry`, whose `time` is seconds since the epoch."""
        files = [str(f) for f in self._files]
        source = f"read_parquet({files!r}, union_by_name = true, hive_partitioning = false)"
        view = f"SELECT * REPLACE (epoch_us(time) / 1e6 AS time) FROM {source}"  # noqa: S608  # our own paths
        try:
            self._connection.execute(f"CREATE OR REPLACE TEMP VIEW telemetry AS {view}")
            return self._connection.sql(text)
        except duckdb.Error as error:
            raise InputError(f"{self.path / 'telemetry'}: cannot be read: {error}") from error

    @cached_property
    def _connection(self) -> duckdb.DuckDBPyConnection:
        connection = duckdb.connect()
        connection.execute("SET enable_progress_bar = false; SET TimeZone = 'UTC'")
        return connection

    # The small tables ----------------------------------------------------------------------------------------------

    @cached_property
    def events(self) -> pd.DataFrame:
        """Columns time (seconds), node, device, kind, code (text), severity, count; by time."""
        table = self._table("events", ("time", "node", "device", "kind", "code"))
        table["code"] = table["code"].map(_code)
        for name, default in (("severity", ""), ("count", 1)):
            if name not in table:
                table[name] = default
        return table.sort_values("time", kind="stable").reset_index(drop=True)

    @cached_property
    def failures(self) -> pd.DataFrame:
        """Columns time (seconds), node, device, cause and whatever else the file has; by time, without repeats."""
        table = self._table("failures", ("time", "node", "device"))
        if "cause" not in table:
            table["cause"] = "unknown"
        table["cause"] = table["cause"].fillna("unknown").astype(str)
        return (
            table.drop_duplicates(["time", "device"])
            .sort_values("time", kind="stable")
            .reset_index(drop=True)
        )

    @property
    def has_failures(self) -> bool:
        """Whether failures.parquet is there (it may be empty: nothing failed)."""
        return (self.path / "failures.parquet").exists()

    @cached_property
    def devices(self) -> pd.DataFrame:
        """Columns device, node, kind, model, serial, installed, removed (seconds or NaN) and whatever else there is."""
        table = self._table("devices", ("device",))
        for name in ("node", "kind", "model", "serial"):
            if name not in table:
                table[name] = ""
            table[name] = table[name].fillna("").astype(str)
        for name in ("installed", "removed"):
            table[name] = (
                _seconds(table[name], self.path / "devices.parquet", name) if name in table else np.nan
            )
        return table

    def _table(self, name: str, needed: Sequence[str]) -> pd.DataFrame:
        path = self.path / f"{name}.parquet"
        if not path.exists():
            return pd.DataFrame({k: pd.Series(dtype="float64" if k == "time" else "object") for k in needed})
        try:
            table = pd.read_parquet(path)
        except (OSError, ValueError, pa.ArrowException) as error:
            raise InputError(f"{path}: cannot be read: {error}") from error
        for column in needed:
            if column not in table:
                raise InputError(
                    f"{path}: has no column {column!r}; it has {', '.join(map(str, table.columns))}"
                )
        for column in ("node", "device", "kind"):
            if column in table:
                table[column] = table[column].fillna("").astype(str).astype(object)
        if "time" in needed:
            table["time"] = _seconds(table["time"], path, "time")
            bad = int(table["time"].isna().sum())
            if bad:
                raise InputError(f"{path}: column 'time' is empty in {bad} rows")
        return table

    def models_of(self) -> dict[str, str]:
        """Model of each device, where known."""
        table = self.devices
        return dict(zip(table["device"], table["model"], strict=True))


def write_table(path: Path, table: pa.Table, simulated: bool) -> None:
    """Write one Parquet file of a history, whole or not at all, marked with where it comes from."""
    metadata = {**(table.schema.metadata or {}), PROVENANCE_KEY: b"true" if simulated else b"false"}
    part = path.with_name(f".{path.name}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(table.replace_schema_metadata(metadata), part, compression="zstd")
        part.replace(path)
    except OSError as error:
        raise StorageError(f"{path}: cannot be written: {error}") from error


def _schema(file: Path) -> pa.Schema:
    try:
        return pq.read_schema(file)
    except (OSError, pa.ArrowException) as error:
        raise InputError(f"{file}: is not a Parquet file that can be read: {error}") from error


def _rows(file: Path) -> int:
    try:
        return int(pq.read_metadata(file).num_rows)
    except (OSError, pa.ArrowException) as error:
        raise InputError(f"{file}: is not a Parquet file that can be read: {error}") from error


def _is_number(kind: pa.DataType) -> bool:
    return bool(
        pa.types.is_integer(kind)
        or pa.types.is_floating(kind)
        or pa.types.is_boolean(kind)
        or pa.types.is_decimal(kind)
        or pa.types.is_null(kind)
    )


def _seconds(column: pd.Series, path: Path, name: str) -> pd.Series:
    """Timestamps of any unit, dates, ISO text or seconds as float seconds since the epoch (UTC)."""
    if pd.api.types.is_numeric_dtype(column):
        return column.astype(float)
    try:
        stamps = pd.to_datetime(column, utc=True)
    except (ValueError, TypeError) as error:
        raise InputError(f"{path}: column {name!r} holds no timestamps: {error}") from error
    seconds = stamps.astype("datetime64[us, UTC]").astype("int64") / 1e6
    return seconds.where(stamps.notna())


def _code(value: object) -> str:
    """Codes are text; a column of numbers gives `79`, not `79.0`."""
    if value is None or value != value:  # NaN alone differs from itself
        return ""
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return str(value)
