from __future__ import annotations

import json
from typing import Any

import pytest

from forewarn.collectors.errors import ConfigError, InputError
from forewarn.daemon.controller.messages import SignatureError, Verifier, parse, request_of


def test_signature_of_either_secret_holds_while_keys_rotate(sign: Any, secret: str, old_secret: str) -> None:
    verifier = Verifier([secret, old_secret])
    for key in (secret, old_secret):
        body, headers = sign(secret=key, identity="msg_7")
        assert verifier.verify(body, headers) == "msg_7"


def test_one_of_several_signatures_is_enough(sign: Any, secret: str, old_secret: str) -> None:
    body, headers = sign()
    _, other = sign(secret=old_secret)
    headers["webhook-signature"] = f"v1a,AAAA {other['webhook-signature']} {headers['webhook-signature']}"
    assert Verifier([secret]).verify(body, headers) == "msg_1"


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"webhook-signature": "v1,AAAA"}, "No matching signature"),
        ({"webhook-signature": "nonsense"}, "no signature matches"),
        ({"webhook-signature": "v1,%%%"}, "signature"),
        ({"webhook-signature": ""}, "Missing required headers"),
        ({"webhook-id": "another"}, "No matching signature"),
        ({"webhook-id": ""}, "Missing required headers"),
        ({"webhook-timestamp": "yesterday"}, "Invalid Signature Headers"),
        ({"webhook-timestamp": "nan"}, "Invalid Signature Headers"),
        ({"webhook-timestamp": "1e300"}, "Invalid Signature Headers"),
    ],
)
def test_tampered_headers_are_refused(sign: Any, secret: str, change: dict[str, str], why: str) -> None:
    body, headers = sign()
    with pytest.raises(SignatureError, match=why):
        Verifier([secret]).verify(body, headers | change)


def test_changed_body_and_foreign_secret_are_refused(sign: Any, secret: str, old_secret: str) -> None:
    body, headers = sign()
    with pytest.raises(SignatureError):
        Verifier([secret]).verify(body + b" ", headers)
    with pytest.raises(SignatureError):
        Verifier([old_secret]).verify(body, headers)


@pytest.mark.parametrize(("age_s", "why"), [(310, "too old"), (-310, "too new")])
def test_timestamps_far_from_our_clock_are_refused(sign: Any, secret: str, age_s: float, why: str) -> None:
    body, headers = sign(age_s=age_s)
    with pytest.raises(SignatureError, match=why):
        Verifier([secret]).verify(body, headers)


def test_overlong_id_is_refused(sign: Any, secret: str) -> None:
    body, headers = sign(identity="x" * 300)
    with pytest.raises(SignatureError, match="longer than"):
        Verifier([secret]).verify(body, headers)


@pytest.mark.parametrize("secrets", [[], [""], ["whsec_"]])
def test_no_usable_secret_is_a_setting_to_mend(secrets: list[str]) -> None:
    with pytest.raises(ConfigError, match=r"controller\.secret_file"):
        Verifier(secrets)


def test_everything_asked_is_read() -> None:
    body = json.dumps(
        {
            "id": "evt",
            "data": {
                "protection": "p9",
                "job": "llm",
                "action": "checkpoint_and_drain",
                "devices": [{"device": "n1/gpu3"}],
                "risk": {"900": 0.4, "3600": 0.9},
                "deadline": "2026-12-01T13:00:00Z",
                "reasons": [{"text": "rows remapped"}, "Xid 63"],
            },
        }
    ).encode()
    asked = parse(body)
    assert (asked.protection, asked.job, asked.action, asked.device) == (
        "p9",
        "llm",
        "checkpoint_and_drain",
        "n1/gpu3",
    )
    assert asked.risk == 0.9
    assert asked.deadline == 1796130000.0
    assert asked.reasons == ["rows remapped", "Xid 63"]


@pytest.mark.parametrize(
    ("body", "names"),
    [
        (b"\xff\xfe", "not JSON"),
        (b"[]", "JSON object"),
        (b"{}", "data"),
        (b"[" * 5000, "not JSON"),
        (b'{"data": {}}', "protection"),
        (b'{"data": {"protection": true}}', "protection"),
        (b'{"data": {"protection": "p", "action": "explode"}}', "action"),
        (b'{"data": {"protection": "p", "job": 3}}', "job"),
        (b'{"data": {"protection": "p", "deadline": "soon"}}', "deadline"),
        (b'{"data": {"protection": "p", "deadline": []}}', "deadline"),
    ],
)
def test_bad_bodies_name_the_field(body: bytes, names: str) -> None:
    with pytest.raises(InputError, match=names):
        parse(body)


def test_item_of_the_protection_list_is_a_request_too() -> None:
    asked = request_of({"id": "p3", "job": "llm", "state": "open", "device": "n/gpu0", "risk": 0.5})
    assert (asked.protection, asked.device, asked.risk, asked.action) == ("p3", "n/gpu0", 0.5, "checkpoint")
