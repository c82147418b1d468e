"""No output and no scratch memory is read before it is written."""

from collections.abc import Iterator

import automodel_rms_norm as arn
import pytest
import support
import torch


@pytest.fixture
def poisoned_memory() -> Iterator[None]:
    """torch fills memory that it hands out with NaN."""
    torch.use_deterministic_algorithms(True)
    filled = torch.utils.deterministic.fill_uninitialized_memory
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.utils.deterministic.fill_uninitialized_memory = filled
    torch.use_deterministic_algorithms(False)


def free_blocks_of_nan(device: torch.device) -> None:
    """What the allocator hands out next holds NaN."""
    blocks = [torch.full((2**k,), torch.nan, device=device) for k in range(1, 17) for _ in range(4)]
    del blocks


def test_memory_is_poisoned(poisoned_memory, device):
    assert torch.empty(100, device=device).isnan().all()


@pytest.mark.case("flash-attention-781")
@pytest.mark.parametrize("hidden", [1, 2, 3, 4, 5, 7, 17, 33, 127])
@pytest.mark.parametrize("shape", [(), (1,), (5,), (300,)], ids=["vector", "1", "5", "300"])
def test_zeros_give_zero_gradients_from_poisoned_memory(shape, hidden, device, poisoned_memory):
    inputs = support.make_inputs(*shape, hidden, dtype=torch.float32, device=device)
    for values in (inputs.x, inputs.grad_y):
        values.zero_()
        for _ in range(3):
            free_blocks_of_nan(device)
            results = support.run_op(inputs)
            arn.testing.assert_bitwise_equal(
                results.grad_weight, torch.zeros_like(inputs.weight), "grad_weight"
            )


@pytest.mark.case("flash-attention-781")
@pytest.mark.parametrize("dtype", support.X_DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 1), (9, 127), (300, 33), (65, 2688)], ids=str)
def test_poisoned_memory_changes_no_bit(shape, dtype, device, request):
    inputs = support.make_inputs(*shape, dtype=dtype, weight_dtype=dtype, device=device)
    strided = inputs._replace(x=torch.stack([inputs.x] * 2, -1)[..., 0])
    expected = support.run_op(inputs)
    request.getfixturevalue("poisoned_memory")
    for _ in range(5):
        free_blocks_of_nan(device)
        support.assert_same(support.run_op(inputs), expected)
        support.assert_same(support.run_op(strided), expected)


@pytest.mark.parametrize("shape", [(0, 7), (0,) * 3 + (1,)], ids=str)
def test_no_rows_from_poisoned_memory(shape, device, poisoned_memory):
    inputs = support.make_inputs(*shape, device=device)
    for _ in range(3):
        results = support.run_op(inputs)
        arn.testing.assert_bitwise_equal(
            results.grad_weight, torch.zeros_like(inputs.weight), "grad_weight"
        )
