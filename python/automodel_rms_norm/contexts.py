"""One call of a differentiable function, and every autograd context that property P1 compares.

A context runs a function on inputs and returns its results by name: its outputs, and ``grad_NAME``
for each argument that required a gradient. Contexts start from fresh leaves and change nothing of
what they are given. Those of property P2 are in run_modes.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from automodel_rms_norm.bits import Difference, compare

__all__ = [
    "EAGER",
    "INFERENCE",
    "NO_GRAD",
    "OUTPUTS",
    "Context",
    "Function",
    "Inputs",
    "Results",
    "autograd_contexts",
    "differentiate",
    "eager",
    "first_difference",
    "forward_backward",
    "frozen_contexts",
    "leaves",
    "named",
    "norm_inputs",
]

Function = Callable[..., Any]  # of the arguments in their order, to a tensor or a tuple of tensors
Results = dict[str, Tensor]


@dataclass(frozen=True, eq=False)
class Inputs:
    """The arguments of one call, and what comes back to its outputs.

    Attributes:
        arguments: tensors, None and scalars by name, in the function's order.
        grads: of each output, in its order, the gradient; None for one that has none.
        parameters: the names of the arguments that are nn.Parameters in a model.
        constants: the names of the floating-point arguments that get no gradient.
        rows: of each argument and output that has rows which do not depend on each other, their
            dimension. Arguments and outputs have different names.
    """

    arguments: Mapping[str, Any]
    grads: Mapping[str, Tensor | None]
    parameters: frozenset[str] = frozenset()
    constants: frozenset[str] = frozenset()
    rows: Mapping[str, int] = field(default_factory=dict)

    @property
    def tensors(self) -> dict[str, Tensor]:
        return {k: v for k, v in self.arguments.items() if isinstance(v, Tensor)}

    @property
    def differentiable(self) -> list[str]:
        """The names of the arguments that get a gradient."""
        return [
            name
            for name, tensor in self.tensors.items()
            if tensor.is_floating_point() and name not in self.constants
        ]

    @property
    def device(self) -> torch.device:
        return next(iter(self.tensors.values())).device

    def map(self, change: Callable[[str, Tensor], Tensor]) -> Inputs:
        """The inputs with every tensor, those of `grads` under their output's name, changed."""

        def changed(values: Mapping[str, Any]) -> dict[str, Any]:
            return {k: change(k, v) if isinstance(v, Tensor) else v for k, v in values.items()}

        return replace(self, arguments=changed(self.arguments), grads=changed(self.grads))

    def to(self, device: torch.device | str) -> Inputs:
        """The inputs with their tensors on `device`."""
        return self.map(lambda name, tensor: tensor.to(device))

    def with_arguments(self, **changes: Any) -> Inputs:
        return replace(self, arguments={**self.arguments, **changes})


def norm_inputs(x: Tensor, weight: Tensor | None, grad_y: Tensor, eps: float) -> Inputs:
    """Of a norm: x and grad_y (..., hidden), weight (hidden,) or None."""
    arguments = {"x": x, "weight": weight, "eps": eps}
    rows = {"x": 0, "y": 0} if x.dim() > 1 else {}
    return Inputs(arguments, {"y": grad_y}, frozenset({"weight"}), rows=rows)


@dataclass(frozen=True, eq=False)
class Context:
    """A way to run a function, and the one whose bits it must give; None for the first of all."""

    name: str
    run: Callable[[Function, Inputs], Results]
    against: Context | None = None

    @property
    def label(self) -> str:
        return self.name if self.against is None else f"{self.name} against {self.against.name}"

    def difference(self, function: Function, inputs: Inputs) -> Difference | None:
        """Runs the function in this context and in the one it is compared with."""
        assert self.against is not None
        expected = self.against.run(function, inputs)
        return first_difference(self.run(function, inputs), expected, self.label)


def first_difference(actual: Results, expected: Results, label: str) -> Difference | None:
    """The first among the results that both have, named after the result and `label`."""
    for name, tensor in actual.items():
        if name in expected and (difference := compare(tensor, expected[name], f"{name}, {label}")):
            return difference
    return None


# --- Leaves and gradients -------------------------------------------------------------------------


def _copy(tensor: Tensor) -> Tensor:
    """The same values, strides and alignment in other memory, NaN wherever no element is."""
    if 0 in tensor.stride() and tensor.numel() > 1:
        return tensor.detach()  # its elements share memory, which nothing could write to either
    elements = tensor.untyped_storage().nbytes() // tensor.element_size()
    filler = torch.nan if tensor.is_floating_point() else 0
    memory = tensor.detach().new_full((elements,), filler)
    copy = memory.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
    return copy.copy_(tensor.detach())


def leaves(inputs: Inputs, frozen: Iterable[str] = (), plain: Iterable[str] = ()) -> Inputs:
    """The inputs with fresh leaves: as a model has them, its parameters nn.Parameters.

    Args:
        inputs: whose tensors are copied.
        frozen: names of arguments that require no gradient.
        plain: names of parameters that are plain tensors instead.
    """
    wanted = set(inputs.differentiable) - set(frozen)

    def leaf(name: str, tensor: Tensor) -> Tensor:
        copy = _copy(tensor)
        if name in inputs.grads:
            return copy
        if name in inputs.parameters and name not in plain:
            return nn.Parameter(copy, requires_grad=name in wanted)
        return copy.requires_grad_(name in wanted)

    return inputs.map(leaf)


def named(inputs: Inputs, returned: Any) -> Results:
    """What the function returned, by the names of its outputs."""
    outputs = returned if isinstance(returned, tuple | list) else (returned,)
    if len(outputs) != len(inputs.grads):
        raise TypeError(f"{len(outputs)} outputs were returned, expected {', '.join(inputs.grads)}")
    return dict(zip(inputs.grads, outputs, strict=True))


def _roots(outputs: Results, given: Inputs) -> tuple[list[Tensor], list[Tensor]]:
    """Where differentiation begins, and with which gradients.

    An output that depends on frozen arguments alone requires no gradient, and is none of them.
    """
    wanted = {k: grad for k, grad in given.grads.items() if grad is not None}
    roots = {k: outputs[k] for k in wanted if outputs[k].requires_grad}
    return list(roots.values()), [wanted[k] for k in roots]


def differentiate(outputs: Results, given: Inputs) -> Results:
    """The outputs and the gradients of those arguments that require one, all detached.

    Raises:
        RuntimeError: where an argument requires a gradient that no output leads to.
    """
    wanted = {f"grad_{k}": tensor for k, tensor in given.tensors.items() if tensor.requires_grad}
    roots, grads = _roots(outputs, given)
    found = torch.autograd.grad(roots, list(wanted.values()), grads) if wanted else ()
    results = {name: tensor.detach() for name, tensor in outputs.items()}
    return {**results, **dict(zip(wanted, found, strict=True))}


def forward_backward(function: Function, given: Inputs) -> Results:
    """Calls the function on leaves as they are, and differentiates."""
    return differentiate(named(given, function(*given.arguments.values())), given)


def eager(function: Function, inputs: Inputs) -> Results:
    """Grad mode, the function called as it is, parameters nn.Parameters."""
    return forward_backward(function, leaves(inputs))


EAGER = Context("grad", eager)


# --- P1: autograd contexts ------------------------------------------------------------------------


def _outputs(mode: Callable[[], Any]) -> Callable[[Function, Inputs], Results]:
    def run(function: Function, inputs: Inputs) -> Results:
        given = leaves(inputs)
        with mode():
            outputs = named(given, function(*given.arguments.values()))
        # Ordinary ones again.
        return {name: tensor.clone().detach() for name, tensor in outputs.items()}

    return run


def _inputs_kept(function: Function, inputs: Inputs) -> Results:
    given = leaves(inputs)
    with torch.no_grad():
        outputs = named(given, function(*given.arguments.values()))
    for tensor in outputs.values():
        tensor.zero_()  # an output that is an input in disguise takes it along
    return {name: tensor.detach() for name, tensor in given.tensors.items()}


def _inputs_before(function: Function, inputs: Inputs) -> Results:
    return inputs.tensors


def _grads(inputs: Inputs) -> Results:
    return {f"the gradient of {k}": grad for k, grad in inputs.grads.items() if grad is not None}


def _grads_kept(function: Function, inputs: Inputs) -> Results:
    given = leaves(inputs)
    forward_backward(function, given)
    return _grads(given)


def _grads_before(function: Function, inputs: Inputs) -> Results:
    return _grads(inputs)


def _checkpoint(use_reentrant: bool) -> Callable[[Function, Inputs], Results]:
    def run(function: Function, inputs: Inputs) -> Results:
        given = leaves(inputs)
        returned = checkpoint(function, *given.arguments.values(), use_reentrant=use_reentrant)
        outputs = named(given, returned)
        # Reentrant checkpointing does not allow torch.autograd.grad.
        torch.autograd.backward(*_roots(outputs, given))
        grads = {f"grad_{k}": tensor.grad for k, tensor in given.tensors.items()}
        results = {name: tensor.detach() for name, tensor in outputs.items()}
        return {**results, **{k: grad for k, grad in grads.items() if grad is not None}}

    return run


OUTPUTS = Context("grad", _outputs(torch.enable_grad))  # without a backward pass
NO_GRAD = Context("no_grad", _outputs(torch.no_grad), EAGER)
INFERENCE = Context("inference_mode", _outputs(torch.inference_mode), EAGER)
_BEFORE = Context("before the call", _inputs_before)
_GRADS_BEFORE = Context("before the backward pass", _grads_before)


def frozen_contexts(inputs: Inputs) -> Iterator[Context]:
    """Each argument in turn without a gradient, where others have one."""

    def frozen(name: str) -> Context:
        return Context(
            f"{name} frozen",
            lambda function, inputs: forward_backward(function, leaves(inputs, frozen=[name])),
            EAGER,
        )

    if len(inputs.differentiable) > 1:
        yield from map(frozen, inputs.differentiable)


def autograd_contexts(inputs: Inputs) -> list[Context]:
    """The contexts of P1 that these inputs allow."""

    def plain(name: str) -> Context:
        return Context(
            f"{name} a plain tensor",
            lambda function, inputs: forward_backward(function, leaves(inputs, plain=[name])),
            EAGER,
        )

    with_gradients = [
        Context("checkpoint", _checkpoint(use_reentrant=False), EAGER),
        Context("checkpoint, reentrant", _checkpoint(use_reentrant=True), EAGER),
        Context("gradients kept", _grads_kept, _GRADS_BEFORE),
    ]
    return [
        NO_GRAD,
        INFERENCE,
        *frozen_contexts(inputs),
        *(plain(name) for name in inputs.differentiable if name in inputs.parameters),
        *(with_gradients if inputs.differentiable else ()),
        Context("inputs kept", _inputs_kept, _BEFORE),
    ]
