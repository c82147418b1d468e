"""Which operations of a model break the equality of two ways to train it.

Both ways do a step from the same parameters, and what goes into and comes out of every operation is
kept. The answer are the operations of the second way whose inputs are, to the last bit, those of an
operation of the first way, and whose outputs are not.
"""

import functools
import hashlib
import operator
import re
from collections.abc import Callable, Iterable, Sequence
from itertools import zip_longest
from typing import Any, NamedTuple

import torch
from automodel_rms_norm.distributed import join_grad_weights
from torch import Tensor, fx, nn
from torch._dynamo.backends.common import aot_autograd
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from trainer import Trainer


class Call(NamedTuple):
    """One operation that was run; `where` is the module it is of."""

    op: str
    where: str
    inputs: list[Tensor]
    outputs: list[Tensor]


def differences(reference: Iterable[Call], calls: Iterable[Call]) -> list[Call]:
    """Those of `calls` that have the inputs of one of the reference's, and other outputs."""
    known: dict[object, set[object]] = {}
    for call in reference:
        known.setdefault((call.op, bits(call.inputs)), set()).add(bits(call.outputs))

    def differs(call: Call) -> bool:
        outputs = known.get((call.op, bits(call.inputs)))
        return outputs is not None and bits(call.outputs) not in outputs

    return [call for call in calls if differs(call)]


def bits(tensors: Sequence[Tensor]) -> object:
    return tuple(
        (
            t.dtype,
            t.shape,
            hashlib.sha1(t.contiguous().flatten().view(torch.uint8).numpy()).digest(),
        )
        for t in tensors
    )


def kept(values: object) -> list[Tensor]:
    """Copies on the CPU: tensors are written to later, gradients that are added up for one."""
    tensors = [value for value in tree_iter(values) if isinstance(value, Tensor)]
    return [t.detach().to("cpu", copy=True) for t in tensors if t.layout == torch.strided]


def without_random_state(op: str, tensors: list[Tensor]) -> list[Tensor]:
    """Attention returns the state of its dropout and takes it back, not initialised without one."""
    if "scaled_dot_product" not in op:
        return tensors
    return [t for t in tensors if t.is_floating_point()]


# --- Run op by op ---------------------------------------------------------------------------------


class Modules:
    """Which module an operation is of: by what is being called, or by the node of autograd."""

    def __init__(self, model: nn.Module) -> None:
        self.called: list[str] = []
        self.made: dict[Any, str] = {}  # nodes of autograd
        self.hooks = []
        for name, module in model.named_modules():
            enter = functools.partial(self._enter, name)
            leave = functools.partial(self._leave, name)
            self.hooks += [
                module.register_forward_pre_hook(enter),
                module.register_forward_hook(leave, with_kwargs=True),
            ]

    def _enter(self, name: str, module: nn.Module, args: object) -> None:
        self.called.append(name)

    def _leave(
        self, name: str, module: nn.Module, args: object, kwargs: object, output: object
    ) -> None:
        self.called.pop()
        before, nodes = set(nodes_of((args, kwargs))), nodes_of(output)
        while nodes:
            node = nodes.pop()
            if node is not None and node not in before and node not in self.made:
                self.made[node] = name
                nodes += [following for following, _ in node.next_functions]

    def current(self) -> str:
        if self.called:
            return self.called[-1]
        node = torch._C._current_autograd_node()
        return f"{self.made.get(node, '')} (backward)" if node else ""


def nodes_of(values: object) -> list[Any]:
    return [value.grad_fn for value in tree_iter(values) if isinstance(value, Tensor)]


class Recorder(TorchDispatchMode):
    """Keeps every operation but those whose outputs are not initialised."""

    def __init__(self, modules: Modules) -> None:
        super().__init__()
        self.modules = modules
        self.calls: list[Call] = []

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs, op = kwargs or {}, str(func)
        inputs = without_random_state(op, kept((args, kwargs)))
        result = func(*args, **kwargs)
        if "empty" not in op:
            outputs = without_random_state(op, kept(result))
            self.calls.append(Call(op, self.modules.current(), inputs, outputs))
        return result


def recorded(trainer: Trainer, index: int) -> list[list[Call]]:
    """The calls of each micro-batch of a step, whose gradients are thrown away."""
    streams = []
    modules = Modules(trainer.model)
    for part in trainer.micro_batches(index):
        with Recorder(modules) as recorder:
            trainer.backward(*part)
        trainer.optimizer.zero_grad()
        streams.append(recorder.calls)
    for hook in modules.hooks:
        hook.remove()
    return streams


def whole(reference: Sequence[Call], streams: Sequence[Sequence[Call]]) -> list[Call]:
    """The micro-batches' calls as those of one batch.

    What depends on the rows is put together along the dimension in which its size differs. A sum
    over rows is added up, as autograd does, and for the op as exact_grad_weight does.
    """
    result = []
    for one, *parts in zip_longest(reference, *streams):
        if one is None or None in parts or {part.op for part in parts} != {one.op}:
            break  # another sequence of operations; what comes before it is compared
        inputs = [together(*ts) for ts in zip(one.inputs, *(p.inputs for p in parts), strict=True)]
        split = any(a.shape != b.shape for a, b in zip(one.inputs, parts[0].inputs, strict=True))
        add = join_grad_weights if one.op.startswith("automodel") else sum_in_order
        outputs = [
            add(ts) if split and ts[0].shape == t.shape != (0,) else together(t, *ts)
            for t, *ts in zip(one.outputs, *(p.outputs for p in parts), strict=True)
        ]
        result.append(Call(one.op, parts[0].where, inputs, outputs))
    return result


def together(like: Tensor, *parts: Tensor) -> Tensor:
    different = [d for d in range(like.dim()) if like.shape[d] != parts[0].shape[d]]
    return torch.cat(parts, different[0]) if different else parts[0]


def sum_in_order(parts: Sequence[Tensor]) -> Tensor:
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    return total


# --- Compiled -------------------------------------------------------------------------------------


def captured(trainer: Trainer, index: int) -> list[tuple[fx.GraphModule, list[Any]]]:
    """The graphs that Inductor gets, of operations not yet decomposed, with their inputs."""
    found = []

    def compiler(graph: fx.GraphModule, _: object) -> Callable[..., Any]:
        def run(*inputs: Any) -> Any:
            found.append((graph, list(inputs)))
            return graph(*inputs)

        return run

    torch._dynamo.reset()
    forward = trainer.forward
    trainer.forward = torch.compile(
        trainer.model, backend=aot_autograd(fw_compiler=compiler, bw_compiler=compiler)
    )
    trainer.backward(*trainer.micro_batches(index)[0])
    trainer.optimizer.zero_grad()
    trainer.forward = forward
    torch._dynamo.reset()
    return found


def compiled_calls(graph: fx.GraphModule, inputs: list[Any]) -> list[list[Call]]:
    """The graph's operations run one by one, and by Inductor, every value being an output."""
    every, renamed = fx.Graph(), {}
    every.graph_copy(graph.graph, renamed)
    nodes = [
        node
        for node in renamed.values()
        if node.op == "call_function" and isinstance(node.meta.get("val"), Tensor)
    ]
    every.output(tuple(nodes))
    run = fx.GraphModule(graph, every)
    given = dict(zip(every.find_nodes(op="placeholder"), inputs, strict=True))
    with torch.no_grad():
        results = [called(*inputs) for called in (run, torch.compile(run))]
    return [calls_of(given | dict(zip(nodes, values, strict=True))) for values in results]


def calls_of(values: dict[fx.Node, Any]) -> list[Call]:
    calls = []
    for node, value in values.items():
        if node.op == "call_function":
            source = node.args[0] if node.target is operator.getitem else node
            assert isinstance(source, fx.Node)
            given = [values[n] for n in source.all_input_nodes if n in values]
            calls.append(Call(str(source.target), module_of(source), kept(given), kept(value)))
    return calls


def module_of(node: fx.Node) -> str:
    """Its path in the model, where torch says it."""
    for key, note in (("nn_module_stack", ""), ("fwd_nn_module_stack", " (backward)")):
        if stack := node.meta.get(key):
            path = next(reversed(stack.values()))[0]
            return re.sub(r"^L\['\w+'\](\[0\])?\.", "", path) + note
    return ""


# --- The answer -----------------------------------------------------------------------------------


class Found(NamedTuple):
    """In which step, counted from 1, and which calls in their order."""

    step: int
    calls: list[Call]


def search(reference: Trainer, trainer: Trainer, steps: int) -> Found | None:
    """The first step in which operations differ.

    Args:
        reference, trainer: with the same norm and the same parameters, neither trained yet.
        steps: how many to look at.
    """
    for index in range(steps):
        if calls := differences_in_step(reference, trainer, index):
            return Found(index + 1, calls)
        reference.step(index)
        trainer.step(index)
    return None


def differences_in_step(reference: Trainer, trainer: Trainer, index: int) -> list[Call]:
    if trainer.way.compiled:
        graphs = [compiled_calls(*found) for found in captured(reference, index)]
        return [call for pair in graphs for call in differences(*pair)]
    (calls,) = recorded(reference, index)
    streams = recorded(trainer, index)
    return differences(calls, whole(calls, streams) if len(streams) > 1 else streams[0])
