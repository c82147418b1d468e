"""The properties of the numerics contract, as the checks that they ask for."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from automodel_rms_norm import _C, golden
from automodel_rms_norm.bits import Difference, compare
from automodel_rms_norm.contexts import EAGER, NO_GRAD, Results, autograd_contexts, norm_inputs
from automodel_rms_norm.gate import float64, inductor
from automodel_rms_norm.gate.devices import forced_isa, p4
from automodel_rms_norm.gate.plan import Plan, Property
from automodel_rms_norm.gate.recipe import Case
from automodel_rms_norm.gate.row_checks import p3, p5
from automodel_rms_norm.gate.runner import Check, Measured, NotRunError, not_run
from automodel_rms_norm.run_modes import run_mode_contexts

__all__ = ["PROPERTIES", "chosen"]


def _p1(plan: Plan) -> Iterator[Check]:
    for case in plan.cases:
        for context in autograd_contexts(case.inputs):
            yield plan.check("P1", case, context)


def _p2(plan: Plan) -> Iterator[Check]:
    for case in plan.compiled_cases:
        fullgraph = plan.target.fullgraph
        for context in run_mode_contexts(case.inputs, plan.compile_modes, fullgraph):
            yield plan.check("P2", case, context)


def _p2_choices(plan: Plan) -> Iterator[Check]:
    if plan.device.type != "cuda":
        reason = "choices: Inductor's autotuner has none on a CPU"
        yield not_run("P2-choices", "every case", reason)
    for case in plan.tuned:
        for dynamic in (True, False):
            yield _every_choice(plan, case, dynamic)


def _every_choice(plan: Plan, case: Case, dynamic: bool) -> Check:
    """Both graphs, grad and no_grad, in every configuration of the autotuner, with one answer."""

    def once() -> Results:
        compiled = torch.compile(plan.target.bind(case), dynamic=dynamic)
        graphs = {context.name: context.run(compiled, case.inputs) for context in (EAGER, NO_GRAD)}
        return {
            f"{name}, {graph}": tensor.clone()
            for graph, results in graphs.items()
            for name, tensor in results.items()
        }

    def run() -> Measured:
        if reason := inductor.why_not_forced():
            raise NotRunError(f"choices: {reason}")
        answers = [results for results, _ in inductor.each_choice(once)]
        results = {
            f"{name}, choice {number + 1} of {len(answers)}": tensor
            for number, answer in enumerate(answers)
            for name, tensor in answer.items()
        }
        return Measured(results, lambda: _one_answer(results))

    context = f"compiled {'dynamic' if dynamic else 'static'}, every choice"
    return Check("P2-choices", case.label, context, run, case.inputs)


def _one_answer(results: Results) -> Difference | None:
    """Every tensor is compared with the first of the same output, whichever graph it is from."""
    first: Results = {}
    for name, tensor in results.items():
        expected = first.setdefault(name.split(",")[0], tensor)
        if difference := compare(tensor, expected, name):
            return difference
    return None


def _accuracy(plan: Plan, case: Case) -> Check:
    judge = plan.target.judge or float64.inaccuracy

    def run() -> Measured:
        results = plan.run(case, EAGER)
        return Measured(results, lambda: judge(plan.target, case, results))

    against = "against the exact formula" if plan.target.judge else "against itself in float64"
    return Check("P6", case.label, against, run, case.inputs)


def _p6(plan: Plan) -> Iterator[Check]:
    # In float64's place the exact formula is slow: of float64 the few rows of the extremes do.
    others = [case for case in plan.cases if case.dtype != torch.float64]
    for case in (*plan.extremes, *others):
        yield _accuracy(plan, case)


def _recorded(plan: Plan, case: golden.GoldenCase, isa: str) -> Check:
    def outputs(case: golden.GoldenCase, given: golden.GoldenInputs) -> golden.Outputs:
        if case.residual:  # of the op that adds
            return golden.run_op(case, given)
        inputs = norm_inputs(given.x, given.weight, given.grad_y, case.eps)
        inputs = inputs.with_arguments(zero_centered_gamma=case.zero_centered_gamma)
        results: Results = plan.target.results(Case(str(case), inputs, case.x_dtype), inputs)
        return dict(results)

    def difference() -> Difference | None:
        with forced_isa(isa):
            for result in golden.verify(outputs, plan.device, [case]):
                if not result.holds:
                    digests = f"{result.digest:#018x}, recorded {result.expected:#018x}"
                    return Difference(f"digest of {result.output}", digests)
        return None

    context = isa if plan.device.type == "cpu" else "cuda"
    return Check("P7", str(case), context, lambda: Measured({}, difference))


def _p7(plan: Plan) -> Iterator[Check]:
    if not plan.target.contract:
        reason = (
            "digests: this package has none of this target; numerics-gate golden TARGET --write "
            "FILE records them"
        )
        yield not_run("P7", "every case", reason)
        return
    on_cpu = plan.device.type == "cpu"
    for case in golden.cases():
        for isa in _C.supported_isas() if on_cpu else [_C.active_isa()]:
            yield _recorded(plan, case, isa)


PROPERTIES = (
    Property("P1", "results: same bits in every autograd context", _p1),
    Property("P2", "same bits compiled, exported and as a CUDA graph", _p2),
    Property("P2-choices", "same bits in every configuration of Inductor's autotuner", _p2_choices),
    Property("P3", "a row depends on itself and what rows share alone", p3),
    Property("P4", "CPU instruction sets and CUDA give the same bits", p4),
    Property("P5", "run to run; parameters' gradients on the ordered rows alone", p5),
    Property("P6", "errors within bounds; 16-bit y of a norm within 1 ulp", _p6),
    Property("P7", "the bits recorded for this contract version", _p7),
)


def chosen(text: str) -> tuple[str, ...]:
    """The keys of the properties named in `text`, "p1,P3"; P2 is also what begins with P2-.

    Raises:
        ValueError: for one that there is not, with those that there are.
    """
    known = [property.key for property in PROPERTIES]
    named = [key.strip().lower() for key in text.split(",")]
    for key in named:
        if key not in map(str.lower, known):
            raise ValueError(
                f"there is no property {key.upper()!r}; choose from {', '.join(known)}"
            )
    return tuple(
        key for key in known if any(f"{key.lower()}-".startswith(f"{one}-") for one in named)
    )
