"""What is checked: a target, on a device, on cases; a property as the checks that it asks for."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

import automodel_rms_norm as arn
from automodel_rms_norm.bits import Difference, compare
from automodel_rms_norm.contexts import Function, Inputs, eager
from automodel_rms_norm.gate.cases import Case, NormFunction
from automodel_rms_norm.gate.runner import Check

__all__ = ["OP", "Plan", "Property", "Target", "first_difference"]


def _rstd(x: Tensor, weight: Tensor | None, eps: float, zero_centered_gamma: bool) -> Tensor:
    rstd: Tensor = torch.ops.automodel.rms_norm_forward(x, weight, eps, zero_centered_gamma)[1]
    return rstd


@dataclass(frozen=True)
class Target:
    """The norm under test: ``function(x, weight, eps, zero_centered_gamma) -> y``.

    ``rstd`` takes the same and returns rstd, of x's leading shape; None where the norm does not
    tell it. ``why_not`` gives the reason why a case cannot be asked of this norm, or nothing.
    ``keeps_contract`` says that it claims this package's bits: the recorded digests, and the same
    on every CPU instruction set.
    """

    name: str
    function: NormFunction
    rstd: NormFunction | None = None
    why_not: Callable[[Case], str] = lambda case: ""
    keeps_contract: bool = True

    def bind(self, case: Case) -> Function:
        """The norm as a function of x, weight and eps, as `case` has it."""
        return case.bind(self.function)

    def results(self, case: Case, inputs: Inputs) -> dict[str, Tensor]:
        """y, the gradients and, if told, rstd of `inputs`: eager, grad mode, otherwise `case`."""
        outputs = eager(self.bind(case), inputs)
        results = {name: part for name, part in outputs._asdict().items() if part is not None}
        if self.rstd is not None:
            x, weight, _, eps = inputs
            results["rstd"] = self.rstd(x, weight, eps, case.zero_centered_gamma)
        return results


OP = Target("automodel_rms_norm.rms_norm", arn.rms_norm, _rstd)


@dataclass(frozen=True)
class Plan:
    """What to check on one device. The cases' tensors are on that device."""

    target: Target
    device: torch.device
    cases: tuple[Case, ...]
    accuracy_cases: tuple[Case, ...]


@dataclass(frozen=True)
class Property:
    """A line of the contract."""

    key: str
    meaning: str
    checks: Callable[[Plan], Iterable[Check]]


def first_difference(
    actual: dict[str, Tensor], expected: dict[str, Tensor], label: str
) -> Difference | None:
    """The first difference among results of the same names."""
    for name, tensor in actual.items():
        if difference := compare(tensor, expected[name], f"{name}, {label}"):
            return difference
    return None
