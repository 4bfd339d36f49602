"""Whatever smartctl prints: a reading of catalog numbers, or a clear error. Never another exception, never a hang."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from forewarn.collectors import smart_json
from forewarn.collectors.catalog import METRICS
from forewarn.collectors.errors import InputError
from forewarn.collectors.smart_calls import read_answer
from forewarn.collectors.smart_disks import addresses
from forewarn.collectors.smart_verdict import VERDICTS, judge

CASES = Path(__file__).parents[1] / "cases" / "smart"
RECORDED = sorted(p for p in CASES.rglob("*") if p.is_file() and p.name != "INDEX.tsv")
DOCUMENTS = [json.loads(p.read_text()) for p in RECORDED if p.suffix == ".json"]

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(min_value=2**63, max_value=2**200)
    | st.floats()
    | st.text(max_size=20)
)
JSON = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
)


def check(data: bytes, exit_status: int = 0) -> None:
    try:
        reading = read_answer(data, exit_status)
    except InputError as error:
        assert "smartctl" in str(error)
        return
    for metric, value in reading.values.items():
        assert metric in METRICS
        assert math.isfinite(value) and value >= 0
        if metric.endswith("_ratio"):
            assert value <= 2.55
    assert 0 <= reading.exit_status <= 255
    verdict = judge(reading)
    assert verdict.verdict in VERDICTS and verdict.message


@given(st.sampled_from(RECORDED), st.data())
@settings(max_examples=150, deadline=None)
def test_cut_short_or_damaged(path: Path, data: st.DataObject) -> None:
    whole = path.read_bytes()
    at = data.draw(st.integers(0, len(whole)))
    junk = data.draw(st.binary(max_size=8))
    check(whole[:at], data.draw(st.integers(0, 255)))
    check(whole[:at] + junk + whole[at + len(junk) :])


@given(
    st.sampled_from(RECORDED),
    st.sampled_from(["utf-16", "utf-16-le", "latin-1", "cp1252", "utf-32", "utf-8-sig"]),
)
@settings(max_examples=60, deadline=None)
def test_other_encodings(path: Path, encoding: str) -> None:
    check(path.read_bytes().decode("utf-8", errors="replace").encode(encoding, errors="replace"))


@given(st.sampled_from(DOCUMENTS), st.data())
@settings(max_examples=250, deadline=None)
def test_wrong_types_anywhere(document: dict[str, Any], data: st.DataObject) -> None:
    changed = json.loads(json.dumps(document))
    for _ in range(data.draw(st.integers(1, 5))):
        here: Any = changed
        while isinstance(here, dict | list) and here:
            keys = list(here) if isinstance(here, dict) else list(range(len(here)))
            key = data.draw(st.sampled_from(keys))
            if not isinstance(here[key], dict | list) or data.draw(st.integers(0, 3)) == 0:
                here[key] = data.draw(JSON)
                break
            here = here[key]
    check(json.dumps(changed).encode())


@given(JSON, st.integers(0, 255))
@settings(max_examples=100, deadline=None)
def test_any_json(value: Any, exit_status: int) -> None:
    check(
        json.dumps({"device": value, "devices": value, "smartctl": {"messages": value}}).encode(), exit_status
    )
    check(json.dumps(value).encode(), exit_status)


@given(st.text(max_size=400), st.integers(0, 255))
@settings(max_examples=100, deadline=None)
def test_any_text(text: str, exit_status: int) -> None:
    check(text.encode("utf-8", errors="surrogatepass"), exit_status)


@given(st.binary(max_size=400))
@settings(max_examples=100, deadline=None)
def test_any_bytes(data: bytes) -> None:
    check(data)


def test_deep_nesting_and_long_numbers_are_refused_in_words() -> None:
    check(b'{"a":' * 200_000)
    check(b"[" * 200_000)
    check(b'{"temperature": {"current": ' + b"9" * 10_000 + b"}}")
    check(b"{" * 500_000)
    check(b"1 " * 500_000)


@given(st.lists(st.tuples(st.text(max_size=30), st.text(max_size=20)), max_size=12))
@settings(max_examples=100, deadline=None)
def test_ids_are_safe_and_unique(entries: list[tuple[str, str]]) -> None:
    found = [a.id for a in addresses(entries, {})]
    assert len(set(found)) == len(found)
    assert all(id_ and all(c.isascii() and (c.isalnum() or c in "_.-") for c in id_) for id_ in found)


@given(JSON)
@settings(max_examples=100, deadline=None)
def test_scans_of_any_shape(value: Any) -> None:
    entries = smart_json.scan_entries({"devices": value, "smartctl": value})
    assert entries is None or all(isinstance(name, str) and name for name, _ in entries)
