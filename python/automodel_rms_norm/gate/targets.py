"""Which norm to check: this package's, a peer by its name, or ``module:attribute``."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from automodel_rms_norm.contexts import Function
from automodel_rms_norm.gate.cases import Case
from automodel_rms_norm.gate.plan import OP, Target

__all__ = ["BUILT_IN", "TargetError", "load"]


class TargetError(Exception):
    """There is no such target, or it cannot be called like a norm; the message says what to do."""


# What users know them by, and where their own function is. Each takes (x, weight, eps) or is a
# module with a weight.
_PEERS = {
    "automodel": "nemo_automodel.components.models.common.utils:Float32RMSNorm",
    "megatron": "megatron.core.transformer.custom_layers.batch_invariant_kernels"
    ":BatchInvariantRMSNormFn",
    "liger": "liger_kernel.transformers.functional:liger_rms_norm",
    "quack": "quack.rmsnorm:rmsnorm",
    "te": "transformer_engine.pytorch:RMSNorm",
}
_DISTRIBUTIONS = {
    "automodel": "nemo-automodel",
    "megatron": "megatron-core",
    "liger": "liger-kernel",
    "quack": "quack-kernels",
    "te": "transformer-engine",
}
BUILT_IN = ("op", "torch", *_PEERS)


def load(text: str) -> Target:
    """The target that `text` names.

    Raises:
        TargetError: if it cannot be imported, or is nothing that can be called like a norm.
    """
    if text == "op":
        return OP
    if text == "torch":
        return _from_callable(text, _torch)
    if text not in _PEERS and ":" not in text:
        raise TargetError(
            f"there is no target {text!r}; choose from {', '.join(BUILT_IN)}, or module:attribute"
        )
    try:
        found = _resolve(_PEERS.get(text, text))
    except TargetError as error:
        remedy = f"; pip install {_DISTRIBUTIONS[text]}" if text in _PEERS else ""
        raise TargetError(f"{text}: {error}{remedy}") from error
    if inspect.isclass(found) and issubclass(found, nn.Module):
        return _module_target(text, found)
    if inspect.isclass(found) and issubclass(found, torch.autograd.Function):
        return _from_callable(text, found.apply, inspect.signature(found.forward), skip=1)
    if callable(found) and not inspect.isclass(found):
        return _from_callable(text, found)
    raise TargetError(
        f"{text} is {type(found).__name__}, not a function of (x, weight, eps), a subclass of "
        "torch.nn.Module or of torch.autograd.Function"
    )


def _resolve(text: str) -> Any:
    path, _, attribute = text.partition(":")
    try:
        importlib.import_module(path)
        found: Any = sys.modules[path]  # a package may hide it behind a function of its name
    except Exception as error:  # an import runs anybody's code
        lines = str(error).strip().splitlines() or [""]
        raise TargetError(f"cannot import {path}: {type(error).__name__}: {lines[0]}") from error
    for name in attribute.split("."):
        if not hasattr(found, name):
            raise TargetError(f"{path} has no attribute {attribute!r}")
        found = getattr(found, name)
    return found


# --- Functions ------------------------------------------------------------------------------------


def _torch(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],), weight, eps)


def _from_callable(
    name: str,
    function: Callable[..., Any],
    signature: inspect.Signature | None = None,
    skip: int = 0,
) -> Target:
    """x, weight and eps are the first three parameters; a fourth is zero_centered_gamma by name."""
    if signature is None:
        try:
            signature = inspect.signature(function)
        except (
            TypeError,
            ValueError,
        ):  # a builtin: whether it takes them is seen when it is called
            return Target(
                name, lambda x, weight, eps, zero: function(x, weight, eps), None, _plain, False
            )
    parameters = list(signature.parameters.values())[skip:]
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    takes_any = any(p.kind == inspect.Parameter.VAR_POSITIONAL for p in parameters)
    taken = [p for p in parameters if p.kind in positional]
    if len(taken) < 3 and not takes_any:
        raise TargetError(f"{name}{signature} does not take (x, weight, eps)")
    centred = len(taken) > 3 and taken[3].name == "zero_centered_gamma"
    needed = [p.name for p in taken[4 if centred else 3 :] if p.default is p.empty]
    if needed:
        raise TargetError(f"{name}{signature} also needs {', '.join(needed)}")

    def call(x: Tensor, weight: Tensor | None, eps: float, zero_centered_gamma: bool) -> Tensor:
        extra = (zero_centered_gamma,) if centred else ()
        y: Tensor = function(x, weight, eps, *extra)
        return y

    return Target(name, call, None, _centred if centred else _plain, False)


def _plain(case: Case) -> str:
    if case.zero_centered_gamma:
        return "zero-centred weights: the target has no zero_centered_gamma"
    return _centred(case)


def _centred(case: Case) -> str:
    if case.inputs.weight is None:
        return "no weight: not asked of another norm"
    if case.inputs.x.dtype == torch.float64:
        return "float64: not asked of another norm"
    return ""


# --- Modules --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _ModuleTarget(Target):
    """A norm that is a module: one is made for each case, and lent the case's weight."""

    module: type[nn.Module] = nn.Module

    def bind(self, case: Case) -> Function:
        x, weight, _, eps = case.inputs
        assert weight is not None
        made = _construct(self.name, self.module, x.shape[-1], eps)
        made = made.to(device=x.device, dtype=weight.dtype)

        def call(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
            assert weight is not None
            y: Tensor = torch.func.functional_call(made, {"weight": weight}, (x,))
            return y

        return call


def _construct(name: str, module: type[nn.Module], hidden: int, eps: float) -> nn.Module:
    made = module(hidden, eps=eps)
    parameters = [key for key, _ in made.named_parameters()]
    if parameters != ["weight"]:
        found = ", ".join(parameters) or "none"
        raise TargetError(f"{name} must have one parameter, weight; it has {found}")
    return made


def _module_target(name: str, module: type[nn.Module]) -> Target:
    try:
        _construct(name, module, 8, 1e-5)
    except TargetError:
        raise
    except Exception as error:  # anybody's constructor
        lines = str(error).strip().splitlines() or [""]
        raise TargetError(
            f"{name}(8, eps=1e-5) raised {type(error).__name__}: {lines[0]}"
        ) from error

    def unbound(x: Tensor, weight: Tensor | None, eps: float, zero: bool) -> Tensor:
        raise NotImplementedError("a module is bound to a case")

    return _ModuleTarget(name, unbound, None, _plain, False, module)
