"""A small Qwen3 on the text of Python's manual, trained in several ways: benchmarks/training.py."""

import contextlib
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from automodel_rms_norm.distributed import exact_grad_weight
from automodel_rms_norm.gate.dpo.model import make_model
from automodel_rms_norm.gate.norms import norm_recipe
from decoder import batch
from torch import Tensor, nn

HIDDEN, LAYERS = 128, 2
SEQUENCES, LENGTH = 8, 64  # of a batch: 512 rows, and a micro-batch has 128


class Way(NamedTuple):
    """How a model is trained. Ways that train the same parameters start from the same model.

    Attributes:
        norms_only: train the norms' weights alone.
        compiled: torch.compile of the whole model.
        norms_compiled: torch.compile of each norm alone.
        recomputed: activation checkpointing of every layer.
        parts: into how many micro-batches a batch is split.
    """

    norms_only: bool = False
    compiled: bool = False
    norms_compiled: bool = False
    recomputed: bool = False
    parts: int = 1


class Trainer:
    """bfloat16, but for the norms' weights, which are float32 and start away from 1.

    Args:
        norm: of (x, weight, eps).
        way: how.
        device: where.
        exact: whether micro-batches' gradients of the norms' weights go through exact_grad_weight.
    """

    def __init__(
        self, norm: Callable[..., Tensor], way: Way, device: torch.device, exact: bool
    ) -> None:
        self.way, self.device = way, device
        self.exact = exact and way.parts > 1
        self.model = make_model(norm_recipe(norm), HIDDEN, LAYERS, way.norms_compiled)
        self.model.to(device).train()
        for weight in self.norm_weights().values():
            weight.data = weight.data.float()
        if way.norms_only:
            for parameter in self.model.parameters():
                parameter.requires_grad_(parameter.dim() == 1)
        if way.recomputed:
            self.model.gradient_checkpointing_enable({"use_reentrant": False})
        self.forward = torch.compile(self.model) if way.compiled else self.model
        self.optimizer = torch.optim.AdamW(
            [p for p in self.model.parameters() if p.requires_grad], lr=1e-3
        )

    def norm_weights(self) -> dict[str, nn.Parameter]:
        return {n: p for n, p in self.model.named_parameters() if p.dim() == 1}

    def step(self, index: int) -> float:
        """One step of the optimizer; the mean loss before it."""
        with self._joined():
            losses = torch.cat([self.backward(*part) for part in self.micro_batches(index)])
        self.optimizer.step()
        self.optimizer.zero_grad()
        return losses.mean().item()

    def micro_batches(self, index: int) -> list[tuple[Tensor, Tensor]]:
        """Tokens and targets of each part of a batch."""
        both = (t.to(self.device) for t in batch(index, SEQUENCES, LENGTH))
        return list(zip(*(t.chunk(self.way.parts) for t in both), strict=True))

    def backward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """The loss of each token, whose gradients are added to the parameters'.

        The losses are summed by nobody, so that those of all parts are those of the whole batch.
        """
        logits = self.forward(input_ids=tokens).logits
        losses = F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), reduction="none")
        losses.backward(torch.full_like(losses, 1 / (SEQUENCES * LENGTH)))
        return losses.detach()

    @contextlib.contextmanager
    def _joined(self) -> Iterator[None]:
        """exact_grad_weight of the norms; those of heads have as many times the rows."""
        config = self.model.config
        heads = {"q_norm": config.num_attention_heads, "k_norm": config.num_key_value_heads}
        groups: dict[int, list[nn.Parameter]] = {}
        for name, weight in self.norm_weights().items():
            rows = SEQUENCES * LENGTH // self.way.parts * heads.get(name.split(".")[-2], 1)
            groups.setdefault(rows, []).append(weight)
        with contextlib.ExitStack() as stack:
            for rows, weights in groups.items() if self.exact else ():
                stack.enter_context(exact_grad_weight(weights, rows))
            yield
