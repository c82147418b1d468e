"""RMSNorm and its gradients in higher precision than the op's: what property P6 measures against.

float64 for ops that compute in float32; 50 decimal digits for ops that compute in float64.
"""

from __future__ import annotations

import decimal
from decimal import Decimal
from typing import NamedTuple

import torch
from torch import Tensor

from automodel_rms_norm.reference import accumulate_dtype

__all__ = ["Exact", "exact_rms_norm"]


class Exact(NamedTuple):
    """Results in higher precision, all float64 on the CPU, of (rows, hidden) inputs.

    y, grad_x: (rows, hidden); grad_weight: (hidden,). Each result is the tensor plus its ``_rest``,
    which float64 could not hold. The other fields are what the bounds are made of: rstd and
    t_xhat = mean |t xhat|, (rows, 1); xhat and t = grad_y * w, (rows, hidden); w, (hidden,).
    """

    y: Tensor
    y_rest: Tensor
    grad_x: Tensor
    grad_x_rest: Tensor
    grad_weight: Tensor
    grad_weight_rest: Tensor
    w: Tensor
    rstd: Tensor
    xhat: Tensor
    t: Tensor
    t_xhat: Tensor


def exact_rms_norm(
    x: Tensor, weight: Tensor | None, eps: float, zero_centered_gamma: bool, grad_y: Tensor
) -> Exact:
    """The formula on the exact values of x, weight and grad_y, and on eps rounded to A."""
    compute = accumulate_dtype(x.dtype)
    hidden = x.shape[-1]
    rows = x.detach().cpu().double().reshape(-1, hidden)
    grads = grad_y.detach().cpu().double().reshape(-1, hidden)
    gain = torch.ones(hidden) if weight is None else weight.detach().cpu()
    offset = 1 if zero_centered_gamma and weight is not None else 0
    eps = float(torch.tensor(eps, dtype=compute))
    exactly = _in_float64 if compute == torch.float32 else _in_decimal
    return exactly(rows, gain.double(), offset, eps, grads)


def _in_float64(x: Tensor, weight: Tensor, offset: int, eps: float, g: Tensor) -> Exact:
    w = weight + offset
    rstd = 1 / (x.square().mean(-1, keepdim=True) + eps).sqrt()
    xhat = x * rstd
    t = g * w
    c = (t * xhat).mean(-1, keepdim=True)
    results = (xhat * w, rstd * (t - xhat * c), (g * xhat).sum(0))
    y, grad_x, grad_weight = ((result, torch.zeros_like(result)) for result in results)
    t_xhat = (t * xhat).abs().mean(-1, keepdim=True)
    return Exact(*y, *grad_x, *grad_weight, w, rstd, xhat, t, t_xhat)


def _split(rows: list[list[Decimal]]) -> tuple[Tensor, Tensor]:
    high = [[float(value) for value in row] for row in rows]
    low = [
        [float(value - Decimal(near)) for value, near in zip(*pair, strict=True)]
        for pair in zip(rows, high, strict=True)
    ]
    return torch.tensor(high, dtype=torch.float64), torch.tensor(low, dtype=torch.float64)


def _in_decimal(x: Tensor, weight: Tensor, offset: int, eps: float, g: Tensor) -> Exact:
    hidden = x.shape[-1]
    w = [Decimal(value) + offset for value in weight.tolist()]
    grad_weight = [Decimal(0)] * hidden
    rows: dict[str, list[list[Decimal]]] = {
        name: [] for name in ("y", "grad_x", "rstd", "xhat", "t", "t_xhat")
    }
    with decimal.localcontext() as context:
        context.prec, context.Emax, context.Emin = 50, decimal.MAX_EMAX, decimal.MIN_EMIN
        for x_row, g_row in zip(x.tolist(), g.tolist(), strict=True):
            xs, gs = [Decimal(value) for value in x_row], [Decimal(value) for value in g_row]
            rstd = 1 / (sum((v * v for v in xs), Decimal(0)) / hidden + Decimal(eps)).sqrt()
            xhat = [v * rstd for v in xs]
            t = [a * b for a, b in zip(gs, w, strict=True)]
            products = [a * b for a, b in zip(t, xhat, strict=True)]
            c = sum(products, Decimal(0)) / hidden
            grad_weight = [a + b * v for a, b, v in zip(grad_weight, gs, xhat, strict=True)]
            rows["y"].append([a * b for a, b in zip(xhat, w, strict=True)])
            rows["grad_x"].append([rstd * (a - b * c) for a, b in zip(t, xhat, strict=True)])
            rows["rstd"].append([rstd])
            rows["xhat"].append(xhat)
            rows["t"].append(t)
            rows["t_xhat"].append([sum(map(abs, products), Decimal(0)) / hidden])
        y, grad_x, total = _split(rows["y"]), _split(rows["grad_x"]), _split([grad_weight])
        parts = [_split(rows[name])[0] for name in ("rstd", "xhat", "t", "t_xhat")]
        return Exact(*y, *grad_x, total[0][0], total[1][0], _split([w])[0][0], *parts)
