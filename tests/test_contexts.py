"""P1: y has the same bits in every autograd context, and each context does the work it needs."""

import contextlib
import functools
from collections.abc import Callable

import automodel_rms_norm as arn
import pytest
import support
import torch
from automodel_rms_norm.testing import assert_bitwise_equal
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

EPS = 1e-5
HIDDEN = 200

AUTOMODEL = torch.ops.automodel
RMS_NORM = AUTOMODEL.rms_norm.default
FORWARD = AUTOMODEL.rms_norm_forward.default
BACKWARD = AUTOMODEL.rms_norm_backward.default


class OpCalls(TorchDispatchMode):
    """The calls of this package's ops below autograd."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[torch._ops.OpOverload, tuple]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "automodel":
            self.calls.append((func, args))
        return func(*args, **(kwargs or {}))

    @property
    def ops(self) -> list[torch._ops.OpOverload]:
        return [op for op, _ in self.calls]


Norm = Callable[[Tensor, Tensor], Tensor]


def no_grad(norm: Norm, x: Tensor, weight: Tensor) -> Tensor:
    with torch.no_grad():
        return norm(x, weight)


def inference_mode(norm: Norm, x: Tensor, weight: Tensor) -> Tensor:
    with torch.inference_mode():
        return norm(x, weight).clone()


def inference_tensors(norm: Norm, x: Tensor, weight: Tensor) -> Tensor:
    with torch.inference_mode():
        return norm(x.clone(), weight.clone())


def grad(norm: Norm, x: Tensor, weight: Tensor) -> Tensor:
    return norm(x.requires_grad_(), nn.Parameter(weight))


def grad_plain_weight(norm: Norm, x: Tensor, weight: Tensor) -> Tensor:
    return norm(x.requires_grad_(), weight.requires_grad_())


def x_frozen(norm: Norm, x: Tensor, weight: Tensor) -> Tensor:
    return norm(x, nn.Parameter(weight))


def weight_frozen(norm: Norm, x: Tensor, weight: Tensor) -> Tensor:
    return norm(x.requires_grad_(), nn.Parameter(weight, requires_grad=False))


def non_leaf(norm: Norm, x: Tensor, weight: Tensor) -> Tensor:
    return norm(x.requires_grad_() * 1.0, nn.Parameter(weight))


def both_frozen_in_grad_mode(norm: Norm, x: Tensor, weight: Tensor) -> Tensor:
    return norm(x, weight)


def autocast(norm: Norm, x: Tensor, weight: Tensor) -> Tensor:
    with torch.autocast(x.device.type, dtype=torch.bfloat16):
        return norm(x, weight)


def reentrant_checkpoint(norm: Norm, x: Tensor, weight: Tensor) -> Tensor:
    return checkpoint(norm, x.requires_grad_(), weight, use_reentrant=True)


def other_checkpoint(norm: Norm, x: Tensor, weight: Tensor) -> Tensor:
    return checkpoint(norm, x.requires_grad_(), weight, use_reentrant=False)


CONTEXTS = [
    no_grad,
    inference_mode,
    inference_tensors,
    grad,
    grad_plain_weight,
    x_frozen,
    weight_frozen,
    non_leaf,
    both_frozen_in_grad_mode,
    autocast,
    reentrant_checkpoint,
    other_checkpoint,
]


BF16, FP16, FP32, FP64 = support.X_DTYPES


@pytest.mark.case("Automodel-3106")
@pytest.mark.parametrize("context", CONTEXTS, ids=lambda context: context.__name__)
@pytest.mark.parametrize("zero_centered", [False, True], ids=["plain", "zero_centered"])
@pytest.mark.parametrize(
    "pair",
    [(BF16, BF16), (BF16, FP32), (FP16, FP16), (FP32, FP32), (FP32, BF16), (FP64, FP32)],
    ids=str,
)
@pytest.mark.parametrize("shape", [(3, 5, HIDDEN), (1, 1), (17, 1024)], ids=str)
def test_y_has_the_same_bits_in_every_context(
    device: torch.device,
    shape: tuple[int, ...],
    pair: tuple[torch.dtype, torch.dtype],
    zero_centered: bool,
    context: Callable[[Norm, Tensor, Tensor], Tensor],
) -> None:
    dtype, weight_dtype = pair
    x, weight, _ = support.make_inputs(
        *shape,
        dtype=dtype,
        weight_dtype=weight_dtype,
        zero_centered_gamma=zero_centered,
        device=device,
    )
    expected = expected_y(shape, pair, zero_centered)

    def norm(x: Tensor, weight: Tensor) -> Tensor:
        return arn.rms_norm(x, weight, EPS, zero_centered)

    y = context(norm, x, weight)
    assert y.dtype == dtype
    assert_bitwise_equal(y.detach(), expected, "y")


@functools.cache
def expected_y(
    shape: tuple[int, ...], pair: tuple[torch.dtype, torch.dtype], zero_centered: bool
) -> Tensor:
    x, weight, _ = support.make_inputs(
        *shape, dtype=pair[0], weight_dtype=pair[1], zero_centered_gamma=zero_centered
    )
    return arn.reference.rms_norm(x, weight, EPS, zero_centered)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_recomputed_rows_have_the_bits_of_the_forward_pass(
    device: torch.device, use_reentrant: bool
) -> None:
    inputs = support.make_inputs(6, HIDDEN, device=device)
    seen: list[Tensor] = []

    def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        y = arn.rms_norm(x, weight, eps)
        seen.append(y.detach().clone())
        return y

    def checkpointed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return checkpoint(norm, x, weight, eps, use_reentrant=use_reentrant)

    expected = support.forward_backward(arn.rms_norm, inputs)
    # The reentrant kind works with backward alone, not with torch.autograd.grad.
    x, weight = inputs.x.clone().requires_grad_(), nn.Parameter(inputs.weight)
    with set_checkpoint_early_stop(False):  # or the recomputation ends before it has a y
        y = checkpointed(x, weight, EPS)
    y.backward(inputs.grad_y)
    assert len(seen) == 2
    assert_bitwise_equal(seen[1], seen[0], "recomputed y")
    for name, actual in zip(expected._fields, (y.detach(), x.grad, weight.grad), strict=True):
        assert_bitwise_equal(actual, getattr(expected, name), name)


# --- No work for a gradient that nobody asked for -------------------------------------------------


@pytest.mark.parametrize(
    ("needs", "forward_op", "mask"),
    [
        pytest.param((True, True), FORWARD, (True, True), id="both"),
        pytest.param((True, False), FORWARD, (True, False), id="weight-frozen-Liger-1067"),
        pytest.param((False, True), FORWARD, (False, True), id="x-frozen"),
        pytest.param((False, False), RMS_NORM, None, id="both-frozen"),
    ],
)
def test_backward_is_asked_for_the_wanted_gradients_alone(
    device: torch.device,
    needs: tuple[bool, bool],
    forward_op: torch._ops.OpOverload,
    mask: tuple[bool, bool] | None,
) -> None:
    inputs = support.make_inputs(4, HIDDEN, device=device)
    expected = support.forward_backward(arn.rms_norm, inputs)
    x = inputs.x.clone().requires_grad_(needs[0])
    weight = nn.Parameter(inputs.weight, requires_grad=needs[1])
    with OpCalls() as seen:
        y = arn.rms_norm(x, weight, EPS)
        if mask is not None:
            y.backward(inputs.grad_y)
    assert y.requires_grad == any(needs)
    if mask is None:
        assert seen.ops == [forward_op]
        return
    assert seen.ops == [forward_op, BACKWARD]
    assert tuple(seen.calls[1][1][-1]) == mask
    for wanted, leaf, gradient in zip(mask, (x, weight), expected[1:], strict=True):
        assert (leaf.grad is not None) == wanted
        if wanted:
            assert_bitwise_equal(leaf.grad, gradient, "gradient")


def test_backward_with_inputs_named_computes_those_alone(device: torch.device) -> None:
    inputs = support.make_inputs(4, HIDDEN, device=device)
    x, weight = inputs.x.clone().requires_grad_(), nn.Parameter(inputs.weight)
    with OpCalls() as seen:
        torch.autograd.grad(arn.rms_norm(x, weight, EPS), x, inputs.grad_y)
    assert tuple(seen.calls[1][1][-1]) == (True, False)


@pytest.mark.parametrize("needs", [(True, False), (False, True)])
def test_an_unwanted_gradient_has_no_memory(device: torch.device, needs: tuple[bool, bool]) -> None:
    x, weight, grad_y = support.make_inputs(4, HIDDEN, device=device)
    _, rstd = AUTOMODEL.rms_norm_forward(x, weight, EPS, False)
    gradients = AUTOMODEL.rms_norm_backward(grad_y, x, weight, rstd, False, needs)
    for wanted, gradient in zip(needs, gradients, strict=True):
        assert gradient.untyped_storage().nbytes() == 0 or wanted


def test_weightless_backward_asks_for_grad_x_alone(device: torch.device) -> None:
    x, _, grad_y = support.make_inputs(4, HIDDEN, weight_dtype=None, device=device)
    with OpCalls() as seen:
        arn.rms_norm(x.requires_grad_(), None, EPS).backward(grad_y)
    assert seen.ops == [FORWARD, BACKWARD]
    assert tuple(seen.calls[1][1][-1]) == (True, False)


# --- One module, several uses ---------------------------------------------------------------------


@pytest.mark.case("unsloth-2434")
def test_a_module_trains_after_an_inference_mode_rollout(device: torch.device) -> None:
    inputs = support.make_inputs(4, HIDDEN, device=device)
    module = arn.RMSNorm(HIDDEN, device=device)
    with torch.no_grad():
        module.weight.copy_(inputs.weight)
    with torch.inference_mode():
        rollout = module(inputs.x)
    y = module(inputs.x)
    y.backward(inputs.grad_y)
    expected = support.forward_backward(arn.rms_norm, inputs)
    assert_bitwise_equal(rollout, y.detach(), "y")
    assert_bitwise_equal(module.weight.grad, expected.grad_weight, "grad_weight")


def test_inference_tensors_cannot_be_saved_for_backward(device: torch.device) -> None:
    """torch's own rule for every op; an error, not silence."""
    x, weight, _ = support.make_inputs(4, HIDDEN, device=device)
    with torch.inference_mode():
        rolled_out = x.clone()
    with pytest.raises(RuntimeError, match="Inference tensors cannot be saved for backward"):
        arn.rms_norm(rolled_out, nn.Parameter(weight), EPS)


@pytest.mark.case("Liger-370")
def test_a_residual_branch_keeps_its_grad_y(device: torch.device) -> None:
    inputs = support.make_inputs(4, HIDDEN, dtype=torch.float32, device=device)
    expected = support.forward_backward(arn.rms_norm, inputs)
    x, weight = inputs.x.clone().requires_grad_(), nn.Parameter(inputs.weight)
    y = arn.rms_norm(x, weight, EPS)
    # grad_y reaches the norm and the residual branch as one tensor.
    grad_y = inputs.grad_y.clone()
    (x + y).backward(grad_y)
    assert_bitwise_equal(grad_y, inputs.grad_y, "grad_y")
    assert_bitwise_equal(x.grad, inputs.grad_y + expected.grad_x, "grad_x")


def test_gradients_accumulate_over_two_calls(device: torch.device) -> None:
    inputs = support.make_inputs(4, HIDDEN, dtype=torch.float32, device=device)
    once = support.forward_backward(arn.rms_norm, inputs)
    module = arn.RMSNorm(HIDDEN, device=device)
    with torch.no_grad():
        module.weight.copy_(inputs.weight)
    for _ in range(2):
        module(inputs.x).backward(inputs.grad_y)
    assert_bitwise_equal(module.weight.grad, once.grad_weight * 2, "grad_weight")


def test_backward_twice_over_a_retained_graph(device: torch.device) -> None:
    inputs = support.make_inputs(4, HIDDEN, device=device)
    x, weight = inputs.x.clone().requires_grad_(), nn.Parameter(inputs.weight)
    y = arn.rms_norm(x, weight, EPS)
    first = torch.autograd.grad(y, (x, weight), inputs.grad_y, retain_graph=True)
    second = torch.autograd.grad(y, (x, weight), inputs.grad_y)
    for one, other in zip(first, second, strict=True):
        assert_bitwise_equal(one, other, "gradient")
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        torch.autograd.grad(y, (x, weight), inputs.grad_y)


# --- What autograd keeps --------------------------------------------------------------------------


def test_saved_tensor_hooks_see_x_weight_and_rstd(device: torch.device) -> None:
    inputs = support.make_inputs(4, HIDDEN, device=device)
    expected = support.forward_backward(arn.rms_norm, inputs)
    packed: list[tuple[torch.Size, torch.dtype]] = []

    def pack(tensor: Tensor) -> Tensor:
        packed.append((tensor.shape, tensor.dtype))
        return tensor.cpu()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda kept: kept.to(device)):
        actual = support.forward_backward(arn.rms_norm, inputs)
    assert packed == [
        (inputs.x.shape, torch.bfloat16),
        (inputs.weight.shape, torch.bfloat16),
        (inputs.x.shape[:-1], torch.float32),
    ]
    for name in actual._fields:
        assert_bitwise_equal(getattr(actual, name), getattr(expected, name), name)


@pytest.mark.parametrize("changed", ["x", "weight"])
def test_changing_a_saved_tensor_raises(device: torch.device, changed: str) -> None:
    inputs = support.make_inputs(4, HIDDEN, device=device)
    leaves = {"x": inputs.x.clone().requires_grad_(), "weight": nn.Parameter(inputs.weight)}
    y = arn.rms_norm(**leaves, eps=EPS)
    with torch.no_grad():
        leaves[changed].mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward(inputs.grad_y)


def test_y_may_be_changed_before_backward(device: torch.device) -> None:
    """y is not among what backward needs."""
    inputs = support.make_inputs(4, HIDDEN, dtype=torch.float32, device=device)
    expected = support.forward_backward(arn.rms_norm, inputs)
    x, weight = inputs.x.clone().requires_grad_(), nn.Parameter(inputs.weight)
    y = arn.rms_norm(x, weight, EPS)
    y.add_(1)
    y.backward(inputs.grad_y)
    assert_bitwise_equal(x.grad, expected.grad_x, "grad_x")


@pytest.mark.parametrize("grad_mode", [torch.enable_grad, torch.no_grad])
def test_arguments_are_left_as_they_were(
    device: torch.device, grad_mode: Callable[[], contextlib.AbstractContextManager]
) -> None:
    inputs = support.make_inputs(4, HIDDEN, device=device)
    kept = [tensor.clone() for tensor in inputs]
    versions = [tensor._version for tensor in inputs]
    with grad_mode():
        y = arn.rms_norm(inputs.x, inputs.weight, EPS)
    support.forward_backward(arn.rms_norm, inputs)
    assert y.untyped_storage().data_ptr() not in {
        tensor.untyped_storage().data_ptr() for tensor in inputs
    }
    for tensor, copy, version in zip(inputs, kept, versions, strict=True):
        assert_bitwise_equal(tensor, copy, "argument")
        assert tensor._version == version


def test_the_node_names_the_op() -> None:
    x, weight, _ = support.make_inputs(4, HIDDEN)
    y = arn.rms_norm(x, nn.Parameter(weight), EPS)
    assert "RmsNorm" in y.grad_fn.name()
