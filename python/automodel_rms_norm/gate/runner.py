"""Runs checks and keeps what came of each. Knows nothing of what is checked."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from automodel_rms_norm.bits import Difference

__all__ = ["FAILS", "HOLDS", "NOT_RUN", "Check", "NotRunError", "Outcome", "not_run", "run"]

HOLDS, FAILS, NOT_RUN = "holds", "fails", "not run"


class NotRunError(Exception):
    """Raised by a check that cannot be run here, with the reason."""


@dataclass(frozen=True)
class Check:
    """One comparison: of which property, on which inputs, in which circumstances.

    ``run`` returns None where the property holds and the difference where it does not. It raises
    NotRunError where it cannot tell; any other exception is a failure of this check.
    """

    property: str
    case: str
    context: str
    run: Callable[[], Difference | None]


@dataclass(frozen=True)
class Outcome:
    """What came of a check. ``detail`` is the difference, the exception or the reason, in words."""

    property: str
    case: str
    context: str
    status: str
    detail: str = ""
    difference: Difference | None = None


def not_run(property: str, case: str, reason: str) -> Check:
    """A check that says why there is none."""

    def refuse() -> Difference | None:
        raise NotRunError(reason)

    return Check(property, case, "", refuse)


def _outcome(check: Check) -> Outcome:
    place = (check.property, check.case, check.context)
    try:
        difference = check.run()
    except NotRunError as reason:
        return Outcome(*place, NOT_RUN, str(reason))
    except Exception as error:  # whatever the function under test raises is a finding
        lines = str(error).strip().splitlines() or [""]
        return Outcome(*place, FAILS, f"raised {type(error).__name__}: {lines[0]}")
    if difference is None:
        return Outcome(*place, HOLDS)
    return Outcome(*place, FAILS, str(difference), difference)


def run(checks: Iterable[Check]) -> Iterator[Outcome]:
    """The outcomes, as they come."""
    return map(_outcome, checks)
