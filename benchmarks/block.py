"""A compiled block, as a model has it: residual addition, norm, linear layer, in bfloat16.

`forward` is the inference pass, `training` both passes, with the gradients of x, residual, and both
weights. Each implementation of the norm is compiled as part of the block; `op_add` is the op that
adds as well; `linear` is a block that does not normalise, for what the matrix products take. Device
time; three sets of inputs in turn.
"""

import argparse
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import automodel_rms_norm as arn
import harness
import torch
import torch.nn.functional as F
from harness import Panel, Program, Record, Table, cell, distinct, microseconds, select
from norms import EPS, Problem, Variant, make_problem, norm_functions
from timing import Absent, Call, build, time_calls
from torch import Tensor, nn

ROWS = [4096, 16384]
HIDDEN = [4096, 8192]
WHAT = ["forward", "training"]
SETS = 3

Block = Callable[[Tensor, Tensor, nn.Parameter, nn.Parameter], tuple[Tensor, Tensor]]


class Case(NamedTuple):
    rows: int
    hidden: int


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS)
    parser.add_argument("--hidden", type=int, nargs="+", default=HIDDEN)


def cases(arguments: argparse.Namespace) -> list[Case]:
    return [Case(rows, hidden) for hidden in arguments.hidden for rows in arguments.rows]


def blocks(names: list[str] | None) -> dict[str, Block]:
    """The blocks to compile: (x, residual, norm's weight, linear's weight) to (y, sum)."""

    def with_norm(norm: Callable[..., Tensor]) -> Block:
        def block(
            x: Tensor, residual: Tensor, weight: nn.Parameter, linear: nn.Parameter
        ) -> tuple[Tensor, Tensor]:
            total = x + residual
            return F.linear(norm(total, weight, EPS), linear), total

        return block

    def with_add(
        x: Tensor, residual: Tensor, weight: nn.Parameter, linear: nn.Parameter
    ) -> tuple[Tensor, Tensor]:
        y, total = arn.add_rms_norm(x, residual, weight, EPS)
        return F.linear(y, linear), total

    result = {name: with_norm(norm) for name, norm in norm_functions(names).items()}
    if names is None or "op_add" in names:
        result["op_add"] = with_add
    return {**result, "linear": with_norm(lambda x, weight, eps: x)}


def measure(case: Case, arguments: argparse.Namespace) -> Iterator[Record]:
    device = arguments.device
    problems = [make_problem(*case, Variant(), device, seed, adds=True) for seed in range(SETS)]
    matrix = torch.randn(case.hidden, case.hidden, device=device) / case.hidden**0.5
    linear = nn.Parameter(matrix.to(torch.bfloat16))
    compared = blocks(arguments.impls)
    torch._dynamo.reset()

    def make(what: str, name: str) -> list[Call]:
        if name == "op_add" and not hasattr(arn, "add_rms_norm"):
            raise Absent("this build has no add_rms_norm")
        block = torch.compile(compared[name], dynamic=False, fullgraph=True)
        call = inference if what == "forward" else training
        return [partial(call, block, p, linear) for p in problems]

    for what in WHAT:
        calls, why = build({name: partial(make, what, name) for name in compared}, device)
        times = time_calls(calls, arguments.repeats, device)
        for name in compared:
            fields = {"what": what, "impl": name, "rows": case.rows, "hidden": case.hidden}
            fields |= Variant().fields()
            yield harness.measured(fields, times.get(name), why.get(name, ""))


def inference(block: Block, problem: Problem, linear: nn.Parameter) -> None:
    with torch.no_grad():
        block(problem.x, problem.residual, problem.weight, linear)


def training(block: Block, problem: Problem, linear: nn.Parameter) -> None:
    leaves = [problem.x, problem.residual, linear, problem.weight]
    outputs = block(problem.x, problem.residual, problem.weight, linear)
    torch.autograd.grad(outputs, leaves, (problem.grad_y, problem.grad_sum), allow_unused=True)


# --- Tables and plots -----------------------------------------------------------------------------


def tables(records: list[Record]) -> list[Table]:
    impls = distinct(records, "impl")
    rows = [
        [
            f"{what}, {height} × {hidden}",
            *(
                cell(records, microseconds, what=what, rows=height, hidden=hidden, impl=impl)
                for impl in impls
            ),
        ]
        for what, height, hidden in distinct(records, "what", "rows", "hidden")
    ]
    return [Table("block", "A block: us", ["rows × hidden", *impls], rows)]


def panels(records: list[Record]) -> list[Panel]:
    """What each block takes above the matrix products alone."""
    linear = {shape(r): r["us"] for r in select(records, impl="linear")}
    others = [r for r in records if r["us"] is not None and r["impl"] != "linear"]
    shown = [{**r, "shape": f"{r['rows']} × {r['hidden']}"} for r in others]
    return [
        Panel(
            what,
            "",
            "us above the linear layer alone",
            harness.points(select(shown, what=what), "shape", lambda r: r["us"] - linear[shape(r)]),
        )
        for what in distinct(shown, "what")
    ]


def shape(record: Record) -> tuple[object, ...]:
    return record["what"], record["rows"], record["hidden"]


PROGRAM = Program("block", __doc__, options, cases, measure, tables, panels, needs_gpu=True)

if __name__ == "__main__":
    PROGRAM.main()
