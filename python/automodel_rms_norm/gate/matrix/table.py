"""The matrix for a terminal, for a document and for programs."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.table import Table

from automodel_rms_norm.gate.matrix.row import Row

__all__ = ["Matrix", "into_document"]

BEGIN, END = "<!-- matrix -->", "<!-- end -->"


@dataclass(frozen=True)
class Matrix:
    """The rows of all versions that were asked for, and the targets, in order."""

    rows: Sequence[Row]
    targets: Sequence[str]

    @property
    def holds(self) -> bool:
        return all(row.holds for row in self.rows)

    @property
    def headings(self) -> list[str]:
        return ["torch", "Python", "triton", "build", *self.targets]

    @property
    def machines(self) -> str:
        """Where the rows are from, a line for each machine."""
        return "\n".join(
            dict.fromkeys(
                f"CPU: {known['CPU']}. GPU: {known['GPU']}."
                for known in (row.environment for row in self.rows)
                if known
            )
        )

    def cells(self, row: Row) -> list[str]:
        known = row.environment
        torch = known.get("torch", row.torch).split(",")[0]
        python = known.get("Python", "").split(",")[0]
        targets = [_target(row, target) for target in self.targets]
        return [torch, python, known.get("triton", ""), _build(row), *targets]

    def as_table(self) -> Table:
        table = Table(title="numerics-gate matrix", title_justify="left", caption=self.machines)
        for heading in self.headings:
            table.add_column(heading, overflow="fold")
        for row in self.rows:
            table.add_row(*self.cells(row), style="green" if row.holds else "red")
        return table

    def as_markdown(self) -> str:
        lines = [self.headings, ["---"] * len(self.headings), *map(self.cells, self.rows)]
        table = "".join("| " + " | ".join(cells) + " |\n" for cells in lines)
        return f"{table}\n{self.machines}\n"

    def as_json(self) -> dict[str, Any]:
        rows = [asdict(row) | {"holds": row.holds} for row in self.rows]
        return {"holds": self.holds, "targets": list(self.targets), "rows": rows}


def _build(row: Row) -> str:
    if row.failed:
        return f"{row.failed} failed: {row.reason}".replace("|", "\\|")
    if "build" not in row.done:
        return "not run"
    return row.environment.get("automodel-rms-norm", "").partition(", ")[2]


def _target(row: Row, target: str) -> str:
    if target not in row.checks:
        return ""
    properties = row.checks[target]["properties"]
    failing = [p["property"] for p in properties if p["failures"]]
    cases = sum(p["cases"] for p in properties)
    verdict = f"{', '.join(failing)} fail" if failing else "holds"
    digests = row.digests.get(target)
    return f"{verdict}, {cases} cases" + (f"; digests {digests}" if digests else "")


def into_document(text: str, table: str) -> str:
    """`text` with the table between its markers; the table alone where it has none."""
    marked = f"{BEGIN}\n{table}{END}"
    changed, count = re.subn(f"{BEGIN}\n.*?{END}", lambda _: marked, text, flags=re.DOTALL)
    return changed if count else f"{marked}\n"
