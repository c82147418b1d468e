"""Recipes for the functions of packages, by ``module:qualname``.

A module of recipes has RECIPES: of each name, what makes a Recipe of the installed function or
class. Those of SHIPPED come with this package, and ``numerics-gate check module:qualname`` uses
them; ``numerics-gate scan --recipes MODULE`` takes others as well.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import replace
from importlib import import_module
from typing import Any

from automodel_rms_norm.gate.recipe import Recipe, RecipeError

__all__ = ["Maker", "recipe_for", "recipes_for"]

Maker = Callable[[Any], Recipe]

# Modules of recipes by the package that they are for.
SHIPPED = {
    "nemo_automodel": (
        "automodel_rms_norm.gate.recipes.automodel_norms",
        "automodel_rms_norm.gate.recipes.automodel",
    ),
}


def recipes_for(package: str, others: str | None = None) -> Mapping[str, Maker]:
    """Those that ship for functions of `package`, and those of the module `others`.

    Raises:
        RecipeError: if there is no such module, or it has no RECIPES.
    """
    found: dict[str, Maker] = {}
    for name in [*SHIPPED.get(package, ()), *([others] if others else [])]:
        try:
            found.update(import_module(name).RECIPES)
        except Exception as error:  # an import runs anybody's code
            raise RecipeError(f"no RECIPES in {name}: {type(error).__name__}: {error}") from error
    return found


def recipe_for(function: str, found: Any, others: str | None = None) -> Recipe | None:
    """The recipe of the installed function or class `found`; None where there is none.

    Raises:
        RecipeError: as `recipes_for`; if the function takes other arguments than the recipe's.
    """
    maker = recipes_for(function.partition(".")[0], others).get(function)
    if maker is None:
        return None
    recipe = replace(maker(found), name=function)
    if recipe.function is found:
        _check_arguments(recipe)
    return recipe


def _check_arguments(recipe: Recipe) -> None:
    assert recipe.function is not None
    parameters = inspect.signature(recipe.function).parameters.values()
    taken = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    if list(recipe.inputs) != taken[: len(recipe.inputs)]:
        raise RecipeError(
            f"it takes ({', '.join(taken)}), and its recipe gives ({', '.join(recipe.inputs)})"
        )
