"""GRPO's two passes over the same tokens: a rollout (inference_mode, one sequence at a time,
compiled) and the training (gradients, 64 sequences). What the norms add to the difference of their
log-probabilities is exactly zero.
"""

import automodel_rms_norm as arn
import pytest
import torch
from automodel_rms_norm.testing import assert_bitwise_equal
from decoder import EPS, Decoder, Norm, batch
from torch import Tensor

SEQUENCES, LENGTH = 64, 12


def log_probabilities(logits: Tensor, targets: Tensor) -> Tensor:
    return logits.float().log_softmax(-1).gather(-1, targets[..., None])[..., 0].detach()


def rollout(
    model: Decoder, tokens: Tensor, targets: Tensor, backend: str = "aot_eager"
) -> tuple[Tensor, list[Tensor]]:
    """Log-probabilities, and inputs and outputs of the norms, of all sequences."""

    def step(tokens: Tensor) -> tuple[Tensor, list[Tensor]]:
        seen: list[Tensor] = []
        return model(tokens, seen), seen

    compiled = torch.compile(step, backend=backend)
    with torch.inference_mode():
        passes = [compiled(one[None]) for one in tokens]
    logits = torch.cat([logits.clone() for logits, _ in passes])
    seen = [torch.cat([t.clone() for t in s]) for s in zip(*(s for _, s in passes), strict=True)]
    return log_probabilities(logits, targets), seen


def training(model: Decoder, tokens: Tensor, targets: Tensor) -> tuple[Tensor, list[Tensor]]:
    seen: list[Tensor] = []
    logits = model(tokens, seen)
    assert logits.requires_grad
    return log_probabilities(logits, targets), seen


def drifts(norm: Norm, device: torch.device, backend: str = "aot_eager") -> list[float]:
    """For each norm: how far it takes the rollout's inputs, in training, from its outputs there."""
    model = Decoder(norm).to(device)
    tokens, targets = (t.to(device) for t in batch(0, SEQUENCES, LENGTH))
    rolled, seen = rollout(model, tokens, targets, backend)
    trained, seen_in_training = training(model, tokens, targets)
    assert rolled.shape == trained.shape == (SEQUENCES, LENGTH)
    # The tokens are the same; the log-probabilities need not be, for the other layers' sums.
    assert (rolled - trained).abs().max() < 0.2
    found = []
    for weight, x, y, x_trained, y_trained in zip(
        model.norm_weights(),
        seen[::2],
        seen[1::2],
        seen_in_training[::2],
        seen_in_training[1::2],
        strict=True,
    ):
        again = norm(x.requires_grad_(), weight, EPS).detach()
        found.append((again.float() - y.float()).abs().max().item())
        # And the other way round, one sequence at a time.
        with torch.inference_mode():
            single = torch.cat([norm(one[None], weight, EPS) for one in x_trained])
        found.append((single.float() - y_trained.float()).abs().max().item())
    return found


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_the_norms_add_nothing_to_the_drift(backend, device, fresh_dynamo):
    assert drifts(arn.rms_norm, device, backend) == [0.0] * 10


def test_a_norm_that_depends_on_the_context_would_be_seen(device, fresh_dynamo):
    def affected(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        scale = 1 + 2.0**-9 if torch.is_inference_mode_enabled() else 1
        return arn.rms_norm(x, weight * scale, eps)

    assert min(drifts(affected, device)) > 0


@pytest.mark.parametrize("row", [0, 5])
def test_equal_inputs_give_equal_outputs_in_both(row, device, fresh_dynamo):
    """The first norm's inputs are embeddings: they are the same in both passes, to the bit."""
    model = Decoder(arn.rms_norm).to(device)
    tokens, targets = (t.to(device) for t in batch(1, SEQUENCES, LENGTH))
    _, seen = rollout(model, tokens, targets)
    _, seen_in_training = training(model, tokens, targets)
    for actual, expected, name in zip(seen[:2], seen_in_training[:2], ("x", "y"), strict=True):
        assert_bitwise_equal(actual[row], expected[row], name)
