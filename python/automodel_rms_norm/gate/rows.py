"""Other ways to hand a norm the same rows, given as (rows, hidden): what P3 and P5 vary."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from automodel_rms_norm.contexts import Inputs

__all__ = ["LAYOUTS", "ROW_VARIANTS", "Variant", "flat", "thread_counts", "with_zero_grad_rows"]


class Variant(NamedTuple):
    """Other inputs, whose row ``rows[0][i]`` is row ``rows[1][i]`` of the original ones."""

    inputs: Inputs
    rows: tuple[Tensor, Tensor]


def flat(inputs: Inputs) -> Inputs:
    """The inputs with x and grad_y as (rows, hidden)."""
    hidden = inputs.x.shape[-1]
    return inputs._replace(x=inputs.x.reshape(-1, hidden), grad_y=inputs.grad_y.reshape(-1, hidden))


def _changed(inputs: Inputs, change: Callable[[Tensor], Tensor]) -> Inputs:
    return inputs._replace(x=change(inputs.x), grad_y=change(inputs.grad_y))


def thread_counts(inputs: Inputs) -> Iterator[Inputs]:
    """The same inputs, with another number of CPU threads each time until the next is asked for."""
    for count in (1, 2, 3):
        with _threads(count):
            yield inputs


@contextlib.contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def with_zero_grad_rows(inputs: Inputs, count: int) -> Inputs:
    """`inputs` with `count` rows more, whose grad_y is 0."""
    extra = inputs.x[torch.arange(count, device=inputs.x.device) % len(inputs.x)]
    x, grad_y = torch.cat([inputs.x, extra]), F.pad(inputs.grad_y, (0, 0, 0, count))
    return inputs._replace(x=x, grad_y=grad_y)


# --- The same rows in the same order, laid out anew -----------------------------------------------


def _shifted(offset: int, tensor: Tensor) -> Tensor:
    base = tensor.new_empty(tensor.numel() + offset)
    base[offset:] = tensor.reshape(-1)
    return base[offset:].view(tensor.shape)


_LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "other rank": lambda tensor: tensor[None, :, None],
    "one element off alignment": partial(_shifted, 1),
    "three elements off alignment": partial(_shifted, 3),
    "rows with gaps": lambda tensor: F.pad(tensor, (0, 3))[:, : tensor.shape[1]],
    "stored by columns": lambda tensor: tensor.t().contiguous().t(),
    "every second element": lambda tensor: tensor.repeat_interleave(2, 1)[:, ::2],
}


def _laid_out(change: Callable[[Tensor], Tensor], inputs: Inputs) -> Variant:
    every = torch.arange(len(inputs.x))
    return Variant(_changed(inputs, change), (every, every))


LAYOUTS: dict[str, Callable[[Inputs], Variant]] = {
    name: partial(_laid_out, change) for name, change in _LAYOUTS.items()
}


# --- Some of the rows, or in another order, or among others ---------------------------------------


def _picked(inputs: Inputs, order: Tensor) -> Variant:
    index = order.to(inputs.x.device)
    return Variant(
        _changed(inputs, lambda tensor: tensor[index]), (torch.arange(len(order)), order)
    )


def _some(inputs: Inputs) -> list[int]:
    count = len(inputs.x)
    return sorted({0, count // 2, count - 1})


def _alone(inputs: Inputs) -> Iterator[Variant]:
    for row in _some(inputs):
        yield _picked(inputs, torch.tensor([row]))


def _batches(inputs: Inputs) -> Iterator[Variant]:
    every = torch.arange(len(inputs.x))
    for order in (every[:2], every[: -(-len(every) // 2)], every[1:], every.repeat(2)):
        yield _picked(inputs, order)


def _positions(inputs: Inputs) -> Iterator[Variant]:
    every = torch.arange(len(inputs.x))
    yield _picked(inputs, every.flip(0))
    yield _picked(inputs, every.roll(1))


def _other_rows(inputs: Inputs) -> Iterator[Variant]:
    others = (inputs.x.roll(1, 0), torch.zeros_like(inputs.x), torch.full_like(inputs.x, torch.nan))
    for row, other in zip(_some(inputs), others, strict=False):
        x, grad_y = other.clone(), other.clone()
        x[row], grad_y[row] = inputs.x[row], inputs.grad_y[row]
        where = torch.tensor([row])
        yield Variant(inputs._replace(x=x, grad_y=grad_y), (where, where))


def _one(change: Callable[[Inputs], Variant], inputs: Inputs) -> Iterable[Variant]:
    return (change(inputs),)


ROW_VARIANTS: dict[str, Callable[[Inputs], Iterable[Variant]]] = {
    "row alone": _alone,
    "other batch size": _batches,
    "other row position": _positions,
    "other rows changed": _other_rows,
    **{name: partial(_one, change) for name, change in LAYOUTS.items()},
}
