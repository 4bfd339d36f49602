"""The webhook's message as the controller understands it: signature, shape, what it asks for. Pure.

The envelope is CloudEvents (`id`, `type`, `time`, `data`); all that is asked stands in `data`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import msgspec
from standardwebhooks import Webhook, WebhookVerificationError

from forewarn.collectors.errors import ConfigError, ForewarnError, InputError

ACTIONS = ("checkpoint", "checkpoint_and_drain", "drain")
MAX_BODY_BYTES = 64 * 1024
"""Standard Webhooks asks for bodies below 20 kB; more than this is refused unread."""
MAX_WEBHOOK_ID_CHARS = 256


class SignatureError(ForewarnError):
    """The request was not signed with a secret that we know, or its timestamp is too far from our clock."""


class SaveRequest(msgspec.Struct, frozen=True):
    """What one protection asks of the job. Times are seconds since the epoch (UTC)."""

    protection: str
    job: str = ""
    action: str = "checkpoint"
    device: str = ""
    risk: float | None = None
    deadline: float | None = None
    reasons: list[str] = []


class Verifier:
    """Checks Standard Webhooks signatures against one or more secrets (several while keys rotate)."""

    def __init__(self, secrets: Sequence[str]) -> None:
        """Raises ConfigError when no secret is given or one is not `whsec_` and base64."""
        if not secrets:
            raise ConfigError(
                "controller.secret_file: the webhook secret is missing; make one with "
                "`forewarn controller --new-secret FILE` and register the job with it"
            )
        self._webhooks = []
        for number, secret in enumerate(secrets, 1):
            try:
                self._webhooks.append(Webhook(secret))
            except Exception as error:  # the library raises bare errors of several kinds
                raise ConfigError(
                    f"controller.secret_file: secret {number} is not valid ({error}); it must be whsec_ and base64"
                ) from error

    def verify(self, body: bytes, headers: Mapping[str, str]) -> str:
        """The webhook's id when the signature and the timestamp (5 min) hold. Raises SignatureError."""
        lower = {k.lower(): v for k, v in headers.items()}
        reason = "no signature matches"
        for webhook in self._webhooks:
            try:
                webhook.verify(body, dict(lower), json_parse=False)
            except (WebhookVerificationError, ValueError, OverflowError) as error:
                if isinstance(error, WebhookVerificationError):
                    reason = str(error)
                continue
            identity = lower["webhook-id"]
            if len(identity) > MAX_WEBHOOK_ID_CHARS:
                raise SignatureError(f"webhook-id: longer than {MAX_WEBHOOK_ID_CHARS} characters")
            return identity
        raise SignatureError(f"the webhook signature does not hold: {reason}")


def parse(body: bytes) -> SaveRequest:
    """Read a verified body. Raises InputError naming the field."""
    try:
        message = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise InputError(f"the body is not JSON: {error}") from error
    if not isinstance(message, dict):
        raise InputError("the body must be a JSON object")
    data = message.get("data")
    if not isinstance(data, dict):
        raise InputError("data: missing or not an object")
    return request_of(data)


def request_of(data: Mapping[str, Any]) -> SaveRequest:
    """A request from the `data` of a webhook, or from an item of `GET /v1/protections`. Raises InputError."""
    protection = data.get("protection") or data.get("id")
    if not isinstance(protection, str | int) or isinstance(protection, bool):
        raise InputError("data.protection: the protection's id is missing")
    action = data.get("action", "checkpoint")
    if action not in ACTIONS:
        raise InputError(f"data.action: {action!r} is not one of {', '.join(ACTIONS)}")
    job = data.get("job", "")
    if not isinstance(job, str):
        raise InputError("data.job: must be text")
    return SaveRequest(
        protection=str(protection),
        job=job,
        action=action,
        device=_device_of(data),
        risk=_risk_of(data.get("risk")),
        deadline=_time_of(data.get("deadline")),
        reasons=_reasons_of(data.get("reasons")),
    )


def _device_of(data: Mapping[str, Any]) -> str:
    device = data.get("device")
    if isinstance(device, str):
        return device
    devices = data.get("devices")
    first = devices[0] if isinstance(devices, list) and devices else ""
    if isinstance(first, Mapping):
        first = first.get("device", "")
    return first if isinstance(first, str) else ""


def _risk_of(value: Any) -> float | None:
    """The highest probability, from a number or a table by horizon; None when the message gives none."""
    if isinstance(value, Mapping):
        numbers = [v for v in value.values() if isinstance(v, int | float)]
        return float(max(numbers)) if numbers else None
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _time_of(value: Any) -> float | None:
    if value is None:
        return None
    if isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    if isinstance(value, str):
        try:
            moment = datetime.fromisoformat(value)
        except ValueError:
            raise InputError(f"data.deadline: {value!r} is not an ISO 8601 time") from None
        return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
    raise InputError("data.deadline: must be an ISO 8601 time or seconds since the epoch")


def _reasons_of(value: Any) -> list[str]:
    if not isinstance(value, list):
        return []
    texts = [item.get("text", "") if isinstance(item, Mapping) else item for item in value]
    return [text for text in texts if isinstance(text, str) and text]
