"""Small history directories, written as a site would write them. Made up; they prove code paths, no skill."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

START_S = 1_700_006_400.0
"""Midnight in UTC."""
DAY_S = 86_400.0


def stamps(seconds: Sequence[float] | np.ndarray) -> pd.DatetimeIndex:
    """Seconds since the epoch as UTC timestamps."""
    return pd.to_datetime(np.round(np.asarray(seconds, float) * 1e6).astype(np.int64), unit="us", utc=True)


def write_rows(path: Path, columns: Mapping[str, object]) -> Path:
    """One Parquet file; columns `time`, `installed` and `removed` are seconds since the epoch."""
    table = pd.DataFrame(dict(columns))
    for name in ("time", "installed", "removed"):
        if name in table and pd.api.types.is_numeric_dtype(table[name]):
            known = table[name].notna()
            as_time = pd.Series(pd.NaT, index=table.index, dtype="datetime64[us, UTC]")
            as_time[known] = stamps(table.loc[known, name].to_numpy(float))
            table[name] = as_time
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pandas(table, preserve_index=False), path)
    return path


def write_disks(
    path: Path,
    drives: int = 120,
    days: int = 60,
    failing: int = 24,
    seed: int = 5,
    every_days: int = 1,
    start_s: float = START_S,
) -> Path:
    """Drives read every few days. The failing ones find more and more pending sectors for 12 days and are gone."""
    dice = np.random.default_rng(seed)
    rows: dict[str, list[object]] = {k: [] for k in ("time", "node", "device")}
    metrics: dict[str, list[float]] = {
        k: [] for k in ("disk_pending_sectors", "disk_reallocated_sectors", "disk_power_on_hours")
    }
    fails: dict[str, float] = {}
    for number in range(drives):
        device = f"n{number % 4}/disk{number}"
        ends = days
        if number < failing:
            # Spread over the whole span, so that both the earlier and the later part have some.
            ends = 14 + int((days - 16) * number / failing)
            fails[device] = start_s + ends * DAY_S - 60
        hours, worn = float(dice.integers(100, 20_000)), float(dice.integers(0, 3))
        for day in range(0, ends, every_days):
            sick = max(0, day - (ends - 12)) if number < failing else 0
            rows["time"].append(start_s + day * DAY_S)
            rows["node"].append(f"n{number % 4}")
            rows["device"].append(device)
            metrics["disk_pending_sectors"].append(float(sick * 8 + (dice.random() < 0.01)))
            metrics["disk_reallocated_sectors"].append(worn + sick * 4)
            metrics["disk_power_on_hours"].append(hours + 24 * day)
    write_rows(path / "telemetry" / "part-0.parquet", {**rows, **metrics})
    write_rows(
        path / "failures.parquet",
        {
            "time": list(fails.values()),
            "node": [d.split("/")[0] for d in fails],
            "device": list(fails),
            "cause": ["drive_failed"] * len(fails),
        },
    )
    names = [f"n{n % 4}/disk{n}" for n in range(drives)]
    write_rows(
        path / "devices.parquet",
        {
            "device": names,
            "node": [d.split("/")[0] for d in names],
            "kind": ["disk"] * drives,
            "model": [f"MODEL{n % 2}" for n in range(drives)],
            "serial": [f"S{n}" for n in range(drives)],
            "capacity_bytes": [4e12 if n % 2 else 3e12 for n in range(drives)],
        },
    )
    return path
