"""``numerics-gate diagnose``: why do a function's bits depend on how it is run?"""

from __future__ import annotations

import argparse

import torch
from rich.console import Console

from automodel_rms_norm.gate.commands.arguments import (
    UsageError,
    add_experiment,
    add_target,
    check_output,
    count,
    load_target,
    one_device,
    write_report,
)
from automodel_rms_norm.gate.diagnosis.diagnosis import diagnose
from automodel_rms_norm.gate.diagnosis.subject import Subject
from automodel_rms_norm.gate.recipe import DTYPES, Selection

NAME = "diagnose"
HELP = "why do a function's bits depend on how it is run?"
DESCRIPTION = (
    "Records the graphs and kernels that Inductor makes of it and what its autotuner can choose, "
    "and tries each possible cause by an experiment that takes it away. Exits with 0 if there is "
    "nothing to explain, 1 if there is, 2 for a wrong argument or a target that cannot be loaded."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_target(parser)
    add_experiment(parser)
    parser.add_argument(
        "--dtype", choices=tuple(DTYPES), help="default: bf16 on a GPU, fp32 on a CPU"
    )
    parser.add_argument("--hidden", type=count, default=4096, metavar="N", help="default: 4096")
    parser.add_argument(
        "--rows", type=count, metavar="M", help="default: 4096 on a GPU, 64 on a CPU"
    )
    parser.add_argument("--json", metavar="FILE", help="also write everything, code too, to FILE")
    parser.add_argument("--markdown", metavar="FILE", help="also write a report to FILE")


def run(options: argparse.Namespace) -> int:
    device = one_device(options)
    target = load_target(options.target)
    check_output("--json", options.json)
    check_output("--markdown", options.markdown)
    rows = options.rows or (4096 if device == "cuda" else 64)
    dtype = options.dtype or ("bf16" if device == "cuda" else "fp32")
    chosen = Selection(dtypes=(DTYPES[dtype],), widths=(options.hidden,), rows=rows)
    cases = list(target.cases(chosen))
    if not cases:
        raise UsageError(f"--dtype {dtype}: {target.name} has no case of it")
    progress = Console(stderr=True)
    diagnosis = diagnose(
        Subject(target, cases[0].to(torch.device(device))),
        options.runs,
        lambda line: progress.print(line, style="dim", highlight=False),
    )
    diagnosis.print(Console())
    write_report(options, diagnosis.as_json(), diagnosis.as_markdown())
    return 1 if diagnosis.causes else 0
