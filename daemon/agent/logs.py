"""Log lines of the agent: one event a line with fields, by the standard library alone.

A line reads `time level=... event=... key=value ...`; whoever reads it needs no parser, and a parser needs no rules.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from typing import Any, TextIO

LEVELS = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
}


class FieldFormatter(logging.Formatter):
    """Formats `log(..., "event", key=value)` and plain messages of libraries alike."""

    def format(self, record: logging.LogRecord) -> str:
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        fields: dict[str, Any] = getattr(record, "fields", {})
        head = "event" if hasattr(record, "fields") else "message"
        words = [f"{stamp}.{int(record.msecs):03d}Z", f"level={record.levelname.lower()}"]
        words.append(f"{head}={_quoted(record.getMessage())}")
        words += [f"{key}={_quoted(value)}" for key, value in fields.items() if value not in (None, "")]
        if record.exc_info:
            words.append(f"traceback={_quoted(self.formatException(record.exc_info))}")
        return " ".join(words)


def _quoted(value: Any) -> str:
    text = f"{value:.6g}" if isinstance(value, float) else str(value)
    if text and not any(c.isspace() or c in '"=' or not c.isprintable() for c in text):
        return text
    return json.dumps(text, ensure_ascii=False)


def configure(level: str, stream: TextIO | None = None) -> None:
    """Send all log lines to `stream` (default: standard error)."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(FieldFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(LEVELS[level])


def log(level: int, event: str, /, *, exc_info: BaseException | None = None, **fields: Any) -> None:
    """One line: what happened, and its fields. Fields that are None or empty are left out."""
    logging.getLogger("forewarn.agent").log(level, "%s", event, exc_info=exc_info, extra={"fields": fields})
