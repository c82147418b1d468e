"""The bits of add_rms_norm: the reference's, and those of rms_norm on the rounded sum."""

import functools
import math

import added
import automodel_rms_norm as arn
import pytest
import support
import torch
from added import EPS
from automodel_rms_norm.bounds import bounds
from automodel_rms_norm.formula import exact_rms_norm
from automodel_rms_norm.testing import assert_bitwise_equal

# Ragged widths below and around a chunk, every way in which a kernel takes a row, and row counts
# around a leaf.
SHAPES = [
    (33, 1),
    (9, 7),
    (25, 8),
    (5, 17),
    (2, 111),
    (40, 128),
    (2, 3, 257),
    (1, 1000),
    (2, 2688),
    (2, 4096),
]


def pair_id(pair: tuple[torch.dtype, torch.dtype | None]) -> str:
    return "-".join(str(dtype).removeprefix("torch.") for dtype in pair)


@functools.cache
def case(
    shape: tuple[int, ...], pair: tuple[torch.dtype, torch.dtype | None], zero_centered: bool
) -> tuple[added.Inputs, added.Results]:
    inputs = added.make_inputs(
        *shape, dtype=pair[0], weight_dtype=pair[1], zero_centered_gamma=zero_centered
    )
    return inputs, added.run_reference(inputs, EPS, zero_centered)


@pytest.mark.parametrize("zero_centered", [False, True], ids=["plain", "zero_centered"])
@pytest.mark.parametrize("pair", support.DTYPE_PAIRS, ids=pair_id)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_bits_are_the_references(shape, pair, zero_centered, implementation):
    inputs, expected = case(shape, pair, zero_centered)
    support.assert_same(added.run_op(inputs.to(implementation), EPS, zero_centered), expected)


@pytest.mark.parametrize("hidden", [4099, 5120, 8192, 16384, 28672, 57344, 65537, 131072])
@pytest.mark.parametrize("dtype", support.LOW_WEIGHT_DTYPES, ids=str)
def test_bits_are_the_references_in_wide_rows(hidden, dtype, implementation):
    inputs = added.make_inputs(2, hidden, dtype=dtype, weight_dtype=dtype)
    support.assert_same(added.run_op(inputs.to(implementation)), added.run_reference(inputs))


@pytest.mark.parametrize("zero_centered", [False, True], ids=["plain", "zero_centered"])
@pytest.mark.parametrize("pair", support.DTYPE_PAIRS, ids=pair_id)
@pytest.mark.parametrize("shape", [(19, 300), (2, 3, 2688), (3, 33000)], ids=str)
def test_y_is_rms_norm_of_torchs_sum(shape, pair, zero_centered, device):
    x, residual, weight, grad_y, grad_sum = added.make_inputs(
        *shape,
        dtype=pair[0],
        weight_dtype=pair[1],
        zero_centered_gamma=zero_centered,
        device=device,
    )
    total = x + residual
    y, own_sum = arn.add_rms_norm(x, residual, weight, EPS, zero_centered)
    assert_bitwise_equal(own_sum, total, "sum")
    assert_bitwise_equal(y, arn.rms_norm(total, weight, EPS, zero_centered), "y")

    results = added.run_op(added.Inputs(x, residual, weight, grad_y, grad_sum), EPS, zero_centered)
    plain = support.run_op(support.Inputs(total, weight, grad_y), EPS, zero_centered)
    assert_bitwise_equal(results.rstd, plain.rstd, "rstd")
    if weight is not None:
        assert_bitwise_equal(results.grad_weight, plain.grad_weight, "grad_weight")


def test_the_gradient_is_rounded_once(device):
    """Rounding before grad_sum is added would be seen."""
    inputs = added.make_inputs(64, 256, device=device)
    grad = added.run_op(inputs).grad
    total = inputs.x + inputs.residual
    plain = support.run_op(support.Inputs(total, inputs.weight, inputs.grad_y)).grad_x
    assert (plain + inputs.grad_sum != grad).sum() > 100
    # A grad_sum of zeros adds nothing, and to a -0 the sign.
    zeros = added.run_op(inputs._replace(grad_sum=torch.zeros_like(total))).grad
    assert_bitwise_equal(zeros, plain + 0.0, "grad")


@pytest.mark.parametrize("zero_centered", [False, True], ids=["plain", "zero_centered"])
@pytest.mark.parametrize("dtype", support.LOW_WEIGHT_DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(19, 300), (5, 4099)], ids=str)
def test_the_gradient_is_within_its_bound(shape, dtype, zero_centered, device):
    """docs/numerics.md, "Bounds of the error"; y and grad_weight are rms_norm's."""
    inputs = added.make_inputs(
        *shape, dtype=dtype, zero_centered_gamma=zero_centered, device=device
    )
    total, (_, _, weight, grad_y, grad_sum) = inputs.x + inputs.residual, inputs
    exact = exact_rms_norm(total, weight, EPS, zero_centered, grad_y)
    in_float32 = bounds(exact, grad_y, torch.float32, weight.dtype, zero_centered).grad_x
    grad = exact.grad_x + grad_sum.cpu().double()
    allowed = in_float32 + 2.0**-24 * (grad.abs() + in_float32)
    if dtype != torch.float32:
        info = torch.finfo(dtype)
        smallest = info.smallest_normal * info.eps
        allowed = allowed + info.eps / 2 * (grad.abs() + allowed) + smallest / 2
    error = (added.run_op(inputs, EPS, zero_centered).grad.cpu().double() - grad).abs()
    assert (error <= allowed).all()


@pytest.mark.parametrize("dtype", support.X_DTYPES, ids=str)
def test_a_residual_of_zeros_changes_nothing(dtype, device):
    inputs = added.make_inputs(19, 300, dtype=dtype, weight_dtype=dtype, device=device)
    y, total = arn.add_rms_norm(inputs.x, torch.zeros_like(inputs.x), inputs.weight, EPS)
    assert_bitwise_equal(total, inputs.x, "sum")
    assert_bitwise_equal(y, arn.rms_norm(inputs.x, inputs.weight, EPS), "y")
    assert y.data_ptr() != inputs.x.data_ptr() != total.data_ptr()


@pytest.mark.parametrize("dtype", support.X_DTYPES, ids=str)
def test_x_may_be_its_own_residual(dtype, device):
    inputs = added.make_inputs(19, 300, dtype=dtype, weight_dtype=dtype, device=device)
    y, total = arn.add_rms_norm(inputs.x, inputs.x, inputs.weight, EPS)
    assert_bitwise_equal(total, inputs.x * 2, "sum")
    assert_bitwise_equal(y, arn.rms_norm(inputs.x * 2, inputs.weight, EPS), "y")
    x = inputs.x.clone().requires_grad_()
    outputs = arn.add_rms_norm(x, x, inputs.weight, EPS)
    (grad_x,) = torch.autograd.grad(outputs, x, (inputs.grad_y, inputs.grad_sum))
    both = added.forward_backward(arn.add_rms_norm, inputs._replace(residual=inputs.x))
    assert_bitwise_equal(grad_x, both.grad_x + both.grad_residual, "grad_x")


# --- Ranges ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("eps", [0.0, 1e-5])
@pytest.mark.parametrize(
    ("dtype", "scale"),
    [
        (torch.bfloat16, 1e-39),
        (torch.float16, 1e-7),
        (torch.float32, 1e-41),
        (torch.float64, 1e-310),
        (torch.bfloat16, 1e38),
        (torch.float16, 3e4),
        (torch.float32, 2e38),
        (torch.float64, 1e308),
    ],
    ids=str,
)
def test_tiny_and_huge_rows(dtype, scale, eps, implementation):
    inputs = added.make_inputs(3, 40, dtype=dtype)
    x, residual = ((t.double() * scale).to(dtype) for t in (inputs.x, inputs.residual))
    inputs = inputs._replace(x=x, residual=residual)
    actual = added.run_op(inputs.to(implementation), eps)
    support.assert_same(actual, added.run_reference(inputs, eps))


@pytest.mark.parametrize("dtype", support.X_DTYPES, ids=str)
def test_sums_between_two_numbers_are_rounded_to_even(dtype, implementation):
    inputs = added.make_inputs(2, 40, dtype=dtype)
    half_ulp = torch.finfo(dtype).eps / 2
    x = 1.0 + 2 * half_ulp * torch.arange(40.0, dtype=torch.float64).expand(2, 40)
    inputs = inputs._replace(x=x.to(dtype), residual=torch.full_like(inputs.x, half_ulp))
    actual = added.run_op(inputs.to(implementation))
    support.assert_same(actual, added.run_reference(inputs))
    even = 1.0 + 4 * half_ulp * ((torch.arange(40.0, dtype=torch.float64) + 1) // 2)
    assert_bitwise_equal(actual.sum.cpu(), even.to(dtype).expand(2, 40), "sum")


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf], ids=str)
@pytest.mark.parametrize("argument", ["x", "residual", "grad_y", "grad_sum", "weight"])
@pytest.mark.parametrize("dtype", support.X_DTYPES, ids=str)
def test_nan_and_infinity_stay_in_their_row(dtype, argument, bad, implementation):
    inputs = added.make_inputs(5, 77, dtype=dtype)
    clean = added.run_op(inputs.to(implementation))
    getattr(inputs, argument)[(..., 30) if argument == "weight" else (2, 30)] = bad
    spoiled = added.run_op(inputs.to(implementation))
    support.assert_same(spoiled, added.run_reference(inputs))
    if argument == "weight":
        return
    others = [0, 1, 3, 4]
    for name in ("y", "sum", "rstd", "grad"):
        ours, theirs = getattr(spoiled, name)[others], getattr(clean, name)[others]
        assert_bitwise_equal(ours, theirs, name)
    assert not torch.isfinite(spoiled.grad[2]).all()


@pytest.mark.parametrize("hidden", [20, 300, 1000, 4099, 33001])
def test_an_infinite_rstd_meets_no_padding(hidden, implementation):
    inputs = added.make_inputs(3, hidden, dtype=torch.float32)
    half = torch.full_like(inputs.x, 2.0**-101)
    inputs = inputs._replace(x=half, residual=half, grad_y=torch.ones_like(half))
    actual = added.run_op(inputs.to(implementation), 0.0)
    support.assert_same(actual, added.run_reference(inputs, 0.0))
    assert actual.rstd.eq(math.inf).all()
    assert actual.y.isinf().all()


# --- Rows -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", support.X_DTYPES, ids=str)
@pytest.mark.parametrize("hidden", [5, 128, 1000, 2688, 9000])
def test_rows_do_not_depend_on_batch(hidden, dtype, device):
    inputs = added.make_inputs(37, hidden, dtype=dtype, device=device)
    whole = added.run_op(inputs)
    for rows in (slice(0, 1), slice(5, 6), slice(3, 36), slice(36, 37)):
        part = added.run_op(inputs.at(rows))
        for name in ("y", "sum", "rstd", "grad"):
            assert_bitwise_equal(getattr(part, name), getattr(whole, name)[rows], name)


@pytest.mark.parametrize("shape", [(24,), (1, 24), (2, 3, 4), (2, 3, 2, 2)], ids=str)
def test_rows_do_not_depend_on_rank(shape, device):
    inputs = added.make_inputs(24, 257, device=device)
    view = added.Inputs(*(t if t is inputs.weight else t.reshape(*shape, 257) for t in inputs))
    whole, other = added.run_op(inputs), added.run_op(view)
    for name in ("y", "sum", "rstd", "grad"):
        ours, theirs = getattr(other, name), getattr(whole, name)
        assert_bitwise_equal(ours, theirs.reshape(*shape, *theirs.shape[1:]), name)
    assert_bitwise_equal(other.grad_weight, whole.grad_weight, "grad_weight")


def test_a_vector_is_one_row(device):
    inputs = added.make_inputs(1, 257, device=device)
    whole, one = added.run_op(inputs), added.run_op(inputs.at(0))
    for name in ("y", "sum", "rstd", "grad"):
        assert_bitwise_equal(getattr(one, name), getattr(whole, name)[0], name)


@pytest.mark.parametrize("count", [1, 8, 100])
@pytest.mark.parametrize("rows", [1, 8, 9, 65])
def test_trailing_rows_of_zero_gradient_leave_grad_weight(rows, count, device):
    inputs = added.make_inputs(rows + count, 67, weight_dtype=torch.float32, device=device)
    inputs.grad_y[rows:] = 0
    longer, expected = added.run_op(inputs), added.run_op(inputs.at(slice(0, rows)))
    assert_bitwise_equal(longer.grad_weight, expected.grad_weight, "grad_weight")


@pytest.mark.parametrize("threads", [2, 3])
@pytest.mark.parametrize("shape", [(4099, 33), (1000, 500), (40, 8192)], ids=str)
def test_no_bit_depends_on_thread_count(shape, threads, set_num_threads):
    inputs = added.make_inputs(*shape)
    set_num_threads(1)
    expected = added.run_op(inputs)
    set_num_threads(threads)
    support.assert_same(added.run_op(inputs), expected)


@pytest.mark.parametrize("shape", [(0, 7), (2, 0, 33), (0, 4096)], ids=str)
def test_no_rows(shape, device):
    inputs = added.make_inputs(*shape, device=device)
    for results in (added.run_op(inputs), added.forward_backward(arn.add_rms_norm, inputs)):
        assert results.y.shape == results.sum.shape == results[3].shape == shape
        zeros = torch.zeros_like(inputs.weight)
        assert_bitwise_equal(results.grad_weight, zeros, "grad_weight")


@pytest.mark.parametrize("autocast_dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("dtype", support.X_DTYPES, ids=str)
def test_autocast_changes_nothing(dtype, autocast_dtype, device):
    inputs = added.make_inputs(40, 300, dtype=dtype, device=device)
    expected = added.forward_backward(arn.add_rms_norm, inputs)
    with torch.autocast(device.type, dtype=autocast_dtype):
        support.assert_same(added.forward_backward(arn.add_rms_norm, inputs), expected)
