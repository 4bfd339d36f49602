"""The node's own page for Prometheus: /metrics from the newest readings, /healthz for a probe.

Names, types and help come from the catalog. A device that is gone is gone from the page; what is stale is not shown.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

from forewarn import __version__
from forewarn.collectors.base import Device, Sample
from forewarn.collectors.catalog import EXPOSED_PREFIX, METRICS, Metric, exposed_name, exposed_scale
from forewarn.collectors.errors import StorageError
from forewarn.daemon.agent.intake import Intake
from forewarn.daemon.agent.logs import log

if TYPE_CHECKING:
    from prometheus_client.core import Metric as Family

REQUEST_TIMEOUT_S = 5.0


class Page:
    """A custom collector for prometheus_client over an Intake and the agent's own samples."""

    def __init__(self, node: str, intake: Intake, own: Callable[[], list[Sample]]) -> None:
        self._node, self._intake, self._own = node, intake, own

    def collect(self) -> Iterable[Family]:
        """Families in catalog order, then what is known of each device."""
        from prometheus_client.core import GaugeMetricFamily

        devices = self._intake.devices()
        values: dict[str, dict[tuple[str, tuple[tuple[str, str], ...]], float]] = {}
        for (device, name, labels), value in self._intake.latest():
            values.setdefault(name, {})[device, labels] = value
        for s in self._own():
            values.setdefault(s.metric, {})[s.device, tuple(sorted(s.labels.items()))] = s.value
        for metric in METRICS.values():
            if metric.name in values:
                yield self._family(metric, values[metric.name], devices)
        info = GaugeMetricFamily(
            f"{EXPOSED_PREFIX}device_info",
            "What is known of each device; always 1",
            labels=("node", "device", "kind", "model", "serial", "pci", "simulated"),
        )
        for local, d in sorted(devices.items()):
            simulated = "true" if d.simulated else "false"
            info.add_metric((self._node, local, d.kind, d.model, d.serial, d.pci or "", simulated), 1)
        yield info
        build = GaugeMetricFamily(
            f"{EXPOSED_PREFIX}agent_info", "Version of the agent; always 1", labels=("node", "version")
        )
        build.add_metric((self._node, __version__), 1)
        yield build

    def _family(
        self,
        metric: Metric,
        values: dict[tuple[str, tuple[tuple[str, str], ...]], float],
        devices: dict[str, Device],
    ) -> Family:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        kind = CounterMetricFamily if metric.type == "counter" else GaugeMetricFamily
        family: Family = kind(exposed_name(metric), metric.help)
        scale = exposed_scale(metric)
        split = {device for device, labels in values if labels}
        for (device, labels), value in values.items():
            if not labels and device in split:
                continue  # the sum beside its parts would count twice in every PromQL sum
            named = {"node": self._node, "device": device}
            if metric.kind == "gpu":
                named["uuid"] = devices[device].serial if device in devices else ""
            family.add_sample(exposed_name(metric), {**named, **dict(labels)}, value * scale)
        return family


class MetricsServer:
    """Serves the page from a thread of its own."""

    def __init__(self, host: str, port: int, page: Page, healthy: Callable[[], tuple[bool, str]]) -> None:
        """Bind at once. Raises StorageError naming the address when it is taken."""
        handler = _handler(page, healthy)
        try:
            self._server = ThreadingHTTPServer((host, port), handler)
        except OSError as error:
            raise StorageError(
                f"agent.listen: {host}:{port} cannot be used: {error.strerror or error}; "
                "set another address, or an empty one for none"
            ) from error
        self._server.daemon_threads = True
        self._thread = threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 30.0}, name="metrics", daemon=True
        )

    @property
    def port(self) -> int:
        return int(self._server.server_address[1])

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Take no more requests. The thread ends with the process."""
        self._server.socket.close()


def _handler(page: Page, healthy: Callable[[], tuple[bool, str]]) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        timeout = REQUEST_TIMEOUT_S
        server_version = f"forewarn-agent/{__version__}"
        sys_version = ""

        def do_GET(self) -> None:
            path = self.path.partition("?")[0]
            if path == "/metrics":
                self._answer(200, "text/plain; version=0.0.4; charset=utf-8", render(page))
            elif path == "/healthz":
                good, text = healthy()
                self._answer(200 if good else 503, "text/plain; charset=utf-8", f"{text}\n".encode())
            else:
                self._answer(404, "text/plain; charset=utf-8", b"/metrics and /healthz are here\n")

        def _answer(self, status: int, kind: str, body: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            log(logging.DEBUG, "http", request=format % args)

    return Handler


def render(page: Page) -> bytes:
    """The page in the text format of Prometheus."""
    from prometheus_client import CollectorRegistry, generate_latest

    registry = CollectorRegistry(auto_describe=False)
    registry.register(page)
    return generate_latest(registry)
