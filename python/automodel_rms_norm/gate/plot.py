"""The report as a picture: where in the matrix differences lie, and how many ulp they are."""

from __future__ import annotations

from collections import Counter
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from automodel_rms_norm.gate.report import Report
from automodel_rms_norm.gate.runner import FAILS, HOLDS, NOT_RUN

__all__ = ["why_not", "write"]

FORMATS = (".svg", ".png", ".pdf")
COLOURS = {NOT_RUN: "#d9d9d9", HOLDS: "#7fbf7b", FAILS: "#d7301f"}


def why_not(path: str) -> str:
    """Why no picture can be written there; "" where one can."""
    if Path(path).suffix not in FORMATS:
        return f"its name must end with {', '.join(FORMATS)}"
    if find_spec("matplotlib") is None:
        return "needs matplotlib; pip install 'automodel-rms-norm[gate]'"
    return ""


def write(report: Report, path: str) -> None:
    """To `path`, whose ending is the format."""
    figure_type = import_module("matplotlib.figure").Figure
    outcomes = [outcome for outcome in report.outcomes if outcome.context]
    lines = list(dict.fromkeys(f"{o.property}  {o.context}" for o in outcomes))
    cases = list(dict.fromkeys(outcome.case for outcome in outcomes))
    height, width = 1.5 + 0.2 * len(lines) + 2.2, 5 + 0.13 * len(cases)
    figure = figure_type(figsize=(max(width, 8), max(height, 5)), layout="constrained")
    matrix, histogram = figure.subplots(
        2, 1, height_ratios=[max(len(lines), 5) * 0.2, 1.8], squeeze=True
    )
    figure.suptitle(report.verdict(), fontsize=10)
    _draw_matrix(matrix, report, lines, cases)
    _draw_histogram(histogram, report)
    figure.savefig(path)


def _draw_matrix(axes: Any, report: Report, lines: list[str], cases: list[str]) -> None:
    colours = import_module("matplotlib.colors").ListedColormap(["white", *COLOURS.values()])
    levels = {status: number for number, status in enumerate(COLOURS, 1)}
    grid = [[0] * len(cases) for _ in lines]
    row, column = ({name: i for i, name in enumerate(names)} for names in (lines, cases))
    for outcome in report.outcomes:
        if outcome.context:
            line = grid[row[f"{outcome.property}  {outcome.context}"]]
            at = column[outcome.case]
            line[at] = max(line[at], levels[outcome.status])
    axes.imshow(grid or [[0]], cmap=colours, vmin=0, vmax=len(COLOURS), aspect="auto")
    axes.set_yticks(range(len(lines)), lines, fontsize=6)
    axes.set_xticks(range(len(cases)), cases, fontsize=4, rotation=90)
    axes.set_title("green: equal; red: differs; grey: not run; white: not asked", fontsize=7)


def _draw_histogram(axes: Any, report: Report) -> None:
    """Of each property with differences, the differing elements of all its cases."""
    totals: dict[str, Counter[int]] = {}
    for outcome in report.outcomes:
        if outcome.difference is not None and outcome.difference.ulps:
            totals.setdefault(outcome.property, Counter()).update(outcome.difference.ulps)
    powers = sorted({power for counts in totals.values() for power in counts})
    share = 0.8 / max(len(totals), 1)
    for number, (key, counts) in enumerate(totals.items()):
        places = [i + share * (number - (len(totals) - 1) / 2) for i in range(len(powers))]
        axes.bar(places, [counts[power] for power in powers], share, label=key)
    if totals:
        axes.set_yscale("log")
        axes.legend(fontsize=7)
    axes.set_xticks(range(len(powers)), [f"≤ {power}" for power in powers], fontsize=7)
    axes.set_xlabel("distance of differing elements, ulp" if totals else "no element differs")
    axes.set_ylabel("elements")
