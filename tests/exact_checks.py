"""Checks of exact_grad_weight on every rank of a process group."""

import automodel_rms_norm as arn
import support
import torch
import torch.distributed as dist
from automodel_rms_norm.distributed import exact_grad_weight
from automodel_rms_norm.testing import assert_bitwise_equal
from ranks import device, mesh_of
from sharding_checks import EPS, assert_refused
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

ROWS, HIDDEN = 384, 136  # 3 * 128: neither rows nor micro-batches are a power of two


def inputs() -> support.Inputs:
    return support.make_inputs(ROWS, HIDDEN, weight_dtype=torch.float32, device=device())


def check_no_split_changes_a_bit() -> None:
    whole = inputs()
    expected = support.run_op(whole).grad_weight
    own = slice(*(ROWS // dist.get_world_size() * (dist.get_rank() + i) for i in (0, 1)))
    x, grad_y = whole.x[own], whole.grad_y[own]
    for rows in (8, 16, 32):
        weight = nn.Parameter(whole.weight.clone())
        with exact_grad_weight([weight], rows, dist.group.WORLD):
            for part, grad in zip(x.split(rows), grad_y.split(rows), strict=True):
                arn.rms_norm(part, weight, EPS).backward(grad)
        assert_bitwise_equal(weight.grad, expected, f"grad_weight by {rows} rows")


def check_dtensors() -> None:
    whole = inputs()
    mesh = mesh_of(dist.get_world_size())
    rows = 256 // dist.get_world_size()
    x, grad_y = (distribute_tensor(t[:256], mesh, [Shard(0)]) for t in (whole.x, whole.grad_y))
    weight = nn.Parameter(distribute_tensor(whole.weight, mesh, [Replicate()]))
    with exact_grad_weight([weight], rows, mesh.get_group()):
        arn.rms_norm(x, weight, EPS).backward(grad_y)
    part = whole._replace(x=whole.x[:256], grad_y=whole.grad_y[:256])
    assert list(weight.grad.placements) == [Replicate()]
    assert_bitwise_equal(weight.grad.to_local(), support.run_op(part).grad_weight, "grad_weight")


def check_fully_shard_that_ignores_the_norm() -> None:
    whole = inputs()
    model = nn.Sequential(nn.Linear(HIDDEN, HIDDEN), arn.RMSNorm(HIDDEN, dtype=torch.float32))
    model.to(device())
    model[1].weight.data = whole.weight.clone()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    fully_shard(model, mp_policy=policy, ignored_params={model[1].weight})
    rows = 64
    generator = torch.Generator().manual_seed(dist.get_rank())
    x, grad_y = (
        torch.randn(rows, HIDDEN, generator=generator).bfloat16().to(device()) for _ in range(2)
    )
    given = []
    model[1].register_forward_pre_hook(lambda _, arguments: given.append(arguments[0].detach()))
    with exact_grad_weight([model[1].weight], rows, dist.group.WORLD):
        model(x).backward(grad_y)
    parts = []
    for tensor in (given[0], grad_y):
        every = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
        dist.all_gather(every, tensor)
        parts.append(torch.cat(every))
    assert parts[0].dtype == torch.bfloat16
    expected = support.run_op(support.Inputs(parts[0], whole.weight, parts[1])).grad_weight
    assert_bitwise_equal(model[1].weight.grad, expected, "grad_weight")


def check_sharded_weights_and_unequal_ranks_are_refused() -> None:
    whole = inputs()
    mesh = mesh_of(dist.get_world_size())
    sharded = nn.Parameter(distribute_tensor(whole.weight, mesh, [Shard(0)]))
    assert_refused(
        lambda: exact_grad_weight([sharded], 8).__enter__(), "must be replicated", "ignored_params"
    )
    weight = nn.Parameter(whole.weight)

    def unequal() -> None:
        with exact_grad_weight([weight], 8, dist.group.WORLD):
            for _ in range(1 + dist.get_rank()):
                arn.rms_norm(whole.x[:8], weight, EPS).backward(whole.grad_y[:8])

    first = dist.new_group([0])
    if dist.get_rank() > 0:
        message = "group must have this rank in it"
        assert_refused(lambda: exact_grad_weight([weight], 8, first).__enter__(), message)
    assert_refused(unequal, "same number of backward passes", "1 on rank 0", "2 on rank 1")
