"""What a scan found and measured: for a terminal, as Markdown and as JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from automodel_rms_norm.gate.scan.drive import GRAPHS, Answer
from automodel_rms_norm.gate.scan.survey import Entry

__all__ = ["Row", "ScanReport"]


@dataclass(frozen=True)
class Row:
    """An entry and its answer; None while there is none."""

    entry: Entry
    answer: Answer | None = None

    @property
    def why_not(self) -> str:
        """Why it was not driven, or not to the end."""
        return self.entry.why_not or (self.answer.why_not if self.answer else "not reached")

    @property
    def measured(self) -> bool:
        return self.answer is not None and bool(self.answer.properties or self.answer.graphs)

    def fails(self, key: str) -> bool:
        if key == GRAPHS:
            graphs = self.answer.graphs if self.answer else []
            return any(graph["answers"] > 1 or graph["differed"] for graph in graphs)
        return bool(self._property(key).get("failures"))

    def cell(self, key: str) -> str:
        """Failures of cases; of the graphs: answers, and how often fresh compiles differed."""
        if key == GRAPHS:
            return self._graphs()
        found = self._property(key)
        return f"{found['failures']} of {found['cases']}" if found.get("cases") else "–"

    def first(self, keys: Sequence[str]) -> str:
        """The first difference under the first of `keys` that fails."""
        for key in keys:
            if self.fails(key):
                if key == GRAPHS:
                    return next(f"{g['case']}: {g['first']}" for g in self._cases() if g["first"])
                first = self._property(key)["first_difference"]
                return f"{key}, {first['case']}; {first['context']}: {first['detail']}"
        return ""

    def _property(self, key: str) -> dict[str, Any]:
        return self.answer.properties.get(key, {}) if self.answer else {}

    def _cases(self) -> list[dict[str, Any]]:
        return self.answer.graphs if self.answer else []

    def _graphs(self) -> str:
        if not self._cases():
            return "–"
        answers = max(graph["answers"] for graph in self._cases())
        choices = max(graph["choices"] for graph in self._cases())
        differed, compiles = (
            sum(graph[name] for graph in self._cases()) for name in ("differed", "compiles")
        )
        plural = "" if answers == 1 else "s"
        return f"{answers} answer{plural} of {choices}; differed {differed} of {compiles}"


@dataclass
class ScanReport:
    """The rows are in the order of the source; `asked` are the columns.

    ``expected`` are those that must hold, all if it is empty; ``selection`` are the fields that all
    jobs share.
    """

    package: str
    version: str
    rows: list[Row]
    asked: tuple[str, ...]
    unread: dict[str, str]
    environment: dict[str, str] = field(default_factory=dict)
    expected: tuple[str, ...] = ()
    selection: dict[str, Any] = field(default_factory=dict)
    interrupted: bool = False
    seconds: float = 0.0

    @property
    def holds(self) -> bool:
        """Whether all that was asked was measured, and nothing fails that must not."""
        driven = [row for row in self.rows if row.entry.driven]
        return (
            not self.interrupted
            and any(row.measured for row in driven)
            and not any(row.fails(key) for row in driven for key in self.expected or self.asked)
        )

    def verdict(self) -> str:
        """One sentence."""
        measured = [row for row in self.rows if row.measured]
        counts = Counter(key for row in measured for key in self.asked if row.fails(key))
        words = [f"{key} fails for {counts[key]}" for key in self.asked if counts[key]]
        found = f"{self.package} {self.version}: {len(measured)} of {len(self.rows)} functions"
        stopped = "; interrupted" if self.interrupted else ""
        return f"{found} checked: {', '.join(words) or 'nothing fails'}{stopped}"

    # --- Renderings -------------------------------------------------------------------------------

    def _headings(self) -> list[str]:
        graphs = "grad and no_grad graphs" if GRAPHS in self.asked else ""
        keys = [key for key in self.asked if key != GRAPHS]
        return ["function", "compiled", "by", *keys, *([graphs] if graphs else []), "first"]

    def _cells(self, row: Row) -> list[str]:
        entry, site = row.entry, row.entry.site
        how = ", ".join(filter(None, (site.form or site.kind, site.settings)))
        cells = [row.cell(key) for key in self.asked if key != GRAPHS]
        cells += [row.cell(GRAPHS)] if GRAPHS in self.asked else []
        note = row.first(self.asked) or (row.answer.why_not if row.answer else "")
        return [f"{entry.name}\n{site.place}", how, entry.driven, *cells, note]

    def _undriven(self) -> dict[str, list[Row]]:
        """What was not driven at all, by the reason."""
        reasons: dict[str, list[Row]] = {}
        for row in self.rows:
            if not row.measured:
                reasons.setdefault(row.why_not, []).append(row)
        return reasons

    def print(self, console: Console) -> None:
        """Prints a row for each function, what was not driven and why, and the verdict."""
        table = Table(title=f"{self.package} {self.version}", title_justify="left")
        for heading in self._headings():
            table.add_column(heading, overflow="fold")
        for row in self.rows:
            if row.measured:
                style = "red" if any(row.fails(key) for key in self.asked) else ""
                table.add_row(*(Text(cell) for cell in self._cells(row)), style=style)
        console.print(table)
        for reason, rows in self._undriven().items():
            names = ", ".join(row.entry.name for row in rows)
            console.print(Text(f"not driven ({len(rows)}), {reason}: {names}", style="yellow"))
        self._print_unread(console)
        style = "bold green" if self.holds else "bold red"
        console.print(Text(f"{self.verdict()}, {self.seconds:.0f} s", style=style))

    def print_list(self, console: Console) -> None:
        """Prints where everything is, without what came of it."""
        table = Table(title=f"{self.package} {self.version}", title_justify="left")
        for heading in _LIST:
            table.add_column(heading, overflow="fold")
        for cells in self._listed():
            table.add_row(*map(Text, cells))
        console.print(table)
        self._print_unread(console)
        kinds = Counter(site.what for row in self.rows for site in row.entry.sites)
        console.print(", ".join(f"{kind}: {count}" for kind, count in kinds.items()) or "nothing")

    def _listed(self) -> list[list[str]]:
        sites = [(site, row.entry) for row in self.rows for site in row.entry.sites]
        lines = sorted(sites, key=lambda found: (found[0].path, found[0].line))
        return [
            [site.place, site.what, site.function, site.settings, entry.driven or entry.why_not]
            for site, entry in lines
        ]

    def _print_unread(self, console: Console) -> None:
        for path, reason in self.unread.items():
            console.print(Text(f"not read: {path}: {reason}", style="yellow"))

    def as_markdown(self) -> str:
        """A table of what was checked, what was not and why, the environment and the verdict."""
        lines = [f"### {self.package} {self.version}", "", *_table(self._headings())]
        lines += [_line(self._cells(row)) for row in self.rows if row.measured]
        lines += ["", *_table(["not driven", "where", "why"])]
        lines += [
            _line([row.entry.name, row.entry.site.place, reason])
            for reason, rows in self._undriven().items()
            for row in rows
        ]
        lines += ["", *(f"- not read: {path}: {reason}" for path, reason in self.unread.items())]
        lines += [f"- {name}: {value}" for name, value in self.environment.items()]
        return "\n".join([*lines, "", f"**{self.verdict()}**", ""])

    def list_as_markdown(self) -> str:
        """The table of `print_list`."""
        rows = [_line(cells) for cells in self._listed()]
        heading = f"### {self.package} {self.version}"
        return "\n".join([heading, "", *_table(_LIST), *rows, ""])

    def as_json(self) -> dict[str, Any]:
        """Plain values: every entry with its answer."""
        return {
            "package": self.package,
            "version": self.version,
            "holds": self.holds,
            "interrupted": self.interrupted,
            "seconds": round(self.seconds, 1),
            "asked": self.asked,
            "selection": self.selection,
            "environment": self.environment,
            "unread": self.unread,
            "functions": [
                {**asdict(row.entry), "answer": row.answer and asdict(row.answer)}
                for row in self.rows
            ],
        }


_LIST = ["where", "what", "function", "settings", "driven by, or why not"]


def _table(headings: Sequence[str]) -> list[str]:
    return [_line(headings), f"|{'---|' * len(headings)}"]


def _line(cells: Sequence[str]) -> str:
    escaped = (cell.replace("|", "\\|").replace("\n", "<br>") for cell in cells)
    return f"| {' | '.join(escaped)} |"
