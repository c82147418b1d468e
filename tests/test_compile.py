"""P2 under torch.compile: the bits of eager, one op in each graph, in every mode of torch."""

import warnings
from collections.abc import Iterator

import automodel_rms_norm as arn
import pytest
import support
import torch
from automodel_rms_norm.testing import assert_bitwise_equal
from torch import Tensor, nn
from torch._inductor import compile_fx

EPS = 1e-5
MODES = ["default", "reduce-overhead", "max-autotune"]

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


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


@pytest.mark.case("Automodel-3106")
@pytest.mark.parametrize("kind", support.WEIGHT_KINDS)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dynamic", [True, False], ids=["dynamic", "static"])
def test_graphs_hold_one_op_with_the_bits_of_eager(
    device: torch.device, graphs: list[list[str]], dynamic: bool, mode: str, kind: str
) -> None:
    run = support.WEIGHT_KINDS[kind]
    inputs = support.make_inputs(3, 7, 256, device=device)
    compiled = torch.compile(arn.rms_norm, fullgraph=True, dynamic=dynamic, mode=mode)
    expected = run(arn.rms_norm, inputs)

    support.assert_same(run(compiled, inputs), expected)
    assert graphs == [["automodel::rms_norm_forward"], ["automodel::rms_norm_backward"]]
    graphs.clear()
    with torch.no_grad():
        y = compiled(inputs.x, inputs.weight, EPS)
    assert_bitwise_equal(y, expected.y, "y")
    assert graphs == [["automodel::rms_norm"]]
    with torch.inference_mode():
        y = compiled(inputs.x, inputs.weight, EPS)
    assert_bitwise_equal(y.clone(), expected.y, "y")


@pytest.mark.case("Automodel-3106", "Liger-1067")
@pytest.mark.parametrize("frozen", ["x", "weight"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dynamic", [True, False], ids=["dynamic", "static"])
def test_a_frozen_argument_compiles_to_eager_bits(
    device: torch.device, graphs: list[list[str]], dynamic: bool, mode: str, frozen: str
) -> None:
    inputs = support.make_inputs(4, 256, device=device)
    expected = support.forward_backward(arn.rms_norm, inputs)
    compiled = torch.compile(arn.rms_norm, fullgraph=True, dynamic=dynamic, mode=mode)
    x = inputs.x.clone().requires_grad_(frozen != "x")
    weight = nn.Parameter(inputs.weight.clone(), requires_grad=frozen == "x")
    wanted, name = (weight, "grad_weight") if frozen == "x" else (x, "grad_x")
    for _ in range(3):  # on a GPU with CUDA graphs the third call is a replay
        torch.compiler.cudagraph_mark_step_begin()
        y = compiled(x, weight, EPS)
        (gradient,) = torch.autograd.grad(y, wanted, inputs.grad_y)
        assert_bitwise_equal(y.detach(), expected.y, "y")
        assert_bitwise_equal(gradient, getattr(expected, name), name)
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


@pytest.mark.case("vLLM-PR-57123", "Liger-PR-1350")
@pytest.mark.parametrize("eps", [1e-5, 0.1 + 0.2, 1e-12, 0.0], ids=str)
def test_eps_is_the_same_number_compiled(device: torch.device, eps: float) -> None:
    """1e-5 and 0.1 + 0.2 are not floats: where the rounding is made must not matter."""
    x, weight, _ = support.make_inputs(64, 128, dtype=torch.float32, device=device)
    x = x * 1e-3  # so that eps counts
    compiled = torch.compile(arn.rms_norm, fullgraph=True, dynamic=True)
    for value in (eps, 2 * eps):
        with torch.no_grad():
            assert_bitwise_equal(
                compiled(x, weight, value), arn.rms_norm(x, weight, value), f"y, eps {value}"
            )


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
    # torch's own warnings of a first compilation are none of the op's.
    support.forward_backward(function, inputs)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        actual = support.forward_backward(function, inputs)
    torch.use_deterministic_algorithms(False)
    support.assert_same(actual, support.forward_backward(arn.rms_norm, inputs))


@pytest.mark.case("pytorch-157363")
@pytest.mark.cuda
@pytest.mark.parametrize("features", [1000, 4096, 16384, 65536])
def test_reduce_overhead_after_a_linear(features: int) -> None:
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


@pytest.mark.case("Sparse-vLLM-12")
@pytest.mark.cuda
def test_reduce_overhead_trains_with_the_bits_of_eager() -> None:
    compiled = torch.compile(arn.rms_norm, fullgraph=True, mode="reduce-overhead")
    for seed in range(4):
        inputs = support.make_inputs(8, 1024, device="cuda", seed=seed)
        torch.compiler.cudagraph_mark_step_begin()
        support.assert_same(
            support.forward_backward(compiled, inputs),
            support.forward_backward(arn.rms_norm, inputs),
        )
