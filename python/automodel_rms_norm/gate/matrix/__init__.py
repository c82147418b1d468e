"""``numerics-gate matrix``: build, check and golden over versions of torch."""
