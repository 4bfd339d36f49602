"""Sets the demo up and keeps it going: folder, settings, secrets, processes, and the eyes that watch the service."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import secrets
import shutil
import socket
import tempfile
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import httpx

from forewarn.collectors.clock import Clock
from forewarn.collectors.errors import ConfigError, ForewarnError, StorageError, UnavailableError
from forewarn.daemon.demo import network
from forewarn.daemon.demo.parts import Parts
from forewarn.daemon.demo.story import Story
from forewarn.daemon.service import tokens
from forewarn.daemon.service.database import open_database

JOB = "demo-training"
NODES, GPUS_PER_NODE = 16, 8
CYCLE_INTERVAL_S = 2.0
WATCH_INTERVAL_S = 0.5
READY_TIMEOUT_S = 60.0
CLI = "forewarn.daemon.cli"
SETTINGS_NAME = "demo.toml"


class Stage:
    """Everything of one demo. `open` sets up and starts; `watch` looks once; `close` ends and cleans up."""

    def __init__(self, port: int, data: Path | None, clock: Clock, story: Story) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self._port = port
        self._clock = clock
        self.story = story
        self._keep = data is not None
        self._data = data
        self.folder = Path()
        self._parts: Parts | None = None
        self._client = httpx.Client(base_url=self.url, timeout=5.0, trust_env=False)
        self._host_node = ""
        self._progress = (
            f"@forewarn-demo-{port}"  # a socket without a file: no folder to make or leave behind
        )

    def open(self, stop: threading.Event) -> None:
        """Raises ConfigError when the port is taken, UnavailableError when a part does not come up."""
        check_free(self._port)
        self.folder = self._make_folder()
        environment = environment_of(os.environ)
        settings = self._write_settings()
        parts = self._parts = Parts(self.folder / "logs")
        self._make_tokens()
        if stop.is_set():
            return
        parts.start("service", [CLI, "serve", "--config", str(settings)], environment)
        self._wait_ready(stop)
        if stop.is_set():
            return
        self._client.headers["Authorization"] = f"Bearer {self._read('operator.token')}"
        self.story.step("service_ready", "service", f"ready: open {self.url}/ in a browser", url=self.url)
        parts.start("agent", [CLI, "agent", "--config", str(settings)], environment)
        parts.start("controller", [CLI, "controller", "--config", str(settings)], environment)
        loop = ["forewarn.daemon.demo.training_loop", "--state", str(self.folder / "controller")]
        loop += [
            "--checkpoints",
            str(self.folder / "checkpoints"),
            "--job",
            JOB,
            "--progress",
            self._progress,
        ]
        parts.start("training", loop, environment, lines_to(self.story.on_loop))
        fleet = ["forewarn.daemon.demo.fleet", "--url", self.url]
        fleet += ["--token-file", str(self.folder / "fleet.token")]
        fleet += ["--nodes", str(NODES), "--gpus", str(GPUS_PER_NODE)]
        parts.start("fleet", fleet, environment, lines_to(self.story.on_fleet))

    def watch(self) -> None:
        """Look at the service once and tell what is new. Raises UnavailableError when a part has ended."""
        assert self._parts is not None
        self._parts.check()
        story = self.story
        with contextlib.suppress(httpx.HTTPError, ValueError):
            if "host_reported" not in story.steps or "fleet_reported" not in story.steps:
                self._watch_nodes()
            if "job_registered" not in story.steps and self._client.get(f"/v1/jobs/{JOB}").is_success:
                story.step("job_registered", "controller", f"registered job {JOB} on the simulated nodes")
            story.on_risk(self._items("/v1/risk", {"min_risk": "0.02", "limit": "50"}))
            story.on_protections(self._items("/v1/protections", {"job": JOB}))
            if "acknowledged" in story.steps and story.checkpoint:
                self._verify()

    def close(self) -> None:
        """End every process; remove the folder unless it was asked for by --data."""
        if self._parts is not None:
            self._parts.stop()
        self._client.close()
        if not self._keep and self.folder != Path():
            shutil.rmtree(self.folder, ignore_errors=True)

    def _watch_nodes(self) -> None:
        nodes = self._items("/v1/nodes", {"limit": "1000"})
        for node in nodes:
            if node.get("node") == self._host_node and not node.get("simulated"):
                self.story.step(
                    "host_reported",
                    "agent",
                    f"this host, {self._host_node}, reports for itself: real readings beside the simulated ones",
                )
        simulated = [node for node in nodes if node.get("simulated")]
        if len(simulated) >= NODES:
            devices = sum(int(node.get("devices", 0)) for node in simulated)
            self.story.step(
                "fleet_reported",
                "service",
                f"knows {len(simulated)} nodes with {devices} devices",
                simulated=True,
                nodes=len(simulated),
                devices=devices,
            )

    def _verify(self) -> None:
        if "checkpoint_verified" in self.story.steps:
            return
        path, step = Path(self.story.checkpoint["checkpoint"]), int(self.story.checkpoint["step"])
        try:
            job = network.load(path)
        except ForewarnError as error:
            self.story.say("training", f"the checkpoint cannot be loaded: {error}", level="critical")
            return
        loss = network.train_step(job)
        if job.step == step + 1:
            self.story.step(
                "checkpoint_verified",
                "training",
                f"the checkpoint loads and training goes on from it (loss {loss:.4f} at step {job.step})",
                step=step,
            )

    def _items(self, path: str, query: Mapping[str, str]) -> list[Mapping[str, Any]]:
        answer = self._client.get(path, params=dict(query))
        if not answer.is_success:
            return []
        items = answer.json().get("items", [])
        return items if isinstance(items, list) else []

    def _wait_ready(self, stop: threading.Event) -> None:
        assert self._parts is not None
        end = self._clock.monotonic() + READY_TIMEOUT_S
        while self._clock.monotonic() < end and not stop.wait(0.1):
            self._parts.check()
            with contextlib.suppress(httpx.HTTPError):
                if self._client.get("/readyz").is_success:
                    return
        if not stop.is_set():
            raise UnavailableError(
                f"demo: the service was not ready within {READY_TIMEOUT_S:g} s; see {self.folder}/logs/service.log"
            )

    def _make_folder(self) -> Path:
        if self._data is None:
            try:
                return Path(tempfile.mkdtemp(prefix="forewarn-demo-"))
            except OSError as error:
                raise StorageError(f"demo: no temporary folder ({error}); give one with --data") from error
        if (self._data / SETTINGS_NAME).exists():
            raise ConfigError(
                f"--data: {self._data} holds an earlier demo, whose protections would mix with this one's; "
                "remove it or give another folder"
            )
        try:
            self._data.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError as error:
            raise StorageError(f"--data: {self._data} cannot be made: {error}") from error
        return self._data.resolve()

    def _write_settings(self) -> Path:
        self._host_node = socket.gethostname().split(".")[0] or "this-host"
        nodes = ", ".join(f'"sim-{n:02d}"' for n in range(1, NODES + 1))
        metrics_port = self._port + 1
        listen = f"127.0.0.1:{metrics_port}" if is_free(metrics_port) else ""
        secret = self.folder / "webhook.secret"
        if not secret.exists():
            text = "whsec_" + base64.b64encode(secrets.token_bytes(32)).decode()
            write_private(secret, text + "\n")
        folder = json.dumps(str(self.folder))[1:-1]  # as TOML wants a string
        path = self.folder / SETTINGS_NAME
        path.write_text(
            f"""# Settings of `forewarn demo`: all parts on this machine.
log_level = "info"

[service]
listen = "127.0.0.1:{self._port}"
data = "{folder}/service"
cycle_interval_s = {CYCLE_INTERVAL_S}
allow_webhook_hosts = ["127.0.0.1"]
allow_insecure_webhooks = true

[agent]
node = "{self._host_node}"
service_url = "{self.url}"
token_file = "{folder}/agent.token"
spool = "{folder}/spool.db"
listen = "{listen}"
ship_interval_s = 2.0

[agent.collectors.training]
options = {{ path = "{self._progress}", folder = "" }}

[controller]
listen = "127.0.0.1:0"
job = "{JOB}"
service_url = "{self.url}"
token_file = "{folder}/operator.token"
secret_file = "{folder}/webhook.secret"
state = "{folder}/controller"
nodes = [{nodes}]
checkpoint_seconds = 2.0
restart_seconds = 300.0
""",
            encoding="utf-8",
        )
        return path

    def _make_tokens(self) -> None:
        """One token for each part, into files that only we can read, by what `forewarn token create` calls.

        In this process, since three starts of the command would be most of the demo's own start.
        """
        database = open_database(self.folder / "service")
        try:
            for name, role, node in (
                ("operator", "operator", ""),
                ("agent", "agent", self._host_node),
                ("fleet", "agent", tokens.ANY_NODE),
            ):
                text = tokens.create(database, self._clock, role, node=node, name=f"demo {name}")
                write_private(self.folder / f"{name}.token", text + "\n")
        finally:
            database.close()

    def _read(self, name: str) -> str:
        return (self.folder / name).read_text(encoding="utf-8").strip()


def lines_to(take: Callable[[Mapping[str, Any]], None]) -> Callable[[str], None]:
    """Hands JSON lines of a part to the story; anything else is only logged."""

    def on_line(text: str) -> None:
        # Whatever a part prints: the pipe must be read on, or the part would stand still.
        with contextlib.suppress(ValueError, KeyError, TypeError):
            line = json.loads(text)
            if isinstance(line, dict):
                take(line)

    return on_line


def write_private(path: Path, text: str) -> None:
    """Write a file that only its owner can read."""
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(handle, "w", encoding="utf-8") as stream:
        stream.write(text)


def is_free(port: int) -> bool:
    """Whether a port of the loopback address can be listened on."""
    try:
        with socket.create_server(("127.0.0.1", port)):
            return True
    except OSError:
        return False


def check_free(port: int) -> None:
    """Raises ConfigError when the demo's port is taken."""
    if not is_free(port):
        raise ConfigError(
            f"--port: 127.0.0.1:{port} is in use (another demo, or a service); end that, or run "
            f"`forewarn demo --port {port + 100}`"
        )


def environment_of(own: Mapping[str, str]) -> dict[str, str]:
    """The parts' environment: ours without settings of another Forewarn, numeric libraries on one thread."""
    kept = {k: v for k, v in own.items() if not k.startswith("FOREWARN_")}
    return kept | {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
