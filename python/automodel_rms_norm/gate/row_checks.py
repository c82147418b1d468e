"""P3: what belongs to a row depends on that row alone. P5: grad_weight on the rows alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial

import torch
from torch import Tensor

from automodel_rms_norm.bits import Difference, compare
from automodel_rms_norm.contexts import Inputs, eager
from automodel_rms_norm.gate.cases import Case
from automodel_rms_norm.gate.plan import Plan, Target, first_difference
from automodel_rms_norm.gate.rows import (
    LAYOUTS,
    ROW_VARIANTS,
    Variant,
    flat,
    thread_counts,
    with_zero_grad_rows,
)
from automodel_rms_norm.gate.runner import Check

__all__ = ["p3", "p5"]


def _row_results(target: Target, case: Case, inputs: Inputs) -> dict[str, Tensor]:
    """What belongs to a row: y and grad_x as (rows, hidden), rstd as (rows,)."""
    results = target.results(case, inputs)
    results.pop("grad_weight", None)
    hidden = (inputs.x.shape[-1],)
    return {
        name: tensor.reshape(-1, *(() if name == "rstd" else hidden))
        for name, tensor in results.items()
    }


def _rows_agree(
    target: Target, case: Case, name: str, variants: Callable[[Inputs], Iterable[Variant]]
) -> Difference | None:
    inputs = flat(case.inputs)
    original = _row_results(target, case, inputs)
    for variant in variants(inputs):
        here, there = (index.to(inputs.x.device) for index in variant.rows)
        results = _row_results(target, case, variant.inputs)
        actual = {output: tensor[here] for output, tensor in results.items()}
        expected = {output: tensor[there] for output, tensor in original.items()}
        if difference := first_difference(actual, expected, name):
            return difference
    return None


def _thread_variants(inputs: Inputs) -> Iterator[Variant]:
    every = torch.arange(len(inputs.x))
    return (Variant(inputs, (every, every)) for inputs in thread_counts(inputs))


def p3(plan: Plan) -> Iterator[Check]:
    """The checks of P3."""
    variants = dict(ROW_VARIANTS)
    if plan.device.type == "cpu":
        variants["other thread count"] = _thread_variants
    for case in plan.cases:
        for name, vary in variants.items():
            run = partial(_rows_agree, plan.target, case, name, vary)
            yield Check("P3", case.label, name, run)


def _grad_weights_agree(
    target: Target, case: Case, name: str, variants: Callable[[Inputs], Iterable[Inputs]]
) -> Difference | None:
    function, inputs = target.bind(case), flat(case.inputs)
    expected = eager(function, inputs).grad_weight
    for variant in variants(inputs):
        actual = eager(function, variant).grad_weight
        assert actual is not None
        assert expected is not None
        if difference := compare(actual, expected, f"grad_weight, {name}"):
            return difference
    return None


def _again(inputs: Inputs) -> Iterable[Inputs]:
    return [inputs] * 3


def _zero_grad_rows(inputs: Inputs) -> Iterable[Inputs]:
    return (with_zero_grad_rows(inputs, count) for count in (1, 8, len(inputs.x)))


def _layouts(inputs: Inputs) -> Iterable[Inputs]:
    return (change(inputs).inputs for change in LAYOUTS.values())


def p5(plan: Plan) -> Iterator[Check]:
    """The checks of P5."""
    variants = {
        "run again": _again,
        "zero-gradient rows appended": _zero_grad_rows,
        "other layout": _layouts,
    }
    if plan.device.type == "cpu":
        variants["other thread count"] = thread_counts
    for case in plan.cases:
        if case.inputs.weight is None:
            continue
        for name, vary in variants.items():
            run = partial(_grad_weights_agree, plan.target, case, name, vary)
            yield Check("P5", case.label, name, run)
