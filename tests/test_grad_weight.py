"""P5: grad_weight depends on the ordered rows alone, and costs nothing where nobody asks for it."""

import automodel_rms_norm as arn
import pytest
import support
import torch

ROWS = [1, 7, 8, 9, 63, 64, 65, 1000]


def grad_weight_of(inputs: support.Inputs) -> torch.Tensor:
    return support.run_op(inputs).grad_weight


def assert_same_bits(actual: torch.Tensor, expected: torch.Tensor) -> None:
    arn.testing.assert_bitwise_equal(actual, expected, "grad_weight")


def make(rows: int, hidden: int, device="cpu", dtype=torch.float32) -> support.Inputs:
    return support.make_inputs(rows, hidden, dtype=dtype, weight_dtype=dtype, device=device)


def append_rows(inputs: support.Inputs, count: int, zero: float) -> support.Inputs:
    x = support.make_inputs(count, inputs.x.shape[1], dtype=inputs.x.dtype, seed=9).x
    return inputs._replace(
        x=torch.cat([inputs.x, x.to(inputs.x.device)]),
        grad_y=torch.cat([inputs.grad_y, torch.full_like(x, zero).to(inputs.x.device)]),
    )


@pytest.mark.parametrize("dtype", support.X_DTYPES, ids=str)
@pytest.mark.parametrize("rows", ROWS)
def test_grad_weight_is_the_same_run_to_run(rows, dtype, device):
    inputs = make(rows, 130, device, dtype)
    expected = grad_weight_of(inputs)
    for _ in range(20):
        assert_same_bits(grad_weight_of(inputs), expected)


@pytest.mark.case("Paddle-56100", "apex-PR-1184")
@pytest.mark.parametrize(
    ("shape", "repeats"), [((1, 1024, 2048), 1000), ((100_000, 64), 20)], ids=str
)
def test_a_large_backward_is_the_same_run_to_run(shape, repeats, device):
    inputs = support.make_inputs(
        *shape, dtype=torch.float32, weight_dtype=torch.float32, device=device
    )
    expected = support.run_op(inputs)
    # A CPU has no blocks that could race; the report is about thousands of launches.
    for _ in range(repeats if device.type == "cuda" else 20):
        assert all(
            torch.equal(ours, theirs)
            for ours, theirs in zip(support.run_op(inputs), expected, strict=True)
        )


@pytest.mark.parametrize("threads", [2, 3, 5, 8, 16])
@pytest.mark.parametrize("shape", [(4099, 33), (1000, 500), (40, 8192)], ids=str)
def test_grad_weight_does_not_depend_on_thread_count(shape, threads, set_num_threads):
    inputs = make(*shape)
    set_num_threads(1)
    expected = grad_weight_of(inputs)
    set_num_threads(threads)
    assert_same_bits(grad_weight_of(inputs), expected)


@pytest.mark.parametrize("zero", [0.0, -0.0], ids=["plus_zero", "minus_zero"])
@pytest.mark.parametrize("count", [1, 7, 8, 9, 100, 1001])
@pytest.mark.parametrize("rows", ROWS)
def test_trailing_rows_of_zero_gradient_change_nothing(rows, count, zero, device):
    inputs = make(rows, 67, device)
    assert_same_bits(grad_weight_of(append_rows(inputs, count, zero)), grad_weight_of(inputs))


@pytest.mark.parametrize("zero", [0.0, -0.0], ids=["plus_zero", "minus_zero"])
def test_zero_gradients_give_plus_zero(zero, device):
    inputs = append_rows(make(0, 67, device), 21, zero)
    assert_same_bits(grad_weight_of(inputs), torch.zeros(67))


def test_no_rows_give_plus_zero(device):
    results = support.run_op(make(0, 67, device))
    assert_same_bits(results.grad_weight, torch.zeros(67))
    assert results.grad_x.shape == (0, 67)


@pytest.mark.parametrize("first", [0, 8], ids=["inside_a_leaf", "between_leaves"])
def test_the_order_of_rows_is_seen(first, device):
    """What makes the tests above tests: grad_weight does change with the order of its rows."""
    inputs = make(40, 500, device)
    order = torch.arange(40)
    order[[first, first + 7]] = order[[first + 7, first]]
    order[[0, 39]] = order[[39, 0]]
    swapped = inputs._replace(x=inputs.x[order], grad_y=inputs.grad_y[order])
    assert (grad_weight_of(swapped) != grad_weight_of(inputs)).sum() > 50


def test_grad_weight_of_aligned_parts_joins_to_the_whole(device):
    """Any power-of-two run of leaves is a subtree, so each worker may take as many as it likes."""
    inputs = make(16 * 64, 200, device)

    def part(begin: int, rows: int) -> torch.Tensor:
        cut = slice(begin, begin + rows)
        return grad_weight_of(inputs._replace(x=inputs.x[cut], grad_y=inputs.grad_y[cut]))

    sums = [part(begin, 64) for begin in range(0, 16 * 64, 64)]
    while len(sums) > 1:
        sums = [left + right for left, right in zip(sums[::2], sums[1::2], strict=True)]
    assert_same_bits(sums[0] + 0.0, grad_weight_of(inputs))


def test_grad_weight_does_not_depend_on_rank(device):
    inputs = make(60, 200, device)
    view = inputs._replace(x=inputs.x.view(3, 4, 5, 200), grad_y=inputs.grad_y.view(3, 4, 5, 200))
    assert_same_bits(grad_weight_of(view), grad_weight_of(inputs))


def test_grad_weight_does_not_depend_on_the_weight(device):
    inputs = make(60, 200, device)
    other = inputs._replace(weight=inputs.weight.flip(0) * 3)
    assert_same_bits(grad_weight_of(other), grad_weight_of(inputs))


@pytest.mark.case("Liger-PR-950", "helion-PR-2273")
def test_grad_weight_and_rstd_stay_in_float32_until_the_end(device):
    inputs = support.make_inputs(32768, 256, weight_dtype=torch.float32, device=device)
    expected = support.run_reference(inputs)
    support.assert_same(support.run_op(inputs), expected)
    actual = support.run_op(inputs._replace(weight=inputs.weight.bfloat16()))
    assert_same_bits(actual.grad_weight, expected.grad_weight.bfloat16())
    # bfloat16 partial sums, which the report is about, would be seen.
    xhat = (inputs.x.double() * actual.rstd.double()[:, None]).cpu()
    summed_low = (inputs.grad_y.cpu() * xhat.bfloat16()).cumsum(0)[-1]
    assert (summed_low != actual.grad_weight.cpu()).sum() > 128


@pytest.mark.parametrize("weight_dtype", support.LOW_WEIGHT_DTYPES, ids=str)
def test_grad_weight_is_rounded_once_to_the_weights_dtype(weight_dtype, device):
    inputs = support.make_inputs(100, 300, weight_dtype=weight_dtype, device=device)
    exact = grad_weight_of(inputs._replace(weight=inputs.weight.float()))
    assert_same_bits(grad_weight_of(inputs), exact.to(weight_dtype))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_each_gradient_is_the_same_with_the_other_one_frozen(dtype, device):
    inputs = make(50, 300, device, dtype)
    x, weight, grad_y = inputs
    both = support.run_op(inputs)
    backward = torch.ops.automodel.rms_norm_backward
    grad_x, no_grad_weight = backward(grad_y, x, weight, both.rstd, False, [True, False])
    no_grad_x, grad_weight = backward(grad_y, x, weight, both.rstd, False, [False, True])
    arn.testing.assert_bitwise_equal(grad_x, both.grad_x, "grad_x")
    assert_same_bits(grad_weight, both.grad_weight)
    assert no_grad_x.numel() == no_grad_weight.numel() == 0


@pytest.mark.case("Liger-1067")
def test_a_frozen_weight_has_no_gradient_buffer(device):
    inputs = make(512, 1024, device)
    x, weight = inputs.x.requires_grad_(), torch.nn.Parameter(inputs.weight, requires_grad=False)

    def taken() -> int:
        y = arn.rms_norm(x, weight, 1e-5)
        return support.allocated_bytes(
            lambda: torch.autograd.grad(y, x, inputs.grad_y), inputs.x.device
        )

    grad_x_bytes = x.numel() * x.element_size()
    assert taken() == grad_x_bytes
    weight.requires_grad_()
    y = arn.rms_norm(x, weight, 1e-5)
    with_weight = support.allocated_bytes(
        lambda: torch.autograd.grad(y, [x, weight], inputs.grad_y), inputs.x.device
    )
    assert with_weight >= grad_x_bytes + weight.numel() * weight.element_size()


@pytest.mark.case("Liger-370")
@pytest.mark.parametrize("residual_first", [False, True], ids=["norm_first", "residual_first"])
def test_grad_y_is_not_overwritten(residual_first, device):
    inputs = make(64, 256, device)
    x, weight = inputs.x.requires_grad_(), torch.nn.Parameter(inputs.weight)
    norm = arn.rms_norm(x, weight, 1e-5)
    y = x + norm if residual_first else norm + x
    kept = inputs.grad_y.clone()
    (grad_x,) = torch.autograd.grad(y, x, inputs.grad_y)
    arn.testing.assert_bitwise_equal(inputs.grad_y, kept, "grad_y")
    assert inputs.grad_y._version == 0
    alone = support.run_op(inputs._replace(x=x.detach())).grad_x
    arn.testing.assert_bitwise_equal(grad_x, alone + kept, "grad_x")
