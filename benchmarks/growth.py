"""How cost grows: time and memory against rows at fixed widths, and against width at fixed rows.

Device time of one call in a CUDA graph, for the op alone; each series is fitted by a straight line
over the bytes that norms.py counts, a constant plus a slope, in relative least squares. A case off
the line by more than a tenth is a step. Memory is what a call takes from torch's allocator at its
peak (requested bytes) beyond the outputs y, grad_x and grad_weight: in units of float32 columns,
as rstd is one, and of float32 rows, as the partial sums of grad_weight are.
"""

import argparse
from collections.abc import Iterator
from typing import NamedTuple

import harness
import torch
from harness import Panel, Program, Record, Table, distinct, select
from norms import TENSORS, Variant, make_call, make_problem, op
from timing import Call, capturable, time_together
from torch import Tensor

FIXED_HIDDEN = [128, 4096, 16384]
FIXED_ROWS = [128, 4096]
MOST_ELEMENTS = 1 << 28
WHAT = ["forward", "backward"]
VARIANT = Variant()
BYTES = 1 << 29  # of all inputs of one graph
MOST_CALLS = 32
STEP = 0.1
LARGE = 1 << 24  # elements of x, from which on memory is bounded
SERIES = {"rows": "hidden", "hidden": "rows"}  # what grows, what is fixed


class Case(NamedTuple):
    grows: str
    rows: int
    hidden: int


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--most-elements", type=int, default=MOST_ELEMENTS, help="of x")
    parser.add_argument("--hidden", type=int, nargs="*", default=FIXED_HIDDEN)
    parser.add_argument("--rows", type=int, nargs="*", default=FIXED_ROWS)


def cases(arguments: argparse.Namespace) -> list[Case]:
    heights = sorted({1 << k for k in range(22)} | {3 << k for k in range(20)})
    widths = [128 * k for k in range(1, 8)]
    widths += [1 << k for k in range(10, 18)] + [3 << k for k in range(9, 16)]
    widths += [5 << k for k in range(9, 14)] + [7 << k for k in range(9, 14)] + [2688]
    every = [Case("rows", rows, hidden) for hidden in arguments.hidden for rows in heights]
    every += [Case("hidden", rows, hidden) for rows in arguments.rows for hidden in sorted(widths)]
    return [case for case in every if case.rows * case.hidden <= arguments.most_elements]


def measure(case: Case, arguments: argparse.Namespace) -> Iterator[Record]:
    device = arguments.device
    tensor_bytes = case.rows * case.hidden * VARIANT.x_dtype.itemsize
    sets = max(3, min(MOST_CALLS, BYTES // (3 * tensor_bytes)))
    shape = (case.rows, case.hidden)
    with capturable(device):
        problems = [make_problem(*shape, VARIANT, device, seed) for seed in range(sets)]
        calls = {what: [make_call(what, op(), p) for p in problems] for what in WHAT}
        for call in [call for turn in calls.values() for call in turn]:
            call()
        times, why = time_together(calls, arguments.repeats, device)
    if why:
        raise RuntimeError(str(why))
    for what in WHAT:
        fields = {"what": what, "impl": "op", "mode": f"{case.grows} grow"}
        fields |= {"rows": case.rows, "hidden": case.hidden, **VARIANT.fields()}
        gbps = TENSORS[what] * tensor_bytes / times[what].us / 1e3
        memory = {"x_bytes": tensor_bytes, "extra_bytes": extra_bytes(calls[what][0], device)}
        yield harness.measured(fields, times[what], gbps=harness.significant(gbps), **memory)


def extra_bytes(call: Call, device: torch.device) -> int | None:
    """What `call` takes at its peak beyond what it returns; torch counts it on a GPU only."""
    if device.type == "cpu":
        return None
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_stats(device)["requested_bytes.all.current"]
    outputs = call()
    torch.cuda.synchronize(device)
    peak = torch.cuda.memory_stats(device)["requested_bytes.all.peak"]
    tensors = [outputs] if isinstance(outputs, Tensor) else outputs
    return peak - before - sum(tensor.nbytes for tensor in tensors)


# --- Tables and plots -----------------------------------------------------------------------------


class Line(NamedTuple):
    """us = constant + counted bytes / gbps."""

    constant: float
    gbps: float

    def at(self, record: Record) -> float:
        return self.constant + counted_bytes(record) / self.gbps / 1e3


def counted_bytes(record: Record) -> float:
    return record["gbps"] * record["us"] * 1e3


def fit(records: list[Record]) -> Line:
    """The line of least squares of the relative errors."""
    weights = [1 / r["us"] for r in records]
    one = torch.tensor(weights, dtype=torch.float64)
    size = torch.tensor([counted_bytes(r) * w for r, w in zip(records, weights, strict=True)])
    columns = torch.stack([one, size.double() * 1e-3], 1)
    ones = torch.ones(len(records), 1, dtype=torch.float64)
    constant, slope = torch.linalg.lstsq(columns, ones).solution.flatten().tolist()
    return Line(constant, 1 / slope)


def series(records: list[Record]) -> Iterator[tuple[str, str, int, list[Record]]]:
    """What, what grows, the size that is fixed, and the records, each series in order."""
    for what, mode in distinct(records, "what", "mode"):
        grows = mode.split()[0]
        group = select(records, what=what, mode=mode)
        for size in distinct(group, SERIES[grows]):
            members = select(group, **{SERIES[grows]: size})
            if len(members) > 2:
                yield what, grows, size, sorted(members, key=lambda r: r[grows])


def tables(records: list[Record]) -> list[Table]:
    lines = []
    for what, grows, size, members in series(records):
        line = fit(members)
        steps = [
            f"{r[grows]}: {r['us'] / line.at(r) - 1:+.0%}"
            for r in members
            if abs(r["us"] / line.at(r) - 1) > STEP
        ]
        label = f"{what}, {SERIES[grows]} {size}, {grows} grow"
        lines.append(
            [label, f"{line.constant:.2f}", f"{line.gbps:.0f}", ", ".join(steps) or "none"]
        )
    columns = ["series", "constant, us", "slope, GB/s", "off the line"]
    return [Table("lines", "A constant plus a slope", columns, lines), memory(records)]


def memory(records: list[Record]) -> Table:
    """The largest for each width, where x has at least LARGE elements."""
    rows = []
    large = [r for r in records if r.get("extra_bytes") and r["rows"] * r["hidden"] >= LARGE]
    for what, hidden in distinct(large, "what", "hidden"):
        most = max(
            select(large, what=what, hidden=hidden), key=lambda r: r["extra_bytes"] / r["x_bytes"]
        )
        rows.append(
            [
                f"{what}, {most['rows']} × {hidden}",
                str(most["extra_bytes"]),
                f"{most['extra_bytes'] / most['x_bytes']:.2%}",
                f"{most['extra_bytes'] / (4 * most['rows']):.2f}",
                f"{most['extra_bytes'] / (4 * hidden):.2f}",
            ]
        )
    columns = ["rows × hidden", "bytes", "of x", "in float32 columns", "in float32 rows"]
    return Table("memory", "Memory of a call beyond its outputs, at its largest", columns, rows)


def panels(records: list[Record]) -> list[Panel]:
    """Measured times as `op`, and the lines."""
    result = []
    for what, grows, size, members in series(records):
        line = fit(members)
        drawn = {
            "op": [(r[grows], r["us"]) for r in members],
            "line": [(r[grows], line.at(r)) for r in members],
        }
        result.append(Panel(f"{what}, {SERIES[grows]} {size}", grows, "us", drawn, y_log=True))
    return result


PROGRAM = Program("growth", __doc__, options, cases, measure, tables, panels, needs_gpu=True)

if __name__ == "__main__":
    PROGRAM.main()
