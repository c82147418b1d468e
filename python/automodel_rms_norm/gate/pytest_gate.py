"""One run of the gate for a test: of a target and the properties that it must keep."""

from __future__ import annotations

from automodel_rms_norm.gate.check import check
from automodel_rms_norm.gate.properties import PROPERTIES, chosen
from automodel_rms_norm.gate.recipe import Recipe, Selection
from automodel_rms_norm.gate.report import Report

__all__ = ["run"]


def run(
    target: Recipe | str,
    expect: str = "",
    *,
    device: str = "auto",
    quick: bool = True,
    timeout: float = 300,
) -> Report:
    """Checks the properties in `expect`, "P1,P3" for example, all of them by default.

    Raises:
        ValueError: for a property that there is not.
        TargetError, RecipeError: where there is no such target, or it cannot be called.
    """
    keys = chosen(expect) if expect else ()
    asked = [p for p in PROPERTIES if p.key in keys or not keys]
    return check(target, asked, device, Selection(quick), timeout=timeout)
