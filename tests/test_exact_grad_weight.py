"""exact_grad_weight in one process: gradient accumulation. exact_checks.py has the ranks."""

import automodel_rms_norm as arn
import pytest
import support
import torch
from automodel_rms_norm.distributed import exact_grad_weight, join_grad_weights
from automodel_rms_norm.testing import assert_bitwise_equal
from torch import nn


def whole(rows: int = 192, hidden: int = 200) -> tuple[support.Inputs, torch.Tensor]:
    """Inputs and their grad_weight."""
    inputs = support.make_inputs(rows, hidden, weight_dtype=torch.float32)
    return inputs, support.run_op(inputs).grad_weight


def backward(inputs: support.Inputs, weight: nn.Parameter, begin: int, end: int) -> None:
    y = arn.rms_norm(inputs.x[begin:end], weight, 1e-5)
    y.backward(inputs.grad_y[begin:end])


@pytest.mark.parametrize("rows", [8, 16, 32, 64, 128])
@pytest.mark.parametrize("total", [8, 64, 120, 192, 201])
def test_micro_batches_on_tree_boundaries_give_the_whole_batchs_bits(total, rows):
    inputs, expected = whole(total)
    weight = nn.Parameter(inputs.weight)
    with exact_grad_weight([weight], rows):
        for begin in range(0, total, rows):
            backward(inputs, weight, begin, begin + rows)
    assert_bitwise_equal(weight.grad, expected, "grad_weight")


def test_accumulation_alone_gives_other_bits():
    """What makes the test above a test."""
    inputs, expected = whole()
    weight = nn.Parameter(inputs.weight)
    for begin in range(0, 192, 8):
        backward(inputs, weight, begin, begin + 8)
    assert not torch.equal(weight.grad, expected)


def test_compiled_and_checkpointed_micro_batches():
    inputs, expected = whole()
    weight = nn.Parameter(inputs.weight)
    norm = torch.compile(arn.rms_norm, backend="aot_eager")
    with exact_grad_weight([weight], 64):
        for begin in range(0, 192, 64):
            x, grad_y = inputs.x[begin : begin + 64], inputs.grad_y[begin : begin + 64]
            y = torch.utils.checkpoint.checkpoint(norm, x, weight, 1e-5, use_reentrant=False)
            y.backward(grad_y)
    assert_bitwise_equal(weight.grad, expected, "grad_weight")


def test_a_weight_without_a_gradient_is_left_alone():
    weights = [nn.Parameter(torch.ones(200)), nn.Parameter(torch.ones(200))]
    inputs, expected = whole(64)
    with exact_grad_weight(weights, 64):
        backward(inputs, weights[0], 0, 64)
    assert_bitwise_equal(weights[0].grad, expected, "grad_weight")
    assert weights[1].grad is None


def test_an_error_leaves_what_autograd_accumulated():
    inputs, expected = whole(64)
    weight = nn.Parameter(inputs.weight)

    def fail() -> None:
        with exact_grad_weight([weight], 64):
            backward(inputs, weight, 0, 64)
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert not weight._backward_hooks
    assert_bitwise_equal(weight.grad, expected, "grad_weight")


@pytest.mark.parametrize("rows", [0, -8, 7, 12, 24, 4096 * 12])
def test_rows_off_the_trees_boundaries_are_refused(rows):
    message = f"rows must be 8 times a power of two, got {rows}"
    with pytest.raises(ValueError, match=message), exact_grad_weight([], rows):
        pass


def test_a_weight_that_is_rounded_is_refused():
    weight = nn.Parameter(torch.ones(8, dtype=torch.bfloat16))
    with pytest.raises(TypeError, match=r"a weight must be float32 or float64, got torch.bfloat16"):
        exact_grad_weight([weight], 8).__enter__()
    with pytest.raises(TypeError, match="each of partials must be float32"):
        join_grad_weights([weight])


def test_a_weight_with_a_gradient_is_refused():
    weight = nn.Parameter(torch.ones(8))
    weight.grad = torch.ones(8)
    with pytest.raises(ValueError, match="has a gradient already; call zero_grad first"):
        exact_grad_weight([weight], 8).__enter__()


def test_a_weight_that_gets_no_gradient_is_refused_before_anything_is_hooked():
    weight = nn.Parameter(torch.ones(8))
    for frozen in (torch.ones(8), weight * 2):
        with pytest.raises(ValueError, match="must be a leaf that requires a gradient"):
            exact_grad_weight([weight, frozen], 8).__enter__()
    with pytest.raises(TypeError, match="must be a tensor, got None"):
        exact_grad_weight([weight, arn.RMSNorm(8, elementwise_affine=False).weight], 8).__enter__()
    assert not weight._backward_hooks


def test_no_weights_are_refused():
    with pytest.raises(ValueError, match="weights must hold at least one tensor, got none"):
        exact_grad_weight([], 8).__enter__()


def test_no_partials_are_refused():
    with pytest.raises(ValueError, match="at least one tensor"):
        join_grad_weights([])


def test_partials_of_several_kinds_cannot_be_joined() -> None:
    with pytest.raises(ValueError, match=r"one shape, got .*float32 \(4,\) and .*float32 \(8,\)"):
        join_grad_weights([torch.ones(8), torch.ones(4)])
    with pytest.raises(ValueError, match=r"one dtype and one shape, got .*float32.*and.*float64"):
        join_grad_weights([torch.ones(8), torch.ones(8).double()])


def test_partials_may_come_from_a_generator() -> None:
    partials = [torch.rand(8) for _ in range(5)]
    assert_bitwise_equal(join_grad_weights(p for p in partials), join_grad_weights(partials), "sum")
