"""The first schema."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None


def upgrade() -> None:

    op.create_table(
        "alerts",
        sa.Column(
            "id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), autoincrement=True, nullable=False
        ),
        sa.Column("key", sa.String(length=600), nullable=False),
        sa.Column("level", sa.String(length=16), nullable=False),
        sa.Column("title", sa.Text(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("device", sa.String(length=512), nullable=False),
        sa.Column("node", sa.String(length=255), nullable=False),
        sa.Column("job", sa.String(length=255), nullable=False),
        sa.Column("simulated", sa.Boolean(), nullable=False),
        sa.Column("created", sa.Double(), nullable=False),
        sa.Column("updated", sa.Double(), nullable=False),
        sa.Column("acknowledged", sa.Double(), nullable=True),
        sa.Column("acknowledged_by", sa.String(length=255), nullable=False),
        sa.Column("resolved", sa.Double(), nullable=True),
        sa.PrimaryKeyConstraint("id"),
    )
    with op.batch_alter_table("alerts", schema=None) as batch_op:
        batch_op.create_index("alerts_created", ["created"], unique=False)
        batch_op.create_index(
            "alerts_one_open",
            ["key"],
            unique=True,
            sqlite_where=sa.text("resolved IS NULL"),
            postgresql_where=sa.text("resolved IS NULL"),
        )

    op.create_table(
        "audit",
        sa.Column(
            "id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), autoincrement=True, nullable=False
        ),
        sa.Column("time", sa.Double(), nullable=False),
        sa.Column("who", sa.String(length=255), nullable=False),
        sa.Column("action", sa.String(length=64), nullable=False),
        sa.Column("subject", sa.String(length=512), nullable=False),
        sa.Column("detail", sa.JSON(), nullable=False),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_table(
        "deliveries",
        sa.Column("id", sa.String(length=64), nullable=False),
        sa.Column("protection", sa.String(length=64), nullable=False),
        sa.Column("job", sa.String(length=255), nullable=False),
        sa.Column("url", sa.Text(), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("attempts", sa.Integer(), nullable=False),
        sa.Column("created", sa.Double(), nullable=False),
        sa.Column("deadline", sa.Double(), nullable=False),
        sa.Column("next_attempt", sa.Double(), nullable=False),
        sa.Column("claimed_until", sa.Double(), nullable=False),
        sa.Column("finished", sa.Double(), nullable=True),
        sa.Column("last_status", sa.Integer(), nullable=True),
        sa.Column("last_error", sa.Text(), nullable=False),
        sa.Column("body", sa.Text(), nullable=False),
        sa.Column("log", sa.JSON(), nullable=False),
        sa.PrimaryKeyConstraint("id"),
    )
    with op.batch_alter_table("deliveries", schema=None) as batch_op:
        batch_op.create_index("deliveries_due", ["state", "next_attempt"], unique=False)
        batch_op.create_index("deliveries_protection", ["protection"], unique=False)

    op.create_table(
        "events",
        sa.Column(
            "id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), autoincrement=True, nullable=False
        ),
        sa.Column("node", sa.String(length=255), nullable=False),
        sa.Column("stream", sa.String(length=255), nullable=False),
        sa.Column("sequence", sa.BigInteger(), nullable=False),
        sa.Column("position", sa.Integer(), nullable=False),
        sa.Column("time", sa.Double(), nullable=False),
        sa.Column("received", sa.Double(), nullable=False),
        sa.Column("device", sa.String(length=512), nullable=False),
        sa.Column("kind", sa.String(length=64), nullable=False),
        sa.Column("code", sa.String(length=128), nullable=False),
        sa.Column("severity", sa.String(length=16), nullable=False),
        sa.Column("action", sa.String(length=128), nullable=False),
        sa.Column("message", sa.Text(), nullable=False),
        sa.Column("pci", sa.String(length=64), nullable=True),
        sa.Column("count", sa.Integer(), nullable=False),
        sa.PrimaryKeyConstraint("id"),
        sa.UniqueConstraint("node", "stream", "sequence", "position", name="events_once"),
    )
    with op.batch_alter_table("events", schema=None) as batch_op:
        batch_op.create_index("events_device", ["device", "time"], unique=False)
        batch_op.create_index("events_time", ["time"], unique=False)

    op.create_table(
        "failures",
        sa.Column(
            "id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), autoincrement=True, nullable=False
        ),
        sa.Column("time", sa.Double(), nullable=False),
        sa.Column("node", sa.String(length=255), nullable=False),
        sa.Column("device", sa.String(length=512), nullable=False),
        sa.Column("cause", sa.String(length=255), nullable=False),
        sa.Column("reported_by", sa.String(length=255), nullable=False),
        sa.Column("created", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("id"),
        sa.UniqueConstraint("device", "time", "cause", name="failures_once"),
    )
    op.create_table(
        "jobs",
        sa.Column("job", sa.String(length=255), nullable=False),
        sa.Column("nodes", sa.JSON(), nullable=False),
        sa.Column("devices", sa.JSON(), nullable=False),
        sa.Column("webhook_url", sa.Text(), nullable=False),
        sa.Column("webhook_secrets", sa.JSON(), nullable=False),
        sa.Column("webhook_disabled", sa.Text(), nullable=False),
        sa.Column("checkpoint_seconds", sa.Double(), nullable=False),
        sa.Column("measured_checkpoint_seconds", sa.Double(), nullable=True),
        sa.Column("restart_seconds", sa.Double(), nullable=False),
        sa.Column("swap_seconds", sa.Double(), nullable=True),
        sa.Column("checkpoint_interval_seconds", sa.Double(), nullable=True),
        sa.Column("gpus", sa.Integer(), nullable=True),
        sa.Column("dry_run", sa.Boolean(), nullable=False),
        sa.Column("last_checkpoint", sa.Double(), nullable=True),
        sa.Column("created", sa.Double(), nullable=False),
        sa.Column("updated", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("job"),
    )
    op.create_table(
        "protections",
        sa.Column("id", sa.String(length=64), nullable=False),
        sa.Column("job", sa.String(length=255), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("action", sa.String(length=32), nullable=False),
        sa.Column("device", sa.String(length=512), nullable=False),
        sa.Column("devices", sa.JSON(), nullable=False),
        sa.Column("nodes", sa.JSON(), nullable=False),
        sa.Column("risk", sa.JSON(), nullable=False),
        sa.Column("chance", sa.Double(), nullable=False),
        sa.Column("reasons", sa.JSON(), nullable=False),
        sa.Column("triggers", sa.JSON(), nullable=False),
        sa.Column("simulated", sa.Boolean(), nullable=False),
        sa.Column("dry_run", sa.Boolean(), nullable=False),
        sa.Column("created", sa.Double(), nullable=False),
        sa.Column("deadline", sa.Double(), nullable=False),
        sa.Column("acknowledged", sa.Double(), nullable=True),
        sa.Column("closed", sa.Double(), nullable=True),
        sa.Column("escalated", sa.Double(), nullable=True),
        sa.Column("checkpoint", sa.Text(), nullable=True),
        sa.Column("step", sa.BigInteger(), nullable=True),
        sa.Column("save_seconds", sa.Double(), nullable=True),
        sa.Column("answer", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("id"),
    )
    with op.batch_alter_table("protections", schema=None) as batch_op:
        batch_op.create_index("protections_created", ["created"], unique=False)
        batch_op.create_index(
            "protections_one_open",
            ["job"],
            unique=True,
            sqlite_where=sa.text("state IN ('open', 'accepted')"),
            postgresql_where=sa.text("state IN ('open', 'accepted')"),
        )

    op.create_table(
        "silences",
        sa.Column(
            "id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), autoincrement=True, nullable=False
        ),
        sa.Column("node", sa.String(length=255), nullable=False),
        sa.Column("device", sa.String(length=512), nullable=False),
        sa.Column("job", sa.String(length=255), nullable=False),
        sa.Column("starts", sa.Double(), nullable=False),
        sa.Column("ends", sa.Double(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("created_by", sa.String(length=255), nullable=False),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_table(
        "tokens",
        sa.Column("id", sa.String(length=32), nullable=False),
        sa.Column("role", sa.String(length=16), nullable=False),
        sa.Column("node", sa.String(length=255), nullable=False),
        sa.Column("name", sa.String(length=255), nullable=False),
        sa.Column("digest", sa.String(length=64), nullable=False),
        sa.Column("created", sa.Double(), nullable=False),
        sa.Column("expires", sa.Double(), nullable=True),
        sa.Column("revoked", sa.Double(), nullable=True),
        sa.PrimaryKeyConstraint("id"),
    )


def downgrade() -> None:

    op.drop_table("tokens")
    op.drop_table("silences")
    with op.batch_alter_table("protections", schema=None) as batch_op:
        batch_op.drop_index(
            "protections_one_open",
            sqlite_where=sa.text("state IN ('open', 'accepted')"),
            postgresql_where=sa.text("state IN ('open', 'accepted')"),
        )
        batch_op.drop_index("protections_created")

    op.drop_table("protections")
    op.drop_table("jobs")
    op.drop_table("failures")
    with op.batch_alter_table("events", schema=None) as batch_op:
        batch_op.drop_index("events_time")
        batch_op.drop_index("events_device")

    op.drop_table("events")
    with op.batch_alter_table("deliveries", schema=None) as batch_op:
        batch_op.drop_index("deliveries_protection")
        batch_op.drop_index("deliveries_due")

    op.drop_table("deliveries")
    op.drop_table("audit")
    with op.batch_alter_table("alerts", schema=None) as batch_op:
        batch_op.drop_index(
            "alerts_one_open",
            sqlite_where=sa.text("resolved IS NULL"),
            postgresql_where=sa.text("resolved IS NULL"),
        )
        batch_op.drop_index("alerts_created")

    op.drop_table("alerts")
