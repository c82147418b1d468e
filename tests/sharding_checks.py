"""Checks that run on every rank of a process group (ranks.py): y and grad_x of each rank have the
bits of the unsharded run's rows, grad_weight is within the derived bound of its, and nothing is
sent to get there.
"""

import contextlib
import itertools
from collections.abc import Callable, Iterator

import added
import automodel_rms_norm as arn
import support
import torch
import torch.distributed as dist
from automodel_rms_norm.bounds import bounds, sharded_grad_weight
from automodel_rms_norm.formula import exact_rms_norm
from automodel_rms_norm.testing import assert_bitwise_equal
from ranks import device, mesh_of
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
)
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.placement_types import _StridedShard

OPS = torch.ops.automodel
EPS = 1e-5
SHAPE = (4, 12, 96)
LAYOUTS = [Shard(0), Shard(1), Replicate()]


def inputs_of(seed: int = 0, **options: object) -> support.Inputs:
    return support.make_inputs(*SHAPE, seed=seed, device=device(), **options)


@contextlib.contextmanager
def nothing_is_sent() -> Iterator[None]:
    with CommDebugMode() as communication:
        yield
    assert communication.get_total_counts() == 0, communication.get_comm_counts()


def assert_shard(actual: DTensor, expected: Tensor, layout: list[Placement], name: str) -> None:
    """Has that layout, and this rank's part the bits of its part of `expected`."""
    assert list(actual.placements) == layout, f"{name}: {actual.placements}, expected {layout}"
    own = distribute_tensor(expected, actual.device_mesh, layout).to_local()
    assert_bitwise_equal(actual.to_local(), own, name)


def sharded_bound(inputs: support.Inputs, parts: int) -> Tensor:
    """How far apart grad_weight of all rows and its sum over `parts` ranks may be."""
    x, weight, grad_y = inputs
    exact = exact_rms_norm(x, weight, EPS, False, grad_y)
    options = (exact, grad_y, x.dtype, weight.dtype, False)
    return bounds(*options).grad_weight + sharded_grad_weight(*options, parts)


def assert_grad_weight(
    actual: DTensor, expected: Tensor, inputs: support.Inputs, layout: list[Placement]
) -> None:
    """Partial where rows are sharded, and its sum within the bound of the unsharded one."""
    wanted = [Partial() if placement.is_shard() else Replicate() for placement in layout]
    assert list(actual.placements) == wanted, f"grad_weight: {actual.placements}"
    difference = (actual.full_tensor().double() - expected.double()).abs().cpu()
    assert (difference <= sharded_bound(inputs, dist.get_world_size())).all()


# --- The ops --------------------------------------------------------------------------------------


def run_sharded(
    inputs: support.Inputs,
    mesh: DeviceMesh,
    layout: list[Placement],
    norm: Callable[..., Tensor] = arn.rms_norm,
) -> support.Outputs:
    """As support.forward_backward, with DTensors."""
    whole = [Replicate()] * mesh.ndim
    x, grad_y = (distribute_tensor(t, mesh, layout) for t in (inputs.x, inputs.grad_y))
    weight = None if inputs.weight is None else distribute_tensor(inputs.weight, mesh, whole)
    with nothing_is_sent():
        return support.forward_backward(norm, support.Inputs(x, weight, grad_y), EPS)


def assert_as_unsharded(
    inputs: support.Inputs,
    mesh: DeviceMesh,
    layout: list[Placement],
    norm: Callable[..., Tensor] = arn.rms_norm,
) -> None:
    expected = support.forward_backward(arn.rms_norm, inputs, EPS)
    actual, again = (run_sharded(inputs, mesh, layout, norm) for _ in range(2))
    assert_shard(actual.y, expected.y, layout, "y")
    assert_shard(actual.grad_x, expected.grad_x, layout, "grad_x")
    if inputs.weight is not None:
        assert_grad_weight(actual.grad_weight, expected.grad_weight, inputs, layout)
        assert_bitwise_equal(
            actual.grad_weight.full_tensor(), again.grad_weight.full_tensor(), "grad_weight"
        )


def check_rows_keep_their_bits() -> None:
    mesh = mesh_of(dist.get_world_size())
    for layout in LAYOUTS:
        for dtype in (torch.bfloat16, torch.float32):
            for weight_dtype in (torch.bfloat16, torch.float32, None):
                inputs = inputs_of(dtype=dtype, weight_dtype=weight_dtype)
                assert_as_unsharded(inputs, mesh, [layout])


def check_rows_keep_their_bits_on_a_mesh_of_two_dimensions() -> None:
    mesh = mesh_of(dist.get_world_size() // 2, 2, names=("dp", "tp"))
    for layout in itertools.product(LAYOUTS, repeat=2):
        if layout[0] != layout[1] or layout[0].is_replicate():
            assert_as_unsharded(inputs_of(), mesh, list(layout))


def check_strided_shards_of_rows() -> None:
    """What torch writes where two dimensions of the mesh cut one of x, the second of them first."""
    mesh = mesh_of(dist.get_world_size() // 2, 2, names=("dp", "tp"))
    layout = [_StridedShard(0, split_factor=2), Shard(0)]
    inputs = support.make_inputs(48, 96, device=device())
    expected = support.forward_backward(arn.rms_norm, inputs, EPS)
    x, grad_y = (distribute_tensor(t, mesh, layout) for t in (inputs.x, inputs.grad_y))
    weight = distribute_tensor(inputs.weight, mesh, [Replicate(), Replicate()])
    with nothing_is_sent():
        actual = support.forward_backward(arn.rms_norm, support.Inputs(x, weight, grad_y), EPS)
    assert_shard(actual.y, expected.y, layout, "y")
    assert_shard(actual.grad_x, expected.grad_x, layout, "grad_x")
    assert_grad_weight(actual.grad_weight, expected.grad_weight, inputs, [Shard(0), Shard(0)])


def check_rows_that_do_not_divide_by_the_ranks() -> None:
    mesh = mesh_of(dist.get_world_size())
    inputs = support.make_inputs(1, 4 * dist.get_world_size() - 1, 96, device=device())
    assert_as_unsharded(inputs, mesh, [Shard(1)])


def check_add_rms_norm_keeps_its_bits() -> None:
    mesh = mesh_of(dist.get_world_size())
    for layout, weighted in itertools.product(LAYOUTS, (True, False)):
        options = {} if weighted else {"weight_dtype": None}
        inputs = added.make_inputs(*SHAPE, device=device(), **options)
        expected = added.forward_backward(arn.add_rms_norm, inputs)
        sharded = added.Inputs(
            *(
                None
                if t is None
                else distribute_tensor(t, mesh, [Replicate() if t.dim() == 1 else layout])
                for t in inputs
            )
        )
        with nothing_is_sent():
            actual = added.forward_backward(arn.add_rms_norm, sharded)
        for name in ("y", "sum", "grad_x", "grad_residual"):
            assert_shard(getattr(actual, name), getattr(expected, name), [layout], name)
        if weighted:
            total = support.Inputs(expected.sum, inputs.weight, inputs.grad_y)
            assert_grad_weight(actual.grad_weight, expected.grad_weight, total, [layout])


def check_contexts_without_gradients() -> None:
    """In inference mode DTensor sees the outer ops."""
    mesh = mesh_of(dist.get_world_size())
    x, residual, weight, _, _ = added.make_inputs(*SHAPE, device=device())
    expected, total = arn.add_rms_norm(x, residual, weight, EPS)
    for layout, context in itertools.product(LAYOUTS, (torch.no_grad, torch.inference_mode)):
        gain = distribute_tensor(weight, mesh, [Replicate()])
        parts = [distribute_tensor(t, mesh, [layout]) for t in (x, residual, total)]
        with context(), nothing_is_sent():
            y, added_up = arn.add_rms_norm(parts[0], parts[1], gain, EPS)
            alone = arn.rms_norm(parts[2], gain, EPS)
        with torch.no_grad():
            assert_shard(y, expected, [layout], "y")
            assert_shard(alone, expected, [layout], "y")
            assert_shard(added_up, total, [layout], "sum")


def check_frozen_arguments_in_any_order() -> None:
    """DTensor caches what a rule said; a frozen argument must not be taken for one that is not."""
    mesh = mesh_of(dist.get_world_size())
    inputs = inputs_of(weight_dtype=torch.float32)
    expected = support.forward_backward(arn.rms_norm, inputs, EPS)
    for x_grad, weight_grad in ((False, True), (True, False), (True, True), (False, True)):
        x = distribute_tensor(inputs.x, mesh, [Shard(1)]).requires_grad_(x_grad)
        weight = distribute_tensor(inputs.weight, mesh, [Replicate()]).requires_grad_(weight_grad)
        arn.rms_norm(x, weight, EPS).backward(distribute_tensor(inputs.grad_y, mesh, [Shard(1)]))
        if x_grad:
            assert_shard(x.grad, expected.grad_x, [Shard(1)], "grad_x")
        if weight_grad:
            assert_grad_weight(weight.grad, expected.grad_weight, inputs, [Shard(1)])


def check_a_gradient_of_another_layout_is_moved_to_x() -> None:
    mesh = mesh_of(dist.get_world_size())
    inputs = inputs_of()
    expected = support.forward_backward(arn.rms_norm, inputs, EPS)
    for layout in (Replicate(), Shard(0), Shard(2)):
        x = distribute_tensor(inputs.x, mesh, [Shard(1)]).requires_grad_()
        weight = distribute_tensor(inputs.weight, mesh, [Replicate()])
        arn.rms_norm(x, weight, EPS).backward(distribute_tensor(inputs.grad_y, mesh, [layout]))
        assert_shard(x.grad, expected.grad_x, [Shard(1)], "grad_x")


def check_the_ops_of_functions_that_call_them() -> None:
    """rms_norm_forward and rms_norm_backward called by hand, rstd sharded like x."""
    mesh = mesh_of(dist.get_world_size())
    inputs = inputs_of()
    expected = support.run_op(inputs)
    x, grad_y = (distribute_tensor(t, mesh, [Shard(1)]) for t in (inputs.x, inputs.grad_y))
    weight = distribute_tensor(inputs.weight, mesh, [Replicate()])
    actual = support.run_op(support.Inputs(x, weight, grad_y))
    for name in ("y", "rstd", "grad_x"):
        assert_shard(getattr(actual, name), getattr(expected, name), [Shard(1)], name)
    only_weight = OPS.rms_norm_backward(grad_y, x, weight, actual.rstd, False, [False, True])
    assert only_weight[0].shape == (0,)
    assert_grad_weight(only_weight[1], expected.grad_weight, inputs, [Shard(1)])


# --- What cannot be sharded -----------------------------------------------------------------------


def assert_refused(call: Callable[[], object], *parts: str) -> None:
    try:
        call()
    except Exception as error:
        message = str(error)
    else:
        raise AssertionError(f"nothing was raised; expected {parts}")
    assert all(part in message for part in parts), message


def check_impossible_placements_are_refused_by_name() -> None:
    mesh = mesh_of(dist.get_world_size(), names=("tp",))
    x, residual, weight, _, _ = added.make_inputs(*SHAPE, device=device())
    whole = distribute_tensor(weight, mesh, [Replicate()])
    rows = distribute_tensor(x, mesh, [Shard(1)])
    columns = distribute_tensor(x, mesh, [Shard(2)])
    partial = DTensor.from_local(x, mesh, [Partial()])
    cut = distribute_tensor(weight, mesh, [Shard(0)])
    with torch.no_grad():
        for bad, shown in ((columns, "S(2)"), (partial, "P(sum)")):
            where = (shown, "mesh dimension 'tp'", "redistribute")
            assert_refused(lambda x=bad: arn.rms_norm(x, whole, EPS), "rms_norm: x", *where)
            assert_refused(
                lambda x=bad: arn.add_rms_norm(x, x, whole, EPS), "add_rms_norm: x", *where
            )
        assert_refused(
            lambda: arn.rms_norm(rows, cut, EPS), "rms_norm: weight", "must be replicated", "'tp'"
        )
        other = distribute_tensor(residual, mesh, [Replicate()])
        assert_refused(
            lambda: arn.add_rms_norm(rows, other, whole, EPS), "add_rms_norm: residual", "x"
        )
        assert_refused(lambda: arn.rms_norm(rows, weight, EPS), "automodel.rms_norm", "mixed")
    columns.requires_grad_()
    assert_refused(lambda: arn.rms_norm(columns, whole, EPS), "rms_norm_forward: x", "'tp'")


# --- Compiled -------------------------------------------------------------------------------------


def check_compiled_rows_keep_their_bits() -> None:
    mesh = mesh_of(dist.get_world_size())

    def twice(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return arn.rms_norm(arn.rms_norm(x, weight, eps) * 2, weight, eps)

    def checkpointed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return torch.utils.checkpoint.checkpoint(twice, x, weight, eps, use_reentrant=False)

    inputs = inputs_of()
    expected = support.forward_backward(twice, inputs, EPS)
    for function in (twice, checkpointed, torch.compile(twice), torch.compile(checkpointed)):
        actual = run_sharded(inputs, mesh, [Shard(1)], function)
        assert_shard(actual.y, expected.y, [Shard(1)], "y")
        assert_shard(actual.grad_x, expected.grad_x, [Shard(1)], "grad_x")
