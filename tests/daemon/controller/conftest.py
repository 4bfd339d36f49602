"""A mailbox on a clock of its own, a receiver on a free port, and webhooks signed as the service signs them."""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import stamina
import structlog
from standardwebhooks import Webhook

from forewarn.collectors.clock import ManualClock
from forewarn.daemon.controller.mailbox import Mailbox

SECRET = "whsec_" + base64.b64encode(b"a secret of thirty-two bytes, ok").decode()
OLD_SECRET = "whsec_" + base64.b64encode(b"the secret that went before that").decode()

Signer = Callable[..., tuple[bytes, dict[str, str]]]


def signed(
    data: dict[str, Any] | None = None,
    *,
    identity: str = "msg_1",
    secret: str = SECRET,
    age_s: float = 0.0,
    body: bytes | None = None,
) -> tuple[bytes, dict[str, str]]:
    """A body and the headers that sign it."""
    if body is None:
        asked = {"protection": "p1", "job": "llm", "action": "checkpoint"} if data is None else data
        body = json.dumps(
            {"specversion": "1.0", "id": identity, "type": "protection", "data": asked}
        ).encode()
    stamp = int(time.time() - age_s)
    moment = datetime.fromtimestamp(stamp, tz=UTC)
    return body, {
        "webhook-id": identity,
        "webhook-timestamp": str(stamp),
        "webhook-signature": Webhook(secret).sign(identity, moment, body.decode("latin-1")),
        "content-type": "application/json",
    }


@pytest.fixture
def sign() -> Signer:
    return signed


@pytest.fixture
def secret() -> str:
    return SECRET


@pytest.fixture
def old_secret() -> str:
    return OLD_SECRET


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def mailbox(tmp_path: Path, clock: ManualClock) -> Iterator[Mailbox]:
    box = Mailbox(tmp_path / "state", clock)
    yield box
    box.close()


@pytest.fixture(autouse=True)
def logs_as_they_were() -> Iterator[None]:
    yield
    structlog.reset_defaults()


@pytest.fixture(autouse=True)
def no_waiting_between_attempts() -> Iterator[None]:
    with stamina.set_testing(True, attempts=2):
        yield
