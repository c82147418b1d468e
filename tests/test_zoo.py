"""numerics-gate finds each public fault under its property, and nothing in what has none."""

import pytest
import torch
import torch.nn.functional as F
import zoo
from automodel_rms_norm.gate.check import check
from automodel_rms_norm.gate.norms import norm_recipe
from automodel_rms_norm.gate.properties import PROPERTIES
from automodel_rms_norm.gate.recipe import Recipe, Selection, parameter, tensor

EAGER = [p for p in PROPERTIES if p.key in ("P1", "P3", "P5", "P6")]
# No multiple of a block, and no power of two.
SMALL = Selection(quick=True, widths=(100,), rows=19)


def failing(target: Recipe, properties=EAGER, selection=SMALL) -> set[str]:
    report = check(target, properties, "cpu", selection)
    assert all(row.cases > 0 for row in report.rows)
    return {row.key for row in report.rows if row.failures}


def norm(function, name: str) -> Recipe:
    return norm_recipe(function, zero_centered_gamma=True, name=name)


@pytest.mark.parametrize("name", zoo.FAULTS)
def test_a_fault_is_found_under_its_property(name):
    function, expected = zoo.FAULTS[name]
    assert failing(norm(function, name)) == expected


def test_there_are_more_than_fifteen_faults():
    assert len(zoo.FAULTS) >= 15
    assert {key for _, keys in zoo.FAULTS.values() for key in keys} == {"P1", "P3", "P5", "P6"}


@pytest.mark.long
@pytest.mark.usefixtures("fresh_dynamo")
def test_a_separate_path_of_the_compiler_is_found():
    (p2,) = (p for p in PROPERTIES if p.key == "P2")
    selection = Selection(True, (torch.float32,), (64,), 5)
    assert failing(norm(zoo.compiled_path, "compiled path"), [p2], selection) == {"P2"}


# --- Controls -------------------------------------------------------------------------------------


def test_a_careful_norm_has_no_fault():
    assert failing(norm(zoo.careful, "careful")) == set()


def test_torch_rms_norm_keeps_its_contexts_and_is_accurate():
    def function(x, weight, eps):
        return F.rms_norm(x, (x.shape[-1],), weight, eps)

    keys = [p for p in PROPERTIES if p.key in ("P1", "P6")]
    assert failing(norm_recipe(function, name="torch"), keys) == set()


def silu_gate(x, gate):
    return F.silu(gate) * x


def layer_norm(x, weight, bias, eps):
    return F.layer_norm(x, (x.shape[-1],), weight, bias, eps)


CONTROLS = {
    "silu gate": Recipe(
        silu_gate, {"x": tensor("rows", "hidden"), "gate": tensor("rows", "hidden")}
    ),
    "layer norm": Recipe(
        layer_norm,
        {
            "x": tensor("rows", "hidden"),
            "weight": parameter("hidden"),
            "bias": parameter("hidden", around=0.0),
            "eps": 1e-5,
        },
    ),
}


@pytest.mark.parametrize("name", CONTROLS)
def test_another_eager_function_has_no_fault(name):
    keys = [p for p in PROPERTIES if p.key in ("P1", "P6")]
    assert failing(CONTROLS[name], keys) == set()
