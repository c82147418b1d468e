"""``numerics-gate check``: does a norm keep the properties of the contract on this machine?"""

from __future__ import annotations

import argparse
import json

from rich.console import Console

from automodel_rms_norm.gate.check import check, why_no_gpu
from automodel_rms_norm.gate.commands.arguments import (
    UsageError,
    add_target,
    count,
    counts,
    dtypes,
    keys,
    load_target,
    open_output,
)
from automodel_rms_norm.gate.properties import PROPERTIES
from automodel_rms_norm.gate.recipe import DTYPES, Selection

NAME = "check"
HELP = "does a norm keep the properties of the contract on this machine?"
DESCRIPTION = (
    "Checks every property of the numerics contract. Exits with 0 if all hold, 1 if one does not, "
    "2 for a wrong argument or a target that cannot be loaded."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_target(parser)
    parser.add_argument(
        "--device",
        choices=("auto", "cpu", "cuda"),
        default="auto",
        help="auto is the CPU and, if there is one, the GPU",
    )
    parser.add_argument(
        "--property", type=keys, default=(), metavar="P1,P3", help="check these alone"
    )
    parser.add_argument(
        "--expect",
        type=keys,
        default=(),
        metavar="P1,P3",
        help="only these must hold; the others are checked and shown",
    )
    parser.add_argument("--quick", action="store_true", help="fewer widths and dtypes")
    parser.add_argument("--dtype", type=dtypes, default=(), metavar=",".join(DTYPES), help="of x")
    parser.add_argument("--widths", type=counts, default=(), metavar="N,N")
    parser.add_argument("--rows", type=count, metavar="M")
    parser.add_argument("--json", metavar="FILE", help="also write every outcome to FILE")
    parser.add_argument("--markdown", metavar="FILE", help="also write the report to FILE")


def run(options: argparse.Namespace) -> int:
    if options.device == "cuda" and (reason := why_no_gpu()):
        raise UsageError(f"--device cuda: {reason}")
    target = load_target(options.target)
    json_file = open_output("json", options.json)
    markdown_file = open_output("markdown", options.markdown)
    report = check(
        target,
        [p for p in PROPERTIES if p.key in options.property or not options.property],
        options.device,
        Selection(options.quick, options.dtype, options.widths, options.rows),
        Console(stderr=True),
        options.expect,
    )
    report.print(Console())
    if json_file:
        with json_file:
            json.dump(report.as_json(), json_file, indent=1)
            json_file.write("\n")
    if markdown_file:
        with markdown_file:
            markdown_file.write(report.as_markdown())
    return 0 if report.holds else 1
