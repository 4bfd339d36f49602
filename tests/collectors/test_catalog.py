"""The catalog holds every metric and event there is: what is emitted, charted or used as a feature stands in it.

Names in the sources are looked for as whole string literals. A word that looks like a metric and is none is listed
in NOT_METRICS, so that a misspelt name cannot hide among them.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from forewarn.collectors.catalog import EVENTS, EXPOSED_PREFIX, METRICS, exposed_name
from forewarn.models import rules
from forewarn.models.signals import scheme_of

ROOT = Path(__file__).parents[2]
PREFIXES = sorted({name.split("_")[0] for name in METRICS})
NAME = re.compile(rf"(?:{'|'.join(PREFIXES)})_[a-z0-9_]+")
NOT_METRICS = {
    "node_guid": "a file of sysfs",
    "gpu_instance": "a field of an NVML event",
    "gpu_unavailable": "a code of the event gpu_event",
    "agent_stopped": "a line of the agent's log",
    "agent_version": "a field of a node",
    "agent_info": "the build on the agent's own page, with a label",
    "collector_off": "a line of the agent's log",
    "collector_unavailable": "a line of the agent's log",
    "collector_failed": "a line of the agent's log",
    "training_time": "a field of an evaluation",
    "gpu_off_bus": "a cause of failure in simulations",
    "gpu_loss": "a signal made of events",
    "node_excess": "part of a feature's name",
    "node_median": "a field of the evidence",
}
PYTHON = [
    path
    for folder in ("collectors", "daemon/agent", "daemon/controller", "daemon/service", "models")
    for path in sorted((ROOT / folder).rglob("*.py"))
    if path.name != "catalog.py"
]
CHARTED = [
    *sorted((ROOT / "daemon/service/page").glob("*.js")),
    *(p for p in sorted((ROOT / "dashboards").rglob("*")) if p.suffix in (".json", ".yml", ".yaml", ".py")),
]
SERVICES_OWN = ROOT / "daemon/service/metrics.py"


def is_known(name: str) -> bool:
    """Whether a name is a metric, an event, or the beginning of one (names are put together in loops)."""
    beginning = name if name.endswith("_") else f"{name}_"
    return name in METRICS or name in EVENTS or any(n.startswith(beginning) for n in (*METRICS, *EVENTS))


def literals(path: Path) -> Iterator[tuple[int, str]]:
    """Line and text of every whole string literal that looks like a metric."""
    for found in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(found, ast.Constant) and isinstance(found.value, str) and NAME.fullmatch(found.value):
            yield found.lineno, found.value


def unknown_in(text: str, exposed: Iterable[str]) -> list[str]:
    """Names in a chart or a query that neither the catalog nor `exposed` (full names on Prometheus pages) has."""
    pages = {*exposed}
    found = []
    for match in re.finditer(rf"\b({EXPOSED_PREFIX})?({NAME.pattern})\b", text):
        if match[1]:
            if match[0] not in pages:
                found.append(match[0])
        elif not is_known(match[2]) and match[2] not in NOT_METRICS:
            found.append(match[2])
    return found


@pytest.mark.parametrize("path", PYTHON, ids=lambda p: str(p.relative_to(ROOT)))
def test_what_the_sources_name_stands_in_the_catalog(path: Path) -> None:
    unknown = [(n, name) for n, name in literals(path) if not is_known(name) and name not in NOT_METRICS]
    assert not unknown, f"{path}: add these to collectors/catalog.py, or to NOT_METRICS when they are none"


def test_words_that_are_no_metrics_are_still_there() -> None:
    used = {name for path in PYTHON for _, name in literals(path)}
    assert NOT_METRICS.keys() <= used
    assert not NOT_METRICS.keys() & METRICS.keys()


def exposed() -> set[str]:
    """Every name on an agent's or the service's page. Counters of the service get `_total` by the library."""
    own = re.findall(rf'"({EXPOSED_PREFIX}[a-z0-9_]+)"', SERVICES_OWN.read_text(encoding="utf-8"))
    return {exposed_name(m) for m in METRICS.values()} | set(own) | {f"{name}_total" for name in own}


@pytest.mark.parametrize("path", CHARTED, ids=lambda p: str(p.relative_to(ROOT)))
def test_what_is_charted_stands_in_the_catalog(path: Path) -> None:
    assert unknown_in(path.read_text(encoding="utf-8"), exposed()) == []


def test_a_misspelt_name_is_found() -> None:
    text = """rate(forewarn_gpu_ecc_dram_corrected_total[5m]) + forewarn_gpu_ecc_dramm_total
    const FIRST = ["gpu_power_watts", "gpu_powr_watts"]; forewarn_ingest_batches_total"""
    assert unknown_in(text, exposed()) == ["forewarn_gpu_ecc_dramm_total", "gpu_powr_watts"]


@pytest.mark.parametrize("kind", ["gpu", "disk", "node"])
def test_features_are_made_of_metrics_of_the_catalog(kind: str) -> None:
    scheme = scheme_of(kind)
    named = {m for s in scheme.signals for m in s.metrics} | set(scheme.metrics) | set(scheme.anchors)
    named |= set(rules.reading_metrics(kind))
    assert not named - METRICS.keys()
    assert {METRICS[m].kind for m in named} == {kind}


# --- the entries themselves ---


def test_an_entry_documents_its_metric() -> None:
    for name, metric in METRICS.items():
        assert metric.name == name
        assert re.match(r"[A-Z0-9]", metric.help) and not metric.help.endswith("."), metric
        assert metric.source and metric.trouble in (-1, 0, 1), metric


def test_names_end_in_their_unit() -> None:
    for name, metric in METRICS.items():
        body = name.removesuffix("_total").removesuffix("_max").removesuffix("_per_second")
        for unit in ("celsius", "watts", "joules", "hertz", "bytes", "ratio", "seconds"):
            if metric.unit == unit:
                assert body.endswith(f"_{unit}"), metric
        assert metric.type == "counter" or not exposed_name(metric).endswith("_total"), metric


def test_an_event_explains_itself_and_its_codes() -> None:
    for name, event in EVENTS.items():
        assert event.name == name and event.help and event.codes
