"""The service's database: SQLite by default, PostgreSQL by URL. Opening it brings it up to date by Alembic."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import alembic.command
import alembic.config
import alembic.util
import sqlalchemy
from sqlalchemy import event
from sqlalchemy.engine import Connection, Engine
from sqlalchemy.exc import ArgumentError, DBAPIError, NoSuchModuleError

from forewarn.collectors.errors import ConfigError, StorageError

FILE_NAME = "forewarn.db"
BUSY_TIMEOUT_S = 10
MIGRATIONS = Path(__file__).parent / "migrations"


class Database:
    """Connections to one database. Methods may be called from any thread."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._writing = threading.Lock()

    @property
    def is_sqlite(self) -> bool:
        return self.engine.dialect.name == "sqlite"

    @contextmanager
    def write(self) -> Iterator[Connection]:
        """A transaction that is committed at the end, rolled back when it raises. Raises StorageError.

        In SQLite one writer at a time is the rule of the file anyway: waiting for a lock here is fair, there it is not.
        """
        with self._writing if self.is_sqlite else _nothing(), _mapped("written"), self.engine.begin() as run:
            yield run

    @contextmanager
    def read(self) -> Iterator[Connection]:
        """A consistent view for reading. Raises StorageError."""
        with _mapped("read"), self.engine.connect() as run:
            yield run.execution_options(forewarn_read=True)

    def insert_new(self, run: Connection, table: sqlalchemy.Table, rows: list[dict[str, Any]]) -> int:
        """Insert rows, leaving out those that a unique index says are there; returns how many were new."""
        if not rows:
            return 0
        if self.is_sqlite:
            from sqlalchemy.dialects.sqlite import insert
        else:
            from sqlalchemy.dialects.postgresql import insert  # type: ignore[assignment]
        new = 0
        for row in rows:
            new += run.execute(insert(table).values(**row).on_conflict_do_nothing()).rowcount
        return new

    def check(self) -> None:
        """Raises StorageError when the database does not answer."""
        with self.read() as run:
            run.execute(sqlalchemy.text("SELECT 1"))

    def close(self) -> None:
        self.engine.dispose()


def open_database(data: Path, url: str = "") -> Database:
    """Open (and make or upgrade) the database in folder `data`, or at `url`. Raises ConfigError, StorageError."""
    if url:
        try:
            engine = sqlalchemy.create_engine(url, pool_pre_ping=True)
        except (ArgumentError, NoSuchModuleError, ModuleNotFoundError) as error:
            raise ConfigError(
                f"service.database_url: not usable: {error}; use sqlite:////PATH or postgresql+psycopg://HOST/NAME"
            ) from error
    else:
        engine = sqlalchemy.create_engine(f"sqlite:///{_private_file(data / FILE_NAME)}")
    if engine.dialect.name == "sqlite":
        _prepare_sqlite(engine)
    database = Database(engine)
    try:
        _upgrade(database)
    except BaseException:
        database.close()
        raise
    return database


def _private_file(path: Path) -> Path:
    """The file holds webhook secrets: nobody but its owner may read it, from its first byte on."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
        path.chmod(0o600)
    except OSError as error:
        raise StorageError(
            f"{path}: cannot be used: {error.strerror or error}; set service.data to a writable folder"
        ) from error
    return path


def _prepare_sqlite(engine: Engine) -> None:
    @event.listens_for(engine, "connect")
    def _on_connect(connection: Any, _record: Any) -> None:
        connection.isolation_level = None  # the begin event below starts transactions
        run = connection.cursor()
        run.execute(f"PRAGMA busy_timeout = {BUSY_TIMEOUT_S * 1000}")
        run.execute("PRAGMA journal_mode = WAL")
        run.execute("PRAGMA synchronous = FULL")
        run.execute("PRAGMA foreign_keys = ON")
        run.close()

    @event.listens_for(engine, "begin")
    def _on_begin(connection: Connection) -> None:
        reading = connection.get_execution_options().get("forewarn_read")
        connection.exec_driver_sql("BEGIN" if reading else "BEGIN IMMEDIATE")


def _upgrade(database: Database) -> None:
    settings = alembic.config.Config()
    settings.set_main_option("script_location", str(MIGRATIONS))
    try:
        with database.write() as run:
            settings.attributes["connection"] = run
            alembic.command.upgrade(settings, "head")
    except alembic.util.CommandError as error:
        raise StorageError(
            f"the database was made by a newer Forewarn ({error}): upgrade this one, or restore a backup"
        ) from error


@contextmanager
def _mapped(verb: str) -> Iterator[None]:
    try:
        yield
    except DBAPIError as error:
        raise StorageError(f"the database could not be {verb}: {error.orig}") from error


@contextmanager
def _nothing() -> Iterator[None]:
    yield
