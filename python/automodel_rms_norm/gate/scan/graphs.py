"""Whether the graphs that are compiled for grad mode and for no_grad can give different bits."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from automodel_rms_norm.contexts import NO_GRAD, OUTPUTS, Results, first_difference
from automodel_rms_norm.gate.inductor import each_choice, recorded
from automodel_rms_norm.gate.recipe import Case, Recipe

__all__ = ["Graphs", "graphs"]


@dataclass(frozen=True)
class Graphs:
    """What one case gave.

    Attributes:
        case: its label.
        graphs: how many forward graphs were compiled for the two modes together.
        choices: how many configurations the autotuner had for the kernel that had the most.
        answers: how many different outputs the two modes gave under all of these choices.
        compiles, differed: how often both modes were compiled afresh, left to the autotuner, and
            how often their outputs differed then.
        first: the first difference; "" if there was none.
    """

    case: str
    graphs: int
    choices: int
    answers: int
    compiles: int
    differed: int
    first: str


def graphs(compiled: Recipe, case: Case, compiles: int) -> Graphs:
    """Runs a function that compiles itself, anew each time."""

    def both() -> tuple[Results, Results]:
        function = compiled.bind(case)
        return OUTPUTS.run(function, case.inputs), NO_GRAD.run(function, case.inputs)

    answers: list[Results] = []
    choices, forward, first = 1, 0, ""
    for pair, recording in each_choice(both):
        choices = max(choices, recording.choices)
        forward = max(forward, sum(graph.kind != "backward" for graph in recording.graphs))
        for results in pair:
            if not _among(results, answers):
                answers.append(results)
    differed = 0
    for _ in range(compiles):
        with recorded():
            grad, no_grad = both()
        differed += first_difference(no_grad, grad, "no_grad against grad") is not None
    if len(answers) > 1:
        first = str(first_difference(answers[1], answers[0], "one answer against another"))
    return Graphs(case.label, forward, choices, len(answers), compiles, differed, first)


def _among(results: Results, answers: Iterable[Results]) -> bool:
    return any(first_difference(results, answer, "") is None for answer in answers)
