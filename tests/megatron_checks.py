"""Checks of integrations.megatron with a megatron-core wheel on the path."""

import functools
import inspect
import unittest.mock
from types import SimpleNamespace

import baselines
import support
import torch
from automodel_rms_norm.integrations import megatron
from automodel_rms_norm.testing import assert_bitwise_equal
from megatron.core.transformer.custom_layers import batch_invariant_kernels as kernels
from ranks import device
from sharding_checks import assert_refused
from torch import Tensor

EPS = 1e-5


def inputs_of(zero_centered_gamma: bool = False, rows: int = 32) -> support.Inputs:
    """Weights away from 1, with which Megatron's own tests do not try."""
    return support.make_inputs(
        rows,
        160,
        weight_dtype=torch.float32,
        zero_centered_gamma=zero_centered_gamma,
        device=device(),
    )


def check_both_functions_are_the_op() -> None:
    with megatron.enabled():
        for zero_centered_gamma in (False, True):
            inputs = inputs_of(zero_centered_gamma)
            expected = support.reference_outputs(inputs, EPS, zero_centered_gamma)
            actual = support.forward_backward(
                kernels.BatchInvariantRMSNormFn.apply, inputs, EPS, zero_centered_gamma
            )
            support.assert_same(actual, expected)
        inputs = inputs_of()
        actual = support.forward_backward(kernels.rmsnorm_batch_invariant, inputs, EPS)
        support.assert_same(actual, support.reference_outputs(inputs, EPS))


def check_the_offset_is_used() -> None:
    """PR 6859: with zero_centered_gamma the result is another one."""
    inputs = inputs_of()
    apply = "BatchInvariantRMSNormFn"
    with megatron.enabled():
        plain, centred = (getattr(kernels, apply).apply(*inputs[:2], EPS, z) for z in (False, True))
        wrong = baselines.megatron_offset_ignored(*inputs[:2], EPS, True)
    assert not torch.equal(plain, centred)
    assert not torch.equal(wrong, centred)


def check_grad_x_has_the_weight_once() -> None:
    """PR 6859: right with weights that are not 1, where Megatron's own is not."""
    for zero_centered_gamma in (False, True):
        inputs = inputs_of(zero_centered_gamma)
        with megatron.enabled():
            actual = support.forward_backward(
                kernels.BatchInvariantRMSNormFn.apply, inputs, EPS, zero_centered_gamma
            )
        formula = support.forward_backward(baselines.formula, inputs, EPS, zero_centered_gamma)
        twice = baselines.megatron_weight_twice(
            inputs.grad_y.float(), inputs.x.float(), inputs.weight, EPS, zero_centered_gamma
        )
        # Two float32 computations, each rounded to bfloat16: neighbours at most, 2^-7 apart.
        error = (actual.grad_x.float() - formula.grad_x.float()).abs()
        assert (error <= 2.0**-7 * formula.grad_x.float().abs() + 2.0**-18).all()
        assert (actual.grad_x.float() - twice).abs().max() > 0.05


def check_splitting_the_batch_changes_nothing() -> None:
    """Megatron's own checks of batch invariance, with gradients."""
    inputs = inputs_of(rows=64)
    with megatron.enabled():
        whole = support.forward_backward(kernels.rmsnorm_batch_invariant, inputs, EPS)
        for size in (1, 7, 16, 63):
            parts = [
                support.forward_backward(
                    kernels.rmsnorm_batch_invariant, support.Inputs(x, inputs.weight, grad_y), EPS
                )
                for x, grad_y in zip(inputs.x.split(size), inputs.grad_y.split(size), strict=True)
            ]
            for name in ("y", "grad_x"):
                joined = torch.cat([getattr(part, name) for part in parts])
                assert_bitwise_equal(joined, getattr(whole, name), name)


def check_batch_invariant_mode_leaves_the_op_its_bits() -> None:
    """The mode without its part for Transformer Engine, whose torch library has no wheel."""
    inputs = inputs_of()
    without = {f"_te_{name}_for_batch_invariant": lambda: None for name in ("patch", "unpatch")}
    with (
        unittest.mock.patch.multiple(kernels, **without),
        megatron.enabled(),
        kernels.set_batch_invariant_mode(),
    ):
        assert kernels.is_batch_invariant_mode_enabled()
        actual = support.forward_backward(kernels.rmsnorm_batch_invariant, inputs, EPS)
    support.assert_same(actual, support.reference_outputs(inputs, EPS))


def check_what_the_mode_makes_of_transformer_engines_norm() -> None:
    """The forward that every `transformer_engine.pytorch.RMSNorm` gets in the mode."""
    for zero_centered_gamma in (False, True):
        inputs = inputs_of(zero_centered_gamma)

        def forward(x: Tensor, weight: Tensor, eps: float, zero_centered_gamma: bool) -> Tensor:
            norm = SimpleNamespace(weight=weight, eps=eps, zero_centered_gamma=zero_centered_gamma)
            return kernels._te_rmsnorm_forward_patched(norm, x)

        with megatron.enabled():
            actual = support.forward_backward(forward, inputs, EPS, zero_centered_gamma)
        support.assert_same(actual, support.reference_outputs(inputs, EPS, zero_centered_gamma))


def check_it_is_undone() -> None:
    function = kernels.BatchInvariantRMSNormFn
    assert "apply" not in vars(function)
    megatron.enable()
    assert "apply" in vars(function)
    megatron.disable()
    assert "apply" not in vars(function)


def assert_refused_with(owner: object, name: str, value: object, message: str) -> None:
    before = inspect.getattr_static(owner, name)
    setattr(owner, name, value)
    try:
        assert_refused(megatron.enable, message)
    finally:
        setattr(owner, name, before)
    assert "apply" not in vars(kernels.BatchInvariantRMSNormFn)


def check_another_signature_is_refused() -> None:
    function, expected = kernels.BatchInvariantRMSNormFn, "not (x, weight, eps, zero_centered_gamma"
    with_less = staticmethod(lambda ctx, x, weight, eps: x)
    assert_refused_with(function, "forward", with_less, f"takes (x, weight, eps), {expected}")
    assert_refused_with(kernels, function.__name__, object, f"takes (), {expected}")


def check_a_wrapper_that_does_not_call_the_function_is_refused() -> None:
    for wrapper in (None, lambda x: x, functools.partial(kernels.rmsnorm_batch_invariant)):
        message = "rmsnorm_batch_invariant does not call BatchInvariantRMSNormFn"
        assert_refused_with(kernels, "rmsnorm_batch_invariant", wrapper, message)
