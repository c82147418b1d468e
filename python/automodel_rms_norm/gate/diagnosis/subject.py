"""What is diagnosed: a target on one set of inputs, run with and without the compiler."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from importlib import import_module

import torch

from automodel_rms_norm.bits import compare, differing
from automodel_rms_norm.contexts import (
    EAGER,
    INFERENCE,
    NO_GRAD,
    Context,
    Function,
    Inputs,
    Results,
)
from automodel_rms_norm.gate.inductor import (
    Recording,
    each_choice,
    forced_choice,
    goes_through_inductor,
    recorded,
    why_not_forced,
)
from automodel_rms_norm.gate.recipe import Case, Recipe

__all__ = ["CONTEXTS", "Choice", "Subject", "answers", "differences", "differing_elements"]

CONTEXTS = (EAGER, NO_GRAD, INFERENCE)


def differences(actual: Results, expected: Results) -> list[str]:
    """One line for each result that both have and that has other bits."""
    found = (compare(actual[k], expected[k], k) for k in actual if k in expected)
    return [f"{difference.name}: {difference.summary}" for difference in found if difference]


def differing_elements(actual: Results, expected: Results) -> int:
    """How many elements of all results together have other bits. Same names, dtypes and shapes."""
    return sum(int(differing(actual[k], expected[k]).sum()) for k in actual)


def answers(results: Iterable[Results]) -> list[int]:
    """The number of each one's outputs and gradients, equal where all that two share is equal."""
    known: list[Results] = []
    numbers = []
    for result in results:
        same = (i for i, other in enumerate(known) if not differences(result, other))
        number = next(same, len(known))
        if number == len(known):
            known.append(result)
        numbers.append(number)
    return numbers


@dataclass(frozen=True, eq=False)
class Choice:
    """Every context's results where the autotuner takes one choice, and what was recorded."""

    results: dict[str, Results]
    recording: Recording


@dataclass(frozen=True, eq=False)
class Subject:
    """A target with a case, whose tensors are on the device."""

    target: Recipe
    case: Case

    @property
    def inputs(self) -> Inputs:
        return self.case.inputs

    @cached_property
    def function(self) -> Function:
        return self.target.bind(self.case)

    @cached_property
    def compiles_itself(self) -> bool:
        """Whether a plain call of it goes through torch.compile."""
        return goes_through_inductor(lambda: NO_GRAD.run(self.function, self.inputs))

    def compiled(self, backend: str = "inductor") -> Function:
        """As it compiles itself; else under torch.compile with dynamic shapes."""
        if self.compiles_itself and backend == "inductor":
            return self.function
        compiled: Function = torch.compile(self.function, dynamic=True, backend=backend)
        return compiled

    def given(self, inputs: Inputs) -> Subject:
        """The same target with other inputs; a module is made anew, for scalars are part of it."""
        other = replace(self, case=replace(self.case, inputs=inputs))
        vars(other)["compiles_itself"] = self.compiles_itself
        return other

    def run(self, context: Context = EAGER) -> Results:
        """Results of the compiled function."""
        return context.run(self.compiled(), self.inputs)

    def uncompiled(self, context: Context = EAGER) -> Results:
        """Results without any compiler, its own decorators included."""
        with torch.compiler.set_stance("force_eager"):
            return context.run(self.function, self.inputs)

    @contextmanager
    def first_choice(self) -> Iterator[None]:
        """Compiles anew within, the autotuner taking its first candidates: no luck in it."""
        with recorded() if why_not_forced() else forced_choice(0):
            yield

    def run_all(self) -> dict[str, Results]:
        return {context.name: self.run(context) for context in CONTEXTS}

    @cached_property
    def eager(self) -> dict[str, Results]:
        """Every context's results without the compiler."""
        return {context.name: self.uncompiled(context) for context in CONTEXTS}

    @cached_property
    def choices(self) -> list[Choice]:
        """Compiled, for every choice of the autotuner; where none can be forced, for its own."""
        if why_not_forced():
            with recorded() as recording:
                return [Choice(self.run_all(), recording)]
        return [Choice(results, recording) for results, recording in each_choice(self.run_all)]

    @contextmanager
    def rounding_as_written(self) -> Iterator[None]:
        """`first_choice`, with every rounding to a 16-bit type in its place."""
        config = import_module("torch._inductor.config")
        with config.patch(emulate_precision_casts=True), self.first_choice():
            yield

    @cached_property
    def rounded_as_written(self) -> Results:
        """Compiled, in grad mode; where there is no 16-bit type, nothing is to be put in place."""
        if self.case.dtype.itemsize > 2:
            return self.choices[0].results[EAGER.name]
        with self.rounding_as_written():
            return self.run()

    @property
    def recording(self) -> Recording:
        return self.choices[0].recording

    def free(self) -> Choice:
        """Compiled anew, the autotuner choosing by its timings."""
        with recorded() as recording:
            return Choice(self.run_all(), recording)
