"""P2 under torch.compile: the bits of eager, one op in each graph, no needless compiles."""

import warnings
from collections.abc import Callable, Iterator

import automodel_rms_norm as arn
import pytest
import support
import torch
from automodel_rms_norm.testing import assert_bitwise_equal
from torch import Tensor, nn
from torch._dynamo.eval_frame import _debug_get_cache_entry_list
from torch._inductor import compile_fx

EPS = 1e-5
MODES = ["default", "reduce-overhead", "max-autotune"]

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def plain_weight(function: Callable[..., Tensor], inputs: support.Inputs) -> support.Outputs:
    """As support.forward_backward, with the weight a plain tensor: its size is then dynamic."""
    x, weight = inputs.x.clone().requires_grad_(), inputs.weight.clone().requires_grad_()
    y = function(x, weight, EPS)
    return support.Outputs(y.detach(), *torch.autograd.grad(y, (x, weight), inputs.grad_y))


def assert_outputs_equal(actual: support.Outputs, expected: support.Outputs) -> None:
    for name in expected._fields:
        assert_bitwise_equal(getattr(actual, name), getattr(expected, name), name)


WEIGHT_KINDS = {"parameter": support.forward_backward, "plain": plain_weight}


# --- One op in each graph, and its bits -----------------------------------------------------------


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[list[str]]]:
    """For each graph that Inductor compiles, the names of this package's ops in it."""
    recorded: list[list[str]] = []
    original = compile_fx._compile_fx_inner

    def record(graph: torch.fx.GraphModule, *args: object, **kwargs: object) -> object:
        targets = [node.target for node in graph.graph.nodes if node.op == "call_function"]
        ops = [target for target in targets if isinstance(target, torch._ops.OpOverload)]
        recorded.append([op._schema.name for op in ops if op.namespace == "automodel"])
        return original(graph, *args, **kwargs)

    monkeypatch.setattr(compile_fx, "_compile_fx_inner", record)
    # A cached result would be taken without a graph.
    with torch._inductor.config.patch(force_disable_caches=True):
        yield recorded


@pytest.mark.parametrize("kind", WEIGHT_KINDS)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dynamic", [True, False], ids=["dynamic", "static"])
def test_graphs_hold_one_op_with_the_bits_of_eager_automodel_3106(
    device: torch.device, graphs: list[list[str]], dynamic: bool, mode: str, kind: str
) -> None:
    run = WEIGHT_KINDS[kind]
    inputs = support.make_inputs(3, 7, 256, device=device)
    compiled = torch.compile(arn.rms_norm, fullgraph=True, dynamic=dynamic, mode=mode)
    expected = run(arn.rms_norm, inputs)

    assert_outputs_equal(run(compiled, inputs), expected)
    assert graphs == [["automodel::rms_norm_forward"], ["automodel::rms_norm_backward"]]
    graphs.clear()
    with torch.no_grad():
        y = compiled(inputs.x, inputs.weight, EPS)
    assert_bitwise_equal(y, expected.y, "y")
    assert graphs == [["automodel::rms_norm"]]
    with torch.inference_mode():
        y = compiled(inputs.x, inputs.weight, EPS)
    assert_bitwise_equal(y.clone(), expected.y, "y")


@pytest.mark.parametrize("frozen", ["x", "weight-liger-1067"])
def test_a_frozen_argument_compiles_to_eager_bits_automodel_3106(
    device: torch.device, graphs: list[list[str]], frozen: str
) -> None:
    inputs = support.make_inputs(4, 256, device=device)
    expected = support.forward_backward(arn.rms_norm, inputs)
    x = inputs.x.clone().requires_grad_(frozen != "x")
    weight = nn.Parameter(inputs.weight, requires_grad=frozen == "x")
    y = torch.compile(arn.rms_norm, fullgraph=True, dynamic=True)(x, weight, EPS)
    y.backward(inputs.grad_y)
    assert_bitwise_equal(y.detach(), expected.y, "y")
    if frozen == "x":
        assert_bitwise_equal(weight.grad, expected.grad_weight, "grad_weight")
    else:
        assert_bitwise_equal(x.grad, expected.grad_x, "grad_x")
    assert graphs == [["automodel::rms_norm_forward"], ["automodel::rms_norm_backward"]]


@pytest.mark.parametrize("zero_centered_gamma", [False, True])
@pytest.mark.parametrize(("dtype", "weight_dtype"), support.DTYPE_PAIRS, ids=str)
def test_every_dtype_pair_has_the_bits_of_eager(
    device: torch.device,
    dtype: torch.dtype,
    weight_dtype: torch.dtype | None,
    zero_centered_gamma: bool,
) -> None:
    inputs = support.make_inputs(
        5,
        96,
        dtype=dtype,
        weight_dtype=weight_dtype,
        zero_centered_gamma=zero_centered_gamma,
        device=device,
    )
    compiled = torch.compile(arn.rms_norm, fullgraph=True, dynamic=True, backend="aot_eager")
    arguments = (inputs, EPS, zero_centered_gamma)
    expected = support.forward_backward(arn.rms_norm, *arguments)
    actual = support.forward_backward(compiled, *arguments)
    for name in expected._fields if weight_dtype is not None else ("y", "grad_x"):
        assert_bitwise_equal(getattr(actual, name), getattr(expected, name), name)


@pytest.mark.parametrize("eps", [1e-5, 0.1 + 0.2, 1e-12, 0.0], ids=str)
def test_eps_is_the_same_number_compiled_vllm_57123_liger_1350(
    device: torch.device, eps: float
) -> None:
    """1e-5 and 0.1 + 0.2 are not floats: where the rounding is made must not matter."""
    x, weight, _ = support.make_inputs(64, 128, dtype=torch.float32, device=device)
    x = x * 1e-3  # so that eps counts
    compiled = torch.compile(arn.rms_norm, fullgraph=True, dynamic=True)
    for value in (eps, 2 * eps):
        with torch.no_grad():
            assert_bitwise_equal(
                compiled(x, weight, value), arn.rms_norm(x, weight, value), f"y, eps {value}"
            )


@pytest.mark.cuda
@pytest.mark.long
@pytest.mark.parametrize("eps", [1e-5, 0.1 + 0.2], ids=str)
def test_eps_is_the_same_number_over_1e8_elements_vllm_57123(eps: float) -> None:
    x = torch.randn(25000, 4096, device="cuda", dtype=torch.bfloat16)
    weight = 1 + 0.3 * torch.randn(4096, device="cuda", dtype=torch.bfloat16)
    compiled = torch.compile(arn.rms_norm, fullgraph=True, dynamic=True)
    with torch.no_grad():
        expected = arn.rms_norm(x, weight, eps)
        assert_bitwise_equal(compiled(x, weight, eps), expected, "compiled y")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = arn.rms_norm(x, weight, eps)
        graph.replay()
        assert_bitwise_equal(y, expected, "replayed y")


# --- How many compiles ----------------------------------------------------------------------------


def compiles(function: Callable) -> int:
    """How many compiled forms Dynamo holds of a function.

    Not how often it called the backend: with dynamic=True Dynamo first tries eps as a tensor, and
    starts the same compilation again with eps as a constant when it meets the op.
    """
    return len(_debug_get_cache_entry_list(function.__code__))


@pytest.mark.parametrize("kind", WEIGHT_KINDS)
def test_two_sequence_lengths_are_one_compile_diffusers_11126(
    device: torch.device, kind: str
) -> None:
    compiled = torch.compile(arn.rms_norm, fullgraph=True, dynamic=True)
    for length in (128, 77, 1024, 3):
        inputs = support.make_inputs(2, length, 64, device=device)
        run = WEIGHT_KINDS[kind]
        assert_outputs_equal(run(compiled, inputs), run(arn.rms_norm, inputs))
    assert compiles(arn.rms_norm) == 1


def test_ranks_compile_without_a_graph_break_quack_3b49364(device: torch.device) -> None:
    compiled = torch.compile(arn.rms_norm, fullgraph=True, dynamic=True)
    for shape in ((6, 64), (2, 3, 64), (2, 3, 5, 64), (64,)):
        inputs = support.make_inputs(*shape, device=device)
        assert_outputs_equal(
            support.forward_backward(compiled, inputs),
            support.forward_backward(arn.rms_norm, inputs),
        )
    assert compiles(arn.rms_norm) == 4


@pytest.mark.parametrize("dynamic", [None, True, False])
def test_another_shape_after_the_first_liger_871_884(
    device: torch.device, dynamic: bool | None
) -> None:
    compiled = torch.compile(arn.rms_norm, fullgraph=True, dynamic=dynamic)
    for shape in ((4, 128, 768), (2, 128, 768), (4, 64, 512)):
        inputs = support.make_inputs(*shape, device=device)
        assert_outputs_equal(
            support.forward_backward(compiled, inputs),
            support.forward_backward(arn.rms_norm, inputs),
        )


WIDTHS = (64, 96, 128, 256, 320)
RANKS = ((6,), (2, 3))
DTYPES = (torch.bfloat16, torch.float32)


def run_the_matrix(compiled: Callable[..., Tensor], parameter: bool, device: torch.device) -> None:
    """Widths × ranks × dtypes × grad modes through one compiled function."""
    for outer in RANKS:
        for dtype in DTYPES:
            for width in WIDTHS:
                inputs = support.make_inputs(*outer, width, dtype=dtype, device=device)
                run = WEIGHT_KINDS["parameter" if parameter else "plain"]
                expected = run(arn.rms_norm, inputs)
                assert_outputs_equal(run(compiled, inputs), expected)
                weight = nn.Parameter(inputs.weight) if parameter else inputs.weight
                with torch.no_grad():
                    assert_bitwise_equal(compiled(inputs.x, weight, EPS), expected.y, "y")


# What Dynamo guards on for any function: rank, dtype and grad mode, and a Parameter's size. The row
# count and a plain weight's size cost nothing.
PLAIN_COMPILES = len(RANKS) * len(DTYPES) * 2
PARAMETER_COMPILES = PLAIN_COMPILES * len(WIDTHS)


@pytest.mark.parametrize(
    ("parameter", "expected"),
    [
        pytest.param(False, PLAIN_COMPILES, id="plain-unsloth-zoo-1003-automodel-1650"),
        pytest.param(True, PARAMETER_COMPILES, id="parameter-unsloth-zoo-1003-automodel-1650"),
    ],
)
def test_many_shapes_need_a_known_number_of_compiles(
    device: torch.device, parameter: bool, expected: int
) -> None:
    compiled = torch.compile(arn.rms_norm, backend="aot_eager", fullgraph=True, dynamic=True)
    with torch._dynamo.config.patch(recompile_limit=expected):
        run_the_matrix(compiled, parameter, device)
    assert compiles(arn.rms_norm) == expected


def test_past_the_recompile_limit_the_bits_stay_unsloth_zoo_1003(device: torch.device) -> None:
    """Dynamo then runs the function eagerly, which for this op is no change."""
    assert torch._dynamo.config.recompile_limit < PARAMETER_COMPILES
    compiled = torch.compile(arn.rms_norm, backend="aot_eager", dynamic=True)
    run_the_matrix(compiled, True, device)
    assert compiles(arn.rms_norm) == torch._dynamo.config.recompile_limit


def test_a_model_of_many_widths_is_one_compile_a_grad_mode_unsloth_zoo_1003(
    device: torch.device,
) -> None:
    model = nn.ModuleList(arn.RMSNorm(width, device=device) for width in WIDTHS)
    for number, norm in enumerate(model):
        with torch.no_grad():
            norm.weight.copy_(support.make_inputs(norm.dim, seed=number, device=device).weight)

    def function(inputs: list[Tensor]) -> list[Tensor]:
        return [norm(x) for norm, x in zip(model, inputs, strict=True)]

    compiled = torch.compile(function, fullgraph=True, dynamic=True)
    for rows in (5, 9):
        inputs = [support.make_inputs(rows, width, device=device).x for width in WIDTHS]
        expected = function(inputs)
        for actual, y in zip(compiled(inputs), expected, strict=True):
            assert_bitwise_equal(actual.detach(), y.detach(), "y")
        with torch.no_grad():
            for actual, y in zip(compiled(inputs), expected, strict=True):
                assert_bitwise_equal(actual, y.detach(), "y")
    assert compiles(function) == 2


# --- Inside a model -------------------------------------------------------------------------------


class Block(nn.Module):
    """Linear, norm, linear, and the norm's own input and output beside the result."""

    def __init__(self, dim: int, device: torch.device) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.up = nn.Linear(dim, dim, device=device)
        self.norm = arn.RMSNorm(dim, device=device, dtype=torch.float32)
        self.down = nn.Linear(dim, dim, device=device)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        hidden = torch.relu(self.up(x) * 1.5)
        y = self.norm(hidden)
        return hidden, y, self.down(y * 2.0)


@pytest.mark.parametrize("mode", ["default", "max-autotune-no-cudagraphs"])
def test_rows_stay_independent_in_a_larger_graph_vllm_39096(
    device: torch.device, mode: str
) -> None:
    block = Block(96, device)
    compiled = torch.compile(block, fullgraph=True, dynamic=True, mode=mode)
    x, _, _ = support.make_inputs(33, 96, dtype=torch.float32, device=device)
    for grad in (True, False):
        for rows in (33, 7, 1):
            with torch.set_grad_enabled(grad):
                hidden, y, _ = compiled(x[:rows])
            # hidden is the compiler's, and may depend on the batch. y depends on its row of hidden.
            for row in (0, rows // 2, rows - 1):
                alone = block.norm(hidden[row].detach()).detach()
                assert_bitwise_equal(y[row].detach(), alone, f"y, row {row} of {rows}")


def test_rows_stay_independent_between_pointwise_ops_vllm_39096(device: torch.device) -> None:
    weight = nn.Parameter(support.make_inputs(96, device=device).weight)

    def function(x: Tensor) -> Tensor:
        return torch.relu(arn.rms_norm(x * 1.5, weight, EPS)) * 0.25

    compiled = torch.compile(function, fullgraph=True, dynamic=True)
    x, _, _ = support.make_inputs(257, 96, device=device)
    with torch.no_grad():
        whole = compiled(x)
        for rows in (1, 2, 255, 256):
            assert_bitwise_equal(compiled(x[-rows:]), whole[-rows:], f"the last {rows} rows")


def test_gradients_inside_a_larger_graph_are_those_of_eager(device: torch.device) -> None:
    """Pointwise neighbours of one rounding each, so that eager and compiled agree around the op."""
    inputs = support.make_inputs(2, 5, 96, dtype=torch.float32, device=device)

    def function(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return arn.rms_norm(x * 1.5, weight * 0.5, eps) * 2.0

    compiled = torch.compile(function, fullgraph=True, dynamic=True)
    assert_outputs_equal(
        support.forward_backward(compiled, inputs), support.forward_backward(function, inputs)
    )


def test_a_compiled_module_sees_its_weight_change(device: torch.device) -> None:
    module = arn.RMSNorm(96, device=device)
    compiled = torch.compile(module, fullgraph=True, dynamic=True)
    x, weight, grad_y = support.make_inputs(5, 96, device=device)
    for step in range(3):
        with torch.no_grad():
            module.weight.copy_(weight * (step + 1))
        module.weight.grad = None
        y = compiled(x)
        y.backward(grad_y)
        expected = support.forward_backward(
            arn.rms_norm, support.Inputs(x, weight * (step + 1), grad_y)
        )
        assert_bitwise_equal(y.detach(), expected.y, "y")
        assert_bitwise_equal(module.weight.grad, expected.grad_weight, "grad_weight")
    assert compiles(arn.RMSNorm.forward) == 1


@pytest.mark.parametrize("rows", [4, 0])
def test_compiled_checkpoint_recomputes_the_same_bits(device: torch.device, rows: int) -> None:
    inputs = support.make_inputs(rows, 96, device=device)

    def checkpointed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return torch.utils.checkpoint.checkpoint(
            arn.rms_norm, x * 2.0, weight, eps, use_reentrant=False
        )

    compiled = torch.compile(checkpointed, fullgraph=True, dynamic=True)
    assert_outputs_equal(
        support.forward_backward(compiled, inputs),
        support.forward_backward(checkpointed, inputs),
    )


# --- Outputs --------------------------------------------------------------------------------------


@pytest.mark.parametrize("weighted", [False, True], ids=["weightless", "unit-weight"])
def test_y_is_never_x_vllm_44130(device: torch.device, weighted: bool) -> None:
    """x of exactly unit mean square, which the op maps to itself."""
    x = torch.ones(4, 64, device=device)
    x[:, ::2] = -1
    weight = torch.ones(64, device=device) if weighted else None
    compiled = torch.compile(arn.rms_norm, fullgraph=True)
    for function in (arn.rms_norm, compiled):
        y = function(x, weight, 0.0)
        assert torch.equal(y, x)
        assert y.untyped_storage().data_ptr() != x.untyped_storage().data_ptr()
        y.zero_()
        assert x.abs().min() == 1


def test_an_empty_batch_through_a_dynamic_graph_flash_attention_1620(device: torch.device) -> None:
    compiled = torch.compile(arn.rms_norm, fullgraph=True, dynamic=True)
    for length in (4, 0, 9):
        inputs = support.make_inputs(3, length, 2520, device=device)
        expected = support.forward_backward(arn.rms_norm, inputs)
        assert expected.y.shape == (3, length, 2520)
        assert_outputs_equal(support.forward_backward(compiled, inputs), expected)
        if length == 0:
            assert torch.count_nonzero(expected.grad_weight) == 0
    assert compiles(arn.rms_norm) == 2  # Dynamo itself specialises the size 0


LAYOUTS = {
    "torch-xpu-ops-2791": lambda: torch.randn(0, 1),
    "empty-0-7168": lambda: torch.randn(0, 7168),
    "empty-3-0-2520": lambda: torch.randn(3, 0, 2520),
    "one-row": lambda: torch.randn(48),
    "one-column": lambda: torch.randn(5, 1),
    "rows-apart": lambda: torch.randn(5, 96)[:, :48],
    "every-other-element": lambda: torch.randn(5, 96)[:, ::2],
    "transposed": lambda: torch.randn(3, 4, 48).transpose(0, 1),
    "columns-first": lambda: torch.randn(48, 5).t(),
    "expanded": lambda: torch.randn(1, 48).expand(5, -1),
    "vllm-49913": lambda: torch.randn(7, 1, 48).transpose(0, 1),
    "vllm-49913-odd-stride": lambda: torch.randn(7 * 48).as_strided((1, 7, 48), (1, 48, 1)),
    "channels-last": lambda: torch.randn(2, 3, 4, 48).to(memory_format=torch.channels_last),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_strides_are_the_same_eager_meta_and_compiled(device: torch.device, layout: str) -> None:
    x = LAYOUTS[layout]()
    # .to("cuda") keeps dense strides alone; as_strided restores the others.
    x = x.as_strided(x.shape, x.stride()) if device.type == "cpu" else on_device(x, device)
    weight = torch.full((x.shape[-1],), 1.25, device=device)
    contiguous = torch.empty(x.shape).stride()

    def gradients(function: Callable[..., Tensor]) -> list[Tensor]:
        leaf, gain = x.detach().requires_grad_(), weight.clone().requires_grad_()
        y = function(leaf, gain, EPS)
        return [y, *torch.autograd.grad(y, (leaf, gain), torch.ones_like(y))]

    eager = gradients(arn.rms_norm)
    meta_x = torch.empty_strided(x.shape, x.stride(), device="meta")
    meta = [arn.rms_norm(meta_x, weight.to("meta"), EPS)]
    compiled = gradients(torch.compile(arn.rms_norm, fullgraph=True, dynamic=False))
    for number, tensor in enumerate(eager):
        assert tensor.stride() == (contiguous, contiguous, (1,))[number]
        assert compiled[number].stride() == tensor.stride()
        assert_bitwise_equal(compiled[number].detach(), tensor.detach(), "output")
    assert meta[0].stride() == eager[0].stride()


def on_device(x: Tensor, device: torch.device) -> Tensor:
    """A copy of the whole storage, so that any strides are kept."""
    storage = torch.tensor([], dtype=x.dtype).set_(x.untyped_storage()).to(device)
    return storage.as_strided(x.shape, x.stride(), x.storage_offset())


# --- Modes of torch -------------------------------------------------------------------------------


@pytest.fixture
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_deterministic_mode_has_neither_error_nor_warning(
    device: torch.device, compiled: bool
) -> None:
    inputs = support.make_inputs(33, 96, device=device)
    function = torch.compile(arn.rms_norm, fullgraph=True) if compiled else arn.rms_norm
    if compiled:
        function(inputs.x, inputs.weight, EPS)  # torch's own warnings of a first compilation
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        first = support.forward_backward(arn.rms_norm, inputs)
    if compiled:
        assert_outputs_equal(support.forward_backward(function, inputs), first)
    torch.use_deterministic_algorithms(False)
    assert_outputs_equal(support.forward_backward(arn.rms_norm, inputs), first)


@pytest.mark.cuda
@pytest.mark.parametrize("features", [1000, 4096, 16384, 65536])
def test_reduce_overhead_after_a_linear_pytorch_157363(features: int) -> None:
    inputs = support.make_inputs(8, 64, device="cuda")
    linear = nn.Linear(64, features, device="cuda", dtype=torch.bfloat16)
    norm = arn.RMSNorm(features, device="cuda")

    def function(x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = linear(x)
        return hidden, norm(hidden)

    compiled = torch.compile(function, fullgraph=True, mode="reduce-overhead")
    with torch.no_grad():
        for _ in range(4):  # the later ones replay a CUDA graph
            hidden, y = compiled(inputs.x)
            assert_bitwise_equal(y.clone(), norm(hidden.clone()), "y")


@pytest.mark.cuda
def test_reduce_overhead_trains_with_the_bits_of_eager_sparse_vllm_12() -> None:
    compiled = torch.compile(arn.rms_norm, fullgraph=True, mode="reduce-overhead")
    for seed in range(4):
        inputs = support.make_inputs(8, 1024, device="cuda", seed=seed)
        torch.compiler.cudagraph_mark_step_begin()
        assert_outputs_equal(
            support.forward_backward(compiled, inputs),
            support.forward_backward(arn.rms_norm, inputs),
        )
