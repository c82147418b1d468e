"""numerics-gate check TARGET: what can be named, how it is called, and what is said of it."""

import re
import sys
import types

import pytest
import torch
from automodel_rms_norm.gate import check, cli, targets
from automodel_rms_norm.gate.norms import OP
from automodel_rms_norm.gate.properties import PROPERTIES
from automodel_rms_norm.gate.recipe import Selection
from torch import Tensor, nn

SMALL = Selection(quick=True, dtypes=(torch.bfloat16, torch.float32), widths=(128,), rows=19)


def by_formula(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    x32 = x.float()
    normed = x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + eps)
    return (normed * weight.float()).to(x.dtype)


def centred(
    x: Tensor, weight: Tensor, eps: float, zero_centered_gamma: bool = False, other: int = 1
) -> Tensor:
    gain = weight.float() + 1.0 if zero_centered_gamma else weight
    return by_formula(x, gain, eps)


def biased(x: Tensor, weight: Tensor, bias: Tensor | None = None, eps: float = 1.0) -> Tensor:
    assert bias is None
    return by_formula(x, weight, eps)


def by_keyword(x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
    return by_formula(x, weight, eps)


class Norm(nn.Module):
    def __init__(self, dim: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return by_formula(x, self.weight, self.eps)


class Faulty(torch.autograd.Function):
    """Its gradient of x has the weight once too often."""

    @staticmethod
    def forward(ctx, x, weight, eps):
        ctx.save_for_backward(x, weight)
        ctx.eps = eps
        return by_formula(x, weight, eps)

    @staticmethod
    def backward(ctx, grad_y):
        x, weight = (tensor.detach().requires_grad_() for tensor in ctx.saved_tensors)
        with torch.enable_grad():
            y = by_formula(x, weight, ctx.eps)
        grad_x, grad_weight = torch.autograd.grad(y, (x, weight), grad_y)
        return grad_x * weight, grad_weight, None


class Biased(Norm):
    def __init__(self, dim: int, eps: float = 1e-5) -> None:
        super().__init__(dim, eps)
        self.bias = nn.Parameter(torch.zeros(dim))


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """This module under a name that can be imported."""
    found = types.ModuleType("norms_under_test")
    found.__dict__.update({name: value for name, value in globals().items() if name[0] != "_"})
    found.nested = types.SimpleNamespace(norm=by_formula)
    found.number = 3
    found.no_weight = lambda x, eps: x
    found.more = lambda x, weight, eps, scale: x
    monkeypatch.setitem(sys.modules, "norms_under_test", found)
    return found


def failures(name: str, *keys: str) -> set[str]:
    chosen = [p for p in PROPERTIES if not keys or p.key in keys]
    report = check.check(targets.load(name), chosen, "cpu", SMALL)
    assert any(row.cases for row in report.rows)
    return {row.key for row in report.rows if row.failures}


@pytest.mark.usefixtures("module")
@pytest.mark.parametrize(
    "name",
    ["by_formula", "nested.norm", "centred", "biased", "by_keyword", "Norm", "Faulty"],
)
def test_functions_modules_and_autograd_functions_are_called(name):
    """Plain rows: in huge ones the gradients of the formula overflow."""
    p1, p6 = (p for p in PROPERTIES if p.key in ("P1", "P6"))
    report = check.check(targets.load(f"norms_under_test:{name}"), [p1, p6], "cpu", SMALL)
    contexts, accuracy = report.rows
    assert contexts.cases > 0
    assert not contexts.failures
    wrong = {o.detail.split(",")[0] for o in accuracy.failures if "19 x 128, weight" in o.case}
    assert any("19 x 128, weight" in outcome.case for outcome in accuracy.outcomes)
    assert bool(wrong) is (name == "Faulty")
    assert all(detail.startswith("grad_x") for detail in wrong)


def test_torch_modules_are_called():
    assert failures("torch.nn:RMSNorm", "P1") == failures("torch", "P1") == set()


@pytest.mark.usefixtures("module")
def test_a_module_runs_compiled():
    assert "P1" not in failures("norms_under_test:Norm", "P1", "P2")


def test_the_op_is_the_default():
    assert targets.load("op") is OP
    assert cli._parser().parse_args(["check"]).target == "op"


@pytest.mark.usefixtures("module")
@pytest.mark.parametrize(("name", "asked"), [("by_formula", False), ("centred", True)])
def test_zero_centred_cases_are_asked_of_those_that_take_it(name, asked):
    (row,) = check.check(
        targets.load(f"norms_under_test:{name}"), PROPERTIES[:1], "cpu", SMALL
    ).rows
    reason = "zero-centred weights: the target has no zero_centered_gamma"
    assert (reason in row.reasons()) is not asked
    assert any("gamma True" in outcome.case for outcome in row.outcomes) is asked


@pytest.mark.usefixtures("module")
def test_digests_and_instruction_sets_are_not_asked_of_another_norm():
    chosen = [p for p in PROPERTIES if p.key in ("P3", "P4", "P7")]
    report = check.check(targets.load("norms_under_test:by_formula"), chosen, "cpu", SMALL)
    rows = {row.key: row for row in report.rows}
    assert rows["P4"].cases == rows["P7"].cases == 0
    assert "digests: this package has none" in str(rows["P7"].reasons())


@pytest.mark.usefixtures("module")
@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("nosuch", "there is no target 'nosuch'; choose from op, torch, automodel"),
        ("./norms_under_test.py:number", "there is no target './norms_under_test.py:number'; ch"),
        ("torch:", "there is no target 'torch:'; choose from op, torch, automodel"),
        (":norm", "there is no target ':norm'; choose from op, torch, automodel"),
        ("no.such:thing", "cannot import no.such: ModuleNotFoundError: No module named 'no'"),
        ("norms_under_test:thing", "norms_under_test has no attribute 'thing'"),
        (
            "norms_under_test:number",
            "norms_under_test:number is int, not a Recipe, a function of (x,",
        ),
        ("norms_under_test:no_weight", "(x, eps) does not take (x, weight, eps)"),
        ("norms_under_test:more", "(x, weight, eps, scale) also needs scale"),
        ("norms_under_test:Biased", "must have one parameter, weight; it has weight, bias"),
        ("torch.nn:Linear", "torch.nn:Linear(8, eps=1e-5) raised TypeError"),
    ],
)
def test_exit_2_for_a_target_that_is_none(name, sentence, capsys):
    assert cli.main(["check", name, "--timeout", "0"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("numerics-gate: ")
    assert sentence in error
    assert len(error.splitlines()) == 1


def test_a_peer_that_is_not_installed_is_said_with_the_remedy(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "liger_kernel", None)
    assert cli.main(["check", "liger", "--timeout", "0"]) == 2
    assert capsys.readouterr().err.strip().endswith("; pip install liger-kernel")


@pytest.mark.usefixtures("module")
def test_only_the_expected_properties_decide(capsys, tmp_path):
    path = tmp_path / "report.md"
    arguments = ["check", "norms_under_test:Faulty", "--device", "cpu", "--property", "P1,P6"]
    arguments += [
        "--quick",
        "--dtype",
        "bf16,fp32",
        "--widths",
        "64,128",
        "--rows",
        "5",
        "--timeout",
        "0",
    ]
    assert cli.main([*arguments, "--expect", "P6"]) == 1
    assert cli.main([*arguments, "--expect", "P1", "--markdown", str(path)]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "(P6 fail and need not hold)" in text
    markdown = path.read_text()
    assert re.search(r"\| P1 \| .* \| \d+ \| 0 \|  \|", markdown)
    assert re.search(r"\| P6 \| .* \| \d+ \| [1-9]\d* \| x bf16", markdown)
    assert "- torch: " in markdown


def test_info_says_what_can_move_a_bit(capsys):
    assert cli.main(["info"]) == 0
    text = capsys.readouterr().out
    for name in ("automodel-rms-norm", "contract", "torch", "GPU", "instruction set", "triton"):
        assert re.search(rf"^{name} +\S", text, re.MULTILINE)
