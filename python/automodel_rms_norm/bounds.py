"""How far y, grad_x and grad_weight of the contract may be from the formula: property P6.

The derivation, to be read beside csrc/numerics/spec.h. u is the unit roundoff of A (2^-24 for
float32, 2^-53 for float64) and eta its smallest subnormal.

Roundings. One rounded operation multiplies its exact result by a factor in [1 - u, 1 / (1 - u)]. A
value that k roundings went through carries a factor in [(1 - u)^k, (1 - u)^-k], so its relative
error is at most

    gamma(k) = k u / (1 - k u)      for real k >= 1, by Bernoulli's inequality.

A product adds the k of its factors, a quotient too, a square root halves k. A sum of terms that
carry at most k each is off by at most gamma(k) times the sum of their magnitudes.

row_sum: d roundings. A term passes at most L = ceil(chunks / T) fused multiply-adds, whose products
are exact, then 3 joins of slots and log2 T joins of threads and groups; adding +0 is exact:

    d = L + 3 + log2 T

rstd: k_r roundings. The terms of the mean and eps are not negative, so nothing cancels: d for the
sum, 1 for the division by N, 1 for the addition of eps; the square root halves these and adds 1;
the reciprocal adds 1. Squares may be subnormal: each fma and the division are then off by at most
eta / 2, the mean by at most eta, rstd relatively by at most eta / (2 v) with v = 1 / rstd^2.
Written as roundings, and doubled for the second order:

    k_r = d / 2 + 3 + (eta / u) rstd^2

y: xhat adds 1, the product with w adds 1, the addition in w = weight + 1 adds k_w = 1 (0 otherwise;
without weight the product is counted though there is none):

    |y_A - y| <= gamma(k_r + 2 + k_w) |y| + eta (|w| + 1)

grad_x = rstd (t - xhat c) with c = mean of t xhat and T = mean of |t xhat|. t carries k_t = 1 + k_w
roundings, xhat k_r + 1, c as many as both and d + 1 more: k_c = k_t + k_r + d + 2. In xhat c they
are k_c + k_r + 1. Then the fma rounds once, and the product with rstd adds k_r + 1:

    |grad_x_A - grad_x| <= rstd (gamma(k_t + k_r + 2) |t| + gamma(k_c + 2 k_r + 3) |xhat| T)

t and xhat c may cancel, so the bound is in their magnitudes and not in grad_x. Underflow adds
eta / 2 for each product, fma and quotient, in all at most
eta (1 + rstd (1 + |xhat| (2 + mean |t|) + T)).

grad_weight: a term holds an xhat, and passes at most kLeafRows fused multiply-adds and a join for
each level of the tree over leaves:

    e = min(rows, kLeafRows) + ceil(log2 leaves)
    |grad_weight_A - grad_weight| <= sum_r gamma(k_r + 1 + e) |grad_y xhat|
                                     + eta (rows + sum_r |grad_y|)

The last rounding, to the type X of the result where it is not A, adds u_X |value| + eta_X / 2: half
a unit in the last place, so y in bfloat16 or float16 is one of the two numbers around the formula's
value, within 1 ulp of its rounding. A value that may reach the end of the range may be infinite.

Provided that N x^2 does not overflow A; past that rstd is 0 and so is y, as the specification says.
Zero rows with eps = 0 have no finite answer. The formula in float64 is 2^29 times finer than
float32, its own error is not counted.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from automodel_rms_norm import reference
from automodel_rms_norm.formula import Exact

__all__ = ["Bounds", "bounds", "row_sum_roundings", "tree_roundings"]


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
