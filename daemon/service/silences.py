"""Silences: devices, nodes or jobs that nobody wants to hear of for a while, for maintenance."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import sqlalchemy
from sqlalchemy.engine import Connection

from forewarn.daemon.service import schema


@dataclass(frozen=True)
class Silence:
    """What is silenced from `starts` to `ends`; empty fields match anything, at least one is set."""

    node: str
    device: str
    job: str
    starts: float
    ends: float

    def covers_device(self, device: str, now: float) -> bool:
        if not self.starts <= now < self.ends or self.job:
            return False
        return (not self.node or device.partition("/")[0] == self.node) and self.device in ("", device)

    def covers_job(self, job: str, now: float) -> bool:
        return self.starts <= now < self.ends and self.job == job


@dataclass(frozen=True)
class Silences:
    """All silences that may be in force."""

    items: Sequence[Silence] = ()

    @classmethod
    def read(cls, run: Connection, now: float) -> Silences:
        table = schema.silences.c
        rows = run.execute(
            sqlalchemy.select(table.node, table.device, table.job, table.starts, table.ends).where(
                table.ends > now
            )
        ).all()
        return cls([Silence(*row) for row in rows])

    def device(self, device: str, now: float) -> bool:
        return any(s.covers_device(device, now) for s in self.items)

    def job(self, job: str, now: float) -> bool:
        return any(s.covers_job(job, now) for s in self.items)
