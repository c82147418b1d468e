"""What the tests share: dtypes, inputs with weights away from 1, one forward and backward pass."""

from collections.abc import Callable
from typing import NamedTuple

import automodel_rms_norm as arn
import torch
from torch import Tensor
from torch._dynamo.eval_frame import _debug_get_cache_entry_list

X_DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64]
LOW_WEIGHT_DTYPES = [torch.bfloat16, torch.float16, torch.float32]
# Every pair of dtypes that the op takes; None stands for no weight.
DTYPE_PAIRS = [
    (x, weight)
    for x in X_DTYPES
    for weight in [*LOW_WEIGHT_DTYPES, torch.float64, None]
    if weight != torch.float64 or x == torch.float64
]


def why_no_cuda() -> str:
    """Why GPU tests cannot run here; empty where they can."""
    if not torch.cuda.is_available():
        return "no CUDA GPU on this machine"
    if not arn.build_info()["cuda"]:
        return "automodel-rms-norm was built without CUDA kernels"
    return ""


def why_not_gpus(count: int) -> str:
    """Why tests on `count` GPUs cannot run here; empty where they can."""
    if reason := why_no_cuda():
        return reason
    found = torch.cuda.device_count()
    return "" if found >= count else f"needs {count} GPUs, found {found}"


class Inputs(NamedTuple):
    x: Tensor
    weight: Tensor | None
    grad_y: Tensor


def make_inputs(
    *shape: int,
    dtype: torch.dtype = torch.bfloat16,
    weight_dtype: torch.dtype | None = torch.bfloat16,
    zero_centered_gamma: bool = False,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> Inputs:
    """x and grad_y of `shape`, and gains that are random and away from 1, drawn on the CPU."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator, dtype=torch.float64)

    x, grad_y = normal(*shape), normal(*shape)
    weight = None
    if weight_dtype is not None:
        centre = 0.0 if zero_centered_gamma else 1.0
        weight = (centre + 0.4 * normal(shape[-1])).to(weight_dtype).to(device)
    return Inputs(x.to(dtype).to(device), weight, grad_y.to(dtype).to(device))


class Outputs(NamedTuple):
    y: Tensor
    grad_x: Tensor | None
    grad_weight: Tensor | None


def forward_backward(
    function: Callable[..., Tensor], inputs: Inputs, eps: float = 1e-5, *args: object
) -> Outputs:
    """y, grad_x and grad_weight of `function(x, weight, eps, *args)`; weight as an nn.Parameter."""
    x = inputs.x.detach().requires_grad_()
    weight = None if inputs.weight is None else torch.nn.Parameter(inputs.weight.detach())
    y = function(x, weight, eps, *args)
    leaves = [x] if weight is None else [x, weight]
    grads = torch.autograd.grad(y, leaves, inputs.grad_y)
    return Outputs(y.detach(), grads[0], grads[1] if weight is not None else None)


def forward_backward_plain_weight(
    function: Callable[..., Tensor], inputs: Inputs, eps: float = 1e-5
) -> Outputs:
    """The same with the weight a plain tensor: compiled, its size is then dynamic."""
    x, weight = inputs.x.clone().requires_grad_(), inputs.weight.clone().requires_grad_()
    y = function(x, weight, eps)
    return Outputs(y.detach(), *torch.autograd.grad(y, (x, weight), inputs.grad_y))


WEIGHT_KINDS = {"parameter": forward_backward, "plain": forward_backward_plain_weight}


def compiles(function: Callable) -> int:
    """How many compiled forms Dynamo holds of a function.

    Not how often it called the backend: with dynamic=True Dynamo first tries eps as a tensor, and
    starts the same compilation again with eps as a constant when it meets the op.
    """
    return len(_debug_get_cache_entry_list(function.__code__))


def reference_outputs(
    inputs: Inputs, eps: float = 1e-5, zero_centered_gamma: bool = False
) -> Outputs:
    """The same by the contract's literal reading, on the CPU."""
    y, rstd = arn.reference.rms_norm_forward(inputs.x, inputs.weight, eps, zero_centered_gamma)
    grads = arn.reference.rms_norm_backward(
        inputs.grad_y, inputs.x, inputs.weight, rstd, zero_centered_gamma
    )
    return Outputs(y, *grads)


class Results(NamedTuple):
    y: Tensor
    rstd: Tensor
    grad_x: Tensor
    grad_weight: Tensor | None


def run_op(inputs: Inputs, eps: float = 1e-5, zero_centered_gamma: bool = False) -> Results:
    """What the two inner ops return."""
    x, weight, grad_y = inputs
    ops = torch.ops.automodel
    y, rstd = ops.rms_norm_forward(x, weight, eps, zero_centered_gamma)
    wanted = [True, weight is not None]
    grad_x, grad_weight = ops.rms_norm_backward(
        grad_y, x, weight, rstd, zero_centered_gamma, wanted
    )
    return Results(y, rstd, grad_x, None if weight is None else grad_weight)


def run_reference(inputs: Inputs, eps: float = 1e-5, zero_centered_gamma: bool = False) -> Results:
    """The same by the contract's literal reading, on the CPU."""
    x, weight, grad_y = inputs
    y, rstd = arn.reference.rms_norm_forward(x, weight, eps, zero_centered_gamma)
    grads = arn.reference.rms_norm_backward(grad_y, x, weight, rstd, zero_centered_gamma)
    return Results(y, rstd, *grads)


def assert_same(actual: NamedTuple, expected: NamedTuple, *names: str) -> None:
    """Every output, or those called `names`, has the same bits; both are Results, or Outputs."""
    for name in names or expected._fields:
        ours, theirs = getattr(actual, name), getattr(expected, name)
        if ours is None or theirs is None:
            assert ours is theirs, f"{name}: {ours} against {theirs}"
        else:
            arn.testing.assert_bitwise_equal(ours, theirs, name)


def allocated_bytes(function: Callable[[], object], device: torch.device) -> int:
    """The bytes that `function` takes from torch's allocator of `device`, freed again or not."""
    if device.type == "cuda":
        before = torch.cuda.memory_stats(device)["allocated_bytes.all.allocated"]
        function()
        return torch.cuda.memory_stats(device)["allocated_bytes.all.allocated"] - before
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(
        activities=activities, profile_memory=True, acc_events=True
    ) as profile:
        function()
    events = profile.profiler.kineto_results.events()
    return sum(max(event.nbytes(), 0) for event in events if event.name() == "[memory]")


def assert_raises(
    error: type[Exception],
    message: str,
    call: Callable[[], object],
    device: torch.device | str = "cpu",
) -> None:
    """`call` raises exactly `error`, its message begins with `message`, and it allocates nothing
    on `device`."""
    raised: list[Exception] = []

    def attempt() -> None:
        try:
            call()
        except Exception as exception:
            raised.append(exception)

    taken = allocated_bytes(attempt, torch.device(device))
    assert raised, f"nothing was raised; expected {message}"
    assert type(raised[0]) is error
    assert str(raised[0]).startswith(message)
    assert taken == 0, f"{taken} bytes were allocated before the error"
