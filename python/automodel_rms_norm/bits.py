"""Tensors as bit patterns: where two differ first, and how far apart they are."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = [
    "Difference",
    "at",
    "bit_patterns",
    "check_dense",
    "compare",
    "differing",
    "ulp_distance",
]

_INTEGER_OF_SIZE = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Difference:
    """How two tensors differ. ``str()`` is one line, or two with the first difference's values.

    ``coordinate``, ``actual``, ``expected``, their patterns and ``ulp`` are None where the dtypes
    or shapes differ already; ``ulp`` is None too where it has no meaning (NaN, integers).
    ``ulps`` has, of 16- and 32-bit floating-point tensors, the number of differing elements by the
    power of two up to which their distance reaches: 1, 2, 4, ...
    """

    name: str
    summary: str
    coordinate: tuple[int, ...] | None = None
    actual: float | int | complex | None = None
    expected: float | int | complex | None = None
    actual_bits: str | None = None
    expected_bits: str | None = None
    ulp: int | None = None
    ulps: dict[int, int] | None = None

    def first(self) -> str:
        """The first difference, or the summary where there is no element to show."""
        if self.coordinate is None:
            return self.summary
        distance = "" if self.ulp is None else f", {self.ulp} ulp"
        return (
            f"{self.name}{list(self.coordinate)} = {self.actual!r} ({self.actual_bits}), "
            f"expected {self.expected!r} ({self.expected_bits}){distance}"
        )

    def __str__(self) -> str:
        if self.coordinate is None:
            return f"{self.name}: {self.summary}"
        return f"{self.name}: {self.summary}\nfirst: {self.first()}"


def check_dense(tensor: object, argument: str) -> Tensor:
    """The tensor; a TypeError or ValueError, naming `argument`, for what has no bits to compare."""
    if not isinstance(tensor, Tensor):
        raise TypeError(
            f"{argument} must be a torch.Tensor, got {type(tensor).__name__}; "
            "torch.as_tensor makes one"
        )
    if tensor.is_quantized:
        raise TypeError(f"{argument} is quantized; compare its int_repr()")
    if tensor.element_size() not in _INTEGER_OF_SIZE:
        raise TypeError(f"{argument} is {tensor.dtype}; compare torch.view_as_real of it")
    if tensor.layout != torch.strided or tensor.is_nested:
        kind = "a nested tensor" if tensor.is_nested else f"of layout {tensor.layout}"
        raise ValueError(f"{argument} must be dense, not {kind}; compare its values, or to_dense()")
    if tensor.is_meta:
        raise ValueError(f"{argument} is on the meta device and has no values; give it a real one")
    return tensor


def bit_patterns(tensor: Tensor) -> Tensor:
    """The elements' bit patterns as integers of their size: a contiguous tensor of that shape."""
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return plain.view(_INTEGER_OF_SIZE[tensor.element_size()])


def differing(actual: Tensor, expected: Tensor) -> Tensor:
    """The mask of different bits, where any NaN equals any NaN. Same dtype and shape."""
    mask = bit_patterns(actual) != bit_patterns(expected)
    return mask & ~(torch.isnan(actual.detach()) & torch.isnan(expected.detach()))


def _ordinals(tensor: Tensor) -> Tensor:
    # Bit patterns as integers that count up from one floating-point number to the next.
    bits = bit_patterns(tensor)
    return torch.where(bits < 0, torch.iinfo(bits.dtype).min - bits, bits).to(torch.int64)


def ulp_distance(actual: Tensor, expected: Tensor) -> Tensor:
    """How many representable numbers the elements are apart, as int64; 0 between -0 and +0.

    Tensors of the same 16- or 32-bit floating dtype and shape, without NaN; infinity is the number
    after the largest.
    """
    if actual.element_size() > 4:
        raise TypeError(f"ulp_distance takes 16- and 32-bit dtypes, got {actual.dtype}")
    return (_ordinals(actual) - _ordinals(expected)).abs()


def _ulp(actual: Tensor, expected: Tensor) -> int | None:
    if not actual.is_floating_point() or bool((torch.isnan(actual) | torch.isnan(expected)).any()):
        return None
    return abs(int(_ordinals(actual).item()) - int(_ordinals(expected).item()))


def _hexadecimal(element: Tensor) -> str:
    size = element.element_size()
    return f"0x{int(bit_patterns(element).item()) & (1 << 8 * size) - 1:0{2 * size}x}"


def _histogram(actual: Tensor, expected: Tensor, mask: Tensor) -> dict[int, int] | None:
    if not actual.is_floating_point() or actual.element_size() not in (2, 4):
        return None
    left, right = actual.detach()[mask], expected.detach()[mask]
    known = ~(left.isnan() | right.isnan())
    distances = ulp_distance(left[known], right[known]).clamp(min=1)
    counts = distances.double().log2().ceil().long().bincount().tolist()
    return {1 << power: count for power, count in enumerate(counts) if count}


def at(
    coordinate: tuple[int, ...],
    actual: Tensor,
    expected: Tensor,
    name: str,
    summary: str,
    ulps: dict[int, int] | None = None,
) -> Difference:
    """The difference of two tensors of one dtype and shape, with the elements at `coordinate`."""
    left, right = actual.detach()[coordinate].cpu(), expected.detach()[coordinate].cpu()
    return Difference(
        name,
        summary,
        coordinate,
        left.item(),
        right.item(),
        _hexadecimal(left),
        _hexadecimal(right),
        _ulp(left, right),
        ulps,
    )


def compare(actual: Tensor, expected: Tensor, name: str = "tensor") -> Difference | None:
    """None where dtype, shape and bits are the same (any NaN equals any NaN), else what differs.

    Any strides and any device; tensors of different devices are compared on the CPU.

    Raises:
        TypeError, ValueError: where one has no bits to compare: no tensor, not dense, complex128,
            on the meta device.
    """
    check_dense(actual, "actual")
    check_dense(expected, "expected")
    if actual.dtype != expected.dtype:
        return Difference(name, f"dtype {actual.dtype}, expected {expected.dtype}")
    if actual.shape != expected.shape:
        return Difference(name, f"shape {tuple(actual.shape)}, expected {tuple(expected.shape)}")
    if actual.device != expected.device:
        actual, expected = actual.cpu(), expected.cpu()
    mask = differing(actual, expected)
    count = int(mask.sum().item())
    if count == 0:
        return None
    place = mask.reshape(-1).to(torch.uint8).argmax().cpu()  # argmax: the first of the largest
    coordinate = tuple(int(index) for index in torch.unravel_index(place, mask.shape))
    summary = f"{count} of {mask.numel()} elements differ"
    ulps = _histogram(actual, expected, mask)
    return at(coordinate, actual, expected, name, summary, ulps)
