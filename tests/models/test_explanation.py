"""Reasons in words, and the novelty of a device among its peers."""

from __future__ import annotations

import numpy as np
import pytest

from forewarn.collectors.xids import xid_fact
from forewarn.models import explanation
from forewarn.models.explanation import Words
from forewarn.models.features import FeatureEngine, FeatureTable, feature_names
from forewarn.models.novelty import novelty

START = 1_700_000_000.0
DEVICES = [f"n0/gpu{i}" for i in range(8)]


def engine_of(minutes: int, **per_minute: float) -> tuple[FeatureEngine, float]:
    """Eight GPUs; gpu3's metrics grow by what is given a minute, everybody else's by none."""
    engine = FeatureEngine("gpu")
    metrics = [f"gpu_{m}" for m in per_minute]
    for i in range(minutes):
        values = np.tile(np.array([1.0 for _ in metrics]), (8, 1))
        values[3] += [i * g for g in per_minute.values()]
        engine.apply(START + 60 * i, DEVICES, metrics, values)
    return engine, START + 60 * (minutes - 1)


def words_of(engine: FeatureEngine, now: float) -> tuple[Words, FeatureTable]:
    table = engine.features(now)
    return Words(engine, table, table.devices.index("n0/gpu3")), table


def test_counter_in_words() -> None:
    engine, now = engine_of(181, ecc_dram_corrected_total=0.2)
    words, _ = words_of(engine, now)
    text, since, evidence = words.of("ecc_dram_corrected", "ecc_dram_corrected.increase_24h")
    assert text.startswith("36 corrected DRAM errors in 6 h") or text.startswith(
        "36 corrected DRAM errors in 24 h"
    )
    assert "none on its neighbours" in text and "for 3 h now" in text
    assert since == START + 60 and evidence["node_median"] == 0
    assert evidence["total"] == pytest.approx(36)


def test_counter_that_rises_against_its_own_past() -> None:
    engine = FeatureEngine("gpu")
    for i in range(48 * 12):
        count = np.full((8, 1), float(i // 12))
        count[3] += max(0, i - 45 * 12)
        engine.apply(START + 300 * i, DEVICES, ["gpu_ecc_dram_corrected_total"], count)
    words, table = words_of(engine, START + 300 * (48 * 12 - 1))
    text, _, _ = words.of("ecc_dram_corrected", "ecc_dram_corrected.surprise_1h")
    assert "rising for" in text and "its node's median" in text
    surprise = table.values[:, table.names.index("ecc_dram_corrected.surprise_1h")]
    assert surprise[3] > 4 and abs(surprise[2]) < 1.5


def test_counter_against_the_node() -> None:
    engine = FeatureEngine("gpu")
    for i in range(60):
        values = np.full((8, 1), float(i))
        values[3] = 40.0 * i
        engine.apply(START + 60 * i, DEVICES, ["gpu_pcie_replay_total"], values)
    words, _ = words_of(engine, START + 59 * 60)
    text, _, evidence = words.of("pcie_replays", "pcie_replays.increase_1h")
    assert "40 x its node's median" in text and evidence["node_median"] == pytest.approx(59, abs=6)


def test_every_feature_of_a_gpu_has_words() -> None:
    engine, now = engine_of(30, temperature_celsius=0.1, power_watts=0, row_remap_corrected_total=0.1)
    words, _ = words_of(engine, now)
    for name in feature_names("gpu"):
        text, _, evidence = words.of(name.split(".", 1)[0], name)
        assert len(text) > 8 and isinstance(evidence, dict), name


@pytest.mark.parametrize("kind", ["disk", "node"])
def test_every_feature_of_disks_and_nodes_has_words(kind: str) -> None:
    engine = FeatureEngine(kind)
    device = "n0/sda" if kind == "disk" else "n0"
    metrics = ["disk_reallocated_sectors", "disk_pending_sectors", "agent_spool_bytes"]
    for i in range(5):
        engine.apply(START + 86_400 * i, [device], metrics, np.array([[float(i), 2.0, 1.0]]))
    table = engine.features(START + 4 * 86_400)
    for name in table.names:
        text, _, _ = Words(engine, table, 0).of(name.split(".", 1)[0], name)
        assert len(text) > 8, name


def test_actions_of_fatal_xids_have_words() -> None:
    for code in (48, 62, 64, 74, 79, 94, 95, 119, 120):
        fact = xid_fact(code)
        assert fact is not None
        assert explanation.next_step(fact.action) != fact.action


def test_novelty_points_at_the_odd_one() -> None:
    engine, now = engine_of(120, ecc_dram_corrected_total=3, pcie_replay_total=2)
    found = novelty(engine.features(now))
    odd = found.devices.index("n0/gpu3")
    assert found.score[odd] > 3 > np.delete(found.score, odd).max()
    assert found.strongest[odd].split(".")[0] in ("ecc_dram_corrected", "ecc_corrected", "pcie_replays")


def test_novelty_of_nobody_and_of_few() -> None:
    empty = FeatureEngine("gpu")
    assert novelty(empty.features(START)).devices == []
    empty.apply(START, ["n0/gpu0"], ["gpu_temperature_celsius"], np.array([[90.0]]))
    assert novelty(empty.features(START)).score.tolist() == [0.0]
