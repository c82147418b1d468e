"""No rows, very many rows, very wide rows, offsets above 2^31."""

from pathlib import Path

import automodel_rms_norm as arn
import pytest
import support
import torch

INT32_LIMIT = 2**31


def take(inputs: support.Inputs, begin: int, rows: int) -> support.Inputs:
    cut = slice(begin, begin + rows)
    return inputs._replace(x=inputs.x[cut], grad_y=inputs.grad_y[cut])


def assert_parts_make_the_whole(inputs: support.Inputs, part_rows: int) -> None:
    """Every part alone has the whole's rows, and grad_weight is the tree over the parts.

    part_rows is a power of two of at least a leaf's rows; weight has the accumulate type, so that
    no part's grad_weight is rounded.
    """
    whole = support.run_op(inputs)
    sums = []
    for begin in range(0, inputs.x.shape[0], part_rows):
        part = support.run_op(take(inputs, begin, part_rows))
        sums.append(part.grad_weight)
        for name in ("y", "rstd", "grad_x"):
            rows = getattr(whole, name)[begin : begin + part_rows]
            # torch.equal first: naming a difference needs much memory.
            if not torch.equal(rows, getattr(part, name)):
                arn.testing.assert_bitwise_equal(rows, getattr(part, name), name)
    while len(sums) > 1:
        if len(sums) % 2:
            sums.append(torch.zeros_like(sums[0]))
        sums = [left + right for left, right in zip(sums[::2], sums[1::2], strict=True)]
    arn.testing.assert_bitwise_equal(whole.grad_weight, sums[0] + 0.0, "grad_weight")


@pytest.mark.parametrize(
    "shape",
    [
        pytest.param((0, 7168), id="0x7168-flash-attention-1620"),
        pytest.param((3, 0, 2520), id="3x0x2520-flash-attention-1620"),
        pytest.param((0, 1), id="0x1-torch-xpu-ops-2791"),
        pytest.param((2, 0, 3, 1), id="2x0x3x1"),
    ],
)
@pytest.mark.parametrize("run", ["eager", "compiled"])
def test_no_rows(shape, run, device, fresh_dynamo):
    norm = arn.rms_norm
    if run == "compiled":
        norm = torch.compile(arn.rms_norm, fullgraph=True, dynamic=True)
        some_rows = support.make_inputs(*(size or 5 for size in shape), device=device)
        support.assert_same(
            support.forward_backward(norm, some_rows), support.reference_outputs(some_rows)
        )
    inputs = support.make_inputs(*shape, device=device)
    y, grad_x, grad_weight = support.forward_backward(norm, inputs)
    assert y.shape == grad_x.shape == shape
    assert y.stride() == grad_x.stride() == torch.empty(shape).stride()
    arn.testing.assert_bitwise_equal(grad_weight, torch.zeros_like(inputs.weight), "grad_weight")
    next_call = support.make_inputs(3, 100, device=device)
    support.assert_same(
        support.forward_backward(norm, next_call), support.reference_outputs(next_call)
    )


WIDE = {
    torch.bfloat16: [16384, 65536, 65537, 131072],
    torch.float16: [16384, 65536, 65537, 131072],
    torch.float32: [16384, 65536, 65537, 131072, 1048576],
    torch.float64: [16384, 65537],
}


@pytest.mark.case("flashinfer-PR-718")
@pytest.mark.parametrize(
    ("dtype", "hidden"),
    [(dtype, hidden) for dtype, widths in WIDE.items() for hidden in widths],
    ids=str,
)
def test_wide_rows(dtype, hidden, device):
    inputs = support.make_inputs(1, hidden, dtype=dtype, weight_dtype=dtype, device=device)
    support.assert_same(support.run_op(inputs), support.run_reference(inputs))


@pytest.mark.case("flashinfer-PR-718")
@pytest.mark.parametrize("dtype", support.X_DTYPES, ids=str)
@pytest.mark.parametrize("hidden", [65536, 131072, 1048576])
def test_wide_rows_whose_sums_are_exact(hidden, dtype, device):
    """x = +-2 and few bits elsewhere: any order of summation is right, no reference is needed."""
    x, weight, grad_y = support.make_inputs(3, hidden, dtype=torch.float64)
    x = torch.copysign(torch.full_like(x, 2), x)
    weight, grad_y = ((t.clamp(-2, 2) * 4).round() / 4 for t in (weight.double(), grad_y))
    inputs = support.Inputs(*(t.to(dtype).to(device) for t in (x, weight, grad_y)))
    xhat, t = x / 2, grad_y * weight
    expected = support.Results(
        xhat * weight,
        torch.full((3,), 0.5),
        0.5 * (t - xhat * (t * xhat).mean(-1, keepdim=True)),
        (grad_y * xhat).sum(0) + 0.0,
    )
    dtypes = [dtype, torch.float64 if dtype == torch.float64 else torch.float32, dtype, dtype]
    actual = support.run_op(inputs, eps=0.0)
    rounded = (t.to(d) for t, d in zip(expected, dtypes, strict=True))
    support.assert_same(actual, support.Results(*rounded))


@pytest.mark.case("apex-4a8e1a87", "Paddle-PR-31144")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", [(65536, 64), (200_000, 1), (65536, 512)], ids=str)
def test_many_rows(shape, dtype, device):
    inputs = support.make_inputs(*shape, dtype=dtype, weight_dtype=torch.float32, device=device)
    assert_parts_make_the_whole(inputs, 8192)


def random_on(device: torch.device, shape: tuple[int, ...], dtype: torch.dtype) -> support.Inputs:
    generator = torch.Generator(device).manual_seed(0)

    def normal(*size: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.randn(*size, dtype=dtype, device=device, generator=generator)

    accumulate = torch.float64 if dtype == torch.float64 else torch.float32
    weight = 1.0 + 0.4 * normal(shape[-1], dtype=accumulate)
    return support.Inputs(normal(*shape, dtype=dtype), weight, normal(*shape, dtype=dtype))


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        pytest.param((4194305, 512), torch.float16, id="flashinfer-3391"),
        pytest.param((2**23 + 16, 256), torch.bfloat16, id="Liger-1483"),
        pytest.param((INT32_LIMIT + 9, 1), torch.bfloat16, id="more_rows_than_int32"),
        pytest.param((INT32_LIMIT + 9, 1), torch.float64, id="more_float64_rows_than_a_grid"),
    ],
)
@pytest.mark.cuda
@pytest.mark.long
def test_more_elements_than_int32_has(shape, dtype):
    inputs = random_on(torch.device("cuda"), shape, dtype)
    assert inputs.x.numel() > INT32_LIMIT
    assert_parts_make_the_whole(inputs, 2**29 // shape[1])


@pytest.mark.cuda
@pytest.mark.long
def test_a_row_wider_than_int32():
    """x and grad_y of +-1 keep every sum exact, so that the bits are known without a reference."""
    hidden = INT32_LIMIT + 64
    x = torch.ones(1, hidden, dtype=torch.bfloat16, device="cuda")
    x[:, 1::2] = -1
    weight = torch.full((hidden,), 0.5, dtype=torch.bfloat16, device="cuda")
    results = support.run_op(support.Inputs(x, weight, torch.ones_like(x)), eps=0.0)
    assert results.rstd.item() == 1
    assert torch.equal(results.y, x * 0.5)
    assert torch.equal(results.grad_x, weight.expand_as(x))
    assert torch.equal(results.grad_weight, x[0])


def test_grad_weight_of_more_elements_than_int32_has():
    """Expanded rows take no memory; equal leaves add up exactly but for the last one's row."""
    rows, hidden = INT32_LIMIT // 512 + 1, 512
    x, weight, grad_y = support.make_inputs(8, hidden, weight_dtype=torch.float32)
    x, grad_y = x[:1].expand(8, hidden), grad_y[:1].expand(8, hidden)
    leaf, one_row = (
        support.run_reference(support.Inputs(x[:count], weight, grad_y[:count])) for count in (8, 1)
    )
    _, actual = torch.ops.automodel.rms_norm_backward(
        grad_y[:1].expand(rows, hidden),
        x[:1].expand(rows, hidden),
        weight,
        leaf.rstd[:1].expand(rows).contiguous(),
        False,
        [False, True],
    )
    expected = leaf.grad_weight * (rows // 8) + one_row.grad_weight
    arn.testing.assert_bitwise_equal(actual, expected, "grad_weight")


def uninitialised(count: int, device: torch.device, path: Path) -> torch.Tensor:
    """Memory that is not touched; on the CPU a sparse file."""
    if device.type == "cuda":
        return torch.empty(count, dtype=torch.bfloat16, device=device)
    return torch.from_file(str(path), shared=True, size=count, dtype=torch.bfloat16)


def with_a_stride_above_int32(rows: torch.Tensor, path: Path) -> torch.Tensor:
    """The same two bfloat16 rows, more than 2^31 elements apart."""
    stride = INT32_LIMIT + 8
    memory = uninitialised(stride + rows.shape[1], rows.device, path)
    return memory.as_strided(rows.shape, (stride, 1)).copy_(rows)


@pytest.mark.case("flashinfer-3391")
@pytest.mark.parametrize("argument", ["x", "grad_y"])
def test_strides_above_int32(argument, device, tmp_path):
    inputs = support.make_inputs(2, 300, device=device)
    apart = with_a_stride_above_int32(getattr(inputs, argument), tmp_path / "memory")
    support.assert_same(
        support.run_op(inputs._replace(**{argument: apart})), support.run_op(inputs)
    )


@pytest.mark.case("flashinfer-3391")
def test_storage_offsets_above_int32(device, tmp_path):
    inputs = support.make_inputs(3, 100, device=device)
    memory = uninitialised(INT32_LIMIT + 1000, device, tmp_path / "memory")
    x = memory[INT32_LIMIT + 77 :][:300].view(3, 100)
    x.copy_(inputs.x)
    support.assert_same(support.run_op(inputs._replace(x=x)), support.run_op(inputs))
