"""What is checked: a target, on a device, on cases; a property as the checks that it asks for."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch

from automodel_rms_norm.contexts import EAGER, Context, Results, first_difference
from automodel_rms_norm.gate.recipe import Case, Recipe
from automodel_rms_norm.gate.runner import Check, Measured
from automodel_rms_norm.run_modes import COMPILE_MODES

__all__ = ["Plan", "Property"]


@dataclass(frozen=True, eq=False)
class Plan:
    """What to check on one device. The cases' tensors are on that device."""

    target: Recipe
    device: torch.device
    cases: tuple[Case, ...]
    extremes: tuple[Case, ...]
    tuned: tuple[Case, ...] = ()  # large enough for Inductor's autotuner to have a choice
    quick: bool = False
    # Of the last case alone: checks of a case follow each other.
    _expected: dict[tuple[Case, str], Results] = field(default_factory=dict)

    @property
    def main_cases(self) -> list[Case]:
        return [case for case in self.cases if case.main]

    @property
    def compiled_cases(self) -> list[Case]:
        """The main ones; the first of each dtype where it has to be quick."""
        first = {case.dtype: case for case in reversed(self.main_cases)}
        return list(first.values()) if self.quick else self.main_cases

    @property
    def compile_modes(self) -> tuple[str, ...]:
        return COMPILE_MODES[:2] if self.quick else COMPILE_MODES

    def run(self, case: Case, context: Context) -> Results:
        return context.run(self.target.bind(case), case.inputs)

    def expected(self, case: Case, context: Context = EAGER) -> Results:
        """What the context gives, run once for all checks of a case that follow each other."""
        key = (case, context.name)
        if key not in self._expected:
            if any(other is not case for other, _ in self._expected):
                self._expected.clear()
            self._expected[key] = self.run(case, context)
        return self._expected[key]

    def check(self, property: str, case: Case, context: Context) -> Check:
        """That a context gives the bits of the one that it is compared with."""

        def run() -> Measured:
            assert context.against is not None
            expected = self.expected(case, context.against)
            results = self.run(case, context)
            return Measured(results, lambda: first_difference(results, expected, context.label))

        return Check(property, case.label, context.name, run, case.inputs)


@dataclass(frozen=True)
class Property:
    """A line of the contract."""

    key: str
    meaning: str
    checks: Callable[[Plan], Iterable[Check]]
