"""Hugging Face models: RMSNorm modules become the op where they compute what it computes."""

from __future__ import annotations

import copy
import functools
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from automodel_rms_norm._sharding import is_sharded
from automodel_rms_norm.integrations._patching import IntegrationError, parameter_names
from automodel_rms_norm.integrations._probe import draw, formula_of, within_roundings
from automodel_rms_norm.modules import RMSNorm
from automodel_rms_norm.ops import rms_norm

__all__ = ["Conversion", "convert"]

SAME_ROUNDING = "rounded once, as the op does"
LLAMA_ROUNDING = "rounded before the weight and after it; the op rounds once"
WIDER_RESULT = "returned float32 for bfloat16 x and a float32 weight; the op returns bfloat16"

_EPS_NAMES = ("variance_epsilon", "eps", "epsilon")


@dataclass(frozen=True)
class Conversion:
    """What :func:`convert` did, by the modules' names in the model.

    Attributes:
        converted: how the replaced module rounded in 16 bit.
        left: why a module that looked like a norm was left alone.
    """

    converted: dict[str, str] = field(default_factory=dict)
    left: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return "\n".join(
            [f"converted {len(self.converted)}, left {len(self.left)}"]
            + [f"  {name}: {note}" for name, note in {**self.converted, **self.left}.items()]
        )


class _NoMatchError(Exception):
    """The op cannot stand in for the module; the message is the reason."""


def convert(model: nn.Module) -> Conversion:
    """Replaces the norms of a model whose arithmetic the op has, in place.

    A module whose one parameter is a weight of one dimension is tried on random inputs and random
    weights, in float32 and in 16 bit, against the formula with weight and with ``weight + 1``. What
    agrees within the rounding of each dtype is replaced by an :class:`automodel_rms_norm.RMSNorm`
    that has the same parameter: optimizers, tied weights and the state dict stay as they are. What
    the class is called does not matter; by its name, or an eps, it is only found and listed.

    Args:
        model: any module; its dtypes and devices are kept.

    Returns:
        The names of what was converted, and of what was left with the reason.

    Raises:
        IntegrationError: where nothing in the model looks like a norm. Nothing is changed then.
        TypeError: for what is no module.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"convert: model must be a torch.nn.Module, got {type(model).__name__}")
    with torch.device("cpu"):  # whatever the default device is
        return _convert(model)


def _convert(model: nn.Module) -> Conversion:
    result = Conversion()
    replacements: dict[nn.Module, RMSNorm] = {}
    for name, module in model.named_modules():
        if not _looks_like_a_norm(module):
            continue
        try:
            if module is model:
                raise _NoMatchError("is the whole model; put an RMSNorm in its place")
            if name.endswith("_orig_mod"):
                raise _NoMatchError("is compiled by itself; convert the model before that")
            replacements[module], result.converted[name] = _replacement(module)
        except _NoMatchError as reason:
            result.left[name] = str(reason)
    if not result.converted and not result.left:
        raise IntegrationError(
            f"{type(model).__name__} has no module that looks like an RMSNorm: none with a weight "
            "of one dimension, an eps or a class called Norm"
        )
    for parent in list(model.modules()):
        for child_name, child in list(parent._modules.items()):  # also a child's second name
            if child in replacements:
                setattr(parent, child_name, replacements[child])
    return result


def _looks_like_a_norm(module: nn.Module) -> bool:
    if {name for name, _ in module.named_children()} - {"parametrizations"}:
        return False
    weight = getattr(module, "weight", None)
    if isinstance(weight, Tensor) and is_lazy(weight):
        return False
    of_one_dimension = isinstance(weight, Tensor) and weight.dim() == 1
    has_eps = any(hasattr(module, name) for name in _EPS_NAMES)
    return of_one_dimension or has_eps or "norm" in type(module).__name__.lower()


def _replacement(module: nn.Module) -> tuple[RMSNorm, str]:
    """The module's replacement and how the module rounds, or _NoMatchError."""
    if isinstance(module, RMSNorm):
        raise _NoMatchError("is the op already")
    if isinstance(module, torch.jit.ScriptModule):
        raise _NoMatchError("is a TorchScript module; convert the model before it is scripted")
    if "parametrizations" in module._modules:
        raise _NoMatchError("has a parametrization, which would be lost; remove it first")
    parameters = dict(module.named_parameters(recurse=False))
    others = sorted(set(parameters) - {"weight"})
    others += [f"the buffer {name}" for name, _ in module.named_buffers(recurse=False)]
    others += [f"the argument {name}" for name in parameter_names(module.forward)[1:]]
    if others:
        raise _NoMatchError(f"has {others[0]}, which the op has not")
    weight = parameters.get("weight")
    if weight is None:
        raise _NoMatchError(
            "has no weight, so that its width is not known; "
            "put RMSNorm(dim, eps, elementwise_affine=False) in its place"
        )
    if weight.dtype not in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
        raise _NoMatchError(f"has a weight of {weight.dtype}, which the op does not take")
    if is_sharded(weight) or hasattr(weight, "_fsdp_flattened"):
        raise _NoMatchError("has a sharded weight; convert the model before it is sharded")
    if type(weight) is not nn.Parameter and not hasattr(weight, "placements"):
        raise _NoMatchError(f"has a weight that is a {type(weight).__name__}, not a plain one")
    if "forward" in vars(module):
        raise _NoMatchError("has a forward of its own instance, which would be lost")
    if any(value for name, value in vars(module).items() if name.endswith("_hooks")):
        raise _NoMatchError("has hooks, which would be lost; remove them first")
    if weight.dim() != 1 or weight.numel() == 0:
        raise _NoMatchError(
            f"has a weight of shape {tuple(weight.shape)}; the op takes one of x's last dimension"
        )
    eps = _eps(module)
    zero_centered = formula_of(functools.partial(_run, module), weight.numel(), eps)
    if zero_centered is None:
        raise _NoMatchError("computes something else than x * rstd * weight, or weight + 1")
    note = _note(module, weight, eps, zero_centered)
    made = RMSNorm(weight.numel(), eps, "meta", weight.dtype, zero_centered)
    made.weight = weight
    return made.train(module.training), note


def _eps(module: nn.Module) -> float:
    for name in _EPS_NAMES:
        value = getattr(module, name, None)
        if isinstance(value, (int, float)):
            return float(value)
    raise _NoMatchError(f"has no number called {', '.join(_EPS_NAMES[:-1])} or {_EPS_NAMES[-1]}")


def _run(module: nn.Module, x: Tensor, weight: Tensor) -> Tensor:
    """A copy of the module on the CPU with that weight, applied to x."""
    given = x.view(4, -1, x.shape[-1])  # of three dimensions: the second is not the last
    try:
        probe = copy.copy(module)
        probe._parameters = {"weight": nn.Parameter(weight, requires_grad=False)}
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            y, trained = probe.eval()(given), probe.train()(given)
    except Exception as error:  # anybody's forward
        lines = str(error).strip().splitlines() or [""]
        raise _NoMatchError(
            f"cannot be called with x alone: {type(error).__name__}: {lines[0]}"
        ) from error
    if not isinstance(y, Tensor) or y.shape != given.shape:
        raise _NoMatchError("does not return a tensor of x's shape")
    if not torch.equal(y, trained):
        raise _NoMatchError("computes something else in training")
    return y.view_as(x)


def _note(module: nn.Module, weight: nn.Parameter, eps: float, zero_centered: bool) -> str:
    """How the module rounds, in its weight's dtype and in those that it may be computed in."""
    hidden, dtype = weight.numel(), weight.dtype
    if dtype == torch.float64:
        return SAME_ROUNDING
    if dtype != torch.float32:
        return _rounding(module, hidden, eps, zero_centered, dtype)
    # Under FSDP2's mixed precision the weight is cast as x is; otherwise x alone is of 16 bit.
    note = _rounding(module, hidden, eps, zero_centered, torch.bfloat16)
    x, gain = draw(hidden, eps, torch.bfloat16, torch.float32)
    y = _run(module, x, gain)
    if not within_roundings(y, x, gain, eps, zero_centered):
        raise _NoMatchError("is further from the formula for bfloat16 x than two roundings")
    return note if y.dtype == x.dtype else f"{note}; {WIDER_RESULT}"


def _rounding(
    module: nn.Module, hidden: int, eps: float, zero_centered: bool, dtype: torch.dtype
) -> str:
    """How the module rounds where x and weight are of 16 bit."""
    x, gain = draw(hidden, eps, dtype)
    y = _run(module, x, gain)
    if y.dtype != dtype:
        raise _NoMatchError(f"returns {y.dtype} for {dtype} x")
    ours = rms_norm(x, gain, eps, zero_centered)
    # Sums of another order put a value on the other side of a rounding boundary now and then.
    if bool((y != ours).float().mean() < 0.02):
        return SAME_ROUNDING
    if within_roundings(y, x, gain, eps, zero_centered):
        return LLAMA_ROUNDING
    raise _NoMatchError(f"is further from the formula in {dtype} than two roundings")
