"""``numerics-gate scan``: everything that an installed package compiles, found and checked."""

from __future__ import annotations

import argparse
import math
import os
import time
from contextlib import closing
from dataclasses import replace
from typing import Any

from rich.console import Console

from automodel_rms_norm.gate.checks import why_no_gpu
from automodel_rms_norm.gate.commands.arguments import (
    UsageError,
    add_selection,
    check_expected,
    check_output,
    count,
    keys,
    selection,
    write_report,
)
from automodel_rms_norm.gate.environment import environment
from automodel_rms_norm.gate.recipe import NAMES
from automodel_rms_norm.gate.recipes import recipes_for
from automodel_rms_norm.gate.scan.drive import GRAPHS, Job
from automodel_rms_norm.gate.scan.processes import measure
from automodel_rms_norm.gate.scan.report import Row, ScanReport
from automodel_rms_norm.gate.scan.resume import resume
from automodel_rms_norm.gate.scan.sources import ScanError, read_package
from automodel_rms_norm.gate.scan.survey import Entry, survey

NAME = "scan"
HELP = "everything that an installed package compiles: found, and checked where it can be driven"
DESCRIPTION = (
    "Reads a package's source, without importing it, for what goes through torch.compile and for "
    "custom ops; then checks what a norm's signature or a recipe can drive, each function in a "
    "process of its own. Exits with 0 if all that was asked holds, 1 if something does not, 2 for "
    "a wrong argument or a package that cannot be read, 130 if interrupted."
)
PROPERTIES = ("P1", "P2", "P2-choices", "P3", "P5")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("package", metavar="PACKAGE", help="a package or distribution")
    parser.add_argument("--list", action="store_true", help="only list what is found")
    add_selection(parser, "function", 600.0)
    parser.add_argument(
        "--expect", type=keys, default=(), metavar="P1,P3", help="only these must hold"
    )
    parser.add_argument(
        "--function", default="", metavar="TEXT", help="only functions with TEXT in their name"
    )
    parser.add_argument(
        "--recipes", metavar="MODULE", help="a module with RECIPES, besides those that ship"
    )
    parser.add_argument(
        "--compiles",
        type=count,
        default=3,
        metavar="N",
        help="compile the grad and no_grad graphs afresh so often (default 3)",
    )
    parser.add_argument(
        "--jobs",
        type=count,
        default=max(1, (os.cpu_count() or 1) // 2),
        metavar="N",
        help="functions at once (default %(default)s)",
    )
    parser.add_argument(
        "--resume",
        metavar="FILE",
        help="go on from a FILE of --json: what it has to the end is not measured again",
    )
    parser.add_argument("--json", metavar="FILE", help="also write every outcome to FILE")
    parser.add_argument("--markdown", metavar="FILE", help="also write the report to FILE")


def run(options: argparse.Namespace) -> int:
    asked = tuple(key for key in PROPERTIES if not options.property or key in options.property)
    check_expected(options.expect, asked)
    for option in ("json", "markdown"):
        check_output(f"--{option}", getattr(options, option))
    try:
        package = read_package(options.package)
    except ScanError as error:
        raise UsageError(str(error)) from error
    roots = dict.fromkeys(source.module.partition(".")[0] for source in package.sources)
    recipes = {n: made for root in roots for n, made in recipes_for(root, options.recipes).items()}
    entries = [e for e in survey(package, recipes) if options.function in e.function]
    report = ScanReport(
        package.name,
        package.version,
        [Row(entry) for entry in entries],
        (*asked, GRAPHS),
        package.unread,
        expected=options.expect,
    )
    if options.list:
        report.print_list(Console())
        write_report(options, report.as_json(), report.list_as_markdown())
        return 0
    report.environment = environment()
    report.selection = _selection(options)
    if options.resume:
        try:
            resume(report, options.resume)
        except ScanError as error:
            raise UsageError(f"--resume {error}") from error
    _measure(report, options)
    report.print(Console())
    if report.interrupted:
        raise KeyboardInterrupt
    return 0 if report.holds else 1


def _measure(report: ScanReport, options: argparse.Namespace) -> None:
    """Fills in the answers as they come, and the files with them."""
    start, progress = time.monotonic(), Console(stderr=True)
    limit = options.timeout or math.inf
    jobs = {
        _job(row.entry, report): place
        for place, row in enumerate(report.rows)
        if row.entry.driven and row.answer is None
    }
    try:
        with closing(measure(list(jobs), options.jobs, limit)) as answers:
            for number, (job, answer) in enumerate(answers, 1):
                place = jobs[job]
                report.rows[place] = replace(report.rows[place], answer=answer)
                report.seconds = time.monotonic() - start
                write_report(options, report.as_json(), report.as_markdown())
                progress.print(f"{number} of {len(jobs)}, {report.seconds:.0f} s: {job.function}")
    except KeyboardInterrupt:
        report.interrupted = True
    report.seconds = time.monotonic() - start
    write_report(options, report.as_json(), report.as_markdown())


def _selection(options: argparse.Namespace) -> dict[str, Any]:
    """Of each job, what is the same for all; plain values."""
    chosen = selection(options)
    return {
        "recipes": options.recipes,
        "device": ("cpu" if why_no_gpu() else "cuda")
        if options.device == "auto"
        else options.device,
        "quick": chosen.quick,
        "dtypes": tuple(NAMES[dtype] for dtype in chosen.dtypes),
        "widths": chosen.widths,
        "rows": chosen.rows,
        "repeats": options.compiles,
    }


def _job(entry: Entry, report: ScanReport) -> Job:
    return Job(entry.function, entry.settings, asked=report.asked, **report.selection)
