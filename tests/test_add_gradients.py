"""First derivatives of add_rms_norm are right; test_derivatives.py has the others."""

import added
import automodel_rms_norm as arn
import pytest
import support
import torch
from automodel_rms_norm.testing import assert_bitwise_equal
from test_add_autograd import Leaves, leaves_of, norm
from torch import Tensor
from torch.autograd import gradcheck


def double_leaves(device: torch.device | str = "cpu") -> Leaves:
    inputs = added.make_inputs(4, 9, dtype=torch.float64, weight_dtype=torch.float64, device=device)
    return leaves_of(inputs)


@pytest.mark.parametrize("zero_centered_gamma", [False, True])
@pytest.mark.parametrize("outputs", [[0, 1], [0], [1]], ids=["both", "y", "sum"])
def test_gradients_are_those_of_finite_differences(outputs, zero_centered_gamma, device):
    def function(*arguments: Tensor) -> tuple[Tensor, ...]:
        results = arn.add_rms_norm(*arguments, 1e-3, zero_centered_gamma)
        return tuple(results[output] for output in outputs)

    x, residual, weight = double_leaves(device)
    arguments = (x, residual, weight.requires_grad_(0 in outputs))
    assert gradcheck(function, arguments, nondet_tol=0.0)


def test_the_gradient_of_the_sum_alone_can_be_differentiated(device):
    """It is grad_sum."""
    leaves = double_leaves(device)
    grad_sum = torch.randn_like(leaves[0]).requires_grad_()
    (grad_x,) = torch.autograd.grad(norm(*leaves)[1], leaves[0], grad_sum, create_graph=True)
    (second,) = torch.autograd.grad(grad_x, grad_sum, torch.ones_like(grad_x))
    assert torch.equal(second, torch.ones_like(grad_x))


def test_compiled_autograd_raises_naming_the_node():
    y, _ = norm(*leaves_of(added.make_inputs(3, 16)))
    enabled = torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager"))
    with enabled, pytest.raises(NotImplementedError, match="AutomodelAddRmsNormBackward"):
        y.backward(torch.ones_like(y))


# --- torch.func -----------------------------------------------------------------------------------


def test_func_vjp_has_the_bits_of_autograd(device):
    inputs = added.make_inputs(4, 9, device=device)
    expected = added.forward_backward(arn.add_rms_norm, inputs)
    outputs, vjp = torch.func.vjp(norm, *inputs[:3])
    actual = added.Outputs(*outputs, *vjp((inputs.grad_y, inputs.grad_sum)))
    support.assert_same(actual, expected)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("in_dims", [(0, 0, None), (0, None, None), (None, 0, None)], ids=str)
def test_vmap_has_the_bits_of_a_loop(in_dims: tuple[int | None, ...], device):
    inputs = added.make_inputs(3, 4, 9, device=device)

    def pick(i: int, argument: int) -> Tensor:
        return inputs[argument][i if in_dims[argument] == 0 else 0]

    loop = [norm(pick(i, 0), pick(i, 1), inputs.weight) for i in range(3)]
    arguments = [t if in_dims[n] == 0 else t[0] for n, t in enumerate(inputs[:2])]
    actual = torch.vmap(norm, in_dims=in_dims)(*arguments, inputs.weight)
    for name, ours, theirs in zip(("y", "sum"), actual, zip(*loop, strict=True), strict=True):
        assert_bitwise_equal(ours, torch.stack(theirs), name)
