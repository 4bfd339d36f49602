from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import httpx
import pytest

from forewarn.collectors.errors import ConfigError, StorageError
from forewarn.daemon.config import ControllerConfig
from forewarn.daemon.controller.protector import Protector
from forewarn.daemon.controller.sidecar import Controller


@pytest.fixture
def settings(tmp_path: Path, secret: str) -> ControllerConfig:
    (tmp_path / "secret").write_text(secret)
    return ControllerConfig(
        listen="127.0.0.1:0",
        job="llm",
        service_url="http://127.0.0.1:9",  # nobody listens there
        secret_file=str(tmp_path / "secret"),
        state=str(tmp_path / "state"),
    )


def test_in_the_jobs_own_process(settings: ControllerConfig, sign: Any) -> None:
    with Controller(settings) as controller, Protector(controller.mailbox, watch=False) as protector:
        body, headers = sign()
        answer = httpx.post(controller.url, content=body, headers=headers, trust_env=False)
        assert answer.json()["decision"] == "accepted"
        protector.look()
        saved = protector.step(4, lambda: "/c/4")
        assert saved is not None and saved.protections == ["p1"]
        assert [m.body["state"] for m in controller.mailbox.undelivered()] == ["accepted", "completed"]


def test_both_secrets_are_registered_while_they_rotate(
    settings: ControllerConfig, secret: str, old_secret: str
) -> None:
    Path(settings.secret_file).write_text(f"{secret}\n{old_secret}\n")
    settings.nodes = ["n1"]
    settings.webhook_url = "https://trainer.example/webhook"
    with Controller(settings) as controller:
        body = controller.messenger.registration
    assert body is not None
    assert body["webhook"] == {
        "url": "https://trainer.example/webhook",
        "secret": secret,
        "old_secret": old_secret,
    }
    assert "swap_seconds" not in body  # no spare: only saves are asked
    assert (body["checkpoint_seconds"], body["restart_seconds"]) == (60.0, 600.0)


def test_without_nodes_somebody_else_registers_the_job(settings: ControllerConfig) -> None:
    with Controller(settings) as controller:
        assert controller.messenger.registration is None


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        ({"listen": "nowhere"}, ConfigError, "controller.listen"),
        ({"secret_file": "/nonexistent/secret"}, ConfigError, "/nonexistent/secret"),
        ({"token_file": "/nonexistent/token"}, ConfigError, "/nonexistent/token"),
        ({"job": "", "nodes": ["n1"]}, ConfigError, "controller.job"),
        ({"job": "", "poll_interval_s": 5.0}, ConfigError, "controller.job"),
        ({"state": "/proc/forewarn"}, StorageError, "controller.state"),
    ],
)
def test_wrong_settings_are_named(
    settings: ControllerConfig, change: dict[str, Any], error: type[Exception], says: str
) -> None:
    for name, value in change.items():
        setattr(settings, name, value)
    with pytest.raises(error, match=re.escape(says)):
        Controller(settings)
