"""The fault that this package is for: it shows in the affected implementation and not in the op.

Each statement is made of both, and the affected implementation has to be seen failing.
"""

from collections.abc import Callable, Iterator

import automodel_rms_norm as arn
import baselines
import pytest
import support
import torch
from automodel_rms_norm.accuracy import Inputs as WithEps
from automodel_rms_norm.accuracy import Outputs, inaccuracies
from automodel_rms_norm.gate import inductor
from automodel_rms_norm.testing import assert_bitwise_equal, assert_context_parity
from torch import Tensor

EPS = 1e-5
ROWS = 4096

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def answers(
    function: Callable[..., Tensor], inputs: support.Inputs
) -> Iterator[tuple[list[Tensor], inductor.Recording]]:
    """y of `function` compiled, in grad mode and under no_grad, for every choice of the autotuner,
    with what was recorded of it."""
    weight = torch.nn.Parameter(inputs.weight)

    def both() -> list[Tensor]:
        compiled = torch.compile(function, dynamic=True)
        with_grad = compiled(inputs.x.clone().requires_grad_(), weight, EPS).detach()
        with torch.no_grad():
            return [with_grad, compiled(inputs.x, weight, EPS)]

    return inductor.each_choice(both)


def count_different(tensors: list[Tensor]) -> int:
    different: list[Tensor] = []
    for tensor in tensors:
        if not any(torch.equal(tensor, other) for other in different):
            different.append(tensor)
    return len(different)


@pytest.mark.case("Automodel-3106")
@pytest.mark.cuda
@pytest.mark.parametrize("hidden", [2688, 4096, 8192])
def test_autotuning_cannot_change_the_bits(hidden: int) -> None:
    if reason := inductor.why_not_forced():
        pytest.skip(reason)
    inputs = support.make_inputs(1, ROWS, hidden, device="cuda")
    affected = list(answers(baselines.automodel_0_6, inputs))
    assert len(affected) > 1, (
        "Inductor autotuned no kernel of the affected function over more than one configuration: "
        "the fault cannot be shown this way with this torch"
    )
    assert count_different([y for ys, _ in affected for y in ys]) == 2

    op = [y for ys, _ in answers(arn.rms_norm, inputs) for y in ys]
    inside = answers(lambda x, weight, eps: arn.rms_norm(x * 1.0, weight, eps) * 1.0, inputs)
    for y in [*op, *(y for ys, _ in inside for y in ys)]:
        assert_bitwise_equal(y, op[0], "y")


@pytest.mark.case("Automodel-3106")
@pytest.mark.parametrize("dynamic", [True, False])
@pytest.mark.parametrize(
    ("dtype", "hidden"), [(torch.float32, 128), (torch.float32, 768), (torch.bfloat16, 4096)]
)
def test_compiling_cannot_change_the_bits(dtype: torch.dtype, hidden: int, dynamic: bool) -> None:
    """On the CPU, where Inductor has no choice, the fault shows between eager and compiled.

    On a GPU the choice is the test above's, and the op compiled is test_compile.py's.
    """
    inputs = support.make_inputs(64, hidden, dtype=dtype, weight_dtype=dtype)

    def both(function: Callable[..., Tensor]) -> tuple[support.Outputs, support.Outputs]:
        compiled = torch.compile(function, dynamic=dynamic)
        return (
            support.forward_backward(function, inputs),
            support.forward_backward(compiled, inputs),
        )

    eager, compiled = both(baselines.automodel_0_6)
    assert not torch.equal(eager.y, compiled.y)
    assert not torch.equal(eager.grad_x, compiled.grad_x)

    eager, compiled = both(arn.rms_norm)
    for name in support.Outputs._fields:
        assert_bitwise_equal(getattr(compiled, name), getattr(eager, name), name)


@pytest.mark.case("Automodel-3106")
def test_context_parity_tells_the_two_apart() -> None:
    x, weight, _ = support.make_inputs(64, 768, dtype=torch.float32, weight_dtype=torch.float32)
    with pytest.raises(AssertionError, match="y, compiled dynamic"):
        assert_context_parity(baselines.automodel_0_6, x, weight, EPS, compile_modes=("dynamic",))
    assert_context_parity(arn.rms_norm, x, weight, EPS, compile_modes=("dynamic",))


# --- Megatron's two defects -----------------------------------------------------------------------

# float64, where rounding is 13 orders of magnitude below both defects. Not how far the op may be
# off, which bounds.py says: how far off a defect is at least.
DEFECT = 1e-2


def difference(actual: Tensor, expected: Tensor) -> float:
    return (actual - expected).abs().max().item()


@pytest.mark.case("Megatron-LM-PR-6859")
@pytest.mark.parametrize("zero_centered_gamma", [False, True])
@pytest.mark.parametrize("unit_gain", [False, True])
def test_offset_is_used(device: torch.device, zero_centered_gamma: bool, unit_gain: bool) -> None:
    inputs = support.make_inputs(
        16,
        96,
        dtype=torch.float64,
        weight_dtype=torch.float64,
        zero_centered_gamma=zero_centered_gamma,
        device=device,
    )
    x, weight, _ = inputs
    if unit_gain:
        weight.fill_(0.0 if zero_centered_gamma else 1.0)
    expected = baselines.formula(x, weight, EPS, zero_centered_gamma)
    faulty = baselines.megatron_offset_ignored(x, weight, EPS, zero_centered_gamma)

    assert (difference(faulty, expected) > DEFECT) == zero_centered_gamma
    y = arn.rms_norm(x, weight, EPS, zero_centered_gamma)
    assert not inaccuracies(Outputs(y), WithEps(*inputs, EPS), zero_centered_gamma)


@pytest.mark.case("Megatron-LM-PR-6859")
@pytest.mark.parametrize("zero_centered_gamma", [False, True])
@pytest.mark.parametrize("unit_gain", [False, True])
def test_grad_x_has_the_weight_once_a_term(
    device: torch.device, zero_centered_gamma: bool, unit_gain: bool
) -> None:
    inputs = support.make_inputs(
        16,
        96,
        dtype=torch.float64,
        weight_dtype=torch.float64,
        zero_centered_gamma=zero_centered_gamma,
        device=device,
    )
    x, weight, grad_y = inputs
    if unit_gain:
        weight.fill_(0.0 if zero_centered_gamma else 1.0)
    expected = support.forward_backward(baselines.formula, inputs, EPS, zero_centered_gamma)
    faulty = baselines.megatron_weight_twice(grad_y, x, weight, EPS, zero_centered_gamma)

    # Weights of ones, as Megatron's own tests have, hide it.
    assert (difference(faulty, expected.grad_x) > DEFECT) == (not unit_gain)
    actual = support.forward_backward(arn.rms_norm, inputs, EPS, zero_centered_gamma)
    assert not inaccuracies(actual, WithEps(*inputs, EPS), zero_centered_gamma)
