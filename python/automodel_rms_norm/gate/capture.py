"""What every norm of a real model gets in one training step: x, weight, grad_y and eps."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from automodel_rms_norm.contexts import norm_inputs
from automodel_rms_norm.gate.recipe import Case
from automodel_rms_norm.gate.runner import NotRunError

__all__ = ["captured_cases"]

INSTALL = "pip install 'transformers>=4.57'"
BATCH, LENGTH = 2, 64


def _model() -> nn.Module:
    """Qwen3 with its q and k norms of 128 on bytes; seeded weights, gains away from 1."""
    qwen3: Any = import_module("transformers.models.qwen3")
    config = qwen3.Qwen3Config(
        vocab_size=256,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=128,
        max_position_embeddings=LENGTH,
        use_cache=False,
    )
    model: nn.Module = qwen3.Qwen3ForCausalLM(config)
    for module in _norms(model).values():
        nn.init.normal_(module.weight, mean=1.0, std=0.3)
    return model.to(torch.bfloat16)


def _norms(model: nn.Module) -> dict[str, Any]:
    return {
        name: module
        for name, module in model.named_modules()
        if type(module).__name__.endswith("RMSNorm")
    }


def _tokens() -> Tensor:
    """The bytes of the Python manual's text, which ships with CPython."""
    topics: dict[str, str] = import_module("pydoc_data.topics").topics
    text = "".join(topics[name] for name in sorted(topics)).encode()
    return torch.tensor(list(text[: BATCH * LENGTH])).reshape(BATCH, LENGTH)


def captured_cases(zero_centered_gamma: bool) -> list[Case]:
    """One bfloat16 case a norm, named after it, in the order in which the model runs them.

    Args:
        zero_centered_gamma: whether the arguments end with a zero_centered_gamma of False.

    Raises:
        NotRunError: where there is no such model, with the remedy.
    """
    try:
        return list(_captured(zero_centered_gamma))
    except ImportError as error:
        raise NotRunError(f"on a real model: no transformers with Qwen3 here; {INSTALL}") from error
    except Exception as error:  # a transformers that has moved on
        reason = f"it could not be trained for one step: {type(error).__name__}: {error}"
        raise NotRunError(f"on a real model: {reason}") from error


def _captured(zero_centered_gamma: bool) -> Iterator[Case]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = _model()
    seen: dict[str, list[Tensor]] = {}

    def watch(name: str, norm: nn.Module) -> None:
        def forward(module: nn.Module, args: tuple[Tensor, ...], y: Tensor) -> None:
            seen[name] = [args[0].detach().clone()]
            y.register_hook(  # type: ignore[no-untyped-call]
                lambda grad_y: seen[name].append(grad_y.clone())
            )

        norm.register_forward_hook(forward)

    norms = _norms(model)
    for name, norm in norms.items():
        watch(name, norm)
    tokens = _tokens()
    model(input_ids=tokens, labels=tokens).loss.backward()
    for name, (x, grad_y) in seen.items():
        norm = norms[name]
        inputs = norm_inputs(x, norm.weight.detach(), grad_y, norm.variance_epsilon)
        inputs = replace(inputs, rows={"x": 1, "y": 1})
        if zero_centered_gamma:
            inputs = inputs.with_arguments(zero_centered_gamma=False)
        shape = " x ".join(str(size) for size in x.shape)
        label = f"Qwen3 {name.removeprefix('model.')}, bf16, {shape}"
        yield Case(label, inputs, x.dtype, {"hidden": x.shape[-1]}, main=False)
