"""Other implementations, restated from their formulas, and the defects that the tests must see.

Benchmarks import this module too, so that what is timed is what is tested. All take
(..., hidden) x and (hidden,) weight, on any device.
"""

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
