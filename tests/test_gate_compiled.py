"""A target that compiles itself: what is compiled for which case, and how little in --quick."""

from dataclasses import replace

import automodel_rms_norm as arn
import torch
from automodel_rms_norm.gate import runner
from automodel_rms_norm.gate.check import check
from automodel_rms_norm.gate.checks import Request, checks_of
from automodel_rms_norm.gate.norms import norm_recipe
from automodel_rms_norm.gate.properties import PROPERTIES
from automodel_rms_norm.gate.recipe import Selection
from automodel_rms_norm.gate.runner import Check, Measured


def test_a_case_is_not_run_by_what_was_compiled_for_another():
    compiled = []

    def backend(graph, inputs):
        compiled.append(graph)
        return graph.forward

    doubled = torch.compile(lambda x: x * 2, backend=backend, dynamic=True)

    def doubling(case, context):
        return Check("A", case, context, lambda: Measured({"y": doubled(x)}, lambda: None))

    x = torch.ones(3)
    places = [("one", "here"), ("one", "there"), ("two", "here")]
    counts = [len(compiled) for _ in runner.run(doubling(*place) for place in places)]
    assert counts == [1, 1, 2]


def test_every_case_of_a_function_that_compiles_itself_is_compiled():
    @torch.compile(backend="eager", dynamic=False)
    def compiled(x, weight, eps):
        return arn.rms_norm(x, weight, eps if torch.compiler.is_compiling() else 2 * eps)

    target = norm_recipe(lambda x, weight, eps: compiled(x, weight, eps), name="compiles itself")
    keys = ("P1", "P3", "P5")
    asked = [property for property in PROPERTIES if property.key in keys]
    report = check(target, asked, "cpu", Selection(quick=True, widths=(32,), rows=5))
    assert {row.key: len(row.failures) for row in report.rows} == dict.fromkeys(keys, 0)


def test_quick_asks_one_case_of_a_function_that_compiles_itself():
    compiled = torch.compile(arn.rms_norm, dynamic=True)
    target = norm_recipe(lambda x, weight, eps: compiled(x, weight, eps), name="compiles itself")
    asked = Request(("P1", "P3", "P5", "P6"), "cpu", Selection(quick=True))
    inputs = {c.inputs.arguments["x"] for c in checks_of(target, asked) if c.inputs}
    assert {x.dtype for x in inputs} == {torch.float32}
    assert len({x.shape for x in inputs if len(x) > 19}) == 1
    assert len(list(target.cases(asked.selection))) > 4
    none_main = replace(target, variants=[replace(v, main=False) for v in target.variants])
    assert checks_of(none_main, asked)
