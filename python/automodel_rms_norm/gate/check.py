"""One run of the gate: every check of the chosen properties on this machine's devices."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from itertools import groupby

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from automodel_rms_norm.gate import isolate, runner
from automodel_rms_norm.gate.checks import (
    Place,
    Request,
    Run,
    checks_of,
    load_target,
    why_no_gpu,
)
from automodel_rms_norm.gate.environment import environment
from automodel_rms_norm.gate.norms import OP
from automodel_rms_norm.gate.plan import Property
from automodel_rms_norm.gate.properties import PROPERTIES
from automodel_rms_norm.gate.recipe import Recipe, Selection
from automodel_rms_norm.gate.report import Report
from automodel_rms_norm.gate.runner import NOT_RUN, Outcome

__all__ = ["check", "why_no_gpu"]


def _here(target: Recipe | str, request: Request) -> Run:
    target = load_target(target) if isinstance(target, str) else target
    checks = checks_of(target, request)
    answer = runner.measure if request.digests else runner.outcome
    places = [Place.of(check) for check in checks]
    return Run(target.name, places, runner.run(checks, answer))


def check(
    target: Recipe | str = OP,
    properties: Sequence[Property] = PROPERTIES,
    device: str = "auto",
    selection: Selection | None = None,
    console: Console | None = None,
    expected: Sequence[str] = (),
    *,
    timeout: float = 0,
    digests: bool = False,
) -> Report:
    """Runs the checks on this machine.

    Args:
        target: a recipe, or the text that names it.
        properties: the ones to check.
        device: "cpu", "cuda", or "auto" for both, as far as they are here.
        selection: which cases; all of them by default.
        console: where progress is shown, a bar or, where it is no terminal, a line a property;
            nowhere by default.
        expected: the properties that decide whether the target holds; all of them by default.
        timeout: the seconds that a check may take, in a process of its own, of a target that is
            given as text; 0 for no limit and this process.
        digests: whether the digests of the results are wanted in the place of a judgement.

    Raises:
        TargetError, RecipeError: where there is no such target, or it cannot be called.
    """
    start = time.monotonic()
    console = console or Console(quiet=True)
    keys = tuple(property.key for property in properties)
    request = Request(keys, device, selection or Selection(), digests)
    outcomes: list[Outcome] = []
    interrupted = False
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    if timeout and isinstance(target, str):
        found = isolate.run(target, request, timeout)
    else:
        found = _here(target, request)
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("", total=len(found.places))
        try:
            for outcome in _shown(found, progress, console):
                outcomes.append(outcome)
                progress.advance(task)
        except KeyboardInterrupt:  # what was measured is kept
            interrupted = True
            left = found.places[len(outcomes) :]
            outcomes += [Outcome(*place, NOT_RUN, "interrupted") for place in left]
    seconds = time.monotonic() - start
    meanings = {property.key: property.meaning for property in properties}
    measured = (found.target, meanings, environment(), outcomes, seconds)
    return Report(*measured, tuple(expected), interrupted=interrupted)


def _shown(found: Run, progress: Progress, console: Console) -> Iterator[Outcome]:
    """The outcomes, with what is being checked as the description of the bar."""
    words = {property.key: property.meaning for property in PROPERTIES}
    for key, group in groupby(found.places, lambda place: place.property):
        count, begin = len(list(group)), time.monotonic()
        progress.update(progress.task_ids[0], description=words[key])
        for _ in range(count):
            yield next(found.outcomes)
        if not console.is_terminal:  # no bar there, but nobody is to wait in silence
            console.print(f"{key} {words[key]}: {count} cases, {time.monotonic() - begin:.0f} s")
