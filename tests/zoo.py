"""Norms with one public fault each, and careful ones: what numerics-gate must tell apart.

A norm is made of parts, and a fault is another part. Without faults every result depends on the row
alone and is accurate: that norm is the control.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


def compute_dtype(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def careful_rstd(x: Tensor, wide: Tensor, eps: float) -> Tensor:
    return 1 / (wide.square().mean(-1, keepdim=True) + eps).sqrt()


def careful_gain(weight: Tensor, zero_centered_gamma: bool, dtype: torch.dtype) -> Tensor:
    return weight.to(dtype) + zero_centered_gamma


def careful_y(x: Tensor, wide: Tensor, rstd: Tensor, gain: Tensor, weight: Tensor) -> Tensor:
    return (wide * rstd * gain).to(x.dtype)


def careful_grad_x(grad_y: Tensor, wide: Tensor, rstd: Tensor, gain: Tensor) -> Tensor:
    t, xhat = grad_y.contiguous().to(wide.dtype) * gain, wide * rstd
    return rstd * (t - xhat * (t * xhat).mean(-1, keepdim=True))


def careful_grad_weight(grad_y: Tensor, xhat: Tensor, weight: Tensor) -> Tensor:
    """In float64, whose rounding the last one hides."""
    products = grad_y.contiguous().double() * xhat.double()
    return products.reshape(-1, weight.numel()).sum(0).to(weight.dtype)


@dataclass(frozen=True)
class Parts:
    rstd: Callable[..., Tensor] = careful_rstd
    gain: Callable[..., Tensor] = careful_gain
    y: Callable[..., Tensor] = careful_y
    grad_x: Callable[..., Tensor] = careful_grad_x
    grad_weight: Callable[..., Tensor] = careful_grad_weight
    grad_rstd: Callable[..., Tensor] = careful_rstd  # the backward pass computes it anew


class Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, eps, zero_centered_gamma, parts) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.others = eps, zero_centered_gamma, parts
        wide = x.contiguous().to(compute_dtype(x))
        gain = parts.gain(weight, zero_centered_gamma, wide.dtype)
        return parts.y(x, wide, parts.rstd(x, wide, eps), gain, weight)

    @staticmethod
    def backward(ctx, grad_y: Tensor) -> tuple[Any, ...]:
        x, weight = ctx.saved_tensors
        eps, zero_centered_gamma, parts = ctx.others
        wide = x.contiguous().to(compute_dtype(x))
        gain = parts.gain(weight, zero_centered_gamma, wide.dtype)
        rstd = parts.grad_rstd(x, wide, eps)
        grad_x = grad_weight = None
        if ctx.needs_input_grad[1]:
            grad_weight = parts.grad_weight(grad_y, wide * rstd, weight)
        if ctx.needs_input_grad[0]:
            grad_x = parts.grad_x(grad_y, wide, rstd, gain).to(x.dtype)
        return grad_x, grad_weight, None, None, None


def norm(**faults: Callable[..., Tensor]) -> Callable[..., Tensor]:
    parts = Parts(**faults)

    def function(
        x: Tensor, weight: Tensor, eps: float, zero_centered_gamma: bool = False
    ) -> Tensor:
        return Norm.apply(x, weight, eps, zero_centered_gamma, parts)

    return function


careful = norm()


# --- The formula ----------------------------------------------------------------------------------


def offset_ignored(weight, zero_centered_gamma, dtype):
    """Megatron-LM PR 6859."""
    return weight.to(dtype)


def offset_in_weight_dtype(weight, zero_centered_gamma, dtype):
    """The 1 added in bfloat16, where gains near 1 lose their last bits."""
    return (weight + zero_centered_gamma).to(dtype)


def weight_twice(grad_y, wide, rstd, gain):
    """Megatron-LM PR 6859: the gain inside the sum and again outside."""
    t, xhat = grad_y.contiguous().to(wide.dtype) * gain, wide * rstd
    return rstd * (t - gain * xhat * (t * xhat).mean(-1, keepdim=True))


def mean_over_padding(grad_y, wide, rstd, gain):
    """The sum divided by the width of the block instead of the row's."""
    t, xhat = grad_y.contiguous().to(wide.dtype) * gain, wide * rstd
    padded = 1 << (wide.shape[-1] - 1).bit_length()
    return rstd * (t - xhat * (t * xhat).sum(-1, keepdim=True) / padded)


# --- eps ------------------------------------------------------------------------------------------


def eps_in_fp16(x, wide, eps):
    return careful_rstd(x, wide, torch.tensor(eps).half().item())


def eps_dropped(x, wide, eps):
    """Rows of zeros become NaN."""
    return careful_rstd(x, wide, 0.0)


def eps_after_rescaling(x, wide, eps):
    """The row is divided by its largest element first, and eps is not."""
    largest = wide.abs().amax(-1, keepdim=True).clamp(min=1e-30)
    return careful_rstd(x, wide / largest, eps) / largest


# --- Casts ----------------------------------------------------------------------------------------


def cast_before_weight(x, wide, rstd, gain, weight):
    """vLLM 42325."""
    return ((wide * rstd).to(x.dtype).to(gain.dtype) * gain).to(x.dtype)


def statistics_in_x_dtype(x, wide, eps):
    return 1 / (x.contiguous().square().mean(-1, keepdim=True) + eps).sqrt().to(wide.dtype)


def squares_in_fp16(x, wide, eps):
    """Values above 256 overflow."""
    return 1 / (wide.half().square().mean(-1, keepdim=True).to(wide.dtype) + eps).sqrt()


def grad_weight_in_weight_dtype(grad_y, xhat, weight):
    """Liger PR 950: a running sum in bfloat16."""
    products = (grad_y * xhat).reshape(-1, weight.numel())
    total = torch.zeros_like(weight)
    for row in products:
        total += row.to(weight.dtype)
    return total


# --- Order of summation ---------------------------------------------------------------------------


def split_rstd(wide: Tensor, eps: float, parts: int) -> Tensor:
    """The sum of squares as that of `parts` interleaved sums, each in float32."""
    squares = wide.square()
    sums = [squares[..., start::parts].sum(-1, keepdim=True) for start in range(parts)]
    total = sums[0]
    for other in sums[1:]:
        total = total + other
    return 1 / (total / wide.shape[-1] + eps).sqrt()


def split_by_batch(x, wide, eps):
    rows = wide.numel() // wide.shape[-1]
    return split_rstd(wide, eps, 7) if rows < 4 else careful_rstd(x, wide, eps)


def split_by_alignment(x, wide, eps):
    aligned = x.data_ptr() % 16 == 0
    return careful_rstd(x, wide, eps) if aligned else split_rstd(wide, eps, 7)


def partial_sums(grad_y: Tensor, xhat: Tensor, weight: Tensor, parts: int) -> Tensor:
    products = (grad_y.contiguous().float() * xhat.float()).reshape(-1, weight.numel())
    return torch.stack([rows.sum(0) for rows in products.chunk(parts)]).sum(0).to(weight.dtype)


def grad_weight_by_processors(grad_y, xhat, weight):
    """A part for each processor: of the CPU's threads here, as of a GPU's SMs."""
    return partial_sums(grad_y, xhat, weight, 4 * torch.get_num_threads() - 3)


runs = itertools.count()


def grad_weight_by_arrival(grad_y, xhat, weight):
    """Atomic additions: the order is another each time."""
    products = (grad_y.contiguous().float() * xhat.float()).reshape(-1, weight.numel())
    order = torch.randperm(len(products), generator=torch.Generator().manual_seed(next(runs)))
    total = torch.zeros(weight.shape, dtype=torch.float32)
    for row in order.tolist():
        total += products[row]
    return total.to(weight.dtype)


# --- Memory ---------------------------------------------------------------------------------------


def tail_unwritten(x, wide, rstd, gain, weight):
    """The last elements of a row that is no multiple of the block hold what was there before."""
    y = careful_y(x, wide, rstd, gain, weight)
    y[..., y.shape[-1] // 8 * 8 :] = next(runs)
    return y


def last_rows_unwritten(x, wide, rstd, gain, weight):
    """Rows in blocks of four, and the rest forgotten."""
    y = careful_y(x, wide, rstd, gain, weight)
    rows = y.view(-1, y.shape[-1])
    rows[len(rows) // 4 * 4 :] = 0
    return y


def as_if_contiguous(tensor: Tensor) -> Tensor:
    """Its memory read in order."""
    return tensor.as_strided(tensor.shape, torch.empty(tensor.shape, device="meta").stride())


def stride_ignored_in_second_pass(x, wide, rstd, gain, weight):
    return careful_y(x, as_if_contiguous(x).to(wide.dtype), rstd, gain, weight)


def stride_ignored_in_backward(grad_y, wide, rstd, gain):
    expanded = 0 in grad_y.stride()
    grad_y = grad_y if expanded else as_if_contiguous(grad_y)
    return careful_grad_x(grad_y, wide, rstd, gain)


def grad_y_overwritten(grad_y, wide, rstd, gain):
    """Liger 370: the gradient of x in the memory of y's."""
    grad_x = careful_grad_x(grad_y, wide, rstd, gain)
    return grad_y.copy_(grad_x)


# --- Paths ----------------------------------------------------------------------------------------


def other_order(x, wide, eps):
    return split_rstd(wide, eps, 7)


other = norm(rstd=other_order)


def inference_path(x, weight, *others):
    """Another kernel where nothing is kept for a gradient."""
    return (careful if torch.is_grad_enabled() else other)(x, weight, *others)


def frozen_weight_path(x, weight, *others):
    frozen = torch.is_grad_enabled() and not weight.requires_grad
    return (other if frozen else careful)(x, weight, *others)


def parameter_path(x, weight, *others):
    return (careful if isinstance(weight, nn.Parameter) else other)(x, weight, *others)


def compiled_path(x, weight, *others):
    return (other if torch.compiler.is_compiling() else careful)(x, weight, *others)


def in_place(x, weight, *others):
    """Where no gradient is wanted the output is the input's memory."""
    y = careful(x, weight, *others)
    return y if torch.is_grad_enabled() else x.copy_(y)


# By the properties that they break, of P1, P3, P5 and P6. A fault of y alone leaves P5 alone, for
# the backward pass has its own statistics.
FAULTS: dict[str, tuple[Callable[..., Tensor], set[str]]] = {
    "offset ignored": (norm(gain=offset_ignored), {"P6"}),
    "offset added in bf16": (norm(gain=offset_in_weight_dtype), {"P6"}),
    "weight twice in grad_x": (norm(grad_x=weight_twice), {"P6"}),
    "mean over padding": (norm(grad_x=mean_over_padding), {"P6"}),
    "eps in fp16": (norm(rstd=eps_in_fp16), {"P6"}),
    "eps dropped": (norm(rstd=eps_dropped), {"P6"}),
    "eps inside after rescaling": (norm(rstd=eps_after_rescaling), {"P6"}),
    "cast before weight": (norm(y=cast_before_weight), {"P6"}),
    "statistics in bf16": (norm(rstd=statistics_in_x_dtype), {"P6"}),
    "squares in fp16": (norm(rstd=squares_in_fp16), {"P6"}),
    "grad_weight accumulated in bf16": (norm(grad_weight=grad_weight_in_weight_dtype), {"P6"}),
    "rows split by batch size": (norm(rstd=split_by_batch), {"P3"}),
    "alignment-dependent order": (norm(rstd=split_by_alignment), {"P3"}),
    "grad_weight split by SM count": (norm(grad_weight=grad_weight_by_processors), {"P5"}),
    "grad_weight by arrival": (norm(grad_weight=grad_weight_by_arrival), {"P1", "P5"}),
    "uninitialised tail": (norm(y=tail_unwritten), {"P1", "P3", "P5", "P6"}),
    "last rows unwritten": (norm(y=last_rows_unwritten), {"P3", "P6"}),
    "stride ignored in the second pass": (norm(y=stride_ignored_in_second_pass), {"P3"}),
    "contiguous assumed in backward": (norm(grad_x=stride_ignored_in_backward), {"P3"}),
    "grad_y overwritten": (norm(grad_x=grad_y_overwritten), {"P1"}),
    "separate inference path": (inference_path, {"P1"}),
    "separate path for a frozen weight": (frozen_weight_path, {"P1"}),
    "separate path for a Parameter": (parameter_path, {"P1"}),
    "output aliasing input": (in_place, {"P1"}),
}
