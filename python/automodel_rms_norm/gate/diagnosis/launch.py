"""Causes that lie in how a kernel is launched: where memory begins, how many rows there are, how
many multiprocessors or threads. Each is looked for in the eager and in the compiled function."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import torch

from automodel_rms_norm.contexts import EAGER, Results
from automodel_rms_norm.gate.diagnosis.finding import ABSENT, CAUSE, RULED_OUT, Finding
from automodel_rms_norm.gate.diagnosis.subject import Subject, differences
from automodel_rms_norm.gate.inductor import half_the_multiprocessors
from automodel_rms_norm.gate.rows import LAYOUTS, ROW_VARIANTS, count

__all__ = ["alignment", "batch_dependent_launch", "multiprocessor_dependent_sum"]


def _both(subject: Subject, batch: Subject) -> dict[str, tuple[Results, Results]]:
    """Eager and compiled: the results of the one, and those that the other's first choice gave."""
    with subject.first_choice():
        compiled = subject.run()
    return {
        "eager": (subject.uncompiled(), batch.eager[EAGER.name]),
        "compiled": (compiled, batch.choices[0].results[EAGER.name]),
    }


def _changes(pairs: dict[str, tuple[Results, Results]]) -> list[str]:
    return [f"{k}: {line}" for k, (a, e) in pairs.items() for line in differences(a, e)]


def _verdict(cause: str, changed: list[str], what: str) -> Finding:
    if changed:
        return Finding(cause, CAUSE, f"{what} changes bits", tuple(changed))
    return Finding(cause, RULED_OUT, f"{what} changes nothing, eager and compiled")


def alignment(subject: Subject) -> Finding:
    """Whether results change where every tensor with rows begins one element later in memory."""
    cause = "alignment"
    if not subject.inputs.rows:
        return Finding(cause, ABSENT, "the recipe has no rows")
    (shifted,) = LAYOUTS["one element off alignment"](subject.inputs)
    changed = _changes(_both(subject.given(shifted.inputs), subject))
    return _verdict(cause, changed, "a base one element off alignment")


def batch_dependent_launch(subject: Subject) -> Finding:
    """Whether the results of a row, first, middle or last, change where it is alone."""
    cause, inputs = "batch-dependent launch", subject.inputs
    if not inputs.rows:
        return Finding(cause, ABSENT, "the recipe has no rows")
    rows = {**inputs.rows, **{f"grad_{name}": d for name, d in inputs.rows.items()}}
    changed = []
    for alone, _, there in ROW_VARIANTS["row alone"](inputs):
        row = int(there)

        def of_row(results: Results, row: int) -> Results:
            return {k: t.narrow(rows[k], row, 1) for k, t in results.items() if k in rows}

        both = _both(subject.given(alone), subject)
        pairs = {k: (of_row(mine, 0), of_row(batch, row)) for k, (mine, batch) in both.items()}
        changed += [f"row {row}, {line}" for line in _changes(pairs)]
    return _verdict(cause, changed, f"a row alone instead of among {count(inputs)}")


def multiprocessor_dependent_sum(subject: Subject) -> Finding:
    """Whether results change with half the multiprocessors or, on a CPU, with one thread."""
    on_gpu = subject.inputs.device.type == "cuda"
    cause = "SM-count-dependent dw" if on_gpu else "thread-count-dependent dw"
    fewer: AbstractContextManager[None] = half_the_multiprocessors() if on_gpu else _one_thread()
    with fewer:
        changed = _changes(_both(subject, subject))
    if not on_gpu:
        threads = torch.get_num_threads()
        return _verdict(cause, changed, f"one thread instead of {threads}")
    finding = _verdict(cause, changed, "half the multiprocessors")
    note = "half of them as Python and Inductor see it; a C++ kernel that asks CUDA sees them all"
    return Finding(cause, finding.verdict, finding.sentence, (*finding.evidence, note))


@contextmanager
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
