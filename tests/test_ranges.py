"""Values at the ends of the range: the formula's own answer, in the reference's bits, on every
implementation."""

import math

import automodel_rms_norm as arn
import pytest
import support
import torch
from automodel_rms_norm.accuracy import Inputs as WithEps
from automodel_rms_norm.accuracy import Outputs, inaccuracies
from automodel_rms_norm.formula import exact_rms_norm

INF, NAN = math.inf, math.nan


def with_x(fill, dtype=torch.float32, weight_dtype=torch.float32, shape=(3, 40)) -> support.Inputs:
    inputs = support.make_inputs(*shape, dtype=dtype, weight_dtype=weight_dtype)
    x = fill(inputs.x.double()) if callable(fill) else inputs.x.double().fill_(fill)
    return inputs._replace(x=x.to(dtype))


def check(inputs: support.Inputs, device: torch.device, eps: float = 1e-5) -> support.Results:
    """The op's results on `device`, after they were found to be the reference's bits."""
    on_device = support.Inputs(*(t if t is None else t.to(device) for t in inputs))
    actual = support.run_op(on_device, eps)
    support.assert_same(actual, support.run_reference(inputs, eps))
    return support.Results(*(t if t is None else t.cpu() for t in actual))


def assert_within_bounds(results: support.Results, inputs: support.Inputs) -> None:
    outputs = Outputs(results.y, results.grad_x, results.grad_weight)
    assert not inaccuracies(outputs, WithEps(*inputs, 1e-5))


@pytest.mark.case("pytorch-PR-134106")
@pytest.mark.parametrize("fill", [256.0, 1000.0, 30000.0, 60000.0, -60000.0])
def test_large_float16_rows_are_right(fill, implementation):
    inputs = with_x(fill, torch.float16, torch.float16)
    results = check(inputs, implementation)
    assert_within_bounds(results, inputs)
    # By P6 within 1 ulp of the formula's own answer, rounded: the weight.
    expected = math.copysign(1.0, fill) * inputs.weight.expand(3, 40)
    assert arn.bits.ulp_distance(results.y, expected).max() <= 1


@pytest.mark.case("pytorch-PR-134106")
@pytest.mark.parametrize("fill", [1e18, 1e20])
def test_large_bfloat16_rows_are_finite(fill, implementation):
    inputs = with_x(fill, torch.bfloat16, torch.bfloat16)
    results = check(inputs, implementation)
    assert all(torch.isfinite(tensor).all() for tensor in results)
    if fill == 1e20:  # its square is above float32's range: the formula's own answer
        assert (results.rstd == 0).all()
        assert (results.y == 0).all()
    else:
        assert_within_bounds(results, inputs)
        assert arn.bits.ulp_distance(results.y, inputs.weight.expand(3, 40)).max() <= 1


@pytest.mark.case("tt-metal-55159")
@pytest.mark.parametrize(
    ("dtype", "fill"), [(torch.float32, 1e25), (torch.float64, 1e200)], ids=["float32", "float64"]
)
def test_a_sum_of_squares_that_overflows_gives_zeros(dtype, fill, implementation):
    results = check(with_x(fill, dtype), implementation)
    for tensor in results:
        assert (tensor == 0).all()


@pytest.mark.case("pytorch-188372")
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_one_element_rows_are_signs(sign, implementation):
    inputs = with_x(sign * 1e6, shape=(5, 1))
    results = check(inputs, implementation)
    assert_within_bounds(results, inputs)
    exact = exact_rms_norm(inputs.x, inputs.weight, 1e-5, False, inputs.grad_y)
    assert torch.equal(exact.y.float(), sign * inputs.weight.expand(5, 1))
    # rstd t eps / (x^2 + eps), and eps is nothing beside x^2: 0 but for the fewer than 16 roundings
    # of the formula in float64.
    assert (exact.grad_x.abs() <= 16 * 2.0**-53 * (exact.rstd * exact.t).abs()).all()


@pytest.mark.parametrize("eps", [0.0, 1e-45, 1e-5])
@pytest.mark.parametrize(
    ("dtype", "scale"),
    [
        (torch.bfloat16, 1e-39),
        (torch.float16, 1e-7),
        (torch.float32, 1e-41),
        (torch.float32, 1e-22),
        (torch.float64, 1e-310),
        (torch.float64, 1e-160),
        (torch.bfloat16, 1e38),
        (torch.float16, 1e4),
        (torch.float32, 1e18),
        (torch.float64, 1e153),
    ],
    ids=str,
)
def test_tiny_and_huge_rows(dtype, scale, eps, implementation):
    check(with_x(lambda x: x * scale, dtype), implementation, eps)


@pytest.mark.parametrize("dtype", support.X_DTYPES, ids=str)
def test_spiky_rows(dtype, implementation):
    check(with_x(lambda x: x * torch.where(x > 1.5, 2.0**14, 2.0**-10), dtype), implementation)


@pytest.mark.parametrize("hidden", [20, 300, 1000, 4099, 33001])
def test_an_infinite_rstd_meets_no_padding(hidden, implementation):
    """Squares that underflow and eps 0: where a kernel pads a row, 0 * rstd would be NaN there."""
    inputs = with_x(2.0**-100, shape=(3, hidden))
    results = check(inputs._replace(grad_y=torch.ones_like(inputs.x)), implementation, eps=0.0)
    assert results.rstd.eq(INF).all()
    assert results.y.isinf().all()


@pytest.mark.parametrize("bad", [NAN, INF, -INF], ids=str)
@pytest.mark.parametrize("argument", ["x", "grad_y", "weight"])
@pytest.mark.parametrize("dtype", support.X_DTYPES, ids=str)
def test_nan_and_infinity_stay_in_their_row(dtype, argument, bad, implementation):
    inputs = support.make_inputs(5, 77, dtype=dtype)
    clean = check(inputs, implementation)
    getattr(inputs, argument)[(..., 30) if argument == "weight" else (2, 30)] = bad
    spoiled = check(inputs, implementation)
    if argument == "weight":
        arn.testing.assert_bitwise_equal(spoiled.rstd, clean.rstd, "rstd")
        return
    others = [0, 1, 3, 4]
    for name in ("y", "rstd", "grad_x"):
        arn.testing.assert_bitwise_equal(
            getattr(spoiled, name)[others], getattr(clean, name)[others], name
        )
    assert not torch.isfinite(spoiled.grad_x[2]).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_flush_denormal_changes_no_bit(dtype, implementation, set_num_threads):
    tiny = {torch.float64: 1e-312}.get(dtype, 1e-40)
    inputs = support.make_inputs(2000, 40, dtype=dtype, weight_dtype=dtype)
    inputs = inputs._replace(x=(inputs.x.double() * tiny).to(dtype))
    inputs = support.Inputs(*(tensor.to(implementation) for tensor in inputs))
    set_num_threads(2)
    expected = support.run_op(inputs, 1e-45)
    if not torch.set_flush_denormal(True):
        pytest.skip("this CPU cannot flush denormals")
    try:
        smallest = torch.tensor([1e-40]) * 1.0
        actual = support.run_op(inputs, 1e-45)
        after = torch.tensor([1e-40]) * 1.0
    finally:
        torch.set_flush_denormal(False)
    assert smallest.item() == after.item() == 0.0, "flushing was on before the op and after it"
    support.assert_same(actual, expected)
    assert (actual.y.abs() > 0).any()


@pytest.mark.case("vLLM-PR-44130")
@pytest.mark.parametrize("weight", [None, 1.0, 0.0], ids=["none", "ones", "zero_centered_zeros"])
def test_a_norm_that_changes_nothing_gives_new_tensors(weight, implementation):
    inputs = support.make_inputs(5, 64, device=implementation)
    x = inputs.x.sign()
    gain = None if weight is None else torch.full_like(inputs.weight, weight)
    same = support.Inputs(x, gain, x)
    results = support.run_op(same, 0.0, weight == 0.0)
    arn.testing.assert_bitwise_equal(results.y, x, "y")
    assert results.y.data_ptr() != x.data_ptr() != results.grad_x.data_ptr()
    y = arn.rms_norm(x, gain, 0.0, weight == 0.0)
    assert y.data_ptr() != x.data_ptr()
