"""Checks of a decoder layer under the ways in which models are spread over ranks: whatever the rest
of the layer does, each norm has the bits that it has on all rows at once.
"""

import functools
import itertools
from collections.abc import Callable

import automodel_rms_norm as arn
import sharding_checks
import support
import torch
import torch.distributed as dist
import torch.nn.functional as F
from automodel_rms_norm.integrations.transformers import convert
from automodel_rms_norm.testing import assert_bitwise_equal
from ranks import device, mesh_of
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_gather_tensor_autograd
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    FSDPModule,
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    ShardingStrategy,
    fully_shard,
)
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.utils.checkpoint import checkpoint

BATCH, SEQUENCE, HEADS, HEAD = 2, 16, 4, 32
HIDDEN = HEADS * HEAD
NORMS = ["input_layernorm", "q_norm", "post_attention_layernorm"]
# Where a layer may be compiled, and recomputed in its backward pass.
# Dynamo, AOTAutograd and the partitioner; sharding_checks.py has Inductor.
BACKEND = "aot_eager"
# Of values up to 4 that have passed six roundings to bfloat16, 2^-9 each: 6 * 4 * 2^-9 < 0.05.
CLOSE = {"rtol": 0.05, "atol": 0.05}
RUNS = list(itertools.product((False, True), repeat=2))


class Layer(nn.Module):
    """A decoder layer as AutoModel names it.

    Each norm has zeros added to its input and its output: their gradients are grad_x and grad_y of
    that norm alone, in eager and compiled code alike.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        options = {"dtype": dtype, "device": device()}
        self.attend = functools.partial(F.scaled_dot_product_attention, is_causal=True)
        self.input_layernorm = arn.RMSNorm(HIDDEN, **options)
        self.q_norm = arn.RMSNorm(HEAD, **options)
        self.post_attention_layernorm = arn.RMSNorm(HIDDEN, **options)
        for name in ("q_proj", "k_proj", "v_proj", "o_proj", "up_proj", "down_proj"):
            setattr(self, name, nn.Linear(HIDDEN, HIDDEN, bias=False, **options))
        for name in NORMS:
            weight = getattr(self, name).weight
            weight.data = 1 + 0.4 * torch.randn_like(weight)

    def forward(self, x: Tensor, *probes: Tensor) -> tuple[Tensor, list[Tensor]]:
        seen: list[Tensor] = []

        def norm(name: str, x: Tensor) -> Tensor:
            before, after = probes[len(seen) : len(seen) + 2]
            given = x + before
            y = getattr(self, name)(given) + after
            seen.extend((given.detach(), y.detach()))
            return y

        def heads(t: Tensor) -> Tensor:
            return t.unflatten(-1, (-1, HEAD))

        h = norm("input_layernorm", x)
        q = norm("q_norm", heads(self.q_proj(h)))
        k, v = heads(self.k_proj(h)), heads(self.v_proj(h))
        attended = self.attend(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
        x = x + self.o_proj(attended.transpose(1, 2).flatten(2))
        h = norm("post_attention_layernorm", x)
        return x + self.down_proj(F.silu(self.up_proj(h))), seen


def zeros(shape: tuple[int, ...]) -> Tensor:
    return torch.zeros(shape, dtype=torch.bfloat16, device=device(), requires_grad=True)


def run(layer: nn.Module, x: Tensor, probes: list[Tensor], recompute: bool) -> list[Tensor]:
    """For each norm: x, y, grad_x, grad_y. The weights' gradients are left in the layer."""
    call = functools.partial(checkpoint, layer, use_reentrant=False) if recompute else layer
    out, seen = call(x, *probes)
    out.float().square().sum().backward()
    grads = [probe.grad for probe in probes]
    return [(seen[i], seen[i + 1], grads[i], grads[i + 1]) for i in range(0, len(seen), 2)]


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def assert_norm(
    name: str, weight: Tensor, tensors: list[Tensor], eps: float = sharding_checks.EPS
) -> support.Outputs:
    """x, y, grad_x, grad_y of all ranks: y and grad_x are those of one run over all rows."""
    x, y, grad_x, grad_y = tensors
    expected = support.forward_backward(arn.rms_norm, support.Inputs(x, weight, grad_y), eps)
    assert_bitwise_equal(y, expected.y, f"y of {name}")
    assert_bitwise_equal(grad_x, expected.grad_x, f"grad_x of {name}")
    return expected


def assert_within(
    actual: Tensor, expected: Tensor, inputs: support.Inputs, name: str, scale: float = 1.0
) -> None:
    limit = sharding_checks.sharded_bound(inputs, dist.get_world_size()) * scale
    error = (actual.double() - expected.double() * scale).abs().cpu()
    assert (error <= limit).all(), f"grad_weight of {name} is off by {(error / limit).max()} bounds"


# --- Tensor parallelism ---------------------------------------------------------------------------

# As AutoModel's optimized_tp_plans, with sequence_parallel and without.
SEQUENCE_PLAN = {
    "input_layernorm": SequenceParallel(),
    "q_proj": ColwiseParallel(input_layouts=Shard(1)),
    "k_proj": ColwiseParallel(input_layouts=Shard(1)),
    "v_proj": ColwiseParallel(input_layouts=Shard(1)),
    "q_norm": SequenceParallel(sequence_dim=2, use_local_output=True),
    "o_proj": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
    "post_attention_layernorm": SequenceParallel(),
    "up_proj": ColwiseParallel(input_layouts=Shard(1)),
    "down_proj": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
}
TENSOR_PLAN = {
    "q_proj": ColwiseParallel(),
    "k_proj": ColwiseParallel(),
    "v_proj": ColwiseParallel(),
    "q_norm": SequenceParallel(sequence_dim=2, use_local_output=True),
    "o_proj": RowwiseParallel(),
    "up_proj": ColwiseParallel(),
    "down_proj": RowwiseParallel(),
}


def run_plan(
    plan: dict[str, object], mesh: DeviceMesh, layout: object, compiled: bool, recompute: bool
) -> tuple[nn.Module, list[Tensor]]:
    torch.manual_seed(0)
    layer = parallelize_module(Layer(torch.bfloat16), mesh, dict(plan))
    x = torch.randn(BATCH, SEQUENCE, HIDDEN, device=device()).bfloat16()
    x = x if layout is None else distribute_tensor(x, mesh, [layout])
    heads = HEADS // mesh.size()
    probes = []
    for name in NORMS:
        if name == "q_norm":
            probes += [zeros((BATCH, SEQUENCE, heads, HEAD)) for _ in range(2)]
        else:
            probes += [torch.zeros_like(x).requires_grad_() for _ in range(2)]
    called = torch.compile(layer, backend=BACKEND) if compiled else layer
    return layer, run(called, x, probes, recompute)


def all_rows(tensor: Tensor, mesh: DeviceMesh, heads: bool) -> Tensor:
    """Ranks hold parts of the sequence, or of the heads, or all of it."""
    if heads and not isinstance(tensor, DTensor):
        tensor = DTensor.from_local(tensor, mesh, [Shard(2)])
    return whole(tensor)


def assert_plan(plan: dict[str, object], layout: object) -> None:
    mesh = mesh_of(dist.get_world_size(), names=("tp",))
    for compiled, recompute in RUNS:
        layer, norms = run_plan(plan, mesh, layout, compiled, recompute)
        again = run_plan(plan, mesh, layout, compiled, recompute)[0]
        for name, tensors in zip(NORMS, norms, strict=True):
            weight = getattr(layer, name).weight
            gain = whole(weight)
            rows = [all_rows(tensor, mesh, name == "q_norm") for tensor in tensors]
            expected = assert_norm(name, gain.detach(), rows)
            inputs = support.Inputs(rows[0], gain.detach(), rows[3])
            total = whole(weight.grad)
            assert_within(total, expected.grad_weight, inputs, name)
            repeated = whole(getattr(again, name).weight.grad)
            assert_bitwise_equal(total, repeated, f"grad_weight of {name}, run again")


def check_sequence_parallel_plan() -> None:
    assert_plan(SEQUENCE_PLAN, Shard(1))


def check_tensor_parallel_plan() -> None:
    assert_plan(TENSOR_PLAN, None)


# --- Ranks with rows of their own -----------------------------------------------------------------


def gathered(tensor: Tensor) -> Tensor:
    """The ranks' tensors, one after another."""
    parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, tensor.contiguous())
    return torch.cat(parts)


def run_data_parallel(
    spread: Callable[[nn.Module], None], compiled: bool, recompute: bool
) -> tuple[Layer, list[Tensor]]:
    torch.manual_seed(0)
    layer = Layer(torch.float32)
    if compiled:
        layer.compile(backend=BACKEND)
    spread(layer)
    torch.manual_seed(1 + dist.get_rank())
    x = torch.randn(BATCH, SEQUENCE, HIDDEN, device=device()).bfloat16()
    shapes = [(BATCH, SEQUENCE, HEADS, HEAD) if n == "q_norm" else x.shape for n in NORMS]
    probes = [zeros(shape) for shape in shapes for _ in range(2)]
    return layer, run(layer, x, probes, recompute)


def share_of_sum(spread: Callable[[nn.Module], None]) -> float:
    """What of the sum over ranks a gradient is: the mean, but with torch 2.8 on gloo all of it."""
    probe = nn.Linear(1, 1, bias=False, device=device())
    spread(probe)
    probe(torch.ones(1, 1, device=device())).sum().backward()
    return probe.weight.grad.full_tensor().item() / dist.get_world_size()


def assert_data_parallel(spread: Callable[[nn.Module], None]) -> None:
    """float32 masters, computed in bfloat16."""
    scale = share_of_sum(spread)
    for compiled, recompute in RUNS:
        layer, norms = run_data_parallel(spread, compiled, recompute)
        again = run_data_parallel(spread, compiled, recompute)[0]
        assert isinstance(layer, FSDPModule)
        for name, tensors in zip(NORMS, norms, strict=True):
            weight = getattr(layer, name).weight
            assert weight.dtype == weight.grad.dtype == torch.float32
            gain = weight.full_tensor().detach().bfloat16()
            rows = [gathered(tensor) for tensor in tensors]
            expected = assert_norm(name, gain, rows)
            inputs = support.Inputs(rows[0], gain, rows[3])
            total = weight.grad.full_tensor()
            assert_within(total, expected.grad_weight, inputs, name, scale)
            repeated = getattr(again, name).weight.grad.full_tensor()
            assert_bitwise_equal(total, repeated, f"grad_weight of {name}, run again")


POLICY = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def check_fully_shard() -> None:
    mesh = mesh_of(dist.get_world_size(), names=("dp",))
    assert_data_parallel(lambda layer: fully_shard(layer, mesh=mesh, mp_policy=POLICY))


def check_hybrid_sharding() -> None:
    mesh = mesh_of(dist.get_world_size() // 2, 2, names=("replicate", "shard"))
    assert_data_parallel(lambda layer: fully_shard(layer, mesh=mesh, mp_policy=POLICY))


def check_norms_that_are_sharded_are_not_converted() -> None:
    """FSDP2 gathers a weight into the module that had it when it was sharded."""
    model = nn.Sequential(nn.Linear(HIDDEN, HIDDEN), nn.RMSNorm(HIDDEN, eps=1e-5))
    fully_shard(model, mesh=mesh_of(dist.get_world_size()))
    norm = model[1]
    reason = convert(model).left["1"]
    assert "has a sharded weight; convert the model before" in reason, reason
    assert model[1] is norm


def check_norms_of_fsdp1_are_not_converted() -> None:
    """It holds the weights of the modules that it wrapped, and reduces their gradients."""
    for strategy in (ShardingStrategy.NO_SHARD, ShardingStrategy.FULL_SHARD):
        layers = nn.Sequential(nn.RMSNorm(HIDDEN, eps=1e-5), nn.RMSNorm(HIDDEN, eps=1e-5))
        model = FullyShardedDataParallel(
            layers.to(device()),
            sharding_strategy=strategy,
            use_orig_params=True,
            device_id=device(),
        )
        result = convert(model)
        assert not result.converted, result
        assert len(result.left) == 2, result
        for reason in result.left.values():
            assert "has a sharded weight; convert the model before" in reason, reason


# --- Context parallelism --------------------------------------------------------------------------


def own_rows(mesh: DeviceMesh, x: Tensor) -> tuple[Tensor, Tensor]:
    """x of this rank's positions, and these, in the order that balances causal attention."""
    x, position = x.clone(), torch.arange(SEQUENCE, device=device()).repeat(BATCH, 1)
    with context_parallel(mesh, buffers=[x, position], buffer_seq_dims=[1, 1]):
        assert x.shape[1] == SEQUENCE // dist.get_world_size()
        return x.clone(), position[0].clone()


def attention_of(position: Tensor, mesh: DeviceMesh) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Causal attention of a rank's positions to keys and values of all ranks."""
    every = [torch.empty_like(position) for _ in range(mesh.size())]
    dist.all_gather(every, position)
    mask = position[:, None] >= torch.cat(every)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = (all_gather_tensor_autograd(t.contiguous(), 2, mesh) for t in (k, v))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    return attend


def run_context_parallel(
    mesh: DeviceMesh, x: Tensor, compiled: bool, recompute: bool
) -> tuple[Layer, list[list[Tensor]], Tensor]:
    torch.manual_seed(0)
    layer = Layer(torch.bfloat16)
    x, position = own_rows(mesh, x)
    layer.attend = attention_of(position, mesh)
    if compiled:
        layer.compile(backend=BACKEND)
    shapes = [(*x.shape[:2], HEADS, HEAD) if n == "q_norm" else x.shape for n in NORMS]
    probes = [zeros(shape) for shape in shapes for _ in range(2)]
    return layer, run(layer, x, probes, recompute), position


def check_context_parallel() -> None:
    """Each rank has some of the sequence's rows, and attends to all that come before them."""
    mesh = mesh_of(dist.get_world_size(), names=("cp",))
    torch.manual_seed(0)
    whole_layer = Layer(torch.bfloat16)
    x = torch.randn(BATCH, SEQUENCE, HIDDEN, device=device()).bfloat16()
    probes = [zeros(()) for _ in range(2 * len(NORMS))]
    _, expected = whole_layer(x, *probes)
    for compiled, recompute in RUNS:
        layer, norms, position = run_context_parallel(mesh, x, compiled, recompute)
        again = run_context_parallel(mesh, x, compiled, recompute)[0]
        for i, (name, tensors) in enumerate(zip(NORMS, norms, strict=True)):
            # The rest of the layer rounds otherwise, but the attention is the same.
            torch.testing.assert_close(tensors[1], expected[2 * i + 1][:, position], **CLOSE)
            weight = getattr(layer, name).weight
            rows = [gathered(tensor) for tensor in tensors]
            whole_grad = assert_norm(name, weight.detach(), rows).grad_weight
            inputs = support.Inputs(rows[0], weight.detach(), rows[3])
            total, repeated = (getattr(each, name).weight.grad.clone() for each in (layer, again))
            for grad in (total, repeated):
                dist.all_reduce(grad)
            assert_within(total, whole_grad, inputs, name)
            assert_bitwise_equal(total, repeated, f"grad_weight of {name}, run again")
        assert_bitwise_equal(norms[0][1], expected[1][:, position], "y of the first norm")


def check_a_mesh_of_the_wrong_size_is_refused() -> None:
    """torch's own errors: of a mesh of more ranks than there are, and of one of two dimensions
    for a plan of one."""
    world = dist.get_world_size()
    sharding_checks.assert_refused(lambda: mesh_of(world + 1), "size")
    layer = Layer(torch.bfloat16)
    mesh = mesh_of(1, world, names=("dp", "tp"))
    sharding_checks.assert_refused(
        lambda: parallelize_module(layer, mesh, dict(SEQUENCE_PLAN)), "device_mesh.ndim: 2"
    )
