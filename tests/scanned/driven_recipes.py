import torch
from automodel_rms_norm.gate.recipe import Recipe, tensor


def _gated(function, **options):
    rows = tensor("rows", "hidden")
    return Recipe(function, inputs={"x": rows, "gate": rows}, **options)


def _float32_alone(function):
    return _gated(function, dtypes=(torch.float32,))


RECIPES = {
    "driven_package.norms:needs_a_recipe": _gated,
    "driven_package.norms:other_arguments": _gated,
    "driven_package.norms:of_float32": _float32_alone,
}
