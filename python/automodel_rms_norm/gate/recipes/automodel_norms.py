"""Recipes for the norms of NeMo AutoModel, in whichever model's folder they are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from automodel_rms_norm.gate.recipe import Recipe, Variant, parameter, tensor
from automodel_rms_norm.gate.recipes import Maker

__all__ = ["RECIPES"]

_MODELS = "nemo_automodel.components.models"
_X = tensor("rows", "hidden")
_GAIN = parameter("hidden")
_OFFSET = parameter("hidden", around=0.0)  # a gain stored as its distance from 1
_EPS = 1e-6


def _module(
    *, offset: bool = False, gate: bool = False, dtype: torch.dtype | None = None, **made_of: Any
) -> Maker:
    """Of a class that is made of (hidden, eps=…, **made_of) and has a weight.

    `dtype` is for those that need one; the gate lends the module weights of its own.
    """
    if dtype is not None:
        made_of["dtype"] = dtype
    inputs: dict[str, Any] = {"x": _X, **({"gate": _X} if gate else {})}
    inputs |= {"weight": _OFFSET if offset else _GAIN, "eps": _EPS}
    return lambda norm: Recipe(
        module=lambda hidden, eps, **_: norm(hidden, eps=eps, **made_of), inputs=inputs
    )


def _without_weight(norm: Any) -> Recipe:
    return Recipe(module=lambda hidden, eps, **_: norm(hidden, eps=eps), inputs=_inputs())


def _of_any_width(norm: Any) -> Recipe:
    return Recipe(module=lambda eps, **_: norm(eps=eps), inputs=_inputs())


def _inputs() -> Mapping[str, Any]:
    return {"x": _X, "eps": _EPS}


def _function(**inputs: Any) -> Maker:
    """Of a function with these arguments, by its own names for them."""
    return lambda norm: Recipe(norm, inputs=inputs)


def _minimax(norm: Any) -> Recipe:
    """Plain and zero-centred, by the argument `gemma`."""
    variants = [
        Variant(dtype, note, {"hidden": width}, {"gemma": gemma, "weight": weight}, width == 128)
        for width in (128, 2688, 4096)
        for dtype in (torch.bfloat16, torch.float32)
        for gemma, weight, note in ((False, _GAIN, ""), (True, _OFFSET, "zero-centred"))
    ]
    inputs = {"x": _X, "weight": _GAIN, "eps": _EPS, "gemma": False}
    return Recipe(norm, inputs=inputs, variants=variants)


def _grouped_module(norm: Any) -> Recipe:
    return Recipe(
        module=lambda hidden, eps, **_: norm(hidden, group_size=_GROUP, eps=eps),
        inputs={"x": _X, "weight": _OFFSET, "eps": _EPS},
    )


_GROUP = 128  # divides every width

RECIPES: Mapping[str, Maker] = {
    # Compiled each on its own.
    f"{_MODELS}.common.utils:_float32_rms_norm_fwd": _function(x=_X, weight=_GAIN, eps=_EPS),
    f"{_MODELS}.kimi_k3.situ:_rms_norm_core": _function(
        hidden_states=_X, weight=_GAIN, variance_epsilon=_EPS
    ),
    f"{_MODELS}.minimax_m3_vl.layers:_rms_norm_core": _minimax,
    f"{_MODELS}.qwen3_8_flash_next.layers:_rms_norm_gated_fp32": _function(
        hidden_states=_X, gate=_X, weight=_GAIN, eps=_EPS, use_sigmoid=True
    ),
    f"{_MODELS}.qwen3_8_flash_next.layers:_grouped_rms_norm_fp32": _function(
        hidden_states=_X, weight=_OFFSET, group_size=_GROUP, eps=_EPS
    ),
    # Compiled with the decoder layer that holds them.
    f"{_MODELS}.common.utils:Float32RMSNorm": _module(),
    f"{_MODELS}.nemotron_omni.model:RMSNorm": _module(),
    f"{_MODELS}.deepseek_v41.layers:DeepseekV41RMSNorm": _module(dtype=torch.bfloat16),
    f"{_MODELS}.deepseek_v4.vision:DeepseekV4VisionRMSNorm": _module(),
    f"{_MODELS}.muse_glimmer.model:MuseGlimmerFinalRMSNorm": _module(),
    # Llama's cast order: to the type of x, then times the weight.
    f"{_MODELS}.bagel.modeling_qwen2_packed:Qwen2RMSNorm": _module(),
    f"{_MODELS}.baichuan.model:RMSNorm": _module(),
    f"{_MODELS}.glm5_next.layers:Glm5NextRMSNorm": _module(dtype=torch.bfloat16),
    f"{_MODELS}.hunyuan_image3.layers:HunyuanRMSNorm": _module(),
    f"{_MODELS}.inkling.text:InklingRMSNorm": _module(dtype=torch.bfloat16),
    f"{_MODELS}.kimi_k3.model:KimiRMSNorm": _module(),
    f"{_MODELS}.kimi_linear.model:KimiRMSNorm": _module(),
    f"{_MODELS}.laguna.model:LagunaRMSNorm": _module(),
    f"{_MODELS}.mimo_v2_flash.model:MiMoV2RMSNorm": _module(),
    f"{_MODELS}.mistral3.model:Ministral3RMSNorm": _module(),
    # Zero-centred.
    f"{_MODELS}.minimax_m3_vl.layers:MiniMaxM3RMSNorm": _module(offset=True),
    f"{_MODELS}.muse_glimmer.model:MuseGlimmerRMSNorm": _module(offset=True),
    f"{_MODELS}.qwen3_next.layers:Qwen3NextRMSNorm": _module(offset=True),
    f"{_MODELS}.step3p5.layers:Step3p5RMSNorm": _module(offset=True),
    # Grouped, gated, without a weight.
    f"{_MODELS}.qwen3_8_flash_next.layers:Qwen3_8_FlashNextGroupedRMSNorm": _grouped_module,
    f"{_MODELS}.qwen3_8_flash_next.layers:Qwen3_8_FlashNextRMSNormGated": _module(gate=True),
    f"{_MODELS}.glm5_next.layers:_TorchRMSNormGated": _module(gate=True, dtype=torch.bfloat16),
    f"{_MODELS}.nemotron_v3.layers:NemotronV3MambaRMSNormGated": _module(
        gate=True, group_size=_GROUP
    ),
    f"{_MODELS}.muse_glimmer.model:MuseGlimmerScalelessRMSNorm": _without_weight,
    f"{_MODELS}.glm5_next.layers:Glm5NextUnweightedRMSNorm": _of_any_width,
    f"{_MODELS}.deepseek_v4.layers:_rms_norm_last_dim": _function(x=_X, eps=_EPS),
}
