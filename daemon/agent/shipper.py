"""Sends what the spool holds to the service, in order, until it is acknowledged; the transport does the talking.

Nothing leaves the spool without an answer that names it. A service that is away, busy or unwilling costs time,
never data.
"""

from __future__ import annotations

import http.client
import logging
import math
import random
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol
from urllib.parse import urlsplit

import msgspec

from forewarn.collectors.clock import Clock
from forewarn.collectors.errors import ConfigError
from forewarn.daemon import wire
from forewarn.daemon.agent.logs import log
from forewarn.daemon.agent.spool import Item, Spool

if TYPE_CHECKING:
    import ssl

INGEST_PATH = "/v1/ingest"
TIMEOUT_S = 10.0
BACKOFF_FIRST_S = 1.0
BACKOFF_MAX_S = 60.0
RETRY_REFUSED_TOKEN_S = 60.0
RETRY_AFTER_MAX_S = 600.0
MAX_ANSWER_BYTES = 65536

REFUSED = frozenset({400, 413, 422})
"""The service read the batch and will never take it."""
UNWELCOME = frozenset({401, 403})


@dataclass(frozen=True)
class Response:
    """An HTTP answer: status, the Retry-After header (empty: none), the body."""

    status: int
    retry_after: str
    body: bytes


class Transport(Protocol):
    """Posts one body. Raises OSError or HTTPException when no answer came."""

    def post(self, body: bytes, encoding: str | None) -> Response: ...

    def close(self) -> None: ...


class HttpTransport:
    """One connection that is kept, made anew when the other side closed it. https is verified, always."""

    def __init__(
        self, url: str, token: Callable[[], str], *, ca_file: str = "", timeout_s: float = TIMEOUT_S
    ) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"agent.service_url: {url!r} must be http://HOST:PORT or https://HOST:PORT")
        try:
            self._port = parts.port
        except ValueError as error:
            raise ConfigError(f"agent.service_url: {url!r}: {error}") from error
        self._host, self._secure = parts.hostname, parts.scheme == "https"
        self._path = parts.path.rstrip("/") + INGEST_PATH
        self._token, self._timeout_s = token, timeout_s
        self._context = _tls_context(ca_file) if self._secure else None
        self._connection: http.client.HTTPConnection | None = None

    def post(self, body: bytes, encoding: str | None) -> Response:
        headers = {"Content-Type": wire.CONTENT_TYPE, "Accept": "application/json"}
        if encoding:
            headers["Content-Encoding"] = encoding
        if token := self._token():
            headers["Authorization"] = f"Bearer {token}"
        kept = self._connection is not None
        try:
            return self._exchange(body, headers)
        except (ConnectionError, http.client.RemoteDisconnected):
            # A kept connection that the other side closed meanwhile says nothing about the service.
            if not kept:
                raise
            return self._exchange(body, headers)

    def _exchange(self, body: bytes, headers: dict[str, str]) -> Response:
        if self._connection is None:
            self._connection = (
                http.client.HTTPSConnection(
                    self._host, self._port, timeout=self._timeout_s, context=self._context
                )
                if self._secure
                else http.client.HTTPConnection(self._host, self._port, timeout=self._timeout_s)
            )
        try:
            self._connection.request("POST", self._path, body, headers)
            answer = self._connection.getresponse()
            text = answer.read(MAX_ANSWER_BYTES)
            if answer.will_close or not answer.isclosed():
                self.close()
            return Response(answer.status, answer.headers.get("Retry-After", ""), text)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None


def _tls_context(ca_file: str) -> ssl.SSLContext:
    import ssl  # costs megabytes; only who uses https pays them

    try:
        return ssl.create_default_context(cafile=ca_file or None)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"agent.ca_file: {ca_file}: cannot be used: {error}") from error


class Shipper:
    """Ships batch after batch. `step` sends at most one and gives the seconds to wait before the next step."""

    def __init__(
        self,
        spool: Spool,
        transport: Transport,
        clock: Clock,
        *,
        url: str = "",
        random_ratio: Callable[[], float] = random.random,
    ) -> None:
        self._spool, self._transport, self._clock, self._url = spool, transport, clock, url
        self._random = random_ratio
        self._not_before = 0.0
        self._may_hurry = True
        self._attempts = 0
        self._last_try = -math.inf
        self._said = ""
        self.sent = 0
        self.last_ok: float | None = None
        self._wake = threading.Event()
        self._stopping = False
        self._thread: threading.Thread | None = None

    def step(self) -> float | None:
        """Send the oldest batch if it may be sent now. None: nothing waits; otherwise seconds until the next try."""
        now = self._clock.monotonic()
        if now < self._not_before:
            return self._not_before - now
        item = self._spool.peek()
        if item is None:
            return None
        self._last_try = now
        try:
            batch = msgspec.structs.replace(wire.decode(item.body), sent=self._clock.now())
        except Exception as error:  # a row that no longer decodes must not hold up all behind it
            log(logging.ERROR, "batch_unreadable", sequence=item.sequence, reason=str(error))
            self._spool.quarantine(item, f"unreadable: {error}")
            return 0.0
        body, encoding = wire.compress(wire.encode(batch))
        try:
            response = self._transport.post(body, encoding)
        except (OSError, http.client.HTTPException) as error:
            return self._retry("service_unreachable", f"{type(error).__name__}: {error}")
        return self._judge(item, response)

    def _judge(self, item: Item, response: Response) -> float:
        status = response.status
        if 200 <= status < 300:
            return self._accept(item, response)
        reason = f"HTTP {status}: {_problem(response.body)}"
        if status in UNWELCOME:
            remedy = "put a token of this node (forewarn token) into agent.token_file or FOREWARN_AGENT_TOKEN"
            return self._pause("token_refused", reason, RETRY_REFUSED_TOKEN_S, remedy)
        if status in REFUSED:
            log(
                logging.ERROR,
                "batch_refused",
                sequence=item.sequence,
                reason=reason,
                remedy="it is kept in the quarantine table of the spool; the next one goes on",
            )
            self._spool.quarantine(item, reason)
            return 0.0
        wait_s = retry_after_s(response.retry_after, self._clock.now())
        if wait_s is not None:
            return self._pause("service_busy", reason, wait_s, "")
        if 300 <= status < 500 and status not in (408, 425, 429):
            remedy = "no Forewarn service answers there: look at agent.service_url"
            return self._pause("service_wrong", reason, RETRY_REFUSED_TOKEN_S, remedy)
        return self._retry("service_busy", reason)

    def _accept(self, item: Item, response: Response) -> float:
        try:
            answer = msgspec.json.decode(response.body, type=wire.Answer)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            return self._retry("answer_unreadable", f"{error}; is agent.service_url right?")
        if answer.stream != item.stream or answer.sequence < item.sequence:
            return self._retry(
                "answer_unexpected",
                f"sent {item.stream}/{item.sequence}, told of {answer.stream}/{answer.sequence}",
            )
        self._spool.acknowledge(item)
        self.sent += 1
        self.last_ok = self._clock.monotonic()
        self._attempts, self._not_before, self._may_hurry = 0, 0.0, True
        if self._said:
            log(logging.INFO, "service_answers", url=self._url)
            self._said = ""
        return 0.0

    def _retry(self, event: str, reason: str) -> float:
        """Exponential, with jitter so that thousands of agents do not come back in the same second."""
        ceiling = min(BACKOFF_MAX_S, BACKOFF_FIRST_S * 2 ** min(self._attempts, 16))
        self._attempts += 1
        return self._wait(event, reason, ceiling * (0.5 + self._random() / 2), "", True)

    def _pause(self, event: str, reason: str, seconds: float, remedy: str) -> float:
        return self._wait(event, reason, seconds * (1 + self._random() / 10), remedy, False)

    def _wait(self, event: str, reason: str, seconds: float, remedy: str, may_hurry: bool) -> float:
        self._not_before = self._clock.monotonic() + seconds
        self._may_hurry = may_hurry
        if event != self._said:
            self._said = event
            log(
                logging.WARNING,
                event,
                url=self._url,
                reason=reason,
                retry_s=round(seconds, 1),
                waiting=self._spool.status.batches,
                remedy=remedy,
            )
        return seconds

    # The thread

    def start(self) -> None:
        """Ship from a thread of its own until `stop`."""
        self._thread = threading.Thread(target=self._run, name="ship", daemon=True)
        self._thread.start()

    def wake(self, *, urgent: bool = False) -> None:
        """There is something to send. Urgent: try at once even while backing off from a dead connection
        (but once a second at most)."""
        if urgent and self._may_hurry and self._clock.monotonic() - self._last_try >= BACKOFF_FIRST_S:
            self._not_before = 0.0
        self._wake.set()

    def stop(self, grace_s: float) -> None:
        """Send what waits for at most `grace_s`, then end."""
        self._stopping = True
        self._not_before = 0.0 if self._may_hurry else self._not_before
        self._wake.set()
        if self._thread is not None:
            self._thread.join(grace_s)

    def _run(self) -> None:
        while True:
            try:
                wait_s = self.step()
            except Exception as error:  # shipping must outlive any one failure
                log(logging.ERROR, "shipping_failed", reason=str(error), exc_info=error)
                wait_s = BACKOFF_MAX_S
            if wait_s == 0.0:
                continue
            if self._stopping:
                break
            self._wake.wait(wait_s)
            self._wake.clear()
        self._transport.close()


def retry_after_s(header: str, now: float) -> float | None:
    """Seconds of a Retry-After header (a number or an HTTP date), within bounds; None when there is none."""
    if not header:
        return None
    try:
        seconds = float(header)
    except ValueError:
        from email.utils import parsedate_to_datetime

        try:
            seconds = parsedate_to_datetime(header).timestamp() - now
        except (TypeError, ValueError):
            return None
    return min(max(seconds, 0.1), RETRY_AFTER_MAX_S) if math.isfinite(seconds) else None


def read_token(environment_token: str, file: str) -> Callable[[], str]:
    """The token, read from its file each time it is needed, so that a rotated token needs no restart."""

    def token() -> str:
        if environment_token or not file:
            return environment_token
        try:
            return Path(file).read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            log(logging.DEBUG, "token_unreadable", file=file, reason=str(error))
            return ""

    return token


def _problem(body: bytes) -> str:
    """The readable part of an error answer (RFC 9457), shortened."""
    try:
        told = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return body[:200].decode("utf-8", "replace").strip()
    if isinstance(told, dict):
        return str(told.get("detail") or told.get("title") or told)[:300]
    return str(told)[:300]
