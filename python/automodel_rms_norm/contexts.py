"""Every way in which a norm is run whose bits properties P1 and P2 of the contract compare.

P1 is about autograd contexts, P2 about run modes. A context takes a callable ``(x, weight, eps)``
that returns y, and inputs; it returns y, grad_x and grad_weight as far as it has them. Contexts
start from fresh leaves and change nothing of what they are given.

AOTInductor packages are not among them, for building one needs a C++ compiler and takes half a
minute: tests/test_export.py compares theirs, run from Python and from C++.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from automodel_rms_norm.bits import Difference, compare

__all__ = [
    "AUTOGRAD_CONTEXTS",
    "COMPILE_MODES",
    "EAGER",
    "NO_GRAD",
    "Context",
    "Function",
    "Inputs",
    "Outputs",
    "compare_outputs",
    "compile_contexts",
    "eager",
    "run_mode_contexts",
]

Function = Callable[[Tensor, "Tensor | None", float], Tensor]

COMPILE_MODES = ("static", "dynamic", "reduce-overhead", "max-autotune")


class Inputs(NamedTuple):
    """x (..., hidden), weight (hidden,) or None, grad_y of x's shape and dtype, eps."""

    x: Tensor
    weight: Tensor | None
    grad_y: Tensor
    eps: float

    def to(self, device: torch.device | str) -> Inputs:
        """The inputs with their tensors on `device`."""
        weight = None if self.weight is None else self.weight.to(device)
        return Inputs(self.x.to(device), weight, self.grad_y.to(device), self.eps)


class Outputs(NamedTuple):
    """What one context gave; None for what it does not have."""

    y: Tensor
    grad_x: Tensor | None = None
    grad_weight: Tensor | None = None


@dataclass(frozen=True)
class Context:
    """A way to run a function, and the one whose bits it must give.

    ``why_not(inputs)`` is the reason where it cannot be run with these inputs, and "" where it can.
    """

    name: str
    run: Callable[[Function, Inputs], Outputs]
    against: Context | None = None
    why_not: Callable[[Inputs], str] = lambda inputs: ""

    def difference(self, function: Function, inputs: Inputs) -> Difference | None:
        """Runs the function in this context and in the one it is compared with."""
        assert self.against is not None
        expected = self.against.run(function, inputs)
        label = f"{self.name} against {self.against.name}"
        return compare_outputs(self.run(function, inputs), expected, label)


def compare_outputs(actual: Outputs, expected: Outputs, label: str) -> Difference | None:
    """The first difference among the outputs that both have, named after the output and `label`."""
    for name, left, right in zip(Outputs._fields, actual, expected, strict=True):
        if left is None or right is None:
            continue
        if difference := compare(left, right, f"{name}, {label}"):
            return difference
    return None


# --- Leaves and gradients -------------------------------------------------------------------------


def _leaves(inputs: Inputs, x_grad: bool = True, weight_grad: bool = True) -> Inputs:
    """The inputs with a fresh x and, as a model has it, the weight an nn.Parameter."""
    weight = inputs.weight
    if weight is not None:
        weight = nn.Parameter(weight.detach(), requires_grad=weight_grad)
    return inputs._replace(x=inputs.x.detach().requires_grad_(x_grad), weight=weight)


def _differentiate(y: Tensor, x: Tensor, weight: Tensor | None, grad_y: Tensor) -> Outputs:
    """y and the gradients of those of x and weight that require one, all detached."""
    wanted = [leaf for leaf in (x, weight) if leaf is not None and leaf.requires_grad]
    grads = iter(torch.autograd.grad(y, wanted, grad_y))
    grad_x = next(grads) if x.requires_grad else None
    grad_weight = next(grads) if weight is not None and weight.requires_grad else None
    return Outputs(y.detach(), grad_x, grad_weight)


def _forward_backward(function: Function, leaves: Inputs) -> Outputs:
    y = function(leaves.x, leaves.weight, leaves.eps)
    return _differentiate(y, leaves.x, leaves.weight, leaves.grad_y)


def eager(function: Function, inputs: Inputs) -> Outputs:
    """Grad mode without a compiler, weight a Parameter."""
    return _forward_backward(function, _leaves(inputs))


EAGER = Context("grad", eager)


# --- P1: autograd contexts ------------------------------------------------------------------------


def _no_grad(function: Function, inputs: Inputs) -> Outputs:
    leaves = _leaves(inputs)
    with torch.no_grad():
        return Outputs(function(leaves.x, leaves.weight, leaves.eps))


def _inference(function: Function, inputs: Inputs) -> Outputs:
    leaves = _leaves(inputs)
    with torch.inference_mode():
        y = function(leaves.x, leaves.weight, leaves.eps)
    return Outputs(y.clone())  # an ordinary tensor again


def _x_frozen(function: Function, inputs: Inputs) -> Outputs:
    return _forward_backward(function, _leaves(inputs, x_grad=False))


def _weight_frozen(function: Function, inputs: Inputs) -> Outputs:
    return _forward_backward(function, _leaves(inputs, weight_grad=False))


def _plain_weight(function: Function, inputs: Inputs) -> Outputs:
    leaves = _leaves(inputs)
    assert inputs.weight is not None
    weight = inputs.weight.detach().requires_grad_()
    return _forward_backward(function, leaves._replace(weight=weight))


def _checkpoint(use_reentrant: bool) -> Callable[[Function, Inputs], Outputs]:
    def run(function: Function, inputs: Inputs) -> Outputs:
        leaves = _leaves(inputs)
        y = checkpoint(function, leaves.x, leaves.weight, leaves.eps, use_reentrant=use_reentrant)
        grad_y = leaves.grad_y
        y.backward(grad_y)  # reentrant checkpointing does not allow torch.autograd.grad
        weight_grad = None if leaves.weight is None else leaves.weight.grad
        return Outputs(y.detach(), leaves.x.grad, weight_grad)

    return run


def _needs_weight(inputs: Inputs) -> str:
    return "there is no weight" if inputs.weight is None else ""


NO_GRAD = Context("no_grad", _no_grad, EAGER)
_INFERENCE = Context("inference_mode", _inference, EAGER)
_X_FROZEN = Context("x frozen", _x_frozen, EAGER, _needs_weight)
_WEIGHT_FROZEN = Context("weight frozen", _weight_frozen, EAGER, _needs_weight)

AUTOGRAD_CONTEXTS = (
    NO_GRAD,
    _INFERENCE,
    _X_FROZEN,
    _WEIGHT_FROZEN,
    Context("weight a plain tensor", _plain_weight, EAGER, _needs_weight),
    Context("checkpoint", _checkpoint(use_reentrant=False), EAGER),
    Context("checkpoint, reentrant", _checkpoint(use_reentrant=True), EAGER),
)


# --- P2: run modes --------------------------------------------------------------------------------


def _compiled(
    mode: str, eagerly: Context, fullgraph: bool
) -> Callable[[Function, Inputs], Outputs]:
    options: dict[str, Any] = {"static": {"dynamic": False}, "dynamic": {"dynamic": True}}.get(
        mode, {"mode": mode}
    )

    def run(function: Function, inputs: Inputs) -> Outputs:
        # A recompile limit that earlier cases hit would silently run this one without the compiler.
        torch.compiler.reset()
        compiled = torch.compile(function, fullgraph=fullgraph, **options)
        # With CUDA graphs the first call warms up, the second records, the third replays.
        calls = 3 if inputs.x.is_cuda and "mode" in options else 1
        for _ in range(calls):
            torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]
            outputs = eagerly.run(compiled, inputs)
        # A later replay would write into the same memory.
        y, grad_x, grad_weight = (None if part is None else part.clone() for part in outputs)
        assert y is not None
        return Outputs(y, grad_x, grad_weight)

    return run


def compile_contexts(
    modes: Sequence[str] = COMPILE_MODES, fullgraph: bool = False
) -> list[Context]:
    """torch.compile in each of `modes`, in grad mode and under no_grad: two graphs each.

    In the first of `modes` under inference_mode and with a frozen argument as well.
    """
    if unknown := [mode for mode in modes if mode not in COMPILE_MODES]:
        raise ValueError(f"compile mode {unknown[0]!r} is not one of {', '.join(COMPILE_MODES)}")
    once = (_INFERENCE, _X_FROZEN, _WEIGHT_FROZEN)
    return [
        Context(
            f"compiled {mode}, {eagerly.name}",
            _compiled(mode, eagerly, fullgraph),
            eagerly,
            eagerly.why_not,
        )
        for mode in modes
        for eagerly in (EAGER, NO_GRAD, *(once if mode == modes[0] else ()))
    ]


class _Exportable(nn.Module):
    def __init__(self, function: Function, weight: Tensor | None, eps: float) -> None:
        super().__init__()
        self.function = function
        self.weight = None if weight is None else nn.Parameter(weight.detach())
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, self.weight, self.eps)


def _export(function: Function, inputs: Inputs) -> Outputs:
    module = _Exportable(function, inputs.weight, inputs.eps)
    batch = {0: torch.export.Dim.AUTO} if inputs.x.dim() > 1 else {}
    program = torch.export.export(module, (inputs.x.detach(),), dynamic_shapes={"x": batch})
    exported = program.module()
    weight = exported.weight if inputs.weight is not None else None
    assert weight is None or isinstance(weight, Tensor)
    x = inputs.x.detach().requires_grad_()
    return _differentiate(exported(x), x, weight, inputs.grad_y)


def _needs_cuda(inputs: Inputs) -> str:
    return "" if inputs.x.is_cuda else "CUDA graphs need a tensor on a GPU"


def _cuda_graph(function: Function, inputs: Inputs) -> Outputs:
    """Captured while x and grad_y hold other values: only a replay can give the right results."""
    leaves = _leaves(inputs._replace(x=inputs.x.clone()))._replace(grad_y=inputs.grad_y.clone())
    with torch.no_grad():
        leaves.x.fill_(1)
        leaves.grad_y.fill_(1)
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        _forward_backward(function, leaves)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = _forward_backward(function, leaves)
    with torch.no_grad():
        leaves.x.copy_(inputs.x)
        leaves.grad_y.copy_(inputs.grad_y)
    graph.replay()
    torch.cuda.synchronize()
    return outputs


def run_mode_contexts(
    compile_modes: Sequence[str] = COMPILE_MODES, fullgraph: bool = False
) -> list[Context]:
    """The contexts of P2: compiled in `compile_modes`, exported, replayed as a CUDA graph."""
    return [
        *compile_contexts(compile_modes, fullgraph),
        Context("export", _export, EAGER),
        Context("CUDA graph", _cuda_graph, EAGER, _needs_cuda),
    ]
