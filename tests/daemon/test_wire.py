"""Batches survive the wire, and what is not a batch is refused by the name of its field."""

from __future__ import annotations

import array
import contextlib
import math
import zlib
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forewarn.collectors.base import Device, Event, Sample
from forewarn.collectors.errors import InputError
from forewarn.daemon import wire


def batch(**changes: Any) -> wire.Batch:
    whole = wire.Batch(
        node="n1",
        stream="s",
        sequence=1,
        sent=100.0,
        devices=[Device("n1/gpu0", "gpu", serial="GPU-1")],
        frames=[wire.pack_samples(99.0, [Sample("n1/gpu0", "gpu_power_watts", 300.0)])],
        events=[Event("n1/gpu0", "xid", "79", "critical", "m", time=98.0)],
    )
    return msgspec.structs.replace(whole, **changes)


def test_there_and_back() -> None:
    assert wire.decode(wire.encode(batch())) == batch()


values = st.floats(allow_nan=True, allow_infinity=True)
samples = st.builds(
    Sample,
    device=st.sampled_from(["n/gpu0", "n/gpu1", "n"]),
    metric=st.sampled_from(["a", "b", "c"]),
    value=values,
    labels=st.sampled_from([{}, {"link": "0"}]),
)


@given(st.lists(samples))
def test_packing_keeps_the_last_finite_unlabelled_value_of_each_cell(given_samples: list[Sample]) -> None:
    frame = wire.pack_samples(1.0, given_samples)
    expected = {
        (s.device, s.metric): s.value for s in given_samples if not s.labels and math.isfinite(s.value)
    }
    cells = array.array("d", frame.values)
    got = {
        (d, m): cells[i * len(frame.metrics) + j]
        for i, d in enumerate(frame.devices)
        for j, m in enumerate(frame.metrics)
    }
    assert {k: v for k, v in got.items() if not math.isnan(v)} == expected


@pytest.mark.parametrize("size", [0, 100, 1024, 1025, 100_000])
def test_compression_undoes_itself(size: int) -> None:
    body = bytes(i % 7 for i in range(size))
    packed, encoding = wire.compress(body)
    assert (encoding is None) == (size <= wire.COMPRESS_ABOVE_BYTES)
    assert wire.decompress(packed, encoding) == body


@pytest.mark.parametrize(
    ("body", "encoding", "word"),
    [
        (b"x", "br", "encoding"),
        (b"not deflate", "deflate", "not valid deflate"),
        (zlib.compress(b"x" * 5000)[:-6], "deflate", "truncated"),
        (zlib.compress(b"\0" * (wire.MAX_BODY_BYTES + 1)), "deflate", "smaller batches"),
    ],
    ids=["unknown", "garbage", "truncated", "bomb"],
)
def test_bodies_that_do_not_inflate_are_refused(body: bytes, encoding: str, word: str) -> None:
    with pytest.raises(InputError, match=word):
        wire.decompress(body, encoding)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"node": ""}, "node"),
        ({"node": "a/b"}, "node"),
        ({"stream": ""}, "stream"),
        ({"sequence": 0}, "sequence"),
        ({"version": 99}, "version"),
        ({"sent": math.nan}, "sent"),
        ({"frames": [wire.Frame(1.0, ["n1"], ["a", "b"], b"12345678")]}, r"frames\[0\]\.values"),
        ({"frames": [wire.Frame(math.inf, [], [], b"")]}, r"frames\[0\]\.time"),
        ({"frames": [wire.pack_samples(1.0, [Sample("n2/gpu0", "a", 1.0)])]}, r"frames\[0\]\.devices"),
        ({"frames": [wire.pack_samples(1.0, [Sample("n11/gpu0", "a", 1.0)])]}, r"frames\[0\]\.devices"),
        ({"events": [Event("n1", "xid", "1", "info", "m")]}, r"events\[0\]\.time"),
        ({"events": [Event("n2", "xid", "1", "info", "m", time=1.0)]}, r"events\[0\]\.device"),
        ({"devices": [Device("gpu0", "gpu")]}, r"devices\[0\]\.device"),
    ],
)
def test_a_wrong_field_is_named(changes: dict[str, Any], field: str) -> None:
    with pytest.raises(InputError, match=field):
        wire.decode(wire.encode(batch(**changes)))


def test_fields_of_the_future_are_ignored_and_missing_ones_have_defaults() -> None:
    plain = msgspec.msgpack.decode(wire.encode(batch()))
    plain["a_new_field"] = {"x": 1}
    assert wire.decode(msgspec.msgpack.encode(plain)) == batch()
    small = {"node": "n1", "stream": "s", "sequence": 3}
    assert wire.decode(msgspec.msgpack.encode(small)).frames == []


@given(st.binary(max_size=400))
def test_garbage_is_refused_and_nothing_worse(body: bytes) -> None:
    try:
        wire.decode(body)
    except InputError:
        return
    raise AssertionError("random bytes were taken for a batch")


@given(st.data())
def test_a_damaged_batch_is_refused_or_still_a_batch(data: st.DataObject) -> None:
    body = bytearray(wire.encode(batch()))
    for _ in range(data.draw(st.integers(1, 4))):
        body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(body)))
    with contextlib.suppress(InputError):
        assert isinstance(wire.decode(bytes(body[:cut])), wire.Batch)


@pytest.mark.parametrize(("local", "full"), [("gpu3", "n1/gpu3"), ("", "n1")])
def test_full_ids(local: str, full: str) -> None:
    assert wire.full_id("n1", local) == full
