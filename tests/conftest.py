"""Devices as a fixture: a test that takes `device` runs on the CPU and on a GPU if there is one."""

from collections.abc import Callable, Iterator

import automodel_rms_norm as arn
import pytest
import support
import torch


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def device(request: pytest.FixtureRequest) -> torch.device:
    if request.param == "cuda" and (reason := support.why_no_cuda()):
        pytest.skip(reason)
    return torch.device(request.param)


@pytest.fixture(
    params=[
        *arn.build_info()["cpu_isas_compiled"],
        pytest.param("cuda", marks=pytest.mark.cuda),
    ]
)
def implementation(request: pytest.FixtureRequest) -> Iterator[torch.device]:
    """The device of each implementation of the kernels: every CPU instruction set, and CUDA."""
    if request.param == "cuda":
        if reason := support.why_no_cuda():
            pytest.skip(reason)
        yield torch.device("cuda")
        return
    info = arn.build_info()
    if request.param not in info["cpu_isas_supported"]:
        pytest.skip(f"this CPU lacks {request.param}")
    arn.ops._C.force_isa(request.param)
    yield torch.device("cpu")
    arn.ops._C.force_isa(info["cpu_isa"])


@pytest.fixture
def set_num_threads() -> Iterator[Callable[[int], None]]:
    """torch.set_num_threads, undone after the test."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.fixture
def fresh_dynamo() -> Iterator[None]:
    """Nothing compiled before this test is reused in it, nor after it."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Tests marked cuda or multi_gpu on their own, without the fixture."""
    needs_gpus = 2 if item.get_closest_marker("multi_gpu") else 0
    if item.get_closest_marker("cuda"):
        needs_gpus = max(needs_gpus, 1)
    if needs_gpus and (reason := support.why_not_gpus(needs_gpus)):
        pytest.skip(reason)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "case(*reports): public bug reports that the test covers")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """The reports that a `case` marker names become part of the test's id."""
    marker = metafunc.definition.get_closest_marker("case")
    if marker:
        metafunc.fixturenames.append("case")
        metafunc.parametrize("case", ["+".join(marker.args)])
