"""A small Qwen3 with a target in the place of every norm, and preference pairs as bytes.

preferences.jsonl was written for this package: eight questions, a helpful answer each and one that
is wrong or rude.
"""

from __future__ import annotations

import json
from importlib import import_module, resources
from typing import Any

import torch
from torch import Tensor, nn

from automodel_rms_norm.contexts import Function
from automodel_rms_norm.gate.inductor import goes_through_inductor
from automodel_rms_norm.gate.recipe import Recipe

__all__ = [
    "byte_tokenizer",
    "make_model",
    "norm_compiles_itself",
    "preferences",
    "why_not_norm",
]

HEAD = 128  # the width of Qwen3's query and key norms


def preferences() -> list[dict[str, str]]:
    """prompt, chosen and rejected of each pair."""
    text = resources.files(__package__).joinpath("preferences.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


def byte_tokenizer() -> Any:
    """A token a byte; made here, so that nothing is downloaded."""
    tokenizers: Any = import_module("tokenizers")
    level = tokenizers.pre_tokenizers.ByteLevel
    names = ["<eos>", "<pad>", *sorted(level.alphabet())]
    vocabulary = {name: number for number, name in enumerate(names)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = level(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    fast: Any = import_module("transformers").PreTrainedTokenizerFast
    return fast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>")


def why_not_norm(target: Recipe) -> str:
    """Why the target cannot be a model's norm; "" where it can."""
    taken = list(target.inputs)
    if taken[:3] != ["x", "weight", "eps"] or taken[3:] not in ([], ["zero_centered_gamma"]):
        return f"{target.name} takes {', '.join(taken)}, and a model's norm has (x, weight, eps)"
    return ""


class _Norm(nn.Module):
    """A norm that is a function."""

    def __init__(self, function: Function, weight: nn.Parameter, eps: float, centred: bool) -> None:
        super().__init__()
        self.function, self.weight, self.eps = function, weight, eps
        self.more = (False,) if centred else ()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.function(x, self.weight, self.eps, *self.more)
        return y


def _norm(target: Recipe, weight: nn.Parameter, eps: float, compiled: bool) -> nn.Module:
    if target.module is None:
        assert target.function is not None
        made: nn.Module = _Norm(target.function, weight, eps, len(target.inputs) > 3)
    else:
        made = target.module(hidden=weight.numel(), eps=eps)
        made.weight = weight
    if compiled:
        made.compile(dynamic=True)
    return made


def norm_compiles_itself(target: Recipe) -> bool:
    """Whether the norm goes through torch.compile when it is called plainly, as AutoModel's do."""
    norm = _norm(target, nn.Parameter(torch.ones(8)), 1e-6, compiled=False)
    return goes_through_inductor(lambda: norm(torch.ones(2, 8)))


def make_model(target: Recipe, hidden: int, layers: int, compiled: bool) -> nn.Module:
    """The same weights at every call, in bfloat16, on the CPU; gains random and away from 1.

    Args:
        target: the norm, for which there is no `why_not_norm`.
        hidden: the model's width.
        layers: how many.
        compiled: whether each norm is put under torch.compile, besides what it does itself.
    """
    qwen3: Any = import_module("transformers.models.qwen3")
    config = qwen3.Qwen3Config(
        vocab_size=258,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=HEAD,
        max_position_embeddings=1024,
        use_cache=False,
        eos_token_id=0,
        pad_token_id=1,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model: nn.Module = qwen3.Qwen3ForCausalLM(config)
        norms = {
            name: module
            for name, module in model.named_modules()
            if type(module).__name__.endswith("RMSNorm")
        }
        for module in norms.values():
            nn.init.normal_(module.get_parameter("weight"), mean=1.0, std=0.3)
    model = model.to(torch.bfloat16)
    for name, module in norms.items():
        weight, eps = module.get_parameter("weight"), float(module.variance_epsilon)
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, _norm(target, weight, eps, compiled))
    return model
