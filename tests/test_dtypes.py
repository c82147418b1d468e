"""Outputs have x's dtype and grad_weight has weight's, with autocast or without."""

import automodel_rms_norm as arn
import pytest
import support
import torch
from torch.utils._python_dispatch import TorchDispatchMode


class Recorder(TorchDispatchMode):
    """The names of the ops that run."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.ops.append(func.name())
        return func(*args, **(kwargs or {}))


def same_value_in_every_dtype(shape: tuple[int, ...]) -> support.Inputs:
    """Inputs with few enough bits that casting them loses nothing."""
    x, weight, grad_y = support.make_inputs(*shape)
    return support.Inputs(*((tensor * 8).round() / 8 for tensor in (x, weight, grad_y)))


@pytest.mark.case("sglang-32807")
@pytest.mark.parametrize("pair", support.DTYPE_PAIRS, ids=str)
def test_dtypes_of_the_outputs(pair, device):
    dtype, weight_dtype = pair
    inputs = support.make_inputs(3, 40, dtype=dtype, weight_dtype=weight_dtype, device=device)
    y, rstd, grad_x, grad_weight = support.run_op(inputs)
    assert y.dtype == grad_x.dtype == dtype
    assert rstd.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert weight_dtype is None or grad_weight.dtype == weight_dtype


@pytest.mark.case("sglang-32807")
@pytest.mark.parametrize("dtype", support.X_DTYPES, ids=str)
@pytest.mark.parametrize("weight_dtype", support.LOW_WEIGHT_DTYPES, ids=str)
def test_the_dtype_of_weight_does_not_change_y(dtype, weight_dtype, device):
    x, weight, grad_y = (t.to(device) for t in same_value_in_every_dtype((5, 300)))
    inputs = support.Inputs(x.to(dtype), weight.to(weight_dtype), grad_y.to(dtype))
    expected = support.run_op(inputs._replace(weight=weight.float()))
    actual = support.run_op(inputs)
    support.assert_same(actual, expected, "y", "rstd", "grad_x")


@pytest.mark.case("pytorch-167308", "apex-979")
@pytest.mark.parametrize("autocast_dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("weight_dtype", support.LOW_WEIGHT_DTYPES, ids=str)
@pytest.mark.parametrize("dtype", support.X_DTYPES, ids=str)
def test_autocast_changes_nothing(dtype, weight_dtype, autocast_dtype, device):
    inputs = support.make_inputs(40, 300, dtype=dtype, weight_dtype=weight_dtype, device=device)
    expected = support.forward_backward(arn.rms_norm, inputs)
    with torch.autocast(device.type, dtype=autocast_dtype), Recorder() as recorder:
        assert torch.is_autocast_enabled(device.type)
        y = arn.rms_norm(inputs.x, inputs.weight, 1e-5)
        assert recorder.ops == ["automodel::rms_norm"]
        actual = support.forward_backward(arn.rms_norm, inputs)
    arn.testing.assert_bitwise_equal(y, expected.y, "y")
    support.assert_same(actual, expected)
    assert (actual.y.dtype, actual.grad_weight.dtype) == (dtype, weight_dtype)
    norms = [name for name in recorder.ops if "automodel" in name]
    assert norms[1:] == ["automodel::rms_norm_forward", "automodel::rms_norm_backward"]
    assert not any("copy" in name for name in recorder.ops)


@pytest.mark.case("sglang-32807")
@pytest.mark.parametrize("grad_dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_autograd_casts_a_grad_y_of_a_third_dtype(grad_dtype, device):
    inputs = support.make_inputs(5, 300, dtype=torch.float16, device=device)
    grad_y = inputs.grad_y.to(grad_dtype)
    actual = support.forward_backward(arn.rms_norm, inputs._replace(grad_y=grad_y))
    cast = inputs._replace(grad_y=grad_y.half())
    support.assert_same(actual, support.forward_backward(arn.rms_norm, cast))
