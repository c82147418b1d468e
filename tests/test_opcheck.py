"""The ops as torch's tracers see them: schemas, Meta kernels with symbolic sizes, autograd keys."""

import automodel_rms_norm as arn
import pytest
import support
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

EPS = 1e-5
OPS = torch.ops.automodel

LAYOUTS = {
    "contiguous": lambda x: x,
    "rows-apart": lambda x: x[..., : x.shape[-1] // 2],
    "every-other-element": lambda x: x[..., ::2],
    "transposed": lambda x: x.transpose(0, 1),
    "expanded": lambda x: x[:1].expand_as(x),
    "empty": lambda x: x[:0],
    "one-row": lambda x: x[0, 0],
}


def check(op: torch._ops.OpOverload, *arguments: object) -> None:
    results = torch.library.opcheck(op, arguments)
    assert set(results.values()) == {"SUCCESS"}, results


def samples(
    layout: str,
    dtype: torch.dtype,
    weight_dtype: torch.dtype | None,
    zero_centered_gamma: bool,
    device: torch.device,
) -> support.Inputs:
    x, _, grad_y = support.make_inputs(3, 4, 10, dtype=dtype, device=device)
    x, grad_y = LAYOUTS[layout](x), LAYOUTS[layout](grad_y)
    weight = support.make_inputs(
        x.shape[-1],
        weight_dtype=weight_dtype,
        zero_centered_gamma=zero_centered_gamma,
        device=device,
    ).weight
    return support.Inputs(x, weight, grad_y)


# Every layout with one pair of dtypes, and every pair of dtypes in one layout.
SAMPLES = [(layout, torch.bfloat16, torch.float32) for layout in LAYOUTS] + [
    ("contiguous", *pair) for pair in support.DTYPE_PAIRS if pair[0] != torch.float16
]


@pytest.mark.parametrize("needs", [(True, True), (True, False), (False, True), (False, False)])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_opcheck_rms_norm_layouts(
    device: torch.device, layout: str, needs: tuple[bool, bool]
) -> None:
    x, weight, _ = samples(layout, torch.float32, torch.float32, False, device)
    check(
        OPS.rms_norm.default,
        x.requires_grad_(needs[0]),
        weight.requires_grad_(needs[1]),
        EPS,
        False,
    )


@pytest.mark.parametrize("zero_centered_gamma", [False, True])
@pytest.mark.parametrize(("dtype", "weight_dtype"), support.DTYPE_PAIRS, ids=str)
def test_opcheck_rms_norm_dtypes(
    device: torch.device,
    dtype: torch.dtype,
    weight_dtype: torch.dtype | None,
    zero_centered_gamma: bool,
) -> None:
    x, weight, _ = samples("contiguous", dtype, weight_dtype, zero_centered_gamma, device)
    if weight is not None:
        weight.requires_grad_()
    check(OPS.rms_norm.default, x.requires_grad_(), weight, EPS, zero_centered_gamma)


@pytest.mark.parametrize(("layout", "dtype", "weight_dtype"), SAMPLES, ids=str)
def test_opcheck_rms_norm_forward(
    device: torch.device, layout: str, dtype: torch.dtype, weight_dtype: torch.dtype | None
) -> None:
    x, weight, _ = samples(layout, dtype, weight_dtype, True, device)
    check(OPS.rms_norm_forward.default, x, weight, EPS, True)


@pytest.mark.parametrize("output_mask", [[True, True], [True, False], [False, True]])
@pytest.mark.parametrize(("layout", "dtype", "weight_dtype"), SAMPLES, ids=str)
def test_opcheck_rms_norm_backward(
    device: torch.device,
    layout: str,
    dtype: torch.dtype,
    weight_dtype: torch.dtype | None,
    output_mask: list[bool],
) -> None:
    x, weight, grad_y = samples(layout, dtype, weight_dtype, True, device)
    if weight is None and output_mask[1]:
        pytest.skip("no weight, no grad_weight")
    _, rstd = OPS.rms_norm_forward(x, weight, EPS, True)
    check(OPS.rms_norm_backward.default, grad_y, x, weight, rstd, True, output_mask)


# --- Meta -----------------------------------------------------------------------------------------


def all_outputs(x: Tensor, weight: Tensor | None, grad_y: Tensor) -> list[Tensor]:
    """The outputs of the three ops."""
    mask = [True, weight is not None]
    y, rstd = OPS.rms_norm_forward(x, weight, EPS, False)
    return [
        OPS.rms_norm(x, weight, EPS),
        y,
        rstd,
        *OPS.rms_norm_backward(grad_y, x, weight, rstd, False, mask),
    ]


def description(tensor: Tensor) -> tuple:
    return tuple(tensor.shape), tensor.stride(), tensor.dtype


@pytest.mark.parametrize(("layout", "dtype", "weight_dtype"), SAMPLES, ids=str)
def test_meta_outputs_are_described_as_eager_ones(
    device: torch.device, layout: str, dtype: torch.dtype, weight_dtype: torch.dtype | None
) -> None:
    inputs = samples(layout, dtype, weight_dtype, False, device)
    eager = all_outputs(*inputs)
    meta = all_outputs(
        *(
            None
            if tensor is None
            else torch.empty_strided(
                tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta"
            )
            for tensor in inputs
        )
    )
    assert [description(tensor) for tensor in meta] == [description(tensor) for tensor in eager]


def test_fake_tensors_keep_their_device(device: torch.device) -> None:
    inputs = samples("contiguous", torch.bfloat16, torch.bfloat16, False, device)
    with FakeTensorMode() as mode:
        outputs = all_outputs(*(mode.from_tensor(tensor) for tensor in inputs))
    for tensor in outputs:
        assert tensor.device.type == device.type


def test_symbolic_sizes_stay_symbols_through_all_three_ops() -> None:
    """No size is turned into a number: one trace serves every row count and hidden."""
    inputs = samples("contiguous", torch.bfloat16, torch.bfloat16, False, "cpu")
    graph = make_fx(all_outputs, tracing_mode="symbolic")(*inputs)
    shapes = [node.meta["val"] for node in graph.graph.nodes if node.op == "placeholder"]
    assert all(isinstance(size, torch.SymInt) for tensor in shapes for size in tensor.shape)

    names = [
        node.target._schema.name
        for node in graph.graph.nodes
        if isinstance(node.target, torch._ops.OpOverload)
    ]
    assert names == [
        "automodel::rms_norm_forward",
        "automodel::rms_norm",
        "automodel::rms_norm_backward",
    ]
    other = support.make_inputs(7, 2, 33)
    traced, eager = graph(*other), all_outputs(*other)
    for one, two in zip(traced, eager, strict=True):
        arn.testing.assert_bitwise_equal(one, two, "output of the traced graph")


def test_unbacked_sizes_pass_the_checks() -> None:
    """Row counts that depend on data, as after a mask."""

    def function(x: Tensor, mask: Tensor, weight: Tensor) -> Tensor:
        return arn.rms_norm(x[mask], weight, EPS)

    x, weight, _ = support.make_inputs(6, 10)
    mask = torch.tensor([True, False, True, True, False, False])
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        torch._dynamo.reset()
        y = torch.compile(function, fullgraph=True, backend="aot_eager")(x, mask, weight)
    arn.testing.assert_bitwise_equal(y, arn.rms_norm(x[mask], weight, EPS), "y")
    torch._dynamo.reset()


def test_a_module_runs_on_the_meta_device() -> None:
    module = arn.RMSNorm(10, device="meta")
    y = module(torch.empty(2, 3, 10, dtype=torch.bfloat16, device="meta", requires_grad=True))
    assert (y.device.type, y.shape, y.dtype) == ("meta", (2, 3, 10), torch.bfloat16)
    y.sum().backward()
    assert (module.weight.grad.device.type, module.weight.grad.shape) == ("meta", (10,))


@pytest.mark.parametrize("fake", [False, True], ids=["meta", "fake"])
def test_checks_are_made_without_data(fake: bool) -> None:
    with FakeTensorMode() if fake else torch.device("meta"):
        x, weight = torch.empty(2, 10), torch.empty(9)
        with pytest.raises(RuntimeError, match=r"rms_norm: weight must have x\.size\(-1\) = 10"):
            arn.rms_norm(x, weight, EPS)


# --- Tags and schemas -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        f"{op}{step}"
        for op in ("rms_norm", "add_rms_norm")
        for step in ("", "_forward", "_backward")
    ],
)
def test_the_op_is_tagged_for_the_compiler(name: str) -> None:
    op = getattr(OPS, name).default
    assert torch.Tag.pt2_compliant_tag in op.tags
    assert not op._schema.is_mutable


def test_the_schemas_are_those_of_the_design() -> None:
    assert str(OPS.rms_norm.default._schema) == (
        "automodel::rms_norm(Tensor x, Tensor? weight, float eps, bool zero_centered_gamma=False)"
        " -> Tensor"
    )
    assert str(OPS.rms_norm_forward.default._schema) == (
        "automodel::rms_norm_forward(Tensor x, Tensor? weight, float eps, bool zero_centered_gamma)"
        " -> (Tensor y, Tensor rstd)"
    )
    assert str(OPS.rms_norm_backward.default._schema) == (
        "automodel::rms_norm_backward(Tensor grad_y, Tensor x, Tensor? weight, Tensor rstd,"
        " bool zero_centered_gamma, bool[2] output_mask) -> (Tensor, Tensor)"
    )
