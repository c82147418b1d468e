"""P4: CPU instruction sets against each other, and CUDA against the CPU."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial

import automodel_rms_norm as arn
from automodel_rms_norm import _C
from automodel_rms_norm.contexts import Results, first_difference
from automodel_rms_norm.gate.plan import Plan
from automodel_rms_norm.gate.recipe import Case
from automodel_rms_norm.gate.runner import Check, Measured, not_run

__all__ = ["forced_isa", "p4"]


@contextlib.contextmanager
def forced_isa(name: str) -> Iterator[None]:
    """The op's CPU kernels of instruction set `name` within."""
    before = _C.active_isa()
    _C.force_isa(name)
    try:
        yield
    finally:
        _C.force_isa(before)


def _compared(
    actual: Callable[[], Results], expected: Callable[[], Results], label: str
) -> Callable[[], Measured]:
    def run() -> Measured:
        right, results = expected(), actual()
        return Measured(results, lambda: first_difference(results, right, label))

    return run


def _isa_check(plan: Plan, isa: str, case: Case) -> Check:
    label = f"{isa} against {_C.active_isa()}"

    def forced() -> Results:
        with forced_isa(isa):
            return plan.target.results(case, case.inputs)

    default = partial(plan.target.results, case, case.inputs)
    return Check("P4", case.label, label, _compared(forced, default, label))


def _device_check(plan: Plan, case: Case) -> Check:
    def on_cpu() -> Results:
        moved = case.to("cpu")
        return plan.target.results(moved, moved.inputs)

    label = "CUDA against CPU"
    on_cuda = partial(plan.target.results, case, case.inputs)
    return Check("P4", case.label, label, _compared(on_cuda, on_cpu, label))


def p4(plan: Plan) -> Iterator[Check]:
    """The checks of P4."""
    if plan.device.type == "cuda":
        yield from (_device_check(plan, case) for case in plan.cases)
        return
    if not plan.target.contract:
        return
    supported, active = _C.supported_isas(), _C.active_isa()
    for isa in arn.build_info()["cpu_isas_compiled"]:
        if isa not in supported:
            yield not_run("P4", "every case", f"this CPU does not have {isa}")
    for case in plan.cases:
        for isa in supported:
            if isa != active:
                yield _isa_check(plan, isa, case)
