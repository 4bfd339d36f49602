"""The tables of the service's database. Times are seconds since the epoch (UTC); lists and tables are JSON text.

A change here needs a migration in `migrations/versions`; a test compares the two.
"""

from __future__ import annotations

from sqlalchemy import (
    JSON,
    BigInteger,
    Boolean,
    Column,
    Double,
    Index,
    Integer,
    MetaData,
    String,
    Table,
    Text,
    UniqueConstraint,
    text,
)

metadata = MetaData()

Serial = BigInteger().with_variant(Integer, "sqlite")
"""SQLite numbers rows by itself only in a column that is exactly INTEGER."""

events = Table(
    "events",
    metadata,
    Column("id", Serial, primary_key=True, autoincrement=True),
    Column("node", String(255), nullable=False),
    Column("stream", String(255), nullable=False),
    Column("sequence", BigInteger, nullable=False),
    Column("position", Integer, nullable=False),
    Column("time", Double, nullable=False),
    Column("received", Double, nullable=False),
    Column("device", String(512), nullable=False),
    Column("kind", String(64), nullable=False),
    Column("code", String(128), nullable=False),
    Column("severity", String(16), nullable=False),
    Column("action", String(128), nullable=False, default=""),
    Column("message", Text, nullable=False, default=""),
    Column("pci", String(64)),
    Column("count", Integer, nullable=False, default=1),
    UniqueConstraint("node", "stream", "sequence", "position", name="events_once"),
    Index("events_time", "time"),
    Index("events_device", "device", "time"),
)

jobs = Table(
    "jobs",
    metadata,
    Column("job", String(255), primary_key=True),
    Column("nodes", JSON, nullable=False),
    Column("devices", JSON, nullable=False),
    Column("webhook_url", Text, nullable=False, default=""),
    Column("webhook_secrets", JSON, nullable=False),
    Column("webhook_disabled", Text, nullable=False, default=""),
    Column("checkpoint_seconds", Double, nullable=False),
    Column("measured_checkpoint_seconds", Double),
    Column("restart_seconds", Double, nullable=False),
    Column("swap_seconds", Double),
    Column("checkpoint_interval_seconds", Double),
    Column("gpus", Integer),
    Column("dry_run", Boolean, nullable=False, default=False),
    Column("last_checkpoint", Double),
    Column("created", Double, nullable=False),
    Column("updated", Double, nullable=False),
)

OPEN_STATES = ("open", "accepted")
protections = Table(
    "protections",
    metadata,
    Column("id", String(64), primary_key=True),
    Column("job", String(255), nullable=False),
    Column("state", String(16), nullable=False),
    Column("action", String(32), nullable=False),
    Column("device", String(512), nullable=False),
    Column("devices", JSON, nullable=False),
    Column("nodes", JSON, nullable=False),
    Column("risk", JSON, nullable=False),
    Column("chance", Double, nullable=False),
    Column("reasons", JSON, nullable=False),
    Column("triggers", JSON, nullable=False),
    Column("simulated", Boolean, nullable=False, default=False),
    Column("dry_run", Boolean, nullable=False, default=False),
    Column("created", Double, nullable=False),
    Column("deadline", Double, nullable=False),
    Column("acknowledged", Double),
    Column("closed", Double),
    Column("escalated", Double),
    Column("checkpoint", Text),
    Column("step", BigInteger),
    Column("save_seconds", Double),
    Column("answer", Text, nullable=False, default=""),
    Index("protections_created", "created"),
    Index(
        "protections_one_open",
        "job",
        unique=True,
        sqlite_where=text("state IN ('open', 'accepted')"),
        postgresql_where=text("state IN ('open', 'accepted')"),
    ),
)

deliveries = Table(
    "deliveries",
    metadata,
    Column("id", String(64), primary_key=True),
    Column("protection", String(64), nullable=False),
    Column("job", String(255), nullable=False),
    Column("url", Text, nullable=False),
    Column("state", String(16), nullable=False),
    Column("attempts", Integer, nullable=False, default=0),
    Column("created", Double, nullable=False),
    Column("deadline", Double, nullable=False),
    Column("next_attempt", Double, nullable=False),
    Column("claimed_until", Double, nullable=False, default=0.0),
    Column("finished", Double),
    Column("last_status", Integer),
    Column("last_error", Text, nullable=False, default=""),
    Column("body", Text, nullable=False),
    Column("log", JSON, nullable=False),
    Index("deliveries_due", "state", "next_attempt"),
    Index("deliveries_protection", "protection"),
)

alerts = Table(
    "alerts",
    metadata,
    Column("id", Serial, primary_key=True, autoincrement=True),
    Column("key", String(600), nullable=False),
    Column("level", String(16), nullable=False),
    Column("title", Text, nullable=False),
    Column("reason", Text, nullable=False),
    Column("device", String(512), nullable=False, default=""),
    Column("node", String(255), nullable=False, default=""),
    Column("job", String(255), nullable=False, default=""),
    Column("simulated", Boolean, nullable=False, default=False),
    Column("created", Double, nullable=False),
    Column("updated", Double, nullable=False),
    Column("acknowledged", Double),
    Column("acknowledged_by", String(255), nullable=False, default=""),
    Column("resolved", Double),
    Index("alerts_created", "created"),
    Index(
        "alerts_one_open",
        "key",
        unique=True,
        sqlite_where=text("resolved IS NULL"),
        postgresql_where=text("resolved IS NULL"),
    ),
)

silences = Table(
    "silences",
    metadata,
    Column("id", Serial, primary_key=True, autoincrement=True),
    Column("node", String(255), nullable=False, default=""),
    Column("device", String(512), nullable=False, default=""),
    Column("job", String(255), nullable=False, default=""),
    Column("starts", Double, nullable=False),
    Column("ends", Double, nullable=False),
    Column("reason", Text, nullable=False, default=""),
    Column("created_by", String(255), nullable=False, default=""),
)

tokens = Table(
    "tokens",
    metadata,
    Column("id", String(32), primary_key=True),
    Column("role", String(16), nullable=False),
    Column("node", String(255), nullable=False, default=""),
    Column("name", String(255), nullable=False, default=""),
    Column("digest", String(64), nullable=False),
    Column("created", Double, nullable=False),
    Column("expires", Double),
    Column("revoked", Double),
)

failures = Table(
    "failures",
    metadata,
    Column("id", Serial, primary_key=True, autoincrement=True),
    Column("time", Double, nullable=False),
    Column("node", String(255), nullable=False),
    Column("device", String(512), nullable=False),
    Column("cause", String(255), nullable=False),
    Column("reported_by", String(255), nullable=False, default=""),
    Column("created", Double, nullable=False),
    UniqueConstraint("device", "time", "cause", name="failures_once"),
)

audit = Table(
    "audit",
    metadata,
    Column("id", Serial, primary_key=True, autoincrement=True),
    Column("time", Double, nullable=False),
    Column("who", String(255), nullable=False),
    Column("action", String(64), nullable=False),
    Column("subject", String(512), nullable=False),
    Column("detail", JSON, nullable=False),
)
