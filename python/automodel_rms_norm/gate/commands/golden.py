"""``numerics-gate golden``: a target's own answers, recorded in a file and compared with it."""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.console import Console

from automodel_rms_norm.gate import recorded
from automodel_rms_norm.gate.check import check
from automodel_rms_norm.gate.commands.arguments import (
    UsageError,
    add_selection,
    add_target,
    check_output,
    properties,
    selection,
)

NAME = "golden"
HELP = "records the bits of a target in a file, or says which property's bits have moved since"
DESCRIPTION = (
    "With --write: records digests of what the target gives in every context of P1, P2, P3, P5 and "
    "P6. Without: compares with the file. Exits with 0 if none has moved, 1 if one has, 2 for a "
    "wrong argument, a malformed file or a target that cannot be loaded or called."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_target(parser)
    parser.add_argument("file", nargs="?", metavar="FILE", help="what --write has written")
    parser.add_argument("--write", metavar="FILE", help="record, in a file to commit")
    add_selection(parser)


def run(options: argparse.Namespace) -> int:
    if (options.write is None) == (options.file is None):
        raise UsageError("golden takes either a FILE to compare with or --write FILE")
    chosen = selection(options)
    before = None
    if options.file is None:
        check_output("--write", options.write)
    else:
        try:
            before = recorded.Record.read(options.file)
        except ValueError as error:
            raise UsageError(str(error)) from error
        chosen = before.selection
    known = recorded.KEYS if before is None or options.property else before.keys
    asked = [p for p in properties(options) if p.key in known]
    report = check(
        options.target,
        asked,
        options.device,
        chosen,
        Console(stderr=True),
        timeout=options.timeout,
        digests=True,
    )
    if before is None:
        if report.interrupted:
            raise KeyboardInterrupt
        record = recorded.Record.of(report, options.target, chosen)
        Path(options.write).write_text(record.as_text(), encoding="utf-8")
        Console().print(f"{len(record.digests)} answers of {report.target} are in {options.write}")
        return 0
    compared = recorded.compared(report, before)
    compared.print(Console())
    if compared.interrupted:
        raise KeyboardInterrupt
    return 0 if compared.holds else 1
