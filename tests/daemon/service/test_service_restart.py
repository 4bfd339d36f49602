"""Restarts: kill -9 at any moment, damaged snapshots and logs. What was sent is stored, exactly once."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pyarrow.dataset
import pytest

from forewarn.collectors.clock import SystemClock
from forewarn.daemon import wire
from forewarn.daemon.service import journal, tokens
from forewarn.daemon.service.database import open_database
from service_bench import Bench, Starter, batch, eventually, make_settings, xid


class Process:
    """`forewarn serve` as a real process that is killed and started again on the same folder and port."""

    def __init__(self, folder: Path, **settings: str) -> None:
        self.folder = folder
        with socket.create_server(("127.0.0.1", 0)) as sock:
            self.port = sock.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        given = {
            "LISTEN": f"127.0.0.1:{self.port}",
            "DATA": str(folder),
            "SEGMENT_INTERVAL_S": "0.5",
            "SNAPSHOT_INTERVAL_S": "1",
            "CYCLE_INTERVAL_S": "0.5",
            "ALLOW_WEBHOOK_HOSTS": "127.0.0.1",
            "ALLOW_INSECURE_WEBHOOKS": "true",
        } | settings
        self._environment = os.environ | {f"FOREWARN_SERVICE_{k}": v for k, v in given.items()}
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with (self.folder.parent / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "forewarn.daemon.cli", "serve"], env=self._environment, stderr=log
            )
        eventually(self._is_ready, deadline_s=60)

    def _is_ready(self) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, (self.folder.parent / "log").read_text()
        try:
            return httpx.get(f"{self.url}/readyz", timeout=5).status_code == 200
        except httpx.HTTPError:
            return False

    def kill(self, number: int = signal.SIGKILL) -> int:
        assert self._process is not None
        self._process.send_signal(number)
        return self._process.wait(20)


@pytest.fixture
def process(tmp_path: Path) -> Iterator[Process]:
    running = Process(tmp_path / "data")
    yield running
    if running._process is not None and running._process.poll() is None:
        running.kill()


def make_token(folder: Path, role: str, node: str = "") -> str:
    database = open_database(folder)
    try:
        return tokens.create(database, SystemClock(), role, node=node)
    finally:
        database.close()


class Agent(threading.Thread):
    """Sends numbered batches, each until it is acknowledged, as the real one does."""

    def __init__(self, url: str, token: str, node: str, stop: threading.Event) -> None:
        super().__init__()
        self.node, self.acknowledged, self.unknown = node, 0, 0
        self._url, self._token, self._ended = url, token, stop

    def run(self) -> None:
        sequence = 0
        while not self._ended.is_set():
            sequence += 1
            events = [xid(f"{self.node}/gpu0", "63")] if sequence % 3 == 0 else []
            sent = batch(self.node, sequence, gpus=1, temperature=float(sequence), events=events)
            body = wire.encode(sent)
            while True:
                try:
                    answer = httpx.post(
                        f"{self._url}/v1/ingest",
                        content=body,
                        timeout=5,
                        headers={"Authorization": f"Bearer {self._token}"},
                    )
                    if answer.status_code == 200:
                        self.acknowledged = sequence
                        break
                    assert answer.status_code in (429, 503), answer.text
                except httpx.HTTPError:
                    pass
                self._ended.wait(0.02)
                if self._ended.is_set():
                    self.unknown = sequence
                    return


@pytest.mark.slow
def test_kill_9_again_and_again_loses_nothing_and_doubles_nothing(process: Process) -> None:
    seed = random.randrange(2**32)
    print("seed", seed)
    chance = random.Random(seed)
    token = make_token(process.folder, "agent", "*")
    process.start()
    stop = threading.Event()
    agents = [Agent(process.url, token, f"n{i}", stop) for i in range(4)]
    for agent in agents:
        agent.start()
    for _ in range(3):
        _await_progress(agents)
        time.sleep(chance.uniform(0, 1.2))  # a random moment is the point here
        process.kill()
        process.start()
    _await_progress(agents)
    stop.set()
    for agent in agents:
        agent.join()
    assert process.kill(signal.SIGTERM) == 0

    table = pyarrow.dataset.dataset(process.folder / "telemetry").to_table()
    rows = sorted(zip(table["node"].to_pylist(), table["gpu_temperature_celsius"].to_pylist(), strict=True))
    events = _events_in(process.folder)
    for agent in agents:
        stored = [int(v) for n, v in rows if n == agent.node]
        allowed = {agent.acknowledged, max(agent.acknowledged, agent.unknown)}
        assert stored in [list(range(1, last + 1)) for last in allowed]
        assert events.count(agent.node) in {last // 3 for last in allowed}


def _await_progress(agents: list[Agent]) -> None:
    before = sum(a.acknowledged for a in agents)
    eventually(lambda: sum(a.acknowledged for a in agents) > before + 10, deadline_s=60)


def _events_in(folder: Path) -> list[str]:
    database = open_database(folder)
    try:
        with database.read() as run:
            return [row[0] for row in run.exec_driver_sql("SELECT node FROM events")]
    finally:
        database.close()


def test_a_fatal_event_and_kill_9_lead_to_exactly_one_protection(process: Process) -> None:
    agent_token = make_token(process.folder, "agent", "*")
    operator = {"Authorization": f"Bearer {make_token(process.folder, 'operator')}"}
    process.start()
    job = {"nodes": ["n1"], "checkpoint_seconds": 5, "webhook": {"url": "http://127.0.0.1:9/none"}}
    assert httpx.put(f"{process.url}/v1/jobs/llm", json=job, headers=operator).status_code == 200
    body = wire.encode(batch(events=[xid()]))
    headers = {"Authorization": f"Bearer {agent_token}"}
    assert httpx.post(f"{process.url}/v1/ingest", content=body, headers=headers).status_code == 200
    process.kill()
    for _ in range(2):
        process.start()
        again = httpx.post(f"{process.url}/v1/ingest", content=body, headers=headers)
        assert again.json()["duplicate"] is True
        found = eventually(lambda: httpx.get(f"{process.url}/v1/protections").json()["items"])
        deliveries = httpx.get(f"{process.url}/v1/deliveries").json()["items"]
        assert len(found) == len(deliveries) == 1
        process.kill()


def test_state_is_whole_after_a_clean_restart(start: Starter) -> None:
    first = start()
    for sequence in range(1, 4):
        first.send(batch(sequence=sequence, events=[xid(code="48")] if sequence == 2 else []))
    first.scored()
    before = first.get("/v1/risk")["items"]
    first.stop()
    second = start()
    second.scored()
    after = second.get("/v1/risk")["items"]
    assert [(r["device"], r["serial"], r["level"]) for r in after] == [
        (r["device"], r["serial"], r["level"]) for r in before
    ]
    assert after[0]["level"] != "healthy"
    assert second.send(batch(sequence=3)).json()["duplicate"] is True
    assert second.get("/v1/nodes")["items"][0]["devices"] == 2


def crash(bench: Bench, copy: Path) -> None:
    """What a power cut now would leave: a copy of the folder as it is."""
    data = Path(bench.service.settings.data)
    shutil.copytree(data, copy)
    (copy / "lock").unlink()


def test_a_damaged_snapshot_falls_back_to_the_one_before(start: Starter, tmp_path: Path) -> None:
    first = start()
    first.send(batch(sequence=1))
    first.scored()
    first.stop()
    second = start()
    second.send(batch(sequence=2, gpus=3))
    second.scored()
    second.stop()
    folders = sorted((tmp_path / "data" / "snapshots").iterdir())
    assert len(folders) == 2
    state = folders[1] / "service.state"
    state.write_bytes(state.read_bytes()[:-5])
    third = start()
    third.scored()
    assert third.send(batch(sequence=2)).json()["duplicate"] is True
    assert third.get("/v1/nodes")["items"][0]["devices"] == 3
    assert list((tmp_path / "data" / "snapshots").glob("damaged-*"))


def test_with_all_snapshots_gone_the_log_still_tells_repeats(start: Starter, tmp_path: Path) -> None:
    first = start()
    first.send(batch(sequence=1))
    first.stop()
    shutil.rmtree(tmp_path / "data" / "snapshots")
    second = start()
    second.scored()
    assert second.send(batch(sequence=1)).json()["duplicate"] is True
    assert len(second.get("/v1/risk")["items"]) == 2


def test_a_torn_tail_costs_only_what_was_never_acknowledged(start: Starter, tmp_path: Path) -> None:
    bench = start()
    for sequence in (1, 2):
        bench.send(batch(sequence=sequence))
    crash(bench, tmp_path / "copy")
    log = journal.segment_path(tmp_path / "copy" / "wal", journal.segments(tmp_path / "copy" / "wal")[-1])
    torn = journal.encode(journal.Record(journal.BATCH, time.time(), wire.encode(batch(sequence=3))))
    log.write_bytes(log.read_bytes() + torn[:-7])
    again = start(data=str(tmp_path / "copy"))
    assert again.send(batch(sequence=2)).json()["duplicate"] is True
    assert again.send(batch(sequence=3)).json()["duplicate"] is False


def test_two_services_on_one_folder_are_refused(bench: Bench, tmp_path: Path) -> None:
    from forewarn.collectors.errors import StorageError
    from forewarn.daemon.service.service import Service

    with pytest.raises(StorageError, match="another service uses this folder"):
        Service(make_settings(tmp_path))


def test_an_address_for_all_needs_a_token_first(tmp_path: Path) -> None:
    from forewarn.collectors.errors import ConfigError
    from forewarn.daemon.service.service import Service

    with pytest.raises(ConfigError, match="forewarn token create"):
        Service(make_settings(tmp_path, listen="0.0.0.0:0"))


def test_history_is_a_history_directory(start: Starter, tmp_path: Path) -> None:
    bench = start()
    bench.send(batch(sequence=1, events=[xid()], temperature=71.0))
    report: dict[str, Any] = {"device": "n1/gpu1", "cause": "memory"}
    assert bench.post("/v1/failures", report).status_code == 201
    bench.stop()
    data = tmp_path / "data"
    telemetry = pyarrow.dataset.dataset(data / "telemetry").to_table().to_pylist()
    assert [(r["node"], r["device"], r["gpu_temperature_celsius"]) for r in telemetry] == [
        ("n1", "n1/gpu0", 71.0),
        ("n1", "n1/gpu1", 71.0),
    ]
    events = pyarrow.parquet.read_table(data / "events.parquet").to_pylist()
    assert [(r["device"], r["kind"], r["code"]) for r in events] == [("n1/gpu1", "xid", "79")]
    failures = pyarrow.parquet.read_table(data / "failures.parquet").to_pylist()
    assert [(r["device"], r["cause"]) for r in failures] == [("n1/gpu1", "memory")]
    assert json.dumps(
        sorted(r["device"] for r in pyarrow.parquet.read_table(data / "devices.parquet").to_pylist())
    )
