"""A literal, slow reading of the numerics contract (csrc/numerics/spec.h, docs/numerics.md).

It runs on the CPU with elementwise torch operations (in float64 and integers where one rounding in
A is not one operation), so it shares neither code nor a reduction with the kernels that it checks.
Every function returns the exact bits that the contract specifies.
"""

from __future__ import annotations

import math
from fractions import Fraction

import torch
from torch import Tensor

__all__ = [
    "add_rms_norm",
    "add_rms_norm_backward",
    "add_rms_norm_forward",
    "rms_norm",
    "rms_norm_backward",
    "rms_norm_forward",
    "virtual_threads",
]

SLOTS = 8
GROUP = 32
LEAF_ROWS = 8
MIN_VIRTUAL_THREADS = 16
MAX_VIRTUAL_THREADS = 4096


def accumulate_dtype(dtype: torch.dtype) -> torch.dtype:
    """The type A of the contract for an x of `dtype`."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def virtual_threads(hidden: int) -> int:
    """T(N): the largest power of two that leaves each thread two chunks, from 16 to 4096."""
    threads = MIN_VIRTUAL_THREADS
    while threads < MAX_VIRTUAL_THREADS and threads * 4 * SLOTS <= hidden:
        threads *= 2
    return threads


def _fma_exact(a: float, b: float, c: float) -> float:
    product_is_plain = all(abs(value) <= 1.7976931348623157e308 for value in (a, b, c))
    if not product_is_plain:  # an infinity or a NaN: no rounding is involved
        return a * b + c
    total = Fraction(a) * Fraction(b) + Fraction(c)
    if total == 0:  # the sign of an exact zero, as IEEE 754 has it for a sum
        return a * b + c if a * b == 0 or c == 0 else 0.0
    try:
        rounded = float(total)
    except OverflowError:
        return float("inf") if total > 0 else float("-inf")
    return rounded if rounded != 0 else (0.0 if total > 0 else -0.0)


def fma(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """a * b + c of one shape, rounded once, elementwise; float32 or float64."""
    if a.dtype == torch.float64:
        flat = zip(
            a.reshape(-1).tolist(), b.reshape(-1).tolist(), c.reshape(-1).tolist(), strict=True
        )
        values = [_fma_exact(*terms) for terms in flat]
        return torch.tensor(values, dtype=torch.float64).reshape(a.shape)
    # The product of two floats is exact in double. Their sum is rounded to odd there (the last bit
    # of an inexact sum is made 1), which keeps the second rounding, to float, from being a double
    # one.
    product, addend = a.double() * b.double(), c.double()
    total = product + addend
    back = total - product
    error = (product - (total - back)) + (addend - back)
    bits = total.view(torch.int64)
    towards_zero = (error != 0) & ((error < 0) == (total > 0))
    odd = torch.where(towards_zero, bits - 1, bits) | 1
    inexact = torch.isfinite(total) & (error != 0)
    return torch.where(inexact, odd, bits).view(torch.float64).float()


def sqrt(values: Tensor) -> Tensor:
    """The correctly rounded square root. Rounding sqrt in double to float is rounding once."""
    roots = [math.sqrt(v) if v >= 0 else math.nan for v in values.double().reshape(-1).tolist()]
    return torch.tensor(roots, dtype=torch.float64).reshape(values.shape).to(values.dtype)


def _join_by_halves(values: Tensor) -> Tensor:
    while values.shape[-1] > 1:
        half = values.shape[-1] // 2
        values = values[..., :half] + values[..., half:]
    return values[..., 0]


def row_sum(a: Tensor, b: Tensor) -> Tensor:
    """The contract's row_sum(a, b) over the last dimension of two (rows, hidden) tensors."""
    rows, hidden = a.shape
    threads = virtual_threads(hidden)
    steps = -(-hidden // (threads * SLOTS))
    accumulator = torch.zeros(rows, threads * SLOTS, dtype=a.dtype)
    for step in range(steps):
        begin = step * threads * SLOTS
        width = min(threads * SLOTS, hidden - begin)
        accumulator[:, :width] = fma(
            a[:, begin : begin + width], b[:, begin : begin + width], accumulator[:, :width]
        )
    s = accumulator.reshape(rows, threads, SLOTS)
    per_thread = ((s[..., 0] + s[..., 4]) + (s[..., 2] + s[..., 6])) + (
        (s[..., 1] + s[..., 5]) + (s[..., 3] + s[..., 7])
    )
    group = min(threads, GROUP)
    per_group = _join_by_halves(per_thread.reshape(rows, threads // group, group))
    return _join_by_halves(per_group) + 0.0


def column_sum(a: Tensor, b: Tensor) -> Tensor:
    """The contract's column_sum(a, b) over the first dimension of two (rows, hidden) tensors."""
    rows, hidden = a.shape
    leaves = max(1, -(-rows // LEAF_ROWS))
    padding = (0, 0, 0, leaves * LEAF_ROWS - rows)  # rows of +0
    a, b = (torch.nn.functional.pad(t, padding).reshape(leaves, LEAF_ROWS, hidden) for t in (a, b))
    sums = torch.zeros(leaves, hidden, dtype=a.dtype)
    for row in range(LEAF_ROWS):
        sums = fma(a[:, row], b[:, row], sums)
    while len(sums) > 1:
        if len(sums) % 2:
            sums = torch.nn.functional.pad(sums, (0, 0, 0, 1))
        sums = sums[::2] + sums[1::2]
    return sums[0] + 0.0


def round_to(value: Tensor, dtype: torch.dtype) -> Tensor:
    """float32 or float64 values of any shape in `dtype`, rounded once, to nearest even."""
    if value.dtype != torch.float64 or dtype in (torch.float32, torch.float64):
        return value.to(dtype)
    # double to a 16-bit type, rounded once: to float by rounding to odd, then to the type.
    nearest = value.float()
    overshoot = (nearest.double().abs() > value.abs()) & torch.isfinite(value)
    bits = nearest.view(torch.int32)
    truncated = torch.where(overshoot, bits - 1, bits)
    inexact = (nearest.double() != value) & torch.isfinite(value)
    return torch.where(inexact, truncated | 1, bits).view(torch.float32).to(dtype)


def _gain(weight: Tensor, dtype: torch.dtype, zero_centered_gamma: bool) -> Tensor:
    gain = weight.detach().cpu().to(dtype)
    return gain + 1.0 if zero_centered_gamma else gain


def _rows(x: Tensor) -> Tensor:
    return x.detach().cpu().to(accumulate_dtype(x.dtype)).reshape(-1, x.shape[-1])


def rms_norm_forward(
    x: Tensor, weight: Tensor | None, eps: float, zero_centered_gamma: bool = False
) -> tuple[Tensor, Tensor]:
    """y and rstd of the contract.

    Args:
        x: (..., hidden), bfloat16, float16, float32 or float64, any device.
        weight: (hidden,) or None.
        eps: added to the mean of squares in A.
        zero_centered_gamma: the gain is weight + 1.

    Returns:
        y of x's shape and dtype, and rstd of shape x.shape[:-1] and dtype A, on the CPU.
    """
    rows = _rows(x)
    one = torch.ones((), dtype=rows.dtype)
    mean = row_sum(rows, rows) / torch.tensor(x.shape[-1], dtype=rows.dtype)
    rstd = one / sqrt(mean + torch.tensor(eps, dtype=rows.dtype))
    y = rows * rstd[:, None]
    if weight is not None:
        y = y * _gain(weight, rows.dtype, zero_centered_gamma)
    return round_to(y, x.dtype).reshape(x.shape), rstd.reshape(x.shape[:-1])


def rms_norm(
    x: Tensor, weight: Tensor | None, eps: float, zero_centered_gamma: bool = False
) -> Tensor:
    """y of the contract; see :func:`rms_norm_forward`."""
    return rms_norm_forward(x, weight, eps, zero_centered_gamma)[0]


def rms_norm_backward(
    grad_y: Tensor,
    x: Tensor,
    weight: Tensor | None,
    rstd: Tensor,
    zero_centered_gamma: bool = False,
    grad_sum: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """grad_x and grad_weight of the contract.

    Args:
        grad_y: (..., hidden), x's shape and dtype.
        x: (..., hidden).
        weight: (hidden,) or None.
        rstd: x.shape[:-1], dtype A, as :func:`rms_norm_forward` returned it.
        zero_centered_gamma: the gain is weight + 1.
        grad_sum: (..., hidden), added to grad_x before it is rounded; None where x was no sum.

    Returns:
        grad_x of x's shape and dtype, and grad_weight of weight's (None without weight), on the
        CPU.
    """
    rows, grads = _rows(x), _rows(grad_y)
    factor = rstd.detach().cpu().reshape(-1, 1)
    xhat = rows * factor
    t = grads
    if weight is not None:
        t = grads * _gain(weight, rows.dtype, zero_centered_gamma)
    mean = row_sum(t, xhat) / torch.tensor(x.shape[-1], dtype=rows.dtype)
    grad_x = factor * fma(-xhat, mean[:, None].expand_as(t), t)
    if grad_sum is not None:
        grad_x = grad_x + _rows(grad_sum)
    grad_x = round_to(grad_x, x.dtype).reshape(x.shape)
    if weight is None:
        return grad_x, None
    return grad_x, round_to(column_sum(grads, xhat), weight.dtype)


def add_rms_norm_forward(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    eps: float,
    zero_centered_gamma: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """y, sum and rstd of the contract.

    Args:
        x: (..., hidden), bfloat16, float16, float32 or float64, any device.
        residual: x's shape and dtype.
        weight: (hidden,) or None.
        eps: added to the mean of squares in A.
        zero_centered_gamma: the gain is weight + 1.

    Returns:
        y and sum of x's shape and dtype, and rstd of shape x.shape[:-1] and dtype A, on the CPU.
    """
    total = round_to(_rows(x) + _rows(residual), x.dtype).reshape(x.shape)
    y, rstd = rms_norm_forward(total, weight, eps, zero_centered_gamma)
    return y, total, rstd


def add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    eps: float,
    zero_centered_gamma: bool = False,
) -> tuple[Tensor, Tensor]:
    """y and sum of the contract; see :func:`add_rms_norm_forward`."""
    return add_rms_norm_forward(x, residual, weight, eps, zero_centered_gamma)[:2]


def add_rms_norm_backward(
    grad_y: Tensor,
    grad_sum: Tensor,
    sum: Tensor,
    weight: Tensor | None,
    rstd: Tensor,
    zero_centered_gamma: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """The gradient of x and of residual, and grad_weight; see :func:`rms_norm_backward`."""
    return rms_norm_backward(grad_y, sum, weight, rstd, zero_centered_gamma, grad_sum)
