"""Other ways to hand a function the same rows: what P3 and P5 vary."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from automodel_rms_norm.contexts import Inputs

__all__ = [
    "LAYOUTS",
    "ROW_VARIANTS",
    "Variant",
    "count",
    "other_rank",
    "thread_counts",
    "with_zero_grad_rows",
]


class Variant(NamedTuple):
    """Other inputs, whose row ``here[i]`` is row ``there[i]`` of the original ones."""

    inputs: Inputs
    here: Tensor
    there: Tensor


def count(inputs: Inputs) -> int:
    """How many rows there are."""
    name, dimension = next(iter(inputs.rows.items()))
    tensor = inputs.arguments[name] if name in inputs.arguments else inputs.grads[name]
    assert tensor is not None
    return int(tensor.shape[dimension])


def _every(inputs: Inputs) -> Tensor:
    return torch.arange(count(inputs))


def _changed(inputs: Inputs, change: Callable[[Tensor, int], Tensor]) -> Inputs:
    """Every tensor with rows changed; `change` is told their dimension."""
    return inputs.map(
        lambda name, tensor: change(tensor, inputs.rows[name]) if name in inputs.rows else tensor
    )


def thread_counts(inputs: Inputs) -> Iterator[Variant]:
    """The same inputs, with another number of CPU threads each time until the next is asked for."""
    for threads in (1, 2, 3):
        with _threads(threads):
            yield Variant(inputs, _every(inputs), _every(inputs))


@contextlib.contextmanager
def _threads(threads: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def with_zero_grad_rows(inputs: Inputs, more: int) -> Inputs:
    """`inputs` with `more` rows, whose gradients of the outputs are 0."""

    def extended(name: str, tensor: Tensor) -> Tensor:
        if name not in inputs.rows:
            return tensor
        dimension = inputs.rows[name]
        extra = torch.arange(more, device=tensor.device) % tensor.shape[dimension]
        rows = tensor.index_select(dimension, extra)
        rows = torch.zeros_like(rows) if name in inputs.grads else rows
        return torch.cat([tensor, rows], dimension)

    return inputs.map(extended)


# --- The same rows in the same order, laid out anew -----------------------------------------------


def _shifted(offset: int, tensor: Tensor) -> Tensor:
    base = tensor.new_empty(tensor.numel() + offset)
    base[offset:] = tensor.reshape(-1)
    return base[offset:].view(tensor.shape)


_LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "one element off alignment": partial(_shifted, 1),
    "three elements off alignment": partial(_shifted, 3),
    "rows with gaps": lambda tensor: F.pad(tensor, (0, 3))[..., : tensor.shape[-1]],
    "stored by columns": lambda tensor: tensor.transpose(0, -1).contiguous().transpose(0, -1),
    "every second element": lambda tensor: tensor.repeat_interleave(2, -1)[..., ::2],
}


def _laid_out(change: Callable[[Tensor], Tensor], inputs: Inputs) -> Iterable[Variant]:
    laid_out = _changed(inputs, lambda tensor, dimension: change(tensor))
    return [Variant(laid_out, _every(inputs), _every(inputs))]


LAYOUTS: dict[str, Callable[[Inputs], Iterable[Variant]]] = {
    name: partial(_laid_out, change) for name, change in _LAYOUTS.items()
}


def other_rank(inputs: Inputs) -> Iterable[Variant]:
    """Of what takes any: one dimension more before the rows, and one more after them."""

    def raised(tensor: Tensor, dimension: int) -> Tensor:
        return tensor.unsqueeze(dimension + 1).unsqueeze(0)

    rows = {name: dimension + 1 for name, dimension in inputs.rows.items()}
    changed = replace(_changed(inputs, raised), rows=rows)
    return [Variant(changed, _every(inputs), _every(inputs))]


# --- Some of the rows, or in another order, or among others ---------------------------------------


def _picked(inputs: Inputs, order: Tensor) -> Variant:
    def pick(tensor: Tensor, dimension: int) -> Tensor:
        return tensor.index_select(dimension, order.to(tensor.device))

    return Variant(_changed(inputs, pick), torch.arange(len(order)), order)


def _some(inputs: Inputs, many: int) -> list[int]:
    """The first, the last and others between them."""
    rows = count(inputs)
    return sorted({round(i * (rows - 1) / (many - 1)) for i in range(many)})


def _alone(inputs: Inputs) -> Iterator[Variant]:
    for row in _some(inputs, 8):
        yield _picked(inputs, torch.tensor([row]))


def _batches(inputs: Inputs) -> Iterator[Variant]:
    every = _every(inputs)
    for order in (every[:2], every[: -(-len(every) // 2)], every[1:], every.repeat(2)):
        yield _picked(inputs, order)


def _positions(inputs: Inputs) -> Iterator[Variant]:
    every = _every(inputs)
    yield _picked(inputs, every.flip(0))
    yield _picked(inputs, every.roll(1))


def _rolled(tensor: Tensor, dimension: int) -> Tensor:
    return tensor.roll(1, dimension)


def _filled(value: float, tensor: Tensor, dimension: int) -> Tensor:
    # Of integers, which may be indices, not every value is allowed.
    if not tensor.is_floating_point():
        return _rolled(tensor, dimension)
    return torch.full_like(tensor, value)


def _all_but(
    row: int, fill: Callable[[Tensor, int], Tensor], tensor: Tensor, dimension: int
) -> Tensor:
    other = fill(tensor, dimension).clone()
    other.select(dimension, row).copy_(tensor.select(dimension, row))
    return other


def _other_rows(inputs: Inputs) -> Iterator[Variant]:
    fillers: tuple[Callable[[Tensor, int], Tensor], ...] = (
        _rolled,
        partial(_filled, 0.0),
        partial(_filled, torch.nan),
    )
    for row, fill in zip(_some(inputs, 3), fillers, strict=False):
        where = torch.tensor([row])
        yield Variant(_changed(inputs, partial(_all_but, row, fill)), where, where)


ROW_VARIANTS: dict[str, Callable[[Inputs], Iterable[Variant]]] = {
    "row alone": _alone,
    "other batch size": _batches,
    "other row position": _positions,
    "other rows changed": _other_rows,
    **LAYOUTS,
}
