"""Derive failures from a history's events (fatal XIDs, lost GPUs, replaced serials) and write failures.parquet."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pyarrow as pa

from forewarn.collectors.errors import InputError
from forewarn.daemon.config import Config
from forewarn.models.history import History, write_table
from forewarn.models.labels import derive


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--history", type=Path, metavar="DIR", required=True)
    parser.add_argument("--out", type=Path, metavar="FILE", help="default: failures.parquet of the history")
    parser.add_argument("--force", action="store_true", help="replace a file that is there")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(arguments: argparse.Namespace, config: Config) -> int:
    history = History(arguments.history)
    out = arguments.out or arguments.history / "failures.parquet"
    if out.exists() and not arguments.force:
        raise InputError(f"{out}: is there already; give --force to replace it, or another place with --out")
    found = derive(history)
    table = pa.table(
        {
            "time": pa.array((found["time"] * 1e6).astype("int64"), pa.int64()).cast(
                pa.timestamp("us", tz="UTC")
            ),
            "node": pa.array(found["node"].astype(str), pa.string()),
            "device": pa.array(found["device"].astype(str), pa.string()),
            "cause": pa.array(found["cause"].astype(str), pa.string()),
        }
    )
    write_table(out, table, history.simulated)
    causes = found["cause"].value_counts().to_dict()
    if arguments.json:
        print(json.dumps({"file": str(out), "failures": len(found), "by_cause": causes}))
    else:
        print(f"{len(found)} failures; wrote {out}")
        for cause, count in causes.items():
            print(f"  {cause} {count}")
    return 0
