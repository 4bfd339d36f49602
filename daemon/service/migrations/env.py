"""Alembic's entry: runs the steps on the connection that `database.open_database` gives. Alembic executes this file."""

from __future__ import annotations

from alembic import context

from forewarn.daemon.service.schema import metadata

context.configure(
    connection=context.config.attributes["connection"], target_metadata=metadata, render_as_batch=True
)
with context.begin_transaction():
    context.run_migrations()
