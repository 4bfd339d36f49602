"""The outbox: when it tries again and when not, who waits for whom, and where webhooks may go."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
from standardwebhooks import Webhook

from forewarn.collectors.clock import ManualClock
from forewarn.collectors.errors import ConfigError, InputError
from forewarn.daemon.service import outbox, schema
from forewarn.daemon.service.database import Database, open_database
from forewarn.daemon.service.outbox import Outbox, outcome_of, signed_headers
from forewarn.daemon.service.targets import TargetPolicy
from service_bench import eventually

SECRET = "whsec_" + base64.b64encode(b"a secret of thirty-two bytes, ok").decode()
NEW_SECRET = "whsec_" + base64.b64encode(b"and the one that follows after it").decode()


class Desk:
    """An outbox on a manual clock; `step` does what its thread does, once."""

    def __init__(self, folder: Path, answer: Callable[[httpx.Request], httpx.Response]) -> None:
        self.clock = ManualClock(1_700_000_000.0)
        self.database: Database = open_database(folder)
        self.seen: list[httpx.Request] = []
        self.dead: list[tuple[str, str]] = []

        def handle(request: httpx.Request) -> httpx.Response:
            self.seen.append(request)
            return answer(request)

        self.transport = httpx.MockTransport(handle)
        self.outbox = Outbox(
            self.database,
            self.clock,
            TargetPolicy(["127.0.0.0/8"], allow_insecure=True),
            on_dead=lambda p, r: self.dead.append((p, r)),
            random_ratio=lambda: 0.5,
        )

    def put(
        self, name: str = "1", *, url: str = "http://127.0.0.1:9/hook", deadline_s: float = 120.0
    ) -> None:
        now = self.clock.now()
        with self.database.write() as run:
            self.database.insert_new(
                run,
                schema.jobs,
                [
                    {
                        "job": f"job{name}",
                        "nodes": [],
                        "devices": [],
                        "webhook_url": url,
                        "webhook_secrets": [SECRET],
                        "checkpoint_seconds": 1.0,
                        "restart_seconds": 1.0,
                        "created": now,
                        "updated": now,
                    }
                ],
            )
            outbox.insert(
                run,
                identity=f"msg_{name}",
                protection=f"prot_{name}",
                job=f"job{name}",
                url=url,
                body={"n": name},
                now=now,
                deadline=now + deadline_s,
            )

    async def _send_due(self) -> int:
        due, _ = self.outbox.claim(10)
        async with httpx.AsyncClient(transport=self.transport) as client:
            for item in due:
                await self.outbox._deliver(client, item)
        return len(due)

    def step(self) -> int:
        import asyncio

        return asyncio.run(self._send_due())

    def row(self, name: str = "1") -> dict[str, object]:
        with self.database.read() as run:
            found = (
                run.execute(schema.deliveries.select().where(schema.deliveries.c.id == f"msg_{name}"))
                .mappings()
                .one()
            )
            return dict(found)


@pytest.fixture
def desk_of(tmp_path: Path) -> Iterator[Callable[[Callable[[httpx.Request], httpx.Response]], Desk]]:
    made: list[Desk] = []

    def make(answer: Callable[[httpx.Request], httpx.Response]) -> Desk:
        made.append(Desk(tmp_path, answer))
        return made[-1]

    yield make
    for desk in made:
        desk.database.close()


DeskMaker = Callable[[Callable[[httpx.Request], httpx.Response]], Desk]


def test_it_tries_on_its_schedule_until_the_deadline_and_never_after(desk_of: DeskMaker) -> None:
    desk = desk_of(lambda request: httpx.Response(500))
    desk.put(deadline_s=70.0)
    times = []
    while desk.row()["state"] == "waiting":
        if desk.step():
            times.append(desk.clock.now() - 1_700_000_000.0)
            desk.outbox._breakers.clear()  # seen by itself below
        desk.clock.advance(0.5)
    assert times == [0.0, 1.0, 3.0, 7.0, 15.0, 30.0, 60.0]
    assert desk.row()["state"] == "dead"
    assert desk.dead == [("prot_1", "answered 500")]
    assert len({r.headers["webhook-id"] for r in desk.seen}) == 1


def test_success_ends_it(desk_of: DeskMaker) -> None:
    desk = desk_of(lambda request: httpx.Response(202))
    desk.put()
    assert (desk.step(), desk.step()) == (1, 0)
    row = desk.row()
    assert (row["state"], row["attempts"], row["last_status"]) == ("delivered", 1, 202)


@pytest.mark.parametrize(
    ("status", "headers", "final", "retry_after_s"),
    [
        (200, {}, False, None),
        (410, {}, True, None),
        (302, {"location": "http://169.254.169.254/"}, True, None),
        (429, {"retry-after": "7"}, False, 7.0),
        (503, {"retry-after": "Tue, 14 Nov 2023 22:13:30 GMT"}, False, 10.0),
        (503, {"retry-after": "soon"}, False, None),
        (503, {"retry-after": "1e9"}, False, 60.0),
    ],
)
def test_what_answers_mean(
    status: int, headers: dict[str, str], final: bool, retry_after_s: float | None
) -> None:
    outcome = outcome_of(httpx.Response(status, headers=headers), 1_700_000_000.0)
    assert (outcome.ok, outcome.final, outcome.retry_after_s) == (status == 200, final, retry_after_s)


def test_gone_disables_the_webhook_of_the_job(desk_of: DeskMaker) -> None:
    desk = desk_of(lambda request: httpx.Response(410))
    desk.put()
    desk.step()
    assert desk.row()["state"] == "dead"
    with desk.database.read() as run:
        assert "410" in run.execute(schema.jobs.select()).mappings().one()["webhook_disabled"]


def test_retry_after_is_honoured(desk_of: DeskMaker) -> None:
    answers = [httpx.Response(429, headers={"retry-after": "20"}), httpx.Response(200)]
    desk = desk_of(lambda request: answers.pop(0))
    desk.put()
    desk.step()
    desk.clock.advance(19.0)
    assert desk.step() == 0
    desk.clock.advance(1.5)
    assert desk.step() == 1
    assert desk.row()["state"] == "delivered"


def test_nobody_else_sends_what_is_claimed(desk_of: DeskMaker) -> None:
    desk = desk_of(lambda request: httpx.Response(200))
    desk.put()
    first, _ = desk.outbox.claim(10)
    assert [d.id for d in first] == ["msg_1"]
    assert desk.outbox.claim(10)[0] == []
    # The worker died: its claim runs out, and the next one sends under the same id.
    desk.clock.advance(outbox.CLAIM_S + 1)
    assert [d.id for d in desk.outbox.claim(10)[0]] == ["msg_1"]


def test_a_dead_endpoint_is_left_alone_and_delays_no_other(desk_of: DeskMaker) -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/dead":
            raise httpx.ConnectError("refused")
        return httpx.Response(200)

    desk = desk_of(answer)
    for i in range(outbox.BREAK_AFTER):
        desk.put(f"d{i}", url="http://127.0.0.1:9/dead")
    desk.step()
    tried = len(desk.seen)
    assert tried == outbox.BREAK_AFTER
    desk.clock.advance(2.0)
    desk.put("good", url="http://127.0.0.1:9/good")
    desk.step()
    assert [r.url.path for r in desk.seen[tried:]] == ["/good"]
    assert desk.row("good")["state"] == "delivered"
    desk.clock.advance(outbox.BREAK_S)
    desk.step()
    assert len(desk.seen) > tried + 1


def test_a_dead_delivery_is_sent_again_by_hand(desk_of: DeskMaker) -> None:
    answers = [httpx.Response(410), httpx.Response(200)]
    desk = desk_of(lambda request: answers.pop(0))
    desk.put()
    desk.step()
    with desk.database.write() as run:
        assert outbox.retry(run, "msg_1", desk.clock.now(), desk.clock.now() + 60)
    desk.step()
    assert desk.row()["state"] == "delivered"
    with desk.database.write() as run:
        assert not outbox.retry(run, "msg_1", desk.clock.now(), desk.clock.now() + 60)


def test_while_keys_rotate_both_signatures_hold() -> None:
    import time

    body = json.dumps({"a": 1})
    headers = signed_headers("msg_1", time.time(), body, [NEW_SECRET, SECRET])
    for secret in (NEW_SECRET, SECRET):
        assert Webhook(secret).verify(body, headers) == {"a": 1}


def test_the_worker_sends_by_itself(tmp_path: Path) -> None:
    desk = Desk(tmp_path, lambda request: httpx.Response(200))
    worker = Outbox(
        desk.database, desk.clock, TargetPolicy(["127.0.0.1"], allow_insecure=True), transport=desk.transport
    )
    worker.start()
    try:
        desk.put()
        worker.wake()
        eventually(lambda: desk.row()["state"] == "delivered")
    finally:
        worker.stop()
        desk.database.close()


# Where webhooks may go -----------------------------------------------------------------------------------------------


def resolver(*addresses: str) -> Callable[[str, int], list[str]]:
    return lambda host, port: list(addresses)


def test_the_address_is_pinned_and_the_name_kept() -> None:
    target = TargetPolicy(resolver=resolver("8.8.8.8")).resolve("https://hooks.example.com:8443/a?b=c")
    assert target.pinned_url == "https://8.8.8.8:8443/a?b=c"
    assert (target.host, target.host_header) == ("hooks.example.com", "hooks.example.com:8443")


@pytest.mark.parametrize(
    "url",
    [
        "http://hooks.example.com/",
        "ftp://hooks.example.com/",
        "https://127.0.0.1/",
        "https://[::1]/",
        "https://[::ffff:127.0.0.1]/",
        "https://169.254.169.254/latest/meta-data",
        "https://10.1.2.3/",
        "https://0.0.0.0/",
        "https://user:secret@example.com/",
        "https:///nohost",
        "not a url",
        "https://example.com:99999/",
        "https://" + "a" * 3000,
    ],
)
def test_what_is_refused_without_resolving(url: str) -> None:
    with pytest.raises(InputError, match=r"webhook\.url"):
        TargetPolicy().check(url)


@pytest.mark.parametrize("address", ["127.0.0.1", "169.254.169.254", "10.0.0.1", "::1", "fe80::1", "fd00::1"])
def test_a_name_that_leads_inside_is_refused(address: str) -> None:
    with pytest.raises(InputError, match="allow_webhook_hosts"):
        TargetPolicy(resolver=resolver(address)).resolve("https://innocent.example.com/")


def test_what_the_operator_lists_is_allowed() -> None:
    policy = TargetPolicy(
        ["10.0.0.0/8", "hooks.internal"], allow_insecure=True, resolver=resolver("10.0.0.7")
    )
    assert policy.resolve("http://10.0.0.7/x").pinned_url == "http://10.0.0.7:80/x"
    assert policy.resolve("http://anything.internal/x").pinned_url == "http://10.0.0.7:80/x"
    listed = TargetPolicy(["hooks.internal"], allow_insecure=True, resolver=resolver("192.168.0.9"))
    assert listed.resolve("http://hooks.internal/").pinned_url == "http://192.168.0.9:80/"
    with pytest.raises(InputError):
        listed.resolve("http://elsewhere.example.com/")
    # A listed name that is bound to the metadata service is still not enough.
    with pytest.raises(InputError):
        TargetPolicy(["hooks.internal"], resolver=resolver("169.254.169.254")).resolve(
            "https://hooks.internal/"
        )


def test_a_wrong_entry_in_the_list_is_named() -> None:
    with pytest.raises(ConfigError, match="allow_webhook_hosts"):
        TargetPolicy(["https://hooks.example.com/x"])
