"""P2 for programs that leave Python: torch.export, AOTInductor packages, and C++."""

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import added
import automodel_rms_norm as arn
import pytest
import support
import torch
from automodel_rms_norm.testing import assert_bitwise_equal
from torch import Tensor, nn
from torch.utils import cpp_extension

EPS = 1e-5
HIDDEN = 96
ROOT = Path(__file__).parents[1]

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def norm_module(device: torch.device, zero_centered_gamma: bool = False) -> arn.RMSNorm:
    module = arn.RMSNorm(HIDDEN, device=device, zero_centered_gamma=zero_centered_gamma)
    with torch.no_grad():
        module.weight.copy_(support.make_inputs(HIDDEN, device=device).weight)
    return module


class Model(nn.Module):
    """Pointwise neighbours of one rounding each around the norm."""

    def __init__(self, norm: arn.RMSNorm) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x * 0.5) * 2.0


def exported(module: nn.Module, device: torch.device) -> torch.export.ExportedProgram:
    x = support.make_inputs(2, 5, HIDDEN, device=device).x
    dims = {0: torch.export.Dim("batch"), 1: torch.export.Dim("length")}
    with torch.no_grad():
        return torch.export.export(module, (x,), dynamic_shapes=({**dims},), strict=False)


def ops_of(program: torch.export.ExportedProgram) -> list[str]:
    targets = [node.target for node in program.graph.nodes if node.op == "call_function"]
    return [str(target) for target in targets if "automodel" in str(target)]


SHAPES = [(2, 5), (7, 3), (1, 1), (64, 33)]


# --- torch.export ---------------------------------------------------------------------------------


@pytest.mark.case("export-several")
@pytest.mark.parametrize("zero_centered_gamma", [False, True])
@pytest.mark.parametrize("strict", [False, True])
def test_export_with_a_dynamic_batch_keeps_the_op_and_its_bits(
    device: torch.device, strict: bool, zero_centered_gamma: bool
) -> None:
    module = norm_module(device, zero_centered_gamma)
    x = support.make_inputs(2, 5, HIDDEN, device=device).x
    dims = {0: torch.export.Dim("batch"), 1: torch.export.Dim("length")}
    program = torch.export.export(module, (x,), dynamic_shapes=(dims,), strict=strict)
    assert ops_of(program) == ["automodel.rms_norm.default"]
    for shape in SHAPES:
        x = support.make_inputs(*shape, HIDDEN, device=device).x
        assert_bitwise_equal(program.module()(x).detach(), module(x).detach(), f"y of {shape}")


def test_decompositions_keep_the_op(device: torch.device) -> None:
    module = norm_module(device)
    program = exported(module, device).run_decompositions()
    (op,) = ops_of(program)
    assert op in ("automodel.rms_norm.default", "automodel.rms_norm_forward.default")
    x = support.make_inputs(7, 3, HIDDEN, device=device).x
    assert_bitwise_equal(program.module()(x).detach(), module(x).detach(), "y")


def test_an_exported_program_survives_a_file(device: torch.device, tmp_path: Path) -> None:
    module = norm_module(device)
    torch.export.save(exported(module, device), tmp_path / "norm.pt2")
    program = torch.export.load(tmp_path / "norm.pt2")
    x = support.make_inputs(7, 3, HIDDEN, device=device).x
    assert_bitwise_equal(program.module()(x).detach(), module(x).detach(), "y")


def test_export_for_training_has_the_gradients_of_eager(device: torch.device) -> None:
    module = norm_module(device)
    inputs = support.make_inputs(2, 5, HIDDEN, device=device)
    program = torch.export.export(module, (inputs.x,)).module()
    program(inputs.x).backward(inputs.grad_y)
    expected = support.forward_backward(
        arn.rms_norm, support.Inputs(inputs.x, module.weight, inputs.grad_y)
    )
    (weight,) = program.parameters()
    assert_bitwise_equal(weight.grad, expected.grad_weight, "grad_weight")


def test_make_fx_of_a_training_step_holds_the_two_ops(device: torch.device) -> None:
    inputs = support.make_inputs(2, 5, HIDDEN, device=device)

    def step(x: Tensor, weight: Tensor, grad_y: Tensor) -> tuple[Tensor, ...]:
        y, vjp = torch.func.vjp(lambda x, w: arn.rms_norm(x, w, EPS), x, weight)
        return y, *vjp(grad_y)

    graph = torch.fx.experimental.proxy_tensor.make_fx(step)(*inputs)
    ops = [str(n.target) for n in graph.graph.nodes if "automodel" in str(n.target)]
    assert ops == ["automodel.rms_norm_forward.default", "automodel.rms_norm_backward.default"]
    expected = support.forward_backward(arn.rms_norm, inputs)
    for actual, name in zip(graph(*inputs), expected._fields, strict=True):
        assert_bitwise_equal(actual, getattr(expected, name), name)


# --- AOTInductor ----------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def package(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Model, torch.device]:
    """An AOTInductor package of a model with the op, compiled once."""
    if request.param == "cuda" and (reason := support.why_no_cuda()):
        pytest.skip(reason)
    device = torch.device(request.param)
    model = Model(norm_module(device))
    path = tmp_path_factory.mktemp("aoti") / "model.pt2"
    torch._inductor.aoti_compile_and_package(exported(model, device), package_path=str(path))
    return path, model, device


@pytest.mark.case("export-several")
def test_an_aotinductor_package_has_the_bits_of_eager(
    package: tuple[Path, Model, torch.device],
) -> None:
    path, model, device = package
    loaded = torch._inductor.aoti_load_package(str(path))
    for shape in SHAPES:
        x = support.make_inputs(*shape, HIDDEN, device=device).x
        with torch.no_grad():
            assert_bitwise_equal(loaded(x), model(x), f"y of {shape}")


@pytest.mark.case("export-several")
def test_an_aotinductor_package_run_by_cpp_has_the_bits_of_eager(
    package: tuple[Path, Model, torch.device], build: Callable[[str], Path], tmp_path: Path
) -> None:
    path, model, device = package
    program = build("run_package")
    for shape in SHAPES:
        x = support.make_inputs(*shape, HIDDEN, device=device).x
        (y,) = run(program, [str(path)], (x,), tmp_path)[1]
        with torch.no_grad():
            assert_bitwise_equal(y, model(x), f"y of {shape}")


# --- C++ ------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def build(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Compiles tests/programs/NAME.cpp once, against torch's headers and this package's."""
    compiler = shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    folder = tmp_path_factory.mktemp("programs")

    def compile_program(name: str) -> Path:
        program = folder / name
        if program.exists():
            return program
        libraries = ["torch", "torch_cpu", "c10"]
        if arn.build_info()["cuda"]:
            libraries += ["torch_cuda", "c10_cuda"]
        subprocess.run(
            [
                compiler,
                f"-std=c++{arn.build_info()['cxx_standard']}",
                "-Wall",
                "-Wextra",
                "-Werror",
                f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
                f"-I{ROOT / 'csrc' / 'include'}",
                *(f"-isystem{path}" for path in cpp_extension.include_paths()),
                str(ROOT / "tests" / "programs" / f"{name}.cpp"),
                f"-o{program}",
                # RPATH, not RUNPATH: the op library that the program opens finds torch by it.
                "-Wl,--disable-new-dtags,--no-as-needed",
                *(f"-L{path}" for path in cpp_extension.library_paths()),
                *(f"-Wl,-rpath,{path}" for path in cpp_extension.library_paths()),
                *(f"-l{library}" for library in libraries),
                "-ldl",
            ],
            check=True,
        )
        return program

    return compile_program


def run(
    program: Path, arguments: list[str], tensors: tuple[Tensor, ...], folder: Path
) -> tuple[str, list[Tensor]]:
    """stdout and the tensors that `program LIBRARY *arguments INPUTS OUTPUTS` writes."""
    inputs, outputs = folder / "inputs.pt", folder / "outputs.pt"
    torch.save(tuple(tensors), inputs)
    done = subprocess.run(
        [program, arn.build_info()["library"], *arguments, inputs, outputs],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout, list(torch.load(outputs))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_cpp_has_the_bits_of_python(
    device: torch.device, dtype: torch.dtype, build: Callable[[str], Path], tmp_path: Path
) -> None:
    inputs = support.make_inputs(5, 7, HIDDEN, dtype=dtype, device=device)
    stdout, outputs = run(build("call_op"), [], inputs, tmp_path)
    assert "automodel::rms_norm is not registered: load libautomodel_rms_norm.so" in stdout
    expected = [
        tensor
        for zero_centered_gamma in (False, True)
        for tensor in support.forward_backward(arn.rms_norm, inputs, EPS, zero_centered_gamma)
    ]
    expected.append(arn.rms_norm(inputs.x, None, EPS))
    x, weight, grad_y = inputs
    residual_added = added.Inputs(x, x, weight, grad_y, grad_y)
    y, total, grad_x, _, grad_weight = added.forward_backward(arn.add_rms_norm, residual_added)
    expected += [y, total, grad_x, grad_weight]
    names = ["y", "grad_x", "grad_weight"] * 2 + ["y without weight"]
    names += [f"{name} of add_rms_norm" for name in ("y", "sum", "grad_x", "grad_weight")]
    for name, actual, wanted in zip(names, outputs, expected, strict=True):
        assert_bitwise_equal(actual, wanted, name)


def test_the_installed_header_is_the_repositorys() -> None:
    installed = Path(arn.__file__).parent / "include" / "automodel" / "rms_norm.h"
    source = ROOT / "csrc" / "include" / "automodel" / "rms_norm.h"
    assert installed.read_text() == source.read_text()
