"""The outcomes for a terminal, as JSON and as Markdown. Knows nothing of what was checked."""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from automodel_rms_norm.gate.runner import FAILS, HOLDS, NOT_RUN, Outcome

__all__ = ["Report", "Row"]


@dataclass(frozen=True)
class Row:
    """A property's share of the outcomes."""

    key: str
    meaning: str
    outcomes: tuple[Outcome, ...]

    @property
    def failures(self) -> list[Outcome]:
        return [outcome for outcome in self.outcomes if outcome.status == FAILS]

    @property
    def cases(self) -> int:
        """How many checks were run."""
        return sum(outcome.status != NOT_RUN for outcome in self.outcomes)

    def reasons(self) -> Counter[str]:
        """Why checks were not run, and how many for each reason."""
        return Counter(o.detail for o in self.outcomes if o.status == NOT_RUN)


@dataclass(frozen=True)
class Report:
    """What was checked, where, and what came of it. ``meanings`` has the properties in order.

    ``expected`` are the properties that must hold, all if it is empty; ``failing`` is the verb of
    those that do not. A run that was ``interrupted`` holds in no case.
    """

    target: str
    meanings: dict[str, str]
    environment: dict[str, str]
    outcomes: Sequence[Outcome]
    seconds: float
    expected: tuple[str, ...] = ()
    failing: str = "fail"
    interrupted: bool = False

    @property
    def rows(self) -> list[Row]:
        return [
            Row(key, meaning, tuple(o for o in self.outcomes if o.property == key))
            for key, meaning in self.meanings.items()
        ]

    @property
    def failed(self) -> bool:
        """Whether something failed that must hold."""
        return any(o.status == FAILS for o in self.outcomes if self._counts(o.property))

    @property
    def holds(self) -> bool:
        """Whether something was run to its end and nothing failed."""
        ran = any(o.status == HOLDS for o in self.outcomes if self._counts(o.property))
        return ran and not self.failed and not self.interrupted

    def _counts(self, key: str) -> bool:
        return not self.expected or key in self.expected

    def verdict(self) -> str:
        """One sentence."""
        rows = [row for row in self.rows if self._counts(row.key)]
        others = [row.key for row in self.rows if row.failures and not self._counts(row.key)]
        aside = f" ({', '.join(others)} {self.failing} and need not hold)" if others else ""
        aside += "; interrupted" if self.interrupted else ""
        cases = sum(row.cases for row in rows)
        failing = [row.key for row in rows if row.failures]
        if failing:
            failed = sum(len(row.failures) for row in rows)
            which = f"{', '.join(failing)} of {self.target} {self.failing}"
            return f"{which}: {failed} of {cases} cases{aside}"
        if not cases:
            return f"no case of {self.target} could be run{aside}"
        return f"{self.target} holds in all {cases} cases{aside}"

    def as_markdown(self) -> str:
        """A table of the properties, the reasons for what was not run, environment and verdict."""
        lines = [
            f"### {self.target}",
            "",
            "| property | what it means | cases | failures | first |",
        ]
        lines.append("|---|---|--:|--:|---|")
        for row in self.rows:
            first = _first_difference(row).replace("\n", "<br>").replace("|", "\\|")
            lines.append(
                f"| {row.key} | {row.meaning} | {row.cases} | {len(row.failures)} | {first} |"
            )
        lines += ["", *(f"- not run ({', '.join(k)}): {r}" for r, k in self._reasons().items())]
        lines += ["", *(f"- {name}: {value}" for name, value in self.environment.items())]
        return "\n".join([*lines, "", f"**{self.verdict()}**", ""])

    def print(self, console: Console) -> None:
        """Prints the table, the environment and the verdict."""
        console.print(self._table())
        for reason, keys in self._reasons().items():
            console.print(Text(f"not run ({', '.join(keys)}) {reason}", style="yellow"))
        console.print(self._environment())
        style = "bold green" if self.holds else "bold red"
        console.print(Text(f"{self.verdict()}, {self.seconds:.0f} s", style=style))

    def as_text(self, width: int = 120) -> str:
        """What `print` prints, without colours."""
        console = Console(file=io.StringIO(), width=width, color_system=None)
        with console.capture() as capture:
            self.print(console)
        return capture.get()

    def _table(self) -> RenderableType:
        table = Table(title=self.target, title_justify="left")
        for heading in ("property", "what it means"):
            table.add_column(heading)
        for heading in ("cases", "failures"):
            table.add_column(heading, justify="right")
        table.add_column("first difference", overflow="fold")
        for row in self.rows:
            failures = len(row.failures)
            style = "red" if failures else "green" if row.cases else "yellow"
            table.add_row(
                Text(row.key, style=style),
                row.meaning,
                str(row.cases),
                Text(str(failures), style="red" if failures else ""),
                _first_difference(row),
            )
        return table

    def _reasons(self) -> dict[str, list[str]]:
        """Why something was not run, and the properties that it concerns."""
        reasons: dict[str, list[str]] = {}
        for row in self.rows:
            for reason in row.reasons():
                reasons.setdefault(reason, []).append(row.key)
        return reasons

    def _environment(self) -> RenderableType:
        table = Table.grid(padding=(0, 2))
        for name, value in self.environment.items():
            table.add_row(Text(name, style="dim"), Text(value))
        return table

    def as_json(self) -> dict[str, Any]:
        """Plain values: verdict, environment, a summary for each property, every outcome."""
        return {
            "target": self.target,
            "holds": self.holds,
            "interrupted": self.interrupted,
            "seconds": round(self.seconds, 1),
            "environment": self.environment,
            "properties": [
                {
                    "property": row.key,
                    "meaning": row.meaning,
                    "cases": row.cases,
                    "failures": len(row.failures),
                    "not_run": dict(row.reasons()),
                    "first_difference": asdict(row.failures[0]) if row.failures else None,
                }
                for row in self.rows
            ],
            "outcomes": [asdict(outcome) for outcome in self.outcomes],
        }


def _first_difference(row: Row) -> str:
    if not row.failures:
        return ""
    first = row.failures[0]
    place = f"{first.case}; {first.context}" if first.context else first.case
    return f"{place}\n{first.detail}"
