"""One run of the gate: every check of the chosen properties on this machine's devices."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

import automodel_rms_norm as arn
from automodel_rms_norm.gate.capture import captured_cases, why_no_capture
from automodel_rms_norm.gate.cases import Case, accuracy_cases, model_cases
from automodel_rms_norm.gate.environment import environment
from automodel_rms_norm.gate.plan import OP, Plan, Property, Target
from automodel_rms_norm.gate.properties import PROPERTIES
from automodel_rms_norm.gate.report import Report
from automodel_rms_norm.gate.runner import Check, Outcome, not_run, run

__all__ = ["Selection", "check", "why_no_gpu"]


def why_no_gpu() -> str:
    """Why nothing can be run on a GPU here; "" where it can."""
    if not torch.cuda.is_available():
        return "no CUDA GPU on this machine"
    if not (info := arn.build_info())["cuda"]:
        return f"automodel-rms-norm was built without CUDA kernels: {info['no_cuda_reason']}"
    return ""


@dataclass(frozen=True)
class Selection:
    """Which cases to check: `quick` with fewer widths and dtypes; otherwise what is not empty."""

    quick: bool = False
    dtypes: tuple[torch.dtype, ...] = ()
    widths: tuple[int, ...] = ()
    rows: int | None = None

    @property
    def everything(self) -> bool:
        """Whether widths and rows are left to the gate."""
        return not self.widths and self.rows is None

    def takes(self, case: Case) -> bool:
        return not self.dtypes or case.inputs.x.dtype in self.dtypes


def _checks(
    target: Target, properties: Sequence[Property], device: str, selection: Selection
) -> Iterator[Check]:
    """Every check, with one that says so for each property that something is missing for."""
    no_gpu, no_capture, captured = why_no_gpu(), why_no_capture(), list[Case]()
    if not no_capture and selection.everything:
        try:
            captured = captured_cases()
        except Exception as error:  # a transformers that has moved on
            no_capture = f"it could not be trained for one step: {type(error).__name__}: {error}"
    models = [*model_cases(selection.quick, selection.widths, selection.rows), *captured]
    accuracy = list(accuracy_cases(selection.quick))
    reasons: dict[str, None] = {}  # in the order of the cases

    def kept(cases: Sequence[Case]) -> list[Case]:
        why = [(case, target.why_not(case)) for case in filter(selection.takes, cases)]
        reasons.update({reason: None for _, reason in why if reason})
        return [case for case, reason in why if not reason]

    models, accuracy = kept(models), kept(accuracy)
    plans = []
    for name in ("cpu", "cuda") if device == "auto" else (device,):
        if name == "cuda" and no_gpu:
            continue

        def moved(cases: Sequence[Case], to: str = name) -> tuple[Case, ...]:
            return tuple(case.to(to) for case in cases)

        plans.append(Plan(target, torch.device(name), moved(models), moved(accuracy)))
    for property in properties:
        for plan in plans:
            yield from property.checks(plan)
        for reason in reasons:
            yield not_run(property.key, "some cases", reason)
        if device == "auto" and no_gpu:
            yield not_run(property.key, "every case on a GPU", f"on a GPU: {no_gpu}")
        if no_capture and selection.everything and property.key != "P7":
            yield not_run(property.key, "norms of a real model", f"on a real model: {no_capture}")


def check(
    target: Target = OP,
    properties: Sequence[Property] = PROPERTIES,
    device: str = "auto",
    selection: Selection | None = None,
    console: Console | None = None,
    expected: Sequence[str] = (),
) -> Report:
    """Runs the checks on this machine.

    Args:
        target: the norm.
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
