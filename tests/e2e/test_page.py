"""The page in a real Chromium against a real service: what changes is seen, what is done has its effect."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from forewarn.collectors.base import Event
from forewarn.collectors.clock import SystemClock
from forewarn.daemon.demo.fleet import SimulatedAgent
from forewarn.daemon.demo.gpus import SimulatedFleet

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
pytestmark = [
    pytest.mark.browser,
    pytest.mark.slow,
    pytest.mark.skipif(not CHROMIUM or not DRIVER, reason="chromium and chromedriver are not installed"),
]
DEADLINE_S = 60.0
CYCLE_S = 1.0
SECRET = "whsec_" + "QUJDREVGR0hJSktMTU5PUFFSU1RVVldYWVowMTIzNDU="


def wait_for(condition: Callable[[], Any], what: str, deadline_s: float = DEADLINE_S) -> Any:
    end = time.monotonic() + deadline_s
    while time.monotonic() < end:
        value = condition()
        if value:
            return value
        threading.Event().wait(0.05)
    raise AssertionError(f"{what} did not happen within {deadline_s:g} s")


class Running:
    """A real service with a small simulated fleet."""

    def __init__(self, folder: Path) -> None:
        with socket.create_server(("127.0.0.1", 0)) as probe:
            self.port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.config = folder / "page.toml"
        self.config.write_text(
            f'[service]\nlisten = "127.0.0.1:{self.port}"\ndata = "{folder}/data"\ncycle_interval_s = {CYCLE_S}\n'
            'allow_webhook_hosts = ["127.0.0.1"]\nallow_insecure_webhooks = true\n'
            "checkpoint_request_timeout_s = 1.0\n"
        )
        self.operator = self.token("--role", "operator")
        agent = self.token("--role", "agent", "--node", "*")
        self._log = (folder / "service.log").open("wb")
        command = [sys.executable, "-m", "forewarn.daemon.cli", "serve", "--config", str(self.config)]
        self.process = subprocess.Popen(command, stdout=self._log, stderr=self._log, env=self.environment())
        self.client = httpx.Client(base_url=self.url, trust_env=False, timeout=10)
        self.client.headers["Authorization"] = f"Bearer {self.operator}"
        self.sender = httpx.Client(base_url=self.url, trust_env=False, timeout=10)
        self.sender.headers["Authorization"] = f"Bearer {agent}"
        self.fleet = SimulatedFleet(3, 8, 5, time.time())
        self.agents = {n: SimulatedAgent(n, self.sender, SystemClock()) for n in self.fleet.nodes}
        wait_for(self.ready, "the start of the service")

    def environment(self) -> dict[str, str]:
        return {k: v for k, v in os.environ.items() if not k.startswith("FOREWARN_")}

    def token(self, *words: str) -> str:
        command = [
            sys.executable,
            "-m",
            "forewarn.daemon.cli",
            "token",
            "--config",
            str(self.config),
            "create",
            *words,
        ]
        made = subprocess.run(command, capture_output=True, text=True, check=True, env=self.environment())
        return made.stdout.strip()

    def ready(self) -> bool:
        assert self.process.poll() is None
        try:
            return self.client.get("/readyz").is_success
        except httpx.HTTPError:
            return False

    def report(self) -> None:
        now = time.time()
        for node, agent in self.agents.items():
            agent.add([(now, self.fleet.poll(node, now))])
            assert agent.ship() == 0

    def fatal(self, node: str, gpu: str) -> None:
        """A contained memory error of one GPU."""
        now = time.time()
        reading = self.fleet.poll(node, now)
        reading.events.append(Event(gpu, "xid", "94", "critical", "Contained memory error", time=now))
        self.agents[node].add([(now, reading)])
        assert self.agents[node].ship() == 0

    def close(self) -> None:
        self.client.close()
        self.sender.close()
        self.process.terminate()
        self.process.wait(30)
        self._log.close()


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    running = Running(tmp_path_factory.mktemp("page"))
    running.report()
    wait_for(lambda: len(running.client.get("/v1/risk").json()["items"]) >= 24, "the risk of 24 devices")
    yield running
    running.close()


class Browser:
    def __init__(self, profile: Path) -> None:
        from selenium import webdriver
        from selenium.webdriver.chrome.service import Service

        options = webdriver.ChromeOptions()
        options.binary_location = CHROMIUM or ""
        for word in (
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-quic",
            "--no-first-run",
            "--disable-background-networking",
            "--disable-component-update",
            "--disable-sync",
            "--window-size=1360,900",
            f"--user-data-dir={profile}",
        ):
            options.add_argument(word)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
        self.chrome = webdriver.Chrome(options=options, service=Service(DRIVER))

    def open(self, url: str) -> None:
        self.chrome.get("about:blank")
        self.chrome.get(url)

    def run(self, script: str, *values: Any) -> Any:
        return self.chrome.execute_script(f"return {script}", *values)

    def text(self, selector: str = "main") -> str:
        return str(
            self.run(
                "[...document.querySelectorAll(arguments[0])].map(e => e.innerText).join('\\n')", selector
            )
        )

    def wait_text(self, text: str, selector: str = "main", deadline_s: float = 20.0) -> None:
        wait_for(lambda: text in self.text(selector), f"{text!r} in {selector}", deadline_s)

    def press(self, label: str) -> None:
        """Click the first shown button with this label."""
        script = "[...document.querySelectorAll('button')].find(b => b.innerText === arguments[0] && b.offsetParent)"
        wait_for(lambda: self.run(f"({script}) !== undefined", label), f"a button {label!r}", 20)
        self.run(f"({script}).click()", label)

    def give_token(self, token: str) -> None:
        wait_for(
            lambda: self.run("document.getElementById('token-dialog').open"), "the question for a token", 20
        )
        self.run("document.getElementById('token-input').value = arguments[0]", token)
        self.press("Continue")

    def _log(self, name: str) -> list[dict[str, Any]]:
        return self.chrome.get_log(name)  # type: ignore[no-untyped-call,no-any-return]  # selenium leaves it bare

    def complaints(self) -> list[str]:
        """Errors of the console, such as what the content security policy forbids; a refused action is none."""
        lines = [entry["message"] for entry in self._log("browser") if entry["level"] == "SEVERE"]
        return [line for line in lines if "status of 401" not in line]

    def hosts(self) -> set[str]:
        """Every host that was asked for anything."""
        asked = set()
        for entry in self._log("performance"):
            message = json.loads(entry["message"])["message"]
            if message["method"] == "Network.requestWillBeSent":
                url = httpx.URL(message["params"]["request"]["url"])
                if url.scheme in ("http", "https", "ws", "wss"):  # not Chromium's own chrome: pages
                    asked.add(url.netloc.decode())
        return asked


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[Browser]:
    opened = Browser(tmp_path / "profile")
    yield opened
    opened.chrome.quit()


def test_fleet_is_shown_and_nothing_is_asked_elsewhere(service: Running, browser: Browser) -> None:
    browser.open(f"{service.url}/")
    browser.wait_text("24 simulated")
    browser.wait_text("Live", "#live")
    assert browser.hosts() == {f"127.0.0.1:{service.port}"}
    assert browser.complaints() == []
    browser.run("document.querySelector('.skip').click()")
    assert browser.run("document.activeElement.id") == "main"
    assert "24 simulated" in browser.text()
    # Every cell can be reached by keyboard, and Enter opens its device.
    browser.run("document.querySelector('.heat').focus()")
    keys = "document.querySelector('.heat').dispatchEvent(new KeyboardEvent('keydown', {key: arguments[0]}))"
    browser.run(keys, "Home")
    browser.run(keys, "ArrowRight")
    browser.wait_text("sim-01/gpu1", ".heat-info")
    browser.run(keys, "Enter")
    browser.wait_text("Chance of failure")
    assert "sim-01/gpu1" in browser.text("h1")


def test_fatal_event_is_seen_live_and_leads_to_its_reasons(service: Running, browser: Browser) -> None:
    browser.open(f"{service.url}/")
    browser.wait_text("Live", "#live")
    browser.wait_text("24 simulated")
    assert "sim-02/gpu5" not in browser.text()
    service.fatal("sim-02", "gpu5")
    browser.wait_text("sim-02/gpu5", deadline_s=10)
    browser.wait_text("critical")
    browser.wait_text("simulated")
    browser.open(f"{service.url}/#/node/sim-02")
    browser.wait_text("gpu5")
    browser.run("[...document.querySelectorAll('.tile')].find(t => t.innerText.includes('gpu5')).click()")
    browser.wait_text("XID 94")
    browser.wait_text("Readings")
    assert browser.run("document.querySelectorAll('.chart svg').length") > 3
    shown = service.client.get("/v1/risk/sim-02/gpu5").json()["risk"]["3600"]
    browser.wait_text(f"{shown * 100:.0f} %", ".horizons")
    assert browser.complaints() == []


def test_alert_is_acknowledged_and_silenced_with_a_token(service: Running, browser: Browser) -> None:
    service.fatal("sim-03", "gpu1")
    wait_for(
        lambda: service.client.get("/v1/alerts", params={"device": "sim-03/gpu1"}).json()["items"], "an alert"
    )
    browser.open(f"{service.url}/#/alerts")
    browser.wait_text("sim-03/gpu1")
    browser.press("Acknowledge")
    browser.give_token("fwt_wrong_wrong")
    browser.wait_text("token", "#notice")
    browser.press("Acknowledge")
    browser.give_token(service.operator)
    browser.wait_text("acknowledged just now", deadline_s=10)
    browser.press("Silence")
    browser.run("document.getElementById('silence-reason').value = 'swap planned'")
    browser.run("document.querySelector('#silence-dialog button.primary').click()")
    browser.wait_text("swap planned")
    silences = service.client.get("/v1/silences").json()["items"]
    assert [s["reason"] for s in silences] == ["swap planned"]
    browser.press("End now")
    browser.wait_text("ended")
    assert "fwt_" not in browser.run("JSON.stringify(localStorage)")


def test_dead_delivery_is_sent_again(service: Running, browser: Browser) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]  # nobody listens there once this ends
    body = {
        "nodes": ["sim-01"],
        "webhook": {"url": f"http://127.0.0.1:{port}/webhook", "secret": SECRET},
        "checkpoint_seconds": 0.5,
    }
    assert service.client.put("/v1/jobs/llm", json=body).is_success
    service.fatal("sim-01", "gpu7")

    def dead() -> bool:
        items = service.client.get("/v1/deliveries").json()["items"]
        return bool(items) and items[0]["state"] == "dead"

    wait_for(dead, "the end of the delivery's attempts")
    before = service.client.get("/v1/deliveries").json()["items"][0]["attempts"]
    browser.open(f"{service.url}/#/deliveries")
    browser.wait_text("dead")
    browser.press("Retry")
    browser.give_token(service.operator)
    browser.wait_text("It is sent again", "#notice")
    wait_for(
        lambda: service.client.get("/v1/deliveries").json()["items"][0]["attempts"] > before,
        "another attempt",
    )
    browser.open(f"{service.url}/#/jobs")
    browser.wait_text("because of sim-01/gpu7")
    browser.wait_text("Escalated")


def test_service_that_goes_away_is_said_and_its_return_is_noticed(service: Running, browser: Browser) -> None:
    browser.open(f"{service.url}/")
    browser.wait_text("Live", "#live")
    browser.chrome.execute_cdp_cmd("Network.enable", {})
    browser.chrome.execute_cdp_cmd(
        "Network.emulateNetworkConditions",
        {"offline": True, "latency": 0, "downloadThroughput": 0, "uploadThroughput": 0},
    )
    browser.wait_text("does not answer", "#live", deadline_s=30)
    browser.wait_text("What is shown may be old")
    browser.chrome.execute_cdp_cmd(
        "Network.emulateNetworkConditions",
        {"offline": False, "latency": 0, "downloadThroughput": -1, "uploadThroughput": -1},
    )
    browser.wait_text("Live", "#live", deadline_s=40)
    wait_for(lambda: "may be old" not in browser.text(), "the end of the warning", 20)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_no_accessibility_fault(service: Running, browser: Browser, scheme: str) -> None:
    axe = pytest.importorskip("axe_core_python", reason="axe-core-python is not installed")
    script = (Path(axe.__file__).parent / "axe.min.js").read_text(encoding="utf-8")
    media = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
    browser.chrome.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
    browser.chrome.set_script_timeout(60)
    for where in (
        "",
        "devices",
        "jobs",
        "alerts",
        "events",
        "deliveries",
        "models",
        "device/sim-02%2Fgpu5",
        "node/sim-02",
    ):
        browser.open(f"{service.url}/#/{where}")
        wait_for(
            lambda: browser.run("document.querySelector('main:not([aria-busy]) .card')"),
            f"content of {where}",
            20,
        )
        browser.chrome.execute_cdp_cmd(
            "Runtime.evaluate", {"expression": script}
        )  # past the page's own policy
        found = browser.chrome.execute_async_script(
            "const done = arguments[0]; axe.run(document).then(r => done(r.violations.map(v => "
            "[v.id, v.impact, v.nodes.map(n => n.html.slice(0, 160))])), e => done(String(e)));"
        )
        assert found == [], where


def test_fits_a_phone_without_scrolling_sideways(service: Running, browser: Browser) -> None:
    browser.chrome.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride",
        {"width": 390, "height": 844, "deviceScaleFactor": 1, "mobile": True},
    )
    for where in ("", "devices", "jobs", "alerts", "events", "deliveries", "models", "device/sim-02%2Fgpu5"):
        browser.open(f"{service.url}/#/{where}")
        wait_for(
            lambda: browser.run("document.querySelectorAll('main .card').length"), f"content of {where}", 20
        )
        threading.Event().wait(0.3)
        assert browser.run("document.documentElement.scrollWidth") <= 390, where
