"""numerics-gate check in processes of its own: what hangs, dies or cannot be called."""

import json
import textwrap

import pytest
import torch
from automodel_rms_norm.gate import cli, isolate
from automodel_rms_norm.gate.checks import load_target
from automodel_rms_norm.gate.fresh import fresh_results
from automodel_rms_norm.gate.plan import Plan
from automodel_rms_norm.gate.recipe import Selection
from automodel_rms_norm.testing import assert_bitwise_equal

NORMS = """
    import os, time
    import torch

    def by_formula(x, weight, eps):
        wide = x.float()
        y = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.float()
        return y.to(x.dtype)

    def hangs(x, weight, eps):
        while x.dim() == 4:
            time.sleep(1)
        return by_formula(x, weight, eps)

    def dies(x, weight, eps):
        if x.dim() == 4:
            os._exit(3)
        return by_formula(x, weight, eps)

    @torch.compile(backend="eager", dynamic=False)
    def compiled(x, weight, eps):
        return by_formula(x, weight, eps if torch.compiler.is_compiling() else 1.0)

    def sleeps(x, weight, eps):
        time.sleep(1000)

    def exits(x, weight, eps):
        raise SystemExit(3)

    def refuses(x, weight, eps):
        raise RuntimeError("a GPU is needed\\nreally")
"""
FEW = ["--device", "cpu", "--property", "P3", "--widths", "32", "--rows", "5"]


@pytest.fixture(autouse=True)
def norms(tmp_path, monkeypatch):
    (tmp_path / "norms_in_a_file.py").write_text(textwrap.dedent(NORMS))
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("name", "seconds", "detail"),
    [
        ("hangs", "15", "no answer within 15 s"),
        ("dies", "60", "its process ended with exit status 3"),
    ],
)
def test_a_check_without_an_answer_is_a_finding_and_the_run_goes_on(name, seconds, detail, capfd):
    target = f"norms_in_a_file:{name}"
    arguments = ["check", target, *FEW, "--timeout", seconds, "--json", "report.json"]
    assert cli.main(arguments) == 1
    with open("report.json") as file:
        report = json.load(file)
    outcomes = [o for o in report["outcomes"] if o["context"] == "other rank"]
    assert [o["detail"] for o in outcomes if o["status"] == "fails"] == [detail, detail]
    left_out = [o["detail"] for o in outcomes if o["status"] == "not run"]
    assert left_out == ["other rank: 2 of these checks gave no answer"] * 2
    alone = [o["status"] for o in report["outcomes"] if o["context"] == "row alone"]
    assert alone == ["holds"] * 4
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.parametrize(
    ("target", "sentence"),
    [
        ("norms_in_a_file:refuses", "cannot be called: on cpu: the target raised RuntimeError: a"),
        ("norms_in_a_file:absent", "norms_in_a_file has no attribute 'absent'"),
        ("norms_in_a_file:exits", "the target could not be called: its process ended with exit st"),
        ("norms_in_a_file:sleeps", "the target could not be called: no answer within 8 s"),
        ("exits_on_import:norm", "the target could not be loaded: its process ended with exit st"),
    ],
)
def test_exit_2_where_the_target_cannot_be_called(target, sentence, monkeypatch, tmp_path, capfd):
    (tmp_path / "exits_on_import.py").write_text("raise SystemExit(4)")
    monkeypatch.setattr(isolate, "CALL_SECONDS", 8)
    assert cli.main(["check", target, *FEW, "--timeout", "8"]) == 2
    errors = capfd.readouterr().err
    assert sentence in errors
    assert "Traceback" not in errors


def test_a_fresh_process_compiles_every_case():
    target = load_target("norms_in_a_file:compiled")
    widths = tuple(range(32, 42))
    assert len(widths) > torch._dynamo.config.recompile_limit
    cases = tuple(target.cases(Selection(dtypes=(torch.float32,), widths=widths, rows=5)))
    made = Plan(target, torch.device("cpu"), cases, ())
    of_formula = load_target("norms_in_a_file:by_formula")
    for results in fresh_results(made, cases[-1]):
        expected = of_formula.results(cases[-1], cases[-1].inputs)
        assert_bitwise_equal(results["y"], expected["y"], "y")
