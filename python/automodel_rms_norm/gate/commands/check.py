"""``numerics-gate check``: does a norm keep the properties of the contract on this machine?"""

from __future__ import annotations

import argparse

from rich.console import Console

from automodel_rms_norm.gate.check import check
from automodel_rms_norm.gate.commands.arguments import (
    add_selection,
    add_target,
    check_expected,
    check_output,
    keys,
    properties,
    selection,
    write_outputs,
)

NAME = "check"
HELP = "does a function keep the properties of the contract on this machine?"
DESCRIPTION = (
    "Checks every property of the numerics contract. Exits with 0 if all hold, 1 if one does not, "
    "2 for a wrong argument or a target that cannot be loaded or called, 130 if interrupted."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_target(parser)
    add_selection(parser)
    parser.add_argument(
        "--expect",
        type=keys,
        default=(),
        metavar="P1,P3",
        help="only these must hold; the others are checked and shown",
    )
    parser.add_argument("--json", metavar="FILE", help="also write every outcome to FILE")
    parser.add_argument("--markdown", metavar="FILE", help="also write the report to FILE")
    parser.add_argument(
        "--plot",
        metavar="FILE",
        help="also draw where the differences lie and how large they are (.svg, .png, .pdf)",
    )


def run(options: argparse.Namespace) -> int:
    chosen, asked = selection(options), properties(options)
    check_expected(options.expect, [property.key for property in asked])
    for option in ("json", "markdown", "plot"):
        check_output(f"--{option}", getattr(options, option))
    report = check(
        options.target,
        asked,
        options.device,
        chosen,
        Console(stderr=True),
        options.expect,
        timeout=options.timeout,
    )
    report.print(Console())
    write_outputs(report, options)
    if report.interrupted:
        raise KeyboardInterrupt
    return 0 if report.holds else 1
