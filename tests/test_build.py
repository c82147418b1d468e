"""setup.py: what it builds for, and the sentences with which it stops."""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import setuptools
import torch

ROOT = Path(__file__).parents[1]
INSTALL = "pip install --no-build-isolation ."

pytestmark = pytest.mark.skipif(
    not (ROOT / "setup.py").is_file(), reason="the repository's setup.py is not beside the tests"
)


@pytest.fixture
def build(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """setup.py as a module, without its call of setup(), and no setting from outside."""
    monkeypatch.setattr(setuptools, "setup", lambda **_options: None)
    for name in ("TORCH_CUDA_ARCH_LIST", "AUTOMODEL_RMS_NORM_CUDA", "CUDA_HOME", "CXX"):
        monkeypatch.delenv(name, raising=False)
    spec = importlib.util.spec_from_file_location("automodel_setup", ROOT / "setup.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def fake_nvcc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """Puts an nvcc of a release under CUDA_HOME, which knows sm_75 to sm_90."""

    def make(release: str) -> Path:
        nvcc = tmp_path / "cuda" / "bin" / "nvcc"
        nvcc.parent.mkdir(parents=True, exist_ok=True)
        nvcc.write_text(
            "#!/bin/sh\n"
            'if [ "$1" = --list-gpu-code ]; then echo sm_75 sm_80 sm_86 sm_90; exit; fi\n'
            f'echo "Cuda compilation tools, release {release}, V{release}.48"\n'
        )
        nvcc.chmod(0o755)
        monkeypatch.setenv("CUDA_HOME", str(tmp_path / "cuda"))
        return nvcc

    return make


def torch_of(cuda: str | None, flags: str = "sm_75 sm_80 sm_86 sm_90 sm_100") -> SimpleNamespace:
    """As much of torch as the CUDA settings read. Asking it for a GPU is an AttributeError."""
    return SimpleNamespace(
        version=SimpleNamespace(cuda=cuda),
        _C=SimpleNamespace(_cuda_getArchFlags=lambda: flags),
    )


def sentence(run: Callable[[], object]) -> str:
    with pytest.raises(SystemExit) as stopped:
        run()
    message = str(stopped.value)
    assert message.strip().startswith("automodel-rms-norm: ")
    return message


# --- Architectures --------------------------------------------------------------------------------


@pytest.mark.case("pytorch-28955")
@pytest.mark.parametrize(
    ("requested", "expected"),
    [
        pytest.param("", "80-real;86-real;90-real", id="unset"),
        ("9.0", "90-real"),
        ("8.0+PTX", "80-real;80-virtual"),
        ("8.0;9.0+PTX", "80-real;90-real;90-virtual"),
        ("8.0 9.0", "80-real;90-real"),
        ("8.0, 8.0", "80-real"),
        ("9.0a", "90a-real"),
        ("12.0", "120-real"),
        ("Hopper", "90-real;90-virtual"),
        ("Ampere;9.0", "80-real;86-real;86-virtual;90-real"),
    ],
)
def test_architectures_come_from_the_list_or_torch(
    build: ModuleType,
    fake_nvcc: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
    requested: str,
    expected: str,
) -> None:
    fake_nvcc("13.0")
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", requested)
    options = build.cuda_options(torch_of("13.0"))
    assert options["WITH_CUDA"] == "ON"
    assert options["CMAKE_CUDA_ARCHITECTURES"] == expected


@pytest.mark.parametrize(
    ("requested", "named"),
    [
        ("9", "'9'"),
        ("sm_90", "'sm_90'"),
        ("9.0;Turing", "'Turing'"),
        ("7.5", "7.5"),
        ("8.0;6.1", "6.1"),
    ],
)
def test_a_bad_architecture_is_named(
    build: ModuleType,
    fake_nvcc: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
    requested: str,
    named: str,
) -> None:
    fake_nvcc("13.0")
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", requested)
    message = sentence(lambda: build.cuda_options(torch_of("13.0")))
    assert f"TORCH_CUDA_ARCH_LIST has {named}" in message


# --- CUDA or not ----------------------------------------------------------------------------------


@pytest.mark.case("apex-578")
@pytest.mark.parametrize(
    ("torch_cuda", "nvcc_release", "reason"),
    [
        (None, "13.0", "this torch is built without CUDA"),
        ("13.0", None, "no nvcc in"),
        ("13.0", "12.8", "torch is built for CUDA 13.0"),
    ],
)
def test_auto_builds_for_the_cpu_and_keeps_the_reason(
    build: ModuleType,
    fake_nvcc: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
    torch_cuda: str | None,
    nvcc_release: str | None,
    reason: str,
) -> None:
    if nvcc_release:
        fake_nvcc(nvcc_release)
    else:
        monkeypatch.setenv("PATH", "/nowhere")
    options = build.cuda_options(torch_of(torch_cuda))
    assert options["WITH_CUDA"] == "OFF"
    assert reason in options["NO_CUDA_REASON"]

    # What AUTO leaves out quietly is an error when it was asked for.
    monkeypatch.setenv("AUTOMODEL_RMS_NORM_CUDA", "ON")
    message = sentence(lambda: build.cuda_options(torch_of(torch_cuda)))
    assert "AUTOMODEL_RMS_NORM_CUDA=ON, but" in message
    assert reason in message


def test_off_is_off_with_a_toolkit_at_hand(
    build: ModuleType, fake_nvcc: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_nvcc("13.0")
    monkeypatch.setenv("AUTOMODEL_RMS_NORM_CUDA", "OFF")
    assert build.cuda_options(torch_of("13.0"))["WITH_CUDA"] == "OFF"


@pytest.mark.parametrize("mode", ["yes", "1", "auto "])
def test_a_wrong_cuda_setting_is_named(
    build: ModuleType, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    monkeypatch.setenv("AUTOMODEL_RMS_NORM_CUDA", mode)
    message = sentence(lambda: build.cuda_options(torch_of("13.0")))
    assert "must be AUTO, ON or OFF" in message
    assert mode.upper() in message


# --- What the build needs -------------------------------------------------------------------------


def hide(monkeypatch: pytest.MonkeyPatch, build: ModuleType, *names: str) -> None:
    real = build.find_spec
    monkeypatch.setattr(build, "find_spec", lambda name: None if name in names else real(name))


def test_no_torch_says_what_to_type(build: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    hide(monkeypatch, build, "torch")
    message = sentence(build.check_environment)
    assert "build isolation" in message
    assert INSTALL in message


@pytest.mark.case("flash-attention-821", "TE")
def test_an_old_torch_is_named(build: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    real = build.version
    monkeypatch.setattr(build, "version", lambda name: "2.5.1" if name == "torch" else real(name))
    assert "torch 2.5.1 is too old" in sentence(build.check_environment)


def test_missing_tools_are_all_named(build: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    hide(monkeypatch, build, "cmake", "ninja", "pybind11")
    monkeypatch.setenv("PATH", "/nowhere")
    message = sentence(build.check_environment)
    assert "cmake, ninja, pybind11" in message
    assert INSTALL in message


def test_no_compiler_says_what_to_install(
    build: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "/nowhere/g++ -march=x86-64")
    assert "no C++ compiler found (looked for /nowhere/g++)" in sentence(build.check_environment)


def test_the_sdist_holds_what_the_build_reads(build: ModuleType) -> None:
    files = build.CMakeBuild.get_source_files(SimpleNamespace())
    for name in ("CMakeLists.txt", "csrc/sources.cmake", "csrc/include/automodel/rms_norm.h"):
        assert name in files


# --- pip itself -----------------------------------------------------------------------------------


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A copy of the repository as git has it, so that pip leaves nothing in this one."""
    ignored = shutil.ignore_patterns(
        *(".*", "build", "dist", "*.so", "*.egg-info", "__pycache__", "lib", "_build_config.py")
    )
    copy = Path(shutil.copytree(ROOT, tmp_path / "source", ignore=ignored))
    shutil.rmtree(copy / "python" / "automodel_rms_norm" / "include", ignore_errors=True)
    return copy


def pip(
    *arguments: str, command: str = "install", **environment: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "pip", command, "--no-deps", *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
    )


@pytest.mark.case("flash-attention-821", "TE")
def test_setup_py_stops_where_pip_hides_torch(source: Path) -> None:
    """pip's first call of setup.py under build isolation, without pip's downloads before it."""
    program = (
        "import sys; sys.modules['torch'] = None; sys.argv = ['setup.py', '--quiet', 'dist_info'];"
        "exec(compile(open('setup.py').read(), 'setup.py', 'exec'), {'__name__': '__main__',"
        " '__file__': 'setup.py'})"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=source
    )
    assert done.returncode != 0
    assert INSTALL in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.case("flash-attention-821", "TE")
@pytest.mark.long
def test_pip_with_build_isolation_says_what_to_type(source: Path, tmp_path: Path) -> None:
    """Downloads the build requirements."""
    done = pip("--target", str(tmp_path / "target"), str(source))
    assert done.returncode != 0
    if "No matching distribution" in done.stderr:
        pytest.skip("no package index")
    assert INSTALL in done.stderr + done.stdout


@pytest.mark.long
@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"AUTOMODEL_RMS_NORM_CUDA": "maybe"}, "it must be AUTO, ON or OFF"),
        (
            {"AUTOMODEL_RMS_NORM_CUDA": "ON", "CUDA_HOME": "/nowhere"},
            "AUTOMODEL_RMS_NORM_CUDA=ON, but",
        ),
    ],
)
def test_pip_shows_the_sentence(
    source: Path, tmp_path: Path, environment: dict[str, str], expected: str
) -> None:
    target = str(tmp_path / "target")
    done = pip("--no-build-isolation", "--target", target, str(source), **environment)
    assert done.returncode != 0
    assert expected in done.stderr + done.stdout


# --- The wheel ------------------------------------------------------------------------------------

IN_WHEEL = {
    "__init__.py",
    "_C.pyi",
    "_build_config.py",
    "_build_config.pyi",
    "py.typed",
    "gate/__init__.py",
    "gate/cli.py",
    "gate/commands/check.py",
    "include/automodel/rms_norm.h",
    "lib/libautomodel_rms_norm.so",
}


@pytest.mark.long
def test_a_wheel_is_complete_without_this_machines_paths_and_runs(
    source: Path, tmp_path: Path
) -> None:
    dist, site = tmp_path / "dist", tmp_path / "site"
    arguments = ("--no-build-isolation", "--no-index", "--wheel-dir", str(dist), str(source))
    done = pip(*arguments, command="wheel", AUTOMODEL_RMS_NORM_CUDA="OFF")
    assert done.returncode == 0, done.stderr + done.stdout
    (wheel,) = dist.glob("automodel_rms_norm-*.whl")

    files = {}
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            files[name.removeprefix("automodel_rms_norm/")] = archive.read(name)
    assert set(files) >= IN_WHEEL
    modules = (source / "python" / "automodel_rms_norm").rglob("*.py*")
    assert {
        str(path.relative_to(source / "python" / "automodel_rms_norm")) for path in modules
    } <= (set(files))
    assert len([name for name in files if re.fullmatch(r"_C\.[^/]*\.so", name)]) == 1
    # Nothing of the build beside the package and its metadata.
    assert {name.split("/")[0] for name in archive.namelist()} == {
        "automodel_rms_norm",
        f"automodel_rms_norm-{version('automodel-rms-norm')}.dist-info",
    }
    for folder in (ROOT, tmp_path, Path(torch.__file__).parents[1]):
        assert [name for name, data in files.items() if bytes(folder) in data] == [], folder

    done = pip("--no-index", "--target", str(site), str(wheel))
    assert done.returncode == 0, done.stderr
    program = (
        "import torch, automodel_rms_norm as arn; print(arn.__file__);"
        "print(arn.build_info()['library'], arn.build_info()['no_cuda_reason']);"
        "print(torch.equal(arn.rms_norm(torch.ones(2, 96), None, 0.0), torch.ones(2, 96)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(site)},
    )
    package = site / "automodel_rms_norm"
    assert done.stderr == ""
    assert done.stdout.splitlines() == [
        str(package / "__init__.py"),
        f"{package / 'lib' / 'libautomodel_rms_norm.so'} AUTOMODEL_RMS_NORM_CUDA=OFF",
        "True",
    ]
