"""Ways to train a model that give the same bits with the op, and the search for what breaks it."""

import sys
from pathlib import Path

import automodel_rms_norm as arn
import baselines
import pytest
import torch
from automodel_rms_norm.testing import assert_bitwise_equal
from torch import Tensor, nn

pytest.importorskip("transformers")
sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))
import search
from trainer import Trainer, Way

STEPS = 2


def trainers(norm, way: Way, device: torch.device) -> tuple[Trainer, Trainer]:
    first = Way(norms_only=way.norms_only)
    return tuple(Trainer(norm, each, device, exact=norm is arn.rms_norm) for each in (first, way))


def skip_where_products_depend_on_the_rows(device: torch.device) -> None:
    if device.type == "cuda":
        pytest.skip("cuBLAS may choose another kernel for another number of rows")


WAYS = {
    "again": Way(),
    "recomputed": Way(recomputed=True),
    "micro-batches of norms": Way(norms_only=True, parts=4),
}


@pytest.fixture(autouse=True)
def deterministic():
    """On a GPU other ops of the model are not, unless they are told to be."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the model is small
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)
    torch.set_num_threads(threads)


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_with_the_op_losses_and_parameters_have_the_same_bits(way, device):
    if way.parts > 1:
        skip_where_products_depend_on_the_rows(device)
    first, trainer = trainers(arn.rms_norm, way, device)
    assert first.norm_weights()["model.norm.weight"].std() > 0.1
    for index in range(STEPS):
        assert trainer.step(index) == first.step(index)
    after = dict(first.model.named_parameters())
    for name, parameter in trainer.model.named_parameters():
        assert_bitwise_equal(parameter.detach(), after[name].detach(), name)
    assert search.search(*trainers(arn.rms_norm, way, device), steps=1) is None


def names(found: search.Found) -> set[str]:
    return {call.op for call in found.calls}


def test_micro_batches_are_broken_by_the_weights_of_other_layers_alone(device):
    """Their gradients are rounded to bfloat16 before they are added up."""
    skip_where_products_depend_on_the_rows(device)
    found = search.search(*trainers(arn.rms_norm, Way(parts=4), device), steps=1)
    assert found.step == 1
    assert names(found) == {"aten.mm.default", "aten.embedding_dense_backward.default"}
    modules = [call.where for call in found.calls]
    assert modules[0] == "lm_head (backward)"
    assert modules[-1] == "model.embed_tokens (backward)"
    assert len(modules) == 16


def test_the_random_state_that_attention_returns_is_not_compared():
    out, seed = torch.ones(2), torch.tensor(7)
    attention = "aten._scaled_dot_product_cudnn_attention.default"
    assert search.without_random_state(attention, [out, seed]) == [out]
    assert search.without_random_state("aten.topk.default", [out, seed]) == [out, seed]


def test_a_norm_that_adds_up_in_another_order_is_found(device):
    skip_where_products_depend_on_the_rows(device)
    way = Way(norms_only=True, parts=4)
    found = search.search(*trainers(baselines.automodel_0_6, way, device), steps=1)
    assert names(found) == {"aten.sum.dim_IntList"}
    assert all(call.where.endswith("norm (backward)") for call in found.calls)


def test_a_norm_that_depends_on_the_batch_is_found(device):
    def affected(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return arn.rms_norm(x, weight, eps if x.shape[0] > 2 else 4 * eps)

    found = search.search(*trainers(affected, Way(norms_only=True, parts=4), device), steps=1)
    assert found.calls[0].op == "automodel.rms_norm_forward.default"
    assert found.calls[0].where == "model.layers.0.input_layernorm"


class Gate(nn.Module):
    def forward(self, x: Tensor, weight: Tensor) -> Tensor:
        return nn.functional.silu(arn.rms_norm(x, weight, 1e-5)) * x


def test_what_the_compiler_computes_otherwise_is_found(device, fresh_dynamo):
    """Inductor multiplies by a silu that it has not rounded; the norm stays as it is."""
    x = torch.randn(64, 96, generator=torch.Generator().manual_seed(0)).bfloat16().to(device)
    weight = (1 + 0.4 * torch.randn(96)).bfloat16().to(device)
    graph = torch.export.export(Gate(), (x, weight)).module()
    calls = search.compiled_calls(graph, [x, weight])
    assert calls[0][0].op == "automodel.rms_norm.default"
    assert [call.op for call in search.differences(*calls)] == ["aten.mul.Tensor"]
