"""How far y, grad_x and grad_weight of the contract may be from the formula: property P6.

The derivation and the conditions are in docs/numerics.md, "Bounds of the error". These are its
results. u is the unit roundoff of A and eta its smallest subnormal; gamma(k) = k u / (1 - k u); k_w
is 1 with zero_centered_gamma and a weight, else 0; M is the mean of |t xhat|.

    d     = ceil(ceil(N / 8) / T) + 3 + log2 T
    e     = min(rows, 8) + ceil(log2 leaves)
    k_r   = d / 2 + 3 + (eta / u) rstd^2
    k_t   = 1 + k_w
    k_c   = k_t + k_r + d + 2

    y            gamma(k_r + 2 + k_w) |y| + eta (|w| + 1)
    grad_x       rstd (gamma(k_t + k_r + 2) |t| + gamma(k_c + 2 k_r + 3) |xhat| M)
                 + eta (1 + rstd (1 + |xhat| (2 + mean |t|) + M))
    grad_weight  sum over rows of gamma(k_r + 1 + e) |grad_y xhat|
                 + eta (rows + sum over rows of |grad_y|)

A last rounding, to a type X that is not A, adds u_X (|value| + bound) + eta_X / 2. Where value and
bound together exceed the largest finite number the bound is infinite.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from automodel_rms_norm import reference
from automodel_rms_norm.formula import Exact

__all__ = ["Bounds", "bounds", "row_sum_roundings", "sharded_grad_weight", "tree_roundings"]


class Bounds(NamedTuple):
    """The largest allowed absolute error of each element, float64, of the results' shapes."""

    y: Tensor
    grad_x: Tensor
    grad_weight: Tensor


def row_sum_roundings(hidden: int) -> int:
    """d: the most roundings that a term of row_sum passes."""
    threads = reference.virtual_threads(hidden)
    chunks = -(-hidden // reference.SLOTS)
    return -(-chunks // threads) + 3 + int(math.log2(threads))


def tree_roundings(rows: int) -> int:
    """e: the most roundings that a term of column_sum passes."""
    leaves = max(1, -(-rows // reference.LEAF_ROWS))
    return min(rows, reference.LEAF_ROWS) + math.ceil(math.log2(leaves))


def _rounded_to(dtype: torch.dtype, compute: torch.dtype, value: Tensor, error: Tensor) -> Tensor:
    """The bound after the last rounding, from A to the type of the result."""
    info = torch.finfo(dtype)
    largest = value.abs() + error
    if dtype != compute:
        error = error + info.eps / 2 * largest + info.smallest_normal * info.eps / 2
    return torch.where(largest + error > info.max, math.inf, error)


def bounds(
    exact: Exact,
    grad_y: Tensor,
    dtype: torch.dtype,
    weight_dtype: torch.dtype | None,
    zero_centered_gamma: bool,
) -> Bounds:
    """The bounds of the module's docstring.

    Args:
        exact: of the same inputs.
        grad_y: x's shape and dtype.
        dtype: of x.
        weight_dtype: of weight, None without weight (grad_weight's bound is then meaningless).
        zero_centered_gamma: as the op got it.
    """
    compute = reference.accumulate_dtype(dtype)
    rows, hidden = exact.xhat.shape
    g = grad_y.detach().cpu().double().reshape(rows, hidden)
    info = torch.finfo(compute)
    u, eta = info.eps / 2, info.smallest_normal * info.eps

    def gamma(k: Tensor) -> Tensor:
        return k * u / (1 - k * u)

    d, e = row_sum_roundings(hidden), tree_roundings(rows)
    k_w = 1 if zero_centered_gamma and weight_dtype is not None else 0
    k_r = d / 2 + 3 + (exact.rstd * math.sqrt(eta / u)).square()
    k_t = 1 + k_w
    k_c = k_t + k_r + d + 2
    xhat, t = exact.xhat.abs(), exact.t.abs()

    y = gamma(k_r + 2 + k_w) * exact.y.abs() + eta * (exact.w.abs() + 1)
    grad_x = exact.rstd * (
        gamma(k_t + k_r + 2) * t + gamma(k_c + 2 * k_r + 3) * xhat * exact.t_xhat
    )
    underflow = 1 + xhat * (2 + t.mean(-1, keepdim=True)) + exact.t_xhat
    grad_x = grad_x + eta * (1 + exact.rstd * underflow)
    grad_weight = (gamma(k_r + 1 + e) * (g * exact.xhat).abs()).sum(0)
    grad_weight = grad_weight + eta * (rows + g.abs().sum(0))
    return Bounds(
        _rounded_to(dtype, compute, exact.y, y),
        _rounded_to(dtype, compute, exact.grad_x, grad_x),
        _rounded_to(weight_dtype or compute, compute, exact.grad_weight, grad_weight),
    )


def sharded_grad_weight(
    exact: Exact,
    grad_y: Tensor,
    dtype: torch.dtype,
    weight_dtype: torch.dtype,
    zero_centered_gamma: bool,
    parts: int,
) -> Tensor:
    """The largest error of grad_weight summed in `weight_dtype` over ranks that split the rows.

    ``B + gamma_W(parts) (B + sum over rows of |grad_y xhat|)``, with B the bound of grad_weight
    before it is rounded and gamma_W that of weight's type; docs/numerics.md, "Sharding".

    Args:
        exact: of all rows.
        grad_y: of all rows, x's shape and dtype.
        dtype: of x.
        weight_dtype: of weight.
        zero_centered_gamma: as the op got it.
        parts: the number of ranks among which rows are split.
    """
    compute = reference.accumulate_dtype(dtype)
    summed = bounds(exact, grad_y, dtype, compute, zero_centered_gamma).grad_weight
    terms = grad_y.detach().cpu().double().reshape(exact.xhat.shape) * exact.xhat
    k_u = parts * torch.finfo(weight_dtype).eps / 2
    return summed + k_u / (1 - k_u) * (summed + terms.abs().sum(0))
