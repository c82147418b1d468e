"""200 steps of a small real model, trained in several ways: which have the same loss?

tests/trainer.py has the model, a Qwen3 in bfloat16 with each implementation of the norm in the
place of every norm, and the text, Python's manual. `eager` is what the other runs are compared
with; `again` is the same once more; `recomputed` checkpoints every layer; `norms_compiled` compiles
each norm, `compiled` the whole model; `micro_batches` splits a batch into four parts of 128 rows, a
boundary of the contract's tree. `norms_only` trains the norms' weights alone, so that no other
parameter's gradient is summed over rows, and is what its micro-batches are compared with. The op's
micro-batches go through exact_grad_weight.

Where a run differs, benchmarks/search.py names the operations that break it. It cannot look into a
norm that compiles itself. `composite` is the formula of `automodel_0_6` in plain torch operations.
"""

import argparse
import functools
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from harness import Panel, Program, Record, Table, distinct, measured, select
from norms import chosen, implementations, traceable
from search import Found, search
from timing import timing
from torch import Tensor
from trainer import HIDDEN, LENGTH, SEQUENCES, Trainer, Way

WAYS = {
    "eager": Way(),
    "again": Way(),
    "recomputed": Way(recomputed=True),
    "norms_compiled": Way(norms_compiled=True),
    "compiled": Way(compiled=True),
    "micro_batches": Way(parts=4),
    "norms_only": Way(norms_only=True),
    "norms_only_again": Way(norms_only=True),
    "norms_only_micro_batches": Way(norms_only=True, parts=4),
}
FIRST = {False: "eager", True: "norms_only"}  # by Way.norms_only
IMPLS = ["op", "torch", "composite", "automodel_0_6", "automodel_0_7"]
COMPILES_ITSELF = {"automodel_0_6", "automodel_0_6_static", "automodel_0_7"}


class Case(NamedTuple):
    impl: str
    mode: str
    steps: int
    device: torch.device

    @property
    def way(self) -> Way:
        return WAYS[self.mode]

    @property
    def first(self) -> "Case":
        """The run that this one is compared with."""
        return self._replace(mode=FIRST[self.way.norms_only])

    def trainer(self) -> Trainer:
        return Trainer(norms(self.device)[self.impl], self.way, self.device, self.impl == "op")


class Run(NamedTuple):
    """The loss of each step, the parameters after the last, and each step's microseconds."""

    losses: list[float]
    parameters: list[Tensor]
    times: list[float]


@functools.cache
def norms(device: torch.device) -> dict[str, Callable[..., Tensor]]:
    found = {
        name: made.norm for name, made in implementations(None, device).items() if not made.why
    }
    return {**found, "composite": traceable()["automodel_0_6"]}


@functools.cache
def trained(case: Case) -> Run:
    torch._dynamo.reset()
    trainer, losses, times = case.trainer(), [], []
    for index in range(case.steps):
        begin = time.perf_counter()
        losses.append(trainer.step(index))  # waits for the device
        times.append((time.perf_counter() - begin) * 1e6)
    return Run(losses, [p.detach().cpu() for p in trainer.model.parameters()], times)


def equal_steps(run: Run, first: Run) -> int:
    """How many steps, from the first on, have the same loss to the last bit."""
    different = (i for i, (a, b) in enumerate(zip(run.losses, first.losses, strict=True)) if a != b)
    return next(different, len(run.losses))


def what_breaks(case: Case, steps: int) -> dict[str, object]:
    """As in a record: the step, and the operations by name with the modules of each."""
    if case.way.norms_compiled:
        return {"operations": {}, "why": "the norm: nothing else is compiled"}
    if case.impl in COMPILES_ITSELF:
        return {"operations": {}, "why": "not searched: the norm compiles itself"}
    found = search(case.first.trainer(), case.trainer(), steps)
    if found is None:
        return {"operations": {}, "why": "no operation with the same inputs differs"}
    return {"step": found.step, "operations": operations(found)}


def operations(found: Found) -> dict[str, list[str]]:
    names = dict.fromkeys(call.op for call in found.calls)
    return {
        name: list(dict.fromkeys(call.where for call in found.calls if call.op == name))
        for name in names
    }


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--modes", nargs="+", choices=WAYS, default=list(WAYS))


def cases(arguments: argparse.Namespace) -> list[Case]:
    impls = chosen(norms(arguments.device), arguments.impls or IMPLS)
    return [
        Case(impl, mode, arguments.steps, arguments.device)
        for impl in impls
        for mode in arguments.modes
    ]


def measure(case: Case, arguments: argparse.Namespace) -> Iterator[Record]:
    run, first = trained(case), trained(case.first)
    fields = {
        "what": "training",
        "impl": case.impl,
        "mode": case.mode,
        "rows": SEQUENCES * LENGTH,
        "hidden": HIDDEN,
        "x_dtype": "bfloat16",
        "weight_dtype": "float32",
    }
    equal = equal_steps(run, first)
    same = all(torch.equal(a, b) for a, b in zip(run.parameters, first.parameters, strict=True))
    yield measured(
        fields,
        timing(run.times),
        steps=case.steps,
        equal_steps=equal,
        same_parameters=same,
        breaks=None if same else what_breaks(case, min(equal + 1, case.steps)),
        losses=[float(f"{loss:.9g}") for loss in run.losses],
    )


# --- Report ---------------------------------------------------------------------------------------


def compared(records: list[Record]) -> list[Record]:
    return [record for record in records if record["mode"] not in FIRST.values()]


def outcome(record: Record) -> str:
    if record["same_parameters"]:
        return "same bits"
    return f"{record['equal_steps']} of {record['steps']} steps"


def tables(records: list[Record]) -> list[Table]:
    impls = distinct(records, "impl")
    rows = []
    for mode in distinct(compared(records), "mode"):
        found = {record["impl"]: outcome(record) for record in select(records, mode=mode)}
        rows.append([mode, *(found.get(impl, "–") for impl in impls)])
    title = "Steps whose loss is the first run's to the last bit; same bits: the parameters too"
    return [
        Table("equal", title, ["run", *impls], rows),
        Table(
            "breaks",
            "What has the same inputs and other outputs, in the first step that has such",
            ["run", "impl", "step", "operations"],
            [broken(record) for record in compared(records) if record["breaks"]],
        ),
    ]


def broken(record: Record) -> list[str]:
    breaks = record["breaks"]
    named = [
        f"{op} in {where[0]}" + (f" and {len(where) - 1} more modules" if where[1:] else "")
        for op, where in breaks["operations"].items()
    ]
    text = "; ".join(named) or breaks["why"]
    return [record["mode"], record["impl"], str(breaks.get("step", "–")), text]


def panels(records: list[Record]) -> list[Panel]:
    """The loss, then for each run how far it is from its first."""
    first = {(r["impl"], r["mode"]): r["losses"] for r in records}
    shown = [Panel("eager", "step", "loss", curves(select(records, mode="eager")))]
    for mode in distinct(compared(records), "mode"):
        reference = FIRST[WAYS[mode].norms_only]
        found = [
            {**record, "losses": apart(record["losses"], first[record["impl"], reference])}
            for record in select(records, mode=mode)
            if (record["impl"], reference) in first
        ]
        if found:
            shown.append(Panel(mode, "step", f"|loss - loss of {reference}|", curves(found)))
    return shown


def apart(losses: list[float], others: list[float]) -> list[float]:
    return [abs(a - b) for a, b in zip(losses, others, strict=True)]


def curves(records: list[Record]) -> dict[str, list[tuple[int, float]]]:
    return {r["impl"]: list(enumerate(r["losses"], 1)) for r in records}


PROGRAM = Program("training", __doc__, options, cases, measure, tables, panels)

if __name__ == "__main__":
    PROGRAM.main()
