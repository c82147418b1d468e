"""examples/reproduce_3106.py: what it says of a CPU, of a norm that has the fault, and without."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor

PATH = Path(__file__).parents[1] / "examples" / "reproduce_3106.py"
TINY = ["--rows", "4", "--hidden", "96", "--dtype", "float32", "--runs", "1"]


@pytest.fixture
def reproducer() -> ModuleType:
    spec = importlib.util.spec_from_file_location("reproduce_3106", PATH)
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "reproduce_3106", module)
        spec.loader.exec_module(module)
        with torch._inductor.config.patch(force_disable_caches=False):
            yield module


@pytest.mark.case("Automodel-3106")
@pytest.mark.usefixtures("fresh_dynamo")
def test_on_a_cpu_it_is_not_reproduced(
    reproducer: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    assert reproducer.main([*TINY, "--device", "cpu", "--runs", "0"]) == 0
    said = capsys.readouterr().out
    assert "eager, y of grad against no_grad: same bits" in said
    assert "grad 0, no_grad 0: same bits" in said
    assert "not reproduced" in said


@pytest.mark.cuda
@pytest.mark.case("Automodel-3106")
@pytest.mark.usefixtures("fresh_dynamo")
def test_on_a_gpu_it_is_reproduced(
    reproducer: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    assert reproducer.main(["--device", "cuda", "--runs", "0"]) == 1
    said = capsys.readouterr().out
    assert "eager, y of grad against no_grad: same bits" in said
    assert "grad 0, no_grad 0: same bits" in said
    assert "\nreproduced: 2 of 4 pairs of candidates" in said


def test_a_norm_with_another_answer_under_no_grad_is_seen(
    reproducer: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        y = reproducer.rms_norm(x, weight, eps)
        return y if torch.is_grad_enabled() else y.nextafter(torch.zeros_like(y))

    monkeypatch.setattr(reproducer, "compiled", lambda: norm)
    assert reproducer.main([*TINY, "--device", "cpu"]) == 1
    said = capsys.readouterr().out
    assert "compilation 0: 384 of 384 elements differ, by up to " in said
    assert "reproduced: 1 of 1 pairs of candidates, and 1 of 1 free compilations" in said


def test_a_gpu_that_is_not_there_is_said(
    reproducer: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert reproducer.main(["--device", "cuda"]) == 2
    assert capsys.readouterr().err == "there is no CUDA GPU here; try --device cpu\n"


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("nothing=1", "Inductor has no option 'nothing'"),
        ("deterministic", "'' is not a Python literal"),
    ],
)
def test_a_wrong_option_of_inductor_is_said(
    reproducer: ModuleType, option: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        reproducer.main(["--inductor", option])
    assert message in capsys.readouterr().err


def test_an_option_is_in_force_where_the_first_call_is() -> None:
    in_force = []

    def backend(graph, inputs):
        in_force.append(torch._inductor.config.deterministic)
        return graph.forward

    with torch._inductor.config.patch(deterministic=True):
        early = torch.compile(lambda x: x * 2, backend=backend)
        torch.compile(lambda x: x * 3, backend=backend)(torch.ones(3))
    early(torch.ones(3))
    assert in_force == [True, False]
