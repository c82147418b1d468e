"""P4: CPU instruction sets against each other, and CUDA against the CPU."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial

import automodel_rms_norm as arn
from automodel_rms_norm import _C
from automodel_rms_norm.bits import Difference
from automodel_rms_norm.gate.cases import Case
from automodel_rms_norm.gate.plan import Plan, Target, first_difference
from automodel_rms_norm.gate.runner import Check, not_run

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


def _isas_agree(target: Target, isa: str, case: Case) -> Difference | None:
    label = f"{isa} against {_C.active_isa()}"
    expected = target.results(case, case.inputs)
    with forced_isa(isa):
        return first_difference(target.results(case, case.inputs), expected, label)


def _devices_agree(target: Target, case: Case) -> Difference | None:
    expected = target.results(case, case.inputs.to("cpu"))
    return first_difference(target.results(case, case.inputs), expected, "CUDA against CPU")


def p4(plan: Plan) -> Iterator[Check]:
    """The checks of P4."""
    if plan.device.type == "cuda":
        for case in plan.cases:
            run = partial(_devices_agree, plan.target, case)
            yield Check("P4", case.label, "CUDA against CPU", run)
        return
    if not plan.target.keeps_contract:
        return
    supported, active = _C.supported_isas(), _C.active_isa()
    for isa in arn.build_info()["cpu_isas_compiled"]:
        if isa not in supported:
            yield not_run("P4", "every case", f"this CPU does not have {isa}")
    for case in plan.cases:
        for isa in supported:
            if isa != active:
                run = partial(_isas_agree, plan.target, isa, case)
                yield Check("P4", case.label, f"{isa} against {active}", run)
