"""Any layout of the inputs of add_rms_norm gives the bits of contiguous ones, and rows that can be
read in place are."""

import added
import pytest
import support
import torch
from automodel_rms_norm.testing import assert_bitwise_equal
from test_layout import COPIED, IN_PLACE, LAYOUTS, SHAPE, WEIGHT_LAYOUTS, contiguous
from test_sizes import INT32_LIMIT, random_on, with_a_stride_above_int32
from test_uninitialized import free_blocks_of_nan, poisoned_memory  # noqa: F401

ARGUMENTS = ["x", "residual", "grad_y", "grad_sum"]


def with_layout(inputs: added.Inputs, layout: str, *arguments: str) -> added.Inputs:
    """The layout's view of every tensor; of those that are not in `arguments` a contiguous copy."""
    views = {name: LAYOUTS[layout](getattr(inputs, name)) for name in ARGUMENTS}
    return inputs._replace(
        **{name: t if name in arguments else contiguous(t) for name, t in views.items()}
    )


def packed(inputs: added.Inputs) -> added.Inputs:
    return added.Inputs(*map(contiguous, inputs))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("arguments", [*([name] for name in ARGUMENTS), ARGUMENTS], ids="+".join)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_bits_do_not_depend_on_layout(layout, arguments, dtype, device):
    inputs = added.make_inputs(*SHAPE, dtype=dtype, weight_dtype=dtype, device=device)
    inputs = with_layout(inputs, layout, *arguments)
    before = packed(inputs)
    actual = added.run_op(inputs)
    support.assert_same(actual, added.run_op(before))
    support.assert_same(inputs, before)
    for tensor in (actual.y, actual.sum, actual.grad):
        assert tensor.stride() == torch.empty(inputs.x.shape).stride()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_saved_sum_may_have_any_layout(layout, device):
    """As rms_norm_backward's x may; tensors that hooks bring back are often not contiguous."""
    inputs = with_layout(added.make_inputs(*SHAPE, device=device), layout, "x")
    total, (weight, grad_y, grad_sum) = inputs.x, inputs[2:]
    _, rstd = added.OPS.rms_norm_forward(total, weight, added.EPS, False)
    backward = added.OPS.add_rms_norm_backward
    actual = backward(grad_y, grad_sum, total, weight, rstd, False, [True, True])
    expected = backward(grad_y, grad_sum, contiguous(total), weight, rstd, False, [True, True])
    for ours, theirs in zip(actual, expected, strict=True):
        assert torch.equal(ours, theirs)
        assert ours.is_contiguous()


@pytest.mark.parametrize("layout", WEIGHT_LAYOUTS)
def test_bits_do_not_depend_on_the_layout_of_weight(layout, device):
    inputs = added.make_inputs(*SHAPE, device=device)
    inputs = inputs._replace(weight=WEIGHT_LAYOUTS[layout](inputs.weight))
    support.assert_same(added.run_op(inputs), added.run_op(packed(inputs)))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_meta_tensors_have_the_same_layout(layout, device):
    inputs = with_layout(added.make_inputs(*SHAPE, device=device), layout, *ARGUMENTS)
    for ours, meta in zip(added.run_op(inputs), added.run_op(inputs.to("meta")), strict=True):
        assert (ours.shape, ours.stride(), ours.dtype) == (meta.shape, meta.stride(), meta.dtype)


def taken(inputs: added.Inputs, device: torch.device) -> int:
    return support.allocated_bytes(lambda: added.run_op(inputs), device)


@pytest.mark.parametrize("layout", IN_PLACE)
def test_rows_are_read_in_place(layout, device):
    inputs = with_layout(added.make_inputs(*SHAPE, device=device), layout, *ARGUMENTS)
    assert taken(inputs, device) == taken(packed(inputs), device)


@pytest.mark.parametrize("layout", COPIED)
def test_a_copy_is_seen(layout, device):
    inputs = added.make_inputs(*SHAPE, device=device)
    view = with_layout(inputs, layout, *ARGUMENTS)
    x_bytes = inputs.x.numel() * inputs.x.element_size()
    assert taken(view, device) >= taken(inputs, device) + 4 * x_bytes


@pytest.mark.parametrize("argument", ARGUMENTS)
@pytest.mark.parametrize("offset", [1, 3, 8])
@pytest.mark.parametrize("dtype", support.X_DTYPES, ids=str)
def test_bits_do_not_depend_on_alignment(dtype, offset, argument, device):
    inputs = added.make_inputs(5, 512, dtype=dtype, device=device)
    tensor = getattr(inputs, argument)
    memory = torch.empty(tensor.numel() + offset, dtype=dtype, device=device)
    memory[offset:] = tensor.flatten()
    moved = inputs._replace(**{argument: memory[offset:].view(tensor.shape)})
    support.assert_same(added.run_op(moved), added.run_op(inputs))


# --- Sizes and memory -----------------------------------------------------------------------------


@pytest.mark.parametrize("argument", ["residual", "grad_sum"])
def test_strides_above_int32(argument, device, tmp_path):
    inputs = added.make_inputs(2, 300, device=device)
    apart = with_a_stride_above_int32(getattr(inputs, argument), tmp_path / "memory")
    support.assert_same(added.run_op(inputs._replace(**{argument: apart})), added.run_op(inputs))


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [((4194305, 512), torch.float16), ((INT32_LIMIT + 9, 1), torch.bfloat16)],
    ids=["elements", "rows"],
)
@pytest.mark.cuda
@pytest.mark.long
def test_more_elements_than_int32_has(shape, dtype):
    x, weight, grad_y = random_on(torch.device("cuda"), shape, dtype)
    inputs = added.Inputs(x, grad_y, weight, grad_y, x)
    whole = added.run_op(inputs)
    part_rows = 2**29 // shape[1]
    for begin in range(0, shape[0], part_rows):
        rows = slice(begin, begin + part_rows)
        part = added.run_op(inputs.at(rows))
        for name in ("y", "sum", "rstd", "grad"):
            ours, theirs = getattr(part, name), getattr(whole, name)[rows]
            if not torch.equal(ours, theirs):  # naming a difference needs much memory
                assert_bitwise_equal(ours, theirs, name)


@pytest.mark.parametrize("dtype", support.X_DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 1), (9, 127), (300, 33), (65, 2688)], ids=str)
def test_poisoned_memory_changes_no_bit(shape, dtype, device, request):
    inputs = added.make_inputs(*shape, dtype=dtype, weight_dtype=dtype, device=device)
    expected = added.run_op(inputs)
    request.getfixturevalue("poisoned_memory")
    for _ in range(3):
        free_blocks_of_nan(device)
        support.assert_same(added.run_op(inputs), expected)
