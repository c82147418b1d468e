"""How DTensor shards the ops: along rows, with hidden and weight whole on every rank."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

__all__ = ["is_sharded", "register_when_dtensor_is_imported"]

_DTENSOR = "torch.distributed.tensor"

# The outputs of each op: is it summed over rows?
_OPS = {
    "rms_norm": (False,),
    "rms_norm_forward": (False, False),
    "rms_norm_backward": (False, True),
    "add_rms_norm": (False, False),
    "add_rms_norm_forward": (False, False, False),
    "add_rms_norm_backward": (False, True),
}


def is_sharded(tensor: Tensor) -> bool:
    """A DTensor of which a rank holds a part, or a term."""
    return any(not placement.is_replicate() for placement in getattr(tensor, "placements", ()))


def _cut_dim(placement: Any) -> int | None:
    """The dimension that is cut by Shard, or by the strided shard of a flattened tensor, which says
    of itself that it is none."""
    return getattr(placement, "dim", None)


def _check(op: str, name: str, spec: Any, allowed: Callable[[Any], bool], wanted: str) -> None:
    for dim, placement in enumerate(spec.placements):
        if not allowed(placement):
            names = spec.mesh.mesh_dim_names
            mesh_dim = dim if names is None else repr(names[dim])
            raise ValueError(
                f"automodel::{op}: {name} of shape {tuple(spec.shape)} must be {wanted}, got "
                f"{placement} on mesh dimension {mesh_dim}; redistribute it first"
            )


def _check_given(op: str, given: dict[str, Any], x: Any) -> None:
    """Of what a caller chooses. Other tensors come from autograd, and DTensor moves them to x's."""
    for name in ("x", "sum", "residual"):
        if name in given:
            _check(
                op,
                name,
                given[name],
                lambda p: p.is_replicate() or _cut_dim(p) in range(x.ndim - 1),
                "replicated or sharded along a dimension before the last",
            )
    if given["weight"] is not None:
        _check(op, "weight", given["weight"], lambda p: p.is_replicate(), "replicated")
    if "residual" in given and given["residual"].placements != x.placements:
        raise ValueError(
            f"automodel::{op}: residual must have the placements of x, {x.placements}, got "
            f"{given['residual'].placements}; redistribute it first"
        )


def _rule(op: str, arguments: Sequence[str], summed: Sequence[bool]) -> Callable[..., Any]:
    """What register_sharding asks for: the placements that go together on one mesh dimension."""
    from torch.distributed.tensor import Partial, Replicate

    def rule(*values: Any) -> list[tuple[list[Any], list[Any]]]:
        given = dict(zip(arguments, values, strict=False))
        x = given["x"] if "x" in given else given["sum"]
        _check_given(op, given, x)

        def placed(argument: str, rows: Any) -> Any:
            if not hasattr(given[argument], "placements"):
                return None
            return Replicate() if argument == "weight" else rows

        # Those of x alone, so that none asks for another x. A replicated x can be sharded for
        # nothing, and of placements that cost the same DTensor takes the first.
        return [
            (
                [Partial() if total and _cut_dim(rows) is not None else rows for total in summed],
                [placed(argument, rows) for argument in given],
            )
            for rows in dict.fromkeys([Replicate(), *x.placements])
        ]

    return rule


def _register() -> None:
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.experimental import register_sharding

    for name, summed in _OPS.items():
        op = getattr(torch.ops.automodel, name).default
        arguments = [argument.name for argument in op._schema.arguments]
        register_sharding(op)(_rule(name, arguments, summed))
        # register_sharding lets int arguments alone into the key of DTensor's cache, so that
        # backward passes with different output masks would share one result.
        if "output_mask" in arguments:
            infos = DTensor._op_dispatcher.sharding_propagator.op_to_schema_info
            infos[op] = dataclasses.replace(infos[op], static_argnum=arguments.index("output_mask"))


class _Finder(MetaPathFinder):
    """Finds torch.distributed.tensor, and registers the rules when it has been executed.

    It stays until then: importlib.util.find_spec asks for a module without importing it.
    """

    def find_spec(
        self, name: str, path: Any, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != _DTENSOR:
            return None
        finders = [f for f in sys.meta_path if f is not self and hasattr(f, "find_spec")]
        found = (finder.find_spec(name, path, target) for finder in finders)
        spec = next((spec for spec in found if spec is not None), None)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def execute_and_register(module: ModuleType) -> None:
            execute(module)
            if self in sys.meta_path:
                sys.meta_path.remove(self)
                _register()

        spec.loader.exec_module = execute_and_register  # type: ignore[method-assign]
        return spec


def register_when_dtensor_is_imported() -> None:
    """Registers the rules now if DTensor is imported, else then: its import takes seconds."""
    if _DTENSOR in sys.modules:
        _register()
    else:
        sys.meta_path.insert(0, _Finder())
