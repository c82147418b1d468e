"""add_rms_norm under autograd: which gradients there are, in every context, from which ops."""

import gc
import weakref

import added
import automodel_rms_norm as arn
import pytest
import support
import torch
from added import EPS, OPS
from automodel_rms_norm.testing import assert_bitwise_equal
from test_contexts import OpCalls
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

HIDDEN = 200

Leaves = tuple[Tensor, Tensor, Tensor]


def leaves_of(inputs: added.Inputs, needs: tuple[bool, bool, bool] = (True, True, True)) -> Leaves:
    """Fresh x, residual and weight."""
    return (
        inputs.x.clone().requires_grad_(needs[0]),
        inputs.residual.clone().requires_grad_(needs[1]),
        nn.Parameter(inputs.weight.clone(), requires_grad=needs[2]),
    )


# --- Contexts -------------------------------------------------------------------------------------


def norm(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    return arn.add_rms_norm(x, residual, weight, EPS)


def no_grad(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    with torch.no_grad():
        return norm(x, residual, weight)


def inference(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    with torch.inference_mode():
        y, total = norm(x.clone(), residual.clone(), weight.clone())
        return y.clone(), total.clone()


def reentrant_checkpoint(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    return checkpoint(norm, x, residual, weight, use_reentrant=True)


def other_checkpoint(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    return checkpoint(norm, x, residual, weight, use_reentrant=False)


CONTEXTS = [norm, no_grad, inference, reentrant_checkpoint, other_checkpoint]
NEEDS = [(x, r, w) for x in (True, False) for r in (True, False) for w in (True, False)]


@pytest.mark.parametrize("needs", NEEDS, ids=str)
@pytest.mark.parametrize("context", CONTEXTS, ids=lambda context: context.__name__)
@pytest.mark.parametrize("dtype", support.X_DTYPES, ids=str)
def test_bits_are_the_same_in_every_context(dtype, context, needs, device):
    inputs = added.make_inputs(3, 5, HIDDEN, dtype=dtype, device=device)
    expected = added.reference_outputs(inputs)
    leaves = leaves_of(inputs, needs)
    if context is reentrant_checkpoint and not any(needs):
        pytest.skip("torch warns that such a checkpoint has no gradient")
    y, total = context(*leaves)
    assert_bitwise_equal(y.detach(), expected.y, "y")
    assert_bitwise_equal(total.detach(), expected.sum, "sum")
    if not y.requires_grad:
        assert context in (no_grad, inference) or not any(needs)
        return
    outputs, grads = (y, total), (inputs.grad_y, inputs.grad_sum)
    if not total.requires_grad:
        assert not any(needs[:2])
        outputs, grads = outputs[:1], grads[:1]
    torch.autograd.backward(outputs, grads)
    for leaf, wanted, name in zip(leaves, needs, expected._fields[2:], strict=True):
        assert (leaf.grad is not None) == wanted
        if wanted:
            assert_bitwise_equal(leaf.grad, getattr(expected, name), name)


@pytest.mark.parametrize("pair", support.DTYPE_PAIRS, ids=str)
@pytest.mark.parametrize("zero_centered", [False, True], ids=["plain", "zero_centered"])
def test_autograd_gives_the_references_bits(pair, zero_centered, device):
    inputs = added.make_inputs(
        7,
        300,
        dtype=pair[0],
        weight_dtype=pair[1],
        zero_centered_gamma=zero_centered,
        device=device,
    )
    actual = added.forward_backward(arn.add_rms_norm, inputs, EPS, zero_centered)
    support.assert_same(actual, added.reference_outputs(inputs, EPS, zero_centered))


# --- Which ops run --------------------------------------------------------------------------------


ADD_BACKWARD = OPS.add_rms_norm_backward.default
PLAIN_BACKWARD = OPS.rms_norm_backward.default


@pytest.mark.parametrize("needs", NEEDS, ids=str)
def test_each_gradient_is_made_once_and_only_where_it_is_wanted(needs, device):
    inputs = added.make_inputs(4, HIDDEN, device=device)
    with OpCalls() as seen:
        y, total = norm(*leaves_of(inputs, needs))
        assert y.requires_grad == any(needs)
        assert total.requires_grad == any(needs[:2])
        if not any(needs):
            assert seen.ops == [OPS.add_rms_norm.default]
            return
        used = (y * 1.0).sum() + (total * 1.0).sum()
        used.backward()
    backward = ADD_BACKWARD if any(needs[:2]) else PLAIN_BACKWARD
    assert seen.ops == [OPS.add_rms_norm_forward.default, backward]
    assert tuple(seen.calls[1][1][-1]) == (any(needs[:2]), needs[2])


def test_without_the_sum_backward_is_rms_norms(device):
    inputs = added.make_inputs(4, HIDDEN, device=device)
    leaves = leaves_of(inputs)
    with OpCalls() as seen:
        grads = torch.autograd.grad(norm(*leaves)[0], leaves, inputs.grad_y)
    assert seen.ops == [OPS.add_rms_norm_forward.default, PLAIN_BACKWARD]
    total = inputs.x + inputs.residual
    plain = support.run_op(support.Inputs(total, inputs.weight, inputs.grad_y))
    for actual, name in zip(grads, ("grad_x", "grad_x", "grad_weight"), strict=True):
        assert_bitwise_equal(actual, getattr(plain, name), name)


def test_without_y_the_gradient_is_grad_sum(device):
    inputs = added.make_inputs(4, HIDDEN, device=device)
    inputs.grad_sum[0, :2] = torch.tensor([-0.0, torch.inf])
    x, residual, weight = leaves_of(inputs)
    with OpCalls() as seen:
        norm(x, residual, weight)[1].backward(inputs.grad_sum)
    assert seen.ops == [OPS.add_rms_norm_forward.default]
    assert_bitwise_equal(x.grad, inputs.grad_sum, "grad_x")
    assert_bitwise_equal(residual.grad, inputs.grad_sum, "grad_residual")
    assert weight.grad is None


def test_the_weights_gradient_alone_needs_no_grad_sum(device):
    inputs = added.make_inputs(4, HIDDEN, device=device)
    expected = added.run_op(inputs)
    leaves = leaves_of(inputs)
    outputs, grads = norm(*leaves), (inputs.grad_y, inputs.grad_sum)
    with OpCalls() as seen:
        (grad_weight,) = torch.autograd.grad(outputs, leaves[2], grads)
    assert seen.ops == [PLAIN_BACKWARD]
    assert tuple(seen.calls[0][1][-1]) == (False, True)
    assert_bitwise_equal(grad_weight, expected.grad_weight, "grad_weight")


@pytest.mark.parametrize("wanted", [0, 1], ids=["x", "residual"])
def test_one_of_the_two_gradients(wanted, device):
    inputs = added.make_inputs(4, HIDDEN, device=device)
    leaves = leaves_of(inputs)
    outputs, grads = norm(*leaves), (inputs.grad_y, inputs.grad_sum)
    (gradient,) = torch.autograd.grad(outputs, leaves[wanted], grads)
    assert_bitwise_equal(gradient, added.run_op(inputs).grad, "gradient")


def test_leaves_get_memory_of_their_own(device):
    inputs = added.make_inputs(4, HIDDEN, dtype=torch.float32, device=device)
    x, residual, weight = leaves_of(inputs)
    torch.autograd.backward(norm(x, residual, weight), (inputs.grad_y, inputs.grad_sum))
    expected = residual.grad.clone()
    x.grad.zero_()
    assert_bitwise_equal(residual.grad, expected, "grad_residual")
    inputs.grad_sum.zero_()
    assert_bitwise_equal(residual.grad, expected, "grad_residual")


def test_gradients_accumulate_over_two_calls(device):
    inputs = added.make_inputs(4, HIDDEN, dtype=torch.float32, device=device)
    once = added.run_op(inputs)
    x, residual, weight = leaves_of(inputs)
    for _ in range(2):
        torch.autograd.backward(norm(x, residual, weight), (inputs.grad_y, inputs.grad_sum))
    for leaf, gradient in ((x, once.grad), (residual, once.grad), (weight, once.grad_weight)):
        assert_bitwise_equal(leaf.grad, gradient * 2, "gradient")


def test_an_unwanted_gradient_has_no_memory(device):
    inputs = added.make_inputs(4, HIDDEN, device=device)
    _, total, rstd, *_ = added.run_op(inputs)
    for wanted in ([True, False], [False, True]):
        grads = OPS.add_rms_norm_backward(
            inputs.grad_y, inputs.grad_sum, total, inputs.weight, rstd, False, wanted
        )
        for gradient, asked in zip(grads, wanted, strict=True):
            assert gradient.untyped_storage().nbytes() == 0 or asked


# --- A residual stream ----------------------------------------------------------------------------


def test_a_residual_stream_has_the_bits_of_the_plain_ops_forward(device):
    """Layers as a model has them: y of each is fed back, sum is the stream."""
    inputs = added.make_inputs(6, HIDDEN, device=device)
    weights = [nn.Parameter(inputs.weight * (1 + 0.1 * i)) for i in range(4)]

    def fused(x: Tensor, stream: Tensor) -> tuple[Tensor, Tensor]:
        for weight in weights:
            x, stream = arn.add_rms_norm(x, stream, weight, EPS)
        return x, stream

    def plain(x: Tensor, stream: Tensor) -> tuple[Tensor, Tensor]:
        for weight in weights:
            stream = x + stream
            x = arn.rms_norm(stream, weight, EPS)
        return x, stream

    for actual, expected in zip(fused(*inputs[:2]), plain(*inputs[:2]), strict=True):
        assert_bitwise_equal(actual.detach(), expected.detach(), "output")


def test_the_graph_is_freed():
    """sum is an output that the node keeps: were it kept with its history, both would leak."""

    class Hook:
        def __call__(self, *grads: object) -> None:
            pass

    y, total = norm(*leaves_of(added.make_inputs(4, HIDDEN)))
    hook = Hook()
    total.grad_fn.register_hook(hook)
    node_has_hook = weakref.ref(hook)
    gc.disable()
    try:
        del hook, y
        assert node_has_hook() is not None
        del total
        assert node_has_hook() is None
    finally:
        gc.enable()


# --- What autograd keeps --------------------------------------------------------------------------


def test_saved_tensor_hooks_see_sum_weight_and_rstd(device):
    inputs = added.make_inputs(4, HIDDEN, device=device)
    expected = added.forward_backward(arn.add_rms_norm, inputs)
    packed = []

    def pack(tensor: Tensor) -> Tensor:
        packed.append(tensor.detach())
        return tensor.detach().cpu()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda kept: kept.to(device)):
        actual = added.forward_backward(arn.add_rms_norm, inputs)
    support.assert_same(actual, expected)
    assert len(packed) == 3
    assert_bitwise_equal(packed[0], expected.sum, "sum")
    assert_bitwise_equal(packed[1], inputs.weight, "weight")
    assert packed[2].shape == inputs.x.shape[:-1]


@pytest.mark.parametrize("changed", ["sum", "weight"])
def test_changing_a_saved_tensor_raises(changed, device):
    inputs = added.make_inputs(4, HIDDEN, device=device)
    x, residual, weight = leaves_of(inputs)
    y, total = norm(x, residual, weight)
    with torch.no_grad():
        {"sum": total, "weight": weight}[changed].mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward(inputs.grad_y)


@pytest.mark.parametrize("changed", ["x", "residual", "y"])
def test_what_is_not_saved_may_be_changed(changed, device):
    inputs = added.make_inputs(4, HIDDEN, dtype=torch.float32, device=device)
    expected = added.run_op(inputs)
    x, residual, weight = leaves_of(inputs)
    y, total = norm(x, residual, weight)
    with torch.no_grad():
        {"x": x, "residual": residual, "y": y}[changed].add_(1)
    torch.autograd.backward((y, total), (inputs.grad_y, inputs.grad_sum))
    assert_bitwise_equal(x.grad, expected.grad, "grad_x")


def test_backward_twice_over_a_retained_graph(device):
    inputs = added.make_inputs(4, HIDDEN, device=device)
    leaves = leaves_of(inputs)
    outputs, grads = norm(*leaves), (inputs.grad_y, inputs.grad_sum)
    first = torch.autograd.grad(outputs, leaves, grads, retain_graph=True)
    second = torch.autograd.grad(outputs, leaves, grads)
    for one, other in zip(first, second, strict=True):
        assert_bitwise_equal(one, other, "gradient")
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        torch.autograd.grad(outputs, leaves, grads)


def test_arguments_are_left_as_they_were(device):
    inputs = added.make_inputs(4, HIDDEN, device=device)
    kept = [tensor.clone() for tensor in inputs]
    versions = [tensor._version for tensor in inputs]
    with torch.no_grad():
        outputs = norm(*inputs[:3])
    added.forward_backward(arn.add_rms_norm, inputs)
    memory = {tensor.untyped_storage().data_ptr() for tensor in inputs}
    assert not memory & {output.untyped_storage().data_ptr() for output in outputs}
    for tensor, copy, version in zip(inputs, kept, versions, strict=True):
        assert_bitwise_equal(tensor, copy, "argument")
        assert tensor._version == version


def test_the_node_names_the_op():
    y, total = norm(*leaves_of(added.make_inputs(4, HIDDEN)))
    assert y.grad_fn is total.grad_fn
    assert y.grad_fn.name() == "AutomodelAddRmsNormBackward"


@pytest.mark.parametrize("grad_dtype", [torch.bfloat16, torch.float32], ids=str)
def test_autograd_casts_gradients_of_a_third_dtype(grad_dtype, device):
    inputs = added.make_inputs(5, 300, dtype=torch.float16, device=device)
    other = inputs._replace(
        grad_y=inputs.grad_y.to(grad_dtype), grad_sum=inputs.grad_sum.to(grad_dtype)
    )
    cast = inputs._replace(grad_y=other.grad_y.half(), grad_sum=other.grad_sum.half())
    support.assert_same(
        added.forward_backward(arn.add_rms_norm, other),
        added.forward_backward(arn.add_rms_norm, cast),
    )
