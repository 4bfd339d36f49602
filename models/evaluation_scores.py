"""How good risks are as probabilities: ranking (PR-AUC beside the base rate), Brier score and calibration.

Works on the scores file of a back-test, thinned to whole moments so that memory stays bounded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
from numpy.typing import NDArray
from sklearn.metrics import average_precision_score

from forewarn.collectors.errors import InputError

DAY_S = 86_400.0
DOWN_S = 3600.0
"""Scores this soon after a failure belong to the failure."""
MOST_ROWS = 1_500_000
"""Scores of one horizon held at once."""
RESAMPLED_ROWS = 150_000
RESAMPLES = 60
EDGES = (0.0, 1e-5, 1e-4, 3e-4, 1e-3, 3e-3, 0.01, 0.03, 0.1, 0.2, 0.35, 0.5, 0.7, 0.85, 1.0)
"""Bins of the reliability curve: risks are small, so most bins are."""


@dataclass(frozen=True)
class Scored:
    """Scores of one kind. `device_days`: time that was scored; `rows` by horizon: device codes, times, risks."""

    devices: list[str]
    device_days: float
    rows: dict[int, tuple[NDArray[np.int32], NDArray[np.float64], NDArray[np.float64]]]


@dataclass(frozen=True)
class ScoreQuality:
    """One horizon. `reliability`: (mean risk, observed share, rows) by bin. `base_brier`: of the base rate as risk."""

    horizon_s: int
    rows: int
    base_rate: float
    pr_auc: float
    pr_auc_95: tuple[float, float]
    brier: float
    base_brier: float
    calibration_error: float
    reliability: Sequence[tuple[float, float, int]]

    def as_dict(self) -> dict[str, Any]:
        return {
            "horizon_s": self.horizon_s,
            "rows": self.rows,
            "base_rate": self.base_rate,
            "pr_auc": self.pr_auc,
            "pr_auc_95": self.pr_auc_95,
            "brier": self.brier,
            "brier_of_base_rate": self.base_brier,
            "calibration_error": self.calibration_error,
            "reliability": [list(r) for r in self.reliability],
        }


def read_scores(path: Path, mine: Callable[[str], bool], start: float) -> Scored:
    """Scores of the devices that `mine` accepts, from `start` on. Raises InputError for a file that is no scores."""
    try:
        connection = duckdb.connect()
        connection.execute("SET enable_progress_bar = false; SET TimeZone = 'UTC'")
        connection.read_parquet(str(path)).create_view("every")
        names = [
            d
            for (d,) in connection.sql(
                "SELECT DISTINCT device::VARCHAR AS d FROM every ORDER BY d"
            ).fetchall()
        ]
        connection.execute("CREATE TEMP TABLE known (device VARCHAR, code INTEGER)")
        connection.execute("CREATE TEMP TABLE since AS SELECT ?::DOUBLE AS start", [start])
        devices = [d for d in names if mine(d)]
        if devices:
            connection.executemany("INSERT INTO known VALUES (?, ?)", [(d, i) for i, d in enumerate(devices)])
        connection.execute(
            "CREATE TEMP VIEW mine AS SELECT known.code, epoch_us(every.time) / 1e6 AS moment, "
            "every.horizon, every.risk FROM every JOIN known ON every.device::VARCHAR = known.device, since "
            "WHERE epoch_us(every.time) / 1e6 >= since.start"
        )
        counts = connection.sql("SELECT horizon, count(*) FROM mine GROUP BY 1 ORDER BY 1").fetchall()
        gap = _usual_gap(connection)
        rows = {}
        for horizon, count in counts:
            stride = max(1, int(np.ceil(count / MOST_ROWS)))
            table = connection.sql(
                "SELECT code, moment, risk FROM mine JOIN (SELECT moment, row_number() OVER (ORDER BY moment) AS n "  # noqa: S608  # own numbers
                f"FROM (SELECT DISTINCT moment FROM mine)) AS moments USING (moment) WHERE horizon = {int(horizon)} "
                f"AND n % {stride} = 0 ORDER BY moment, code"
            ).fetchnumpy()
            rows[int(horizon)] = (
                np.asarray(table["code"], np.int32),
                np.asarray(table["moment"], np.float64),
                np.asarray(table["risk"], np.float64),
            )
    except duckdb.Error as error:
        raise InputError(f"{path}: is no file of scores: {error}") from error
    total = max((int(c) for _, c in counts), default=0)
    return Scored(devices if counts else [], total * gap / DAY_S, rows)


def _usual_gap(connection: duckdb.DuckDBPyConnection) -> float:
    """Usual seconds between two scores of a device."""
    found = connection.sql(
        "SELECT median(gap) FROM (SELECT moment - lag(moment) OVER (PARTITION BY code ORDER BY moment) AS gap "
        "FROM mine WHERE horizon = (SELECT min(horizon) FROM mine) AND code < 50)"
    ).fetchall()
    return float(found[0][0]) if found and found[0][0] is not None else 0.0


def labels_of(
    code: NDArray[np.int32],
    time: NDArray[np.float64],
    devices: Sequence[str],
    failures: Mapping[str, Sequence[float]],
    known: Mapping[str, float],
    end: float,
    horizon_s: int,
) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Whether each row's device fails within the horizon, and whether that is known: not where the data end first, and
    not just after a failure."""
    ahead = np.full(len(time), np.inf)
    since = np.full(len(time), np.inf)
    until = np.full(len(time), end)
    at = {d: i for i, d in enumerate(devices)}
    order = np.argsort(code, kind="stable")
    bounds = np.searchsorted(code[order], np.arange(len(devices) + 1))
    for device in {*failures, *known} & at.keys():
        i = at[device]
        rows = order[bounds[i] : bounds[i + 1]]
        until[rows] = known.get(device, end)
        times = np.sort(np.array(failures.get(device, ()), float))
        if len(times):
            following = np.searchsorted(times, time[rows], "right")
            padded = np.concatenate([[-np.inf], times, [np.inf]])
            ahead[rows] = padded[following + 1] - time[rows]
            since[rows] = time[rows] - padded[following]
    failed = ahead <= horizon_s
    usable = (failed | (until - time >= horizon_s)) & (since > DOWN_S)
    return failed, usable


def quality_of(
    scored: Scored,
    horizon_s: int,
    failures: Mapping[str, Sequence[float]],
    known: Mapping[str, float],
    end: float,
    seed: int,
) -> ScoreQuality:
    """Measures of one horizon; NaN where nothing failed or nothing is known for long enough."""
    nothing = np.empty(0)
    code, time, risk = scored.rows.get(horizon_s, (np.empty(0, np.int32), nothing, nothing))
    label, usable = labels_of(code, time, scored.devices, failures, known, end, horizon_s)
    code, risk, label = code[usable], risk[usable], label[usable]
    nan = float("nan")
    if not len(risk):
        return ScoreQuality(horizon_s, 0, nan, nan, (nan, nan), nan, nan, nan, [])
    base = float(label.mean())
    pairs = reliability(risk, label)
    error = sum(n * abs(mean - share) for mean, share, n in pairs) / len(risk)
    auc, interval = nan, (nan, nan)
    if 0 < base < 1:
        auc = float(average_precision_score(label, risk))
        interval = _interval(code, risk, label, len(scored.devices), seed)
    return ScoreQuality(
        horizon_s,
        len(risk),
        base,
        auc,
        interval,
        float(np.mean((risk - label) ** 2)),
        base * (1.0 - base),
        float(error),
        pairs,
    )


def reliability(risk: NDArray[np.float64], label: NDArray[np.bool_]) -> list[tuple[float, float, int]]:
    """(mean risk, observed share, rows) of each bin that holds rows."""
    bins = np.clip(np.searchsorted(EDGES, risk, "right") - 1, 0, len(EDGES) - 2)
    count = np.bincount(bins, minlength=len(EDGES) - 1)
    total = np.bincount(bins, risk, minlength=len(EDGES) - 1)
    failed = np.bincount(bins, label.astype(float), minlength=len(EDGES) - 1)
    return [
        (float(total[i] / count[i]), float(failed[i] / count[i]), int(count[i]))
        for i in np.flatnonzero(count).tolist()
    ]


def _interval(
    code: NDArray[np.int32], risk: NDArray[np.float64], label: NDArray[np.bool_], devices: int, seed: int
) -> tuple[float, float]:
    """95 % interval of PR-AUC, devices drawn with replacement; healthy rows thinned and weighted."""
    dice = np.random.default_rng(seed)
    share = min(1.0, RESAMPLED_ROWS / len(risk))
    keep = label | (dice.random(len(risk)) < share)
    code, risk, label = code[keep], risk[keep], label[keep]
    stands_for = np.where(label, 1.0, 1.0 / share)
    found = []
    for _ in range(RESAMPLES):
        weight = dice.poisson(1.0, devices)[code] * stands_for
        if weight[label].sum() > 0:
            found.append(average_precision_score(label, risk, sample_weight=weight))
    if not found:
        return float("nan"), float("nan")
    low, high = np.percentile(found, (2.5, 97.5))
    return float(low), float(high)
