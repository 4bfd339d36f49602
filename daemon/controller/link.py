"""What the controller says to the service: registers the job, acknowledges, and asks for protections it missed.

Acknowledgements come from the mailbox and stay there until the service took them, over any number of restarts.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

import httpx
import stamina
import structlog

from forewarn.collectors.errors import ForewarnError, InputError, UnavailableError
from forewarn.daemon.controller.mailbox import Mailbox
from forewarn.daemon.controller.messages import request_of

TIMEOUT_S = 5.0
ATTEMPTS = 3
"""Quick retries of one call; what still fails waits for the next round."""
ROUND_INTERVAL_S = 0.5
"""How often the outgoing messages are looked at; trouble doubles it up to MAX_ROUND_INTERVAL_S."""
MAX_ROUND_INTERVAL_S = 30.0
RETRIED_STATUSES = frozenset({401, 403, 408, 425, 429})
"""Answers that may change: among them a wrong token, which somebody will put right. Nothing is given up for it."""

_log = structlog.get_logger("forewarn.controller")


class RefusedError(ForewarnError):
    """The service understood and said no: trying again would change nothing."""


class ServiceClient:
    """The few calls the controller makes. Raises UnavailableError (worth a retry) or RefusedError (not)."""

    def __init__(self, url: str, token: str = "", transport: httpx.BaseTransport | None = None) -> None:
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._client = httpx.Client(
            base_url=url.rstrip("/"), headers=headers, timeout=TIMEOUT_S, transport=transport
        )

    def close(self) -> None:
        self._client.close()

    def register(self, job: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """`PUT /v1/jobs/{job}`."""
        return self._call("PUT", f"/v1/jobs/{job}", body)

    def acknowledge(self, protection: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """`POST /v1/protections/{protection}/ack`."""
        return self._call("POST", f"/v1/protections/{protection}/ack", body)

    def open_protections(self, job: str) -> list[dict[str, Any]]:
        """Open protections of a job, for jobs that no webhook can reach."""
        answer = self._call("GET", "/v1/protections", None, {"job": job, "state": "open"})
        items = answer.get("items", [])
        return [item for item in items if isinstance(item, dict)] if isinstance(items, list) else []

    def _call(
        self, method: str, path: str, body: Mapping[str, Any] | None, query: dict[str, str] | None = None
    ) -> dict[str, Any]:
        for attempt in stamina.retry_context(
            on=UnavailableError, attempts=ATTEMPTS, wait_initial=0.1, wait_max=1.0, timeout=None
        ):
            with attempt:
                return self._call_once(method, path, body, query)
        raise AssertionError("stamina returns or raises")

    def _call_once(
        self, method: str, path: str, body: Mapping[str, Any] | None, query: dict[str, str] | None
    ) -> dict[str, Any]:
        where = f"{self._client.base_url}{path}"
        try:
            answer = self._client.request(method, path, json=body, params=query)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise UnavailableError(
                f"service: {where} cannot be reached: {error or type(error).__name__}"
            ) from error
        if answer.status_code in RETRIED_STATUSES or answer.status_code >= 500:
            raise UnavailableError(f"service: {where} answered {answer.status_code}: {_detail_of(answer)}")
        if not answer.is_success:
            raise RefusedError(f"service: {where} answered {answer.status_code}: {_detail_of(answer)}")
        try:
            content = answer.json() if answer.content else {}
        except ValueError as error:
            raise UnavailableError(f"service: {where} answered with something that is not JSON") from error
        return content if isinstance(content, dict) else {}


def _detail_of(answer: httpx.Response) -> str:
    try:
        content = answer.json()
        return str(content.get("detail") or content.get("title") or answer.reason_phrase)
    except (ValueError, AttributeError):
        return answer.reason_phrase


class Messenger:
    """Delivers acknowledgements in their order, and (with `poll_interval_s` above 0) polls for protections.

    `round` does one pass and is all there is to test; `start` runs it from a thread.
    """

    def __init__(
        self,
        mailbox: Mailbox,
        client: ServiceClient,
        *,
        job: str = "",
        registration: Mapping[str, Any] | None = None,
        poll_interval_s: float = 0.0,
        interval_s: float = ROUND_INTERVAL_S,
    ) -> None:
        self._mailbox = mailbox
        self._client = client
        self._job = job
        self.registration = registration
        self._registered: dict[str, Any] | None = None
        self._poll_interval_s = poll_interval_s
        self._interval_s = interval_s
        self._since_poll_s = poll_interval_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="forewarn-messenger", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Make one last pass, so that what was just saved is told, then end."""
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join()
        self._client.close()

    def round(self) -> bool:
        """One pass; false when the service could not be reached, and nothing was lost by it."""
        return self._register() and self._deliver() and self._poll()

    def _register(self) -> bool:
        """Register the job, and again whenever the loop has saved since."""
        if self.registration is None:
            return True
        body = dict(self.registration)
        noted = self._mailbox.last_checkpoint()
        if noted is not None:
            body["last_checkpoint"] = datetime.fromtimestamp(noted["time"], tz=UTC).isoformat()
        if body == self._registered:
            return True
        try:
            self._client.register(self._job, body)
        except RefusedError as error:
            _log.error("job_refused", job=self._job, error=str(error))
        except UnavailableError as error:
            _log.warning("service_unreachable", error=str(error))
            return False
        else:
            _log.info("job_registered", job=self._job, last_checkpoint=body.get("last_checkpoint"))
        self._registered = body
        return True

    def _deliver(self) -> bool:
        for message in self._mailbox.undelivered():
            try:
                self._client.acknowledge(message.protection, message.body)
            except RefusedError as error:
                # For good: the service closed it without us, or our token is wrong. It is kept, marked, and said.
                _log.error(
                    "acknowledgement_refused",
                    protection=message.protection,
                    state=message.body["state"],
                    error=str(error),
                )
                self._mailbox.delivered(message.number, trouble=str(error))
            except UnavailableError as error:
                _log.warning(
                    "acknowledgement_waits", protection=message.protection, attempts=message.attempts + 1
                )
                self._mailbox.postponed(message.number, str(error))
                return False
            else:
                _log.info("acknowledged", protection=message.protection, state=message.body["state"])
                self._mailbox.delivered(message.number)
        return True

    def _poll(self) -> bool:
        if not self._poll_interval_s or not self._job or self._since_poll_s < self._poll_interval_s:
            return True
        self._since_poll_s = 0.0
        try:
            items = self._client.open_protections(self._job)
        except RefusedError as error:
            _log.error("poll_refused", error=str(error))
            return True
        except UnavailableError as error:
            _log.warning("service_unreachable", error=str(error))
            return False
        for item in items:
            try:
                self._mailbox.accept(None, request_of(item))
            except InputError as error:
                _log.error("protection_not_understood", error=str(error))
        return True

    def _run(self) -> None:
        wait_s = self._interval_s
        while not self._stop.wait(wait_s):
            self._since_poll_s += wait_s
            wait_s = self._safe_round(wait_s)
        self._safe_round(wait_s)

    def _safe_round(self, wait_s: float) -> float:
        """A round whose trouble never ends the thread; returns how long to wait for the next."""
        try:
            reached = self.round()
        except ForewarnError as error:
            _log.error("state_unusable", error=str(error))
            reached = False
        return self._interval_s if reached else min(wait_s * 2, MAX_ROUND_INTERVAL_S)
