"""Builds the package with CMake and Ninja against the torch of this environment.

pyproject.toml has the metadata and csrc/sources.cmake the sources. Environment variables:

AUTOMODEL_RMS_NORM_CUDA    ON, OFF, or AUTO (default): ON when torch has CUDA and CUDA_HOME or PATH
                           an nvcc of the same major version, with or without a GPU.
TORCH_CUDA_ARCH_LIST       for example "8.0;9.0" or "9.0+PTX"; default: those of torch from 8.0 on.
AUTOMODEL_RMS_NORM_WERROR  1: warnings are errors.
MAX_JOBS                   compilers run at once.
"""

import logging
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from collections import Counter
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import NoReturn

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.dist_info import dist_info

ROOT = Path(__file__).resolve().parent
PACKAGE = "automodel_rms_norm"
NAMED_ARCHITECTURES = {
    "Ampere": "8.0;8.6+PTX",
    "Ada": "8.9+PTX",
    "Hopper": "9.0+PTX",
    "Blackwell": "10.0;12.0+PTX",
}


def fail(sentence: str) -> NoReturn:
    raise SystemExit(f"\nautomodel-rms-norm: {sentence}\n")


def release(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", text)[:2])


# --- What the build needs -------------------------------------------------------------------------


def find_tool(name: str) -> Path | None:
    """pip's cmake or ninja before the one on PATH."""
    if find_spec(name):
        module = __import__(name)
        folder = getattr(module, "CMAKE_BIN_DIR", None) or getattr(module, "BIN_DIR", "")
        if (path := Path(folder, name)).is_file():
            return path
    path = shutil.which(name)
    if path and name == "cmake":
        text = subprocess.run([path, "--version"], capture_output=True, text=True).stdout
        if release(text) < (3, 18):
            return None
    return Path(path) if path else None


def check_environment() -> None:
    """Stops with a sentence that says what to type. Quick: imports no torch."""
    install = "pip install --no-build-isolation ."
    if not find_spec("torch"):
        fail(
            "it is compiled against the torch that you have, and there is none here: pip's build "
            "isolation hides it, or it is not installed. Run: "
            f"pip install 'torch>=2.6' setuptools wheel cmake ninja pybind11 && {install}"
        )
    if release(version("torch")) < (2, 6):
        fail(f"torch {version('torch')} is too old. Run: pip install 'torch>=2.6' && {install}")

    missing = [name for name in ("cmake", "ninja") if not find_tool(name)]
    missing += [] if find_spec("pybind11") else ["pybind11"]
    needs_wheel = release(version("setuptools")) < (70, 1)  # later ones have bdist_wheel themselves
    missing += ["wheel"] if needs_wheel and not find_spec("wheel") else []
    if missing:
        fail(f"{', '.join(missing)} not found. Run: pip install {' '.join(missing)} && {install}")

    compilers = (
        [shlex.split(os.environ["CXX"])[0]] if os.environ.get("CXX") else ["c++", "g++", "clang++"]
    )
    if not any(map(shutil.which, compilers)):
        fail(f"no C++ compiler found (looked for {', '.join(compilers)}). Run: apt-get install g++")
    if not Path(sysconfig.get_path("include"), "Python.h").is_file():
        fail(
            f"Python.h is not in {sysconfig.get_path('include')}. Run: apt-get install python3-dev "
            f"(or what belongs to {sys.executable})"
        )


def cxx_standard(cpp_extension) -> str:
    """The C++ standard of torch's headers, which is what its own builder of extensions asks for."""
    found = re.findall(r"-std=c\+\+(\d\d)", Path(cpp_extension.__file__).read_text())
    return Counter(found).most_common(1)[0][0] if found else "17"


def cxx_runtime() -> str:
    """The shared libstdc++ in this process, which is torch's once torch is imported.

    It is linked by name because a compiler may link its own statically (some containers' CXX does),
    and two C++ runtimes in a process crash as soon as one formats a number on the other's stream.
    """
    return mapped_library("libstdc++")


def openmp_runtime() -> str:
    """The OpenMP runtime in this process, torch's.

    at::parallel_for is compiled into our library, and on the threads of another runtime it would
    know nothing of torch.set_num_threads.
    """
    return mapped_library("libgomp") or mapped_library("libomp") or mapped_library("libiomp5")


def mapped_library(name: str) -> str:
    """The file of a shared library that this process has loaded, "" if it has none."""
    mapped = (line.split() for line in Path("/proc/self/maps").read_text().splitlines())
    return next((m[-1] for m in mapped if re.search(rf"/{re.escape(name)}[-.\w]*\.so", m[-1])), "")


# --- CUDA or not ----------------------------------------------------------------------------------


def find_nvcc() -> Path | None:
    home = os.environ.get("CUDA_HOME")
    path = shutil.which("nvcc", path=f"{home}/bin" if home else None)
    return Path(path) if path else None


def why_no_cuda(torch_cuda: str | None, nvcc: Path | None) -> str:
    """Empty when the CUDA kernels can be built."""
    if torch_cuda is None:
        return "this torch is built without CUDA"
    if nvcc is None:
        return f"no nvcc in {os.environ.get('CUDA_HOME') or 'PATH (and CUDA_HOME is not set)'}"
    output = subprocess.run([nvcc, "--version"], capture_output=True, text=True).stdout
    found = re.search(r"release (\d+)\.(\d+)", output)
    if not found:
        return f"{nvcc} --version names no release"
    if int(found[1]) != release(torch_cuda)[0]:
        return f"torch is built for CUDA {torch_cuda}, {nvcc} is {found[1]}.{found[2]}"
    return ""


def cuda_architectures(torch_flags: str, nvcc: Path) -> str:
    """For CMake, from TORCH_CUDA_ARCH_LIST or from as much of torch's own list as nvcc knows."""
    requested = os.environ.get("TORCH_CUDA_ARCH_LIST", "").strip()
    if not requested:
        output = subprocess.run([nvcc, "--list-gpu-code"], capture_output=True, text=True).stdout
        flags = [flag for flag in torch_flags.split() if flag in output.split()]
        numbers = [flag.removeprefix("sm_") for flag in flags]
        return ";".join(f"{n}-real" for n in numbers if int(re.match(r"\d+", n)[0]) >= 80)

    for name, value in NAMED_ARCHITECTURES.items():
        requested = re.sub(rf"\b{name}\b(\+PTX)?", value, requested)
    result = []
    for item in re.split(r"[;,\s]+", requested):
        match = re.fullmatch(r"(\d+)\.(\d)([af]?)(\+PTX)?", item)
        if not match:
            fail(
                f"TORCH_CUDA_ARCH_LIST has '{item}'; "
                "write for example TORCH_CUDA_ARCH_LIST='8.0;9.0+PTX'"
            )
        if int(match[1]) < 8:
            fail(
                f"TORCH_CUDA_ARCH_LIST has {item}; the kernels need compute capability 8.0 or later"
            )
        number = match[1] + match[2] + match[3]
        result += [f"{number}-real"] + ([f"{number}-virtual"] if match[4] else [])
    return ";".join(dict.fromkeys(result))


def cuda_options(torch) -> dict[str, object]:
    mode = os.environ.get("AUTOMODEL_RMS_NORM_CUDA", "").upper() or "AUTO"
    if mode not in ("AUTO", "ON", "OFF"):
        fail(f"AUTOMODEL_RMS_NORM_CUDA is '{mode}'; it must be AUTO, ON or OFF")
    nvcc = find_nvcc()
    reason = (
        "AUTOMODEL_RMS_NORM_CUDA=OFF" if mode == "OFF" else why_no_cuda(torch.version.cuda, nvcc)
    )
    if reason and mode == "ON":
        fail(
            f"AUTOMODEL_RMS_NORM_CUDA=ON, but {reason}. Set CUDA_HOME to the toolkit that torch is "
            f"built for ({torch.version.cuda or 'none'}), or AUTOMODEL_RMS_NORM_CUDA=OFF"
        )
    if reason:
        return {"WITH_CUDA": "OFF", "NO_CUDA_REASON": reason}
    return {
        "WITH_CUDA": "ON",
        "CMAKE_CUDA_COMPILER": nvcc,
        "CMAKE_CUDA_ARCHITECTURES": cuda_architectures(torch._C._cuda_getArchFlags() or "", nvcc),
    }


# --- Commands -------------------------------------------------------------------------------------


class CMakeBuild(build_ext):
    def run(self) -> None:
        check_environment()
        import pybind11
        import torch

        # It warns of a machine without a GPU, which is no matter here.
        logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
        from torch.utils import cpp_extension

        cuda = cuda_options(torch)
        cmake = find_tool("cmake")
        build = (
            ROOT
            / "build"
            / f"{sys.implementation.cache_tag}-torch-{torch.__version__}-cuda-{cuda['WITH_CUDA']}"
        )
        package = (
            ROOT / "python" / PACKAGE if self.inplace else Path(self.build_lib).resolve() / PACKAGE
        )
        options = {
            "CMAKE_MAKE_PROGRAM": find_tool("ninja"),
            "CMAKE_BUILD_TYPE": "Debug" if self.debug else "Release",
            "Python_EXECUTABLE": sys.executable,
            "pybind11_DIR": pybind11.get_cmake_dir(),
            "TORCH_VERSION": torch.__version__,
            "TORCH_INCLUDE_DIRS": ";".join(cpp_extension.include_paths()),
            "TORCH_LIBRARY_DIRS": ";".join(cpp_extension.library_paths()),
            "TORCH_CXX_STANDARD": cxx_standard(cpp_extension),
            "TORCH_CXX_RUNTIME": cxx_runtime(),
            "TORCH_OPENMP_RUNTIME": openmp_runtime(),
            "TORCH_CXX11_ABI": int(torch.compiled_with_cxx11_abi()),
            "AUTOMODEL_WERROR": os.environ.get("AUTOMODEL_RMS_NORM_WERROR") or "OFF",
            **cuda,
        }
        jobs = ["--parallel", os.environ["MAX_JOBS"]] if os.environ.get("MAX_JOBS") else []
        definitions = [f"-D{name}={value}" for name, value in options.items()]
        for command in (
            [cmake, "-S", ROOT, "-B", build, "-G", "Ninja", *definitions],
            [cmake, "--build", build, *jobs],
            [cmake, "--install", build, "--prefix", package],
        ):
            sys.stdout.flush()
            if code := subprocess.run(command).returncode:
                fail(
                    f"the build stopped with exit code {code}, see above. It was running: "
                    f"{shlex.join(map(str, command))}"
                )

    def get_source_files(self) -> list[str]:
        """What an sdist has beside the Python package."""
        folders = (ROOT / name for name in ("csrc", "tests", "benchmarks", "docs", ".ci"))
        files = [path for folder in folders for path in folder.rglob("*") if path.is_file()]
        files += [ROOT / name for name in ("CMakeLists.txt", "Makefile", ".clang-format")]
        return [str(path.relative_to(ROOT)) for path in files if "__pycache__" not in path.parts]


class DistInfo(dist_info):
    """Metadata comes before anything is compiled: the place to stop early."""

    def run(self) -> None:
        check_environment()
        super().run()


setup(
    ext_modules=[Extension(f"{PACKAGE}._C", sources=[])],
    cmdclass={"build_ext": CMakeBuild, "dist_info": DistInfo},
)
