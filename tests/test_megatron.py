"""integrations.megatron with a released megatron-core wheel: megatron_checks.py."""

import functools
import importlib.util
import platform
import sys
from pathlib import Path

import pytest
import ranks
import wheels
from automodel_rms_norm.integrations import IntegrationError, megatron
from wheels import wheel_cache as wheel_cache

CHECKS = ranks.names("megatron_checks")
# The newest release in every run, the others with the long tests.
VERSIONS = [
    pytest.param("0.16.1", marks=pytest.mark.long),
    pytest.param("0.17.1", marks=pytest.mark.long),
    pytest.param("0.18.2", marks=pytest.mark.long),
    "0.19.2",
]
# From 0.17 on they are for later Pythons; what is checked here runs on every one.
ANY_PYTHON = ["--only-binary=:all:", "--python-version=3.12"]
ANY_PYTHON += [f"--platform=manylinux_2_28_{platform.machine()}"]


@functools.cache
def reports(path: Path, backend: str) -> dict[str, str]:
    return ranks.run("megatron_checks", CHECKS, 1, backend, [path])


@pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton, which Megatron needs, is missing"
)
@pytest.mark.parametrize("name", CHECKS)
@pytest.mark.parametrize("backend", ranks.BACKENDS)
@pytest.mark.parametrize("version", VERSIONS)
def test_release(version: str, backend: str, name: str, wheel_cache: Path) -> None:
    folder = wheels.unpacked("megatron-core", version, wheel_cache, *ANY_PYTHON)
    report = reports(folder, backend)[name]
    assert not report, report


def test_without_the_package_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "megatron", None)
    with pytest.raises(
        IntegrationError, match=r"cannot import megatron.*pip install megatron-core"
    ):
        megatron.enable()
