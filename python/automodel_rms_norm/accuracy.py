"""Property P6 of one run: y, grad_x and grad_weight against the formula in higher precision."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from automodel_rms_norm import bits
from automodel_rms_norm.bits import Difference
from automodel_rms_norm.bounds import bounds
from automodel_rms_norm.formula import exact_rms_norm
from automodel_rms_norm.reference import round_to

__all__ = ["Inputs", "Outputs", "inaccuracies"]


class Inputs(NamedTuple):
    """x (..., hidden), weight (hidden,) or None, grad_y of x's shape and dtype, eps."""

    x: Tensor
    weight: Tensor | None
    grad_y: Tensor
    eps: float


class Outputs(NamedTuple):
    """What one run gave; None for what it does not have."""

    y: Tensor
    grad_x: Tensor | None = None
    grad_weight: Tensor | None = None


def _exceeding(
    name: str, actual: Tensor, exact: Tensor, rest: Tensor, bound: Tensor
) -> Difference | None:
    """The first element whose error is not within its bound, or further than 1 ulp for 16-bit y."""
    actual = actual.detach().cpu().reshape(exact.shape)
    rounded = round_to(exact, actual.dtype)  # once: .to() goes by way of float32
    error = ((actual.double() - exact) - rest).abs()
    wrong = ~(error <= bound)
    limit = "its bound"
    if name == "y" and actual.element_size() == 2 and not wrong.any():
        wrong, limit = bits.ulp_distance(actual, rounded) > 1, "1 ulp"
    if not wrong.any():
        return None
    first = tuple(wrong.nonzero()[0].tolist())
    summary = (
        f"{int(wrong.sum())} of {wrong.numel()} elements are off by more than {limit}; "
        f"the first by {error[first]:.3g}, bound {bound[first]:.3g}"
    )
    return bits.at(first, actual, rounded, name, summary)


def inaccuracies(
    outputs: Outputs, inputs: Inputs, zero_centered_gamma: bool = False
) -> list[Difference]:
    """The outputs with an error above their derived bound, each with its first such element.

    An output of None is not looked at. Coordinates are those of (rows, hidden).
    """
    x, weight, grad_y, eps = inputs
    exact = exact_rms_norm(x, weight, eps, zero_centered_gamma, grad_y)
    weight_dtype = None if weight is None else weight.dtype
    limits = bounds(exact, grad_y, x.dtype, weight_dtype, zero_centered_gamma)
    found = []
    for name, actual, bound in zip(Outputs._fields, outputs, limits, strict=True):
        if actual is None:
            continue
        parts = exact._asdict()
        if difference := _exceeding(name, actual, parts[name], parts[f"{name}_rest"], bound):
            found.append(difference)
    return found
