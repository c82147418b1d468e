"""P3: what belongs to a row depends on that row alone. P5: the rest on the ordered rows alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor

from automodel_rms_norm.bits import Difference, compare
from automodel_rms_norm.contexts import Inputs, Results
from automodel_rms_norm.gate.fresh import fresh_results
from automodel_rms_norm.gate.plan import Plan
from automodel_rms_norm.gate.recipe import Case
from automodel_rms_norm.gate.rows import (
    LAYOUTS,
    ROW_VARIANTS,
    Variant,
    count,
    other_rank,
    thread_counts,
    with_zero_grad_rows,
)
from automodel_rms_norm.gate.runner import Check, Measured, not_run

__all__ = ["p3", "p5"]

Variants = Callable[[Inputs], Iterable[Variant]]


def _row_dimension(name: str, inputs: Inputs) -> int | None:
    """The dimension of the rows in a result; what a target tells besides has the first output's."""
    source = name.removeprefix("grad_")
    if source in inputs.rows:
        return inputs.rows[source]
    first = next((inputs.rows[output] for output in inputs.grads if output in inputs.rows), None)
    return None if source in inputs.arguments or name in inputs.grads else first


def _difference(pairs: Iterable[tuple[str, Tensor, Tensor]]) -> Difference | None:
    return next(filter(None, (compare(a, e, name) for name, a, e in pairs)), None)


def _check(plan: Plan, key: str, case: Case, name: str, vary: Variants) -> Check:
    """That every variant gives the original's rows (P3), or the original's other results (P5)."""

    def run() -> Measured:
        original = plan.target.results(case, case.inputs)
        pairs: list[tuple[str, Tensor, Tensor]] = []
        results: Results = {}
        for number, (inputs, here, there) in enumerate(vary(case.inputs)):
            for output, tensor in plan.target.results(case, inputs).items():
                expected, dimension = original[output], _row_dimension(output, case.inputs)
                if (dimension is None) is (key == "P3"):
                    continue
                if dimension is not None:
                    expected = expected.index_select(dimension, there.to(expected.device))
                    if tensor.dim() != expected.dim():  # of another rank
                        tensor = tensor.reshape(original[output].shape)
                    tensor = tensor.index_select(dimension, here.to(tensor.device))
                results[f"{output}, {number}"] = tensor
                pairs.append((f"{output}, {name}", tensor, expected))
        return Measured(results, lambda: _difference(pairs))

    return Check(key, case.label, name, run, case.inputs)


def p3(plan: Plan) -> Iterator[Check]:
    """The checks of P3."""
    variants: dict[str, Variants] = dict(ROW_VARIANTS)
    if plan.target.any_rank:
        variants["other rank"] = other_rank
    if plan.device.type == "cpu":
        variants["other thread count"] = thread_counts
    for case in plan.cases:
        if not case.inputs.rows:
            yield not_run("P3", case.label, "rows: the recipe names no dimension of rows")
            continue
        for name, vary in variants.items():
            yield _check(plan, "P3", case, name, vary)


def _zero_grad_rows(inputs: Inputs) -> Iterable[Variant]:
    every = torch.arange(count(inputs))
    for more in (1, 8, count(inputs)):
        yield Variant(with_zero_grad_rows(inputs, more), every, every)


def _again(plan: Plan, case: Case) -> Check:
    def run() -> Measured:
        runs = [plan.target.results(case, case.inputs) for _ in range(4)]
        pairs = [
            (f"{name}, run again", tensor, runs[0][name])
            for results in runs[1:]
            for name, tensor in results.items()
        ]
        return Measured(runs[0], lambda: _difference(pairs))

    return Check("P5", case.label, "run again", run, case.inputs)


def _fresh(plan: Plan, case: Case) -> Check:
    def run() -> Measured:
        one, other = fresh_results(plan, case)
        name = "fresh process against another"
        pairs = [(f"{output}, {name}", tensor, other[output]) for output, tensor in one.items()]
        return Measured(one, lambda: _difference(pairs))

    return Check("P5", case.label, "fresh process", run, case.inputs)


def p5(plan: Plan) -> Iterator[Check]:
    """The checks of P5."""
    variants: dict[str, Variants] = {"zero-gradient rows appended": _zero_grad_rows}
    variants |= {f"other layout, {name}": vary for name, vary in LAYOUTS.items()}
    if plan.target.any_rank:
        variants["other rank"] = other_rank
    if plan.device.type == "cpu":
        variants["other thread count"] = thread_counts
    for case in plan.cases:
        yield _again(plan, case)
        inputs = case.inputs
        if inputs.rows and any(name not in inputs.rows for name in inputs.differentiable):
            for name, vary in variants.items():
                yield _check(plan, "P5", case, name, vary)
    for case in plan.main_cases:
        yield _fresh(plan, case)
