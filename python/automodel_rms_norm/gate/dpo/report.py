"""The first losses for a terminal, for a document and for programs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from automodel_rms_norm.gate.dpo.first_loss import BAND, Run

__all__ = ["Report"]

HEADINGS = ("circumstance", "first loss", "exactly ln 2", f"{BAND[0]} < loss < {BAND[1]}")


@dataclass(frozen=True)
class Report:
    """``model`` is the setting in words."""

    target: str
    model: str
    environment: dict[str, str]
    runs: Sequence[Run]

    @property
    def holds(self) -> bool:
        return bool(self.runs) and all(run.exact for run in self.runs)

    @property
    def verdict(self) -> str:
        """One sentence."""
        off = [run for run in self.runs if not run.exact]
        if not off:
            return f"{self.target}: the first loss is exactly ln 2 in all {len(self.runs)} runs"
        band = sum(not run.in_band for run in off)
        return (
            f"{self.target}: the first loss is not ln 2 in {len(off)} of {len(self.runs)} runs, "
            f"and outside the band in {band}; the first: {off[0].circumstance}"
        )

    @property
    def _rows(self) -> list[tuple[str, str, str, str]]:
        words = {True: "yes", False: "no"}
        return [
            (run.circumstance, f"{run.loss:.10f}", words[run.exact], words[run.in_band])
            for run in self.runs
        ]

    def print(self, console: Console) -> None:
        """Prints the table, the environment and the verdict."""
        table = Table(*HEADINGS, title=self.model, title_justify="left")
        for run, row in zip(self.runs, self._rows, strict=True):
            table.add_row(*row, style="green" if run.exact else "red")
        console.print(table)
        for name, value in self.environment.items():
            console.print(Text(f"{name:20}{value}", style="dim"))
        console.print(Text(self.verdict, style="bold green" if self.holds else "bold red"))

    def as_markdown(self) -> str:
        lines = [f"### {self.target}", "", f"{self.model}.", ""]
        lines += ["| " + " | ".join(row) + " |" for row in (HEADINGS, ["---"] * 4, *self._rows)]
        lines += ["", *(f"- {name}: {value}" for name, value in self.environment.items())]
        return "\n".join([*lines, "", f"**{self.verdict}**", ""])

    def as_json(self) -> dict[str, Any]:
        runs = [asdict(run) | {"in_band": run.in_band} for run in self.runs]
        return asdict(self) | {"holds": self.holds, "verdict": self.verdict, "runs": runs}
