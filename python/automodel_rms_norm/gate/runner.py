"""Runs checks and keeps what came of each. Knows nothing of what is checked."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from automodel_rms_norm.bits import Difference
from automodel_rms_norm.contexts import Results

__all__ = [
    "FAILS",
    "HOLDS",
    "NOT_RUN",
    "Check",
    "Measured",
    "NotRunError",
    "Outcome",
    "not_run",
    "outcome",
    "raised",
    "run",
]

HOLDS, FAILS, NOT_RUN = "holds", "fails", "not run"


class NotRunError(Exception):
    """Raised by a check that cannot be run here, with the reason."""


class Measured(NamedTuple):
    """What the function gave, and the difference from what the property asks, if there is one."""

    results: Results
    judge: Callable[[], Difference | None]


@dataclass(frozen=True)
class Check:
    """One comparison: of which property, on which inputs, in which circumstances.

    ``run`` raises NotRunError where it cannot tell; any other exception is a failure of this check.
    """

    property: str
    case: str
    context: str
    run: Callable[[], Measured]


@dataclass(frozen=True)
class Outcome:
    """What came of a check. ``detail`` is the difference, the exception or the reason, in words."""

    property: str
    case: str
    context: str
    status: str
    detail: str = ""
    difference: Difference | None = None


def not_run(property: str, case: str, reason: str, context: str = "") -> Check:
    """A check that says why there is none."""

    def refuse() -> Measured:
        raise NotRunError(reason)

    return Check(property, case, context, refuse)


def raised(error: Exception) -> str:
    """An exception in one line."""
    lines = str(error).strip().splitlines() or [""]
    return f"raised {type(error).__name__}: {lines[0]}"


def outcome(check: Check) -> Outcome:
    """Runs one check."""
    place = (check.property, check.case, check.context)
    try:
        difference = check.run().judge()
    except NotRunError as reason:
        return Outcome(*place, NOT_RUN, str(reason))
    except Exception as error:  # whatever the function under test raises is a finding
        return Outcome(*place, FAILS, raised(error))
    if difference is None:
        return Outcome(*place, HOLDS)
    return Outcome(*place, FAILS, str(difference), difference)


def run(checks: Iterable[Check]) -> Iterator[Outcome]:
    """The outcomes, as they come."""
    return map(outcome, checks)
