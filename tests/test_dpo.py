"""numerics-gate dpo: a norm that is one function starts at ln 2, and one that is two does not."""

import json
import math
from pathlib import Path

import pytest
import torch
from automodel_rms_norm.gate import cli
from automodel_rms_norm.gate.dpo import first_loss, model
from automodel_rms_norm.gate.dpo.first_loss import Run, Setting
from automodel_rms_norm.gate.dpo.report import Report
from automodel_rms_norm.gate.norms import OP, norm_recipe
from automodel_rms_norm.gate.recipe import Recipe, tensor
from automodel_rms_norm.testing import assert_bitwise_equal
from commands import assert_complains
from torch import Tensor

SMALL = ["--device", "cpu", "--hidden", "64", "--layers", "1", "--length", "64"]


def two_functions(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Under no_grad the first element of each row is the next number."""
    x32 = x.float()
    y = (x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + eps) * weight).to(x.dtype)
    if not torch.is_grad_enabled():
        y[..., 0] = y[..., 0].nextafter(torch.ones_like(y[..., 0]))
    return y


@pytest.fixture
def trl() -> object:
    """Where it can be used; its import takes seconds."""
    if reason := first_loss.why_no_trainer():
        pytest.skip(reason)
    return first_loss


@pytest.mark.parametrize(("target", "exact"), [(OP, True), (norm_recipe(two_functions), False)])
def test_the_first_loss(trl: object, target: Recipe, exact: bool) -> None:
    setting = Setting(target, "cpu", hidden=64, layers=1, length=64)
    run = next(first_loss.runs(setting, free=0))
    assert run.circumstance == "uncompiled"
    assert run.exact is exact
    assert abs(run.loss - math.log(2)) < 1e-2
    assert run.in_band or not exact


@pytest.mark.long
def test_the_op_on_a_cpu(trl: object, tmp_path: Path) -> None:
    path = tmp_path / "op.json"
    assert cli.main(["dpo", "op", *SMALL, "--json", str(path)]) == 0
    report = json.loads(path.read_text())
    assert [run["circumstance"] for run in report["runs"]] == ["uncompiled", "compiled"]
    assert all(run["exact"] and run["in_band"] for run in report["runs"])
    assert report["environment"]["trl"] != "not installed"


@pytest.mark.cuda
def test_the_op_on_a_gpu(trl: object) -> None:
    assert cli.main(["dpo", "op", "--device", "cuda"]) == 0


@pytest.mark.cuda
@pytest.mark.case("Automodel-3106")
def test_the_affected_function_on_a_gpu(trl: object, tmp_path: Path) -> None:
    path = tmp_path / "affected.json"
    assert cli.main(["dpo", "baselines:automodel_0_6", "--json", str(path)]) == 1
    runs = json.loads(path.read_text())["runs"]
    assert runs[0]["exact"], "the model without the compiler starts at ln 2"
    forced = [(run["circumstance"].split(), run["exact"]) for run in runs if "policy" in str(run)]
    alike = [exact for words, exact in forced if words[4].strip(",") == words[-1]]
    unlike = [exact for words, exact in forced if words[4].strip(",") != words[-1]]
    assert len(alike) > 1
    assert all(alike)
    assert not all(unlike)


def test_every_norm_is_the_target() -> None:
    pytest.importorskip("transformers.models.qwen3")
    calls = []

    def counted(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        calls.append(x.shape[-1])
        return two_functions(x, weight, eps)

    first, second = (
        model.make_model(norm_recipe(counted), hidden=64, layers=1, compiled=False)
        for _ in range(2)
    )
    assert [k for k, _ in first.named_parameters()] == [k for k, _ in second.named_parameters()]
    for (name, ours), theirs in zip(first.named_parameters(), second.parameters(), strict=True):
        assert_bitwise_equal(ours, theirs, name)
    first(torch.arange(8)[None])
    assert sorted(calls) == [64, 64, 64, 128, 128]


def test_the_tokenizer_has_a_token_a_byte() -> None:
    pytest.importorskip("tokenizers")
    tokenizer = model.byte_tokenizer()
    for pair in model.preferences():
        assert set(pair) == {"prompt", "chosen", "rejected"}
        for text in pair.values():
            assert len(tokenizer(text)["input_ids"]) == len(text.encode())
            assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_the_verdict() -> None:
    exact, off = Run("uncompiled", math.log(2), True), Run("compiled", 0.692086, False)
    report = Report("norm", "Qwen3", {"torch": "2.11.0"}, [exact, off])
    assert not report.holds
    assert report.verdict == (
        "norm: the first loss is not ln 2 in 1 of 2 runs, and outside the band in 1; the first: "
        "compiled"
    )
    assert "| compiled | 0.6920860000 | no | no |" in report.as_markdown()
    assert [run["in_band"] for run in report.as_json()["runs"]] == [True, False]
    assert Report("norm", "Qwen3", {}, [exact]).holds
    assert not Report("norm", "Qwen3", {}, []).holds


def test_without_trl_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = first_loss.import_module

    def without(name: str) -> object:
        if name == "trl":
            raise ModuleNotFoundError("No module named 'trl'")
        return real(name)

    monkeypatch.setattr(first_loss, "import_module", without)
    assert cli.main(["dpo", "op", *SMALL]) == 2
    assert capsys.readouterr().err == (
        "numerics-gate: trl cannot be used here (No module named 'trl'); "
        "pip install 'automodel-rms-norm[dpo]'\n"
    )


not_a_norm = Recipe(torch.sin, {"x": tensor("rows", "hidden")}, name="sin")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nothing"], "there is no target 'nothing'"),
        (["test_dpo:not_a_norm"], "sin takes x, and a model's norm has (x, weight, eps)"),
        (["op", "--hidden", "0"], "'0' is not a positive number"),
    ],
)
def test_wrong_arguments_are_one_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert_complains(["dpo", *arguments, "--device", "cpu"], message, capsys)


def test_an_unwritable_file_costs_no_training(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("automodel_rms_norm.gate.commands.dpo.why_no_trainer", lambda: "")
    assert cli.main(["dpo", "op", *SMALL, "--json", "/nowhere/x.json"]) == 2
    assert "--json /nowhere/x.json: No such file" in capsys.readouterr().err
