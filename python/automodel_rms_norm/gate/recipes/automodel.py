"""Recipes for what NeMo AutoModel compiles besides norms, as far as one device runs it alone:
activations, rotary embeddings, losses and helpers of its mixtures of experts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from automodel_rms_norm.gate.recipe import Input, Recipe, parameter, tensor
from automodel_rms_norm.gate.recipes import Maker

__all__ = ["RECIPES"]

_COMPONENTS = "nemo_automodel.components"
_MOE = f"{_COMPONENTS}.moe.megatron.moe_utils"
_EXPERTS = f"{_COMPONENTS}.moe.experts"
_ROUTER = f"{_COMPONENTS}.moe.optimized_ops"
_SITU = f"{_COMPONENTS}.models.kimi_k3.situ"
_BAGEL = f"{_COMPONENTS}.models.bagel.modeling_qwen2_packed"
BF16, FP32 = torch.bfloat16, torch.float32

_HALF = tensor("rows", "hidden")
_BOTH = tensor("rows", "2 * hidden")  # gate and up
_BIAS = parameter("2 * hidden", around=0.0)


def _probabilities(generator: torch.Generator, shape: tuple[int, ...]) -> Tensor:
    return torch.rand(shape, generator=generator, dtype=torch.float64)


_ROUTING = tensor("rows", 1, dtype=FP32, values=_probabilities)
_OUT = {"out": _HALF}


def _of(
    inputs: Mapping[str, Any], outputs: Mapping[str, Input] | None = None, **options: Any
) -> Maker:
    """Of a function with these arguments, by its own names for them."""
    return lambda function: Recipe(function, inputs=inputs, outputs=outputs or _OUT, **options)


def _apply(inputs: Mapping[str, Any], **options: Any) -> Maker:
    """Of an autograd.Function."""
    return lambda function: Recipe(function.apply, inputs=inputs, outputs=_OUT, **options)


# --- Activations and the gradients that are written for them --------------------------------------

_WEIGHTED = {"y": _BOTH, "weights": _ROUTING}
_BACK = {"g": _HALF, "y": _BOTH}
_WEIGHTED_BACK = {**_BACK, "weights": _ROUTING}
_GRAD = {"input_grad": _BOTH}
_GRADS = {**_GRAD, "weights_grad": _ROUTING}
_BETAS = {"beta": 4.0, "linear_beta": 25.0}
_FP32 = tensor("rows", "hidden", dtype=FP32)

_ACTIVATIONS: Mapping[str, Maker] = {
    f"{_MOE}:swiglu": _of({"y": _BOTH}),
    f"{_MOE}:weighted_swiglu": _of(_WEIGHTED),
    f"{_MOE}:swiglu_back": _of(_BACK, _GRAD),
    f"{_MOE}:weighted_swiglu_back": _of(_WEIGHTED_BACK, _GRADS),
    f"{_MOE}:geglu": _of({"y": _BOTH}),
    f"{_MOE}:weighted_geglu": _of(_WEIGHTED),
    f"{_MOE}:geglu_back": _of(_BACK, _GRAD),
    f"{_MOE}:weighted_geglu_back": _of(_WEIGHTED_BACK, _GRADS),
    f"{_MOE}:quick_gelu": _of({"y": _HALF}),
    f"{_MOE}:quick_geglu": _of({"y": _BOTH}),
    f"{_MOE}:weighted_quick_geglu": _of(_WEIGHTED),
    f"{_MOE}:quick_geglu_back": _of(_BACK, _GRAD),
    f"{_MOE}:weighted_quick_geglu_back": _of(_WEIGHTED_BACK, _GRADS),
    f"{_MOE}:weighted_bias_quick_geglu": _of({"y": _BOTH, "bias": _BIAS, "weights": _ROUTING}),
    f"{_MOE}:weighted_bias_quick_geglu_back": _of(
        {"g": _HALF, "y": _BOTH, "bias": _BIAS, "weights": _ROUTING},
        {**_GRAD, "bias_grad": _BOTH, "weights_grad": _ROUTING},
    ),
    f"{_MOE}:WeightedSwiGLUFunction": _apply(
        {"input": _BOTH, "weights": _ROUTING, "fp8_input_store": False}
    ),
    f"{_MOE}:WeightedGEGLUFunction": _apply(
        {"input": _BOTH, "weights": _ROUTING, "fp8_input_store": False}
    ),
    f"{_EXPERTS}:quick_geglu_deepep": _of({"x": _BOTH, "permuted_probs": _ROUTING}),
    f"{_EXPERTS}:swiglu_oai_deepep": _of({"x": _BOTH, "permuted_probs": _ROUTING}),
    f"{_EXPERTS}:relu2_deepep": _of({"x": _HALF, "permuted_probs": _ROUTING}),
    f"{_EXPERTS}:swiglu_clamped_deepep": _of(
        {"x": _BOTH, "permuted_probs": _ROUTING, "limit": 7.0}
    ),
    f"{_SITU}:_situ_fwd_core": _of(
        {"g": _FP32, "u0": _FP32, "w": _ROUTING, **_BETAS}, {"out": _FP32}, dtypes=(FP32,)
    ),
    f"{_SITU}:_situ_bwd_core": _of(
        {"g": _FP32, "u0": _FP32, "w": _ROUTING, "go": _FP32, **_BETAS, "want_drw": True},
        {"d_g": _FP32, "d_u": _FP32, "red": _FP32},
        dtypes=(FP32,),
    ),
    f"{_SITU}:_weighted_situ_fwd_fused": _of({"gate_up2": _BOTH, "rw": _ROUTING, **_BETAS}),
    f"{_SITU}:_weighted_situ_bwd_fused": _of(
        {"gate_up2": _BOTH, "rw": _ROUTING, "go2": _HALF, **_BETAS, "want_drw": True},
        {"d_gate_up": _BOTH, "d_rw": _ROUTING},
    ),
    f"{_SITU}:_dense_situ_core": _of({"x": _BOTH, **_BETAS}),
    f"{_SITU}:_WeightedSiTUFunction": _apply(
        {"gate_up": _BOTH, "routing_weights": _ROUTING, **_BETAS}
    ),
    f"{_SITU}:_DenseSiTUFunction": _apply({"x": _BOTH, **_BETAS}),
    f"{_BAGEL}:_bagel_fused_silu_mul": _of({"gate": _HALF, "up": _HALF}),
}


# --- Rotary embeddings ----------------------------------------------------------------------------


def _angles(generator: torch.Generator, shape: tuple[int, ...]) -> Tensor:
    positions, frequencies = torch.arange(shape[0]), torch.arange(shape[-1] // 2)
    angles = torch.outer(positions, 10000.0 ** (-2 * frequencies / shape[-1]).double())
    return angles.reshape(shape[0], *(1 for _ in shape[2:]), -1)


def _cos_and_sin(generator: torch.Generator, shape: tuple[int, ...]) -> Tensor:
    angles = _angles(generator, shape)
    return torch.cat((angles.cos(), angles.sin()), dim=-1)


def _twice_cos(generator: torch.Generator, shape: tuple[int, ...]) -> Tensor:
    return torch.cat((_angles(generator, shape),) * 2, dim=-1).cos()


def _twice_sin(generator: torch.Generator, shape: tuple[int, ...]) -> Tensor:
    return torch.cat((_angles(generator, shape),) * 2, dim=-1).sin()


_Q, _K = tensor("rows", 8, 64), tensor("rows", 2, 64)
_ROTATED = {"q_rotated": _Q, "k_rotated": _K}

_ROTARY: Mapping[str, Maker] = {
    f"{_COMPONENTS}.models.gpt_oss.rope_utils:_apply_rotary_emb_qk": _of(
        {
            "q": _Q,
            "k": _K,
            "freqs_cis": tensor("rows", 64, dtype=FP32, values=_cos_and_sin, grad=False),
        },
        _ROTATED,
    ),
    f"{_BAGEL}:_bagel_fused_rope": _of(
        {
            "q": _Q,
            "k": _K,
            "cos": tensor("rows", 1, 64, values=_twice_cos, grad=False),
            "sin": tensor("rows", 1, 64, values=_twice_sin, grad=False),
        },
        _ROTATED,
    ),
    f"{_COMPONENTS}.models.kimi_k3.vision:get_rope_shape": _of(
        {"org": tensor(16, 16, 128), "interpolation_mode": "bicubic", "shape": (24, 20)},
        {"out": tensor(480, 128)},
    ),
}


# --- Losses, and helpers of mixtures of experts ---------------------------------------------------

_VOCABULARY = {"vocab": 1000}


def _labels(generator: torch.Generator, shape: tuple[int, ...]) -> Tensor:
    labels = torch.randint(_VOCABULARY["vocab"], shape, generator=generator)
    labels[::7] = -100  # ignored
    return labels


_TARGETS = tensor("rows", dtype=torch.int64, values=_labels)
_LOSSES = {"losses": tensor("rows", dtype=FP32)}

_OTHERS: Mapping[str, Maker] = {
    f"{_COMPONENTS}.loss.chunked_ce:_linear_cross_entropy": _of(
        {
            "hidden": tensor("rows", "hidden"),
            "weight": parameter("vocab", "hidden", around=0.0, spread=0.05),
            "labels": _TARGETS,
            "ignore_index": -100,
            "logits_dtype": None,
        },
        _LOSSES,
        sizes=_VOCABULARY,
    ),
    f"{_COMPONENTS}.loss.chunked_ce:compute_cross_entropy": _of(
        {
            "logits": tensor("rows", "vocab"),
            "targets": _TARGETS,
            "ignore_index": -100,
            "reduction": "sum",
        },
        {"loss": tensor(dtype=FP32)},
        sizes=_VOCABULARY,
    ),
    f"{_ROUTER}:_rw_fwd_core": _of(
        {"x": _HALF, "probs": _ROUTING, "out_dtype": BF16}, dtypes=(BF16,)
    ),
    f"{_ROUTER}:_rw_bwd_x_core": _of(
        {"grad_out": _HALF, "probs": _ROUTING, "x_dtype": BF16}, dtypes=(BF16,)
    ),
    f"{_ROUTER}:_rw_bwd_probs_core": _of(
        {"grad_out": _HALF, "x": _HALF, "probs_dtype": FP32},
        {"grad_probs": tensor("rows", 1, dtype=FP32)},
        dtypes=(BF16,),
    ),
    f"{_ROUTER}:_RouterWeightMulFunction": _apply(
        {"x": _HALF, "probs": _ROUTING, "out_dtype": BF16, "save_x": True}, dtypes=(BF16,)
    ),
    f"{_SITU}:_attn_res_core": _of(
        {
            "values": tensor("rows", 4, "hidden"),
            "norm_weight": parameter("hidden"),
            "proj_weight": parameter("hidden", around=0.0, spread=0.1),
            "variance_epsilon": 1e-6,
            "out_dtype": BF16,
        },
        dtypes=(BF16,),
    ),
}

RECIPES: Mapping[str, Maker] = {**_ACTIVATIONS, **_ROTARY, **_OTHERS}
