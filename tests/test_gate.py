"""numerics-gate: its exit codes and words, and that a fault is found under the right property."""

import io
import json
import math
import re
from dataclasses import replace

import automodel_rms_norm as arn
import pytest
import torch
from automodel_rms_norm import golden
from automodel_rms_norm.gate import capture, check, cli, plan
from automodel_rms_norm.gate.norms import OP, norm_recipe
from automodel_rms_norm.gate.plan import Property
from automodel_rms_norm.gate.properties import PROPERTIES
from automodel_rms_norm.gate.recipe import Recipe, Selection
from automodel_rms_norm.gate.report import Report
from automodel_rms_norm.gate.runner import FAILS, HOLDS, NOT_RUN, Outcome
from commands import assert_complains
from rich.console import Console

KEYS = [property.key for property in PROPERTIES if property.key != "P2-choices"]  # on a CPU
EAGER = [key for key in KEYS if key != "P2"]  # for faults that no compiler has to see


def named(*keys: str) -> list[Property]:
    return [property for property in PROPERTIES if property.key in keys]


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole gate on one width's cases, few accuracy and golden ones, one compile mode."""
    golden_cases = [*golden.cases()[:1], *golden.cases()[9:14]]  # one bfloat16, float32
    monkeypatch.setattr(golden, "cases", lambda: golden_cases)
    cases = Recipe.cases

    def few(self, selection=None, extreme=False):
        found = [c for c in cases(self, Selection(True), extreme) if c.sizes["hidden"] == 128]
        return found[:8] if extreme else found

    monkeypatch.setattr(Recipe, "cases", few)
    monkeypatch.setattr(capture, "_captured", lambda zero_centered_gamma: [])
    monkeypatch.setattr(plan.Plan, "compile_modes", ("static",))


def target(function, **options) -> Recipe:
    """A norm that claims the contract."""
    return norm_recipe(
        function, zero_centered_gamma=True, every_kind=True, contract=True, name="faulty", **options
    )


def failing(target: Recipe, *keys: str) -> set[str]:
    report = check.check(target, named(*(keys or KEYS)), device="cpu")
    assert all(row.cases > 0 for row in report.rows)
    return {row.key for row in report.rows if row.failures}


# --- Faults ---------------------------------------------------------------------------------------


def norm(x, weight, eps, zero_centered_gamma):
    return arn.rms_norm(x, weight, eps, zero_centered_gamma)


def other_bits(x, weight, eps, zero_centered_gamma):
    return arn.rms_norm(x, weight, eps + 0.5, zero_centered_gamma)


def by_grad_mode(x, *others):
    return (norm if torch.is_grad_enabled() else other_bits)(x, *others)


def by_compiler(x, *others):
    return (other_bits if torch.compiler.is_compiling() else norm)(x, *others)


def by_rank(x, *others):
    return (other_bits if x.dim() == 4 else norm)(x, *others)


def by_batch(x, *others):
    return (other_bits if x.shape[0] == 2 else norm)(x, *others)


def by_other_rows(x, *others):
    return (other_bits if x.isnan().any() else norm)(x, *others)


def by_thread_count(x, *others):
    return (other_bits if torch.get_num_threads() == 3 else norm)(x, *others)


def by_instruction_set(x, *others):
    return (other_bits if arn._C.active_isa() == "scalar" else norm)(x, *others)


def inaccurate(x, weight, eps, zero_centered_gamma):
    return norm(x, weight, eps, zero_centered_gamma) * (1 + 2.0**-6)


def last_bit(x, *others):
    """float32 y up by one unit in the last place: accurate, but not what is recorded."""
    y = norm(x, *others)
    if x.dtype != torch.float32:
        return y
    above = torch.nextafter(y.detach(), torch.full_like(y, math.inf))
    return y + (above - y.detach())


def rounded_before_the_weight(x, weight, eps, zero_centered_gamma):
    """y of the other order: xhat rounded to x's dtype, then times the gain; gradients of the op."""
    y = norm(x, weight, eps, zero_centered_gamma)
    if weight is None:
        return y
    gain = weight.to(torch.promote_types(x.dtype, torch.float32)) + zero_centered_gamma
    other = (norm(x, None, eps, False) * gain).to(x.dtype)
    return y + (other - y).detach()


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tensor, factor):
        ctx.factor = factor
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.factor, None


def grad_weight_by_rank(x, weight, *others):
    if x.dim() == 4:
        weight = Scaled.apply(weight, 2.0)
    return norm(x, weight, *others)


calls = iter(range(1 << 30))


def grad_weight_by_run(x, weight, *others):
    return norm(x, Scaled.apply(weight, 1.0 + next(calls)), *others)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(
    ("function", "checked", "expected"),
    [
        (norm, (), set()),
        (by_grad_mode, (), {"P1"}),
        (by_compiler, (), {"P2"}),
        (by_batch, EAGER, {"P3"}),
        (by_other_rows, EAGER, {"P3"}),
        (by_rank, EAGER, {"P3", "P5"}),
        (by_thread_count, EAGER, {"P3", "P5"}),
        (grad_weight_by_rank, EAGER, {"P5"}),
        (grad_weight_by_run, ("P3", "P5"), {"P5"}),
        (inaccurate, EAGER, {"P6", "P7"}),
        (last_bit, EAGER, {"P7"}),
        pytest.param(rounded_before_the_weight, EAGER, {"P6", "P7"}, id="vLLM-42325"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_fault_fails_its_property_alone(function, checked, expected):
    assert failing(target(function), *checked) == expected


@pytest.mark.usefixtures("small")
def test_a_fault_of_one_instruction_set():
    if len(arn.build_info()["cpu_isas_supported"]) == 1:
        pytest.skip("this CPU has one instruction set")
    before = arn._C.active_isa()
    keys = ("P1", "P3", "P4", "P5", "P6")
    assert failing(target(by_instruction_set), *keys) == {"P4"}
    assert arn._C.active_isa() == before


@pytest.mark.usefixtures("small")
def test_a_fault_in_rstd():
    def rstd(x, *others):
        result = torch.ops.automodel.rms_norm_forward(x, *others)[1]
        return {"rstd": result * 2 if x.dim() == 4 else result}

    assert failing(target(norm, also=rstd), "P3", "P4", "P5", "P7") == {"P3"}


@pytest.mark.usefixtures("small")
def test_a_function_that_raises_is_a_failure_of_that_case():
    def moody(x, *others):
        if x.dim() == 4:
            raise RuntimeError("no four dimensions\nplease")
        return norm(x, *others)

    report = check.check(target(moody), named("P3"), device="cpu")
    (row,) = report.rows
    assert {failure.context for failure in row.failures} == {"other rank"}
    assert row.failures[0].detail == "raised RuntimeError: no four dimensions"
    assert row.cases > len(row.failures)


# --- The command ----------------------------------------------------------------------------------


@pytest.mark.usefixtures("small")
def test_exit_0_where_all_hold(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("COLUMNS", "200")
    path = tmp_path / "report.json"
    assert cli.main(["check", "--device", "cpu", "--timeout", "0", "--json", str(path)]) == 0
    text = capsys.readouterr().out
    for property in named(*KEYS):
        assert re.search(rf"{property.key} +│ {re.escape(property.meaning)} +│ +\d+ │ +0 │", text)
    assert re.search(r"automodel_rms_norm.rms_norm holds in all \d+ cases, \d+ s", text)
    for words in (f"torch +{re.escape(torch.__version__)}", "contract +version 1", arn.__version__):
        assert re.search(words, text)

    report = json.loads(path.read_text())
    assert report["holds"] is True
    assert not report["interrupted"]
    parts = ["seconds", "environment", "properties", "outcomes"]
    assert list(report) == ["target", "holds", "interrupted", *parts]
    rows_ = [row for row in report["properties"] if row["property"] != "P2-choices"]
    assert [row["property"] for row in rows_] == KEYS
    for row in rows_:
        ours = [o for o in report["outcomes"] if o["property"] == row["property"]]
        assert row["cases"] == sum(o["status"] == HOLDS for o in ours) > 0
        assert (row["failures"], row["first_difference"]) == (0, None)
    assert {"torch", "torch's CUDA", "GPU", "CPU", "instruction set", "contract"} <= set(
        report["environment"]
    )


@pytest.mark.usefixtures("small")
def test_exit_1_and_the_first_difference_where_one_fails(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("COLUMNS", "220")
    monkeypatch.setattr(
        check, "load_target", lambda name: replace(target(by_batch), name="faulty.norm")
    )
    path = tmp_path / "report.json"
    arguments = ["check", "--device", "cpu", "--property", "p5,P3", "--json", str(path)]
    arguments += ["--timeout", "0"]
    assert cli.main(arguments) == 1
    text = capsys.readouterr().out
    assert re.search(r"P3 of faulty.norm fail: \d+ of \d+ cases", text)
    assert re.search(r"y, other batch size: \d+ of \d+ elements differ", text)
    assert re.search(r"first: y, other batch size\[0, 0\] = \S+ \(0x\w{4}\), expected", text)
    assert "P1" not in text

    report = json.loads(path.read_text())
    assert report["holds"] is False
    rows_, weight = report["properties"]
    assert (rows_["property"], weight["property"]) == ("P3", "P5")
    assert (rows_["failures"] > 0, weight["failures"]) == (True, 0)
    first = rows_["first_difference"]
    assert (first["context"], first["status"]) == ("other batch size", FAILS)
    assert first["difference"]["coordinate"] == [0, 0]
    assert first["difference"]["actual_bits"].startswith("0x")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([], "the following arguments are required: command"),
        (["chekc"], "invalid choice: 'chekc'"),
        (["check", "--device", "tpu"], "argument --device: invalid choice: 'tpu'"),
        (
            ["check", "--property", "P1,P9"],
            "there is no property 'P9'; choose from P1, P2, P2-choices, P3",
        ),
        (["check", "--fast"], "unrecognized arguments: --fast"),
        (["check", "--expect", "P0"], "there is no property 'P0'"),
        (["check", "--dtype", "bf16,int8"], "there is no dtype 'int8'; choose from bf16, fp16"),
        (["check", "--widths", "128,0"], "'128,0' is not a list of positive numbers"),
        (["check", "--timeout", "soon"], "'soon' is not a number of seconds"),
        (["check", "--plot", "/nowhere/plot.svg"], "/nowhere/plot.svg: No such file"),
        (["check", "--plot", "plot.txt"], "--plot plot.txt: its name must end with .svg, .png"),
        (["golden"], "golden takes either a FILE to compare with or --write FILE"),
        (["golden", "op", "/nowhere/bits.json"], "/nowhere/bits.json: No such file"),
        (["golden", "op", "--write", "/nowhere/bits.json"], "/nowhere/bits.json: No such file"),
        (["check", "--rows", "-3"], "'-3' is not a positive number"),
        (
            ["check", "--property", "P1", "--expect", "P1,P3"],
            "--expect P3: it is not checked; what is: P1",
        ),
        (
            ["scan", "automodel-rms-norm", "--expect", "P6"],
            "--expect P6: it is not checked; what is: P1, P2, P2-choices, P3, P5",
        ),
        (["check", "--markdown", "/nowhere/report.md"], "/nowhere/report.md: No such file"),
        (["check", "--json"], "argument --json: expected one argument"),
        (["check", "--json", "/nowhere/report.json"], "/nowhere/report.json: No such file"),
    ],
    ids=" ".join,
)
def test_exit_2_for_a_wrong_argument(arguments, sentence, capsys):
    assert_complains(arguments, sentence, capsys)


def test_exit_2_for_a_gpu_that_is_not_there(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert cli.main(["check", "--device", "cuda"]) == 2
    assert "--device cuda: no CUDA GPU on this machine" in capsys.readouterr().err


# --- What could not be run ------------------------------------------------------------------------


def printed(report: Report) -> str:
    output = io.StringIO()
    report.print(Console(file=output, width=200))
    return output.getvalue()


@pytest.mark.usefixtures("small")
def test_a_missing_gpu_is_said(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    report = check.check(OP, named("P4", "P6"))
    assert report.holds
    for row in report.rows:
        assert row.reasons() == {"on a GPU: no CUDA GPU on this machine": 1}
    assert "not run (P4, P6) on a GPU: no CUDA GPU on this machine" in printed(report)


@pytest.mark.usefixtures("small")
def test_missing_transformers_are_said_with_the_remedy(monkeypatch):
    reason = "no transformers with Qwen3 here; pip install 'transformers>=4.57'"

    def missing(zero_centered_gamma: bool):
        raise ImportError("transformers")

    monkeypatch.setattr(capture, "_captured", missing)
    report = check.check(OP, named("P4", "P7"), device="cpu")
    assert [dict(row.reasons()) for row in report.rows] == [{f"on a real model: {reason}": 1}, {}]
    assert reason in printed(report)


@pytest.mark.usefixtures("small")
def test_a_model_that_fails_is_said(monkeypatch):
    def broken(zero_centered_gamma: bool):
        raise AttributeError("no such attribute")

    monkeypatch.setattr(capture, "_captured", broken)
    (row,) = check.check(OP, named("P4"), device="cpu").rows
    (reason,) = row.reasons()
    assert reason.endswith("AttributeError: no such attribute")


def test_nothing_run_is_no_success():
    outcomes = [Outcome("A", "every case", "", NOT_RUN, "no reason")]
    report = Report("thing", {"A": "is so"}, {}, outcomes, 0.0)
    assert not report.holds
    assert "no case of thing could be run" in printed(report)


@pytest.mark.cuda
@pytest.mark.usefixtures("small")
def test_the_gate_on_a_gpu():
    report = check.check(OP, device="cuda")
    assert report.holds, report.verdict()
    assert all(row.cases > 0 and not row.reasons() for row in report.rows)
