"""First derivatives are right and have one set of bits; test_derivatives.py has the others."""

from collections.abc import Callable

import automodel_rms_norm as arn
import baselines
import pytest
import support
import torch
import torch._dynamo.compiled_autograd
from automodel_rms_norm.testing import assert_bitwise_equal
from torch import Tensor
from torch.autograd import gradcheck

EPS = 1e-3
NAMES_THE_OP = r"automodel::rms_norm"
Norm = Callable[[Tensor, Tensor], Tensor]


def norm(x: Tensor, weight: Tensor | None) -> Tensor:
    return arn.rms_norm(x, weight, EPS)


def leaves(
    *shape: int, dtype: torch.dtype = torch.float64, device: torch.device | str = "cpu"
) -> tuple[Tensor, Tensor, Tensor]:
    """x and weight that require gradients, and grad_y."""
    x, weight, grad_y = support.make_inputs(*shape, dtype=dtype, weight_dtype=dtype, device=device)
    return x.requires_grad_(), weight.requires_grad_(), grad_y


# --- First derivatives ----------------------------------------------------------------------------

LAYOUTS = {
    "contiguous": lambda x: x,
    "strided-rows": lambda x: x[:, ::2],
    "strided-elements": lambda x: x[..., ::2],
    "transposed": lambda x: x.transpose(0, 1),
    "expanded": lambda x: x[:1].expand(3, -1, -1),
}


@pytest.mark.parametrize("zero_centered_gamma", [False, True])
@pytest.mark.parametrize("weighted", [True, False], ids=["weight", "weightless"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_are_those_of_finite_differences(
    device: torch.device, layout: str, weighted: bool, zero_centered_gamma: bool
) -> None:
    view = LAYOUTS[layout]
    x, _, _ = leaves(2, 3, 10, device=device)
    _, weight, _ = leaves(view(x).shape[-1], device=device)

    def function(x: Tensor, weight: Tensor | None) -> Tensor:
        return arn.rms_norm(view(x), weight, EPS, zero_centered_gamma)

    # nondet_tol 0: two backward passes have the same bits.
    assert gradcheck(function, (x, weight if weighted else None), nondet_tol=0.0)


@pytest.mark.parametrize("needs", [(True, False), (False, True)])
def test_gradients_of_one_argument_are_right(
    device: torch.device, needs: tuple[bool, bool]
) -> None:
    x, weight, _ = leaves(4, 9, device=device)
    arguments = (x.requires_grad_(needs[0]), weight.requires_grad_(needs[1]))
    assert gradcheck(norm, arguments)


def test_an_undefined_grad_y_gives_no_gradient() -> None:
    x, weight, _ = leaves(4, 9)
    y = norm(x, weight)
    y.register_hook(torch.zeros_like)
    (gradient,) = torch.autograd.grad(y.sum(), x)
    assert torch.count_nonzero(gradient) == 0


def test_gradients_made_with_create_graph_have_the_same_bits() -> None:
    x, weight, grad_y = leaves(4, 9)
    plain = torch.autograd.grad(norm(x, weight), (x, weight), grad_y)
    kept = torch.autograd.grad(norm(x, weight), (x, weight), grad_y, create_graph=True)
    for one, other in zip(plain, kept, strict=True):
        assert_bitwise_equal(other.detach(), one, "gradient")


# --- torch.func -----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_func_vjp_has_the_bits_of_autograd(device: torch.device, dtype: torch.dtype) -> None:
    inputs = support.make_inputs(4, 9, dtype=dtype, weight_dtype=dtype, device=device)
    expected = support.forward_backward(arn.rms_norm, inputs, EPS)
    y, vjp = torch.func.vjp(norm, inputs.x, inputs.weight)
    grads = vjp(inputs.grad_y)
    for actual, name in zip((y, *grads), expected._fields, strict=True):
        assert_bitwise_equal(actual, getattr(expected, name), name)


def test_func_grad_has_the_bits_of_autograd(device: torch.device) -> None:
    inputs = support.make_inputs(4, 9, dtype=torch.float32, device=device)
    expected = support.forward_backward(arn.rms_norm, inputs, EPS)

    def loss(x: Tensor, weight: Tensor) -> Tensor:
        return (norm(x, weight) * inputs.grad_y).sum()

    grads = torch.func.grad(loss, argnums=(0, 1))(inputs.x, inputs.weight)
    assert_bitwise_equal(grads[0], expected.grad_x, "grad_x")
    assert_bitwise_equal(grads[1], expected.grad_weight, "grad_weight")


def test_functional_call_over_a_module(device: torch.device) -> None:
    inputs = support.make_inputs(4, 9, device=device)
    module = arn.RMSNorm(9, eps=EPS, device="meta")
    y = torch.func.functional_call(module, {"weight": inputs.weight}, (inputs.x,))
    assert_bitwise_equal(y, norm(inputs.x, inputs.weight), "y")


# --- vmap -----------------------------------------------------------------------------------------

# torch's fallback loops over the batch, and warns that this is slow.
slow_but_right = pytest.mark.filterwarnings("ignore:There is a performance drop")


@pytest.mark.case("autograd-several")
@pytest.mark.parametrize("in_dim", [0, 1])
@pytest.mark.parametrize("batched", ["x", "weight", "both"])
@slow_but_right
def test_vmap_has_the_bits_of_a_loop(device: torch.device, batched: str, in_dim: int) -> None:
    x, _, _ = support.make_inputs(3, 4, 9, dtype=torch.float32, device=device)
    weights, _, _ = support.make_inputs(3, 9, dtype=torch.float32, device=device)
    batches = {"x": x} if batched == "x" else {"weight": weights}
    if batched == "both":
        batches["x"] = x
    expected = torch.stack(
        [
            norm(x[i if "x" in batches else 0], weights[i if "weight" in batches else 0])
            for i in range(3)
        ]
    )
    arguments = [
        batches[name].movedim(0, in_dim) if name in batches else every[0]
        for name, every in (("x", x), ("weight", weights))
    ]
    in_dims = tuple(in_dim if name in batches else None for name in ("x", "weight"))
    assert_bitwise_equal(torch.vmap(norm, in_dims=in_dims)(*arguments), expected, "y")


@pytest.mark.case("autograd-several")
@slow_but_right
def test_vmap_over_nothing_raises_naming_the_op() -> None:
    x, weight, _ = support.make_inputs(3, 4, 9)
    with pytest.raises(RuntimeError, match=NAMES_THE_OP):
        torch.vmap(norm, in_dims=(0, None))(x[:0], weight)


@slow_but_right
def test_per_sample_gradients_have_the_bits_of_a_loop(device: torch.device) -> None:
    x, weight, grad_y = support.make_inputs(3, 4, 9, dtype=torch.float32, device=device)

    def loss(weight: Tensor, x: Tensor, grad_y: Tensor) -> Tensor:
        return (norm(x, weight) * grad_y).sum()

    per_sample = torch.vmap(torch.func.grad(loss), in_dims=(None, 0, 0))
    samples = [support.Inputs(x[i], weight, grad_y[i]) for i in range(3)]
    expected = [
        support.forward_backward(arn.rms_norm, sample, EPS).grad_weight for sample in samples
    ]
    assert_bitwise_equal(per_sample(weight, x, grad_y), torch.stack(expected), "grad_weight")


@slow_but_right
def test_batched_gradients_have_the_bits_of_a_loop(device: torch.device) -> None:
    x, weight, _ = leaves(4, 9, dtype=torch.float32, device=device)
    grads, _, _ = support.make_inputs(5, 4, 9, dtype=torch.float32, device=device)
    y = norm(x, weight)
    batched = torch.autograd.grad(y, (x, weight), grads, retain_graph=True, is_grads_batched=True)
    single = [torch.autograd.grad(y, (x, weight), grad, retain_graph=True) for grad in grads]
    for actual, expected in zip(batched, zip(*single, strict=True), strict=True):
        assert_bitwise_equal(actual, torch.stack(expected), "gradient")


@slow_but_right
def test_jacrev_has_the_bits_of_a_loop(device: torch.device) -> None:
    x, weight, _ = support.make_inputs(
        2, 5, dtype=torch.float64, weight_dtype=torch.float64, device=device
    )
    actual = torch.func.jacrev(lambda x: norm(x, weight))(x)
    expected = torch.autograd.functional.jacobian(lambda x: norm(x, weight), x)
    assert_bitwise_equal(actual, expected, "jacobian")
    # 60 roundings of values below 2^4: 60 * 2^4 * 2^-53 < 2e-13.
    formula = torch.autograd.functional.jacobian(lambda x: baselines.formula(x, weight, EPS), x)
    assert (actual - formula).abs().max() < 2e-13


def test_compiled_autograd_raises_naming_the_node():
    inputs = support.make_inputs(3, 16, dtype=torch.float32, weight_dtype=torch.float32)
    x = inputs.x.requires_grad_()
    y = arn.rms_norm(x, inputs.weight, 1e-5)
    enabled = torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager"))
    with enabled, pytest.raises(NotImplementedError, match="AutomodelRmsNormBackward"):
        y.backward(inputs.grad_y)
