"""P6: errors against the formula in higher precision are within derived bounds that are tight."""

import math

import automodel_rms_norm as arn
import pytest
import support
import torch
from automodel_rms_norm import accuracy, bounds, formula
from automodel_rms_norm.accuracy import Inputs, Outputs, inaccuracies
from automodel_rms_norm.contexts import eager, norm_inputs
from torch import Tensor

DTYPES = support.X_DTYPES
KINDS = ["plain", "tiny", "huge", "spiky", "one_value"]
# Squares at the ends of the range of the type that is computed in; for float16 the ends of x's.
SMALL = {torch.bfloat16: -66, torch.float16: -16, torch.float32: -66, torch.float64: -520}
LARGE = {torch.bfloat16: 55, torch.float16: 12, torch.float32: 55, torch.float64: 490}


def make(
    kind: str,
    rows: int,
    hidden: int,
    dtype: torch.dtype,
    weight_dtype: torch.dtype | None,
    zero_centered_gamma: bool,
    device: torch.device | str = "cpu",
) -> Inputs:
    given = support.make_inputs(
        rows, hidden, dtype=torch.float64, weight_dtype=torch.float64, seed=hidden
    )
    x, weight = given.x, given.weight
    if kind == "tiny":
        x = x * 2.0 ** SMALL[dtype]
    elif kind == "huge":
        x = x * 2.0 ** LARGE[dtype]
    elif kind == "spiky":
        x[:, :: max(1, hidden // 3)] *= 1024
    elif kind == "one_value":
        x = torch.full_like(x, 3.0)
    if weight_dtype is None:
        weight = None
    else:
        weight = (weight - 1 if zero_centered_gamma else weight).to(weight_dtype)
    eps = 0.0 if kind == "tiny" and dtype != torch.float16 else 1e-6
    moved = (
        None if t is None else t.to(device) for t in (x.to(dtype), weight, given.grad_y.to(dtype))
    )
    return Inputs(*moved, eps)


def run(function, inputs: Inputs, *args: object) -> Outputs:
    return Outputs(**eager(lambda *given: function(*given, *args), norm_inputs(*inputs)))


@pytest.mark.parametrize("zero_centered_gamma", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("dtype", "weight_dtype"), support.DTYPE_PAIRS, ids=str)
def test_errors_are_within_the_bounds(dtype, weight_dtype, kind, zero_centered_gamma, device):
    shapes = [(3, 96)] if dtype == torch.float64 else [(1, 1), (5, 7), (21, 128), (9, 1000)]
    for rows, hidden in shapes:
        inputs = make(kind, rows, hidden, dtype, weight_dtype, zero_centered_gamma, device)
        outputs = run(arn.rms_norm, inputs, zero_centered_gamma)
        assert inaccuracies(outputs, inputs, zero_centered_gamma) == []


@pytest.mark.parametrize("hidden", [2688, 8192, 65537])
@pytest.mark.parametrize("dtype", DTYPES[:3], ids=str)
def test_errors_of_wide_rows_are_within_the_bounds(dtype, hidden, device):
    inputs = make("plain", 17, hidden, dtype, torch.float32, False, device)
    assert inaccuracies(run(arn.rms_norm, inputs), inputs) == []


def test_errors_of_many_rows_are_within_the_bounds(device):
    inputs = make("plain", 5001, 40, torch.float32, torch.float32, True, device)
    assert inaccuracies(run(arn.rms_norm, inputs, True), inputs, True) == []


def used_share(inputs: Inputs, outputs: Outputs) -> dict[str, float]:
    """The largest error of each output as a share of its bound."""
    x, weight, grad_y, eps = inputs
    exact = formula.exact_rms_norm(x, weight, eps, False, grad_y)
    limits = bounds.bounds(exact, grad_y, x.dtype, weight.dtype, False)
    parts = exact._asdict()
    shares = {}
    for name, actual, limit in zip(Outputs._fields, outputs, limits, strict=True):
        error = (actual.cpu().double() - parts[name] - parts[f"{name}_rest"]).abs()
        shares[name] = (error / limit).max().item()
    return shares


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bounds_are_near_the_errors(dtype, device):
    """Within a factor of 20 where A's roundings count, of 1.1 where the last rounding does."""
    inputs = make("plain", 9, 512, dtype, dtype, False, device)
    least = 0.9 if dtype.itemsize == 2 else 0.05
    for name, share in used_share(inputs, run(arn.rms_norm, inputs)).items():
        assert least < share <= 1, name


def test_float64_formula_agrees_with_decimals():
    inputs = make("spiky", 3, 50, torch.float32, torch.float32, True)
    in_float64 = formula.exact_rms_norm(*inputs[:2], inputs.eps, True, inputs.grad_y)
    eps = torch.tensor(inputs.eps).double().item()  # the eps of A = float32
    wide = [inputs.x.double(), inputs.weight, eps, True, inputs.grad_y.double()]
    in_decimals = formula.exact_rms_norm(*wide)
    for name, left, right in zip(formula.Exact._fields, in_float64, in_decimals, strict=True):
        if not name.endswith("_rest"):
            torch.testing.assert_close(left, right, rtol=2**-45, atol=2**-45, msg=name)
    assert float(in_decimals.y_rest.abs().max()) > 0
    assert bool((in_decimals.y_rest.abs() <= in_decimals.y.abs() * 2**-53).all())


def test_roundings_of_the_tree():
    """Counted by hand: chains of fma, 3 slot joins, joins of threads; leaf rows and levels."""
    assert bounds.row_sum_roundings(1) == 1 + 3 + 4
    assert bounds.row_sum_roundings(128) == 1 + 3 + 4
    assert bounds.row_sum_roundings(136) == 2 + 3 + 4
    assert bounds.row_sum_roundings(4096) == 2 + 3 + 8
    assert bounds.row_sum_roundings(1 << 20) == 32 + 3 + 12
    assert [bounds.tree_roundings(rows) for rows in (0, 1, 8, 9, 17, 4096)] == [0, 1, 8, 9, 10, 17]


# --- Faulty formulas, each caught -----------------------------------------------------------------


def norm(x: Tensor, weight: Tensor, rstd: Tensor) -> Tensor:
    return (x.float() * rstd * weight.float()).to(x.dtype)


def rstd_of(x: Tensor, eps: float) -> Tensor:
    return torch.rsqrt(x.float().square().mean(-1, keepdim=True) + eps)


def offset_dropped(x, weight, eps):
    return norm(x, weight, rstd_of(x, eps))


def offset_in_weight_dtype(x, weight, eps):
    return norm(x, weight + 1, rstd_of(x, eps))


def rstd_in_bfloat16(x, weight, eps):
    return norm(x, weight.float() + 1, rstd_of(x, eps).bfloat16().float())


def rstd_some_ulp_off(x, weight, eps):
    return norm(x, weight.float() + 1, rstd_of(x, eps) * (1 + 2.0**-18))


def mean_in_bfloat16(x, weight, eps):
    mean = x.float().square().mean(-1, keepdim=True).bfloat16().float()
    return norm(x, weight.float() + 1, torch.rsqrt(mean + eps))


def eps_outside_the_root(x, weight, eps):
    mean = x.float().square().mean(-1, keepdim=True)
    return norm(x, weight.float() + 1, 1 / (mean.sqrt() + 1e-2))


def cast_before_weight(x, weight, eps):
    return (x.float() * rstd_of(x, eps)).to(x.dtype) * (weight + 1).to(x.dtype)


class WeightTwice(torch.autograd.Function):
    """Megatron's defect: grad_x with the weight in it twice."""

    @staticmethod
    def forward(ctx, x, weight, eps):
        ctx.save_for_backward(x, weight)
        ctx.eps = eps
        return arn.rms_norm(x, weight, eps, True)

    @staticmethod
    def backward(ctx, grad_y):
        x, weight = ctx.saved_tensors
        rstd = torch.ops.automodel.rms_norm_forward(x, weight, ctx.eps, True)[1]
        doubled = (grad_y.float() * (weight.float() + 1)).to(x.dtype)
        backward = torch.ops.automodel.rms_norm_backward
        grad_x, _ = backward(doubled, x, weight, rstd, True, [True, False])
        _, grad_weight = backward(grad_y, x, weight, rstd, True, [False, True])
        return grad_x, grad_weight, None


def weight_twice(x, weight, eps):
    return WeightTwice.apply(x, weight, eps)


class ScaledGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tensor, factor):
        ctx.factor = factor
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.factor, None


def grad_weight_off(x, weight, eps):
    return arn.rms_norm(x, ScaledGradient.apply(weight, 1 + 2.0**-6), eps, True)


@pytest.mark.parametrize(
    ("fault", "dtype", "found"),
    [
        (offset_dropped, torch.float32, "y, grad_x"),
        (offset_dropped, torch.bfloat16, "y, grad_x"),
        (offset_in_weight_dtype, torch.bfloat16, "y, grad_x"),
        (rstd_in_bfloat16, torch.float32, "y, grad_x, grad_weight"),
        (rstd_in_bfloat16, torch.bfloat16, "y"),
        (rstd_some_ulp_off, torch.float32, "y, grad_x, grad_weight"),
        (mean_in_bfloat16, torch.bfloat16, "y"),
        (eps_outside_the_root, torch.float32, "y"),
        (cast_before_weight, torch.bfloat16, "y"),
        (weight_twice, torch.float32, "grad_x"),
        (weight_twice, torch.bfloat16, "grad_x"),
        (grad_weight_off, torch.bfloat16, "grad_weight"),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_a_faulty_formula_exceeds_the_bounds(fault, dtype, found):
    inputs = make("plain", 33, 256, dtype, dtype, True)
    names = {difference.name for difference in inaccuracies(run(fault, inputs), inputs, True)}
    assert set(found.split(", ")) <= names


def test_the_formula_itself_is_within_the_bounds():
    """The faults above start from this one, so that what is found is the fault."""
    inputs = make("plain", 33, 256, torch.bfloat16, torch.bfloat16, True)
    outputs = run(lambda x, w, eps: norm(x, w.float() + 1, rstd_of(x, eps)), inputs)
    # Autograd rounds t to bfloat16, so that only y is the contract's.
    assert inaccuracies(Outputs(outputs.y), inputs, True) == []


def test_what_an_inaccuracy_says():
    inputs = make("plain", 4, 16, torch.float32, torch.float32, False)
    outputs = run(arn.rms_norm, inputs)
    y = outputs.y.clone()
    y[2, 3] += 0.25
    (found,) = inaccuracies(outputs._replace(y=y), inputs)
    assert found.name == "y"
    assert found.coordinate == (2, 3)
    assert "1 of 64 elements are off by more than its bound; the first by 0.25, bound" in str(found)


@pytest.mark.parametrize(
    ("value", "found"),
    [(1 + 2.0**-6, False), (1 + 2.0**-7, False), (1.0, False), (1 - 2.0**-8, True)],
)
def test_one_ulp_is_counted_from_the_result_rounded_once(value, found):
    """By way of float32 it would be 1.0, and the numbers around that would be let through."""
    exact = torch.tensor([[1 + 2.0**-8 + 2.0**-40]], dtype=torch.float64)  # rounds to 1 + 2^-7
    assert exact.bfloat16().item() == exact.float().bfloat16().item() == 1.0
    y = torch.tensor([[value]], dtype=torch.bfloat16)
    # A bound that lets everything through leaves the count alone.
    limit = torch.full_like(exact, math.inf)
    difference = accuracy._exceeding("y", y, exact, torch.zeros_like(exact), limit)
    assert (difference is not None) == found
    if found:
        assert "more than 1 ulp" in str(difference)
        assert difference.expected == 1 + 2.0**-7
        assert difference.ulp == 2


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_not_finite_is_inaccurate(value):
    inputs = make("plain", 2, 16, torch.bfloat16, torch.bfloat16, False)
    outputs = run(arn.rms_norm, inputs)
    grad_x = outputs.grad_x.clone()
    grad_x[1, 1] = value
    (found,) = inaccuracies(outputs._replace(grad_x=grad_x), inputs)
    assert (found.name, found.coordinate) == ("grad_x", (1, 1))
