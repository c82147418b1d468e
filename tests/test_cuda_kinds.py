"""Every kind of CUDA kernel gives the CPU's bits: each number of virtual threads, with chunks that
fill them or not, with as many rows as the kernels for whole rows are for, and with few; threads
that hold several rows; units that blocks of a cluster share; and units cut in halves."""

import added
import pytest
import support
import torch
from automodel_rms_norm.reference import virtual_threads
from automodel_rms_norm.testing import assert_bitwise_equal

CHUNK = 8
# Chunks in a row of T virtual threads, two to four of each: full, one short and one over.
CHUNKS = {"2": (2, 0), "2+": (2, 1), "3-": (3, -1), "3": (3, 0), "3+": (3, 1), "4-": (4, -1)}
THREADS = [16 * 2**i for i in range(9)]
WIDTHS = [
    pytest.param((count * threads + more) * CHUNK, id=f"T{threads}x{name}")
    for threads in THREADS
    for name, (count, more) in CHUNKS.items()
] + [pytest.param(chunks * CHUNK, id=f"{chunks}_chunks") for chunks in (1, 15, 4 * 4096)]
ROWS = ["few", "many"]


def rows_of(hidden: int, rows: str) -> int:
    """Above 256 rows, and 2048 where they are short, the backward pass stages whole rows."""
    return 21 if rows == "few" else max(269, min(3 * 2**19 // hidden, 2048) + 13)


def drawn(shape: tuple[int, int], dtype: torch.dtype, seed: int) -> added.Inputs:
    """Faster than support.make_inputs."""
    generator = torch.Generator().manual_seed(seed)
    x, residual, grad_y, grad_sum = (
        torch.rand(shape, generator=generator).mul_(4).sub_(2).to(dtype) for _ in range(4)
    )
    weight = (0.5 + torch.rand(shape[1], generator=generator)).to(dtype)
    return added.Inputs(x, residual, weight, grad_y, grad_sum)


def assert_bits_are_the_cpus(inputs: added.Inputs) -> None:
    """Of rms_norm and of add_rms_norm."""
    on_gpu = inputs.to("cuda")
    ours, expected = (
        support.run_op(support.Inputs(t.x, t.weight, t.grad_y)) for t in (on_gpu, inputs)
    )
    support.assert_same(ours, expected)
    support.assert_same(added.run_op(on_gpu), added.run_op(inputs))


@pytest.mark.cuda
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("dtype", support.LOW_WEIGHT_DTYPES, ids=str)
@pytest.mark.parametrize("hidden", WIDTHS)
def test_bits_are_the_cpus(hidden, dtype, rows):
    assert_bits_are_the_cpus(drawn((rows_of(hidden, rows), hidden), dtype, hidden))


def multiprocessors() -> int:
    return torch.cuda.get_device_properties(0).multi_processor_count


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(
    ("multiple", "hidden"), [(16, 8184), (32, 8184), (64, 2040), (128, 1000), (248, 4096)], ids=str
)
def test_bits_are_the_cpus_where_blocks_share_a_unit(multiple, hidden, dtype):
    """With or without a residual, a cluster of two to eight blocks joins slices of one to eight
    leaves; the last cluster has blocks without rows."""
    rows = multiple * multiprocessors() + 5
    assert_bits_are_the_cpus(drawn((rows, hidden), dtype, hidden))


@pytest.mark.cuda
@pytest.mark.parametrize(
    ("hidden", "dtype"),
    [(1152, torch.bfloat16), (3072, torch.float16), (5120, torch.bfloat16), (2048, torch.float32)],
    ids=str,
)
def test_bits_are_the_cpus_where_the_last_wave_is_cut(hidden, dtype):
    """tests/cpp/plan_test.cpp has the same shapes."""
    rows = 80 * multiprocessors() * (256 // virtual_threads(hidden)) + 5
    assert_bits_are_the_cpus(drawn((rows, hidden), dtype, hidden))


def rows_in_turn(hidden: int) -> int:
    """Rows for three blocks and more a multiprocessor, of two rows a thread (four of the
    shortest)."""
    side_by_side = max(256 // virtual_threads(hidden), 1)
    return 3 * multiprocessors() * side_by_side * (4 if hidden <= 128 else 2) + 5


# Two rows are held of 16 bits and up to three chunks, as far as one virtual thread is a thread's.
TWO_ROWS = [
    parameter
    for parameter in WIDTHS
    if parameter.id.endswith(("x2", "x2+", "x3-", "x3")) and parameter.values[0] <= 12288
]


@pytest.mark.cuda
@pytest.mark.parametrize(
    ("hidden", "dtype"),
    [(hidden, dtype) for hidden in (8, 120, 128) for dtype in support.LOW_WEIGHT_DTYPES]
    + [
        (parameter.values[0], dtype)
        for parameter in TWO_ROWS
        for dtype in (torch.bfloat16, torch.float16)
    ],
    ids=str,
)
def test_bits_are_the_cpus_where_a_thread_holds_several_rows(hidden, dtype):
    assert_bits_are_the_cpus(drawn((rows_in_turn(hidden), hidden), dtype, hidden))


@pytest.mark.cuda
@pytest.mark.parametrize("frozen", ["weight", "no weight"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("hidden", WIDTHS)
def test_grad_x_alone_has_the_same_bits(hidden, dtype, frozen):
    """Other kinds are chosen where no grad_weight is wanted."""
    x, residual, weight, grad_y, grad_sum = drawn((rows_of(hidden, "many"), hidden), dtype, 1)
    if frozen == "no weight":
        weight = None
    ops = torch.ops.automodel

    def grads(device: str) -> list[torch.Tensor]:
        tensors = (x, residual, weight, grad_y, grad_sum)
        moved = [None if t is None else t.to(device) for t in tensors]
        own_x, own_residual, own_weight, own_grad_y, own_grad_sum = moved
        rstd = ops.rms_norm_forward(own_x, own_weight, 1e-5, True)[1]
        _, total, total_rstd = ops.add_rms_norm_forward(own_x, own_residual, own_weight, 1e-5, True)
        only_x = [True, False]
        plain = ops.rms_norm_backward(own_grad_y, own_x, own_weight, rstd, True, only_x)[0]
        add = ops.add_rms_norm_backward(
            own_grad_y, own_grad_sum, total, own_weight, total_rstd, True, only_x
        )[0]
        return [plain, add]

    for ours, expected in zip(grads("cuda"), grads("cpu"), strict=True):
        assert_bitwise_equal(ours, expected, "grad_x")


def test_the_widths_have_these_virtual_threads():
    for parameter in WIDTHS[: len(THREADS) * len(CHUNKS)]:
        (hidden,) = parameter.values
        assert f"T{virtual_threads(hidden)}x" == parameter.id.split("x")[0] + "x"
