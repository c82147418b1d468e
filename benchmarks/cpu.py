"""The CPU kernels, with one thread and with all, against Inductor's, torch's and a copy.

The implementations take turns, so that a noisy machine is noisy for all. `clone` is x.clone(), a
fresh output as every norm has one; `copy` is into memory that was written before.
`forward_backward` is a forward pass and autograd's backward pass, of which copies are no part. The
op's geometric mean is over the faster of the two others.
"""

import argparse
import statistics
from collections.abc import Callable, Iterator
from typing import NamedTuple

import harness
import torch
import torch._inductor.config
from harness import Panel, Program, Record, Table, cell, distinct, microseconds, select
from norms import EPS, Problem, Variant, implementations, make_problem
from timing import Absent, Call, build, time_calls

SHAPES = ["4096x4096", "512x2688", "65536x128"]
DTYPES = ["bfloat16", "float32"]
IMPLS = ["op", "automodel_0_6", "torch"]
COPIES = ["clone", "copy"]
WHAT = ["forward", "forward_backward"]


class Case(NamedTuple):
    rows: int
    hidden: int
    variant: Variant
    threads: int


def options(parser: argparse.ArgumentParser) -> None:
    most = torch.get_num_threads()
    parser.add_argument("--shapes", nargs="+", default=SHAPES)
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=DTYPES)
    parser.add_argument("--threads", type=int, nargs="+", default=sorted({1, most}))


def cases(arguments: argparse.Namespace) -> list[Case]:
    arguments.device = torch.device("cpu")
    result = []
    for threads in arguments.threads:
        for name in arguments.dtypes:
            variant = Variant(getattr(torch, name), getattr(torch, name))
            for shape in arguments.shapes:
                rows, hidden = map(int, shape.split("x"))
                result.append(Case(rows, hidden, variant, threads))
    return result


def measure(case: Case, arguments: argparse.Namespace) -> Iterator[Record]:
    before = torch.get_num_threads()
    torch.set_num_threads(case.threads)
    torch._dynamo.reset()
    try:
        # Inductor writes the number of threads into its code.
        with torch._inductor.config.patch({"cpp.threads": case.threads}):
            for what in WHAT:
                yield from measure_one(what, case, arguments)
    finally:
        torch.set_num_threads(before)


def measure_one(what: str, case: Case, arguments: argparse.Namespace) -> Iterator[Record]:
    cpu = arguments.device
    names = arguments.impls or IMPLS
    compared = implementations(names, cpu)
    problems = [make_problem(case.rows, case.hidden, case.variant, cpu, s) for s in range(2)]

    def make(name: str) -> list[Call]:
        if compared[name].why:
            raise Absent(compared[name].why)
        return [one_call(what, compared[name].norm, p) for p in problems]

    calls, why = build({name: lambda name=name: make(name) for name in names}, cpu)
    if what == "forward":
        calls |= copies([p.x.detach() for p in problems])
    times = time_calls(calls, arguments.repeats, cpu)
    for name in [*names, *(COPIES if what == "forward" else [])]:
        fields = {"what": what, "impl": name, "threads": case.threads}
        fields |= {"rows": case.rows, "hidden": case.hidden, **case.variant.fields()}
        yield harness.measured(fields, times.get(name), why.get(name, ""))


def copies(xs: list[torch.Tensor]) -> dict[str, list[Call]]:
    there = torch.zeros_like(xs[0])
    return {
        "clone": [lambda x=x: x.clone() for x in xs],
        "copy": [lambda x=x: there.copy_(x) for x in xs],
    }


def one_call(what: str, norm: Callable, p: Problem) -> Call:
    if what == "forward_backward":
        return lambda: torch.autograd.grad(norm(p.x, p.weight, EPS), (p.x, p.weight), p.grad_y)
    return torch.no_grad()(lambda: norm(p.x, p.weight, EPS))


# --- Tables and plots -----------------------------------------------------------------------------

CASE = ("what", "x_dtype", "rows", "hidden")


def tables(records: list[Record]) -> list[Table]:
    threads = distinct(records, "threads")
    return [
        *(times_table(each, max(threads), select(records, threads=each)) for each in threads),
        scaling_table(records),
    ]


def label(case: tuple) -> str:
    what, dtype, rows, hidden = case
    return f"{what}, {dtype}, {rows} × {hidden}"


def times_table(threads: int, most: int, records: list[Record]) -> Table:
    impls = distinct(records, "impl")
    rows, ratios = [], []
    for case in distinct(records, *CASE):
        here = select(records, **dict(zip(CASE, case, strict=True)))
        times = {r["impl"]: r["us"] for r in here if r["us"] is not None}
        others = [us for impl, us in times.items() if impl not in ("op", *COPIES)]
        row = [label(case), *(cell(here, microseconds, impl=impl) for impl in impls), "–", "–"]
        if others and "op" in times:
            ratios.append(min(others) / times["op"])
            row[-2] = f"{ratios[-1]:.2f}"
        if "clone" in times and "op" in times:
            row[-1] = f"{times['clone'] / times['op']:.2f}"
        rows.append(row)
    if ratios:
        mean = f"{statistics.geometric_mean(ratios):.2f}"
        rows.append(["geometric mean", *[""] * len(impls), mean, ""])
    columns = [f"us with {threads}", *impls, "fastest other / op", "clone / op"]
    plural = "thread" if threads == 1 else "threads"
    name = "all" if threads == most > 1 else threads
    return Table(f"threads_{name}", f"{threads} {plural}", columns, rows)


def scaling_table(records: list[Record]) -> Table:
    """The time with one thread over that with more."""
    many = [threads for threads in distinct(records, "threads") if threads > 1]
    impls = distinct(records, "impl")
    rows = []
    for case in distinct(records, *CASE):
        here = select(records, **dict(zip(CASE, case, strict=True)))
        times = {(r["impl"], r["threads"]): r["us"] for r in here if r["us"] is not None}
        for threads in many:
            pairs = [(times.get((i, 1)), times.get((i, threads))) for i in impls]
            cells = [f"{one / more:.2f}" if one and more else "–" for one, more in pairs]
            rows.append([label(case), str(threads), *cells])
    title = "Scaling: the time with one thread over that with more"
    return Table("scaling", title, ["case", "threads", *impls], rows)


def panels(records: list[Record]) -> list[Panel]:
    shown = [{**r, "shape": f"{r['x_dtype']}\n{r['rows']} × {r['hidden']}"} for r in records]
    return [
        Panel(
            f"{what}, threads: {threads}",
            "",
            "us",
            harness.points(select(shown, what=what, threads=threads), "shape", lambda r: r["us"]),
            y_log=True,
        )
        for what, threads in distinct(shown, "what", "threads")
    ]


PROGRAM = Program("cpu", __doc__, options, cases, measure, tables, panels)

if __name__ == "__main__":
    PROGRAM.main()
