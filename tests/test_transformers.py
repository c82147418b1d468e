"""integrations.transformers.convert on small models of Hugging Face, with random norm weights."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import automodel_rms_norm as arn
import pytest
import torch
from automodel_rms_norm.integrations._patching import IntegrationError
from automodel_rms_norm.integrations.transformers import (
    LLAMA_ROUNDING,
    SAME_ROUNDING,
    Conversion,
    convert,
)
from automodel_rms_norm.testing import assert_bitwise_equal
from torch import nn

transformers = pytest.importorskip("transformers")

SMALL = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 96,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 95,
}


class Architecture(NamedTuple):
    """A small model, the number of its norms that the op matches, and how they round."""

    config: str
    options: dict[str, object]
    norms: int
    rounding: str


ARCHITECTURES = {
    "llama": Architecture("LlamaConfig", SMALL, 5, LLAMA_ROUNDING),
    "mistral": Architecture("MistralConfig", SMALL, 5, LLAMA_ROUNDING),
    "qwen2": Architecture("Qwen2Config", SMALL, 5, LLAMA_ROUNDING),
    "qwen3": Architecture("Qwen3Config", SMALL, 9, LLAMA_ROUNDING),
    "gemma": Architecture("GemmaConfig", SMALL, 5, SAME_ROUNDING),
    "gemma3": Architecture("Gemma3TextConfig", SMALL, 13, SAME_ROUNDING),
    "olmo2": Architecture("Olmo2Config", SMALL, 9, SAME_ROUNDING),
    "qwen3_moe": Architecture(
        "Qwen3MoeConfig",
        {**SMALL, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
        9,
        LLAMA_ROUNDING,
    ),
}
TOKENS = torch.randint(1, 95, (2, 10), generator=torch.Generator().manual_seed(0))


def make(name: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    architecture = ARCHITECTURES[name]
    config = getattr(transformers, architecture.config)(**architecture.options)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.data += 0.4 * torch.randn(parameter.shape).to(dtype)
    return model.eval()


def norms(model: nn.Module) -> list[arn.RMSNorm]:
    return [module for module in model.modules() if isinstance(module, arn.RMSNorm)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_all_norms_are_converted_and_compute_the_same(name, dtype):
    model = make(name, dtype)
    original = copy.deepcopy(model)
    parameters = dict(model.named_parameters())
    result = convert(model)
    assert len(result.converted) == len(norms(model)) == ARCHITECTURES[name].norms
    assert not result.left
    expected = SAME_ROUNDING if dtype == torch.float32 else ARCHITECTURES[name].rounding
    assert set(result.converted.values()) == {expected}
    assert list(model.state_dict()) == list(original.state_dict())
    assert all(parameter is parameters[key] for key, parameter in model.named_parameters())
    with torch.no_grad():
        difference = (model(TOKENS).logits - original(TOKENS).logits).abs().max()
    # Five to thirteen norms of two layers, each other by a rounding or two, seen through products
    # of 64 terms of size 1: 13 * 2 * 64^0.5 roundings of logits below 4.
    assert difference <= 13 * 2 * 8 * 4 * torch.finfo(dtype).eps / 2


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_generate_forward_backward_checkpointing_save_and_load(name: str, tmp_path: Path):
    model = make(name, torch.bfloat16)
    convert(model)
    out = model.generate(TOKENS, max_new_tokens=4, do_sample=False)
    assert out.shape == (2, 14)

    def gradients() -> dict[str, torch.Tensor]:
        model.zero_grad()
        model(TOKENS, labels=TOKENS, use_cache=False).loss.backward()
        return {key: parameter.grad for key, parameter in model.named_parameters()}

    model.train()
    plain = gradients()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    recomputed = gradients()
    for key, grad in plain.items():
        assert_bitwise_equal(recomputed[key], grad, key)
    for norm in norms(model):
        assert norm.weight.grad.abs().sum() > 0
    model.gradient_checkpointing_disable()
    model.eval().save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path, dtype=torch.bfloat16).eval()
    convert(loaded)
    with torch.no_grad():
        assert_bitwise_equal(loaded(TOKENS).logits, model(TOKENS).logits, "logits")


# --- What is left alone ---------------------------------------------------------------------------


class Own(nn.Module):
    """A norm of the formula, with what a test adds to it."""

    def __init__(self, hidden: int = 64) -> None:
        super().__init__()
        self.eps = 1e-5
        self.weight = nn.Parameter(1 + 0.4 * torch.randn(hidden))

    def forward(self, x):
        y = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + self.eps)
        return (y * self.weight.float()).to(x.dtype)


class Gated(Own):
    def forward(self, x, gate):
        return super().forward(x) * gate


class Doubled(Own):
    def forward(self, x):
        return 2 * super().forward(x)


class WithoutEps(Own):
    def forward(self, x):
        self.eps = 0
        return super().forward(x)


class Wide(Own):
    def forward(self, x):
        return super().forward(x).float()


class Scaleless(nn.Module):
    eps = 1e-5

    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)


def biased() -> nn.Module:
    norm = Own()
    norm.bias = nn.Parameter(torch.zeros(64))
    return norm


def hooked() -> nn.Module:
    norm = Own()
    norm.register_forward_hook(lambda module, x, y: None)
    return norm


def quantised() -> nn.Module:
    norm = Own()
    norm.weight = nn.Parameter(torch.ones(64, dtype=torch.int8), requires_grad=False)
    return norm


def without_a_number() -> nn.Module:
    norm = Own()
    norm.eps = None
    return norm


LEFT: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "bias": (biased, "has bias, which the op has not"),
    "layer norm": (lambda: nn.LayerNorm(64), "has bias, which the op has not"),
    "hooks": (hooked, "has hooks, which would be lost"),
    "quantised weight": (quantised, "has a weight of torch.int8"),
    "gate": (Gated, "cannot be called with x alone: TypeError"),
    "another formula": (Doubled, "computes something else"),
    "no eps in the sum": (WithoutEps, "computes something else"),
    "no eps": (without_a_number, "has no number called"),
    "another result": (lambda: Wide().bfloat16(), "returns torch.float32 for torch.bfloat16 x"),
    "no weight": (Scaleless, "put RMSNorm(dim, eps, elementwise_affine=False) in its place"),
    "converted": (lambda: arn.RMSNorm(64), "is the op already"),
}


@pytest.mark.parametrize("kind", LEFT)
def test_what_the_op_does_not_match_is_left_with_the_reason(kind: str) -> None:
    make_norm, reason = LEFT[kind]
    norm = make_norm()
    model = nn.Sequential(nn.Linear(64, 64), norm)
    result = convert(model)
    assert not result.converted
    assert list(result.left) == ["1"]
    assert reason in result.left["1"]
    assert model[1] is norm
    assert f"1: {result.left['1']}" in str(result)


def test_a_norm_is_known_by_what_it_computes() -> None:
    model = nn.Sequential(Own(), nn.Linear(64, 64), Own())
    model.eval()
    result = convert(model)
    assert result == Conversion({"0": SAME_ROUNDING, "2": SAME_ROUNDING})
    assert not model[0].training
    assert model[0].eps == 1e-5


def test_tied_weights_stay_tied() -> None:
    first, second = Own(), Own()
    second.weight = first.weight
    model = nn.Sequential(first, second, first)
    convert(model)
    assert model[0].weight is model[1].weight is first.weight
    assert model[0] is model[2]


def test_a_model_on_the_meta_device_can_be_converted() -> None:
    model = nn.Sequential(Own().to("meta"))
    assert convert(model).converted == {"0": SAME_ROUNDING}
    assert model[0].weight.is_meta


def test_the_model_must_not_be_the_norm() -> None:
    assert "is the whole model" in convert(Own()).left[""]


def test_a_model_without_norms_is_refused() -> None:
    with pytest.raises(IntegrationError, match="Sequential has no module that looks like an RMSNo"):
        convert(nn.Sequential(nn.Linear(8, 8), nn.ReLU()))
