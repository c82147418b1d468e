"""The recipe of an RMSNorm ``(x, weight, eps[, zero_centered_gamma])``, and this package's op."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import automodel_rms_norm as arn
from automodel_rms_norm import accuracy
from automodel_rms_norm.bits import Difference
from automodel_rms_norm.contexts import Function, Results
from automodel_rms_norm.gate.capture import captured_cases
from automodel_rms_norm.gate.recipe import Case, Recipe, Variant, parameter, tensor

__all__ = ["MODELS", "OP", "norm_recipe"]

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

# dtypes of x and weight, zero_centered_gamma
Kind = tuple[torch.dtype, "torch.dtype | None", bool]
MAIN_KINDS: tuple[Kind, ...] = ((BF16, BF16, False), (FP32, FP32, True))
PLAIN_FP32: Kind = (FP32, FP32, False)  # for norms that know no zero-centred weight
KINDS: tuple[Kind, ...] = (
    *MAIN_KINDS,
    PLAIN_FP32,
    (BF16, BF16, True),
    (BF16, FP32, False),
    (BF16, None, False),
    (FP16, FP16, False),
    (FP64, FP64, False),
)

# Standard deviations of x: where the squares nearly leave the type that a norm computes in; and
# where the derivative of 1 / sqrt, which has the cube, does not.
_TINY = {BF16: 2.0**-60, FP16: 2.0**-14, FP32: 2.0**-60, FP64: 2.0**-500}
_HUGE = {BF16: 2.0**50, FP16: 2.0**12, FP32: 2.0**50, FP64: 2.0**490}
_SMALL, _LARGE = 2.0**-30, 2.0**30


def _inputs(kind: Kind, eps: float, **x: Any) -> dict[str, Any]:
    _, weight, zero_centered_gamma = kind
    around = 0.0 if zero_centered_gamma else 1.0
    return {
        "x": tensor("rows", "hidden", **x),
        "weight": parameter("hidden", dtype=weight, around=around) if weight else None,
        "eps": eps,
        "zero_centered_gamma": zero_centered_gamma,
    }


def _models() -> Iterator[tuple[Kind, Variant]]:
    for width, eps, note in MODELS:
        for kind in KINDS:
            quick = width in QUICK_WIDTHS and kind in (*MAIN_KINDS, PLAIN_FP32)
            main = (
                kind == MAIN_KINDS[0]
                or (kind in MAIN_KINDS and width in QUICK_WIDTHS)
                or (kind == PLAIN_FP32 and width == QUICK_WIDTHS[0])
            )
            yield kind, Variant(kind[0], note, {"hidden": width}, _inputs(kind, eps), quick, main)


def _spiky(generator: torch.Generator, shape: tuple[int, ...]) -> Tensor:
    x = torch.randn(shape, generator=generator, dtype=FP64)
    x[:, 3::64] *= 1024
    return x


def _zero_rows(generator: torch.Generator, shape: tuple[int, ...]) -> Tensor:
    x = torch.randn(shape, generator=generator, dtype=FP64)
    x[1::2] = 0
    return x


def _extremes(every_kind: bool) -> Iterator[tuple[Kind, Variant]]:
    """Rows and eps that a norm of real models rarely meets, for every dtype and kind of weight."""
    for width in (128, 2688):
        for dtype, weight, _ in KINDS:
            tiny, huge = _TINY[dtype], _HUGE[dtype]
            if not every_kind:
                tiny, huge = max(tiny, _SMALL), min(huge, _LARGE)
            settings: tuple[tuple[str, float, dict[str, Any]], ...] = (
                ("plain", 1e-6, {}),
                ("tiny", 1e-6 if dtype == FP16 else 0.0, {"spread": tiny}),
                ("huge", 1e-6, {"spread": huge}),
                ("spiky", 1e-6, {"values": _spiky}),
                ("zero rows", 1e-6, {"values": _zero_rows}),
                ("large eps", 2.0, {}),
                ("eps of the squares' size", 1e-6, {"spread": 1e-3}),
                ("small eps of the squares' size", 1e-12, {"spread": 1e-6}),
            )
            # The exact formula in float64's place is slow.
            sizes = {"rows": 3 if dtype == FP64 else 19, "hidden": width}
            for note, eps, x in settings:
                for zero_centered_gamma in (False, True) if weight else (False,):
                    kind = (dtype, weight, zero_centered_gamma)
                    yield kind, Variant(dtype, note, sizes, _inputs(kind, eps, **x), width == 128)


def _judge(recipe: Recipe, case: Case, results: Results) -> Difference | None:
    given = case.inputs.arguments
    grad_y = case.inputs.grads["y"]
    assert grad_y is not None
    inputs = accuracy.Inputs(given["x"], given["weight"], grad_y, given["eps"])
    outputs = accuracy.Outputs(**{k: v for k, v in results.items() if k != "rstd"})
    centred = given.get("zero_centered_gamma", False)
    return next(iter(accuracy.inaccuracies(outputs, inputs, centred)), None)


def norm_recipe(
    function: Function | None = None,
    *,
    module: Callable[..., nn.Module] | None = None,
    zero_centered_gamma: bool = False,
    every_kind: bool = False,
    **options: Any,
) -> Recipe:
    """The recipe of one norm.

    Args:
        function: of (x, weight, eps), with zero_centered_gamma as the fourth where it takes that.
        module: in its place, of (hidden, eps), by name.
        zero_centered_gamma: whether the function takes that.
        every_kind: whether it is asked for float64 and for no weight.
        options: more of Recipe's attributes.
    """
    left_out: dict[str, None] = {}

    def takes(kind: Kind) -> bool:
        dtype, weight, centred = kind
        reasons = {
            "zero-centred weights: the target has no zero_centered_gamma": centred
            and not zero_centered_gamma,
            "no weight: not asked of another norm": weight is None and not every_kind,
            "float64: not asked of another norm": dtype == FP64 and not every_kind,
        }
        wrong = [reason for reason, applies in reasons.items() if applies]
        left_out.update(dict.fromkeys(wrong[:1]))
        return not wrong

    inputs = _inputs(MAIN_KINDS[0], 1e-6)
    if not zero_centered_gamma:
        del inputs["zero_centered_gamma"]
    return Recipe(
        function,
        inputs,
        variants=tuple(variant for kind, variant in _models() if takes(kind)),
        extremes=tuple(variant for kind, variant in _extremes(every_kind) if takes(kind)),
        module=module,
        judge=_judge,
        captured=partial(captured_cases, zero_centered_gamma),
        any_rank=True,
        missing=tuple(left_out),
        **options,
    )


def _rstd(x: Tensor, weight: Tensor | None, eps: float, zero_centered_gamma: bool) -> Results:
    forward = torch.ops.automodel.rms_norm_forward(x, weight, eps, zero_centered_gamma)
    return {"rstd": forward[1]}


OP = norm_recipe(
    arn.rms_norm,
    zero_centered_gamma=True,
    every_kind=True,
    also=_rstd,
    name="automodel_rms_norm.rms_norm",
    source="op",
    contract=True,
    fullgraph=True,
)
