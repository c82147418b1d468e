"""integrations.megatron with a released megatron-core wheel: megatron_checks.py."""

import functools
import importlib.util
import sys
from pathlib import Path

import pytest
import ranks
import wheels
from automodel_rms_norm.integrations import megatron
from automodel_rms_norm.integrations._patching import IntegrationError
from wheels import wheel_cache as wheel_cache

CHECKS = ranks.names("megatron_checks")


@functools.cache
def reports(path: Path) -> dict[str, str]:
    return ranks.run("megatron_checks", CHECKS, 1, paths=[path])


@pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton, which Megatron needs, is missing"
)
@pytest.mark.parametrize("name", CHECKS)
def test_release(name: str, wheel_cache: Path) -> None:
    report = reports(wheels.unpacked("megatron-core", "0.16.1", wheel_cache))[name]
    assert not report, report


def test_without_the_package_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "megatron", None)
    with pytest.raises(
        IntegrationError, match=r"cannot import megatron.*pip install megatron-core"
    ):
        megatron.enable()
