"""RMSNorm for large-model training, with bits that do not depend on how or where it runs.

``rms_norm`` and ``RMSNorm`` run ``torch.ops.automodel.rms_norm``, one opaque op for eager,
autograd, ``torch.compile``, export and C++ on CPU and CUDA. ``add_rms_norm`` adds a residual first,
in the same op. ``reference`` is the contract in plain Python, ``testing`` has the assertions that
the gate uses. Importing initialises no CUDA context.
"""

from automodel_rms_norm import _library as _library  # isort: skip  (registers the ops)
from automodel_rms_norm import _build_config, _sharding, reference, testing
from automodel_rms_norm.modules import RMSNorm
from automodel_rms_norm.ops import add_rms_norm, build_info, rms_norm

_sharding.register_when_dtensor_is_imported()

__version__: str = _build_config.VERSION

__all__ = [
    "RMSNorm",
    "__version__",
    "add_rms_norm",
    "build_info",
    "reference",
    "rms_norm",
    "testing",
]
