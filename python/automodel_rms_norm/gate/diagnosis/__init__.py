"""``numerics-gate diagnose``: why a function's bits depend on how it is run."""
