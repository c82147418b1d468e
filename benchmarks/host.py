"""Host time: how long one call keeps Python and the dispatcher busy, on inputs of one row.

`no_grad` and `grad` are the forward pass, `forward_backward` is both. The clock runs over batches
of calls that nobody waits for. The modes:

eager      a call of the implementation itself; a compiled baseline is compiled alone
compiled   what one norm more costs a compiled function: the difference between a function of nine
           norms and one of one, by eight; norms share no tensor, so that none are fused
graphed    the same with CUDA graphs (mode="reduce-overhead"), until the device is done
"""

import argparse
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import harness
import torch
from harness import Panel, Program, Record, Table, cell, distinct, microseconds, select
from norms import EPS, Problem, Variant, implementations, make_problem, norm_functions
from timing import Absent, Call, Timing, build, host_times, synchronize
from torch import Tensor

MODES = ["eager", "compiled", "graphed"]
WHAT = ["no_grad", "grad", "forward_backward"]
VARIANT = Variant()
NORMS = 9


class Case(NamedTuple):
    mode: str
    what: str


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--modes", nargs="+", choices=MODES, default=MODES)
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--batch", type=int, default=100, help="calls in one reading of the clock")


def cases(arguments: argparse.Namespace) -> list[Case]:
    on_gpu = arguments.device.type == "cuda"
    modes = [mode for mode in arguments.modes if mode != "graphed" or on_gpu]
    return [Case(mode, what) for mode in modes for what in WHAT]


def measure(case: Case, arguments: argparse.Namespace) -> Iterator[Record]:
    fields = {"what": case.what, "mode": case.mode}
    fields |= {"rows": arguments.rows, "hidden": arguments.hidden, **VARIANT.fields()}
    measure_mode = measure_eager if case.mode == "eager" else measure_within
    with torch.set_grad_enabled(case.what != "no_grad"):
        for name, result in measure_mode(case, arguments).items():
            timing, why = (None, result) if isinstance(result, str) else (result, "")
            yield harness.measured({**fields, "impl": name}, timing, why)


def problems(count: int, arguments: argparse.Namespace) -> list[Problem]:
    shape = (arguments.rows, arguments.hidden)
    return [make_problem(*shape, VARIANT, arguments.device, seed) for seed in range(count)]


def one_call(what: str, norms: Callable[..., list[Tensor]], inputs: list[Problem]) -> Call:
    """A call of `norms` on all inputs, which takes and returns lists."""
    xs, weights = [p.x for p in inputs], [p.weight for p in inputs]
    grads = [p.grad_y for p in inputs]
    if what == "forward_backward":
        return lambda: torch.autograd.grad(norms(xs, weights), xs + weights, grads)
    return lambda: norms(xs, weights)


def measure_eager(case: Case, arguments: argparse.Namespace) -> dict[str, Timing | str]:
    [problem] = problems(1, arguments)
    x, weight, grad_y = problem.x, problem.weight, problem.grad_y

    def make(name: str) -> list[Call]:
        norm, _, why = compared[name]
        if why:
            raise Absent(why)
        if case.what == "forward_backward":
            return [lambda: torch.autograd.grad(norm(x, weight, EPS), (x, weight), grad_y)]
        return [lambda: norm(x, weight, EPS)]

    compared = implementations(arguments.impls, arguments.device)
    calls, why = build({name: partial(make, name) for name in compared}, arguments.device)
    times = host_times(first(calls), arguments.repeats, arguments.device, arguments.batch)
    return {name: times[name] if name in times else why[name] for name in compared}


def measure_within(case: Case, arguments: argparse.Namespace) -> dict[str, Timing | str]:
    """What one norm more costs a compiled function."""
    torch._dynamo.reset()
    inputs = problems(NORMS, arguments)
    graphed = case.mode == "graphed"
    for problem in inputs if graphed else []:
        for tensor in (problem.x, problem.weight):
            torch._dynamo.mark_static_address(tensor)  # or the graph copies them first

    def make(norm: Callable[..., Tensor], count: int) -> list[Call]:
        def norms(xs: list[Tensor], weights: list[Tensor]) -> list[Tensor]:
            return [norm(x, weight, EPS) for x, weight in zip(xs, weights, strict=True)]

        compiled = torch.compile(norms, mode="reduce-overhead" if graphed else None)
        call = one_call(case.what, compiled, inputs[:count])
        return [partial(finish, call, arguments.device) if graphed else call] * 3

    functions = norm_functions(arguments.impls)
    makers = {
        f"{name} {count}": partial(make, norm, count)
        for name, norm in functions.items()
        for count in (1, NORMS)
    }
    calls, why = build(makers, arguments.device)
    times = host_times(first(calls), arguments.repeats, arguments.device, arguments.batch)
    results: dict[str, Timing | str] = {}
    for name in functions:
        one, many = f"{name} 1", f"{name} {NORMS}"
        if reason := why.get(one) or why.get(many):
            results[name] = reason
        else:
            results[name] = difference(times[many], times[one]).over(NORMS - 1)
    return results


def finish(call: Call, device: torch.device) -> None:
    torch.compiler.cudagraph_mark_step_begin()
    call()
    synchronize(device)


def first(calls: dict[str, list[Call]]) -> dict[str, Call]:
    return {name: turn[0] for name, turn in calls.items()}


def difference(many: Timing, one: Timing) -> Timing:
    """Of the medians, with the widest interval that the quartiles allow."""
    return Timing(many.us - one.us, many.low - one.high, many.high - one.low)


# --- Tables and plots -----------------------------------------------------------------------------


def tables(records: list[Record]) -> list[Table]:
    return [table(mode, select(records, mode=mode)) for mode in distinct(records, "mode")]


def table(mode: str, records: list[Record]) -> Table:
    what = distinct(records, "what")
    rows = [
        [impl, *(cell(records, microseconds, impl=impl, what=each) for each in what)]
        for impl in distinct(records, "impl")
    ]
    return Table(mode, f"{mode}: us of one call", [mode, *what], rows)


def panels(records: list[Record]) -> list[Panel]:
    return [
        Panel(
            mode,
            "",
            "us",
            harness.points(select(records, mode=mode), "what", lambda r: r["us"]),
        )
        for mode in distinct(records, "mode")
    ]


PROGRAM = Program("host", __doc__, options, cases, measure, tables, panels)

if __name__ == "__main__":
    PROGRAM.main()
