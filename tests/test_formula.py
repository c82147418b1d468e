"""The op against the formula: in higher precision, eager and compiled; and faulty versions of the
formula, which have to be seen."""

from collections.abc import Callable

import automodel_rms_norm as arn
import baselines
import pytest
import support
import torch
from automodel_rms_norm import bounds
from automodel_rms_norm.accuracy import Inputs as WithEps
from automodel_rms_norm.accuracy import Outputs, inaccuracies
from automodel_rms_norm.formula import exact_rms_norm
from torch import Tensor

EPS = 1e-5
ZERO_CENTERED = pytest.mark.parametrize(
    "zero_centered", [False, True], ids=["plain", "zero_centered"]
)


@pytest.fixture
def any_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bounds for any order of summation: a term passes at most as many roundings as the sum has
    terms. 8 more allow for autograd's own arrangement and a compiler's sqrt and division."""
    monkeypatch.setattr(bounds, "row_sum_roundings", lambda hidden: hidden + 8)
    monkeypatch.setattr(bounds, "tree_roundings", lambda rows: rows + 8)


def make(*shape: int, dtype=torch.float32, zero_centered=False, device="cpu") -> support.Inputs:
    return support.make_inputs(
        *shape,
        dtype=dtype,
        weight_dtype=dtype,
        zero_centered_gamma=zero_centered,
        device=device,
    )


def wrong_outputs(
    inputs: support.Inputs,
    zero_centered: bool,
    y: Tensor | None = None,
    grad_x: Tensor | None = None,
    grad_weight: Tensor | None = None,
) -> list[str]:
    """The names of the outputs with an element that is not within its bound of the formula."""
    found = inaccuracies(Outputs(y, grad_x, grad_weight), WithEps(*inputs, EPS), zero_centered)
    return [difference.name for difference in found]


@ZERO_CENTERED
@pytest.mark.parametrize("dtype", support.X_DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(7, 1), (33, 17), (9, 128), (3, 5, 100), (2, 1000)], ids=str)
def test_the_op_is_within_its_bounds(shape, dtype, zero_centered, device):
    inputs = make(*shape, dtype=dtype, zero_centered=zero_centered, device=device)
    outputs = support.forward_backward(arn.rms_norm, inputs, EPS, zero_centered)
    assert not wrong_outputs(inputs, zero_centered, *outputs)


def assert_agreement(
    formula: Callable[..., Tensor], inputs: support.Inputs, zero_centered: bool
) -> support.Outputs:
    """The op and `formula`, which torch runs, are both within the bounds, so near each other."""
    ours = support.forward_backward(arn.rms_norm, inputs, EPS, zero_centered)
    theirs = support.forward_backward(formula, inputs, EPS, zero_centered)
    assert not wrong_outputs(inputs, zero_centered, *ours)
    assert not wrong_outputs(inputs, zero_centered, *theirs)
    x, weight, grad_y = inputs
    exact = exact_rms_norm(x, weight, EPS, zero_centered, grad_y)
    allowed = bounds.bounds(exact, grad_y, x.dtype, weight.dtype, zero_centered)
    for our, their, bound in zip(ours, theirs, allowed, strict=True):
        error = (our.double() - their.double()).abs().cpu().reshape(bound.shape)
        assert (error <= 2 * bound).all()
    return ours


MIXED = dict(
    zip(
        support.X_DTYPES,
        [torch.float32, torch.bfloat16, torch.bfloat16, torch.float32],
        strict=True,
    )
)
MIXED_WEIGHT = pytest.mark.parametrize("mixed", [False, True], ids=["one_dtype", "mixed_dtypes"])


def make_mixed(shape, dtype, mixed, zero_centered, device) -> support.Inputs:
    return support.make_inputs(
        *shape,
        dtype=dtype,
        weight_dtype=MIXED[dtype] if mixed else dtype,
        zero_centered_gamma=zero_centered,
        device=device,
    )


@ZERO_CENTERED
@MIXED_WEIGHT
@pytest.mark.parametrize("dtype", support.X_DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(9, 1), (7, 129), (2, 3, 100), (1, 1000)], ids=str)
def test_the_op_agrees_with_the_formula_run_by_torch(
    shape, dtype, mixed, zero_centered, device, any_order
):
    inputs = make_mixed(shape, dtype, mixed, zero_centered, device)
    assert_agreement(baselines.formula, inputs, zero_centered)


@ZERO_CENTERED
@pytest.mark.parametrize("form", ["static", "dynamic"])
@pytest.mark.parametrize(
    ("dtype", "mixed"),
    [
        (torch.bfloat16, False),
        (torch.float16, False),
        (torch.float32, False),
        (torch.bfloat16, True),
    ],
    ids=str,
)
def test_the_op_agrees_with_the_formula_compiled(
    dtype, mixed, form, zero_centered, device, any_order, fresh_dynamo
):
    formula = torch.compile(baselines.formula, dynamic=form == "dynamic", fullgraph=True)
    for rows in (40, 9) if form == "dynamic" else (40,):
        inputs = make_mixed((rows, 1000), dtype, mixed, zero_centered, device)
        ours = assert_agreement(formula, inputs, zero_centered)
        for context in (torch.no_grad, torch.inference_mode):
            with context():
                y = arn.rms_norm(inputs.x, inputs.weight, EPS, zero_centered)
                their = formula(inputs.x, inputs.weight, EPS, zero_centered)
            arn.testing.assert_bitwise_equal(y, ours.y, "y")
            assert not wrong_outputs(inputs, zero_centered, their)


@pytest.mark.case("Megatron-LM-PR-6859")
@pytest.mark.parametrize("dtype", support.X_DTYPES, ids=str)
def test_zero_centered_gamma_adds_one_in_the_accumulate_type(dtype, device):
    inputs = make(9, 300, dtype=dtype, zero_centered=True, device=device)
    gain = inputs.weight.to(support.run_op(inputs).rstd.dtype) + 1
    actual = support.run_op(inputs, EPS, True)
    expected = support.run_op(inputs._replace(weight=gain), EPS, False)
    support.assert_same(actual, expected, "y", "rstd", "grad_x")
    grad_weight = expected.grad_weight.to(dtype)
    arn.testing.assert_bitwise_equal(actual.grad_weight, grad_weight, "grad_weight")


@pytest.mark.case("Megatron-LM-PR-6859")
def test_an_ignored_offset_is_caught(device, any_order):
    inputs = make(9, 300, zero_centered=True, device=device)
    x, weight, _ = inputs
    faulty = baselines.megatron_offset_ignored(x, weight, EPS, True)
    assert wrong_outputs(inputs, True, faulty) == ["y"]
    assert not wrong_outputs(inputs, True, arn.rms_norm(x, weight, EPS, True))
    # Without the offset there is nothing to see.
    assert not wrong_outputs(
        inputs, False, baselines.megatron_offset_ignored(x, weight, EPS, False)
    )


@pytest.mark.case("Megatron-LM-PR-6859")
@ZERO_CENTERED
def test_a_weight_that_is_applied_twice_is_caught(zero_centered, device, any_order):
    inputs = make(9, 300, zero_centered=zero_centered, device=device)

    def faulty(inputs: support.Inputs) -> Tensor:
        x, weight, grad_y = inputs
        return baselines.megatron_weight_twice(grad_y, x, weight, EPS, zero_centered)

    assert wrong_outputs(inputs, zero_centered, None, faulty(inputs)) == ["grad_x"]
    op = support.run_op(inputs, EPS, zero_centered)
    assert not wrong_outputs(inputs, zero_centered, op.y, op.grad_x, op.grad_weight)
    # With gains of one, as in Megatron's own test, nobody sees it.
    ones = inputs._replace(weight=torch.full_like(inputs.weight, 0.0 if zero_centered else 1.0))
    assert not wrong_outputs(ones, zero_centered, None, faulty(ones))


@pytest.mark.case("Liger-74")
@pytest.mark.parametrize("dtype", support.X_DTYPES, ids=str)
def test_zero_centered_zeros_are_ones(dtype, device):
    inputs = make(9, 300, dtype=dtype, device=device)
    zeros = inputs._replace(weight=torch.zeros_like(inputs.weight))
    ones = inputs._replace(weight=torch.ones_like(inputs.weight))
    none = inputs._replace(weight=None)
    expected = support.run_op(ones, EPS, False)
    support.assert_same(support.run_op(zeros, EPS, True), expected)
    support.assert_same(support.run_op(none, EPS, True), expected, "y", "rstd", "grad_x")


@pytest.mark.case("vLLM-42325")
def test_y_is_rounded_once_after_the_weight(device):
    inputs = make(64, 1024, dtype=torch.bfloat16, device=device)
    results = support.run_op(inputs)
    x, weight, y, rstd = (t.cpu() for t in (*inputs[:2], *results[:2]))
    xhat = x.float() * rstd[:, None]
    arn.testing.assert_bitwise_equal(y, (xhat * weight.float()).bfloat16(), "y")
    assert (y != xhat.bfloat16() * weight).double().mean() > 0.1
    # With weights of one the two orders are the same.
    ones = torch.ones_like(inputs.weight)
    arn.testing.assert_bitwise_equal(arn.rms_norm(inputs.x, ones, EPS), xhat.bfloat16(), "y")
