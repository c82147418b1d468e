"""The seven properties of the numerics contract, as the checks that they ask for."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial

import torch

from automodel_rms_norm import _C, golden
from automodel_rms_norm.accuracy import inaccuracies
from automodel_rms_norm.bits import Difference
from automodel_rms_norm.contexts import AUTOGRAD_CONTEXTS, Context, Inputs, eager, run_mode_contexts
from automodel_rms_norm.gate.cases import Case
from automodel_rms_norm.gate.devices import forced_isa, p4
from automodel_rms_norm.gate.plan import Plan, Property, Target
from automodel_rms_norm.gate.row_checks import p3, p5
from automodel_rms_norm.gate.runner import Check, not_run

__all__ = ["PROPERTIES"]


def _in_contexts(
    key: str, target: Target, cases: Iterable[Case], contexts: Iterable[Context]
) -> Iterator[Check]:
    contexts = list(contexts)
    for case in cases:
        for context in contexts:
            if not context.why_not(case.inputs):
                run = partial(context.difference, target.bind(case), case.inputs)
                yield Check(key, case.label, context.name, run)


def _p1(plan: Plan) -> Iterator[Check]:
    return _in_contexts("P1", plan.target, plan.cases, AUTOGRAD_CONTEXTS)


def _p2(plan: Plan) -> Iterator[Check]:
    main = [case for case in plan.cases if case.main]
    return _in_contexts(
        "P2", plan.target, main, run_mode_contexts(fullgraph=plan.target.keeps_contract)
    )


def _accurate(target: Target, case: Case) -> Difference | None:
    outputs = eager(target.bind(case), case.inputs)
    return next(iter(inaccuracies(outputs, case.inputs, case.zero_centered_gamma)), None)


def _p6(plan: Plan) -> Iterator[Check]:
    # The formula beyond float64 is slow: of float64 the few rows of accuracy_cases do.
    others = [case for case in plan.cases if case.inputs.x.dtype != torch.float64]
    for case in (*plan.accuracy_cases, *others):
        run = partial(_accurate, plan.target, case)
        yield Check("P6", case.label, "against the exact formula", run)


def _recorded(
    target: Target, case: golden.GoldenCase, device: torch.device, isa: str
) -> Difference | None:
    def run(case: golden.GoldenCase, given: golden.GoldenInputs) -> golden.Outputs:
        if case.residual:  # of the op that adds; another target has no such function
            return golden.run_op(case, given)
        inputs = Inputs(given.x, given.weight, given.grad_y, case.eps)
        as_case = Case(str(case), inputs, case.zero_centered_gamma)
        return dict(target.results(as_case, inputs))

    with forced_isa(isa):
        for result in golden.verify(run, device, [case]):
            if not result.holds:
                digests = f"{result.digest:#018x}, recorded {result.expected:#018x}"
                return Difference(f"digest of {result.output}", digests)
    return None


def _p7(plan: Plan) -> Iterator[Check]:
    if not plan.target.keeps_contract:
        yield not_run("P7", "every case", "digests: none are recorded for this target")
        return
    on_cpu = plan.device.type == "cpu"
    for case in golden.cases():
        for isa in _C.supported_isas() if on_cpu else [_C.active_isa()]:
            run = partial(_recorded, plan.target, case, plan.device, isa)
            yield Check("P7", str(case), isa if on_cpu else "cuda", run)


PROPERTIES = (
    Property("P1", "y and gradients: same bits in every autograd context", _p1),
    Property("P2", "same bits compiled, exported and as a CUDA graph", _p2),
    Property("P3", "a row depends on itself, weight and eps alone", p3),
    Property("P4", "CPU instruction sets and CUDA give the same bits", p4),
    Property("P5", "grad_weight depends on the ordered rows alone", p5),
    Property("P6", "errors within derived bounds; 16-bit y within 1 ulp", _p6),
    Property("P7", "the bits recorded for this contract version", _p7),
)
