"""``numerics-gate matrix``: which versions of torch does the op keep its contract with?"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import sys
from pathlib import Path

from rich.console import Console

from automodel_rms_norm.gate.commands.arguments import UsageError, check_output, count
from automodel_rms_norm.gate.matrix.row import Row
from automodel_rms_norm.gate.matrix.steps import Plan, measure
from automodel_rms_norm.gate.matrix.table import Matrix, into_document

NAME = "matrix"
HELP = "which versions of torch does the op keep its contract with?"
DESCRIPTION = (
    "Makes an environment for each version of torch, builds this package there, runs check and "
    "golden, and writes a table with a row for each. What is done is kept in --folder: the same "
    "command goes on after an interruption, and tries again what failed. Exits with 0 if the op "
    "holds with every version, 1 if not, 2 for a wrong argument, 130 if interrupted."
)


def _versions(text: str) -> tuple[str, ...]:
    versions = tuple(dict.fromkeys(part.strip() for part in text.split(",")))
    for version in versions:
        if not re.fullmatch(r"\d+(\.\d+)+\w*", version):
            raise argparse.ArgumentTypeError(f"{version!r} is not a version of torch, as 2.11.0 is")
    return versions


def _targets(text: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(["op", *(part.strip() for part in text.split(","))]))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--torch", type=_versions, required=True, metavar="2.8.0,2.9.1")
    parser.add_argument(
        "--targets", type=_targets, default=("op", "torch"), help="besides the op; default: torch"
    )
    parser.add_argument(
        "--install",
        type=shlex.split,
        action="append",
        default=[],
        metavar="REQUIREMENTS",
        help="what the targets need, as pip install takes it, options as well; may be repeated, "
        "each in a pip install of its own",
    )
    parser.add_argument("--full", action="store_true", help="check and golden without --quick")
    parser.add_argument(
        "--timeout",
        type=count,
        default=300,
        metavar="SECONDS",
        help="for each case; a slow machine needs more; default: 300",
    )
    parser.add_argument("--source", type=Path, default=Path(), help="a checkout; default: here")
    parser.add_argument(
        "--folder", type=Path, default=Path("build/matrix"), help="default: build/matrix"
    )
    parser.add_argument("--python", default=sys.executable, help="default: this one")
    parser.add_argument("--keep", action="store_true", help="do not delete the environments")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write every row to FILE")
    parser.add_argument(
        "--markdown",
        type=Path,
        metavar="FILE",
        help="also write the table to FILE, in the place of what is between <!-- matrix --> and "
        "<!-- end --> if it has that",
    )


def _plan(options: argparse.Namespace) -> Plan:
    source: Path = options.source.resolve()
    if not (source / ".ci" / "make_venv.py").exists():
        raise UsageError(
            f"--source {options.source} is not a checkout of automodel-rms-norm; name one"
        )
    check_output("--json", options.json)
    check_output("--markdown", options.markdown)
    try:
        options.folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--folder {options.folder}: {error.strerror}") from error
    return Plan(
        source,
        options.folder.resolve(),
        options.python,
        options.targets,
        options.install,
        () if options.full else ("--quick",),
        ("--timeout", str(options.timeout)),
        options.torch[0],
        options.keep,
    )


def run(options: argparse.Namespace) -> int:
    plan = _plan(options)
    progress, interrupted = Console(stderr=True), False
    try:
        for version in options.torch:
            measure(plan, version, lambda line: progress.print(line, highlight=False))
    except KeyboardInterrupt:
        interrupted = True
    except ValueError as error:
        raise UsageError(str(error)) from error
    rows = [Row.load(plan.row(version), version) for version in options.torch]
    matrix = Matrix(rows, options.targets)
    Console().print(matrix.as_table())
    if options.json:
        options.json.write_text(json.dumps(matrix.as_json(), indent=1) + "\n", encoding="utf-8")
    if options.markdown:
        document = options.markdown
        before = document.read_text(encoding="utf-8") if document.exists() else ""
        document.write_text(into_document(before, matrix.as_markdown()), encoding="utf-8")
    if interrupted:
        progress.print(f"the same command goes on from what is in {plan.folder}")
        raise KeyboardInterrupt
    return 0 if matrix.holds else 1
