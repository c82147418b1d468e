"""The inputs that the properties are checked on."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from automodel_rms_norm.contexts import Function, Inputs

__all__ = ["DTYPES", "MODELS", "Case", "NormFunction", "accuracy_cases", "model_cases"]

NormFunction = Callable[[Tensor, "Tensor | None", float, bool], Tensor]

# Width of a norm, eps, models that have it.
MODELS = (
    (128, 1e-6, "Qwen3 q and k norms"),
    (1024, 1e-6, "Qwen3 0.6B"),
    (2048, 1e-5, "Llama 3.2 1B"),
    (2688, 1e-5, "Nemotron Nano V3"),
    (3072, 1e-5, "Llama 3.2 3B"),
    (4096, 1e-5, "Llama 3.1 8B, Mistral 7B"),
    (5120, 1e-6, "Qwen3 14B, Mistral Small"),
    (8192, 1e-5, "Llama 3.1 70B"),
    (16384, 1e-5, "Llama 3.1 405B"),
)
QUICK_WIDTHS = (128, 2688, 4096)

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
_NAMES = {BF16: "bf16", FP16: "fp16", FP32: "fp32", FP64: "fp64", None: "no"}

DTYPES = {name: dtype for dtype, name in _NAMES.items() if dtype is not None}

# dtypes of x and weight, zero_centered_gamma
Variant = tuple[torch.dtype, "torch.dtype | None", bool]
MAIN_VARIANTS: tuple[Variant, ...] = ((BF16, BF16, False), (FP32, FP32, True))
PLAIN_FP32: Variant = (FP32, FP32, False)  # for norms that know no zero-centred weight
VARIANTS: tuple[Variant, ...] = (
    *MAIN_VARIANTS,
    PLAIN_FP32,
    (BF16, BF16, True),
    (BF16, FP32, False),
    (BF16, None, False),
    (FP16, FP16, False),
    (FP64, FP64, False),
)

# Factors on x: none; squares near the smallest and the largest of the type that the op computes in.
_SCALES = {
    "plain": {},
    "tiny": {BF16: 2.0**-60, FP16: 2.0**-14, FP32: 2.0**-60, FP64: 2.0**-500},
    "huge": {BF16: 2.0**50, FP16: 2.0**12, FP32: 2.0**50, FP64: 2.0**490},
    "spiky": {},
}


@dataclass(frozen=True)
class Case:
    """Inputs for a norm. ``main`` cases stand for the others where a check is expensive."""

    label: str
    inputs: Inputs = field(repr=False)
    zero_centered_gamma: bool = False
    main: bool = True

    def to(self, device: torch.device | str) -> Case:
        """The case with its tensors on `device`."""
        return replace(self, inputs=self.inputs.to(device))

    def bind(self, function: NormFunction) -> Function:
        """The norm as a function of x, weight and eps."""
        zero_centered_gamma = self.zero_centered_gamma

        def bound(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
            return function(x, weight, eps, zero_centered_gamma)

        return bound


def _case(rows: int, width: int, variant: Variant, eps: float, kind: str, note: str) -> Case:
    dtype, weight_dtype, zero_centered_gamma = variant
    generator = torch.Generator().manual_seed(rows * width)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=FP64)

    x = normal(rows, width) * _SCALES[kind].get(dtype, 1.0)
    if kind == "spiky":
        x[:, 3::64] *= 1024
    centre = 0.0 if zero_centered_gamma else 1.0
    weight = None if weight_dtype is None else (centre + 0.4 * normal(width)).to(weight_dtype)
    label = (
        f"{_NAMES[dtype]} x, {_NAMES[weight_dtype]} weight"
        f"{', zero-centred' if zero_centered_gamma else ''}, {rows} x {width}, {note}"
    )
    inputs = Inputs(x.to(dtype), weight, normal(rows, width).to(dtype), eps)
    main = (
        variant == MAIN_VARIANTS[0]
        or (variant in MAIN_VARIANTS and width in QUICK_WIDTHS)
        or (variant == PLAIN_FP32 and width == QUICK_WIDTHS[0])
    )
    return Case(label, inputs, zero_centered_gamma, main)


def _rows(width: int) -> int:
    """Enough for more than one thread and more than one leaf of grad_weight's tree, and odd."""
    return max(19, 32768 // width + 3)


def model_cases(
    quick: bool = False, widths: Sequence[int] = (), rows: int | None = None
) -> Iterator[Case]:
    """Random inputs on the CPU, with gains away from 1: of the widths of real models, or `widths`;
    of a few rows each, or `rows`.
    """
    models = MODELS if not widths else [(width, 1e-6, "as asked") for width in widths]
    for width, eps, note in models:
        if quick and not widths and width not in QUICK_WIDTHS:
            continue
        for variant in (*MAIN_VARIANTS, PLAIN_FP32) if quick else VARIANTS:
            yield _case(rows or _rows(width), width, variant, eps, "plain", note)


def accuracy_cases(quick: bool = False) -> Iterator[Case]:
    """Plain, tiny, huge and spiky rows for every dtype and both meanings of the weight."""
    for width in (128,) if quick else (128, 2688):
        for kind in _SCALES:
            for variant in VARIANTS:
                dtype, weight_dtype, _ = variant
                for zero_centered_gamma in (False, True) if weight_dtype else (False,):
                    # The exact formula in float64's place is slow.
                    rows = 3 if dtype == FP64 else 19
                    eps = 0.0 if kind == "tiny" and dtype != FP16 else 1e-6
                    chosen = (dtype, weight_dtype, zero_centered_gamma)
                    yield _case(rows, width, chosen, eps, kind, kind)
