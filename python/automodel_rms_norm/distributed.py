"""grad_weight that does not depend on how rows are split over micro-batches and ranks.

The contract sums grad_weight over 8 rows at a time and joins these leaves by an aligned binary
tree. A split that falls on the tree's boundaries has whole subtrees on either side, and whoever
joins their sums in the tree's order gets the bits of the unsplit sum. An all-reduce, and the
accumulation in ``weight.grad``, add in other orders.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from automodel_rms_norm._sharding import is_sharded
from automodel_rms_norm.reference import LEAF_ROWS

__all__ = ["exact_grad_weight", "join_grad_weights"]


def join_grad_weights(partials: Iterable[Tensor]) -> Tensor:
    """The grad_weight of all rows from those of equal runs of rows, in the contract's tree order.

    Args:
        partials: in the order of their rows, each (hidden,), float32 or float64: the grad_weight of
            a run of rows. All runs have the same number of rows, 8 times a power of two; the last
            may have fewer.

    Returns:
        (hidden,), with the bits of grad_weight over all rows at once.

    Raises:
        ValueError: without partials, and for partials of several shapes or dtypes.
        TypeError: for 16-bit partials, which are rounded already.
    """
    level = list(partials)
    if not level:
        raise ValueError("join_grad_weights: partials must hold at least one tensor, got none")
    for partial in level:
        _check_unrounded("join_grad_weights: each of partials", partial)
    kinds = {(partial.dtype, tuple(partial.shape)) for partial in level}
    if len(kinds) > 1:
        raise ValueError(
            "join_grad_weights: partials must have one dtype and one shape, got "
            + " and ".join(f"{dtype} {shape}" for dtype, shape in sorted(kinds, key=str))
        )
    while len(level) > 1:
        level = _next_level(level)
    return level[0] + 0.0


def _next_level(level: list[Tensor]) -> list[Tensor]:
    pairs = [left + right for left, right in zip(level[::2], level[1::2], strict=False)]
    return pairs + level[2 * len(pairs) :]


def _check_unrounded(what: str, tensor: Tensor) -> None:
    if tensor.dtype not in (torch.float32, torch.float64):
        raise TypeError(
            f"{what} must be float32 or float64, got {tensor.dtype}: its gradient is rounded before"
            " it can be joined; a float32 weight of the same values gives y the same bits"
        )


@contextmanager
def exact_grad_weight(
    weights: Iterable[Tensor], rows: int, group: dist.ProcessGroup | None = None
) -> Iterator[None]:
    """Within it, backward passes over parts of a batch; after it, grad_weight of the whole batch.

    Collects the gradient of each backward pass, joins them over micro-batches and ranks in the
    contract's tree order, and sets ``weight.grad`` to the result: the bits of one backward pass
    over the rows of rank 0's micro-batches, then rank 1's, and so on, the same on every rank. It is
    the sum; whoever wants a mean scales the loss by a power of two, or the result.

    Args:
        weights: leaves, float32 or float64, without a gradient, not sharded, each used by one norm
            once in a backward pass. DTensors must be replicated. FSDP2 leaves them whole with
            ``fully_shard(..., ignored_params=...)``.
        rows: that a norm has in one micro-batch on one rank: 8 times a power of two. The last
            micro-batch of the last rank may have fewer.
        group: of the ranks that hold the rows; None where this process holds all.

    Raises:
        ValueError: for other rows, no weights, a weight that is frozen, has a gradient already or
            is sharded, a group without this rank, and where ranks had different numbers of backward
            passes.
        TypeError: for a 16-bit weight, and for None.
    """
    leaves = rows // LEAF_ROWS
    if rows < 1 or rows % LEAF_ROWS or leaves & (leaves - 1):
        raise ValueError(
            f"exact_grad_weight: rows must be {LEAF_ROWS} times a power of two, got {rows}"
        )
    if group is not None and not isinstance(group, dist.ProcessGroup):
        raise ValueError("exact_grad_weight: group must have this rank in it")
    weights = list(weights)
    if not weights:
        raise ValueError("exact_grad_weight: weights must hold at least one tensor, got none")
    for weight in weights:
        _check_weight(weight)
    collected: list[list[Tensor]] = [[] for _ in weights]

    def collector(partials: list[Tensor]) -> Callable[[Tensor], None]:
        # A copy: autograd goes on to accumulate into the tensor that it passes.
        return lambda grad: partials.append(_local(grad).clone())

    hooks = [
        weight.register_hook(collector(partials))  # type: ignore[no-untyped-call]
        for weight, partials in zip(weights, collected, strict=True)
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
    if group is not None:
        collected = _of_all_ranks(collected, group)
    for weight, partials in zip(weights, collected, strict=True):
        if partials:
            weight.grad = _like(weight, join_grad_weights(partials))


def _of_all_ranks(collected: list[list[Tensor]], group: dist.ProcessGroup) -> list[list[Tensor]]:
    counts: list[Any] = [None] * group.size()
    dist.all_gather_object(counts, [len(partials) for partials in collected], group)
    if any(count != counts[0] for count in counts):
        raise ValueError(
            "exact_grad_weight: ranks must have the same number of backward passes, got "
            + ", ".join(f"{max(count, default=0)} on rank {i}" for i, count in enumerate(counts))
        )
    return [_gathered(partials, group) if partials else [] for partials in collected]


def _gathered(partials: list[Tensor], group: dist.ProcessGroup) -> list[Tensor]:
    while len(partials) % 2 == 0:  # whole subtrees of this rank alone
        partials = _next_level(partials)
    own = torch.stack(partials)
    parts = [torch.empty_like(own) for _ in range(group.size())]
    dist.all_gather(parts, own, group)
    return list(torch.cat(parts))


def _check_weight(weight: Tensor) -> None:
    if not isinstance(weight, Tensor):
        raise TypeError(f"exact_grad_weight: a weight must be a tensor, got {weight!r}")
    _check_unrounded("exact_grad_weight: a weight", weight)
    if not weight.is_leaf or not weight.requires_grad:
        raise ValueError("exact_grad_weight: a weight must be a leaf that requires a gradient")
    if weight.grad is not None:
        raise ValueError("exact_grad_weight: a weight has a gradient already; call zero_grad first")
    if is_sharded(weight):
        raise ValueError(
            f"exact_grad_weight: a weight must be replicated, got {weight.placements}; "  # type: ignore[attr-defined]
            "fully_shard(..., ignored_params=...) leaves it whole"
        )


def _local(tensor: Tensor) -> Tensor:
    local = getattr(tensor, "to_local", None)
    return tensor if local is None else local()


def _like(weight: Tensor, grad: Tensor) -> Tensor:
    """The gradient as a DTensor where the weight is one."""
    if not hasattr(weight, "placements"):
        return grad
    from torch.distributed.tensor import DTensor

    assert isinstance(weight, DTensor)
    return DTensor.from_local(grad, weight.device_mesh, weight.placements, run_check=False)
