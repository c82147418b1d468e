"""integrations.automodel with released nemo-automodel wheels: automodel_checks.py."""

import functools
import importlib.metadata
import importlib.util
import os
import subprocess
import sys
import types
from pathlib import Path

import pytest
import ranks
import torch
import wheels
from automodel_rms_norm.integrations import IntegrationError, automodel
from automodel_rms_norm.integrations._patching import require
from wheels import wheel_cache as wheel_cache

UTILS = automodel._UTILS
CHECKS = ranks.names("automodel_checks")
# The newest release in every run, the others with the long tests.
VERSIONS = [
    pytest.param("0.4.0", marks=pytest.mark.long),
    pytest.param("0.5.0", marks=pytest.mark.long),
    pytest.param("0.6.0", marks=pytest.mark.long),
    "0.7.0",
]
# What they require and call in a way that later transformers refuse.
TRANSFORMERS_OF_THE_LLAMA = {"0.4.0": "5.5.0", "0.5.0": "5.8.1"}


@functools.cache
def reports(path: Path, backend: str) -> dict[str, str]:
    return ranks.run("automodel_checks", CHECKS, 1 if backend == "nccl" else 2, backend, [path])


needs_transformers = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="transformers is not installed"
)


@needs_transformers
@pytest.mark.parametrize("name", CHECKS)
@pytest.mark.parametrize("backend", ranks.BACKENDS)
@pytest.mark.parametrize("version", VERSIONS)
def test_release(version: str, backend: str, name: str, wheel_cache: Path) -> None:
    installed = importlib.metadata.version("transformers")
    required = TRANSFORMERS_OF_THE_LLAMA.get(version, installed)
    if name == "check_a_model_of_automodel" and installed != required:
        pytest.skip(f"the Llama of {version} needs transformers {required}, found {installed}")
    report = reports(wheels.unpacked("nemo-automodel", version, wheel_cache), backend)[name]
    assert not report, report


@needs_transformers
@pytest.mark.parametrize("name", ranks.names("automodel_norm_checks"))
def test_the_table_of_other_norms(name: str, wheel_cache: Path) -> None:
    path = wheels.unpacked("nemo-automodel", "0.7.0", wheel_cache)
    report = ranks.run("automodel_norm_checks", [name], 1, paths=[path])[name]
    assert not report, report


THEIRS = """
import torch
from nemo_automodel.components.models.common.utils import initialize_rms_norm_module

def test_norms():
    x, weight = torch.randn(8, 96).bfloat16(), torch.rand(96).bfloat16()
    for kind in ("torch_fp32", "torch"):
        norm = initialize_rms_norm_module(kind, 96)
        norm.weight.data = weight
        assert torch.equal(norm(x), torch.ops.automodel.rms_norm(x, weight, norm.eps))

def test_another():
    pass
"""


def test_the_plugin_puts_the_op_into_their_tests(wheel_cache: Path, tmp_path: Path) -> None:
    (tmp_path / "test_theirs.py").write_text(THEIRS)
    paths = [wheels.unpacked("nemo-automodel", "0.7.0", wheel_cache), Path(__file__).parent]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "automodel_plugin", "test_theirs.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths))},
        capture_output=True,
        text=True,
    )
    assert "2 passed" in done.stdout, done.stdout + done.stderr
    assert "the op was called 2 times, by 1 tests" in done.stdout


# --- What is not there, or not known --------------------------------------------------------------


FAKE = """
import torch

def _float32_rms_norm_fwd(x, weight, eps):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight

class Float32RMSNorm:
    def forward(self, x): return _float32_rms_norm_fwd(x, self.weight, self.eps)
"""


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """A package in the place of AutoModel's, whose norm can be changed."""
    names = UTILS.split(".")
    for depth in range(1, len(names) + 1):
        name = ".".join(names[:depth])
        module = types.ModuleType(name)
        module.__path__ = []
        monkeypatch.setitem(sys.modules, name, module)
    exec(FAKE, vars(module))
    return module


def assert_refused(fake: types.ModuleType, message: str) -> None:
    before = dict(vars(fake))
    with pytest.raises(IntegrationError, match=message):
        automodel.enable()
    assert vars(fake) == before


def test_without_the_package_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "nemo_automodel", None)
    with pytest.raises(IntegrationError, match=r"cannot import nemo_automodel.*pip install nemo"):
        automodel.enable()


def test_a_package_without_the_module_is_named_with_its_version():
    version = importlib.metadata.version("pytest")
    with pytest.raises(
        IntegrationError, match=rf"No module named.* {version} is installed: take a"
    ):
        require("pytest.no_such_module", "pytest")


def test_a_release_without_the_norm_is_refused(fake):
    del fake._float32_rms_norm_fwd
    assert_refused(fake, "cannot be patched: .* has no Float32RMSNorm with _float32_rms_norm_fwd")


def test_a_norm_with_other_arguments_is_refused(fake):
    fake._float32_rms_norm_fwd = lambda x, weight, bias, eps: x
    assert_refused(fake, r"takes \(x, weight, bias, eps\), not \(x, weight, eps\)")


def test_a_norm_that_does_not_call_the_function_is_refused(fake):
    fake.Float32RMSNorm.forward = lambda self, x: x
    assert_refused(fake, "forward does not call _float32_rms_norm_fwd")


@pytest.mark.parametrize(
    "function",
    [
        lambda x, weight, eps: x,
        lambda x, weight, eps: torch.nn.functional.rms_norm(x, weight.shape, weight + 1, eps),
        lambda x, weight, eps: torch.nn.functional.rms_norm(x, weight.shape, weight),
        lambda x, weight, eps: x.nothing,
    ],
    ids=["nothing", "weight + 1", "another eps", "an error"],
)
def test_another_formula_is_refused(fake, function):
    fake._float32_rms_norm_fwd = function
    assert_refused(fake, r"computes something else than x \* rstd \* weight")


def test_a_function_that_cannot_be_read_is_refused(fake):
    fake._float32_rms_norm_fwd = max
    assert_refused(fake, r"takes \(.*\), not \(x, weight, eps\)")


def test_a_norm_without_python_code_is_refused(fake):
    fake.Float32RMSNorm.forward = functools.partial(lambda self, x: x)
    assert_refused(fake, "forward does not call _float32_rms_norm_fwd")


def test_a_decorated_norm_is_read_below_its_decorators(fake):
    forward = fake.Float32RMSNorm.forward
    fake.Float32RMSNorm.forward = functools.wraps(forward)(lambda self, x: forward(self, x))
    with automodel.enabled():
        assert fake._float32_rms_norm_fwd is automodel._float32_rms_norm_fwd


def test_it_is_enabled_and_disabled_once(fake, caplog):
    caplog.set_level("INFO")
    before = fake._float32_rms_norm_fwd
    automodel.enable()
    automodel.enable()
    assert len(caplog.messages) == 1
    assert f"replaced {UTILS}._float32_rms_norm_fwd" in caplog.messages[0]
    norm = fake.Float32RMSNorm()
    norm.weight, norm.eps = torch.rand(8), 1e-5
    x = torch.randn(2, 8)
    assert torch.equal(norm.forward(x), torch.ops.automodel.rms_norm(x, norm.weight, 1e-5))
    automodel.disable()
    automodel.disable()
    assert fake._float32_rms_norm_fwd is before


def test_a_module_that_was_reloaded_is_patched_again(fake):
    with automodel.enabled():
        exec(FAKE, vars(fake))
        reloaded = fake._float32_rms_norm_fwd
        automodel.enable()
        assert fake._float32_rms_norm_fwd is automodel._float32_rms_norm_fwd
    assert fake._float32_rms_norm_fwd is reloaded


def test_what_somebody_else_put_there_since_stays(fake, caplog):
    automodel.enable()
    other = functools.partial(fake._float32_rms_norm_fwd)
    fake._float32_rms_norm_fwd = other
    automodel.disable()
    assert fake._float32_rms_norm_fwd is other
    assert caplog.messages == [
        f"{UTILS}._float32_rms_norm_fwd has been replaced since and is left as it is"
    ]


def test_the_context_manager_leaves_things_as_they_were(fake):
    before = fake._float32_rms_norm_fwd
    with automodel.enabled():
        assert fake._float32_rms_norm_fwd is not before
        with automodel.enabled():
            automodel.disable()
        assert fake._float32_rms_norm_fwd is not before
    assert fake._float32_rms_norm_fwd is before
