"""What the programs share: arguments, environment, progress, records, tables and plots.

A program is a list of cases, a function that measures one of them, and two that make tables and
panels of the records. The same two make the documents of report.py.

A record says what was measured (`IDENTITY`), and the median `us` with its `us_quartiles`, or `why`
there is none. `gbps` and `copy_gbps` are of the same run. In a file, a record replaces the one with
the same identity, so a program can be run in parts.
"""

import argparse
import importlib.metadata
import json
import os
import platform
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import automodel_rms_norm as arn
import torch
import torch._dynamo.config as dynamo_config
import torch._functorch.config as functorch_config
from rich.console import Console
from rich.progress import track
from rich.table import Table as RichTable
from timing import Timing

Record = dict[str, Any]

IDENTITY = ("what", "impl", "mode", "rows", "hidden", "x_dtype", "weight_dtype")
IDENTITY += ("zero_centered_gamma", "threads")
SKIPPED = 77  # exit status where a program cannot run on this machine
PACKAGES = ("triton", "liger-kernel", "quack-kernels", "nvidia-cutlass-dsl")


class Table(NamedTuple):
    """`name` is the one in a document's markers; the first column is text."""

    name: str
    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]

    def markdown(self) -> str:
        rule = "|".join(["---", *["--:"] * (len(self.columns) - 1)])
        lines = [" | ".join(self.columns), rule, *(" | ".join(row) for row in self.rows)]
        return "\n".join(f"| {line} |" if line != rule else f"|{line}|" for line in lines)

    def rich(self) -> RichTable:
        table = RichTable(title=self.title)
        for i, column in enumerate(self.columns):
            table.add_column(column, justify="right" if i else "left")
        for row in self.rows:
            table.add_row(*row)
        return table


class Panel(NamedTuple):
    """One diagram: `series` are points (x, y) under a name. Numbers x are on a logarithmic axis;
    where they are strings, every y is a bar."""

    title: str
    x_label: str
    y_label: str
    series: dict[str, list[tuple[Any, float]]]
    y_log: bool = False


@dataclass(frozen=True)
class Program:
    """See the module. `options` adds arguments of its own; `add_arguments` has those of all."""

    name: str
    description: str
    options: Callable[[argparse.ArgumentParser], None]
    cases: Callable[[argparse.Namespace], Sequence[Any]]
    measure: Callable[[Any, argparse.Namespace], Iterable[Record]]
    tables: Callable[[list[Record]], list[Table]]
    panels: Callable[[list[Record]], list[Panel]]
    needs_gpu: bool = False

    def main(self, argv: Sequence[str] | None = None) -> list[Record]:
        """Measures, prints the tables, and writes what was asked for; returns the records."""
        arguments = self.arguments(argv)
        file = ResultsFile(self.name, environment(arguments.device), arguments.json)
        records: list[Record] = []
        for case in track(self.cases(arguments), self.name, disable=arguments.quiet):
            records += self.measure(case, arguments)
            file.write(records)
        console = Console(width=max(Console().width, 100), quiet=arguments.quiet)
        for table in [*self.tables(records), not_run(records)]:
            if table.rows:
                console.print(table.rich())
        if arguments.plot and records:
            plot(self.panels(records), arguments.plot)
        return records

    def arguments(self, argv: Sequence[str] | None) -> argparse.Namespace:
        parser = argparse.ArgumentParser(
            description=self.description, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        gpu = torch.cuda.is_available() and bool(arn.build_info()["cuda"])
        parser.add_argument(
            "--json", type=Path, help="write the records to this file, case by case"
        )
        parser.add_argument("--plot", type=Path, help="draw the records: .svg, .png or .pdf")
        parser.add_argument("--impls", nargs="+", help="only these implementations")
        parser.add_argument("--repeats", type=int, default=30)
        parser.add_argument("--device", type=torch.device, help="default: a GPU if there is one")
        parser.add_argument("--quiet", action="store_true")
        self.options(parser)
        arguments = parser.parse_args(argv)
        if arguments.device is None:
            if self.needs_gpu and not gpu:
                parser.exit(SKIPPED, f"{self.name} measures a GPU, and there is none\n")
            arguments.device = torch.device("cuda" if gpu else "cpu")
        # Autograd's graphs are kept, to time the backward pass alone.
        functorch_config.donated_buffer = False
        dynamo_config.recompile_limit = dynamo_config.accumulated_recompile_limit = 1 << 16
        return arguments


# --- Records --------------------------------------------------------------------------------------


def significant(value: float) -> float:
    """Rounded to what a time resolves, and never to zero."""
    return float(f"{value:.5g}")


def measured(fields: Record, timing: Timing | None, why: str = "", **more: object) -> Record:
    """A record of `fields` and their time, or the reason for its lack."""
    if timing is None:
        return {**fields, "us": None, "why": why}
    quartiles = [round(timing.low, 3), round(timing.high, 3)]
    return {**fields, "us": round(timing.us, 3), "us_quartiles": quartiles, **more}


class ResultsFile:
    """The JSON file of one program's records in one environment."""

    def __init__(self, program: str, environment: Record, path: Path | None) -> None:
        self.head = {"program": program, "environment": environment}
        self.path = path
        self.before: list[Record] = []
        if path is not None and path.exists():
            found = json.loads(path.read_text())
            self.before = found.pop("records")
            if comparable(found) != comparable(self.head):
                raise SystemExit(f"{path} is of another program or environment; move it away")

    def write(self, records: list[Record]) -> None:
        if self.path is None:
            return
        merged = {identity(record): record for record in [*self.before, *records]}
        head = json.dumps(self.head, indent=1).removesuffix("\n}")
        lines = ",\n".join(f"  {json.dumps(record)}" for record in merged.values())
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(f'{head},\n "records": [\n{lines}\n ]\n}}\n')


def comparable(head: Record) -> Record:
    """What two parts of a file must share: beside a GPU, the processor matters little."""
    environment = dict(head["environment"])
    for field in ("cpu", "cores", "threads") if environment.get("gpu") else ():
        environment.pop(field, None)
    return {**head, "environment": environment}


def identity(record: Record) -> tuple[object, ...]:
    return tuple(record.get(field) for field in IDENTITY)


def environment(device: torch.device) -> Record:
    """Where and with what it was measured; no path and no name of a machine."""
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    info = arn.build_info()
    del info["library"]  # a path
    return {
        "gpu": torch.cuda.get_device_name(device) if device.type == "cuda" else None,
        "cpu": cpu_name(),
        "threads": torch.get_num_threads(),
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "packages": versions,
        **info,
    }


def cpu_name() -> str:
    """The processor's name where Linux says it, else its architecture."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


# --- Tables and plots -----------------------------------------------------------------------------


def distinct(records: Iterable[Record], *fields: str) -> list[Any]:
    """The values of a field, or the tuples of several, in the order of their first appearance."""
    values = (tuple(record.get(field) for field in fields) for record in records)
    return [value if len(fields) > 1 else value[0] for value in dict.fromkeys(values)]


def select(records: Iterable[Record], **fields: object) -> list[Record]:
    """The records with these values."""
    wanted = fields.items()
    return [r for r in records if all(r.get(field) == value for field, value in wanted)]


def cell(records: list[Record], show: Callable[[Record], str], **fields: object) -> str:
    """`show` of the one record with these values; a dash where there is none or it has no time."""
    found = [record for record in select(records, **fields) if record["us"] is not None]
    return show(found[0]) if found else "–"


def microseconds(record: Record) -> str:
    us = record["us"]
    return f"{us:.2f}" if us < 100 else f"{us:.0f}"


def share_of_copy(record: Record) -> str:
    return f"{record['gbps'] / record['copy_gbps']:.3f}"


def not_run(records: list[Record]) -> Table:
    """Who could not do what, and why."""
    groups: dict[tuple[str, str], list[Record]] = {}
    for record in records:
        if record["us"] is None:
            groups.setdefault((record["impl"], record["why"]), []).append(record)
    rows = [
        [impl, ", ".join(distinct(group, "what")), str(len(group)), why]
        for (impl, why), group in groups.items()
    ]
    return Table("not_run", "Not run", ["impl", "what", "cases", "why"], rows)


def points(
    records: list[Record], x: str, y: Callable[[Record], float]
) -> dict[str, list[tuple[float, float]]]:
    """Panel.series: a line for each implementation that has a time."""
    timed = [record for record in records if record["us"] is not None]
    return {
        impl: [(record[x], y(record)) for record in select(timed, impl=impl)]
        for impl in distinct(timed, "impl")
    }


def plot(panels: list[Panel], path: Path) -> None:
    """All panels in one image, two in a row."""
    import matplotlib as mpl  # not needed to measure
    from matplotlib.figure import Figure

    with mpl.rc_context({"svg.hashsalt": "0", "svg.fonttype": "none", "font.size": 8}):
        columns = min(2, len(panels))
        lines = -(-len(panels) // columns)
        figure = Figure(figsize=(4.5 * columns, 3 * lines), layout="constrained")
        for i, panel in enumerate(panels):
            axes = figure.add_subplot(lines, columns, i + 1)
            axes.set(title=panel.title, xlabel=panel.x_label, ylabel=panel.y_label)
            axes.set_yscale("log" if panel.y_log else "linear")
            draw = (
                draw_bars if any(isinstance(x, str) for x, _ in all_points(panel)) else draw_lines
            )
            draw(axes, panel)
            axes.grid(alpha=0.3)
            if panel.series:
                axes.legend(fontsize=6)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def all_points(panel: Panel) -> list[tuple[Any, float]]:
    return [point for line in panel.series.values() for point in line]


def draw_lines(axes: Any, panel: Panel) -> None:
    axes.set_xscale("log", base=2)
    for name, line in panel.series.items():
        ours = name == "op"
        width, above = (2, 3) if ours else (1, 2)
        marker = "." if len(line) < 50 else None
        axes.plot(
            *zip(*sorted(line), strict=True),
            label=name,
            marker=marker,
            linewidth=width,
            zorder=above,
        )


def draw_bars(axes: Any, panel: Panel) -> None:
    groups = list(dict.fromkeys(x for x, _ in all_points(panel)))
    width = 0.8 / len(panel.series)
    for i, (name, bars) in enumerate(panel.series.items()):
        places = [groups.index(x) + (i + 0.5) * width - 0.4 for x, _ in bars]
        axes.bar(places, [y for _, y in bars], width, label=name)
    axes.set_xticks(range(len(groups)), groups, fontsize=6)
