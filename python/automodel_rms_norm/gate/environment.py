"""The versions and the hardware that a bit may depend on."""

from __future__ import annotations

import platform
from importlib import metadata
from pathlib import Path

import torch

import automodel_rms_norm as arn

__all__ = ["environment", "installed"]


def installed(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "not installed"


def _cpu_name() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _gpus() -> str:
    if not torch.cuda.is_available():
        return "none"
    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return ", ".join(names)


def environment() -> dict[str, str]:
    """Names and values, in the order of a report."""
    info = arn.build_info()
    kernels = f"CUDA {info['cuda']}" if info["cuda"] else f"CPU only ({info['no_cuda_reason']})"
    return {
        "automodel-rms-norm": f"{arn.__version__}, {kernels}, {info['compiler']}",
        "contract": f"version {info['contract']['version']}",
        "torch": f"{torch.__version__}, built against {info['torch']}",
        "torch's CUDA": torch.version.cuda or "none",
        "GPU": _gpus(),
        "CPU": f"{_cpu_name()}, {torch.get_num_threads()} threads",
        "instruction set": f"{info['cpu_isa']} of {', '.join(info['cpu_isas_supported'])}",
        "triton": installed("triton"),
        "transformers": installed("transformers"),
        "Python": f"{platform.python_version()}, {platform.platform()}",
    }
