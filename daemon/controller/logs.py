"""Logs of the controller: one event a line on standard error, so that standard output stays the program's own."""

from __future__ import annotations

import logging
import sys

import stamina.instrumentation
import structlog

LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}


def set_up(level: str = "info") -> None:
    """Set up structlog for a process of ours; never called on import, since a job has its own logging."""
    # Every retry is said by the messenger itself, once a round.
    stamina.instrumentation.set_on_retry_hooks([])
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.KeyValueRenderer(key_order=["timestamp", "level", "event"]),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(LEVELS.get(level, logging.INFO)),
        # Asked for anew each time, since whoever hosts us may have put another stream there.
        logger_factory=lambda *_: structlog.PrintLogger(sys.stderr),
    )
