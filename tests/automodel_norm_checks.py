"""Other norms of nemo-automodel 0.7.0 under convert, as the table of docs/automodel.md has them."""

import importlib

import torch
from automodel_rms_norm.integrations.transformers import (
    LLAMA_ROUNDING,
    SAME_ROUNDING,
    WIDER_RESULT,
    convert,
)
from ranks import device
from torch import nn

MODELS = "nemo_automodel.components.models"
SAME = (SAME_ROUNDING, SAME_ROUNDING)
LLAMA = (LLAMA_ROUNDING, f"{LLAMA_ROUNDING}; {WIDER_RESULT}")
# What is said of a bfloat16 weight, and of a float32 one; and whether the gain is weight + 1.
CONVERTED = {
    "common.utils.Float32RMSNorm": (SAME, False),
    "qwen3_next.layers.Qwen3NextRMSNorm": (SAME, True),
    "step3p5.layers.Step3p5RMSNorm": (SAME, True),
    "muse_glimmer.model.MuseGlimmerRMSNorm": (SAME, True),
    "muse_glimmer.model.MuseGlimmerFinalRMSNorm": (SAME, False),
    "nemotron_omni.model.RMSNorm": (SAME, False),
    "minimax_m3_vl.layers.MiniMaxM3RMSNorm": (SAME, True),
    "deepseek_v4.vision.DeepseekV4VisionRMSNorm": (SAME, False),
    "kimi_linear.model.KimiRMSNorm": (LLAMA, False),
    "kimi_k3.model.KimiRMSNorm": (LLAMA, False),
    "laguna.model.LagunaRMSNorm": (LLAMA, False),
    "mimo_v2_flash.model.MiMoV2RMSNorm": (LLAMA, False),
    "mistral3.model.Ministral3RMSNorm": (LLAMA, False),
    "baichuan.model.RMSNorm": (LLAMA, False),
    "hunyuan_image3.layers.HunyuanRMSNorm": (LLAMA, False),
}
LEFT = {
    "muse_glimmer.model.MuseGlimmerScalelessRMSNorm": "has no weight",
    "glm5_next.layers.Glm5NextUnweightedRMSNorm": "has no weight",
    "nemotron_v3.layers.NemotronV3MambaRMSNormGated": "has the argument gate",
    "qwen3_8_flash_next.layers.Qwen3_8_FlashNextRMSNormGated": "has the argument gate",
}


def made(path: str) -> nn.Module:
    module, name = path.rsplit(".", 1)
    kind = getattr(importlib.import_module(f"{MODELS}.{module}"), name)
    try:
        return kind(64)
    except TypeError:  # eps must be given, or no width may be
        try:
            return kind(64, 1e-6)
        except TypeError:
            return kind()


def check_the_norms_that_convert_replaces() -> None:
    for path, (notes, zero_centered) in CONVERTED.items():
        for dtype, note in zip((torch.bfloat16, torch.float32), notes, strict=True):
            model = nn.Sequential(made(path)).to(device(), dtype)
            assert convert(model).converted == {"0": note}, (path, dtype)
            assert model[0].zero_centered_gamma == zero_centered, path


def check_the_norms_that_it_leaves() -> None:
    for path, reason in LEFT.items():
        left = convert(nn.Sequential(made(path).to(device()))).left
        assert reason in left["0"], (path, left)
