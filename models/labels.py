"""What counts as a failure, and where it is read from: failures.parquet when there is one, else derived from fatal
events, devices that were lost and serials that were replaced.
"""

from __future__ import annotations

import numpy as np
import pandas as pd

from forewarn.collectors.xids import xid_fact
from forewarn.models.history import History
from forewarn.models.rules import kind_of

SAME_FAILURE_S = 3600.0
"""Signs on one device closer together than this are one failure."""
NEVER_FAILURES = frozenset({"45", "154"})
"""XIDs that follow other events: a channel removed, the driver's verdict."""
LOSSES = {"gpu_lost": "gpu_off_bus", "gpu_reset_required": "reset_required"}
CAUSE_OF_CATEGORY = {
    "memory": "memory",
    "nvlink": "nvlink",
    "c2c": "nvlink",
    "pcie": "gpu_off_bus",
    "gsp": "gsp",
    "microcontroller": "microcontroller",
    "power": "power",
    "thermal": "thermal",
}


def cause_of(kind: str, code: str, severity: str) -> str:
    """The cause that an event tells of when it is a failure of hardware; empty when it is none."""
    if kind in LOSSES:
        return LOSSES[kind]
    if kind == "nvme" and code == "dead":
        return "drive_failed"
    if kind == "ata" and code == "disabled":
        return "drive_failed"
    if kind != "xid" or code in NEVER_FAILURES or not code.isdigit():
        return ""
    fact = xid_fact(int(code))
    if fact is None or fact.hardware == "no" or fact.category == "user_app":
        return ""
    if (severity or fact.severity) != "critical":
        return ""
    return CAUSE_OF_CATEGORY.get(fact.category, fact.category)


def derive(history: History) -> pd.DataFrame:
    """Failures told by events and by replaced serials: columns time (seconds), node, device, cause; by time."""
    events = history.events
    found = events.assign(
        cause=[
            cause_of(k, c, s)
            for k, c, s in zip(events["kind"], events["code"], events["severity"], strict=True)
        ]
    )
    parts = [found.loc[found["cause"] != "", ["time", "node", "device", "cause"]], _replaced(history)]
    table = pd.concat([p for p in parts if len(p)]) if any(len(p) for p in parts) else parts[0]
    table = table.sort_values(["device", "time"], kind="stable")
    gap = table.groupby("device")["time"].diff()
    table = table[~(gap < SAME_FAILURE_S)]
    return table.sort_values("time", kind="stable").reset_index(drop=True)


def _replaced(history: History) -> pd.DataFrame:
    """A serial that gives way to another in the same place: it failed when it was removed, as far as is known."""
    table = history.devices
    known = table[(table["serial"] != "") & table["removed"].notna()]
    again = known["device"].map(table.groupby("device")["serial"].nunique()) > 1
    out = known.loc[again, ["removed", "node", "device"]].rename(columns={"removed": "time"})
    return out.assign(cause="replaced")


def failures_of(history: History, kind: str) -> pd.DataFrame:
    """Failures of the devices of one kind: as the history says, else derived."""
    table = history.failures if history.has_failures else derive(history)
    kinds = dict(zip(history.devices["device"], history.devices["kind"], strict=True))
    of_kind = [(kinds.get(d) or kind_of(d) or kind) == kind for d in table["device"]]
    return table[np.array(of_kind, bool)].reset_index(drop=True)
