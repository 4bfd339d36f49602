"""Alerts for people: raised once, kept while they hold, resolved by themselves. At most one open for a key.

A device is reported when its level holds for several cycles, and is let go when its risk has fallen to half.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import sqlalchemy
from sqlalchemy.engine import Connection

from forewarn.daemon.service import schema
from forewarn.daemon.service.progress import JobState
from forewarn.daemon.service.silences import Silences
from forewarn.daemon.service.view import LEVEL_FLOORS, LEVELS, View, level_of, node_of

ENTER_OF, ENTER_WITHIN = 2, 3
"""A level is entered when reached in so many of so many cycles."""
CERTAIN = 0.9
"""At this risk one cycle is enough."""
LEAVE_SHARE = 0.5
CROWD_SHARE, CROWD_MIN = 0.05, 50
CROWD_KEY = "crowd:risk"
SILENT_AFTER_S = 300.0
"""A node that has not reported for this long is reported itself."""


def raise_(
    run: Connection,
    key: str,
    level: str,
    now: float,
    *,
    title: str,
    reason: str,
    device: str = "",
    node: str = "",
    job: str = "",
    simulated: bool = False,
) -> bool:
    """Open an alert, or bring the open one up to date; true when it is new."""
    table = schema.alerts
    values: dict[str, Any] = {
        "level": level,
        "title": title,
        "reason": reason,
        "updated": now,
        "device": device,
        "node": node or node_of(device),
    }
    done = run.execute(table.update().where(table.c.key == key, table.c.resolved.is_(None)).values(**values))
    if done.rowcount:
        return False
    run.execute(
        table.insert().values(
            key=key,
            created=now,
            job=job,
            simulated=simulated,
            acknowledged_by="",
            **values,
        )
    )
    return True


def resolve(run: Connection, key: str, now: float) -> bool:
    """Close the open alert of a key, if there is one."""
    table = schema.alerts
    done = run.execute(
        table.update().where(table.c.key == key, table.c.resolved.is_(None)).values(resolved=now, updated=now)
    )
    return bool(done.rowcount)


@dataclass(frozen=True)
class Change:
    """What a cycle changes: `level` empty means resolved."""

    key: str
    level: str
    device: str = ""
    node: str = ""
    title: str = ""
    reason: str = ""
    simulated: bool = False
    job: str = ""


_JOB_TITLES = {
    "slow_job": "{job} trains slower than before",
    "straggler": "{job} waits for one of its ranks",
    "stalled": "{job} makes no progress",
}
_LOSS_TITLES = {
    "not_a_number": "{job} has a loss that is not a number",
    "spike": "the loss of {job} rose suddenly",
}


@dataclass
class JobAlerts:
    """What the progress of training jobs says, for people. `open`: key to level, title and device as last told."""

    open: dict[str, tuple[str, str, str]] = field(default_factory=dict)

    @classmethod
    def read(cls, run: Connection) -> JobAlerts:
        """Go on from what is open in the database."""
        table = schema.alerts.c
        rows = run.execute(
            sqlalchemy.select(table.key, table.level, table.title, table.device).where(
                table.resolved.is_(None), table.key.like("progress:%") | table.key.like("loss:%")
            )
        ).all()
        return cls({row.key: (row.level, row.title, row.device) for row in rows})

    def step(self, jobs: Mapping[str, JobState], silences: Silences, now: float) -> list[Change]:
        """What changes with this cycle. Numbers in a reason move all the time: they are told when it is raised."""
        wanted: dict[str, Change] = {}
        for job, state in jobs.items():
            if silences.job(job, now):
                continue
            found = [("progress", state.finding, state.reason, _JOB_TITLES.get(state.finding, ""))]
            found.append(
                ("loss", state.loss_finding, state.loss_reason, _LOSS_TITLES.get(state.loss_finding, ""))
            )
            for what, finding, reason, title in found:
                if not title or not reason:
                    continue
                level = "critical" if finding == "stalled" else "warning"
                device = state.devices[0] if state.devices else ""
                key = f"{what}:{job}"
                wanted[key] = Change(
                    key, level, device, node_of(device), title.format(job=job), reason, state.simulated, job
                )
        told = {k: (c.level, c.title, c.device) for k, c in wanted.items()}
        changes = [c for k, c in wanted.items() if self.open.get(k) != told[k]]
        changes += [Change(k, "") for k in self.open if k not in wanted]
        self.open = told
        return changes


@dataclass
class DeviceAlerts:
    """Remembers the last cycles of the devices that stand out. `open`: key to level of what is raised."""

    open: dict[str, str] = field(default_factory=dict)
    _seen: dict[str, deque[int]] = field(default_factory=dict)

    @classmethod
    def read(cls, run: Connection) -> DeviceAlerts:
        """Go on from what is open in the database."""
        table = schema.alerts.c
        rows = run.execute(
            sqlalchemy.select(table.key, table.level).where(
                table.resolved.is_(None), table.key.like("risk:%") | (table.key == CROWD_KEY)
            )
        ).all()
        return cls({row.key: row.level for row in rows})

    def step(self, view: View, silences: Silences) -> list[Change]:
        """What changes with this view: pure but for its own memory.

        When very many rise at once, one thing is behind it: that is told, and the single ones are left alone until
        it has passed.
        """
        changes = self._changes(view, silences)
        raised = [c for c in changes if c.level and c.key not in self.open]
        crowd = len(raised) > max(CROWD_MIN, CROWD_SHARE * len(view.devices))
        if crowd:
            changes = [c for c in changes if c.key in self.open]
            nodes = {c.node for c in raised}
            reason = max(raised, key=lambda c: len(c.reason)).reason
            changes.append(
                Change(
                    CROWD_KEY,
                    "critical",
                    title=f"{len(raised)} devices of {len(nodes)} nodes rise together",
                    reason=f"look for one cause (cooling, power, a new driver or firmware); one of them: {reason}",
                    simulated=all(c.simulated for c in raised),
                )
            )
        elif CROWD_KEY in self.open:
            changes.append(Change(CROWD_KEY, ""))
        for change in changes:
            if change.level:
                self.open[change.key] = change.level
            else:
                self.open.pop(change.key, None)
        return changes

    def _changes(self, view: View, silences: Silences) -> list[Change]:
        changes: list[Change] = []
        standing: dict[str, float] = {}
        for row in view.order:
            if view.worst[row] < LEVEL_FLOORS[1]:
                break
            standing[view.devices[int(row)]] = float(view.decisive[row])
        for device in dict.fromkeys(
            [*standing, *self._seen, *(k.removeprefix("risk:") for k in self.open if k != CROWD_KEY)]
        ):
            risk = standing.get(device)
            if risk is None:
                row_at = view.row_of.get(device)
                risk = 0.0 if row_at is None else float(view.decisive[row_at])
            level = self._level(device, risk)
            key = f"risk:{device}"
            if level == self.open.get(key, ""):
                continue
            if level and silences.device(device, view.time):
                continue
            changes.append(self._raised(view, device, key, level, risk) if level else Change(key, ""))
        self._seen = {d: s for d, s in self._seen.items() if any(s)}
        return changes

    def _level(self, device: str, risk: float) -> str:
        """The level to report now: empty below warning."""
        seen = self._seen.setdefault(device, deque(maxlen=ENTER_WITHIN))
        reached = LEVELS.index(level_of(risk))
        seen.append(reached)
        held = self.open.get(f"risk:{device}", "")
        floor = LEVEL_FLOORS[LEVELS.index(held)] * LEAVE_SHARE if held else 0.0
        for level in (3, 2):
            often = sum(1 for r in seen if r >= level)
            if reached >= level and (often >= ENTER_OF or risk >= CERTAIN):
                return LEVELS[max(level, LEVELS.index(held) if held and risk >= floor else 0)]
        return held if held and risk >= floor else ""

    def _raised(self, view: View, device: str, key: str, level: str, risk: float) -> Change:
        reasons = view.reasons.get(device, ())
        return Change(
            key,
            level,
            device,
            node_of(device),
            f"{device} is likely to fail ({risk:.0%})",
            "; ".join(reasons[:3]) or "its risk has risen",
            view.simulated(device),
        )


def write(run: Connection, changes: list[Change], now: float) -> None:
    """Put the changes of a cycle into the database."""
    for change in changes:
        if change.level:
            raise_(
                run,
                change.key,
                change.level,
                now,
                title=change.title,
                reason=change.reason,
                device=change.device,
                node=change.node,
                job=change.job,
                simulated=change.simulated,
            )
        else:
            resolve(run, change.key, now)
