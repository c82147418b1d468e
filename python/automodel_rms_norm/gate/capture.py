"""What every norm of a real model gets in one training step: x, weight, grad_y and eps."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from automodel_rms_norm.contexts import Inputs
from automodel_rms_norm.gate.cases import Case

__all__ = ["captured_cases", "why_no_capture"]

INSTALL = "pip install 'transformers>=4.57'"
BATCH, LENGTH = 2, 64


def why_no_capture() -> str:
    """Why there is no model to capture from, and how to get it; "" where there is."""
    try:
        import_module("transformers.models.qwen3")
    except ImportError:
        return f"no transformers with Qwen3 here; {INSTALL}"
    return ""


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


def captured_cases() -> list[Case]:
    """One bfloat16 case a norm, named after it, in the order in which the model runs them."""
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
    cases = []
    for name, (x, grad_y) in seen.items():
        norm = norms[name]
        inputs = Inputs(x, norm.weight.detach(), grad_y, norm.variance_epsilon)
        shape = " x ".join(str(size) for size in x.shape)
        cases.append(Case(f"Qwen3 {name.removeprefix('model.')}, bf16, {shape}", inputs))
    return cases
