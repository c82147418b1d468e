"""The ops as functions, and what is known about this build."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from automodel_rms_norm._library import LIBRARY_PATH

from automodel_rms_norm import _C  # isort: skip  (needs the op library)

__all__ = ["add_rms_norm", "build_info", "rms_norm"]


def rms_norm(
    x: Tensor, weight: Tensor | None, eps: float, zero_centered_gamma: bool = False
) -> Tensor:
    """RMS normalisation over the last dimension, with the bits that the contract specifies.

    ``y = x * rstd * w`` with ``rstd = 1 / sqrt(mean(x ** 2) + eps)``, computed in float32 (float64
    for float64 x) and rounded once, to x's dtype. The formula is Zhang and Sennrich, "Root Mean
    Square Layer Normalization", 2019; the order of every operation is in docs/numerics.md.

    Args:
        x: (..., hidden), bfloat16, float16, float32 or float64; any strides.
        weight: (hidden,) or None. bfloat16, float16 or float32; float64 too for float64 x.
        eps: finite and not negative.
        zero_centered_gamma: the gain w is ``weight + 1`` (added in float32) instead of ``weight``.

    Returns:
        y, of x's shape and dtype, contiguous, also under autocast.

    Raises:
        RuntimeError, TypeError, ValueError or NotImplementedError: naming the argument and both
        values.

    Differentiable with respect to x and weight, any number of times, in reverse and forward mode
    and by torch.func. The contract specifies the bits of first derivatives in reverse mode; the
    others are composed of torch operations.
    """
    return cast(Tensor, torch.ops.automodel.rms_norm.default(x, weight, eps, zero_centered_gamma))


def add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    eps: float,
    zero_centered_gamma: bool = False,
) -> tuple[Tensor, Tensor]:
    """``sum = x + residual`` and ``y = rms_norm(sum, weight, eps, zero_centered_gamma)`` in one op.

    The sum is rounded to x's dtype, and it is the rounded sum that is normalised, stored for the
    backward pass and returned: y has the bits of :func:`rms_norm` on it. In the backward pass the
    gradient of sum is added in float32 (float64 for float64 x) before the gradient is rounded once.

    Args:
        x: (..., hidden), bfloat16, float16, float32 or float64; any strides.
        residual: of x's shape, dtype and device; any strides.
        weight: (hidden,) or None. bfloat16, float16 or float32; float64 too for float64 x.
        eps: finite and not negative.
        zero_centered_gamma: the gain w is ``weight + 1`` (added in float32) instead of ``weight``.

    Returns:
        y and sum, of x's shape and dtype, contiguous, also under autocast.

    Raises:
        RuntimeError, TypeError, ValueError or NotImplementedError: naming the argument and both
        values.

    Differentiable with respect to x, residual (which have one gradient) and weight, as
    :func:`rms_norm` is.
    """
    outputs = torch.ops.automodel.add_rms_norm.default(
        x, residual, weight, eps, zero_centered_gamma
    )
    return cast("tuple[Tensor, Tensor]", outputs)


def build_info() -> dict[str, Any]:
    """What this installation is: a dict of plain values.

    ``version``, ``torch`` and ``cuda`` it was built with (``cuda`` is "" for a CPU-only build, with
    ``no_cuda_reason``), ``cuda_architectures``, ``compiler``, the ``cxx_standard`` that torch's
    headers need, the CPU instruction sets compiled in, supported here and active, the ``contract``
    (version and constants) and the path of the op library, which C++ programs load.
    """
    info: dict[str, Any] = dict(_C.build_info())
    for key in ("cuda_architectures", "cpu_isas_compiled"):
        info[key] = info[key].split()
    info["cpu_isas_supported"] = _C.supported_isas()
    info["cpu_isa"] = _C.active_isa()
    info["contract"] = dict(_C.contract())
    info["library"] = str(LIBRARY_PATH)
    return info
