"""Alembic migrations of the service's database; `database.open_database` runs them."""
