from automodel_rms_norm.gate.recipe import Recipe, tensor

RECIPES = {
    "driven_package.norms:waits": lambda function: Recipe(
        function, inputs={"x": tensor("rows", "hidden")}
    )
}
