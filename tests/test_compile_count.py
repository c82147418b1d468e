"""How often torch.compile compiles: no needless compiles, no graph breaks, the bits of eager."""

from collections.abc import Callable

import automodel_rms_norm as arn
import pytest
import support
import torch
from automodel_rms_norm.testing import assert_bitwise_equal
from torch import Tensor, nn

EPS = 1e-5

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


@pytest.mark.case("diffusers-PR-11126")
@pytest.mark.parametrize("kind", support.WEIGHT_KINDS)
def test_two_sequence_lengths_are_one_compile(device: torch.device, kind: str) -> None:
    compiled = torch.compile(arn.rms_norm, fullgraph=True, dynamic=True)
    for length in (128, 77, 1024, 3):
        inputs = support.make_inputs(2, length, 64, device=device)
        run = support.WEIGHT_KINDS[kind]
        support.assert_same(run(compiled, inputs), run(arn.rms_norm, inputs))
    assert support.compiles(arn.rms_norm) == 1


@pytest.mark.case("quack-3b49364")
def test_ranks_compile_without_a_graph_break(device: torch.device) -> None:
    compiled = torch.compile(arn.rms_norm, fullgraph=True, dynamic=True)
    for shape in ((6, 64), (2, 3, 64), (2, 3, 5, 64), (64,)):
        inputs = support.make_inputs(*shape, device=device)
        support.assert_same(
            support.forward_backward(compiled, inputs),
            support.forward_backward(arn.rms_norm, inputs),
        )
    assert support.compiles(arn.rms_norm) == 4


@pytest.mark.case("Liger-871", "Liger-PR-884")
@pytest.mark.parametrize("dynamic", [None, True, False])
def test_another_shape_after_the_first(device: torch.device, dynamic: bool | None) -> None:
    compiled = torch.compile(arn.rms_norm, fullgraph=True, dynamic=dynamic)
    for shape in ((4, 128, 768), (2, 128, 768), (4, 64, 512)):
        inputs = support.make_inputs(*shape, device=device)
        support.assert_same(
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
                run = support.WEIGHT_KINDS["parameter" if parameter else "plain"]
                expected = run(arn.rms_norm, inputs)
                support.assert_same(run(compiled, inputs), expected)
                weight = nn.Parameter(inputs.weight) if parameter else inputs.weight
                with torch.no_grad():
                    assert_bitwise_equal(compiled(inputs.x, weight, EPS), expected.y, "y")


# What Dynamo guards on for any function: rank, dtype and grad mode, and a Parameter's size. The row
# count and a plain weight's size cost nothing.
PLAIN_COMPILES = len(RANKS) * len(DTYPES) * 2
PARAMETER_COMPILES = PLAIN_COMPILES * len(WIDTHS)


@pytest.mark.case("unsloth-zoo-PR-1003", "Automodel-PR-1650")
@pytest.mark.parametrize(
    ("parameter", "expected"),
    [(False, PLAIN_COMPILES), (True, PARAMETER_COMPILES)],
    ids=["plain", "parameter"],
)
def test_many_shapes_need_a_known_number_of_compiles(
    device: torch.device, parameter: bool, expected: int
) -> None:
    compiled = torch.compile(arn.rms_norm, backend="aot_eager", fullgraph=True, dynamic=True)
    with torch._dynamo.config.patch(recompile_limit=expected):
        run_the_matrix(compiled, parameter, device)
    assert support.compiles(arn.rms_norm) == expected


@pytest.mark.case("unsloth-zoo-PR-1003")
def test_past_the_recompile_limit_the_bits_stay(device: torch.device) -> None:
    """Dynamo then runs the function eagerly, which for this op is no change."""
    assert torch._dynamo.config.recompile_limit < PARAMETER_COMPILES
    compiled = torch.compile(arn.rms_norm, backend="aot_eager", dynamic=True)
    run_the_matrix(compiled, True, device)
    assert support.compiles(arn.rms_norm) == torch._dynamo.config.recompile_limit


@pytest.mark.case("unsloth-zoo-PR-1003")
def test_a_model_of_many_widths_is_one_compile_a_grad_mode(
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
    assert support.compiles(function) == 2
