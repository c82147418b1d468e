"""One run of the gate: every check of the chosen properties on this machine's devices."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from itertools import groupby

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

import automodel_rms_norm as arn
from automodel_rms_norm.gate.environment import environment
from automodel_rms_norm.gate.norms import OP
from automodel_rms_norm.gate.plan import Plan, Property
from automodel_rms_norm.gate.properties import PROPERTIES
from automodel_rms_norm.gate.recipe import Case, Recipe, Selection
from automodel_rms_norm.gate.report import Report
from automodel_rms_norm.gate.runner import Check, NotRunError, Outcome, not_run, run

__all__ = ["check", "why_no_gpu"]


def why_no_gpu() -> str:
    """Why nothing can be run on a GPU here; "" where it can."""
    if not torch.cuda.is_available():
        return "no CUDA GPU on this machine"
    if not (info := arn.build_info())["cuda"]:
        return f"automodel-rms-norm was built without CUDA kernels: {info['no_cuda_reason']}"
    return ""


def _checks(
    target: Recipe, properties: Sequence[Property], device: str, selection: Selection
) -> Iterator[Check]:
    """Every check, with one that says so for each property that something is missing for."""
    no_gpu, no_capture = why_no_gpu(), ""
    cases, extremes = list(target.cases(selection)), list(target.cases(selection, extreme=True))
    if target.captured and selection.everything:
        try:
            captured = target.captured()
            cases += [c for c in captured if not selection.dtypes or c.dtype in selection.dtypes]
        except NotRunError as error:
            no_capture = str(error)
    plans = []
    for name in ("cpu", "cuda") if device == "auto" else (device,):
        if name == "cuda" and no_gpu:
            continue

        def moved(cases: Sequence[Case], to: str = name) -> tuple[Case, ...]:
            return tuple(case.to(to) for case in cases)

        plans.append(Plan(target, torch.device(name), moved(cases), moved(extremes)))
    for property in properties:
        for plan in plans:
            yield from property.checks(plan)
        for reason in target.missing:
            yield not_run(property.key, "some cases", reason)
        if device == "auto" and no_gpu:
            yield not_run(property.key, "every case on a GPU", f"on a GPU: {no_gpu}")
        if no_capture and property.key != "P7":
            yield not_run(property.key, "norms of a real model", no_capture)


def check(
    target: Recipe = OP,
    properties: Sequence[Property] = PROPERTIES,
    device: str = "auto",
    selection: Selection | None = None,
    console: Console | None = None,
    expected: Sequence[str] = (),
) -> Report:
    """Runs the checks on this machine.

    Args:
        target: the function and its recipe.
        properties: the ones to check.
        device: "cpu", "cuda", or "auto" for both, as far as they are here.
        selection: which cases; all of them by default.
        console: where progress is shown, a bar or, where it is no terminal, a line a property;
            nowhere by default.
        expected: the properties that decide whether the target holds; all of them by default.
    """
    start = time.monotonic()
    console = console or Console(quiet=True)
    outcomes: list[Outcome] = []
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("making inputs", total=None)
        checks = list(_checks(target, properties, device, selection or Selection()))
        progress.update(task, total=len(checks))
        meanings = {property.key: property.meaning for property in properties}
        for key, group in groupby(checks, lambda check: check.property):
            begin, before = time.monotonic(), len(outcomes)
            progress.update(task, description=meanings[key])
            for outcome in run(group):
                outcomes.append(outcome)
                progress.advance(task)
            if not console.is_terminal:  # no bar there, but nobody is to wait in silence
                count, spent = len(outcomes) - before, time.monotonic() - begin
                console.print(f"{key} {meanings[key]}: {count} cases, {spent:.0f} s")
    seconds = time.monotonic() - start
    return Report(target.name, meanings, environment(), outcomes, seconds, tuple(expected))
