"""Checks of integrations.automodel with a nemo-automodel wheel on the path, run on each rank."""

import io

import automodel_rms_norm as arn
import support
import torch
import torch.distributed as dist
from automodel_rms_norm.integrations import automodel
from automodel_rms_norm.testing import assert_bitwise_equal
from nemo_automodel.components.models.common import utils
from ranks import device, mesh_of
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

EPS = 1e-5


def norm_with(weight: Tensor) -> nn.Module:
    norm = utils.initialize_rms_norm_module("torch_fp32", weight.numel(), EPS, dtype=weight.dtype)
    norm.to(weight.device)
    assert isinstance(norm, utils.Float32RMSNorm)
    norm.weight.data.copy_(weight)
    return norm


def differentiated(norm: nn.Module, inputs: support.Inputs) -> support.Outputs:
    x = inputs.x.detach().requires_grad_()
    y = norm(x)
    return support.Outputs(y.detach(), *torch.autograd.grad(y, (x, norm.weight), inputs.grad_y))


def check_every_norm_is_the_op_while_it_is_enabled() -> None:
    inputs = support.make_inputs(3, 5, 160, device=device())
    expected = support.forward_backward(arn.rms_norm, inputs, EPS)
    before, forward = norm_with(inputs.weight), utils._float32_rms_norm_fwd
    weight, keys = before.weight, list(before.state_dict())
    with automodel.enabled():
        for norm in (before, norm_with(inputs.weight)):
            support.assert_same(differentiated(norm, inputs), expected)
            support.assert_same(differentiated(torch.compile(norm), inputs), expected)
            assert list(norm.state_dict()) == keys == ["weight"]
        assert before.weight is weight
        y = utils._float32_rms_norm_fwd(inputs.x, inputs.weight, EPS)
        assert_bitwise_equal(y, expected.y, "y")
    assert utils._float32_rms_norm_fwd is forward


def model(seed: int = 0) -> nn.Module:
    """A small Llama of AutoModel's, with norm weights away from 1."""
    from nemo_automodel.components.models.llama.model import LlamaForCausalLM
    from transformers import LlamaConfig

    torch.manual_seed(seed)
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        vocab_size=96,
        max_position_embeddings=64,
        torch_dtype="bfloat16",
    )
    backend = utils.BackendConfig(attn="sdpa", linear="torch", rms_norm="torch_fp32")
    made = LlamaForCausalLM(config, backend=backend).to(torch.bfloat16)
    for norm in norms(made).values():
        norm.weight.data = (1 + 0.4 * torch.randn(norm.weight.shape)).bfloat16()
    return made.to(device()).train()


def norms(model: nn.Module) -> dict[str, nn.Module]:
    return {n: m for n, m in model.named_modules() if isinstance(m, utils.Float32RMSNorm)}


def logits_of(model: nn.Module, tokens: Tensor) -> Tensor:
    out = model(tokens)
    return out if isinstance(out, Tensor) else out.logits


def check_a_model_of_automodel() -> None:
    tokens = torch.randint(96, (2, 12), generator=torch.Generator().manual_seed(0)).to(device())
    original, saved = model(), io.BytesIO()
    torch.save(original.state_dict(), saved)
    seen = []
    with automodel.enabled():
        loaded = model(seed=1)
        loaded.load_state_dict(torch.load(io.BytesIO(saved.getvalue())), strict=True)
        assert len(norms(loaded)) == 5
        for norm in norms(loaded).values():
            norm.register_forward_hook(lambda m, x, y: seen.append((m, x[0].detach(), y.detach())))
        logits = logits_of(loaded, tokens)
        logits.float().square().mean().backward()
        assert len(seen) == 5
        for norm, x, y in seen:
            assert_bitwise_equal(y, arn.rms_norm(x, norm.weight.detach(), norm.eps), "y")
            assert norm.weight.grad.abs().sum() > 0
        # A model that was there before uses it too, and compiled code is not stale.
        assert_bitwise_equal(logits_of(original, tokens), logits, "logits")
        compiled = torch.compile(original, backend="aot_eager")
        assert_bitwise_equal(logits_of(compiled, tokens), logits, "compiled logits")
    assert list(loaded.state_dict()) == list(original.state_dict())


def check_a_tensor_parallel_plan() -> None:
    """The norms of AutoModel's sequence-parallel Llama plan, around one of its norms."""
    mesh = mesh_of(dist.get_world_size(), names=("tp",))
    inputs = support.make_inputs(2, 8, 64, device=device())
    with automodel.enabled():
        block = nn.Sequential(
            norm_with(inputs.weight), nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False)
        ).to(device(), torch.bfloat16)
        block[0].weight.data.copy_(inputs.weight)
        expected = arn.rms_norm(inputs.x, inputs.weight, EPS)
        plan = {
            "0": SequenceParallel(),
            "1": ColwiseParallel(input_layouts=Shard(1)),
            "2": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
        }
        seen = []
        parallelize_module(block, mesh, plan)
        block[0].register_forward_hook(lambda m, x, y: seen.append(y.detach()))
        for called in (block, torch.compile(block, backend="aot_eager")):
            out = called(distribute_tensor(inputs.x, mesh, [Shard(1)]))
            out.to_local().float().sum().backward()
            assert isinstance(out, DTensor)
        for y in seen:
            assert_bitwise_equal(y.full_tensor(), expected, "y")
        assert block[0].weight.grad is not None
