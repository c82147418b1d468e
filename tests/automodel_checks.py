"""Checks of integrations.automodel with a nemo-automodel wheel on the path, run on each rank."""

import io

import automodel_rms_norm as arn
import support
import torch
import torch.distributed as dist
from automodel_rms_norm.integrations import automodel
from automodel_rms_norm.testing import assert_bitwise_equal
from nemo_automodel.components.models.common import utils
from parallel_checks import assert_norm, assert_within, whole
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
        rms_norm_eps=EPS,
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


class Probe:
    """Sees what a norm is given and returns, and their gradients: of x by zeros that are added to
    it, so that what else uses x does not count. In eager code."""

    def __init__(self, norm: nn.Module) -> None:
        self.norm = norm
        self.hooks = [
            norm.register_forward_pre_hook(self.before),
            norm.register_forward_hook(self.after),
        ]

    def remove(self) -> None:
        for hook in self.hooks:
            hook.remove()

    def before(self, norm: nn.Module, given: tuple[Tensor]) -> tuple[Tensor]:
        self.zeros = torch.zeros_like(given[0]).requires_grad_()
        x = given[0] + self.zeros
        self.x = x.detach()
        return (x,)

    def after(self, norm: nn.Module, given: tuple[Tensor], y: Tensor) -> None:
        self.y = y.detach()
        y.register_hook(lambda grad: setattr(self, "grad_y", grad))

    def assert_is_the_op(self) -> None:
        """y and grad_x have the bits of one call of the op on all rows; grad_weight is within the
        bound of its sum over ranks."""
        weight = self.norm.weight
        gain = whole(weight.detach())
        rows = [whole(tensor) for tensor in (self.x, self.y, self.zeros.grad, self.grad_y)]
        expected = assert_norm("a norm", gain, rows, self.norm.eps)
        inputs = support.Inputs(rows[0], gain, rows[3])
        assert_within(whole(weight.grad), expected.grad_weight, inputs, "a norm")


def check_a_model_of_automodel() -> None:
    tokens = torch.randint(96, (2, 12), generator=torch.Generator().manual_seed(0)).to(device())
    original, saved = model(), io.BytesIO()
    compiled = torch.compile(original, backend="aot_eager")
    logits_of(compiled, tokens)  # compiled without the op, which must not be kept
    torch.save(original.state_dict(), saved)
    with automodel.enabled():
        loaded = model(seed=1)
        loaded.load_state_dict(torch.load(io.BytesIO(saved.getvalue())), strict=True)
        probes = [Probe(norm) for norm in norms(loaded).values()]
        assert len(probes) == 5
        logits = logits_of(loaded, tokens)
        logits.float().square().mean().backward()
        for probe in probes:
            probe.assert_is_the_op()
        # A model that was there before uses it too, in eager code and compiled.
        gradients = gradients_of(loaded)
        for called in (original, compiled):
            original.zero_grad()
            again = logits_of(called, tokens)
            again.float().square().mean().backward()
            assert_bitwise_equal(again, logits, "logits")
            for name, gradient in gradients_of(original).items():
                assert_bitwise_equal(gradient, gradients[name], name)
    assert list(loaded.state_dict()) == list(original.state_dict())


def gradients_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def check_the_tensor_parallel_plans_of_automodel() -> None:
    """Its own plans for its own Llama, with and without sequence parallelism."""
    from nemo_automodel.components.distributed.optimized_tp_plans import _parallelize_llama

    mesh = mesh_of(dist.get_world_size(), names=("tp",))
    tokens = torch.randint(96, (2, 12), generator=torch.Generator().manual_seed(0)).to(device())
    with automodel.enabled():
        for sequence_parallel in (False, True):
            sharded = model()
            plan = _parallelize_llama(sharded, sequence_parallel=sequence_parallel)
            parallelize_module(sharded, mesh, plan)
            probes = [Probe(norm) for norm in norms(sharded).values()]
            whole(logits_of(sharded, tokens)).float().square().mean().backward()
            for probe in probes:
                probe.assert_is_the_op()
            # The first norm's rows are cut where the plan says so.
            assert isinstance(probes[0].x, DTensor) == sequence_parallel


def check_a_tensor_parallel_plan() -> None:
    """A sequence-parallel plan around one of its norms, in eager code and compiled."""
    mesh = mesh_of(dist.get_world_size(), names=("tp",))
    inputs = support.make_inputs(2, 8, 64, device=device())
    with automodel.enabled():
        block = nn.Sequential(
            norm_with(inputs.weight), nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False)
        ).to(device(), torch.bfloat16)
        block[0].weight.data.copy_(inputs.weight)
        plan = {
            "0": SequenceParallel(),
            "1": ColwiseParallel(input_layouts=Shard(1)),
            "2": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
        }
        parallelize_module(block, mesh, plan)
        probe = Probe(block[0])
        x = distribute_tensor(inputs.x, mesh, [Shard(1)])

        def run(called: nn.Module) -> list[Tensor]:
            block.zero_grad()
            own = x.detach().requires_grad_()
            out = called(own)
            out.to_local().float().sum().backward()
            gradients = [parameter.grad for parameter in block.parameters()]
            return [whole(t) for t in (out, own.grad, *gradients)]

        eager = run(block)
        probe.assert_is_the_op()
        probe.remove()
        for ours, expected in zip(
            run(torch.compile(block, backend="aot_eager")), eager, strict=True
        ):
            assert_bitwise_equal(ours, expected, "compiled")
