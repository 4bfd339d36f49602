"""Access tokens: who may do what. Kept as SHA-256 digests of 256 random bits, compared in constant time.

A token reads `fwt_ID_SECRET`; the id finds the row, the secret proves it. Roles: `agent` (sends for its node),
`reader` (reads), `operator` (reads and changes).
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import threading
from dataclasses import dataclass
from typing import Any

import sqlalchemy

from forewarn.collectors.clock import Clock
from forewarn.collectors.errors import InputError
from forewarn.daemon.service import schema
from forewarn.daemon.service.database import Database

ROLES = ("agent", "reader", "operator")
ANY_NODE = "*"
PREFIX = "fwt"
REFRESH_INTERVAL_S = 2.0
"""A revoked token is refused this long after, at the latest."""
MISS_INTERVAL_S = 0.2
"""Unknown tokens make the table be read again no more often than this."""


@dataclass(frozen=True)
class Principal:
    """Who asks: a token's id and role, and for agents the node (`*`: any). Anonymous readers have the id ``."""

    id: str
    role: str
    node: str = ""


ANONYMOUS = Principal("", "reader")


@dataclass(frozen=True)
class _Row:
    principal: Principal
    digest: str
    expires: float | None


def create(
    database: Database, clock: Clock, role: str, *, node: str = "", name: str = "", days: float | None = None
) -> str:
    """Make a token and return its text, which is stored nowhere. Raises InputError."""
    if role not in ROLES:
        raise InputError(f"role: {role!r} is none of {', '.join(ROLES)}")
    if role == "agent" and not node:
        raise InputError(f"node: an agent's token needs the node it speaks for ({ANY_NODE!r}: any node)")
    if role != "agent" and node:
        raise InputError(f"node: only an agent's token has one, not a {role}'s")
    if days is not None and not days > 0:
        raise InputError("days: must be above 0")
    now = clock.now()
    identity, secret = secrets.token_hex(6), secrets.token_urlsafe(32)
    with database.write() as run:
        run.execute(
            schema.tokens.insert().values(
                id=identity,
                role=role,
                node=node,
                name=name,
                digest=_digest(secret),
                created=now,
                expires=None if days is None else now + days * 86400,
            )
        )
    return f"{PREFIX}_{identity}_{secret}"


def listing(database: Database) -> list[dict[str, Any]]:
    """Every token without its digest, oldest first."""
    with database.read() as run:
        rows = run.execute(sqlalchemy.select(schema.tokens).order_by(schema.tokens.c.created)).mappings()
        return [{k: v for k, v in row.items() if k != "digest"} for row in rows]


def revoke(database: Database, clock: Clock, identity: str) -> None:
    """Refuse a token from now on. Raises InputError when there is none of this id."""
    with database.write() as run:
        done = run.execute(
            schema.tokens.update().where(schema.tokens.c.id == identity).values(revoked=clock.now())
        )
    if not done.rowcount:
        raise InputError(f"token: {identity!r} does not exist; `forewarn token list` shows all")


def _digest(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()


class TokenBook:
    """The tokens in memory, so that a thousand requests a second ask no database."""

    def __init__(self, database: Database, clock: Clock) -> None:
        self._database, self._clock = database, clock
        self._rows: dict[str, _Row] = {}
        self._read_at = -1e9
        self._lock = threading.Lock()

    def refresh(self) -> int:
        """Read the table; returns how many tokens are in force. Raises StorageError."""
        with self._lock:
            self._read_at = self._clock.monotonic()
            table = schema.tokens.c
            with self._database.read() as run:
                rows = run.execute(
                    sqlalchemy.select(table.id, table.role, table.node, table.digest, table.expires).where(
                        table.revoked.is_(None)
                    )
                ).all()
            self._rows = {r.id: _Row(Principal(r.id, r.role, r.node), r.digest, r.expires) for r in rows}
            now = self._clock.now()
            return sum(1 for r in self._rows.values() if r.expires is None or r.expires > now)

    def refresh_in_s(self, text: str) -> float | None:
        """When the table should be read before `text` is judged: None not at all, 0 now, else in so many seconds.

        A token that was made a moment ago must hold, yet a flood of wrong ones must not become a flood of queries.
        """
        age_s = self._clock.monotonic() - self._read_at
        if _identity(text) in self._rows:
            return 0.0 if age_s >= REFRESH_INTERVAL_S else None
        return max(0.0, MISS_INTERVAL_S - age_s)

    def find(self, text: str) -> Principal | None:
        """Whose token this is; None when it is unknown, revoked or expired."""
        row = self._rows.get(_identity(text))
        secret = text.split("_", 2)[2] if text.count("_") >= 2 else ""
        # Also an unknown id costs a digest and a comparison, so that the time taken tells nothing.
        proven = hmac.compare_digest(_digest(secret), row.digest if row else "0" * 64)
        if row is None or not proven:
            return None
        if row.expires is not None and row.expires <= self._clock.now():
            return None
        return row.principal


def _identity(text: str) -> str:
    parts = text.split("_", 2)
    return parts[1] if len(parts) == 3 and parts[0] == PREFIX else ""
