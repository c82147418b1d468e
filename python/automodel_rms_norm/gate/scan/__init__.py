"""``numerics-gate scan``: what an installed package compiles or makes a custom op of."""
