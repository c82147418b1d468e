"""The golden cases: inputs from an integer hash, and the digests of what the op makes of them.

A literal reading of csrc/numerics/golden_inputs.h in int64 tensors, whose arithmetic wraps like
uint64_t's. No random number generator is involved, so every machine and torch version has the same
inputs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, TypeAlias, cast

import torch
from torch import Tensor

from automodel_rms_norm import _C
from automodel_rms_norm.bits import bit_patterns

__all__ = [
    "GoldenCase",
    "GoldenInputs",
    "GoldenResult",
    "cases",
    "digest",
    "inputs",
    "run_op",
    "verify",
]

_X, _WEIGHT, _GRAD_Y, _RESIDUAL, _GRAD_SUM = range(5)
_MASK = (1 << 64) - 1
_BLOCK = 1 << 14


class GoldenCase(NamedTuple):
    """One case of csrc/numerics/golden_cases.h with its recorded digests."""

    number: int
    rows: int
    hidden: int
    x_dtype: torch.dtype
    weight_dtype: torch.dtype | None
    zero_centered_gamma: bool
    eps: float
    kind: str
    residual: bool
    digests: dict[str, int]

    def __str__(self) -> str:
        weight = "no" if self.weight_dtype is None else _short(self.weight_dtype)
        centred = ", zero-centred" if self.zero_centered_gamma else ""
        residual = ", residual" if self.residual else ""
        return (
            f"golden {self.number}: {_short(self.x_dtype)} x{residual}, {weight} weight{centred}, "
            f"{self.rows} x {self.hidden}, {self.kind}"
        )


class GoldenInputs(NamedTuple):
    """x and grad_y (rows, hidden), weight (hidden,) or None; residual and grad_sum where given."""

    x: Tensor
    weight: Tensor | None
    grad_y: Tensor
    residual: Tensor | None = None
    grad_sum: Tensor | None = None


class GoldenResult(NamedTuple):
    """The digest of one output of one case, and the recorded one."""

    case: GoldenCase
    output: str
    digest: int
    expected: int

    @property
    def holds(self) -> bool:
        return self.digest == self.expected


Outputs: TypeAlias = "dict[str, Tensor | None]"


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def cases() -> list[GoldenCase]:
    """The cases in their order, with the digests that this build was made with."""
    result = []
    for record in _C.golden_cases():
        fields = dict(record)
        digests = {
            name: cast(int, fields.pop(name))
            for name in ("y", "rstd", "grad_x", "grad_weight", "sum")
        }
        dtypes = {
            name: getattr(torch, cast(str, fields.pop(name)), None)
            for name in ("x_dtype", "weight_dtype")
        }
        result.append(GoldenCase(**fields, **dtypes, digests=digests))  # type: ignore[arg-type]
    return result


def _wrapped(value: int) -> int:
    """The int64 with the bits of `value` modulo 2^64."""
    value &= _MASK
    return value - (1 << 64) if value >> 63 else value


def _shifted(value: Tensor, places: int) -> Tensor:
    """value >> places, with zeros coming in."""
    return (value >> places) & _wrapped((1 << (64 - places)) - 1)


def _mix(value: Tensor) -> Tensor:
    """The finalizer of splitmix64."""
    value = value + _wrapped(0x9E3779B97F4A7C15)
    value = (value ^ _shifted(value, 30)) * _wrapped(0xBF58476D1CE4E5B9)
    value = (value ^ _shifted(value, 27)) * _wrapped(0x94D049BB133111EB)
    return value ^ _shifted(value, 31)


def _scale(kind: str, dtype: torch.dtype) -> float:
    exponents = {
        "tiny": {torch.float16: -18, torch.float64: -530},
        "huge": {torch.float16: 12, torch.float64: 490},
    }
    others = {"tiny": -70, "huge": 50}
    return 2.0 ** exponents[kind].get(dtype, others[kind]) if kind in exponents else 1.0


def _in_blocks(count: int) -> Iterator[Tensor]:
    """The indices 0 .. count-1 in blocks that stay in the cache and on one thread."""
    for begin in range(0, count, _BLOCK):
        yield torch.arange(begin, min(begin + _BLOCK, count), dtype=torch.int64)


def _values(case: GoldenCase, stream: int, dtype: torch.dtype, index: Tensor) -> Tensor:
    """The elements `index` of a stream, rounded to their dtype."""
    hashes = _mix(_mix(torch.tensor(4 * case.number + stream)) + index)
    second = _mix(hashes)
    fields = [_shifted(hashes, places) & 0xFFFF for places in (0, 16, 32, 48)]
    value = (fields[0] + fields[1] + fields[2] + fields[3] - 131070).double() * 2.0**-15
    if dtype in (torch.float32, torch.float64):
        value = value * ((_shifted(second, 12) | (1 << 52)).double() * 2.0**-52)
    if stream == _WEIGHT:
        value = value * 0.25 if case.zero_centered_gamma else 1.0 + value * 0.25
        return value.to(dtype)
    if stream in (_X, _RESIDUAL):
        if case.kind == "spiky":
            value = torch.where((second & 63) == 0, value * 1024.0, value)
        value = value * _scale(case.kind, dtype)
    if case.kind == "zero_rows" and stream != _GRAD_SUM:
        row = torch.div(index, case.hidden, rounding_mode="floor")
        value = torch.where(row % 3 == (2 if stream == _GRAD_Y else 1), 0.0, value)
    return value.to(dtype)


def _stream(case: GoldenCase, stream: int, dtype: torch.dtype, *shape: int) -> Tensor:
    blocks = _in_blocks(math.prod(shape))
    return torch.cat([_values(case, stream, dtype, index) for index in blocks]).reshape(shape)


def inputs(case: GoldenCase) -> GoldenInputs:
    """The case's tensors, on the CPU."""
    shape = (case.rows, case.hidden)
    x, grad_y = (_stream(case, stream, case.x_dtype, *shape) for stream in (_X, _GRAD_Y))
    weight = residual = grad_sum = None
    if case.weight_dtype is not None:
        weight = _stream(case, _WEIGHT, case.weight_dtype, case.hidden)
    if case.residual:
        residual, grad_sum = (
            _stream(case, stream, case.x_dtype, *shape) for stream in (_RESIDUAL, _GRAD_SUM)
        )
    return GoldenInputs(x, weight, grad_y, residual, grad_sum)


def digest(tensor: Tensor | None) -> int:
    """The sum over the elements of mix(bits ^ mix(index)) modulo 2^64; 0 for None."""
    if tensor is None:
        return 0
    patterns = bit_patterns(tensor).reshape(-1).cpu()
    mask = _wrapped((1 << 8 * tensor.element_size()) - 1)
    total = 0
    for index in _in_blocks(patterns.numel()):
        bits = patterns[int(index[0]) : int(index[-1]) + 1].to(torch.int64) & mask
        total += int(_mix(bits ^ _mix(index)).sum().item())
    return total & _MASK


def run_op(case: GoldenCase, given: GoldenInputs) -> Outputs:
    """y, rstd, grad_x and grad_weight by the two inner ops, and sum where there is a residual."""
    ops = torch.ops.automodel
    x, weight, grad_y, residual, grad_sum = given
    how = (case.eps, case.zero_centered_gamma)
    mask = [True, weight is not None]
    outputs: Outputs = {}
    if residual is None:
        y, rstd = ops.rms_norm_forward(x, weight, *how)
        grads = ops.rms_norm_backward(grad_y, x, weight, rstd, how[1], mask)
    else:
        y, outputs["sum"], rstd = ops.add_rms_norm_forward(x, residual, weight, *how)
        grads = ops.add_rms_norm_backward(
            grad_y, grad_sum, outputs["sum"], weight, rstd, how[1], mask
        )
    grad_weight = grads[1] if mask[1] else None
    return {"y": y, "rstd": rstd, "grad_x": grads[0], "grad_weight": grad_weight, **outputs}


def verify(
    run: Callable[[GoldenCase, GoldenInputs], Outputs] = run_op,
    device: torch.device | str = "cpu",
    only: Sequence[GoldenCase] | None = None,
) -> Iterator[GoldenResult]:
    """Runs the cases on `device` and yields a result for each output that `run` returns.

    Args:
        run: takes a case and its inputs on `device`, returns outputs by name: y, rstd, grad_x,
            grad_weight, sum.
        device: where the inputs are put.
        only: the cases to run; all by default.
    """
    for case in cases() if only is None else only:
        tensors = (tensor if tensor is None else tensor.to(device) for tensor in inputs(case))
        given = GoldenInputs(*tensors)  # type: ignore[arg-type]
        for output, tensor in run(case, given).items():
            yield GoldenResult(case, output, digest(tensor), case.digests[output])
