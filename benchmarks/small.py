"""Small and middle work: device time of one call among many in a CUDA graph.

A graph holds 3 to 64 calls, each on inputs and outputs of its own; those under 1 MiB stay in the L2
cache, as they do in a model. The floor is what no kernel can be below: an empty kernel in such a
graph, and the bytes that norms.py counts at the speed of a large copy. --qk measures the shapes of
query and key norms instead: hidden 128 and as many rows as tokens times heads, up to 4 M.
"""

import argparse
from collections.abc import Iterator
from typing import NamedTuple

import harness
import torch
from harness import Panel, Program, Record, Table, cell, distinct, microseconds, select
from norms import TENSORS, Baseline, Problem, Variant, implementations, make_problem, makers
from timing import Call, Timing, build, capturable, time_calls, time_together

ROWS = [1, 8, 128, 1024, 4096]
HIDDEN = [128, 2688, 4096, 8192]
QK_ROWS = [1 << k for k in range(12, 23)]
WHAT = ["forward", "backward"]
VARIANT = Variant()
BYTES = 1 << 29  # of all inputs of one graph
MOST_CALLS = 64
COPY_BYTES = 1 << 28


class Case(NamedTuple):
    rows: int
    hidden: int
    implementations: dict[str, Baseline]


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rows", type=int, nargs="+")
    parser.add_argument("--hidden", type=int, nargs="+")
    parser.add_argument("--what", nargs="+", choices=WHAT, default=WHAT)
    parser.add_argument("--qk", action="store_true")
    parser.add_argument("--copy-bytes", type=int, default=COPY_BYTES)


def cases(arguments: argparse.Namespace) -> list[Case]:
    compared = implementations(arguments.impls, arguments.device)
    widths = arguments.hidden or ([128] if arguments.qk else HIDDEN)
    heights = arguments.rows or (QK_ROWS if arguments.qk else ROWS)
    return [Case(rows, hidden, compared) for hidden in widths for rows in heights]


def measure(case: Case, arguments: argparse.Namespace) -> Iterator[Record]:
    tensor_bytes = case.rows * case.hidden * VARIANT.x_dtype.itemsize
    sets = max(3, min(MOST_CALLS, BYTES // (3 * tensor_bytes)))
    shape, device = (case.rows, case.hidden), arguments.device
    with capturable(device):
        problems = [make_problem(*shape, VARIANT, device, seed) for seed in range(sets)]
        launch_us, copy_gbps = floor(sets, arguments)
        for what in arguments.what:
            counted = TENSORS[what] * tensor_bytes
            fields = {"what": what, "rows": case.rows, "hidden": case.hidden, **VARIANT.fields()}
            yield {
                **fields,
                "impl": "floor",
                "us": round(launch_us + counted / copy_gbps / 1e3, 3),
                "launch_us": round(launch_us, 3),
                "copy_gbps": harness.significant(copy_gbps),
            }
            times, why = measure_one(what, case, problems, arguments)
            for name in case.implementations:
                more = {"copy_gbps": harness.significant(copy_gbps)}
                if name in times:
                    more["gbps"] = harness.significant(counted / times[name].us / 1e3)
                identity = {**fields, "impl": name}
                yield harness.measured(identity, times.get(name), why.get(name, ""), **more)


def measure_one(
    what: str, case: Case, problems: list[Problem], arguments: argparse.Namespace
) -> tuple[dict[str, Timing], dict[str, str]]:
    device = arguments.device
    calls, why = build(makers(what, case.implementations, problems), device)
    times, why_not_together = time_together(calls, arguments.repeats, device)
    return times, {**why, **why_not_together}


def floor(sets: int, arguments: argparse.Namespace) -> tuple[float, float]:
    """The time of an empty kernel in a graph of `sets`, and the bandwidth of a large copy."""
    device = arguments.device
    sources = [torch.ones(arguments.copy_bytes // 4, device=device) for _ in range(2)]
    target = torch.empty_like(sources[0])
    copies = [lambda s=source: target.copy_(s) for source in sources]
    copied = time_calls({"copy": copies}, arguments.repeats, device)["copy"]
    empty: list[Call] = [nothing if device.type == "cpu" else empty_kernel] * sets
    times, _ = time_together({"empty": empty}, arguments.repeats, device)
    return times["empty"].us, 2 * arguments.copy_bytes / copied.us / 1e3


def nothing() -> None:
    pass


def empty_kernel() -> None:
    torch.cuda._sleep(0)


# --- Tables and plots -----------------------------------------------------------------------------


def tables(records: list[Record]) -> list[Table]:
    return [table(what, select(records, what=what)) for what in distinct(records, "what")]


def table(what: str, records: list[Record]) -> Table:
    impls = distinct(records, "impl")
    rows = [
        [
            f"{height} × {hidden}",
            *(cell(records, microseconds, rows=height, hidden=hidden, impl=i) for i in impls),
        ]
        for height, hidden in distinct(records, "rows", "hidden")
    ]
    return Table(what, f"{what}: us of one call", ["rows × hidden", *impls], rows)


def panels(records: list[Record]) -> list[Panel]:
    return [
        Panel(
            f"{what}, hidden {hidden}",
            "rows",
            "us",
            harness.points(
                select(records, what=what, hidden=hidden), "rows", lambda r: float(r["us"])
            ),
            y_log=True,
        )
        for hidden, what in distinct(records, "hidden", "what")
    ]


PROGRAM = Program("small", __doc__, options, cases, measure, tables, panels, needs_gpu=True)

if __name__ == "__main__":
    PROGRAM.main()
