"""An evaluation in words and pictures: Markdown for terminals and model cards, one HTML file with plots."""

from __future__ import annotations

import base64
import html
import io
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from forewarn.collectors.errors import StorageError
from forewarn.models.evaluation import LEAD_S, Evaluation, Tally

SIMULATED = (
    "The history is SIMULATED: these figures prove the pipeline and say nothing of skill on real devices."
)
IN_SAMPLE = (
    "The model has learned from this time: these figures flatter it. Judge it on later time (--after)."
)
STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;color:#1c2733}"
    "table{border-collapse:collapse;margin:1rem 0}td,th{padding:.25rem .7rem;border-bottom:1px solid #d5dbe1;"
    "text-align:right}td:first-child,th:first-child{text-align:left}img{max-width:100%}"
    ".warning{background:#fff3d6;padding:.6rem 1rem;border-left:4px solid #d99a00}"
)


def warnings_of(found: Evaluation) -> list[str]:
    """What a reader must know before any figure."""
    return [text for text, holds in ((SIMULATED, found.simulated), (IN_SAMPLE, found.in_sample)) if holds]


def tables(found: Evaluation) -> list[tuple[str, list[str], list[list[str]]]]:
    """Title, head and rows of each table of the report."""
    whole = found.overall
    overall = [
        ["failures", str(whole.failures), ""],
        ["foreseen 15 min ahead", _share(whole.recall), _between(found, "recall", 100)],
        [
            "foreseen, of those with a precursor over 15 min",
            _share(whole.long_recall),
            _between(found, "recall_long_precursor", 100),
        ],
        ["announced late", str(whole.late), ""],
        ["precision of alerts", _share(whole.precision), _between(found, "precision", 100)],
        [
            "false alarms per 1,000 device-days",
            _number(whole.false_per_1000_days),
            _between(found, "false_alarms_per_1000_device_days", 1),
        ],
        ["alerts", str(whole.alerts), ""],
        ["device-days", f"{whole.device_days:.1f}", ""],
    ]
    if found.saved:
        share = found.saved["saved_by_protection"]
        overall.append(["training time saved by protection", f"{100 * share:.3f} % points", ""])
    by_cause = [_cause_row(cause, tally) for cause, tally in found.by_cause.items()]
    beside = [_beside_row("this model", _as_measures(whole))]
    beside += [_beside_row(name, measures) for name, measures in found.baselines.items()]
    ranking = [
        [
            _span(s.horizon_s),
            _number(s.pr_auc),
            f"{_number(s.pr_auc_95[0])} to {_number(s.pr_auc_95[1])}",
            _number(s.base_rate),
            _number(s.brier),
            _number(s.base_brier),
            _number(s.calibration_error),
        ]
        for s in found.scores
    ]
    return [
        ("Overall", ["measure", "value", "95 % interval"], overall),
        (
            "By cause",
            [
                "cause",
                "failures",
                "foreseen",
                "late",
                "missed",
                "recall",
                "of long precursors",
                "median lead",
            ],
            by_cause,
        ),
        (
            "Beside it",
            ["way of raising alerts", "recall", "precision", "false / 1,000 device-days", "alerts"],
            beside,
        ),
        (
            "Risks",
            [
                "horizon",
                "PR-AUC",
                "95 % interval",
                "base rate",
                "Brier",
                "Brier of base rate",
                "calibration error",
            ],
            ranking,
        ),
    ]


def markdown(found: Evaluation) -> str:
    """The report as Markdown, for terminals and model cards."""
    lines = [f"# {found.kind} model {found.model} on {found.history}", ""]
    lines += [f"**{text}**\n" for text in warnings_of(found)]
    for title, head, rows in tables(found):
        if not rows:
            continue
        lines += [f"## {title}", "", "| " + " | ".join(head) + " |", "|" + " --- |" * len(head)]
        lines += ["| " + " | ".join(row) + " |" for row in rows]
        lines.append("")
    return "\n".join(lines)


def write_html(path: Path, found: Evaluation) -> None:
    """One HTML file with all tables and plots in it. Raises StorageError."""
    parts = [
        f"<h1>{html.escape(found.kind)} model {html.escape(found.model)} on {html.escape(found.history)}</h1>"
    ]
    parts += [f'<p class="warning">{html.escape(text)}</p>' for text in warnings_of(found)]
    for title, head, rows in tables(found):
        if not rows:
            continue
        cells = "".join(f"<th>{html.escape(h)}</th>" for h in head)
        body = "".join("<tr>" + "".join(f"<td>{html.escape(c)}</td>" for c in row) + "</tr>" for row in rows)
        parts.append(
            f"<h2>{html.escape(title)}</h2><table><thead><tr>{cells}</tr></thead><tbody>{body}</tbody></table>"
        )
    for text, figure in ((t, f) for t, f in _figures(found) if f is not None):
        parts.append(f'<h2>{html.escape(text)}</h2><img alt="{html.escape(text)}" src="{_image(figure)}">')
    page = (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>Forewarn evaluation</title>'
        f"<style>{STYLE}</style><body>{''.join(parts)}</body></html>"
    )
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(page, encoding="utf-8")
    except OSError as error:
        raise StorageError(f"{path}: cannot be written: {error.strerror or error}") from error


def _figures(found: Evaluation) -> list[tuple[str, Figure | None]]:
    return [
        ("Lead times of announced failures", _leads(found)),
        ("Failures by cause", _causes(found)),
        ("Reliability of risks", _reliability(found)),
    ]


def _leads(found: Evaluation) -> Figure | None:
    leads = np.array(found.overall.leads_s)
    if not len(leads):
        return None
    figure = Figure(figsize=(7, 3.2), layout="constrained")
    axes = figure.subplots()
    edges = np.geomspace(1.0, max(2 * 1440.0, leads.max() / 60 * 1.1), 30)
    axes.hist(np.maximum(leads / 60, 1.0), edges.tolist(), color="#2f6db5")
    axes.axvline(LEAD_S / 60, color="#b03030", linestyle="--", label="15 min")
    axes.set(xscale="log", xlabel="minutes before the failure", ylabel="failures")
    axes.legend()
    return figure


def _causes(found: Evaluation) -> Figure | None:
    if not found.by_cause:
        return None
    names = list(found.by_cause)
    foreseen = np.array([t.foreseen for t in found.by_cause.values()])
    late = np.array([t.late for t in found.by_cause.values()])
    missed = np.array([t.failures for t in found.by_cause.values()]) - foreseen - late
    figure = Figure(figsize=(7, 0.8 + 0.35 * len(names)), layout="constrained")
    axes = figure.subplots()
    axes.barh(names, foreseen, color="#2f6db5", label="foreseen 15 min ahead")
    axes.barh(names, late, left=foreseen, color="#d99a00", label="late")
    axes.barh(names, missed, left=foreseen + late, color="#c9d0d6", label="missed")
    axes.set_xlabel("failures")
    axes.legend()
    return figure


def _reliability(found: Evaluation) -> Figure | None:
    drawn = [s for s in found.scores if s.reliability and s.base_rate > 0]
    if not drawn:
        return None
    figure = Figure(figsize=(5, 4.6), layout="constrained")
    axes = figure.subplots()
    axes.plot([1e-6, 1], [1e-6, 1], color="#888888", linestyle=":")
    for score in drawn:
        points = [(mean, share) for mean, share, _ in score.reliability if mean > 0 and share > 0]
        if points:
            axes.plot(*zip(*points, strict=True), marker="o", label=_span(score.horizon_s))
    axes.set(xscale="log", yscale="log", xlabel="risk given", ylabel="share that failed")
    axes.legend()
    return figure


def _image(figure: Figure) -> str:
    data = io.BytesIO()
    figure.savefig(data, format="png", dpi=110)
    return "data:image/png;base64," + base64.b64encode(data.getvalue()).decode("ascii")


def _cause_row(cause: str, tally: Tally) -> list[str]:
    lead = _span(float(np.median(tally.leads_s))) if tally.leads_s else "-"
    missed = tally.failures - tally.foreseen - tally.late
    return [
        cause, str(tally.failures), str(tally.foreseen), str(tally.late), str(missed), _share(tally.recall),
        f"{tally.long_foreseen} of {tally.long_signs}", lead,
    ]  # fmt: skip


def _as_measures(tally: Tally) -> dict[str, float]:
    return {
        "recall": tally.recall,
        "precision": tally.precision,
        "false_alarms_per_1000_device_days": tally.false_per_1000_days,
        "alerts": float(tally.alerts),
    }


def _beside_row(name: str, measures: dict[str, float]) -> list[str]:
    nan = float("nan")
    return [
        name,
        _share(measures.get("recall", nan)),
        _share(measures.get("precision", nan)),
        _number(measures.get("false_alarms_per_1000_device_days", nan)),
        f"{measures.get('alerts', 0):.0f}",
    ]


def _between(found: Evaluation, name: str, scale: int) -> str:
    low_high = found.intervals.get(name)
    if low_high is None:
        return ""
    unit = " %" if scale == 100 else ""
    return f"{_number(scale * low_high[0])} to {_number(scale * low_high[1])}{unit}"


def _share(value: float) -> str:
    return "-" if value != value else f"{100 * value:.1f} %"


def _number(value: float) -> str:
    return "-" if value != value else f"{value:.3g}"


def _span(seconds: float) -> str:
    for size, unit in ((86_400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds:.0f} s"
