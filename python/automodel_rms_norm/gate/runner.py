"""Runs checks and keeps what came of each. Knows nothing of what is checked."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch

from automodel_rms_norm.bits import Difference
from automodel_rms_norm.contexts import Inputs, Results
from automodel_rms_norm.gate.inductor import recompiling
from automodel_rms_norm.golden import digest

__all__ = [
    "FAILS",
    "HOLDS",
    "INPUTS",
    "NOT_RUN",
    "Check",
    "Measured",
    "NotRunError",
    "Outcome",
    "measure",
    "not_run",
    "outcome",
    "raised",
    "run",
]

HOLDS, FAILS, NOT_RUN = "holds", "fails", "not run"
INPUTS = "inputs"  # the name, among digests, of that of the inputs


class NotRunError(Exception):
    """Raised by a check that cannot be run here, with the reason."""


class Measured(NamedTuple):
    """What the function gave, and the difference from what the property asks, if there is one."""

    results: Results
    judge: Callable[[], Difference | None]


@dataclass(frozen=True)
class Check:
    """One comparison: of which property, on which inputs, in which circumstances.

    ``inputs`` is what `case` says in words, None where there is no one set of them. ``run``
    raises NotRunError where it cannot tell; any other exception is a failure of this check.
    """

    property: str
    case: str
    context: str
    run: Callable[[], Measured]
    inputs: Inputs | None = None


@dataclass(frozen=True)
class Outcome:
    """What came of a check.

    ``detail`` is the difference, the exception or the reason, in words; ``digests``, of the results
    by name, are there where they were asked for.
    """

    property: str
    case: str
    context: str
    status: str
    detail: str = ""
    difference: Difference | None = None
    digests: dict[str, str] | None = None


def not_run(property: str, case: str, reason: str, context: str = "") -> Check:
    """A check that says why there is none."""

    def refuse() -> Measured:
        raise NotRunError(reason)

    return Check(property, case, context, refuse)


def raised(error: Exception) -> str:
    """An exception in one line."""
    lines = str(error).strip().splitlines() or [""]
    return f"raised {type(error).__name__}: {lines[0]}"


def _attempt(check: Check, answer: Callable[[Measured], Outcome]) -> Outcome:
    place = (check.property, check.case, check.context)
    try:
        return answer(check.run())
    except NotRunError as reason:
        return Outcome(*place, NOT_RUN, str(reason))
    except Exception as error:  # whatever the function under test raises is a finding
        return Outcome(*place, FAILS, raised(error))


def outcome(check: Check) -> Outcome:
    """Runs one check and judges it."""
    place = (check.property, check.case, check.context)

    def judged(measured: Measured) -> Outcome:
        difference = measured.judge()
        if difference is None:
            return Outcome(*place, HOLDS)
        return Outcome(*place, FAILS, str(difference), difference)

    return _attempt(check, judged)


@lru_cache(maxsize=1)  # checks of a case follow each other
def _of_inputs(inputs: Inputs | None) -> str:
    if inputs is None:
        return ""
    tensors = [*inputs.tensors.values(), *(g for g in inputs.grads.values() if g is not None)]
    return " ".join(f"{digest(tensor):#018x}" for tensor in tensors)


def measure(check: Check) -> Outcome:
    """Runs one check for the digests of its results, and judges nothing."""
    place = (check.property, check.case, check.context)

    def digested(measured: Measured) -> Outcome:
        digests = {name: f"{digest(tensor):#018x}" for name, tensor in measured.results.items()}
        return Outcome(*place, HOLDS, digests={INPUTS: _of_inputs(check.inputs), **digests})

    return _attempt(check, digested)


def run(checks: Iterable[Check], answer: Callable[[Check], Outcome] = outcome) -> Iterator[Outcome]:
    """The outcomes, as they come. No case is run by what was compiled for an earlier one."""
    before = None
    for check in checks:
        case = (check.property, check.case, check.inputs)
        if case != before:
            torch.compiler.reset()
        before = case
        with recompiling():
            found = answer(check)
        yield found
