"""Any layout of x, grad_y and weight gives the bits of the contiguous copy, and rows that can be
read in place are."""

import automodel_rms_norm as arn
import pytest
import support
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

SHAPE = (4, 6, 40)


def embed(tensor: torch.Tensor, index: tuple[slice, ...], shape: tuple[int, ...]) -> torch.Tensor:
    memory = torch.full(shape, torch.nan, dtype=tensor.dtype, device=tensor.device)
    memory[index] = tensor
    return memory[index]


# Rows of these are read in place.
IN_PLACE = {
    "rows_apart": lambda t: embed(t, (..., slice(5, 45)), (4, 6, 50)),
    "every_second_row-unsloth-PR-10675": lambda t: embed(
        t, (slice(0, 4), slice(0, 12, 2)), (4, 12, 40)
    ),
    "transposed_rows": lambda t: t.transpose(0, 1).contiguous().transpose(0, 1),
    "expanded_rows-unsloth-PR-10675": lambda t: t[:, :1].expand(SHAPE),
    "expanded_batch": lambda t: t[:1].expand(SHAPE),
    "one_row_everywhere": lambda t: t[0, 0].expand(SHAPE),
    "overlapping_rows": lambda t: t.flatten().as_strided(SHAPE, (60, 10, 1)),
    "offset": lambda t: embed(t.flatten(), (slice(3, 963),), (970,)).view(SHAPE),
    "size_one_dims-vLLM-PR-49913": lambda t: t[0].as_strided((1, 6, 40), (7, 40, 1)),
    "permuted_size_one_dims-vLLM-PR-49913": lambda t: t[0][:, None].contiguous().transpose(0, 1),
}
# Rows of these are not adjacent elements.
COPIED = {
    "every_second_element-unsloth-PR-10675": lambda t: embed(t, (..., slice(0, 80, 2)), (4, 6, 80)),
    "transposed_elements-unsloth-PR-10675": lambda t: (
        t.transpose(1, 2).contiguous().transpose(1, 2)
    ),
    "expanded_elements": lambda t: t[..., :1].expand(SHAPE),
    "one_element_everywhere": lambda t: t[0, 0, 0].expand(SHAPE),
}
LAYOUTS = {**IN_PLACE, **COPIED}
DTYPES = [torch.bfloat16, torch.float32]


def contiguous(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.clone(memory_format=torch.contiguous_format)


def assert_like_contiguous(inputs: support.Inputs) -> support.Results:
    before = [contiguous(tensor) for tensor in inputs]
    actual = support.run_op(inputs)
    support.assert_same(actual, support.run_op(support.Inputs(*before)))
    for name, tensor, kept in zip(inputs._fields, inputs, before, strict=True):
        arn.testing.assert_bitwise_equal(tensor, kept, f"{name} after the op")
    assert actual.y.is_contiguous()
    assert actual.y.stride() == actual.grad_x.stride() == torch.empty(inputs.x.shape).stride()
    assert actual.rstd.stride() == torch.empty(inputs.x.shape[:-1]).stride()
    return actual


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("argument", ["x", "grad_y", "both"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_bits_do_not_depend_on_layout(layout, argument, dtype, device):
    inputs = support.make_inputs(*SHAPE, dtype=dtype, weight_dtype=dtype, device=device)
    view = LAYOUTS[layout]
    changed = {name: view(getattr(inputs, name)) for name in ("x", "grad_y")}
    if argument != "both":
        other = "grad_y" if argument == "x" else "x"
        changed[other] = contiguous(changed[other])
    assert_like_contiguous(inputs._replace(**changed))


WEIGHT_LAYOUTS = {
    "every_second": lambda w: embed(w, (slice(0, 80, 2),), (80,)),
    "column": lambda w: embed(w[:, None], (slice(0, 40), slice(1, 2)), (40, 3))[:, 0],
    "expanded": lambda w: w[:1].expand(40),
    "offset": lambda w: embed(w, (slice(1, 41),), (50,)),
}


@pytest.mark.parametrize("layout", WEIGHT_LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bits_do_not_depend_on_the_layout_of_weight(layout, dtype, device):
    inputs = support.make_inputs(*SHAPE, weight_dtype=dtype, device=device)
    results = assert_like_contiguous(inputs._replace(weight=WEIGHT_LAYOUTS[layout](inputs.weight)))
    assert results.grad_weight.is_contiguous()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_meta_tensors_have_the_same_layout(layout, device):
    inputs = support.make_inputs(*SHAPE, device=device)
    inputs = inputs._replace(x=LAYOUTS[layout](inputs.x), grad_y=LAYOUTS[layout](inputs.grad_y))
    on_meta = support.run_op(support.Inputs(*(tensor.to("meta") for tensor in inputs)))
    for ours, meta in zip(support.run_op(inputs), on_meta, strict=True):
        assert (ours.shape, ours.stride(), ours.dtype) == (meta.shape, meta.stride(), meta.dtype)


def taken(inputs: support.Inputs, device: torch.device) -> int:
    return support.allocated_bytes(lambda: support.run_op(inputs), device)


@pytest.mark.parametrize("layout", IN_PLACE)
def test_rows_are_read_in_place(layout, device):
    inputs = support.make_inputs(*SHAPE, device=device)
    view = inputs._replace(x=IN_PLACE[layout](inputs.x), grad_y=IN_PLACE[layout](inputs.grad_y))
    packed = inputs._replace(x=contiguous(view.x), grad_y=contiguous(view.grad_y))
    assert taken(view, device) == taken(packed, device)


@pytest.mark.parametrize("layout", COPIED)
def test_a_copy_is_seen(layout, device):
    """What makes the test above a test: x is copied in both directions here, grad_y in one."""
    inputs = support.make_inputs(*SHAPE, device=device)
    view = inputs._replace(x=COPIED[layout](inputs.x), grad_y=COPIED[layout](inputs.grad_y))
    x_bytes = inputs.x.numel() * inputs.x.element_size()
    assert taken(view, device) >= taken(inputs, device) + 3 * x_bytes


@pytest.mark.case("flash-attention-289")
def test_q_is_normalised_where_it_lies_in_qkv(device):
    inputs = support.make_inputs(2, 257, 3, 1200, device=device)
    q, grad_q = (t.reshape(2, 257, 3600)[..., :1200] for t in (inputs.x, inputs.grad_y))
    assert q.stride() == (925200, 3600, 1)
    view = inputs._replace(x=q, grad_y=grad_q)
    assert_like_contiguous(view)
    packed = view._replace(x=contiguous(q), grad_y=contiguous(grad_q))
    assert taken(view, device) == taken(packed, device)


@pytest.mark.case("quack-88")
def test_the_gradient_of_a_sum(device):
    x, weight, _ = support.make_inputs(2, 1024, 256, weight_dtype=torch.float32, device=device)
    x.requires_grad_()
    weight.requires_grad_()
    arn.rms_norm(x, weight, 1e-5).sum().backward()
    ones = support.Inputs(x.detach(), weight.detach(), torch.ones_like(x))
    expected = support.run_op(ones)
    arn.testing.assert_bitwise_equal(x.grad, expected.grad_x, "grad_x")
    arn.testing.assert_bitwise_equal(weight.grad, expected.grad_weight, "grad_weight")


def test_more_dimensions_than_a_kernel_has(device):
    shape = (2,) * 10
    inputs = support.make_inputs(*shape, 12, device=device)
    views = [t.permute(*range(9, -1, -1), 10) for t in (inputs.x, inputs.grad_y)]
    assert_like_contiguous(inputs._replace(x=views[0], grad_y=views[1]))


def test_a_negative_view_is_resolved(device):
    inputs = support.make_inputs(*SHAPE, device=device)
    assert_like_contiguous(inputs._replace(x=torch._neg_view(inputs.x)))


@st.composite
def strided_views(draw: st.DrawFn) -> tuple[tuple[int, ...], list, tuple[torch.dtype, object]]:
    shape = (*draw(st.lists(st.integers(0, 4), max_size=4)), draw(st.integers(1, 70)))

    def layout() -> tuple:
        order = draw(st.permutations(range(len(shape))))
        steps = [draw(st.integers(1, 3)) for _ in shape]
        expanded = [draw(st.sampled_from([False, False, False, True])) for _ in shape]
        return order, steps, expanded, draw(st.integers(0, 9))

    return shape, [layout(), layout()], draw(st.sampled_from(support.DTYPE_PAIRS))


def lay_out(values: torch.Tensor, layout: tuple) -> torch.Tensor:
    """`values` in memory of another order, with gaps, offset, or repeated along a dimension."""
    order, steps, expanded, offset = layout
    shape = values.shape
    memory_shape = [1 if expanded[d] else shape[d] * steps[d] for d in order]
    count = torch.Size(memory_shape).numel()
    memory = values.new_full((offset + count,), torch.nan)[offset:].view(memory_shape)
    memory = memory.permute([order.index(d) for d in range(len(shape))])
    for d, size in enumerate(shape):
        memory = memory[(slice(None),) * d + (slice(0, size * steps[d], steps[d]),)]
    kept = tuple(slice(0, 1) if expanded[d] else slice(None) for d in range(len(shape)))
    memory.copy_(values[kept])
    return memory.expand(shape)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
@settings(max_examples=300, deadline=None, derandomize=True)
@given(view=strided_views(), zero_centered=st.booleans())
def test_any_strides_give_the_bits_of_the_contiguous_copy(device, view, zero_centered):
    shape, (x_layout, grad_layout), (dtype, weight_dtype) = view
    inputs = support.make_inputs(*shape, dtype=dtype, weight_dtype=weight_dtype, device=device)
    strided = inputs._replace(
        x=lay_out(inputs.x, x_layout), grad_y=lay_out(inputs.grad_y, grad_layout)
    )
    packed = strided._replace(x=contiguous(strided.x), grad_y=contiguous(strided.grad_y))
    actual = support.run_op(strided, 1e-5, zero_centered)
    support.assert_same(actual, support.run_op(packed, 1e-5, zero_centered))
    support.assert_same(actual, support.run_reference(packed, 1e-5, zero_centered))
    assert actual.y.stride() == actual.grad_x.stride() == packed.x.stride()
