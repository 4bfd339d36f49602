from __future__ import annotations

import json
from collections.abc import Callable, Iterator

import httpx
import pytest

from forewarn.daemon.controller.link import Messenger, RefusedError, ServiceClient
from forewarn.daemon.controller.mailbox import Mailbox, Outcome
from forewarn.daemon.controller.messages import SaveRequest


class Service:
    """Stands in for the service: notes what it is told and answers as the test wants."""

    def __init__(self) -> None:
        self.heard: list[tuple[str, str, object]] = []
        self.answer: Callable[[httpx.Request], httpx.Response] = lambda request: httpx.Response(200, json={})

    def __call__(self, request: httpx.Request) -> httpx.Response:
        answer = self.answer(request)
        if answer.is_success:
            body = json.loads(request.content) if request.content else dict(request.url.params)
            self.heard.append((request.method, request.url.path, body))
        return answer

    def client(self) -> ServiceClient:
        return ServiceClient("http://service", "secret-token", httpx.MockTransport(self))


@pytest.fixture
def service() -> Service:
    return Service()


@pytest.fixture
def messenger(mailbox: Mailbox, service: Service) -> Iterator[Messenger]:
    made = Messenger(mailbox, service.client(), job="llm")
    yield made
    made.stop()


def test_acknowledgements_arrive_in_order_and_once(
    messenger: Messenger, mailbox: Mailbox, service: Service
) -> None:
    mailbox.accept("m1", SaveRequest(protection="p1"))
    mailbox.finish(["p1"], Outcome(state="completed", checkpoint="c", step=2, duration_seconds=0.5))
    assert messenger.round() and messenger.round()
    assert service.heard == [
        ("POST", "/v1/protections/p1/ack", {"state": "accepted"}),
        (
            "POST",
            "/v1/protections/p1/ack",
            {"state": "completed", "checkpoint": "c", "step": 2, "duration_seconds": 0.5},
        ),
    ]


def unreachable(_request: httpx.Request) -> httpx.Response:
    raise httpx.ConnectError("connection refused")


@pytest.mark.parametrize(
    "trouble",
    [
        unreachable,
        lambda _: httpx.Response(500),
        lambda _: httpx.Response(401, json={"detail": "unknown token"}),
        lambda _: httpx.Response(429),
        lambda _: httpx.Response(200, content=b"<html>a proxy"),
    ],
    ids=["down", "500", "wrong token", "throttled", "not json"],
)
def test_what_cannot_be_delivered_waits_over_restarts(
    messenger: Messenger,
    mailbox: Mailbox,
    service: Service,
    trouble: Callable[[httpx.Request], httpx.Response],
) -> None:
    service.answer = trouble
    mailbox.accept("m1", SaveRequest(protection="p1"))
    assert not messenger.round()
    assert [m.attempts for m in mailbox.undelivered()] == [1]
    service.heard.clear()
    service.answer = lambda _: httpx.Response(200, json={})
    later = Mailbox(mailbox.folder)
    assert Messenger(later, service.client()).round()
    assert [body for _, _, body in service.heard] == [{"state": "accepted"}]
    assert later.undelivered() == []
    later.close()


def test_refused_acknowledgement_does_not_hold_up_the_next(
    messenger: Messenger, mailbox: Mailbox, service: Service
) -> None:
    mailbox.accept("m1", SaveRequest(protection="gone"))
    mailbox.accept("m2", SaveRequest(protection="p2"))
    service.answer = lambda request: httpx.Response(404 if "gone" in request.url.path else 200)
    assert messenger.round()
    assert [path for _, path, _ in service.heard] == ["/v1/protections/p2/ack"]
    assert mailbox.counts()["acknowledgements"] == {"delivered": 1, "refused": 1}


def test_short_trouble_is_bridged_within_one_round(
    messenger: Messenger, mailbox: Mailbox, service: Service
) -> None:
    answers = [httpx.Response(503), httpx.Response(200)]
    service.answer = lambda _: answers.pop(0)
    mailbox.accept("m1", SaveRequest(protection="p1"))
    assert messenger.round()
    assert mailbox.undelivered() == []


def test_job_is_registered_before_anything_else_is_said(mailbox: Mailbox, service: Service) -> None:
    mailbox.accept("m1", SaveRequest(protection="p1"))
    messenger = Messenger(mailbox, service.client(), job="llm", registration={"nodes": ["n1"]})
    service.answer = unreachable
    assert not messenger.round()
    service.answer = lambda _: httpx.Response(200)
    assert messenger.round() and messenger.round()
    assert [(method, path) for method, path, _ in service.heard] == [
        ("PUT", "/v1/jobs/llm"),
        ("POST", "/v1/protections/p1/ack"),
    ]


def test_saves_of_the_loop_itself_are_registered_too(mailbox: Mailbox, service: Service) -> None:
    messenger = Messenger(mailbox, service.client(), job="llm", registration={"nodes": ["n1"]})
    messenger.round()
    mailbox.note_checkpoint(1_796_130_000.0, 10, "c")
    assert messenger.round() and messenger.round()
    assert [body for _, _, body in service.heard] == [
        {"nodes": ["n1"]},
        {"nodes": ["n1"], "last_checkpoint": "2026-12-01T13:00:00+00:00"},
    ]


def test_polling_finds_what_no_webhook_could_bring(mailbox: Mailbox, service: Service) -> None:
    items = [{"id": "p5", "job": "llm", "state": "open"}, {"state": "open"}, "noise"]
    service.answer = lambda request: httpx.Response(200, json={"items": items})
    messenger = Messenger(mailbox, service.client(), job="llm", poll_interval_s=1)
    assert messenger.round()
    assert ("GET", "/v1/protections", {"job": "llm", "state": "open"}) in service.heard
    assert [r.protection for r in mailbox.open_requests()] == ["p5"]


def test_token_is_sent_and_refusals_carry_the_services_words() -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        assert request.headers["authorization"] == "Bearer secret-token"
        return httpx.Response(409, json={"detail": "it was closed"})

    client = ServiceClient("http://service/", "secret-token", httpx.MockTransport(answer))
    with pytest.raises(
        RefusedError, match=r"http://service/v1/protections/p/ack answered 409: it was closed"
    ):
        client.acknowledge("p", {"state": "accepted"})
    client.close()


def test_messenger_ends_with_a_last_pass(mailbox: Mailbox, service: Service) -> None:
    messenger = Messenger(mailbox, service.client(), interval_s=3600)
    messenger.start()
    mailbox.accept("m1", SaveRequest(protection="p1"))
    messenger.stop()
    assert [path for _, path, _ in service.heard] == ["/v1/protections/p1/ack"]
