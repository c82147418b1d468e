"""Assertions on bits, for this package's tests, its gate and other projects' norms."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from automodel_rms_norm import bits
from automodel_rms_norm.contexts import Function, Inputs, autograd_contexts, norm_inputs
from automodel_rms_norm.gate.plan import Plan
from automodel_rms_norm.gate.recipe import Case, Recipe, tensor
from automodel_rms_norm.gate.row_checks import p3
from automodel_rms_norm.gate.runner import FAILS, run
from automodel_rms_norm.run_modes import COMPILE_MODES, run_mode_contexts

__all__ = [
    "COMPILE_MODES",
    "assert_batch_invariant",
    "assert_bitwise_equal",
    "assert_context_parity",
]


def assert_bitwise_equal(actual: Tensor, expected: Tensor, name: str = "tensor") -> None:
    """Asserts the same dtype, shape and bits, where any NaN equals any NaN.

    Args:
        actual: any shape (empty too), strides and device.
        expected: compared on the CPU where it is on another device than `actual`.
        name: how the message calls the tensor.

    Raises:
        AssertionError: with how many elements differ and, of the first, the coordinate, both
            values, both bit patterns and their distance in units in the last place.
        TypeError, ValueError: where an argument has no bits to compare: no tensor, sparse, nested,
            quantized, complex128, on the meta device.
    """
    if difference := bits.compare(actual, expected, name):
        raise AssertionError(str(difference))


def assert_context_parity(
    function: Function,
    x: Tensor,
    weight: Tensor | None,
    eps: float,
    *,
    grad_y: Tensor | None = None,
    compile_modes: Sequence[str] = COMPILE_MODES,
    fullgraph: bool = False,
) -> list[str]:
    """Asserts that a norm has the same bits in every context of properties P1 and P2.

    Runs ``function(x, weight, eps)`` forward and backward in grad mode, weight an nn.Parameter.
    Compares with that y, and grad_x and grad_weight where they exist, of: no_grad, inference_mode,
    x frozen, weight frozen, weight a plain tensor, activation checkpointing; torch.compile in
    `compile_modes` (also under no_grad, and in the first of them under inference_mode and with x
    and weight frozen, each compared with the same without the compiler); torch.export; a replayed
    CUDA graph for a CUDA x. It clears torch.compile's caches, so that no recompile limit hides a
    mode.

    Args:
        function: ``(x, weight, eps) -> y``, differentiable.
        x: (..., hidden), floating point.
        weight: (hidden,) or None.
        eps: passed on.
        grad_y: y's shape and dtype; by default fixed random values.
        compile_modes: some of COMPILE_MODES; none with ``()``, which leaves out export too.
        fullgraph: passed on to torch.compile; without it a graph break is no failure.

    Returns:
        The names of the contexts that were run; one that cannot be run with these inputs is not
        among them.

    Raises:
        AssertionError: naming each context that differs, what from, and the first difference.
        TypeError, ValueError: where x, weight or grad_y is not a dense floating-point tensor.
    """
    inputs = _norm_inputs(x, weight, eps, grad_y)
    run_modes = run_mode_contexts(inputs, compile_modes, fullgraph)
    if not compile_modes:
        run_modes = [context for context in run_modes if context.name != "export"]
    ran, differences = [], []
    for context in [*autograd_contexts(inputs), *run_modes]:
        ran.append(context.name)
        if difference := context.difference(function, inputs):
            differences.append(str(difference))
    _raise_differences(differences, f"of {len(ran)} contexts")
    return ran


def assert_batch_invariant(
    function: Function,
    x: Tensor,
    weight: Tensor | None,
    eps: float,
    *,
    grad_y: Tensor | None = None,
) -> list[str]:
    """Asserts that every row of y and grad_x depends on that row, weight and eps alone: P3.

    Runs ``function(x, weight, eps)`` forward and backward on rows alone, in other batches, at other
    positions, of another rank, off alignment and with other strides, with the other rows changed,
    and for a CPU x with other thread counts.

    Args:
        function: ``(x, weight, eps) -> y``, differentiable.
        x: (rows, ..., hidden), floating point; its first dimension is the rows.
        weight: (hidden,) or None.
        eps: passed on.
        grad_y: y's shape and dtype; by default fixed random values.

    Returns:
        The names of what was varied.

    Raises:
        AssertionError: naming each variation that changes a row, and the first difference.
        TypeError, ValueError: where x, weight or grad_y is not a dense floating-point tensor, or x
            has no rows.
    """
    inputs = _norm_inputs(x, weight, eps, grad_y)
    if x.dim() < 2 or x.shape[0] < 2:
        raise ValueError(f"x must be (rows, ..., hidden) with two rows, got {tuple(x.shape)}")
    given = {"x": tensor("rows", "hidden"), "weight": None, "eps": eps}
    target = Recipe(function, given, any_rank=True)
    case = Case("x", inputs, x.dtype)
    checks = list(p3(Plan(target, x.device, (case,), ())))
    details = [outcome.detail for outcome in run(checks) if outcome.status == FAILS]
    _raise_differences(details, f"of {len(checks)} variations")
    return [check.context for check in checks]


def _norm_inputs(x: Tensor, weight: Tensor | None, eps: float, grad_y: Tensor | None) -> Inputs:
    for argument, given in (("x", x), ("weight", weight), ("grad_y", grad_y)):
        if given is None and argument != "x":
            continue
        dense = bits.check_dense(given, argument)
        if not dense.is_floating_point():
            raise TypeError(f"{argument} must be of a floating-point dtype, got {dense.dtype}")
    if grad_y is None:
        generator = torch.Generator().manual_seed(0)
        grad_y = torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x)
    return norm_inputs(x, weight, grad_y, eps)


def _raise_differences(differences: Sequence[str], among: str) -> None:
    if differences:
        raise AssertionError(
            f"the bits differ in {len(differences)} {among}\n" + "\n".join(differences)
        )
