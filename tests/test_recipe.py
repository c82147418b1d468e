"""Recipes: what is made of them, what a wrong one says, and P6 of a function without a formula."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from automodel_rms_norm.contexts import Function
from automodel_rms_norm.gate.check import check
from automodel_rms_norm.gate.properties import PROPERTIES
from automodel_rms_norm.gate.recipe import Recipe, RecipeError, Selection, parameter, tensor
from automodel_rms_norm.gate.targets import load
from torch import Tensor, nn

SMALL = Selection(quick=True, widths=(100,), rows=19)


def failing(target: Recipe, *keys: str) -> set[str]:
    chosen = [p for p in PROPERTIES if p.key in keys]
    report = check(target, chosen, "cpu", SMALL)
    return {row.key for row in report.rows if row.failures}


def mix(x: Tensor, table: Tensor, index: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    mixed = x * table[index] * scale
    return mixed, mixed.detach().argmax(-1)


MIX = Recipe(
    mix,
    inputs={
        "x": tensor("rows", "hidden"),
        "table": parameter("experts", "hidden"),
        "index": tensor(
            "rows", dtype=torch.int64, values=lambda generator, shape: torch.arange(*shape) % 4
        ),
        "scale": 0.5,
    },
    outputs={"y": tensor("rows", "hidden"), "largest": tensor("rows", grad=False)},
    sizes={"experts": 4},
)


def test_the_inputs_are_made_as_the_recipe_says():
    (bf16, fp32) = MIX.cases(SMALL)
    for case, dtype in ((bf16, torch.bfloat16), (fp32, torch.float32)):
        x, table, index, scale = case.inputs.arguments.values()
        assert x.shape == (19, 100)
        assert table.shape == (4, 100)
        assert index.tolist() == [row % 4 for row in range(19)]
        assert x.dtype == table.dtype == case.inputs.grads["y"].dtype == dtype
        assert scale == 0.5
        assert abs(table.float().mean() - 1) < 0.1
        assert case.inputs.grads["largest"] is None
        assert case.inputs.rows == {"x": 0, "index": 0, "y": 0, "largest": 0}
        assert case.inputs.differentiable == ["x", "table"]
    (again, _) = MIX.cases(SMALL)
    assert torch.equal(again.inputs.arguments["x"], bf16.inputs.arguments["x"])


def test_a_function_of_several_tensors_keeps_the_properties():
    assert failing(MIX, "P1", "P3", "P6") == set()


def test_a_recipe_can_be_named(monkeypatch):
    import sys
    import types

    found = types.ModuleType("recipes_under_test")
    found.MIX = MIX
    monkeypatch.setitem(sys.modules, "recipes_under_test", found)
    target = load("recipes_under_test:MIX")
    assert target.name == target.source == "recipes_under_test:MIX"
    assert target.function is mix


def turned(q: Tensor, k: Tensor, angles: Tensor) -> tuple[Tensor, Tensor]:
    return q * angles, k * angles


TURNED = Recipe(
    turned,
    inputs={
        "q": tensor("rows", "hidden"),
        "k": tensor("rows", "hidden"),
        "angles": tensor("rows", "hidden", grad=False),
    },
    outputs={"q_turned": tensor("rows", "hidden"), "k_turned": tensor("rows", "hidden")},
)


@pytest.mark.parametrize("function", [turned, torch.compile(turned, backend="aot_eager")])
def test_an_output_of_frozen_arguments_alone_has_no_gradient(function: Function) -> None:
    assert failing(replace(TURNED, function=function), "P1") == set()


def test_a_gradient_that_is_lost_where_another_argument_is_frozen_fails_p1() -> None:
    def loses_k(q: Tensor, k: Tensor, angles: Tensor) -> tuple[Tensor, Tensor]:
        return turned(q, k if q.requires_grad else k.detach(), angles)

    assert failing(replace(TURNED, function=loses_k), "P1") == {"P1"}


class Scaled(nn.Module):
    def __init__(self, dim: int, factor: float) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(dim))
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gain * self.factor


def scaled(**parameters) -> Recipe:
    return Recipe(
        module=lambda hidden, factor, **_: Scaled(hidden, factor),
        inputs={"x": tensor("rows", "hidden"), **parameters, "factor": 2.0},
        name="Scaled",
    )


def test_a_module_is_made_of_sizes_and_scalars_and_lent_its_parameters():
    target = scaled(gain=parameter("hidden"))
    case = next(iter(target.cases(SMALL)))
    x, gain, factor = case.inputs.arguments.values()
    assert torch.equal(target.bind(case)(x, gain, factor), x * gain * 2.0)
    assert failing(target, "P1", "P3", "P6") == set()


def rows_mixed(x: Tensor) -> Tensor:
    return torch.softmax(x, 0)


def test_rows_that_depend_on_each_other_fail_p3():
    assert failing(Recipe(rows_mixed, {"x": tensor("rows", "hidden")}), "P1", "P3") == {"P3"}


def test_without_rows_p3_is_not_run():
    target = Recipe(rows_mixed, {"x": tensor("tokens", "hidden")}, sizes={"tokens": 5})
    (row,) = check(target, [p for p in PROPERTIES if p.key == "P3"], "cpu", SMALL).rows
    assert row.cases == 0
    assert "rows: the recipe names no dimension of rows" in row.reasons()


# --- P6 against float64 ---------------------------------------------------------------------------


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return F.silu(x)

    @staticmethod
    def backward(ctx, grad_y):
        return grad_y * 2


def coarse(x: Tensor) -> Tensor:
    return (F.silu(x.bfloat16()) * 1.0).to(x.dtype) if x.dtype == torch.float32 else F.silu(x)


def long_sum(x: Tensor) -> Tensor:
    """A running sum, each step rounded to x's dtype."""
    total = torch.zeros_like(x[:, 0])
    for column in x.unbind(1):
        total = total + column.square()
    return x / total.unsqueeze(1)


def wrong_gradient(x: Tensor) -> Tensor:
    return Doubled.apply(x) if x.dtype != torch.float64 else F.silu(x)


@pytest.mark.parametrize(
    ("function", "faulty"),
    [(F.silu, False), (coarse, True), (long_sum, True), (wrong_gradient, True)],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_errors_beyond_the_inputs_own_rounding_fail_p6(function, faulty):
    target = Recipe(function, {"x": tensor("rows", "hidden")})
    assert failing(target, "P6") == ({"P6"} if faulty else set())


def in_float32(x: Tensor) -> Tensor:
    return F.silu(x.float())


def test_a_function_that_does_not_run_in_float64_is_said():
    target = Recipe(in_float32, {"x": tensor("rows", "hidden", dtype=torch.float32)})
    (row,) = check(target, [p for p in PROPERTIES if p.key == "P6"], "cpu", SMALL).rows
    assert row.cases == 0
    assert "against float64: y is float32 for float64 inputs" in row.reasons()


# --- Wrong recipes --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: Recipe(None, {"x": tensor("rows")}), "a function or a module, and not both"),
        (lambda: Recipe(mix, {"scale": 1.0}), "at least one tensor among its inputs"),
        (
            lambda: Recipe(mix, {"y": tensor("rows")}),
            "y is both an input and an output; rename the output",
        ),
        (
            lambda: list(Recipe(mix, {"x": tensor("rows", "heads")}).cases()),
            "name 'heads' is not defined in the dimension 'heads'; give it in sizes",
        ),
        (
            lambda: failing(Recipe(torch.sum, {"x": tensor("rows", "hidden")}), "P1"),
            r"y has the shape \(\), its recipe says \(19, 100\)",
        ),
        (
            lambda: failing(scaled(), "P1"),
            "Scaled has the parameters gain; its recipe has none",
        ),
    ],
)
def test_a_wrong_recipe_says_what_is_wrong(make, sentence):
    with pytest.raises(RecipeError, match=sentence):
        make()
