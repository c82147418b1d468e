"""P6 where no formula is known: a function against itself, uncompiled, in float64.

Every element of every result may be off by

    4 (u |r| + s) + eta

r is the result in float64; u the unit roundoff of the result's dtype, and eta its smallest normal
number times u. s is how far results in float64 move when every floating-point argument and
gradient is multiplied by 1 + d, d of +-v at random, v the coarsest unit roundoff among these: the
largest of four such moves, and the largest along the last dimension. It is what the inputs' own
rounding does, so a function that keeps its intermediates as precise as its inputs passes, and one
that loses more than twice the bits of a rounding, by cancellation or long sums in a short dtype,
does not. It is a judgement of conditioning, not a proof; a function that converts to
float32 whatever it is given is compared with its own float32.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from automodel_rms_norm import bits
from automodel_rms_norm.bits import Difference
from automodel_rms_norm.contexts import Inputs, Results, eager
from automodel_rms_norm.gate.runner import NotRunError, raised

if TYPE_CHECKING:
    from automodel_rms_norm.gate.recipe import Case, Recipe

__all__ = ["inaccuracy"]

ALLOWED, MOVES = 4, 4


def _reference(recipe: Recipe, case: Case, inputs: Inputs) -> Results:
    with torch.compiler.set_stance("force_eager"):
        results = eager(recipe.bind(replace(case, inputs=inputs)), inputs)
    for name, tensor in results.items():
        if tensor.is_floating_point() and tensor.dtype != torch.float64:
            dtype = str(tensor.dtype).removeprefix("torch.")
            raise NotRunError(f"against float64: {name} is {dtype} for float64 inputs")
    return results


def _unit(tensor: Tensor) -> float:
    return torch.finfo(tensor.dtype).eps / 2


def _moved(inputs: Inputs, unit: float, seed: int) -> Inputs:
    generator = torch.Generator().manual_seed(seed)

    def move(name: str, tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point():
            return tensor
        signs = torch.randint(0, 2, tensor.shape, generator=generator).to(tensor.device) * 2 - 1
        return tensor * (1 + unit * signs)

    return inputs.map(move)


def inaccuracy(recipe: Recipe, case: Case, results: Results) -> Difference | None:
    """The first element that is further from float64 than the bound.

    Raises:
        NotRunError: where the function does not run in float64.
    """
    given = [
        t for t in (*case.inputs.tensors.values(), *case.inputs.grads.values()) if t is not None
    ]
    unit = max((_unit(t) for t in given if t.is_floating_point()), default=0.0)
    doubled = case.inputs.map(lambda name, t: t.double() if t.is_floating_point() else t)
    try:
        exact = _reference(recipe, case, doubled)
        moves = [_reference(recipe, case, _moved(doubled, unit, seed)) for seed in range(MOVES)]
    except NotRunError:
        raise
    except Exception as error:  # anybody's function
        raise NotRunError(f"against float64: the function {raised(error)}") from error
    for name, tensor in results.items():
        if name in exact and tensor.is_floating_point():
            spread = torch.stack([(move[name] - exact[name]).abs() for move in moves]).amax(0)
            if difference := _exceeding(name, tensor, exact[name], spread):
                return difference
    return None


def _exceeding(name: str, actual: Tensor, exact: Tensor, spread: Tensor) -> Difference | None:
    if actual.shape != exact.shape:
        return Difference(name, f"shape {tuple(actual.shape)}, expected {tuple(exact.shape)}")
    if spread.dim():
        spread = spread.amax(-1, keepdim=True)
    least = torch.finfo(actual.dtype).smallest_normal * _unit(actual)
    bound = ALLOWED * (_unit(actual) * exact.abs() + spread) + least
    error = (actual.double() - exact).abs()
    wrong = ~(error <= bound) & ~(actual.double() == exact) & ~(actual.isnan() & exact.isnan())
    if not wrong.any():
        return None
    first = tuple(wrong.nonzero()[0].tolist())
    summary = (
        f"{int(wrong.sum())} of {wrong.numel()} elements are further from float64 than the bound; "
        f"the first by {float(error[first]):.3g}, bound {float(bound.expand_as(error)[first]):.3g}"
    )
    return bits.at(first, actual, exact.to(actual.dtype), name, summary)
