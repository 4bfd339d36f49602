"""Times as the API and the commands show them: ISO 8601 in UTC."""

from __future__ import annotations

from datetime import UTC, datetime


def iso(time: float | None) -> str | None:
    """Seconds since the epoch as ISO 8601 in UTC, to the millisecond; None stays None."""
    if time is None:
        return None
    return datetime.fromtimestamp(time, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
