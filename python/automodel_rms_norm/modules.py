"""The op as a module."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from automodel_rms_norm.ops import rms_norm

__all__ = ["RMSNorm"]


class RMSNorm(nn.Module):
    """RMSNorm over the last dimension; a drop-in for NeMo AutoModel's ``Float32RMSNorm``.

    Computes in float32 whatever the dtypes of x and weight are, and returns x's dtype; see
    :func:`automodel_rms_norm.rms_norm` for the formula, dtypes and errors.

    Args:
        dim: the size of the last dimension (hidden).
        eps: added to the mean of squares.
        device: of the weight.
        dtype: of the weight.
        zero_centered_gamma: the gain is ``weight + 1``, and weight starts at 0 instead of 1. A
            bfloat16 weight near 0 can follow updates that one near 1 would round away.
        elementwise_affine: False for no weight.

    Raises:
        ValueError: for a dim or an eps that no input can be normalised with.

    Attributes:
        weight: (dim,) parameter, or None. The only entry of the state dict.
    """

    weight: nn.Parameter | None

    def __init__(
        self,
        dim: int,
        eps: float = 1e-5,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = torch.bfloat16,
        zero_centered_gamma: bool = False,
        elementwise_affine: bool = True,
    ) -> None:
        super().__init__()
        if not isinstance(dim, int) or dim < 1:
            raise ValueError(f"RMSNorm: dim must be an integer of at least 1, got {dim!r}")
        if not isinstance(eps, (int, float)) or not 0 <= eps < math.inf:
            raise ValueError(f"RMSNorm: eps must be a finite number of at least 0, got {eps!r}")
        self.dim = dim
        self.eps = eps
        self.zero_centered_gamma = zero_centered_gamma
        self.elementwise_affine = elementwise_affine
        if elementwise_affine:
            self.weight = nn.Parameter(torch.empty(dim, device=device, dtype=dtype))
        else:
            self.register_parameter("weight", None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Sets the gain to 1: weight to ones, or to zeros where it is zero-centred."""
        if self.weight is not None:
            nn.init.constant_(self.weight, 0.0 if self.zero_centered_gamma else 1.0)

    def forward(self, x: Tensor) -> Tensor:
        """Normalises x of shape (..., dim)."""
        return rms_norm(x, self.weight, self.eps, self.zero_centered_gamma)

    def extra_repr(self) -> str:
        """The constructor's arguments, as ``print(model)`` shows them."""
        dtype = None if self.weight is None else self.weight.dtype
        return (
            f"{self.dim}, eps={self.eps}, dtype={dtype}, "
            f"zero_centered_gamma={self.zero_centered_gamma}, "
            f"elementwise_affine={self.elementwise_affine}"
        )
