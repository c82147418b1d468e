"""What an experiment found out about one possible cause."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["ABSENT", "CAUSE", "RULED_OUT", "UNKNOWN", "Finding"]

CAUSE, RULED_OUT, ABSENT, UNKNOWN = "cause", "ruled out", "does not arise", "not run"


@dataclass(frozen=True)
class Finding:
    """``verdict`` is one of the four; ``evidence`` has a line for each observation."""

    cause: str
    verdict: str
    sentence: str
    evidence: tuple[str, ...] = ()
