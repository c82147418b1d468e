"""Checks one function of a package: the work of one process of a scan.

``python -m automodel_rms_norm.gate.scan.drive JOB ANSWER`` reads a Job from one JSON file and
keeps the other up to date, so that what was measured outlasts a crash and a time limit.
"""

from __future__ import annotations

import ast
import inspect
import json
import os
import sys
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import torch

from automodel_rms_norm.contexts import Function
from automodel_rms_norm.gate import check as gate
from automodel_rms_norm.gate.properties import PROPERTIES
from automodel_rms_norm.gate.recipe import DTYPES, Case, Recipe, RecipeError, Selection
from automodel_rms_norm.gate.runner import raised
from automodel_rms_norm.gate.scan.graphs import graphs
from automodel_rms_norm.gate.targets import TargetError, load

__all__ = ["GRAPHS", "Answer", "Job"]

GRAPHS = "graphs"  # asked for like a property


@dataclass(frozen=True)
class Job:
    """What is asked of one function; plain values alone, as JSON has them."""

    function: str
    settings: str | None
    recipes: str | None
    device: str
    asked: tuple[str, ...]
    quick: bool
    dtypes: tuple[str, ...]
    widths: tuple[int, ...]
    rows: int | None
    repeats: int

    @property
    def selection(self) -> Selection:
        dtypes = tuple(DTYPES[name] for name in self.dtypes)
        return Selection(self.quick, dtypes, tuple(self.widths), self.rows)


@dataclass
class Answer:
    """What came of a job.

    Attributes:
        why_not: why the function could not be driven after all, or the run did not end.
        properties: of each property as gate.report has it in JSON: cases, failures, reasons, the
            first difference.
        graphs: of each case, as Graphs has it.
    """

    why_not: str = ""
    properties: dict[str, dict[str, Any]] = field(default_factory=dict)
    graphs: list[dict[str, Any]] = field(default_factory=list)


@dataclass(frozen=True, eq=False)
class _Compiled(Recipe):
    """A recipe whose function is compiled as the package does it, once for a case."""

    compile_settings: dict[str, Any] | None = None
    _bound: dict[Case, Function] = field(default_factory=dict)

    def bind(self, case: Case) -> Function:
        if case not in self._bound:
            self._bound.clear()
            function = super().bind(case)
            if self.compile_settings is not None:
                function = torch.compile(function, **self.compile_settings)
            self._bound[case] = function
        return self._bound[case]


def _compiled(recipe: Recipe, settings: str | None) -> Recipe:
    values = {f.name: getattr(recipe, f.name) for f in fields(Recipe)}
    return _Compiled(**values, compile_settings=None if settings is None else _literal(settings))


def _literal(settings: str) -> dict[str, Any]:
    """The settings that are literals; the others belong to a call that is not made here."""
    call = ast.parse(f"f({settings})", mode="eval").body
    assert isinstance(call, ast.Call)
    found = {}
    for keyword in call.keywords:
        try:
            if keyword.arg:
                found[keyword.arg] = ast.literal_eval(keyword.value)
        except ValueError:
            continue
    return found


def _plain(recipe: Recipe) -> Recipe:
    """Without the compiler that decorates the function, which P2 brings itself."""
    values = {f.name: getattr(recipe, f.name) for f in fields(Recipe)}
    if recipe.function is not None:
        values["function"] = inspect.unwrap(
            getattr(recipe.function, "_torchdynamo_orig_callable", recipe.function)
        )
    return Recipe(**values)


def _answer(job: Job, path: Path) -> None:
    answer = Answer()

    def keep() -> None:
        beside = path.with_suffix(".new")
        beside.write_text(json.dumps(asdict(answer)))
        os.replace(beside, path)

    keep()
    try:
        recipe = replace(load(job.function, job.recipes), captured=None)
        if next(recipe.cases(job.selection), None) is None:
            raise RecipeError("no case of these dtypes")
    except (TargetError, RecipeError) as error:
        answer.why_not = str(error)
        return keep()
    compiled = _compiled(recipe, job.settings)
    for property in PROPERTIES:
        if property.key in job.asked:
            target = _plain(recipe) if property.key == "P2" else compiled
            report = gate.check(target, [property], job.device, job.selection)
            answer.properties[property.key] = report.as_json()["properties"][0]
            keep()
    if GRAPHS in job.asked:
        for case in compiled.cases(job.selection):
            if case.main:
                try:
                    found = graphs(compiled, case.to(job.device), job.repeats)
                except Exception as error:  # the function's own
                    answer.why_not = f"its graphs: {raised(error)}"
                    return keep()
                answer.graphs.append(asdict(found))
                keep()
    return None


def main(job: str, answer: str) -> None:
    _answer(Job(**json.loads(Path(job).read_text())), Path(answer))


if __name__ == "__main__":
    main(*sys.argv[1:])
