"""``numerics-gate dpo``: does a DPO job with this norm start at ln 2?"""

from __future__ import annotations

import argparse

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
from automodel_rms_norm.gate.dpo.first_loss import Run, Setting, runs, why_no_trainer
from automodel_rms_norm.gate.dpo.model import why_not_norm
from automodel_rms_norm.gate.dpo.report import Report
from automodel_rms_norm.gate.environment import environment, installed

NAME = "dpo"
HELP = "does a DPO job with this norm start at ln 2?"
DESCRIPTION = (
    "Trains one step with TRL's DPOTrainer: a small Qwen3 in bfloat16 with the target in the place "
    "of every norm, the policy in grad mode and the reference, of the same weights, under no_grad. "
    "Exits with 0 if the first loss is exactly ln 2 in every run, 1 if it is not, 2 for a wrong "
    "argument, a target that cannot be loaded, or where there is no trl."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_target(parser)
    add_experiment(parser)
    parser.add_argument(
        "--hidden", type=count, metavar="N", help="default: 2688 on a GPU, 256 on a CPU"
    )
    parser.add_argument("--layers", type=count, default=2, metavar="N", help="default: 2")
    parser.add_argument(
        "--length",
        type=count,
        metavar="N",
        help="of every sequence, of which there are 16; default: 384 on a GPU, 96 on a CPU",
    )
    parser.add_argument("--json", metavar="FILE", help="also write every run to FILE")
    parser.add_argument("--markdown", metavar="FILE", help="also write the report to FILE")


def run(options: argparse.Namespace) -> int:
    device = one_device(options)
    target = load_target(options.target)
    if reason := why_not_norm(target) or why_no_trainer():
        raise UsageError(reason)
    check_output("--json", options.json)
    check_output("--markdown", options.markdown)
    hidden = options.hidden or (2688 if device == "cuda" else 256)
    length = options.length or (384 if device == "cuda" else 96)
    console, done = Console(stderr=True), list[Run]()
    for finished in runs(Setting(target, device, hidden, options.layers, length), options.runs):
        done.append(finished)
        console.print(f"{finished.circumstance}: {finished.loss:.10f}", highlight=False)
    report = Report(
        target.name,
        f"Qwen3, hidden {hidden}, {options.layers} layers, 16 sequences of {length}, on {device}",
        environment() | {name: installed(name) for name in ("trl", "accelerate", "datasets")},
        done,
    )
    report.print(Console())
    write_report(options, report.as_json(), report.as_markdown())
    return 0 if report.holds else 1
