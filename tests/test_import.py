"""Importing the package: quick, quiet, and with errors that say what to do."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import automodel_rms_norm as arn
import pytest
import torch
from automodel_rms_norm import _build_config, _library


def python(
    program: str, *, environment: dict[str, str] | None = None, isolated: bool = False
) -> subprocess.CompletedProcess[str]:
    """Runs `program` in a fresh interpreter."""
    return subprocess.run(
        [sys.executable, *(["-S"] if isolated else []), "-c", textwrap.dedent(program)],
        capture_output=True,
        text=True,
        env={**os.environ, **(environment or {})},
    )


def succeed(program: str, **options: object) -> str:
    done = python(program, **options)
    assert done.returncode == 0, done.stderr
    return done.stdout


# --- Nothing happens on import --------------------------------------------------------------------


@pytest.mark.case("quack-PR-85")
def test_import_initialises_no_cuda() -> None:
    assert succeed("""
        import automodel_rms_norm, torch
        print(torch.cuda.is_initialized())
    """).startswith("False")


@pytest.mark.case("quack-PR-85")
@pytest.mark.cuda
def test_cuda_works_in_a_child_forked_after_import() -> None:
    assert "child 0" in succeed("""
        import os, sys
        import automodel_rms_norm as arn
        import torch
        pid = os.fork()
        if pid == 0:
            x = torch.randn(4, 96, device="cuda")
            y = arn.rms_norm(x, None, 1e-5).cpu()
            os._exit(0 if torch.equal(y, arn.rms_norm(x.cpu(), None, 1e-5)) else 1)
        print("child", os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    """)


def test_the_cpu_op_works_in_a_child_forked_after_import() -> None:
    """The parent has not run it yet: torch's thread pool does not survive a fork."""
    assert "child 0" in succeed("""
        import os
        import automodel_rms_norm as arn
        import torch
        pid = os.fork()
        if pid == 0:
            y = arn.rms_norm(torch.ones(4, 96), None, 0.0)
            os._exit(0 if torch.equal(y, torch.ones(4, 96)) else 1)
        print("child", os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    """)


def test_import_leaves_torchs_settings_alone() -> None:
    assert (
        succeed("""
        import sys, warnings
        import torch
        def settings():
            return (
                torch.get_num_threads(), torch.get_num_interop_threads(),
                torch.get_default_dtype(), torch.get_default_device(), torch.is_grad_enabled(),
                torch.are_deterministic_algorithms_enabled(), torch.initial_seed(),
                torch.backends.cudnn.enabled, torch.get_float32_matmul_precision(),
                torch.is_autocast_enabled("cpu"),
            )
        torch.manual_seed(3)
        before = settings()
        warnings.simplefilter("error")
        import automodel_rms_norm
        assert settings() == before, (before, settings())
        heavy = {"transformers", "triton", "torch._inductor", "matplotlib", "rich"}
        print(sorted(heavy & set(sys.modules)))
    """)
        == "[]\n"
    )


def test_import_is_quick_beside_torchs() -> None:
    """Best of three, for the machine may be busy."""
    program = """
        import time, torch
        begin = time.perf_counter()
        import automodel_rms_norm
        print(time.perf_counter() - begin)
    """
    assert min(float(succeed(program)) for _ in range(3)) < 0.5


@pytest.mark.parametrize("before", ["", "importlib.util.find_spec('torch.distributed.tensor')"])
def test_the_sharding_rules_come_with_dtensor(before: str) -> None:
    """Also where somebody has looked for it without importing it."""
    program = f"""
        import importlib.util, sys
        import automodel_rms_norm, torch
        {before}
        print("torch.distributed.tensor" in sys.modules)
        from torch.distributed.tensor import DTensor
        propagator = DTensor._op_dispatcher.sharding_propagator
        print(torch.ops.automodel.rms_norm.default in propagator.op_strategy_funcs)
    """
    assert succeed(program) == "False\nTrue\n"


def test_subnormal_numbers_survive_import() -> None:
    """Some libraries are linked with a start-up routine that flushes them to zero."""
    assert (
        succeed("""
        import automodel_rms_norm, torch
        print((torch.tensor(1e-40) * 1.0).item() > 0)
    """)
        == "True\n"
    )


# --- Against another torch ------------------------------------------------------------------------


@pytest.mark.case("flash-attention-821", "TE", "pytorch-165151", "sglang-PR-30562")
@pytest.mark.parametrize("built", ["2.6.0+cu124", "3.0.0", "2.1.0"])
def test_another_torch_is_named_with_the_one_of_the_build(built: str) -> None:
    with pytest.raises(ImportError) as raised:
        _library.check_torch(built, None)
    message = str(raised.value)
    assert built in message
    assert torch.__version__ in message
    assert "pip install --no-build-isolation" in message


@pytest.mark.parametrize("patch", ["2.11.0", "2.11.9", "2.11.1+cpu"])
def test_patch_releases_and_local_versions_are_one_interface(
    patch: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "__version__", "2.11.0+cu130")
    _library.check_torch(patch, None)


@pytest.mark.parametrize("installed", [None, "12.8"])
def test_cuda_kernels_need_a_torch_of_their_cuda(
    installed: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.version, "cuda", installed)
    with pytest.raises(ImportError) as raised:
        _library.check_torch(torch.__version__, "13.0")
    for part in ("CUDA 13.0", installed or "no CUDA", torch.__version__):
        assert part in str(raised.value)


def test_the_same_cuda_major_version_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.4")
    _library.check_torch(torch.__version__, "13.0")


@pytest.mark.case("pytorch-165151", "sglang-PR-30562", "flash-attention-821", "TE")
def test_a_torch_swapped_after_the_install_stops_the_import() -> None:
    """With both versions, before the library is loaded: no 'operator does not exist'."""
    done = python("""
        import torch
        torch.__version__ = "2.9.1+cu128"
        import automodel_rms_norm
    """)
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("ImportError: automodel_rms_norm was built against torch ")
    assert "2.9.1+cu128" in last
    assert _build_config.TORCH_VERSION in last
    assert "operator" not in done.stderr


def test_a_source_folder_is_not_taken_for_an_installation(tmp_path: Path) -> None:
    package = Path(arn.__file__).parent
    copy = tmp_path / "automodel_rms_norm"
    copy.mkdir()
    for file in package.glob("*.py"):
        if file.name != "_build_config.py":
            (copy / file.name).write_text(file.read_text())
    # -S keeps an editable install's finder away; torch's folder is given by hand.
    done = python(
        "import automodel_rms_norm",
        isolated=True,
        environment={"PYTHONPATH": os.pathsep.join([str(tmp_path), *site_folders()])},
    )
    assert done.returncode == 1
    assert "ImportError: automodel_rms_norm has not been built: this is its source folder" in (
        done.stderr
    )
    assert "pip install --no-build-isolation ." in done.stderr


def site_folders() -> list[str]:
    return [path for path in sys.path if "site-packages" in path or "dist-packages" in path]


# --- What the build says of itself ----------------------------------------------------------------


def test_build_info_has_plain_values_of_this_build() -> None:
    info = arn.build_info()
    assert {
        "version",
        "torch",
        "cuda",
        "cuda_architectures",
        "no_cuda_reason",
        "compiler",
        "cxx_standard",
        "cpu_isas_compiled",
        "cpu_isas_supported",
        "cpu_isa",
        "contract",
        "library",
    } <= set(info)
    assert info["version"] == arn.__version__
    assert info["torch"] == _build_config.TORCH_VERSION
    assert info["torch"].split(".")[:2] == torch.__version__.split(".")[:2]
    assert bool(info["cuda"]) == bool(info["cuda_architectures"]) != bool(info["no_cuda_reason"])
    assert Path(info["library"]).is_file()
    assert info["contract"]["version"] == 1
    assert set(info["cpu_isas_supported"]) <= set(info["cpu_isas_compiled"])
    assert info["cpu_isa"] in info["cpu_isas_supported"]
    assert all(
        architecture.startswith(("sm_", "compute_")) for architecture in info["cuda_architectures"]
    )


# --- AUTOMODEL_RMS_NORM_CPU -----------------------------------------------------------------------

NORM = """
    import torch
    import automodel_rms_norm as arn
    x = torch.arange(1.0, 97.0).reshape(2, 48)
    y = arn.rms_norm(x, None, 1e-5)
    print(arn.build_info()["cpu_isa"], hash(tuple(y.view(torch.int32).flatten().tolist())))
"""


@pytest.mark.parametrize("isa", arn.build_info()["cpu_isas_supported"])
def test_the_environment_chooses_the_instruction_set_and_no_bits(isa: str) -> None:
    chosen, bits = succeed(NORM, environment={"AUTOMODEL_RMS_NORM_CPU": isa}).split()
    _, default_bits = succeed(NORM, environment={"AUTOMODEL_RMS_NORM_CPU": ""}).split()
    assert chosen == isa
    assert bits == default_bits


def test_an_unknown_instruction_set_is_an_error_with_the_choices() -> None:
    done = python(NORM, environment={"AUTOMODEL_RMS_NORM_CPU": "avx1024"})
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert "avx1024" in last
    assert ", ".join(arn.build_info()["cpu_isas_supported"]) in last


# --- A CPU-only build -----------------------------------------------------------------------------


@pytest.mark.case("apex-578", "apex-239")
@pytest.mark.skipif(bool(arn.build_info()["cuda"]), reason="this build has CUDA kernels")
def test_a_cpu_only_build_says_why_and_works() -> None:
    assert arn.build_info()["no_cuda_reason"]
    assert torch.equal(arn.rms_norm(torch.ones(2, 96), None, 0.0), torch.ones(2, 96))


@pytest.mark.case("apex-578")
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU on this machine")
@pytest.mark.skipif(bool(arn.build_info()["cuda"]), reason="this build has CUDA kernels")
def test_a_cuda_tensor_in_a_cpu_only_build_is_told_so() -> None:
    x = torch.ones(2, 96, device="cuda")
    with pytest.raises(NotImplementedError, match=r"built without CUDA kernels; install it again"):
        arn.rms_norm(x, None, 1e-5)


@pytest.mark.case("apex-239")
@pytest.mark.cuda
def test_cpu_tensors_work_in_a_cuda_build() -> None:
    x = torch.randn(4, 96)
    y = arn.rms_norm(x.cuda(), None, 1e-5).cpu()
    arn.testing.assert_bitwise_equal(y, arn.rms_norm(x, None, 1e-5), "y")


def test_the_library_shares_torchs_cxx_runtime() -> None:
    """Also where the compiler links its own: two of them crash on a number in a message."""
    assert b"libstdc++.so.6" in Path(arn.build_info()["library"]).read_bytes()


@pytest.mark.parametrize("binary", ["op library", "Python module"])
def test_the_binaries_hold_no_path_of_this_machine(binary: str) -> None:
    file = arn.build_info()["library"] if binary == "op library" else arn._C.__file__
    data = Path(file).read_bytes()
    for folder in (Path(__file__).parents[1], Path(torch.__file__).parents[1]):
        assert bytes(folder) not in data
