"""Megatron-Core: its batch-invariant norm becomes the op, on CPU tensors too.

Megatron's own forward computes ``weight + 1`` for zero_centered_gamma and then multiplies by
``weight``; its backward multiplies by the weight twice in one term of grad_x. What is replaced is
``BatchInvariantRMSNormFn.apply``, through which ``rmsnorm_batch_invariant`` and, in batch-invariant
mode, ``transformer_engine.pytorch.RMSNorm`` go. Transformer Engine's modules that join a norm with
a linear layer do not: there Megatron has a computation of its own.
"""

from __future__ import annotations

from typing import Any

from automodel_rms_norm.integrations._patching import Patch, calls, parameter_names, require
from automodel_rms_norm.ops import rms_norm

__all__ = ["disable", "enable", "enabled"]

_KERNELS = "megatron.core.transformer.custom_layers.batch_invariant_kernels"
_FUNCTION = "BatchInvariantRMSNormFn"
_APPLY = staticmethod(rms_norm)


def _find() -> tuple[Any, str, Any]:
    kernels = require(_KERNELS, "megatron-core")
    function = getattr(kernels, _FUNCTION, None)
    if function is None:
        raise _patch.refuse(f"{_KERNELS} has no {_FUNCTION}")
    taken = parameter_names(getattr(function, "forward", None))[1:]
    expected = parameter_names(rms_norm)
    if taken != expected:
        raise _patch.refuse(f"{_FUNCTION} takes ({', '.join(taken)}), not ({', '.join(expected)})")
    wrapper = getattr(kernels, "rmsnorm_batch_invariant", None)
    if not calls(wrapper, _FUNCTION):
        raise _patch.refuse(f"rmsnorm_batch_invariant does not call {_FUNCTION}")
    return function, "apply", _APPLY


_patch = Patch(__name__, "megatron-core", _find)


def enable() -> None:
    """From now on ``BatchInvariantRMSNormFn`` and ``rmsnorm_batch_invariant`` are the op.

    Raises:
        IntegrationError: where megatron-core is not installed, or offers no norm that can be
            replaced. Nothing is changed then.
    """
    _patch.enable()


def disable() -> None:
    """Megatron's own functions again."""
    _patch.disable()


enabled = _patch.enabled
