"""PyTorch's own samples of nn.functional.rms_norm, shipped in torch.testing._internal."""

from typing import NamedTuple

import automodel_rms_norm as arn
import pytest
import support
import torch
from automodel_rms_norm.accuracy import Inputs as WithEps
from automodel_rms_norm.accuracy import inaccuracies
from automodel_rms_norm.bounds import bounds
from automodel_rms_norm.formula import exact_rms_norm
from torch import Tensor
from torch.testing._internal.common_methods_invocations import op_db

(OP_INFO,) = [info for info in op_db if info.name == "nn.functional.rms_norm"]


class Sample(NamedTuple):
    """A sample whose normalised dimensions are joined to one, which is what the op normalises."""

    x: Tensor
    weight: Tensor | None
    eps: float


def samples(dtype: torch.dtype, device: torch.device) -> list[Sample]:
    found = []
    for sample in OP_INFO.sample_inputs(device, dtype, requires_grad=False):
        normalized_shape, weight = (*sample.args, None)[:2]
        x = sample.input.flatten(-len(normalized_shape))
        weight = weight if weight is None else weight.flatten()
        eps = sample.kwargs.get("eps", torch.finfo(dtype).eps)  # what torch takes for None
        found.append(Sample(x, weight, eps))
    return found


def split(dtype: torch.dtype, device: torch.device) -> tuple[list[Sample], list[Sample]]:
    found = samples(dtype, device)
    good = [sample for sample in found if sample.eps >= 0]
    bad = [sample for sample in found if sample.eps < 0]
    assert len(good) >= 5, "PyTorch has fewer samples than in release 2.11"
    assert len(bad) >= 1, "PyTorch has no sample of a negative eps any more"
    assert any(sample.weight is None for sample in good)
    assert any(sample.x.numel() == 0 for sample in good)
    return good, bad


@pytest.mark.parametrize("dtype", support.X_DTYPES, ids=str)
def test_samples_are_within_the_bounds_of_the_formula(dtype, device):
    for x, weight, eps in split(dtype, device)[0]:
        grad_y = torch.linspace(-2, 2, x.numel(), device=device).to(dtype).view(x.shape)
        inputs = support.Inputs(x, weight, grad_y)
        outputs = support.forward_backward(arn.rms_norm, inputs, eps)
        support.assert_same(outputs, support.reference_outputs(inputs, eps))
        if x.numel():
            assert not inaccuracies(outputs, WithEps(x, weight, grad_y, eps))


@pytest.mark.parametrize("dtype", support.X_DTYPES, ids=str)
def test_samples_agree_with_torch_in_float64(dtype, device):
    for x, weight, eps in split(dtype, device)[0]:
        if not x.numel():
            continue
        y = arn.rms_norm(x, weight, eps)
        exact = exact_rms_norm(x, weight, eps, False, x)
        weight_dtype = None if weight is None else weight.dtype
        # Rows have at most 6 elements, so torch's terms, in any order, pass fewer roundings than
        # the 8 of row_sum. eps as the op has it.
        assert x.shape[-1] <= 6
        ours, theirs = (
            bounds(exact, x, rounded, weight_dtype, False).y for rounded in (dtype, torch.float64)
        )
        weight = weight if weight is None else weight.double()
        eps = torch.tensor(eps, dtype=arn.reference.accumulate_dtype(dtype)).item()
        expected = torch.nn.functional.rms_norm(x.double(), x.shape[-1:], weight, eps)
        error = (y.double() - expected).abs().cpu().reshape(ours.shape)
        assert (error <= ours + theirs).all()


@pytest.mark.parametrize("dtype", support.X_DTYPES, ids=str)
def test_samples_of_a_negative_eps_raise(dtype, device):
    for x, weight, eps in split(dtype, device)[1]:
        with pytest.raises(ValueError, match=f"rms_norm: eps must be .* got {eps}"):
            arn.rms_norm(x, weight, eps)


def test_error_inputs_raise(device):
    errors = list(OP_INFO.error_inputs(device))
    assert len(errors) >= 3, "PyTorch has fewer error inputs than in release 2.11"
    for error in errors:
        x = error.sample_input.input
        normalized_shape, weight, eps = error.sample_input.args
        if weight is None:  # the op's weight says what is normalised
            weight = torch.ones(normalized_shape, device=device)
        with pytest.raises(RuntimeError, match=r"rms_norm: weight must have"):
            arn.rms_norm(x, weight, eps)
