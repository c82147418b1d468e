"""A small decoder whose norms are any function, and the text that it is trained on."""

import functools
from collections.abc import Callable
from pydoc_data.topics import topics

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Norm = Callable[[Tensor, Tensor, float], Tensor]
VOCABULARY = 256
EPS = 1e-5


@functools.cache
def text() -> Tensor:
    """The topics of Python's own help, about 700 KB of English and code, as bytes."""
    return torch.tensor(list("\n".join(topics.values()).encode()), dtype=torch.int64)


def batch(step: int, size: int, length: int) -> tuple[Tensor, Tensor]:
    """Tokens and the next ones, (size, length) each, the same for the same step."""
    generator = torch.Generator().manual_seed(step)
    begins = torch.randint(len(text()) - length - 1, (size,), generator=generator)
    windows = text()[begins[:, None] + torch.arange(length + 1)]
    return windows[:, :-1], windows[:, 1:]


class NormOf(nn.Module):
    """A float32 weight away from 1. `seen` takes what is normalised and what comes out."""

    def __init__(self, hidden: int, norm: Norm) -> None:
        super().__init__()
        self.weight = nn.Parameter(1 + 0.2 * torch.randn(hidden))
        self.norm = norm

    def forward(self, x: Tensor, seen: list[Tensor] | None = None) -> Tensor:
        y = self.norm(x, self.weight, EPS)
        if seen is not None:
            seen += [x.detach(), y.detach()]
        return y


class Layer(nn.Module):
    def __init__(self, hidden: int, heads: int, norm: Norm) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm, self.mlp_norm = NormOf(hidden, norm), NormOf(hidden, norm)
        self.qkv = nn.Linear(hidden, 3 * hidden, bias=False, dtype=torch.bfloat16)
        self.out = nn.Linear(hidden, hidden, bias=False, dtype=torch.bfloat16)
        self.up = nn.Linear(hidden, 4 * hidden, bias=False, dtype=torch.bfloat16)
        self.down = nn.Linear(4 * hidden, hidden, bias=False, dtype=torch.bfloat16)

    def forward(self, x: Tensor, seen: list[Tensor] | None = None) -> Tensor:
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in self.qkv(self.attention_norm(x, seen)).chunk(3, -1)
        )
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(F.silu(self.up(self.mlp_norm(x, seen))))


class Decoder(nn.Module):
    """bfloat16 but for the norms' weights. Seeded: two of the same sizes are the same."""

    def __init__(
        self,
        norm: Norm,
        layers: int = 2,
        hidden: int = 128,
        heads: int = 4,
        seed: int = 0,
    ) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embedding = nn.Embedding(VOCABULARY, hidden, dtype=torch.bfloat16)
        self.layers = nn.ModuleList(Layer(hidden, heads, norm) for _ in range(layers))
        self.norm = NormOf(hidden, norm)
        self.head = nn.Linear(hidden, VOCABULARY, bias=False, dtype=torch.bfloat16)

    def forward(self, tokens: Tensor, seen: list[Tensor] | None = None) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, seen)
        return self.head(self.norm(x, seen))

    def norm_weights(self) -> list[nn.Parameter]:
        return [module.weight for module in self.modules() if isinstance(module, NormOf)]
