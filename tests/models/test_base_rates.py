"""Base rates: position and a unit's own past, where they matter and where they do not."""

from __future__ import annotations

import csv
import gzip
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from sklearn.metrics import roc_auc_score

from forewarn.collectors.errors import InputError
from forewarn.models.base_rates import DAY_S, BaseRates, Units, fit, published

YEAR_S = 365.25 * DAY_S
SHARED = Path(__file__).resolve().parents[2].parent / "shared" / "data"


def drawn(own: float, seed: int = 2, units: int = 400) -> Units:
    """Two years of units in two groups, one three times as bad; `own`: how much units differ within a group."""
    dice = np.random.default_rng(seed)
    group = np.where(np.arange(units) % 2, "top", "bottom")
    rate = np.where(group == "top", 1.5, 0.5) / YEAR_S
    rate = rate * (dice.gamma(1 / own, own, units) if own else 1.0)
    counts = dice.poisson(rate * 2 * YEAR_S)
    unit = np.repeat(np.arange(units), counts)
    time = dice.uniform(0, 2 * YEAR_S, len(unit))
    order = np.argsort(time)
    end = np.full(units, 2 * YEAR_S)
    return Units(np.zeros(units), end, group.tolist(), time[order], unit[order])


def ranking(model: BaseRates, units: Units, now: float, horizon_s: float) -> tuple[float, float]:
    """ROC-AUC of the model's rate and of "has failed before" alone."""
    low, high = np.searchsorted(units.time, [now, now + horizon_s])
    failed = np.bincount(units.unit[low:high], minlength=len(units.start)) > 0
    before = np.bincount(units.unit[:low], minlength=len(units.start)) > 0
    return float(roc_auc_score(failed, model.rate(units, now))), float(roc_auc_score(failed, before))


def test_rates_of_groups_are_found() -> None:
    model = fit(drawn(own=0.0), until=YEAR_S)
    assert model.rates["top"] * YEAR_S == pytest.approx(1.5, rel=0.15)
    assert model.rates["bottom"] * YEAR_S == pytest.approx(0.5, rel=0.2)


def test_history_counts_where_units_differ_and_hardly_where_they_do_not() -> None:
    assert fit(drawn(own=2.0), until=1.5 * YEAR_S).weight > 3 * fit(drawn(own=0.0), until=1.5 * YEAR_S).weight


@pytest.mark.parametrize("own", [0.0, 1.0, 2.0])
def test_later_failures_are_ranked_better_than_by_having_failed(own: float) -> None:
    units = drawn(own)
    ours, before = ranking(fit(units, until=YEAR_S), units, YEAR_S, 0.5 * YEAR_S)
    assert ours > before
    assert ours > 0.58


def test_the_future_changes_nothing() -> None:
    units = drawn(own=1.0)
    later = units.time >= YEAR_S
    changed = Units(units.start, units.end, units.group, units.time, np.where(later, 0, units.unit))
    assert fit(units, until=YEAR_S) == fit(changed, until=YEAR_S)
    assert (fit(units, YEAR_S).rate(units, YEAR_S) == fit(units, YEAR_S).rate(changed, YEAR_S)).all()


def test_risk_is_a_probability_and_what_is_not_watched_has_none() -> None:
    units = Units(
        np.array([0.0, 0.0, 50 * DAY_S]), np.array([90 * DAY_S, 20 * DAY_S, 90 * DAY_S]), ["a", "a", "new"],
        np.array([DAY_S, 10 * DAY_S]), np.array([0, 1]),
    )  # fmt: skip
    model = fit(units, until=40 * DAY_S)
    risk = model.risk(units, 40 * DAY_S, 30 * DAY_S)
    assert 0 < risk[0] < 1
    assert risk[1] == 0
    assert risk[2] == 0
    assert model.rate(units, 60 * DAY_S)[2] == model.overall
    assert (model.risk(units, 40 * DAY_S, 60 * DAY_S) >= risk).all()


def test_bad_input_is_named() -> None:
    one = np.zeros(1)
    with pytest.raises(InputError, match="not among those watched"):
        Units(one, one + 1, ["a"], one, np.array([3]))
    with pytest.raises(InputError, match="order of time"):
        Units(one, one + 1, ["a"], np.array([2.0, 1.0]), np.array([0, 0]))
    with pytest.raises(InputError, match="no failure before"):
        fit(Units(one, one + 9, ["a"], one + 5, np.array([0])), until=1.0)


def test_published_rates_are_what_their_counts_say() -> None:
    rates = published()
    assert {r.source for r in rates} == {"titan", "stepfun", "lanl"}
    for rate in rates:
        assert rate.per_unit_year == pytest.approx(rate.failures / rate.unit_years, rel=0.02)


@pytest.mark.skipif(not SHARED.exists(), reason="needs ../shared/data")
def test_real_servers_of_an_llm_cluster() -> None:
    with (SHARED / "stepfun-faults-2024" / "faults.csv").open() as file:
        faults = sorted(
            (pd.Timestamp(r["time"]).timestamp(), int(r["node"][1:])) for r in csv.DictReader(file)
        )
    time, node = np.array([f[0] for f in faults]), np.array([f[1] for f in faults])
    units = Units(np.full(400, time[0]), np.full(400, time[-1] + 1), ["all"] * 400, time, node)
    cut = float(time[0] + 0.5 * (time[-1] - time[0]))
    ours, before = ranking(fit(units, cut), units, cut, 60 * DAY_S)
    assert ours > before
    assert ours > 0.5


@pytest.mark.skipif(not SHARED.exists(), reason="needs ../shared/data")
def test_real_gpus_of_titan_by_cage() -> None:
    with gzip.open(SHARED / "titan-gpu-lifetimes" / "lifetimes.csv.gz") as file:
        table = pd.read_csv(file)
    start, end = (
        pd.to_datetime(table[c], utc=True).map(pd.Timestamp.timestamp).to_numpy(float)
        for c in ("insert", "remove")
    )
    failed = np.flatnonzero(table["event"].notna())
    failed = failed[np.argsort(end[failed])]
    cage = table["location"].str.extract(r"c\d+-\d+c(\d)")[0].fillna("?")
    units = Units(start, end + 1, cage.tolist(), end[failed], failed)
    cut = pd.Timestamp("2016-04-01", tz="UTC").timestamp()
    ours, before = ranking(fit(units, cut), units, cut, 90 * DAY_S)
    assert ours > before + 0.1
    assert ours > 0.7
