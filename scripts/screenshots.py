"""Makes the pictures of the page in docs/images: a real demo, a real Chromium. `make screenshots` runs it.

What they show is the demo's simulated fleet, and says so.
"""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from selenium.webdriver import Chrome

ROOT = Path(__file__).resolve().parent.parent
IMAGES = ROOT / "docs" / "images"
WAIT_S = 150.0
COURSE_S = 330.0
"""Until the fatal event has come and a few points of the risk's course (one a minute) are there."""
POINTS = 4
READY = "return document.querySelector('main:not([aria-busy]) .card') !== null"
SIZES = {"wide": (1360, 900), "tablet": (820, 1100), "phone": (390, 844)}


def open_chromium(profile: Path) -> Chrome:
    """A headless Chromium that talks to nobody but the page."""
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium") or "/usr/bin/chromium"
    for word in (
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-quic",
        "--no-first-run",
        "--disable-background-networking",
        "--disable-component-update",
        "--disable-sync",
        "--hide-scrollbars",
        f"--user-data-dir={profile}",
    ):
        options.add_argument(word)
    return webdriver.Chrome(
        options=options, service=Service(shutil.which("chromedriver") or "/usr/bin/chromedriver")
    )


def shoot(browser: Chrome, url: str, name: str, size: tuple[int, int], dark: bool) -> Path:
    """One picture at 1:1 pixels."""
    scheme = "dark" if dark else "light"
    media = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
    metrics = {"width": size[0], "height": size[1], "deviceScaleFactor": 1, "mobile": size[0] < 700}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    browser.get("about:blank")
    browser.get(url)
    end = time.monotonic() + 20
    while time.monotonic() < end and not browser.execute_script(READY):
        threading.Event().wait(0.1)
    threading.Event().wait(1.5)  # the stream's first words, and a redraw
    path = IMAGES / f"page-{name}.png"
    browser.save_screenshot(str(path))
    return path


def get(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=5) as answer:  # noqa: S310 - our own demo on loopback
        return json.load(answer)


def wait_for_protection(url: str, demo: subprocess.Popen[bytes]) -> dict[str, Any]:
    """The completed protection; the demo makes one within about 90 s."""
    end = time.monotonic() + WAIT_S
    while time.monotonic() < end:
        if demo.poll() is not None:
            raise SystemExit("the demo ended by itself; run `forewarn demo` to see why")
        try:
            items = get(f"{url}/v1/protections")["items"]
        except OSError:
            items = []
        done = [item for item in items if item["state"] == "completed"]
        if done:
            found: dict[str, Any] = done[-1]
            return found
        threading.Event().wait(0.5)
    raise SystemExit(f"no protection within {WAIT_S:g} s")


def wait_for_course(url: str, device: str) -> None:
    """Something to look at: the whole story of the device."""
    end = time.monotonic() + COURSE_S
    while time.monotonic() < end:
        shown = get(f"{url}/v1/risk/{device}")
        if shown["level"] == "critical" and len(shown["history"]) >= POINTS:
            return
        threading.Event().wait(2)


def take_all(url: str, device: str) -> None:
    """Every picture of the page."""
    profile = Path(tempfile.mkdtemp(prefix="forewarn-chromium-"))
    browser = open_chromium(profile)
    try:
        page = f"{url}/#/"
        worn = f"{url}/#/device/{device.replace('/', '%2F')}"
        for name, where, size, dark in (
            ("desktop", page, "wide", False),
            ("desktop-dark", page, "wide", True),
            ("tablet", page, "tablet", False),
            ("phone", page, "phone", False),
            ("device", worn, "wide", False),
            ("device-phone", worn, "phone", True),
            ("jobs", f"{url}/#/jobs", "wide", False),
            ("alerts", f"{url}/#/alerts", "wide", False),
        ):
            path = shoot(browser, where, name, SIZES[size], dark)
            sys.stdout.write(f"{path.relative_to(ROOT)}\n")
    finally:
        browser.quit()
        shutil.rmtree(profile, ignore_errors=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", help="a demo that runs already; default: start one")
    parser.add_argument("--port", type=int, default=28420)
    arguments = parser.parse_args()
    IMAGES.mkdir(parents=True, exist_ok=True)
    if arguments.url:
        items = get(f"{arguments.url}/v1/protections")["items"]
        take_all(arguments.url, items[-1]["device"])
        return 0
    url = f"http://127.0.0.1:{arguments.port}"
    command = [sys.executable, "-m", "forewarn.daemon.cli", "demo", "--port", str(arguments.port)]
    demo = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        device = wait_for_protection(url, demo)["device"]
        wait_for_course(url, device)
        take_all(url, device)
    finally:
        demo.send_signal(signal.SIGTERM)
        demo.wait()
    return 0


if __name__ == "__main__":
    sys.exit(main())
