"""Runs every benchmark beside this file, prints the rows and writes build/bench.json.

Each `bench_*.py` has `run() -> list[dict]` with rows of name, value, unit, floor, ratio, budget, met. A benchmark
that cannot run here says why by raising `ForewarnError`; the row then has `met` null and the reason as its unit.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

from forewarn.collectors.errors import ForewarnError

HERE = Path(__file__).parent
OUT = HERE.parent.parent / "build" / "bench.json"
sys.path.insert(0, str(HERE.parent))  # for the simulated driver, as pytest has it
COLUMNS = ("name", "value", "unit", "floor", "ratio", "budget", "met")


def rows_of(path: Path) -> list[dict[str, Any]]:
    """The rows of one benchmark file."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    try:
        rows: list[dict[str, Any]] = module.run()
    except ForewarnError as error:
        return [{**dict.fromkeys(COLUMNS), "name": path.stem, "unit": f"not run: {error}"}]
    return rows


def show(row: dict[str, Any]) -> str:
    """One row as a line of text."""

    def cell(value: Any) -> str:
        return "-" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)

    verdict = {True: "met", False: "MISSED", None: ""}[row.get("met")]
    return (
        f"{row['name']:<64} {cell(row.get('value')):>10} {row.get('unit') or '':<14} "
        f"floor {cell(row.get('floor')):>10}  ratio {cell(row.get('ratio')):>7}  "
        f"budget {cell(row.get('budget')):>10}  {verdict}"
    )


def main() -> int:
    """Run all, or those whose names hold a given word. Exit 1 when a budget is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("words", nargs="*", help="only benchmarks whose file name holds one of these")
    wanted = parser.parse_args().words
    rows: list[dict[str, Any]] = []
    for path in sorted(HERE.glob("bench_*.py")):
        if wanted and not any(word in path.stem for word in wanted):
            continue
        for row in rows_of(path):
            rows.append(row)
            print(show(row), flush=True)
    OUT.parent.mkdir(exist_ok=True)
    OUT.write_text(json.dumps(rows, indent=1) + "\n")
    print(f"written to {OUT.relative_to(Path.cwd()) if OUT.is_relative_to(Path.cwd()) else OUT}")
    return 1 if any(row.get("met") is False for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
