"""The ops of add_rms_norm as torch's tracers see them, and their bits compiled and exported."""

import added
import automodel_rms_norm as arn
import pytest
import support
import torch
from added import EPS, OPS
from automodel_rms_norm.testing import assert_bitwise_equal
from test_compile import MODES, graphs  # noqa: F401
from test_opcheck import LAYOUTS, SAMPLES, check, description
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

FORWARD, BACKWARD = "automodel::add_rms_norm_forward", "automodel::add_rms_norm_backward"


pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def samples(
    layout: str,
    dtype: torch.dtype,
    weight_dtype: torch.dtype | None,
    device: torch.device,
    zero_centered_gamma: bool = False,
) -> added.Inputs:
    inputs = added.make_inputs(3, 4, 10, dtype=dtype, device=device)
    x, residual, _, grad_y, grad_sum = (LAYOUTS[layout](t) if t.dim() > 1 else t for t in inputs)
    weight = support.make_inputs(
        x.shape[-1],
        weight_dtype=weight_dtype,
        zero_centered_gamma=zero_centered_gamma,
        device=device,
    ).weight
    return added.Inputs(x, residual, weight, grad_y, grad_sum)


# --- opcheck --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "needs",
    [(True, True, True), (True, False, False), (False, True, True), (False, False, False)],
    ids=str,
)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_opcheck_add_rms_norm_layouts(layout, needs, device):
    arguments = samples(layout, torch.float32, torch.float32, device)[:3]
    for tensor, needed in zip(arguments, needs, strict=True):
        tensor.requires_grad_(needed)
    check(OPS.add_rms_norm.default, *arguments, EPS, False)


def test_opcheck_with_the_weight_alone(device):
    x, residual, weight = samples("contiguous", torch.float32, torch.float32, device)[:3]
    check(OPS.add_rms_norm.default, x, residual, weight.requires_grad_(), EPS, False)


@pytest.mark.parametrize(("dtype", "weight_dtype"), support.DTYPE_PAIRS, ids=str)
def test_opcheck_add_rms_norm_dtypes(dtype, weight_dtype, device):
    x, residual, weight, *_ = samples("contiguous", dtype, weight_dtype, device, True)
    if weight is not None:
        weight.requires_grad_()
    check(OPS.add_rms_norm.default, x.requires_grad_(), residual, weight, EPS, True)


@pytest.mark.parametrize(("layout", "dtype", "weight_dtype"), SAMPLES, ids=str)
def test_opcheck_add_rms_norm_forward(layout, dtype, weight_dtype, device):
    inputs = samples(layout, dtype, weight_dtype, device, True)
    check(OPS.add_rms_norm_forward.default, *inputs[:3], EPS, True)


@pytest.mark.parametrize("output_mask", [[True, True], [True, False], [False, True]])
@pytest.mark.parametrize(("layout", "dtype", "weight_dtype"), SAMPLES, ids=str)
def test_opcheck_add_rms_norm_backward(layout, dtype, weight_dtype, output_mask, device):
    x, residual, weight, grad_y, grad_sum = samples(layout, dtype, weight_dtype, device, True)
    if weight is None and output_mask[1]:
        pytest.skip("no weight, no grad_weight")
    _, total, rstd = OPS.add_rms_norm_forward(x, residual, weight, EPS, True)
    arguments = (grad_y, grad_sum, total, weight, rstd, True, output_mask)
    check(OPS.add_rms_norm_backward.default, *arguments)


# --- Meta -----------------------------------------------------------------------------------------


def all_outputs(*tensors: Tensor) -> list[Tensor]:
    """The outputs of the three ops."""
    inputs = added.Inputs(*tensors)
    results = [part for part in added.run_op(inputs) if part is not None]
    return [*results, *OPS.add_rms_norm(*inputs[:3], EPS)]


@pytest.mark.parametrize(("layout", "dtype", "weight_dtype"), SAMPLES, ids=str)
def test_meta_outputs_are_described_as_eager_ones(layout, dtype, weight_dtype, device):
    inputs = samples(layout, dtype, weight_dtype, device)
    meta = [
        t if t is None else torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta")
        for t in inputs
    ]
    expected = [description(tensor) for tensor in all_outputs(*inputs)]
    assert [description(tensor) for tensor in all_outputs(*meta)] == expected
    with FakeTensorMode() as mode:
        fake = all_outputs(*(t if t is None else mode.from_tensor(t) for t in inputs))
    assert {tensor.device.type for tensor in fake} == {device.type}


def test_symbolic_sizes_stay_symbols_through_all_three_ops():
    inputs = samples("contiguous", torch.bfloat16, torch.bfloat16, torch.device("cpu"))
    graph = make_fx(all_outputs, tracing_mode="symbolic")(*inputs)
    targets = [node.target for node in graph.graph.nodes]
    ops = [op._schema.name for op in targets if isinstance(op, torch._ops.OpOverload)]
    assert ops == [FORWARD, BACKWARD, "automodel::add_rms_norm"]
    other = added.make_inputs(7, 2, 33)
    for traced, eager in zip(graph(*other), all_outputs(*other), strict=True):
        assert_bitwise_equal(traced, eager, "output of the traced graph")


def test_unbacked_sizes_pass_the_checks():
    def function(x: Tensor, residual: Tensor, mask: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        stacked = torch.stack([x, residual])[:, mask]
        return arn.add_rms_norm(stacked[0], stacked[1], weight, EPS)

    x, residual, weight, *_ = added.make_inputs(6, 10)
    mask = torch.tensor([True, False, True, True, False, False])
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
        actual = compiled(x, residual, mask, weight)
    for ours, theirs in zip(actual, function(x, residual, mask, weight), strict=True):
        assert_bitwise_equal(ours, theirs, "output")


def test_the_schemas_are_those_of_the_design():
    assert str(OPS.add_rms_norm.default._schema) == (
        "automodel::add_rms_norm(Tensor x, Tensor residual, Tensor? weight, float eps,"
        " bool zero_centered_gamma=False) -> (Tensor y, Tensor sum)"
    )
    assert str(OPS.add_rms_norm_forward.default._schema) == (
        "automodel::add_rms_norm_forward(Tensor x, Tensor residual, Tensor? weight, float eps,"
        " bool zero_centered_gamma) -> (Tensor y, Tensor sum, Tensor rstd)"
    )
    assert str(OPS.add_rms_norm_backward.default._schema) == (
        "automodel::add_rms_norm_backward(Tensor grad_y, Tensor grad_sum, Tensor sum,"
        " Tensor? weight, Tensor rstd, bool zero_centered_gamma, bool[2] output_mask)"
        " -> (Tensor, Tensor)"
    )


# --- torch.compile --------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dynamic", [True, False], ids=["dynamic", "static"])
def test_graphs_hold_one_op_with_the_bits_of_eager(dynamic, mode, graphs, device):  # noqa: F811
    inputs = added.make_inputs(3, 7, 256, device=device)
    expected = added.forward_backward(arn.add_rms_norm, inputs)
    compiled = torch.compile(arn.add_rms_norm, fullgraph=True, dynamic=dynamic, mode=mode)
    support.assert_same(added.forward_backward(compiled, inputs), expected)
    assert graphs == [[FORWARD], [BACKWARD]]
    graphs.clear()
    for grad_mode in (torch.no_grad, torch.inference_mode):
        with grad_mode():
            torch.compiler.cudagraph_mark_step_begin()
            y, total = (output.clone() for output in compiled(*inputs[:3], EPS))
        assert_bitwise_equal(y.clone(), expected.y, "y")
        assert_bitwise_equal(total.clone(), expected.sum, "sum")
    assert graphs[0] == ["automodel::add_rms_norm"]


@pytest.mark.parametrize("dynamic", [True, False], ids=["dynamic", "static"])
def test_a_graph_that_uses_y_alone_has_rms_norms_backward(dynamic, graphs, device):  # noqa: F811
    inputs = added.make_inputs(3, 256, device=device)

    def function(*arguments: Tensor) -> Tensor:
        return arn.add_rms_norm(*arguments, EPS)[0]

    def run(function: object) -> tuple[Tensor, ...]:
        leaves = [tensor.clone().requires_grad_() for tensor in inputs[:3]]
        return torch.autograd.grad(function(*leaves), leaves, inputs.grad_y)

    compiled = torch.compile(function, fullgraph=True, dynamic=dynamic)
    for actual, expected in zip(run(compiled), run(function), strict=True):
        assert_bitwise_equal(actual, expected, "gradient")
    assert graphs == [[FORWARD], ["automodel::rms_norm_backward"]]


@pytest.mark.parametrize("used", [0, 1], ids=["y", "sum"])
def test_a_gradient_that_does_not_come_is_zeros_in_a_compiled_graph(used, device):
    """torch fills it in where both outputs leave the graph; that turns -0 into +0 and no more."""
    inputs = added.make_inputs(9, 96, device=device)
    inputs.grad_y[1], inputs.weight[:50] = 0, -inputs.weight[:50]
    inputs.grad_sum[2] = -0.0

    def run(function: object) -> tuple[Tensor, ...]:
        leaves = [tensor.clone().requires_grad_() for tensor in inputs[:3]]
        output = function(*leaves, EPS)[used]
        wanted = leaves if used == 0 else leaves[:2]
        return torch.autograd.grad(output, wanted, (inputs.grad_y, inputs.grad_sum)[used])

    compiled = torch.compile(arn.add_rms_norm, fullgraph=True, dynamic=True)
    for actual, expected in zip(run(compiled), run(arn.add_rms_norm), strict=True):
        assert_bitwise_equal(actual + 0.0, expected + 0.0, "gradient")


@pytest.mark.parametrize("frozen", ["x", "residual", "weight", "x and residual"])
def test_frozen_arguments_compile_to_eager_bits(frozen, graphs, device):  # noqa: F811
    inputs = added.make_inputs(4, 256, device=device)
    expected = added.forward_backward(arn.add_rms_norm, inputs)
    compiled = torch.compile(arn.add_rms_norm, fullgraph=True, dynamic=True)
    x = inputs.x.clone().requires_grad_("x" not in frozen)
    residual = inputs.residual.clone().requires_grad_("residual" not in frozen)
    weight = nn.Parameter(inputs.weight.clone(), requires_grad=frozen != "weight")
    y, total = compiled(x, residual, weight, EPS)
    assert total.requires_grad == (frozen != "x and residual")
    outputs, grads = [y], [inputs.grad_y]
    if total.requires_grad:
        outputs, grads = [y, total], [inputs.grad_y, inputs.grad_sum]
    torch.autograd.backward(outputs, grads)
    for leaf, name in ((x, "grad_x"), (residual, "grad_residual"), (weight, "grad_weight")):
        if leaf.requires_grad:
            assert_bitwise_equal(leaf.grad, getattr(expected, name), name)
    assert graphs == [
        [FORWARD],
        [BACKWARD if total.requires_grad else "automodel::rms_norm_backward"],
    ]


def test_a_compiled_residual_stream_has_the_bits_of_eager(device):
    """Layers as a model has them, with the sizes dynamic."""
    inputs = added.make_inputs(6, 96, device=device)
    weights = nn.ParameterList(inputs.weight * (1 + 0.1 * layer) for layer in range(3))

    def function(x: Tensor, stream: Tensor) -> tuple[Tensor, Tensor]:
        for weight in weights:
            x, stream = arn.add_rms_norm(x, stream, weight, EPS)
        return x, stream

    def run(function: object, rows: int) -> list[Tensor]:
        weights.zero_grad()
        part = inputs.at(slice(0, rows))
        leaves = [tensor.clone().requires_grad_() for tensor in part[:2]]
        outputs = function(*leaves)
        torch.autograd.backward(outputs, (part.grad_y, part.grad_sum))
        return [*(t.detach() for t in outputs), *(leaf.grad for leaf in (*leaves, *weights))]

    compiled = torch.compile(function, fullgraph=True, dynamic=True)
    for rows in (6, 3, 5):
        for actual, expected in zip(run(compiled, rows), run(function, rows), strict=True):
            assert_bitwise_equal(actual, expected, f"result of {rows} rows")
    assert support.compiles(function) == 1


@pytest.mark.parametrize(("dtype", "weight_dtype"), support.DTYPE_PAIRS, ids=str)
def test_every_dtype_pair_has_the_bits_of_eager(dtype, weight_dtype, device):
    inputs = added.make_inputs(5, 96, dtype=dtype, weight_dtype=weight_dtype, device=device)
    compiled = torch.compile(arn.add_rms_norm, fullgraph=True, dynamic=True, backend="aot_eager")
    support.assert_same(
        added.forward_backward(compiled, inputs, EPS, True),
        added.forward_backward(arn.add_rms_norm, inputs, EPS, True),
    )


# --- Export and CUDA graphs -----------------------------------------------------------------------


class Layer(nn.Module):
    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)

    def forward(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        return arn.add_rms_norm(x, residual, self.weight, EPS)


@pytest.mark.parametrize("strict", [False, True])
def test_export_with_a_dynamic_batch_keeps_the_op_and_its_bits(strict, device):
    inputs = added.make_inputs(4, 96, device=device)
    layer = Layer(inputs.weight)
    dims = {0: torch.export.Dim("batch")}
    program = torch.export.export(layer, inputs[:2], dynamic_shapes=(dims, dims), strict=strict)
    targets = [str(node.target) for node in program.graph.nodes]
    assert [t for t in targets if "automodel" in t] == ["automodel.add_rms_norm.default"]
    for rows in (1, 7, 64):
        x, residual, *_ = added.make_inputs(rows, 96, device=device)
        for actual, expected in zip(program.module()(x, residual), layer(x, residual), strict=True):
            assert_bitwise_equal(actual.detach(), expected.detach(), f"output of {rows} rows")


@pytest.mark.cuda
def test_a_replayed_cuda_graph_has_the_bits_of_eager():
    first, second = (added.make_inputs(33, 4096, seed=seed, device="cuda") for seed in range(2))
    expected = added.run_op(second)
    static = added.Inputs(*(tensor.clone() for tensor in first))
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        added.run_op(static)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = added.run_op(static)
    for tensor, value in zip(static, second, strict=True):
        tensor.copy_(value)
    graph.replay()
    support.assert_same(results, expected)
