"""Every run mode that property P2 compares: compiled, exported, replayed as a CUDA graph.

AOTInductor packages are not among them, for building one needs a C++ compiler and takes half a
minute: tests/test_export.py compares theirs, run from Python and from C++.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from automodel_rms_norm.contexts import (
    EAGER,
    INFERENCE,
    NO_GRAD,
    Context,
    Function,
    Inputs,
    Results,
    differentiate,
    forward_backward,
    frozen_contexts,
    leaves,
    named,
)

__all__ = ["COMPILE_MODES", "UNCOMPILED", "compile_contexts", "run_mode_contexts"]

COMPILE_MODES = ("static", "dynamic", "reduce-overhead", "max-autotune")


def _uncompiled(function: Function, inputs: Inputs) -> Results:
    with torch.compiler.set_stance("force_eager"):
        return EAGER.run(function, inputs)


UNCOMPILED = Context("without the compiler", _uncompiled, EAGER)


def _options(mode: str) -> dict[str, Any]:
    return {"static": {"dynamic": False}, "dynamic": {"dynamic": True}}.get(mode, {"mode": mode})


def _compiled(
    mode: str, eagerly: Context, fullgraph: bool
) -> Callable[[Function, Inputs], Results]:
    def run(function: Function, inputs: Inputs) -> Results:
        # A recompile limit that earlier cases hit would silently run this one without the compiler.
        torch.compiler.reset()
        compiled = torch.compile(function, fullgraph=fullgraph, **_options(mode))
        # With CUDA graphs the first call warms up, the second records, the third replays.
        calls = 3 if inputs.device.type == "cuda" and "mode" in _options(mode) else 1
        for _ in range(calls):
            torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]
            results = eagerly.run(compiled, inputs)
        # A later replay would write into the same memory.
        return {name: tensor.clone() for name, tensor in results.items()}

    return run


def compile_contexts(
    inputs: Inputs, modes: Sequence[str] = COMPILE_MODES, fullgraph: bool = False
) -> list[Context]:
    """torch.compile in each of `modes`, in grad mode and under no_grad: two graphs each.

    In the first of `modes` under inference_mode and with a frozen argument as well.
    """
    if unknown := [mode for mode in modes if mode not in COMPILE_MODES]:
        raise ValueError(f"compile mode {unknown[0]!r} is not one of {', '.join(COMPILE_MODES)}")
    once = (INFERENCE, *frozen_contexts(inputs))
    return [
        Context(f"compiled {mode}, {eagerly.name}", _compiled(mode, eagerly, fullgraph), eagerly)
        for mode in modes
        for eagerly in (EAGER, NO_GRAD, *(once if mode == modes[0] else ()))
    ]


# --- Inside a larger function ---------------------------------------------------------------------


def _doubled_and_halved(value: Any) -> Any:
    # Exact, and for Inductor something to fuse with what the function does.
    exact = isinstance(value, Tensor) and value.is_floating_point()
    return value * 2.0 * 0.5 if exact else value


def _larger(function: Function, parameters: Sequence[bool]) -> Function:
    """The function between other operations; its parameters reach it as they are."""

    def larger(*arguments: Any) -> Any:
        returned = function(
            *(
                argument if parameter else _doubled_and_halved(argument)
                for argument, parameter in zip(arguments, parameters, strict=True)
            )
        )
        if isinstance(returned, Tensor):
            return _doubled_and_halved(returned)
        return tuple(map(_doubled_and_halved, returned))

    return larger


def _inside(eagerly: Context, fullgraph: bool) -> Context:
    def run(function: Function, inputs: Inputs) -> Results:
        larger = _larger(function, [name in inputs.parameters for name in inputs.arguments])
        return _compiled("static", eagerly, fullgraph)(larger, inputs)

    return Context(f"inside a larger compiled function, {eagerly.name}", run, eagerly)


# --- Export and CUDA graphs -----------------------------------------------------------------------


def _held(name: str) -> str:
    return "parameter_" + name.replace(".", "_")


class _Exportable(nn.Module):
    """The function with its parameters held and its scalars fixed; takes the other tensors."""

    def __init__(self, function: Function, inputs: Inputs) -> None:
        super().__init__()
        self.function = function
        self.fixed = {k: v for k, v in inputs.arguments.items() if not isinstance(v, Tensor)}
        self.order = list(inputs.arguments)
        for name, tensor in inputs.tensors.items():
            if name in inputs.parameters:
                self.register_parameter(_held(name), nn.Parameter(tensor.detach()))
        self.taken = [name for name in inputs.tensors if name not in inputs.parameters]

    def forward(self, *tensors: Tensor) -> Any:
        given = dict(zip(self.taken, tensors, strict=True))
        return self.function(
            *(
                given[name]
                if name in given
                else self.fixed[name]
                if name in self.fixed
                else getattr(self, _held(name))
                for name in self.order
            )
        )


def _export(function: Function, inputs: Inputs) -> Results:
    module = _Exportable(function, inputs)
    taken = [inputs.arguments[name].detach() for name in module.taken]
    batch = tuple(
        {inputs.rows[name]: torch.export.Dim.AUTO} if name in inputs.rows else {}
        for name in module.taken
    )
    program = torch.export.export(module, tuple(taken), dynamic_shapes={"tensors": batch})
    exported = program.module()
    given = leaves(inputs)
    held = {
        name: getattr(exported, _held(name)) for name in inputs.tensors if name in inputs.parameters
    }
    given = given.with_arguments(**held)
    returned = exported(*(given.arguments[name] for name in module.taken))
    return differentiate(named(given, returned), given)


def _cuda_graph(function: Function, inputs: Inputs) -> Results:
    """Captured while the tensors hold other values: only a replay can give the right results."""
    given = leaves(inputs).map(
        lambda name, tensor: tensor.clone() if name in inputs.grads else tensor
    )

    def others() -> list[Tensor]:
        grads = [grad for grad in given.grads.values() if grad is not None]
        arguments = [t for name, t in given.tensors.items() if name not in inputs.parameters]
        return [tensor for tensor in (*arguments, *grads) if tensor.is_floating_point()]

    with torch.no_grad():
        right = [tensor.clone() for tensor in others()]
        for tensor in others():
            tensor.fill_(1)
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        forward_backward(function, given)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = forward_backward(function, given)
    with torch.no_grad():
        for tensor, value in zip(others(), right, strict=True):
            tensor.copy_(value)
    graph.replay()
    torch.cuda.synchronize()
    return results


def run_mode_contexts(
    inputs: Inputs, compile_modes: Sequence[str] = COMPILE_MODES, fullgraph: bool = False
) -> list[Context]:
    """The contexts of P2: uncompiled, compiled in `compile_modes` alone and inside a larger
    function, exported, and for CUDA tensors replayed as a CUDA graph."""
    inside = [_inside(eagerly, fullgraph) for eagerly in (EAGER, NO_GRAD)] if compile_modes else []
    on_cuda = inputs.device.type == "cuda"
    return [
        UNCOMPILED,
        *compile_contexts(inputs, compile_modes, fullgraph),
        *inside,
        Context("export", _export, EAGER),
        *([Context("CUDA graph", _cuda_graph, EAGER)] if on_cuda else []),
    ]
