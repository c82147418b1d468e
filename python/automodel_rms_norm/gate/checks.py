"""Which checks one run of the gate asks for: a target, properties, devices and cases."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

import automodel_rms_norm as arn
from automodel_rms_norm.contexts import named
from automodel_rms_norm.gate.inductor import recorded
from automodel_rms_norm.gate.plan import Plan
from automodel_rms_norm.gate.properties import PROPERTIES
from automodel_rms_norm.gate.recipe import Case, Recipe, RecipeError, Selection
from automodel_rms_norm.gate.runner import Check, NotRunError, Outcome, not_run, raised
from automodel_rms_norm.gate.targets import TargetError, load

__all__ = ["Place", "Request", "Run", "checks_of", "load_target", "why_no_gpu"]

# Where Inductor's kernels have several configurations to choose from.
CHOICE_ROWS = 4096


class Place(NamedTuple):
    """Where a check stands: the first fields of its Outcome."""

    property: str
    case: str
    context: str

    @classmethod
    def of(cls, check: Check) -> Place:
        return cls(check.property, check.case, check.context)


class Run(NamedTuple):
    """The target's name, the checks to come, and their outcomes in that order."""

    target: str
    places: list[Place]
    outcomes: Iterator[Outcome]


@dataclass(frozen=True)
class Request:
    """What to run of a target, in words, so that another process can.

    Attributes:
        keys: of the properties.
        device: "cpu", "cuda", or "auto" for both, as far as they are here.
        selection: which cases.
        digests: whether the digests of the results are wanted in the place of a judgement.
    """

    keys: tuple[str, ...]
    device: str
    selection: Selection
    digests: bool = False


def why_no_gpu() -> str:
    """Why nothing can be run on a GPU here; "" where it can."""
    if not torch.cuda.is_available():
        return "no CUDA GPU on this machine"
    if not (info := arn.build_info())["cuda"]:
        return f"automodel-rms-norm was built without CUDA kernels: {info['no_cuda_reason']}"
    return ""


def load_target(text: str) -> Recipe:
    """The target that `text` names, which may be in a file of the current folder.

    Raises:
        TargetError: see `targets.load`.
    """
    if "" not in sys.path:
        sys.path.insert(0, "")
    return load(text)


def checks_of(target: Recipe, request: Request) -> list[Check]:
    """Every check, with one that says so for each property that something is missing for.

    Raises:
        TargetError: where the target can be called on no device that is asked for.
        RecipeError: where its recipe does not fit it.
    """
    return list(_checks(target, request))


def _checks(target: Recipe, request: Request) -> Iterator[Check]:
    selection, no_gpu, absent = request.selection, why_no_gpu(), dict[str, str]()
    cases, extremes = list(target.cases(selection)), list(target.cases(selection, extreme=True))
    no_capture = ""
    if target.captured and selection.everything:
        try:
            captured = target.captured()
            cases += [c for c in captured if not selection.dtypes or c.dtype in selection.dtypes]
        except NotRunError as error:
            no_capture = str(error)
    plans = []
    for device in ("cpu", "cuda") if request.device == "auto" else (request.device,):
        if device == "cuda" and no_gpu:
            absent["every case on a GPU"] = f"on a GPU: {no_gpu}"
            continue
        with recorded() as recording:
            reason = _why_not_called(target, cases, device)
        if reason:
            absent[f"every case on {device}"] = f"on {device}: the target {reason}"
        else:
            compiles_itself = bool(recording.graphs)
            plans.append(_plan(target, device, cases, extremes, selection, compiles_itself))
    if not plans and absent:
        raise TargetError(f"{target.name} cannot be called: {'; '.join(absent.values())}")
    for property in PROPERTIES:
        if property.key not in request.keys:
            continue
        for plan in plans:
            yield from property.checks(plan)
        for reason in target.missing:
            yield not_run(property.key, "some cases", reason)
        for case, reason in absent.items():
            yield not_run(property.key, case, reason)
        if no_capture and property.key != "P7":
            yield not_run(property.key, "norms of a real model", no_capture)


def _plan(
    target: Recipe,
    device: str,
    cases: Sequence[Case],
    extremes: Sequence[Case],
    selection: Selection,
    compiles_itself: bool,
) -> Plan:
    if compiles_itself and selection.quick:  # anew for each case, which takes seconds
        main = [case for case in cases if case.main] or cases
        precise = max(main, key=lambda case: torch.finfo(case.dtype).bits)
        cases = [precise]
        extremes = [case for case in extremes if case.dtype == precise.dtype]

    def moved(cases: Sequence[Case]) -> tuple[Case, ...]:
        return tuple(case.to(device) for case in cases)

    tuned: Sequence[Case] = ()
    if device == "cuda":
        rows = selection.rows or CHOICE_ROWS
        few = Selection(True, selection.dtypes, selection.widths, rows)
        tuned = [case for case in target.cases(few) if case.main]
    plan = (moved(cases), moved(extremes), moved(tuned), selection.quick)
    return Plan(target, torch.device(device), *plan)


def _why_not_called(target: Recipe, cases: Sequence[Case], device: str) -> str:
    """What it raises in every one of the first cases; "" where it can be called."""
    reason = ""
    for case in cases[:3]:
        moved = case.to(device)
        try:
            with torch.no_grad():
                returned = target.bind(moved)(*moved.inputs.arguments.values())
            outputs = named(moved.inputs, returned)
        except RecipeError:
            raise
        except Exception as error:  # anybody's function
            reason = reason or raised(error)
            continue
        _check_outputs(target, moved, outputs)
        return ""
    return reason


def _check_outputs(target: Recipe, case: Case, outputs: dict[str, Tensor]) -> None:
    for name, tensor in outputs.items():
        grad = case.inputs.grads[name]
        if not isinstance(tensor, Tensor):
            raise RecipeError(f"{target.name}: {name} is {type(tensor).__name__}, not a tensor")
        if grad is not None and tensor.shape != grad.shape:
            raise RecipeError(
                f"{target.name}: {name} has the shape {tuple(tensor.shape)}, its recipe says "
                f"{tuple(grad.shape)}"
            )
