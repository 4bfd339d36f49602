"""Replay failures against checkpoint policies and say what share of time a training job makes progress in.

Failures are random (exponential) at --mtbf-hours of the whole job, or those of a trace: a CSV or Parquet file with a
column `time` (and `node`), such as failures.parquet of a history directory. Everything printed is simulated.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from forewarn.collectors.errors import InputError
from forewarn.daemon.config import Config
from forewarn.models import checkpointing, goodput


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--gpus", type=int, default=10_000, help="GPUs of the job (default %(default)s)")
    parser.add_argument(
        "--mtbf-hours",
        type=float,
        default=2.0,
        help="mean time between failures of the whole job (default %(default)s)",
    )
    parser.add_argument("--recall", type=float, default=0.75, help="share of failures announced in time")
    parser.add_argument("--precision", type=float, default=0.8, help="share of alerts that come true")
    parser.add_argument("--save-seconds", type=float, default=35.0, help="cost of a checkpoint")
    parser.add_argument(
        "--recovery-seconds", type=float, default=480.0, help="from a failure to the first new step"
    )
    parser.add_argument("--swap-seconds", type=float, default=120.0, help="a planned move off a node")
    parser.add_argument("--lead-minutes", type=float, default=15.0, help="how far ahead alerts come")
    parser.add_argument(
        "--failures", type=int, default=20_000, help="failures to draw when there is no trace"
    )
    parser.add_argument(
        "--trace", type=Path, metavar="FILE", help="replay the failure times of this file instead"
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(arguments: argparse.Namespace, config: Config) -> int:
    _check(arguments)
    if arguments.trace:
        failures = read_trace(arguments.trace)
        mtbf_s = failures[-1] / len(failures)
    else:
        mtbf_s = arguments.mtbf_hours * 3600.0
        failures = goodput.poisson_failures(mtbf_s, arguments.failures, arguments.seed)
    costs = checkpointing.Costs(
        arguments.save_seconds, arguments.recovery_seconds, swap_s=arguments.swap_seconds
    )
    predictor = checkpointing.Predictor(arguments.recall, arguments.precision)
    outcomes = goodput.compare(
        failures, mtbf_s, costs, predictor, arguments.lead_minutes * 60.0, arguments.seed
    )
    rows = [_row(o, arguments.gpus) for o in outcomes]
    report = {
        "simulated": True,
        "gpus": arguments.gpus,
        "mtbf_hours": mtbf_s / 3600.0,
        "failures": len(failures),
        "source": str(arguments.trace) if arguments.trace else "exponential",
        "policies": rows,
    }
    if arguments.json:
        print(json.dumps(report, indent=1))
        return 0
    print(
        f"Simulated: {arguments.gpus} GPUs, {len(failures)} failures ({report['source']}), one each "
        f"{mtbf_s / 3600.0:.2f} h; recall {predictor.recall:g}, precision {predictor.precision:g}, "
        f"lead {arguments.lead_minutes:g} min"
    )
    print(
        f"{'policy':<32} {'effective':>9} {'period':>8} {'saves':>8} {'on alert':>8} {'failures':>8} {'avoided':>8}"
    )
    for row in rows:
        period = f"{row['period_seconds']:.0f} s" if row["period_seconds"] else "-"
        print(
            f"{row['policy']:<32} {100 * row['effective_share']:>7.1f} % {period:>8} {row['saves']:>8} "
            f"{row['protective_saves']:>8} {row['failures']:>8} {row['failures_avoided']:>8}"
        )
    return 0


def _row(outcome: goodput.Outcome, gpus: int) -> dict[str, Any]:
    return {
        "policy": outcome.policy,
        "effective_share": outcome.share,
        "period_seconds": None if outcome.period_s == float("inf") else outcome.period_s,
        "saves": outcome.saves,
        "protective_saves": outcome.protective_saves,
        "drains": outcome.drains,
        "failures": outcome.failures,
        "failures_avoided": outcome.failures_avoided,
        "lost_work_gpu_hours": outcome.lost_work_s * gpus / 3600.0,
        "saving_gpu_hours": outcome.saving_s * gpus / 3600.0,
        "recovering_gpu_hours": outcome.recovering_s * gpus / 3600.0,
        "swapping_gpu_hours": outcome.swapping_s * gpus / 3600.0,
    }


def _check(arguments: argparse.Namespace) -> None:
    for name in ("recall", "precision"):
        if not 0.0 <= getattr(arguments, name) <= 1.0:
            raise InputError(f"--{name} {getattr(arguments, name):g}: must be between 0 and 1")
    for name in ("mtbf_hours", "save_seconds", "gpus", "failures"):
        if not getattr(arguments, name) > 0:
            raise InputError(f"--{name.replace('_', '-')} {getattr(arguments, name):g}: must be above 0")
    for name in ("recovery_seconds", "swap_seconds", "lead_minutes"):
        if not getattr(arguments, name) >= 0:
            raise InputError(f"--{name.replace('_', '-')} {getattr(arguments, name):g}: must not be negative")


def read_trace(path: Path) -> list[float]:
    """Failure times of a trace in seconds from its first failure, less one mean gap, so that the first is not at 0.

    Rows of the same second are one incident: a job that fails twice at once restarts once. Raises InputError.
    """
    import pandas as pd

    try:
        table = pd.read_parquet(path) if path.suffix == ".parquet" else pd.read_csv(path)
    except (OSError, ValueError, pd.errors.ParserError) as error:
        raise InputError(f"{path}: cannot be read as a failure trace: {error}") from error
    if "time" not in table:
        raise InputError(f"{path}: has no column 'time'; it has {', '.join(map(str, table.columns))}")
    times = pd.to_datetime(table["time"], utc=True, errors="coerce", format="ISO8601")
    if times.isna().any():
        row = int(times.isna().to_numpy().argmax())
        raise InputError(f"{path}: row {row + 1}: time {table['time'].iloc[row]!r} is no timestamp")
    moments = sorted({t.timestamp() for t in times})
    if len(moments) < 2:
        raise InputError(f"{path}: holds {len(moments)} failure times; at least 2 are needed")
    gap = (moments[-1] - moments[0]) / (len(moments) - 1)
    return [m - moments[0] + gap for m in moments]
