"""Loads the op library, after checking that torch is the one it was built for."""

from __future__ import annotations

from pathlib import Path

import torch

_REINSTALL = (
    "build it again for this torch, in its repository: "
    "pip install --no-build-isolation --no-deps --force-reinstall ."
)


def check_torch(built_torch: str, built_cuda: str | None) -> None:
    """Raises ImportError, naming both versions, where torch is not the one of the build.

    torch's C++ interface is stable within a minor version. A build with CUDA kernels also needs a
    torch of the same CUDA major version.
    """

    def minor(version: str) -> list[str]:
        return version.split("+")[0].split(".")[:2]

    if minor(torch.__version__) != minor(built_torch):
        raise ImportError(
            f"automodel_rms_norm was built against torch {built_torch}, but torch "
            f"{torch.__version__} is installed; {_REINSTALL}"
        )
    if built_cuda is None:
        return
    installed = torch.version.cuda
    if installed is None or installed.split(".")[0] != built_cuda.split(".")[0]:
        raise ImportError(
            f"automodel_rms_norm was built with CUDA {built_cuda} kernels for torch {built_torch}, "
            f"but torch {torch.__version__} comes with "
            f"{'no CUDA' if installed is None else f'CUDA {installed}'}; {_REINSTALL}"
        )


def load() -> Path:
    """Registers the ops of namespace ``automodel`` with torch and returns the library's path."""
    try:
        from automodel_rms_norm import _build_config
    except ImportError as error:
        raise ImportError(
            "automodel_rms_norm has not been built: this is its source folder, not an installed "
            "package; run pip install --no-build-isolation . in the repository"
        ) from error
    check_torch(_build_config.TORCH_VERSION, _build_config.CUDA_VERSION)
    path = Path(__file__).parent / "lib" / "libautomodel_rms_norm.so"
    torch.ops.load_library(str(path))  # type: ignore[no-untyped-call]
    return path


LIBRARY_PATH = load()
