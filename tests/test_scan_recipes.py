"""The recipes that ship for NeMo AutoModel fit its installed release, as far as that has them."""

import inspect
from dataclasses import replace

import pytest
import torch
from automodel_rms_norm.contexts import eager
from automodel_rms_norm.gate import recipes, targets
from automodel_rms_norm.gate.recipe import Recipe, RecipeError, Selection, tensor
from automodel_rms_norm.gate.scan.names import Names
from automodel_rms_norm.gate.scan.sources import ScanError, read_package

AUTOMODEL = recipes.recipes_for("nemo_automodel")


def installed() -> Names:
    try:
        return Names(read_package("nemo_automodel").sources)
    except ScanError:
        pytest.skip("nemo-automodel is not installed; pip install --no-deps nemo-automodel")


def uncompiled(recipe: Recipe) -> Recipe:
    if recipe.function is None:
        return recipe
    function = getattr(recipe.function, "_torchdynamo_orig_callable", recipe.function)
    return replace(recipe, function=inspect.unwrap(function))


@pytest.mark.long
def test_recipes_for_automodel_run():
    names = installed()
    here = [function for function in AUTOMODEL if names.definition(function)]
    ran = []
    for function in here:
        try:
            recipe = uncompiled(targets.load(function))
            case = next(iter(recipe.cases(Selection(quick=True))))
            with torch._dynamo.config.patch(disable=True):
                results = eager(recipe.bind(case), case.inputs)
        except (targets.TargetError, ImportError, RuntimeError):
            continue  # without a dependency, or a GPU
        for name, grad in case.inputs.grads.items():
            assert grad is None or results[name].shape == grad.shape, function
            assert grad is None or results[name].dtype == grad.dtype, function
        ran.append(function)
    assert len(ran) > len(here) / 2


def test_a_recipe_is_found_by_its_name(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "my_recipes.py").write_text(
        "from automodel_rms_norm.gate.recipe import Recipe, tensor\n"
        "inputs = {'input': tensor('rows', 'hidden')}\n"
        "RECIPES = {'torch.nn.functional:silu': lambda silu: Recipe(silu, inputs=inputs)}\n"
    )
    recipe = targets.load("torch.nn.functional:silu", "my_recipes")
    assert recipe.function is torch.nn.functional.silu
    assert recipe.name == "torch.nn.functional:silu"


def test_a_recipe_for_other_arguments_is_refused(monkeypatch):
    function, made = "torch.nn.functional:silu", {"gate": tensor("rows", "hidden")}
    found = {function: lambda silu: Recipe(silu, inputs=made)}
    monkeypatch.setattr(recipes, "recipes_for", lambda package, others: found)
    with pytest.raises(RecipeError, match=r"it takes \(input, inplace\), and its recipe gives"):
        targets.load(function)
