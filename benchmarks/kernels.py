"""Large work: bandwidth of every kernel against a copy, with the peers, for all widths.

One case is 256 MiB of x. A device-to-device copy is timed among the calls of each case, and all
bandwidths are of the same run; norms.py says which bytes count. Three sets of inputs are used in
turn, so that the L2 cache holds none of them. --quick is all widths with our op and torch's.
"""

import argparse
from collections.abc import Iterator
from typing import NamedTuple

import harness
import torch
from harness import Panel, Program, Record, Table, cell, distinct, select
from norms import TENSORS, Baseline, Problem, Variant, implementations, make_problem, makers, op
from timing import build, time_calls

HIDDEN = [128, 256, 512, 1024, 2048, 2688, 3072, 4096, 5120, 6144, 7168, 8192, 12288, 16384]
HIDDEN += [32768, 65536]
SETS = 3

BF16, FP32 = torch.bfloat16, torch.float32
# The first is what the peers are compared in; of the others ours alone is timed, unless asked.
VARIANTS = {
    "bf16": Variant(BF16, BF16),
    "bf16-fp32": Variant(BF16, FP32),
    "bf16-none": Variant(BF16, None),
    "bf16-zero": Variant(BF16, BF16, zero_centered_gamma=True),
    "fp32": Variant(FP32, FP32),
}


class Case(NamedTuple):
    hidden: int
    variant: Variant
    implementations: dict[str, Baseline]


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--hidden", type=int, nargs="+", default=HIDDEN)
    parser.add_argument("--mib", type=float, default=256, help="MiB of x")
    parser.add_argument("--what", nargs="+", choices=TENSORS, default=list(TENSORS))
    parser.add_argument("--variants", nargs="+", choices=VARIANTS)


def cases(arguments: argparse.Namespace) -> list[Case]:
    quick = ["op", "torch"] if arguments.quick else None
    compared = implementations(arguments.impls or quick, arguments.device)
    names = arguments.variants or (["bf16"] if arguments.quick else list(VARIANTS))
    result = []
    for name in names:
        variant = VARIANTS[name]
        peers = compared if name == "bf16" or arguments.impls else {"op": op()}
        if variant.zero_centered_gamma:  # which no peer takes by this name
            peers = {"op": op(zero_centered_gamma=True)}
        result += [Case(hidden, variant, peers) for hidden in arguments.hidden]
    return result


def measure(case: Case, arguments: argparse.Namespace) -> Iterator[Record]:
    size = case.variant.x_dtype.itemsize
    rows = max(1, int(arguments.mib * 2**20) // (case.hidden * size))
    device = arguments.device
    adds = any(what.startswith("add_") for what in arguments.what)
    problems = [
        make_problem(rows, case.hidden, case.variant, device, seed, adds) for seed in range(SETS)
    ]
    for what in arguments.what:
        yield from measure_one(what, case, problems, arguments)


def measure_one(
    what: str, case: Case, problems: list[Problem], arguments: argparse.Namespace
) -> Iterator[Record]:
    device = arguments.device
    x = problems[0].x
    target = torch.empty_like(x)
    copies = [lambda p=p: target.copy_(p.x.detach()) for p in problems]
    calls, why = build(makers(what, case.implementations, problems), device)
    times = time_calls({"copy": copies, **calls}, arguments.repeats, device)

    def gbps(name: str, tensors: int) -> float:
        return harness.significant(tensors * x.nbytes / times[name].us / 1e3)

    for name in case.implementations:
        fields = {"what": what, "impl": name, "rows": x.shape[0], "hidden": case.hidden}
        fields |= case.variant.fields()
        if name in why:
            yield harness.measured(fields, None, why[name])
            continue
        bandwidths = {"gbps": gbps(name, TENSORS[what]), "copy_gbps": gbps("copy", 2)}
        yield harness.measured(fields, times[name], **bandwidths)


# --- Tables and plots -----------------------------------------------------------------------------

MAIN = VARIANTS["bf16"].fields()
# What, which widths, the share of a copy that it must reach, and the one aimed at.
BARS = [
    ("forward", "to 16384", lambda hidden: hidden <= 16384, 0.95, 0.98),
    ("forward", "above 16384", lambda hidden: hidden > 16384, 0.92, 0.97),
    ("backward", "1024 to 16384", lambda hidden: 1024 <= hidden <= 16384, 0.85, 0.95),
    ("backward", "other widths", lambda hidden: not 1024 <= hidden <= 16384, 0.78, 0.92),
    ("backward_frozen", "all", lambda hidden: True, 0.92, 0.97),
    ("add_forward", "all", lambda hidden: True, 0.95, 0.95),
    ("add_backward", "all", lambda hidden: True, 0.85, 0.85),
]


def tables(records: list[Record]) -> list[Table]:
    main = [r for r in records if all(r.get(key, False) == value for key, value in MAIN.items())]
    result = [peers_table(what, select(main, what=what)) for what in distinct(main, "what")]
    return [*result, variants_table(records), bars_table(main), fixes_table(main)]


def peers_table(what: str, records: list[Record]) -> Table:
    impls = distinct(records, "impl")
    rows = []
    for hidden, height in distinct(records, "hidden", "rows"):
        shape = {"hidden": hidden, "rows": height}
        row = [f"{hidden} × {height}", cell(records, copy_gbps, **shape)]
        rows.append(row + [cell(records, harness.share_of_copy, **shape, impl=i) for i in impls])
    columns = ["hidden × rows", "copy, GB/s", *impls]
    return Table(what, f"{what}: bandwidth as a share of the copy's", columns, rows)


def copy_gbps(record: Record) -> str:
    return f"{record['copy_gbps']:.0f}"


def variants_table(records: list[Record]) -> Table:
    """Ours with other dtypes: x and weight, and `+ 1` for zero_centered_gamma."""
    ours = select(records, impl="op")
    keys = ("what", "x_dtype", "weight_dtype", "zero_centered_gamma")
    rows = []
    for what, x_dtype, weight_dtype, zero in distinct(ours, *keys):
        fields = dict(zip(keys, (what, x_dtype, weight_dtype, zero), strict=True))
        label = f"{what}, {x_dtype}, {weight_dtype}{' + 1' if zero else ''}"
        widths = distinct(ours, "hidden")
        rows.append(
            [label, *(cell(ours, harness.share_of_copy, **fields, hidden=h) for h in widths)]
        )
    columns = ["what, x, weight", *map(str, distinct(ours, "hidden"))]
    return Table("variants", "op: bandwidth as a share of the copy's", columns, rows)


def share(record: Record) -> float:
    return float(record["gbps"] / record["copy_gbps"])


def bars_table(records: list[Record]) -> Table:
    """The least share of each bar, and how the fastest peer compares, by its share."""
    rows = []
    timed = [record for record in records if record["us"] is not None]
    for what, span, holds, must, aim in BARS:
        of_bar = [r for r in select(timed, what=what) if holds(r["hidden"])]
        ours = {r["hidden"]: r for r in select(of_bar, impl="op")}
        if not ours:
            continue
        least, worst = min((share(r), hidden) for hidden, r in ours.items())
        ahead = [
            (share(ours[r["hidden"]]) / share(r), r["impl"], r["hidden"])
            for r in of_bar
            if r["impl"] != "op" and r["hidden"] in ours
        ]
        peer = "{:.2f}, {} at {}".format(*min(ahead)) if ahead else "–"
        met = "aim" if least >= aim else "yes" if least >= must else "no"
        rows.append([f"{what}, {span}", f"{must}", f"{aim}", f"{least:.3f} at {worst}", met, peer])
    columns = ["bar", "must", "aim", "least", "met", "least of our share over a peer's"]
    return Table("bars", "The bars", columns, rows)


def fixes_table(records: list[Record]) -> Table:
    """AutoModel's affected function and what could be in its place, in one width."""
    whats = ["forward", "backward", "backward_frozen"]
    rows = []
    for impl in ("automodel_0_6", "automodel_0_6_static", "automodel_0_7", "torch", "op"):
        fields = {"impl": impl, "hidden": 4096}
        rows.append(
            [impl, *(cell(records, harness.share_of_copy, what=w, **fields) for w in whats)]
        )
    return Table("fixes", "Hidden 4096, as a share of the copy's", ["", *whats], rows)


def panels(records: list[Record]) -> list[Panel]:
    main = [r for r in records if all(r.get(key, False) == value for key, value in MAIN.items())]
    return [
        Panel(
            what,
            "hidden",
            "share of the copy's bandwidth",
            harness.points(select(main, what=what), "hidden", share),
        )
        for what in distinct(main, "what")
    ]


PROGRAM = Program("kernels", __doc__, options, cases, measure, tables, panels, needs_gpu=True)

if __name__ == "__main__":
    PROGRAM.main()
