"""Other implementations, restated from their formulas, and the defects that the tests must see.

Benchmarks import this module too, so that what is timed is what is tested. All take
(..., hidden) x and (hidden,) weight, on any device.
"""

import functools
import importlib
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


def automodel_0_6(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The affected function: ``_float32_rms_norm_fwd`` of nemo-automodel 0.4.0 to 0.6.0.

    There it runs under ``torch.compile(dynamic=True)``, with ``fullgraph=True`` until 0.5.0
    (nemo_automodel/components/models/common/utils.py). Not compiled here: the tests compile it.
    """
    x32 = x.float()
    normed = x32 * torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + eps)
    return (weight * normed).to(x.dtype)


def automodel_0_7(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """nemo-automodel 0.7.0: torch's own norm of float copies, there inside a Python custom op."""
    return F.rms_norm(x.float(), (x.shape[-1],), weight.float(), eps).to(x.dtype)


@functools.cache
def automodel_0_7_op() -> Callable[..., Tensor]:
    """The whole of it: that custom op, with the backward pass of torch operations that
    nemo-automodel 0.7.0 registers for it. There it is called through
    ``torch.compile(dynamic=True)``; not compiled here.
    """
    op = torch.library.custom_op("baselines::automodel_0_7", automodel_0_7, mutates_args=())
    op.register_fake(automodel_0_7)

    def setup_context(ctx, inputs, output) -> None:
        x, weight, ctx.eps = inputs
        ctx.save_for_backward(x, weight)

    def backward(ctx, grad_y: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        x32, grad32 = x.float(), grad_y.float()
        rstd = torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + ctx.eps)
        normed = x32 * rstd
        grad_weight = (grad32 * normed).sum_to_size(weight.shape)
        gained = grad32 * weight.float()
        grad_x = rstd * (gained - normed * (gained * normed).mean(-1, keepdim=True))
        return (
            grad_x.to(x.dtype) if x.requires_grad else None,
            grad_weight.to(weight.dtype) if weight.requires_grad else None,
            None,
        )

    op.register_autograd(backward, setup_context=setup_context)
    return op


def torch_rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """``torch.nn.functional.rms_norm``; composite, so the compiler decomposes it."""
    return F.rms_norm(x, (x.shape[-1],), weight, eps)


def formula(
    x: Tensor, weight: Tensor | None, eps: float, zero_centered_gamma: bool = False
) -> Tensor:
    """design.md's formula in plain torch operations of x's accumulate type; differentiable."""
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    x_acc = x.to(dtype)
    y = x_acc * (1.0 / torch.sqrt(x_acc.square().mean(-1, keepdim=True) + eps))
    if weight is not None:
        gain = weight.to(dtype)
        y = y * (gain + 1.0 if zero_centered_gamma else gain)
    return y.to(x.dtype)


def megatron_offset_ignored(
    x: Tensor, weight: Tensor, eps: float, zero_centered_gamma: bool
) -> Tensor:
    """First defect of Megatron-Core's ``BatchInvariantRMSNormFn`` (0.16.0 to 0.19.2).

    Its forward computes ``weight + 1`` and then multiplies by ``weight``
    (megatron/core/transformer/custom_layers/batch_invariant_kernels.py).
    """
    del zero_centered_gamma
    return formula(x, weight, eps)


def megatron_weight_twice(
    grad_y: Tensor, x: Tensor, weight: Tensor, eps: float, zero_centered_gamma: bool
) -> Tensor:
    """Its second defect: grad_x whose second term has the gain twice, once inside the sum and once
    outside. Right where every gain is 1.
    """
    gain = weight + 1.0 if zero_centered_gamma else weight
    rstd = torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    xhat = x * rstd
    mean = (grad_y * gain * xhat).mean(-1, keepdim=True)
    return rstd * (grad_y * gain - gain * xhat * mean)


# --- What the op is compared with -----------------------------------------------------------------


class Baseline(NamedTuple):
    """An implementation under the name that tables give it.

    Attributes:
        norm: (x, weight, eps) to y.
        add_norm: (x, residual, weight, eps) to y of the sum, and the sum; None where it has none.
        why: the reason why it cannot run here, or nothing.
    """

    norm: Callable[..., Tensor]
    add_norm: Callable[..., tuple[Tensor, Tensor]] | None = None
    why: str = ""


def after_add(norm: Callable[..., Tensor]) -> Callable[..., tuple[Tensor, Tensor]]:
    """A residual addition, then `norm`."""

    def add_norm(
        x: Tensor, residual: Tensor, weight: Tensor | None, eps: float
    ) -> tuple[Tensor, Tensor]:
        total = x + residual
        return norm(total, weight, eps), total

    return add_norm


def traceable() -> dict[str, Callable[..., Tensor]]:
    """Those that Python functions compiled as a whole can contain, by `baselines`' names."""
    return {
        "automodel_0_6": automodel_0_6,
        "automodel_0_7": automodel_0_7_op(),
        "torch": torch_rms_norm,
    }


def baselines(device: torch.device) -> dict[str, Baseline]:
    """All of them, the optional ones as well where they are not installed."""

    def compiled(norm: Callable[..., Tensor], **options: object) -> Baseline:
        return Baseline(torch.compile(norm, **options), torch.compile(after_add(norm), **options))

    return {
        "automodel_0_6": compiled(automodel_0_6, dynamic=True),
        "automodel_0_6_static": compiled(
            automodel_0_6, dynamic=False, mode="max-autotune-no-cudagraphs"
        ),
        "automodel_0_7": compiled(automodel_0_7_op(), dynamic=True),
        "torch": Baseline(torch_rms_norm, after_add(torch_rms_norm)),
        "liger": optional(liger, device),
        "liger_in_place": optional(functools.partial(liger, in_place=True), device),
        "quack": optional(quack, device),
    }


def optional(make: Callable[[], Baseline], device: torch.device) -> Baseline:
    """What `make` makes, or why it cannot: an import may fail in many ways."""
    why = "" if device.type == "cuda" else "needs a GPU"
    try:
        return make()._replace(why=why)
    except Exception as error:
        return Baseline(torch_rms_norm, why=why or f"{type(error).__name__}: {error}")


def liger(in_place: bool = False) -> Baseline:
    """liger-kernel's Triton kernels, computing in float32 throughout.

    Its own modules write grad_x over grad_y, which no other implementation may: `in_place`.
    """
    norm = importlib.import_module("liger_kernel.ops.rms_norm").LigerRMSNormFunction
    fused = importlib.import_module("liger_kernel.ops.fused_add_rms_norm")
    add_norm = fused.LigerFusedAddRMSNormFunction
    return Baseline(
        lambda x, weight, eps: norm.apply(x, weight, eps, 0.0, "gemma", in_place),
        lambda x, residual, weight, eps: add_norm.apply(
            x, residual, weight, eps, 0.0, "gemma", in_place
        ),
    )


def quack() -> Baseline:
    """quack-kernels' CuTe kernels. The package has a function of the module's name."""
    rmsnorm = importlib.import_module("quack.rmsnorm").rmsnorm
    return Baseline(
        lambda x, weight, eps: rmsnorm(x, weight, eps=eps),
        lambda x, residual, weight, eps: rmsnorm(
            x, weight, residual=residual, eps=eps, prenorm=True
        ),
    )
