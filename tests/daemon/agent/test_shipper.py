"""In order, until acknowledged, whatever the service answers."""

from __future__ import annotations

import http.client
import json
import logging
from pathlib import Path

import pytest

from fakes_agent import FakeService, FakeTransport, wait_until
from forewarn.collectors.base import Event
from forewarn.collectors.clock import ManualClock
from forewarn.collectors.errors import ConfigError
from forewarn.daemon.agent.shipper import (
    BACKOFF_MAX_S,
    RETRY_REFUSED_TOKEN_S,
    HttpTransport,
    Response,
    Shipper,
    read_token,
    retry_after_s,
)
from forewarn.daemon.agent.spool import Parts, Spool


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def spool(tmp_path: Path, clock: ManualClock) -> Spool:
    return Spool(tmp_path / "s.db", "n1", clock, max_bytes=1 << 20)


def fill(spool: Spool, count: int = 1) -> None:
    for i in range(count):
        spool.append(Parts(events=[Event("n1", "oom", str(i), "error", "m", time=1.0)]))


def shipper(spool: Spool, transport: FakeTransport, clock: ManualClock) -> Shipper:
    return Shipper(spool, transport, clock, random_ratio=lambda: 1.0)


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records]


def test_ships_in_order_and_stops_when_empty(spool: Spool, clock: ManualClock) -> None:
    fill(spool, 3)
    transport = FakeTransport()
    s = shipper(spool, transport, clock)
    assert [s.step() for _ in range(4)] == [0.0, 0.0, 0.0, None]
    assert [b.sequence for b in transport.batches] == [1, 2, 3]
    assert s.sent == 3


def test_sent_is_the_clock_at_sending(spool: Spool, clock: ManualClock) -> None:
    fill(spool)
    clock.advance(500)
    transport = FakeTransport()
    shipper(spool, transport, clock).step()
    assert transport.batches[0].sent == clock.now()


def test_backs_off_with_jitter_and_sends_the_same_batch_again(
    spool: Spool, clock: ManualClock, caplog: pytest.LogCaptureFixture
) -> None:
    fill(spool)
    transport = FakeTransport(*[ConnectionRefusedError("no")] * 9, 200)
    s = shipper(spool, transport, clock)
    waits = []
    while spool.status.batches:
        wait_s = s.step()
        assert wait_s is not None
        waits.append(wait_s)
        clock.advance(wait_s)
    assert waits == [1, 2, 4, 8, 16, 32, 60, 60, 60, 0]
    assert max(waits) == BACKOFF_MAX_S
    assert {b.sequence for b in transport.batches} == {1}
    assert said(caplog).count("service_unreachable") == 1, "said once, not at each try"


def test_jitter_spreads_tries(spool: Spool, clock: ManualClock) -> None:
    fill(spool)
    waits = [
        Shipper(spool, FakeTransport(OSError("x")), clock, random_ratio=lambda r=r: r).step()  # type: ignore[misc]
        for r in (0.0, 0.5, 1.0)
    ]
    assert waits == [0.5, 0.75, 1.0]


@pytest.mark.parametrize("status", [429, 503])
def test_retry_after_is_honoured(spool: Spool, clock: ManualClock, status: int) -> None:
    fill(spool)
    transport = FakeTransport(Response(status, "30", b""), 200)
    s = shipper(spool, transport, clock)
    assert s.step() == pytest.approx(30, rel=0.11)
    s.wake(urgent=True)
    assert s.step() > 29, "not even for an urgent batch"  # type: ignore[operator]
    clock.advance(34)
    assert s.step() == 0.0
    assert len(transport.batches) == 2


def test_an_urgent_batch_tries_a_dead_connection_at_once(spool: Spool, clock: ManualClock) -> None:
    fill(spool)
    transport = FakeTransport(ConnectionRefusedError("no"), 200)
    s = shipper(spool, transport, clock)
    s.step()
    s.wake(urgent=True)
    assert s.step() == 1.0, "but once a second at most"
    s = shipper(spool, FakeTransport(*[ConnectionRefusedError("no")] * 5, 200), clock)
    for wait_s in (1, 2, 4, 8):
        assert s.step() == wait_s
        clock.advance(wait_s)
    assert s.step() == 16
    clock.advance(2)
    s.wake(urgent=True)
    assert s.step() == 0.0


@pytest.mark.parametrize("status", [401, 403])
def test_a_wrong_token_is_said_once_with_the_way_out_and_nothing_is_lost(
    spool: Spool, clock: ManualClock, caplog: pytest.LogCaptureFixture, status: int
) -> None:
    fill(spool, 2)
    s = shipper(spool, FakeTransport(status, status, status, 200), clock)
    for _ in range(3):
        wait_s = s.step()
        assert wait_s is not None and wait_s >= RETRY_REFUSED_TOKEN_S
        clock.advance(wait_s)
    assert spool.status.batches == 2
    [line] = [r for r in caplog.records if r.getMessage() == "token_refused"]
    assert "agent.token_file" in line.fields["remedy"]  # type: ignore[attr-defined]
    assert [s.step(), s.step(), s.step()] == [0.0, 0.0, None]


@pytest.mark.parametrize("status", [400, 413, 422])
def test_a_refused_batch_is_set_aside_and_the_next_goes_on(
    spool: Spool, clock: ManualClock, status: int
) -> None:
    fill(spool, 2)
    problem = Response(status, "", json.dumps({"title": "no", "detail": "frames[0].time: wrong"}).encode())
    transport = FakeTransport(problem, 200)
    s = shipper(spool, transport, clock)
    assert [s.step(), s.step(), s.step()] == [0.0, 0.0, None]
    assert [b.sequence for b in transport.batches] == [1, 2]
    assert spool.status.refused == 1


@pytest.mark.parametrize(
    "answer",
    [
        Response(200, "", b"<html>a captive portal</html>"),
        Response(200, "", b'{"stream": "another", "sequence": 1}'),
        Response(200, "", b'{"stream": "s", "sequence": "one"}'),
        Response(200, "", b""),
        Response(500, "", b"oops"),
        Response(502, "", b"\xff\xfe"),
        Response(404, "", b"nothing here"),
        Response(301, "", b""),
        http.client.BadStatusLine("x"),
        TimeoutError("slow"),
    ],
    ids=str,
)
def test_no_answer_but_the_right_one_empties_the_spool(
    spool: Spool, clock: ManualClock, answer: Response | BaseException
) -> None:
    fill(spool)
    s = shipper(spool, FakeTransport(answer, 200), clock)
    wait_s = s.step()
    assert wait_s is not None and wait_s > 0
    assert spool.status.batches == 1
    clock.advance(wait_s)
    assert s.step() == 0.0
    assert spool.status.batches == 0


def test_a_row_that_no_longer_decodes_does_not_hold_up_the_rest(spool: Spool, clock: ManualClock) -> None:
    fill(spool, 2)
    assert spool._db is not None
    spool._db.execute("UPDATE batches SET body = x'00ff' WHERE id = 1")
    transport = FakeTransport()
    s = shipper(spool, transport, clock)
    assert [s.step(), s.step(), s.step()] == [0.0, 0.0, None]
    assert [b.sequence for b in transport.batches] == [2]


@pytest.mark.parametrize(
    ("header", "seconds"),
    [
        ("", None),
        ("7", 7.0),
        ("0", 0.1),
        ("99999999", 600.0),
        ("-5", 0.1),
        ("nan", None),
        ("Thu, 01 Jan 1970 00:01:40 GMT", 40.0),
        ("soon", None),
    ],
)
def test_retry_after_in_every_form(header: str, seconds: float | None) -> None:
    assert retry_after_s(header, now=60.0) == seconds


@pytest.mark.parametrize("url", ["", "service:8420", "ftp://service", "http://", "http://host:notaport"])
def test_an_address_that_is_none_is_an_error_that_names_the_setting(url: str) -> None:
    with pytest.raises(ConfigError, match=r"agent\.service_url"):
        HttpTransport(url, lambda: "")


def test_a_missing_ca_file_names_the_setting(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"agent\.ca_file"):
        HttpTransport("https://service", lambda: "", ca_file=str(tmp_path / "none.pem"))


def test_a_rotated_token_needs_no_restart(tmp_path: Path) -> None:
    file = tmp_path / "token"
    token = read_token("", str(file))
    assert token() == ""
    file.write_text("one\n")
    assert token() == "one"
    file.write_text("two\n")
    assert token() == "two"
    assert read_token("from the environment", str(file))() == "from the environment"


def test_over_real_http_a_lost_answer_is_sent_again_and_applied_once(
    spool: Spool, clock: ManualClock
) -> None:
    service = FakeService(token="secret")
    try:
        fill(spool, 3)
        service.lose_answers = 2
        transport = HttpTransport(service.url, lambda: "secret")
        s = Shipper(spool, transport, clock, random_ratio=lambda: 0.0)
        while (wait_s := s.step()) is not None:
            clock.advance(wait_s)
        assert sorted(sequence for _, sequence in service.applied) == [1, 2, 3]
        assert service.duplicates >= 1
        transport.close()
    finally:
        service.close()


def test_the_thread_ships_when_woken_and_ends_when_told(spool: Spool, clock: ManualClock) -> None:
    transport = FakeTransport()
    s = shipper(spool, transport, clock)
    s.start()
    fill(spool)
    s.wake()
    assert wait_until(lambda: spool.status.batches == 0)
    fill(spool)
    s.stop(5.0)
    assert spool.status.batches == 0, "what waits at the end is shipped"
    assert s._thread is not None and not s._thread.is_alive()


def test_a_failure_inside_shipping_does_not_end_it(
    spool: Spool, clock: ManualClock, caplog: pytest.LogCaptureFixture
) -> None:
    fill(spool)
    s = shipper(spool, FakeTransport(ValueError("a bug"), 200), clock)
    with caplog.at_level(logging.ERROR):
        s.start()
        assert wait_until(lambda: "shipping_failed" in said(caplog))
    s.wake()
    assert wait_until(lambda: spool.status.batches == 0)
    s.stop(5.0)
