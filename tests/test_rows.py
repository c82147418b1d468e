"""P3: a row of y, rstd and grad_x depends on that row, the weight and eps alone."""

import math

import automodel_rms_norm as arn
import pytest
import support
import torch

HIDDENS = [1, 3, 7, 17, 128, 500, 1000, 2688]
FILLERS = [math.nan, math.inf, -math.inf, 0.0, 3e38, -1e-40]


def rows_of(inputs: support.Inputs) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    y, rstd, grad_x, _ = support.run_op(inputs)
    return y, rstd, grad_x


def take(inputs: support.Inputs, rows: object) -> support.Inputs:
    return inputs._replace(x=inputs.x[rows], grad_y=inputs.grad_y[rows])


def assert_rows_same(actual, expected) -> None:
    for name, ours, theirs in zip(("y", "rstd", "grad_x"), actual, expected, strict=True):
        arn.testing.assert_bitwise_equal(ours, theirs, name)


@pytest.mark.case("vLLM-48271")
@pytest.mark.parametrize("dtype", support.X_DTYPES, ids=str)
@pytest.mark.parametrize("hidden", [5, 128, 1000])
def test_rows_do_not_depend_on_batch(hidden, dtype, device):
    inputs = support.make_inputs(257, hidden, dtype=dtype, device=device)
    alone = [rows_of(take(inputs, slice(row, row + 1))) for row in range(257)]
    expected = [torch.cat(parts) for parts in zip(*alone, strict=True)]
    for batch in (1, 2, 255, 256, 257):
        first = rows_of(take(inputs, slice(0, batch)))
        assert_rows_same(first, [rows[:batch] for rows in expected])
        last = rows_of(take(inputs, slice(257 - batch, 257)))
        assert_rows_same(last, [rows[257 - batch :] for rows in expected])


@pytest.mark.parametrize("hidden", HIDDENS)
def test_rows_do_not_depend_on_their_position(hidden, device):
    inputs = support.make_inputs(70, hidden, device=device)
    order = torch.randperm(70, generator=torch.Generator().manual_seed(1)).to(device)
    expected = [rows[order] for rows in rows_of(inputs)]
    assert_rows_same(rows_of(take(inputs, order)), expected)


@pytest.mark.parametrize(
    "shape", [(24,), (1, 24), (2, 3, 4), (2, 3, 2, 2), (1, 2, 1, 12, 1)], ids=str
)
def test_rows_do_not_depend_on_rank(shape, device):
    inputs = support.make_inputs(24, 257, device=device)
    expected = [rows.reshape(*shape, *rows.shape[1:]) for rows in rows_of(inputs)]
    view = inputs._replace(
        x=inputs.x.reshape(*shape, 257), grad_y=inputs.grad_y.reshape(*shape, 257)
    )
    assert_rows_same(rows_of(view), expected)


def test_a_vector_is_one_row(device):
    inputs = support.make_inputs(1, 257, device=device)
    expected = [rows[0] for rows in rows_of(inputs)]
    assert_rows_same(rows_of(take(inputs, 0)), expected)


@pytest.mark.parametrize("padding", [1, 2, 7, 8, 24])
@pytest.mark.parametrize("hidden", [7, 128, 1000])
def test_rows_do_not_depend_on_strides(hidden, padding, device):
    inputs = support.make_inputs(9, hidden, device=device)
    wide = torch.full((2, 9, hidden + padding), math.nan, dtype=inputs.x.dtype, device=device)
    wide[0, :, :hidden], wide[1, :, :hidden] = inputs.x, inputs.grad_y
    padded = inputs._replace(x=wide[0, :, :hidden], grad_y=wide[1, :, :hidden])
    assert padded.x.stride(0) == hidden + padding
    assert_rows_same(rows_of(padded), rows_of(inputs))


@pytest.mark.parametrize("offset", range(1, 18))
@pytest.mark.parametrize("dtype", support.X_DTYPES, ids=str)
def test_rows_do_not_depend_on_alignment(dtype, offset, device):
    inputs = support.make_inputs(5, 512, dtype=dtype, device=device)

    def moved(tensor: torch.Tensor, by: int) -> torch.Tensor:
        memory = torch.full((tensor.numel() + by,), math.nan, dtype=tensor.dtype, device=device)
        memory[by:] = tensor.flatten()
        return memory[by:].view(tensor.shape)

    expected = rows_of(inputs)
    for x_by, weight_by, grad_by in ((offset, 0, 0), (0, offset, 0), (0, 0, offset)):
        parts = zip(inputs, (x_by, weight_by, grad_by), strict=True)
        assert_rows_same(rows_of(support.Inputs(*(moved(*part) for part in parts))), expected)


@pytest.mark.parametrize("filler", FILLERS, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("hidden", HIDDENS)
def test_rows_do_not_depend_on_other_rows(hidden, dtype, filler, device):
    inputs = support.make_inputs(20, hidden, dtype=dtype, weight_dtype=dtype, device=device)
    kept = torch.arange(20, device=device) % 3 == 1
    changed = inputs._replace(x=inputs.x.clone(), grad_y=inputs.grad_y.clone())
    changed.x[~kept] = filler
    changed.grad_y[~kept] = filler
    expected = [rows[kept] for rows in rows_of(inputs)]
    assert_rows_same([rows[kept] for rows in rows_of(changed)], expected)


@pytest.mark.parametrize("threads", [2, 3, 5, 8])
@pytest.mark.parametrize("shape", [(1500, 128), (70, 4096), (3, 65537)], ids=str)
def test_rows_do_not_depend_on_thread_count(shape, threads, set_num_threads):
    inputs = support.make_inputs(*shape)
    set_num_threads(1)
    expected = rows_of(inputs)
    set_num_threads(threads)
    assert_rows_same(rows_of(inputs), expected)


@pytest.mark.parametrize("hidden", [129, 1000, 4096])
def test_rstd_does_not_depend_on_the_width_of_an_element(hidden, device):
    inputs = support.make_inputs(4, hidden, device=device)
    x = (inputs.x * 8).round() / 8  # exact in every dtype
    rstd, half_rstd, float_rstd = (
        support.run_op(inputs._replace(x=x.to(dtype), grad_y=inputs.grad_y.to(dtype))).rstd
        for dtype in support.LOW_WEIGHT_DTYPES
    )
    arn.testing.assert_bitwise_equal(half_rstd, rstd, "rstd of float16")
    arn.testing.assert_bitwise_equal(float_rstd, rstd, "rstd of float32")


def test_the_weight_of_a_column_reaches_that_column_alone(device):
    inputs = support.make_inputs(4, 100, device=device)
    y, rstd, _ = rows_of(inputs)
    weight = inputs.weight.clone()
    weight[13], weight[77] = math.nan, math.inf
    spoiled_y, spoiled_rstd, _ = rows_of(inputs._replace(weight=weight))
    others = [column for column in range(100) if column not in (13, 77)]
    arn.testing.assert_bitwise_equal(spoiled_y[:, others], y[:, others], "y")
    arn.testing.assert_bitwise_equal(spoiled_rstd, rstd, "rstd")
    assert not torch.isfinite(spoiled_y[:, [13, 77]]).any()
