"""What the tests of add_rms_norm share: support.py's, with a residual and two gradients."""

from collections.abc import Callable
from typing import NamedTuple

import automodel_rms_norm as arn
import support
import torch
from torch import Tensor

OPS = torch.ops.automodel
EPS = 1e-5


class Inputs(NamedTuple):
    x: Tensor
    residual: Tensor
    weight: Tensor | None
    grad_y: Tensor
    grad_sum: Tensor

    def to(self, device: torch.device | str) -> "Inputs":
        return Inputs(*(tensor if tensor is None else tensor.to(device) for tensor in self))

    def at(self, rows: object) -> "Inputs":
        """The inputs of some rows."""
        return Inputs(*(t if t is self.weight else t[rows] for t in self))


def make_inputs(*shape: int, seed: int = 0, **options: object) -> Inputs:
    """Takes what support.make_inputs takes."""
    x, weight, grad_y = support.make_inputs(*shape, seed=2 * seed, **options)
    residual, _, grad_sum = support.make_inputs(*shape, seed=2 * seed + 1, **options)
    return Inputs(x, residual, weight, grad_y, grad_sum)


class Results(NamedTuple):
    y: Tensor
    sum: Tensor
    rstd: Tensor
    grad: Tensor
    grad_weight: Tensor | None


def run_op(inputs: Inputs, eps: float = EPS, zero_centered_gamma: bool = False) -> Results:
    """What the two inner ops return."""
    x, residual, weight, grad_y, grad_sum = inputs
    y, total, rstd = OPS.add_rms_norm_forward(x, residual, weight, eps, zero_centered_gamma)
    wanted = [True, weight is not None]
    grad, grad_weight = OPS.add_rms_norm_backward(
        grad_y, grad_sum, total, weight, rstd, zero_centered_gamma, wanted
    )
    return Results(y, total, rstd, grad, None if weight is None else grad_weight)


def run_reference(inputs: Inputs, eps: float = EPS, zero_centered_gamma: bool = False) -> Results:
    """The same by the contract's literal reading, on the CPU."""
    x, residual, weight, grad_y, grad_sum = inputs
    y, total, rstd = arn.reference.add_rms_norm_forward(
        x, residual, weight, eps, zero_centered_gamma
    )
    grads = arn.reference.add_rms_norm_backward(
        grad_y, grad_sum, total, weight, rstd, zero_centered_gamma
    )
    return Results(y, total, rstd, *grads)


class Outputs(NamedTuple):
    y: Tensor
    sum: Tensor
    grad_x: Tensor
    grad_residual: Tensor
    grad_weight: Tensor | None


def forward_backward(
    function: Callable[..., tuple[Tensor, Tensor]],
    inputs: Inputs,
    eps: float = EPS,
    *args: object,
) -> Outputs:
    """Everything that `function(x, residual, weight, eps, *args)` gives; both outputs are used."""
    x, residual = (tensor.detach().requires_grad_() for tensor in (inputs.x, inputs.residual))
    weight = None if inputs.weight is None else torch.nn.Parameter(inputs.weight.detach())
    outputs = function(x, residual, weight, eps, *args)
    leaves = [x, residual] if weight is None else [x, residual, weight]
    grads = torch.autograd.grad(outputs, leaves, (inputs.grad_y, inputs.grad_sum))
    y, total = (output.detach() for output in outputs)
    return Outputs(y, total, grads[0], grads[1], None if weight is None else grads[2])


def reference_outputs(
    inputs: Inputs, eps: float = EPS, zero_centered_gamma: bool = False
) -> Outputs:
    """The same by the contract's literal reading, on the CPU."""
    y, total, _, grad, grad_weight = run_reference(inputs, eps, zero_centered_gamma)
    return Outputs(y, total, grad, grad, grad_weight)
