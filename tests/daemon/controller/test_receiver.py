from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from forewarn.collectors.errors import ConfigError
from forewarn.daemon.controller.mailbox import Mailbox
from forewarn.daemon.controller.messages import MAX_BODY_BYTES, Verifier
from forewarn.daemon.controller.receiver import Receiver, make_app


@pytest.fixture
def receiver(mailbox: Mailbox, secret: str) -> Iterator[Receiver]:
    served = Receiver(make_app(mailbox, Verifier([secret]), "llm"), "127.0.0.1", 0)
    served.start()
    yield served
    served.stop()


@pytest.fixture
def client(receiver: Receiver) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=f"http://127.0.0.1:{receiver.port}", trust_env=False) as made:
        yield made


def post(client: httpx.Client, message: tuple[bytes, dict[str, str]]) -> httpx.Response:
    return client.post("/webhook", content=message[0], headers=message[1])


def test_signed_webhook_is_accepted_once(client: httpx.Client, mailbox: Mailbox, sign: Any) -> None:
    first = post(client, sign())
    again = post(client, sign())
    assert (first.status_code, first.json()) == (202, {"decision": "accepted", "protection": "p1"})
    assert (again.status_code, again.json()) == (202, first.json())
    assert [r.protection for r in mailbox.open_requests()] == ["p1"]
    assert len(mailbox.undelivered()) == 1


def test_another_jobs_webhook_is_declined(client: httpx.Client, mailbox: Mailbox, sign: Any) -> None:
    answer = post(client, sign({"protection": "p1", "job": "other"})).json()
    assert answer["decision"] == "declined" and "'other'" in answer["reason"]
    assert mailbox.open_requests() == []


def test_bad_requests_get_problem_documents_and_leave_no_trace(
    client: httpx.Client, mailbox: Mailbox, sign: Any, old_secret: str
) -> None:
    cases = [
        (post(client, sign(secret=old_secret)), 401),
        (post(client, sign(age_s=400)), 401),
        (client.post("/webhook", content=b"{}"), 401),
        (post(client, sign(body=b"not json")), 422),
        (post(client, sign({"protection": "p1", "action": "explode"})), 422),
        (client.post("/webhook", content=b"x" * (MAX_BODY_BYTES + 1)), 413),
        (client.get("/webhook"), 405),
        (client.get("/elsewhere"), 404),
    ]
    for answer, status in cases:
        assert answer.status_code == status
        assert answer.headers["content-type"] == "application/problem+json"
        assert answer.json()["status"] == status and answer.json()["detail"]
    assert mailbox.counts() == {"requests": {}, "acknowledgements": {}}


def test_health_counts_what_is_open(client: httpx.Client, sign: Any) -> None:
    post(client, sign())
    assert client.get("/healthz").json() == {
        "status": "ok",
        "job": "llm",
        "requests": {"waiting": 1},
        "acknowledgements": {"waiting": 1},
    }


def test_sender_that_stops_in_the_middle_is_cut_off(
    receiver: Receiver, client: httpx.Client, sign: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("forewarn.daemon.controller.receiver.BODY_TIMEOUT_S", 0.05)
    with socket.create_connection(("127.0.0.1", receiver.port), timeout=10) as slow:
        slow.sendall(b"POST /webhook HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\nhalf")
        assert slow.recv(4096).startswith(b"HTTP/1.1 408")
    assert post(client, sign()).status_code == 202


def test_state_that_cannot_be_written_is_a_503_to_be_tried_again(
    client: httpx.Client, mailbox: Mailbox, sign: Any
) -> None:
    mailbox.close()
    answer = post(client, sign())
    assert answer.status_code == 503
    assert "controller.db" in answer.json()["detail"]
    assert client.get("/healthz").status_code == 503


def test_taken_port_names_the_setting(receiver: Receiver, mailbox: Mailbox, secret: str) -> None:
    with pytest.raises(ConfigError, match=r"controller\.listen.*choose another port"):
        Receiver(make_app(mailbox, Verifier([secret])), "127.0.0.1", receiver.port)
