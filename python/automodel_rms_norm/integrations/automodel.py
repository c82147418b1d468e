"""NeMo AutoModel: its float32 norm becomes the op.

``Float32RMSNorm.forward`` looks up ``_float32_rms_norm_fwd`` in its module at each call, and
``initialize_rms_norm_module(..., "torch_fp32")`` makes Float32RMSNorm. So that one function is
replaced: models that exist already and models made later use the op alike, with the parameters,
hooks, state dict and class that they have.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor

from automodel_rms_norm.integrations._patching import Patch, calls, parameter_names, require
from automodel_rms_norm.integrations._probe import formula_of
from automodel_rms_norm.ops import rms_norm

__all__ = ["disable", "enable", "enabled"]

_UTILS = "nemo_automodel.components.models.common.utils"
_FUNCTION = "_float32_rms_norm_fwd"


def _float32_rms_norm_fwd(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return rms_norm(x, weight, eps)


def _computes_the_formula(function: Any) -> bool:
    """Under its decorators, so that nothing is compiled."""
    norm = inspect.unwrap(function)
    eps = 1e-5
    try:
        with torch.no_grad():
            return formula_of(lambda x, weight: norm(x, weight, eps), 64, eps) is False
    except Exception:  # another function may do anything
        return False


def _find() -> tuple[Any, str, Any]:
    utils = require(_UTILS, "nemo-automodel")
    function = getattr(utils, _FUNCTION, None)
    norm = getattr(utils, "Float32RMSNorm", None)
    if function is None or norm is None:
        raise _patch.refuse(f"{_UTILS} has no Float32RMSNorm with {_FUNCTION}")
    taken = parameter_names(function)
    if taken != ["x", "weight", "eps"]:
        raise _patch.refuse(f"{_FUNCTION} takes ({', '.join(taken)}), not (x, weight, eps)")
    if not calls(norm.forward, _FUNCTION):
        raise _patch.refuse(f"Float32RMSNorm.forward does not call {_FUNCTION}")
    if not _computes_the_formula(function):
        raise _patch.refuse(f"{_FUNCTION} computes something else than x * rstd * weight")
    return utils, _FUNCTION, _float32_rms_norm_fwd


_patch = Patch(__name__, "nemo-automodel", _find)


def enable() -> None:
    """From now on every Float32RMSNorm uses the op, in models that exist too.

    Raises:
        IntegrationError: where nemo-automodel is not installed, or offers no norm that can be
            replaced. Nothing is changed then.
    """
    _patch.enable()


def disable() -> None:
    """AutoModel's own function again. A compiled model is compiled again at its next call."""
    _patch.disable()


enabled = _patch.enabled
