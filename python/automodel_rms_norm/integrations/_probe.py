"""What a norm computes, seen from random inputs on the CPU."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from automodel_rms_norm.formula import exact_rms_norm

__all__ = ["draw", "formula_of", "within_roundings"]

_ROWS = 64
Norm = Callable[[Tensor, Tensor], Tensor]  # of x and weight


def draw(
    hidden: int, eps: float, dtype: torch.dtype, weight_dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """x, (rows, hidden), and weight, (hidden,).

    The rows' mean squares reach from far below eps to far above. Every other row is one large
    element and many small ones, so that y is as large as it can be, and very small.
    """
    generator = torch.Generator().manual_seed(0)
    scales = max(eps, 1e-30) ** 0.5 * torch.logspace(-1, 4, _ROWS, device="cpu")
    x = torch.randn(_ROWS, hidden, generator=generator, device="cpu") * scales[:, None]
    rows = torch.arange(0, _ROWS, 2, device="cpu")
    x[rows, 7 * rows % hidden] *= 10 * hidden**0.5
    largest = torch.finfo(dtype).max / 8
    weight = 0.5 + torch.rand(hidden, generator=generator, device="cpu")
    return x.clamp(-largest, largest).to(dtype), weight.to(weight_dtype or dtype)


def _near(
    y: Tensor, x: Tensor, weight: Tensor, eps: float, zero_centered: bool, relative: float
) -> bool:
    exact = exact_rms_norm(x, weight, eps, zero_centered, torch.zeros_like(x)).y
    kind = torch.finfo(x.dtype)
    # Of two roundings to a subnormal, the first of which the weight, below 3, makes larger.
    subnormal = 2 * kind.tiny * kind.eps
    return bool(((y.double() - exact).abs() <= relative * exact.abs() + subnormal).all())


def formula_of(norm: Norm, hidden: int, eps: float) -> bool | None:
    """Whether its gain is weight + 1 rather than weight, in float32; None where it is neither."""
    x, weight = draw(hidden, eps, torch.float32)
    y = norm(x, weight)
    # A term passes at most one addition for each element in whatever order they are summed.
    relative = (hidden + 8) * 2.0**-24
    for zero_centered in (False, True):
        if _near(y, x, weight, eps, zero_centered, relative):
            return zero_centered
    return None


def within_roundings(y: Tensor, x: Tensor, weight: Tensor, eps: float, zero_centered: bool) -> bool:
    """Whether y is the formula, rounded to x's dtype at most twice."""
    return _near(y, x, weight, eps, zero_centered, 2.1 * torch.finfo(x.dtype).eps / 2)
