from automodel_rms_norm.gate.recipe import Recipe, tensor


def _gated(function):
    rows = tensor("rows", "hidden")
    return Recipe(function, inputs={"x": rows, "gate": rows})


RECIPES = {
    "driven_package.norms:needs_a_recipe": _gated,
    "driven_package.norms:other_arguments": _gated,
}
