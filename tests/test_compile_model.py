"""P2 for compiled functions larger than the op, and what its outputs are: strides, aliases."""

from collections.abc import Callable

import automodel_rms_norm as arn
import pytest
import support
import torch
from automodel_rms_norm.testing import assert_bitwise_equal
from torch import Tensor, nn

EPS = 1e-5

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


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


@pytest.mark.case("vLLM-39096")
@pytest.mark.parametrize("mode", ["default", "max-autotune-no-cudagraphs"])
def test_rows_stay_independent_in_a_larger_graph(device: torch.device, mode: str) -> None:
    block = Block(96, device)
    compiled = torch.compile(block, fullgraph=True, dynamic=True, mode=mode)
    x, _, _ = support.make_inputs(33, 96, dtype=torch.float32, device=device)
    # On a GPU the autotuning of the matrix products takes minutes in grad mode.
    for grad in (True, False) if mode == "default" else (False,):
        for rows in (33, 7, 1):
            with torch.set_grad_enabled(grad):
                hidden, y, _ = compiled(x[:rows])
            # hidden is the compiler's, and may depend on the batch. y depends on its row of hidden.
            for row in (0, rows // 2, rows - 1):
                alone = block.norm(hidden[row].detach()).detach()
                assert_bitwise_equal(y[row].detach(), alone, f"y, row {row} of {rows}")


@pytest.mark.case("vLLM-39096")
def test_rows_stay_independent_between_pointwise_ops(device: torch.device) -> None:
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
    support.assert_same(
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
    assert support.compiles(arn.RMSNorm.forward) == 1


@pytest.mark.parametrize("rows", [4, 0])
def test_compiled_checkpoint_recomputes_the_same_bits(device: torch.device, rows: int) -> None:
    inputs = support.make_inputs(rows, 96, device=device)

    def checkpointed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return torch.utils.checkpoint.checkpoint(
            arn.rms_norm, x * 2.0, weight, eps, use_reentrant=False
        )

    compiled = torch.compile(checkpointed, fullgraph=True, dynamic=True)
    support.assert_same(
        support.forward_backward(compiled, inputs),
        support.forward_backward(checkpointed, inputs),
    )


# --- Outputs --------------------------------------------------------------------------------------


@pytest.mark.case("vLLM-PR-44130")
@pytest.mark.parametrize("weighted", [False, True], ids=["weightless", "unit-weight"])
def test_y_is_never_x(device: torch.device, weighted: bool) -> None:
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


@pytest.mark.case("flash-attention-1620")
def test_an_empty_batch_through_a_dynamic_graph(device: torch.device) -> None:
    compiled = torch.compile(arn.rms_norm, fullgraph=True, dynamic=True)
    for length in (4, 0, 9):
        inputs = support.make_inputs(3, length, 2520, device=device)
        expected = support.forward_backward(arn.rms_norm, inputs)
        assert expected.y.shape == (3, length, 2520)
        support.assert_same(support.forward_backward(compiled, inputs), expected)
        if length == 0:
            assert torch.count_nonzero(expected.grad_weight) == 0
    assert support.compiles(arn.rms_norm) == 2  # Dynamo itself specialises the size 0


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
    "vLLM-PR-49913": lambda: torch.randn(7, 1, 48).transpose(0, 1),
    "vLLM-PR-49913-odd-stride": lambda: torch.randn(7 * 48).as_strided((1, 7, 48), (1, 48, 1)),
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
