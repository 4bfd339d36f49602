"""Stand-ins for what a node has: a smartctl that replays recordings, an exporter page, a webhook receiver."""

from __future__ import annotations

import contextlib
import json
import sys
import threading
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from standardwebhooks.webhooks import Webhook, WebhookVerificationError

SMARTCTL = """\
#!{python}
import json, sys
disks = json.loads({disks!r})
names = [word for word in sys.argv[1:] if word in disks]
if any(word.startswith("--scan") for word in sys.argv):
    found = [{{"name": n, "info_name": n, "type": t, "protocol": p}} for n, (_, t, p) in disks.items()]
    print(json.dumps({{"smartctl": {{"version": [7, 3], "exit_status": 0}}, "devices": found}}))
elif names:
    text = open(disks[names[-1]][0]).read()
    print(text)
    status = json.loads(text).get("smartctl", {{}}).get("exit_status", 0)
    sys.exit(status)
else:
    sys.exit(1)
"""


def write_smartctl(path: Path, disks: Mapping[str, tuple[Path, str, str]]) -> Path:
    """A program that answers like smartctl with recordings: device -> (file, type, protocol)."""
    table = json.dumps({name: (str(file), kind, protocol) for name, (file, kind, protocol) in disks.items()})
    path.write_text(SMARTCTL.format(python=sys.executable, disks=table))
    path.chmod(0o755)
    return path


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    page: bytes = b""
    received: list[dict[str, Any]]
    secret: str = ""
    status: int = 202


class _Handler(BaseHTTPRequestHandler):
    server: _Server

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/plain; version=0.0.4")
        self.send_header("Content-Length", str(len(self.server.page)))
        self.end_headers()
        self.wfile.write(self.server.page)

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        headers = {k.lower(): v for k, v in self.headers.items()}
        try:
            Webhook(self.server.secret).verify(body, headers)
            genuine = True
        except WebhookVerificationError:
            genuine = False
        self.server.received.append(
            {"id": headers.get("webhook-id"), "genuine": genuine, "body": json.loads(body)}
        )
        self.send_response(self.server.status)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *arguments: object) -> None:
        """Quiet: a test's output is its own."""


@contextlib.contextmanager
def http_server(page: bytes = b"", secret: str = "", status: int = 202) -> Iterator[_Server]:
    """A loopback server: GET answers `page`; POST is a webhook, verified with `secret` and kept in `received`."""
    server = _Server(("127.0.0.1", 0), _Handler)
    server.page, server.secret, server.status, server.received = page, secret, status, []
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def url_of(server: ThreadingHTTPServer, path: str = "/") -> str:
    return f"http://127.0.0.1:{server.server_address[1]}{path}"
