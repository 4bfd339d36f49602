"""Receiver, mailbox and messenger put together: what `forewarn controller` runs, or a job runs in its own process."""

from __future__ import annotations

import base64
import os
import secrets
from pathlib import Path
from types import TracebackType
from typing import Any

from forewarn.collectors.clock import Clock
from forewarn.collectors.errors import ConfigError
from forewarn.daemon.config import ControllerConfig, parse_address, read_secret
from forewarn.daemon.controller.link import Messenger, ServiceClient
from forewarn.daemon.controller.mailbox import Mailbox
from forewarn.daemon.controller.messages import Verifier
from forewarn.daemon.controller.receiver import Receiver, make_app

SECRET_BYTES = 32


class Controller:
    """Everything beside the training loop:

    with Controller(settings) as controller, Protector(controller.mailbox) as protector:
        ...
    """

    def __init__(self, settings: ControllerConfig, clock: Clock | None = None) -> None:
        """Opens the state and binds the port; nothing runs before `start`. Raises ConfigError, StorageError."""
        host, port = parse_address(settings.listen, "controller.listen")
        found = read_secret("FOREWARN_CONTROLLER_SECRET", settings.secret_file).split()
        verifier = Verifier(found)
        token = read_secret("FOREWARN_TOKEN", settings.token_file)
        if (settings.nodes or settings.devices or settings.poll_interval_s) and not settings.job:
            raise ConfigError(
                "controller.job: name the job, or the service cannot know whose nodes these are"
            )
        self.mailbox = Mailbox(settings.state, clock)
        try:
            self.receiver = Receiver(make_app(self.mailbox, verifier, settings.job), host, port)
        except ConfigError:
            self.mailbox.close()
            raise
        self.url = settings.webhook_url or _local_url(host, self.receiver.port)
        self.messenger = Messenger(
            self.mailbox,
            ServiceClient(settings.service_url, token),
            job=settings.job,
            registration=self._registration(settings, found),
            poll_interval_s=settings.poll_interval_s,
        )

    def start(self) -> None:
        """Receive, register the job, deliver what is waiting from before."""
        self.receiver.start()
        self.messenger.start()

    def stop(self) -> None:
        """Stop receiving, tell what there is to tell, close."""
        self.receiver.stop()
        self.messenger.stop()
        self.mailbox.close()

    def __enter__(self) -> Controller:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _registration(self, settings: ControllerConfig, found: list[str]) -> dict[str, Any] | None:
        """The body of `PUT /v1/jobs/{job}`; None when the job is registered by somebody else."""
        if not settings.nodes and not settings.devices:
            return None
        webhook = {"url": self.url, "secret": found[0]}
        if len(found) > 1:
            webhook["old_secret"] = found[1]
        body: dict[str, Any] = {
            "nodes": settings.nodes,
            "devices": settings.devices,
            "webhook": webhook,
            "checkpoint_seconds": settings.checkpoint_seconds,
            "restart_seconds": settings.restart_seconds,
            "dry_run": settings.dry_run,
        }
        if settings.swap_seconds is not None:
            body["swap_seconds"] = settings.swap_seconds
        return body


def _local_url(host: str, port: int) -> str:
    name = f"[{host}]" if ":" in host else host
    return f"http://{name}:{port}/webhook"


def new_secret(path: Path) -> None:
    """Write a fresh webhook secret to a file that only the owner can read. Raises ConfigError when it exists."""
    text = "whsec_" + base64.b64encode(secrets.token_bytes(SECRET_BYTES)).decode()
    try:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        raise ConfigError(
            f"{path}: exists already; to rotate, add the new secret as its first line"
        ) from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {error}") from error
    with os.fdopen(handle, "w", encoding="ascii") as stream:
        stream.write(text + "\n")
