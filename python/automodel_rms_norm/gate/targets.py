"""Which target to check: this package's op, a peer by its name, or ``module:attribute``."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from automodel_rms_norm.gate.norms import OP, norm_recipe
from automodel_rms_norm.gate.recipe import Recipe
from automodel_rms_norm.gate.recipes import recipe_for

__all__ = ["BUILT_IN", "TargetError", "load"]


class TargetError(Exception):
    """There is no such target, or it cannot be called; the message says what to do."""


# What users know them by, and where their own function is: of x, weight and eps, or a module with
# a weight.
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
    "te": "'transformer-engine[pytorch]'",
}
BUILT_IN = ("op", "torch", *_PEERS)


def load(text: str, recipes: str | None = None) -> Recipe:
    """The target that `text` names, by the recipe for it where there is one.

    Args:
        text: a built-in name or ``module:attribute``.
        recipes: a module with RECIPES besides those of `automodel_rms_norm.gate.recipes`.

    Raises:
        TargetError: if it cannot be imported, or is neither a Recipe nor callable like a norm.
        RecipeError: if its recipe is for other arguments.
    """
    if text == "op":
        return OP
    if text == "torch":
        return replace(_from_callable(text, _torch), source=text)
    words = text.replace(":", ".", 1).split(".")
    if text not in _PEERS and (":" not in text or not all(map(str.isidentifier, words))):
        raise TargetError(
            f"there is no target {text!r}; choose from {', '.join(BUILT_IN)}, or module:attribute"
        )
    try:
        found = _resolve(_PEERS.get(text, text))
    except TargetError as error:
        remedy = f"; pip install {_DISTRIBUTIONS[text]}" if text in _PEERS else ""
        raise TargetError(f"{text}: {error}{remedy}") from error
    if recipe := recipe_for(text, found, recipes):
        return replace(recipe, source="" if recipes else text)
    return replace(_from_object(text, found), source=text)


def _from_object(name: str, found: Any) -> Recipe:
    if isinstance(found, Recipe):
        return replace(found, name=found.name or name)
    if inspect.isclass(found) and issubclass(found, nn.Module):
        return _from_module(name, found)
    if inspect.isclass(found) and issubclass(found, torch.autograd.Function):
        return _from_callable(name, found.apply, inspect.signature(found.forward), skip=1)
    if callable(found) and not inspect.isclass(found):
        return _from_callable(name, found)
    raise TargetError(
        f"{name} is {type(found).__name__}, not a Recipe, a function of (x, weight, eps), a "
        "subclass of torch.nn.Module or of torch.autograd.Function"
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
) -> Recipe:
    """x and weight are the first two parameters, eps the third or, where that is another, by name.

    A fourth is zero_centered_gamma by its name.
    """
    if signature is None:
        try:
            signature = inspect.signature(function)
        except (
            TypeError,
            ValueError,
        ):  # a builtin: whether it takes them is seen when it is called
            return norm_recipe(function, name=name)
    parameters = list(signature.parameters.values())[skip:]
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    takes_any = any(p.kind == inspect.Parameter.VAR_POSITIONAL for p in parameters)
    taken = [p for p in parameters if p.kind in positional]
    named = [p for p in parameters if p.kind in (*positional, inspect.Parameter.KEYWORD_ONLY)]
    others = [p for p in named[2:] if p.name != "eps"]
    eps_elsewhere = len(others) < len(named[2:]) and [p.name for p in taken[2:3]] != ["eps"]
    if len(taken) > 1 and eps_elsewhere and not any(p.default is p.empty for p in others):
        return norm_recipe(lambda x, weight, eps: function(x, weight, eps=eps), name=name)
    if len(taken) < 3 and not takes_any:
        raise TargetError(
            f"{name}{signature} does not take (x, weight, eps); a recipe says what it takes: see "
            "automodel_rms_norm.gate.recipe"
        )
    centred = len(taken) > 3 and taken[3].name == "zero_centered_gamma"
    needed = [p.name for p in taken[4 if centred else 3 :] if p.default is p.empty]
    if needed:
        raise TargetError(f"{name}{signature} also needs {', '.join(needed)}")
    return norm_recipe(function, zero_centered_gamma=centred, name=name)


# --- Modules --------------------------------------------------------------------------------------


def _from_module(name: str, module: type[nn.Module]) -> Recipe:
    try:
        made = module(8, eps=1e-5)
    except Exception as error:  # anybody's constructor
        lines = str(error).strip().splitlines() or [""]
        raise TargetError(
            f"{name}(8, eps=1e-5) raised {type(error).__name__}: {lines[0]}"
        ) from error
    parameters = [key for key, _ in made.named_parameters()]
    if parameters != ["weight"]:
        found = ", ".join(parameters) or "none"
        raise TargetError(f"{name} must have one parameter, weight; it has {found}")

    def make(hidden: int, eps: float, **_: Any) -> nn.Module:
        return module(hidden, eps=eps)

    return norm_recipe(module=make, name=name)
