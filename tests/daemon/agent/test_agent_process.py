"""The real agent as a process of its own: killed, starved of disk, refused, hung; nothing lost, nothing twice."""

from __future__ import annotations

import json
import os
import resource
import signal
import socket
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fakes_agent import FakeService, wait_until

TESTS = Path(__file__).parents[2]
TOKEN = "an agent's token"


class Site:
    """A folder with settings, a service, and agents that are started and killed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.lines = folder / "lines"
        self.lines.touch()
        self.written = 0
        self.service = FakeService(token=TOKEN)
        self.config = folder / "forewarn.toml"
        self.log = folder / "log"
        self.agents: list[subprocess.Popen[bytes]] = []
        self.settings(ship_interval_s=0.1)

    def settings(self, *, hung: bool = False, **agent: object) -> None:
        told = {
            "node": "n1",
            "service_url": self.service.url,
            "spool": str(self.folder / "spool.db"),
            "listen": "",
            **agent,
        }
        text = "[agent]\n" + "".join(f"{k} = {json.dumps(v)}\n" for k, v in told.items())
        text += f"[agent.collectors.lines.options]\npath = {json.dumps(str(self.lines))}\n"
        text += f"[agent.collectors.hung]\nenabled = {str(hung).lower()}\n"
        self.config.write_text(text)

    def write_lines(self, count: int) -> None:
        with self.lines.open("a") as file:
            for _ in range(count):
                self.written += 1
                file.write(f"{self.written}\n")

    def start(
        self, *words: str, token: str = TOKEN, limit: Callable[[], None] | None = None, **environment: str
    ) -> subprocess.Popen[bytes]:
        command = [sys.executable, "agent_with_fakes.py", "agent", "--config", str(self.config), *words]
        clean = {k: v for k, v in os.environ.items() if not k.startswith("FOREWARN_")}
        with self.log.open("ab") as log:
            agent = subprocess.Popen(
                command,
                cwd=TESTS,
                stderr=log,
                stdout=log,
                preexec_fn=limit,  # no threads of ours run between fork and exec
                env={**clean, "FOREWARN_AGENT_TOKEN": token, **environment},
            )
        self.agents.append(agent)
        return agent

    def said(self, what: str) -> bool:
        return what in self.log.read_text()

    def delivered(self) -> list[int]:
        return sorted(int(e.code) for e in self.service.events("oom"))

    def all_delivered(self) -> bool:
        return self.delivered() == list(range(1, self.written + 1))


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    site = Site(tmp_path)
    yield site
    for agent in site.agents:
        if agent.poll() is None:
            agent.kill()
            agent.wait()
    site.service.close()


def test_kill_9_at_any_point_loses_nothing_and_counts_nothing_twice(site: Site) -> None:
    for round_number in range(6):
        site.service.lose_answers = round_number % 3
        before = len(site.service.applied)
        agent = site.start()
        site.write_lines(40)
        # Killed after more or fewer batches: while polling, spooling, sending or waiting for the answer.
        assert wait_until(lambda n=before + 1 + round_number % 4: len(site.service.applied) >= n)  # type: ignore[misc]
        site.write_lines(10)
        agent.kill()
        agent.wait()
    site.start()
    assert wait_until(site.all_delivered), (site.written, site.delivered())
    streams = {stream for stream, _ in site.service.applied}
    assert len(streams) == 1, "one spool, one stream, however often the agent was killed"
    sequences = sorted(sequence for _, sequence in site.service.applied)
    assert sequences == list(range(1, len(sequences) + 1))


def test_a_service_that_is_away_gets_everything_when_it_returns(site: Site) -> None:
    port = site.service.server.server_address[1]
    site.service.close()
    agent = site.start()
    site.write_lines(50)
    assert wait_until(lambda: site.said("service_unreachable"))
    agent.kill()
    agent.wait()
    site.service = FakeService(token=TOKEN, port=int(port))
    site.start()
    site.write_lines(50)
    assert wait_until(site.all_delivered)


def test_a_wrong_token_loses_nothing(site: Site) -> None:
    agent = site.start(token="wrong")
    site.write_lines(20)
    assert wait_until(lambda: site.said("token_refused"))
    assert "agent.token_file" in site.log.read_text()
    assert agent.poll() is None
    agent.terminate()
    agent.wait()
    assert site.delivered() == []
    site.start()
    assert wait_until(site.all_delivered)


def test_sigterm_ends_within_two_seconds_even_with_a_hung_source(site: Site) -> None:
    site.settings(hung=True, ship_interval_s=0.1)
    agent = site.start()
    site.write_lines(3)
    assert wait_until(lambda: site.said("collector_silent"))
    begun = time.monotonic()
    agent.terminate()
    assert agent.wait(timeout=10) == 0
    assert time.monotonic() - begun < 2.0, "the promise of a clean end, not a measurement"
    assert site.said("agent_stopped")
    assert site.all_delivered()
    assert len(site.service.events("collector_silent")) == 1


def test_what_is_read_last_is_spooled_at_the_end(site: Site) -> None:
    site.settings(ship_interval_s=3600)
    site.service.close()
    agent = site.start()
    site.write_lines(5)
    assert wait_until(lambda: site.said("service_unreachable"))
    agent.send_signal(signal.SIGINT)
    assert agent.wait(timeout=10) == 0
    with sqlite3.connect(site.folder / "spool.db") as db:
        assert db.execute("SELECT count(*) FROM batches").fetchone()[0] >= 1
    db.close()


def test_sighup_starts_it_anew_with_new_settings(site: Site) -> None:
    agent = site.start()
    assert wait_until(lambda: bool(site.service.events("agent_started")))
    site.config.write_text(site.config.read_text() + "nonsense = 1\n")
    agent.send_signal(signal.SIGHUP)
    assert wait_until(lambda: site.said("reload_refused"))
    site.settings(ship_interval_s=0.2)
    agent.send_signal(signal.SIGHUP)
    assert wait_until(lambda: len(site.service.events("agent_started")) == 2)
    assert agent.poll() is None
    site.write_lines(5)
    assert wait_until(site.all_delivered)


def test_once_polls_ships_and_ends(site: Site) -> None:
    site.write_lines(3)
    assert site.start("--once").wait(timeout=30) == 0
    assert site.all_delivered()
    site.service.close()
    site.write_lines(3)
    assert site.start("--once").wait(timeout=30) == 1


def test_a_disk_with_no_room_keeps_events_in_memory_and_says_so(site: Site) -> None:
    def no_room() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, 60_000))

    site.log.write_text("")
    # The log goes through the same limit: only the agent's own few lines.
    site.start(limit=no_room)
    total = 0
    while not site.said("spool_degraded") and total < 20_000:
        site.write_lines(200)
        total += 200
        wait_until(lambda: len(site.delivered()) == site.written, 5)
    assert site.said("spool_degraded")
    site.write_lines(50)
    assert wait_until(site.all_delivered)
    assert len({stream for stream, _ in site.service.applied}) >= 2


def test_a_damaged_spool_is_moved_aside(site: Site) -> None:
    (site.folder / "spool.db").write_bytes(b"damaged" * 1000)
    site.start()
    site.write_lines(3)
    assert wait_until(site.all_delivered)
    assert site.said("spool_damaged")


def test_a_second_agent_on_the_same_spool_fails_and_says_why(site: Site) -> None:
    site.start()
    site.write_lines(1)
    assert wait_until(site.all_delivered)
    assert site.start().wait(timeout=30) == 1
    assert site.said("in use by another agent")


def test_an_unreadable_source_is_said_and_the_rest_goes_on(site: Site) -> None:
    site.lines.unlink()
    agent = site.start()
    assert wait_until(lambda: site.said("collector_unavailable"))
    assert wait_until(lambda: bool(site.service.events("agent_started")))
    assert agent.poll() is None


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ('[agent]\nspol = "x"\n', ["forewarn.toml:2", "agent.spol", "spool"]),
        ("[agent.collectors.lins]\nenabled = true\n", ["agent.collectors.lins", "lines"]),
        ('[agent.collectors.lines.options]\nfile = "x"\n', ["collector lines", "file", "path"]),
        ('[agent]\nservice_url = "nowhere"\n', ["agent.service_url", "nowhere"]),
        ('[agent]\nnode = "a/b"\n', ["agent.node", "a/b"]),
    ],
    ids=["unknown key", "unknown collector", "unknown option", "bad address", "bad node"],
)
def test_a_wrong_setting_ends_at_once_with_code_2(site: Site, settings: str, words: list[str]) -> None:
    site.config.write_text(settings)
    spool = str(site.folder / "spool.db")
    assert site.start(FOREWARN_AGENT_SPOOL=spool).wait(timeout=30) == 2
    text = site.log.read_text()
    assert all(word in text for word in words), text
    assert "Traceback" not in text


def test_a_taken_address_names_the_setting(site: Site) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        site.settings(listen=f"127.0.0.1:{taken.getsockname()[1]}")
        assert site.start().wait(timeout=30) == 1
    assert site.said("agent.listen")


def test_systemd_is_told(site: Site, tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as door:
        address = str(tmp_path / "notify")
        door.bind(address)
        door.settimeout(20)
        agent = site.start(NOTIFY_SOCKET=address, WATCHDOG_USEC="400000")
        told = {door.recv(64) for _ in range(4)}
        agent.terminate()
        while (word := door.recv(64)) != b"STOPPING=1":
            told.add(word)
    assert told == {b"READY=1", b"WATCHDOG=1"}
