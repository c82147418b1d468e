"""The recorded answers of any target: a file of digests, and what has moved since."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from automodel_rms_norm.gate.recipe import DTYPES, NAMES, Selection
from automodel_rms_norm.gate.report import Report
from automodel_rms_norm.gate.runner import FAILS, HOLDS, INPUTS, NOT_RUN, Outcome

__all__ = ["KEYS", "Record", "compared"]

FORMAT = 1
KEYS = ("P1", "P2", "P2-choices", "P3", "P5", "P6")

Place = tuple[str, str, str]  # property, case, context


def _place(outcome: Outcome) -> Place:
    return outcome.property, outcome.case, outcome.context


@dataclass(frozen=True)
class Record:
    """What a target gave: of each property, case and context the digests of the results by name.

    ``selection`` and ``environment`` are those of the run that recorded it.
    """

    target: str
    selection: Selection
    environment: dict[str, str]
    digests: dict[Place, dict[str, str]]

    @property
    def keys(self) -> set[str]:
        """The properties that it has answers of."""
        return {key for key, _, _ in self.digests}

    @classmethod
    def of(cls, report: Report, target: str, selection: Selection) -> Record:
        digests = {_place(o): o.digests for o in report.outcomes if o.digests is not None}
        return cls(target, selection, report.environment, digests)

    def as_text(self) -> str:
        chosen = self.selection
        found = {
            "format": FORMAT,
            "target": self.target,
            "selection": {
                "quick": chosen.quick,
                "dtypes": [NAMES[dtype] for dtype in chosen.dtypes],
                "widths": list(chosen.widths),
                "rows": chosen.rows,
            },
            "environment": self.environment,
            "answers": [[*place, digests] for place, digests in self.digests.items()],
        }
        return json.dumps(found, indent=0) + "\n"

    @classmethod
    def read(cls, path: str) -> Record:
        """
        Raises:
            ValueError: where there is no such file, or it is not what `as_text` writes; the message
                says so in one line.
        """
        try:
            found: dict[str, Any] = json.loads(Path(path).read_text(encoding="utf-8"))
            if found["format"] != FORMAT:
                raise ValueError(f"format {found['format']}, this version reads {FORMAT}")
            chosen = found["selection"]
            selection = Selection(
                bool(chosen["quick"]),
                tuple(DTYPES[name] for name in chosen["dtypes"]),
                tuple(int(width) for width in chosen["widths"]),
                None if chosen["rows"] is None else int(chosen["rows"]),
            )
            answers = {
                (str(key), str(case), str(context)): {str(k): str(v) for k, v in digests.items()}
                for key, case, context, digests in found["answers"]
            }
            return cls(str(found["target"]), selection, dict(found["environment"]), answers)
        except OSError as error:
            raise ValueError(f"{path}: {error.strerror}") from error
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(
                f"{path} is no file of numerics-gate golden --write ({type(error).__name__}: "
                f"{error}); record it again"
            ) from error


def _compared(outcome: Outcome, before: dict[str, str] | None) -> Outcome:
    now = outcome.digests
    if now is None:
        return outcome
    if before is None:
        return replace(
            outcome, status=NOT_RUN, detail="in the file: no answer of this", digests=None
        )
    if now.get(INPUTS) != before.get(INPUTS):
        reason = "in the file: other inputs (torch's random numbers have changed); record it again"
        return replace(outcome, status=NOT_RUN, detail=reason, digests=None)
    moved = [name for name in {**before, **now} if now.get(name) != before.get(name)]
    if not moved:
        return replace(outcome, status=HOLDS)
    digests = f"{moved[0]}: {now.get(moved[0])}, recorded {before.get(moved[0])}"
    return replace(outcome, status=FAILS, detail=f"digest of {digests}")


def compared(report: Report, before: Record) -> Report:
    """The report of a run for digests, judged by the recorded ones.

    What was recorded and was not run here is said; what moved fails.
    """
    outcomes = [
        _compared(outcome, before.digests.get(_place(outcome))) for outcome in report.outcomes
    ]
    run = {_place(outcome) for outcome in report.outcomes}
    for place in before.digests:
        if place not in run and place[0] in report.meanings:
            outcomes.append(Outcome(*place, NOT_RUN, "recorded, not run here"))
    changed = {
        f"{name} when recorded": value
        for name, value in before.environment.items()
        if report.environment.get(name) != value
    }
    environment = {**report.environment, **changed}
    return replace(report, outcomes=outcomes, environment=environment, failing="moved")
