"""Causes that lie in the compiler. Each finding is an experiment's: the cause is taken away, and
the difference goes with it or stays."""

from __future__ import annotations

import math
import re

import torch
from torch import Tensor

from automodel_rms_norm.contexts import EAGER, NO_GRAD, Inputs
from automodel_rms_norm.gate.diagnosis.finding import ABSENT, CAUSE, RULED_OUT, UNKNOWN, Finding
from automodel_rms_norm.gate.diagnosis.subject import (
    Subject,
    answers,
    differences,
    differing_elements,
)
from automodel_rms_norm.gate.inductor import Tuning, recorded, why_not_forced

__all__ = [
    "REDUCTION",
    "SCALAR",
    "autotuned_choice",
    "cast_order",
    "reduction_decomposition",
    "scalar_precision",
    "separate_graphs",
]


REDUCTION, SCALAR = "reduction decomposition", "scalar precision (eps as fp64)"


def separate_graphs(subject: Subject) -> Finding:
    """Whether grad mode's graph and no_grad's give other bits though both are tuned alike."""
    cause, graphs = "separate graphs", subject.recording.graphs
    if not graphs:
        return Finding(cause, ABSENT, "nothing is compiled by Inductor")
    kinds = [graph.kind for graph in graphs]
    evidence = [f"Inductor compiled {len(graphs)} graphs: {', '.join(kinds)}"]
    if "inference" not in kinds:
        return Finding(cause, ABSENT, "one graph serves every context", tuple(evidence))
    forward, inference = (next((g for g in graphs if g.kind == k), None) for k in _FORWARD)
    if forward and inference:
        ours, theirs = ([k.source for k in g.kernels] for g in (forward, inference))
        same = "the same" if ours == theirs else "other"
        evidence.append(f"with grad and without, {same} kernels are generated")
    unlike = []
    for number, choice in enumerate(subject.choices):
        for context in choice.results:
            found = differences(choice.results[context], choice.results[EAGER.name])
            unlike += [f"choice {number}, {context} against grad: {line}" for line in found]
    if unlike:
        sentence = "grad mode and no_grad are two graphs, with other bits at the same choice"
        return Finding(cause, CAUSE, sentence, (*evidence, *unlike))
    evidence.append("at the same choice of the autotuner, every context gives the same bits")
    sentence = "two graphs, but not other bits by that alone"
    return Finding(cause, RULED_OUT, sentence, tuple(evidence))


_FORWARD = ("forward", "inference")


def autotuned_choice(subject: Subject) -> Finding:
    """Whether the candidates of Inductor's autotuner give other bits."""
    cause, recording = "autotuned choice", subject.recording
    if reason := why_not_forced():
        return Finding(cause, UNKNOWN, reason)
    if not recording.tunings:
        where = "on a CPU" if subject.inputs.device.type == "cpu" else "here: one configuration"
        return Finding(cause, ABSENT, f"Inductor tunes nothing {where}")
    outputs, gradients = _numbered(subject, False), _numbered(subject, True)
    evidence = [_candidates(tuning) for tuning in dict.fromkeys(recording.tunings)]
    for number in range(len(subject.choices)):
        listed = [f"{k} answer {answer}" for (n, k), answer in outputs.items() if n == number]
        listed.append(f"gradients answer {gradients.get((number, EAGER.name), 'none')}")
        evidence.append(f"choice {number}: {', '.join(listed)}")
    answered, differentiated = (len(set(found.values())) for found in (outputs, gradients))
    if max(answered, differentiated) == 1:
        sentence = "the configurations that it is autotuned over give the same bits"
        return Finding(cause, RULED_OUT, sentence, tuple(evidence))
    tuned = {tuning.kernel: len(tuning.candidates) for tuning in recording.tunings}
    forward = [graph for graph in recording.graphs if graph.kind in _FORWARD]
    most = max((tuned.get(k.name, 1) for graph in forward for k in graph.kernels), default=1)
    graphs = "two graphs, each" if len({graph.kind for graph in forward}) == 2 else "one graph,"
    sentence = (
        f"{graphs} autotuned over {most} configurations with different reduction order; "
        f"{answered} answers, {differentiated} of the gradients; {_fixed(subject)}"
    )
    return Finding(cause, CAUSE, sentence, tuple(evidence))


def _candidates(tuning: Tuning) -> str:
    listed = "; ".join(f"{i}: {config}" for i, config in enumerate(tuning.candidates))
    return f"{tuning.kernel} has {len(tuning.candidates)} candidates: {listed}"


def _numbered(subject: Subject, gradients: bool) -> dict[tuple[int, str], int]:
    """The answer of each choice and context, outputs or gradients alone."""
    parts = {
        (number, context): {k: t for k, t in results.items() if k.startswith("grad_") is gradients}
        for number, choice in enumerate(subject.choices)
        for context, results in choice.results.items()
    }
    there = {place: part for place, part in parts.items() if part}
    return dict(zip(there, answers(there.values()), strict=True))


def _fixed(subject: Subject) -> str:
    alike = all(
        not differences(results, choice.results[EAGER.name])
        for choice in subject.choices
        for results in choice.results.values()
    )
    return "a fixed choice gives equal bits" if alike else "a fixed choice does not give equal bits"


# --- Compiled against eager -----------------------------------------------------------------------

STAGES = {
    "eager": "Dynamo's capture",
    "aot_eager": "AOTAutograd's trace",
    "aot_eager_decomp_partition": "the decompositions",
}


def _stages(subject: Subject) -> tuple[str, list[str]]:
    """The first stage of the compiler that changes bits, and a line for each that was tried."""
    evidence = []
    for backend, meaning in STAGES.items():
        with recorded() as recording:
            results = EAGER.run(subject.compiled(backend), subject.inputs)
        if recording.graphs:  # a graph break, beyond which the function's own decorator compiles
            evidence.append(f"up to {meaning}: not told apart, part of it is compiled on its own")
            continue
        found = differences(results, subject.eager[EAGER.name])
        evidence.append(f"up to {meaning}: {'; '.join(found) or 'eager bits'}")
        if found:
            return meaning, evidence
    return "Inductor's generated kernels", evidence


def reduction_decomposition(subject: Subject) -> Finding:
    """Whether compiling changes bits because sums are formed in another order.

    The experiment: inputs whose sums are exact in any order, while the rest still rounds; small
    whole numbers for what the outputs sum, signs and eps 3 for what the gradients sum.
    """
    cause = REDUCTION
    found = differences(subject.rounded_as_written, subject.eager[EAGER.name])
    if not found:
        return Finding(cause, ABSENT, "with its roundings in place, compiled gives eager's bits")
    stage, stages = _stages(subject)
    exact: dict[bool, list[str]] = {}  # by whether it is about gradients
    with subject.rounding_as_written():
        for of_grads, inputs in ((False, _whole(subject.inputs)), (True, _signs(subject.inputs))):
            other = subject.given(inputs)
            left = differences(other.run(), other.uncompiled())
            exact[of_grads] = [line for line in left if line.startswith("grad_") is of_grads]
    gone = set(_names(found)) - set(_names([*exact[False], *exact[True]]))
    evidence = (
        *found,
        *stages,
        f"sums exact in any order, outputs: {'; '.join(exact[False]) or 'eager bits'}",
        f"sums exact in any order, gradients: {'; '.join(exact[True]) or 'eager bits'}",
    )
    if not gone:
        return Finding(cause, RULED_OUT, "exact sums change nothing", evidence)
    sentence = (
        f"compiled and eager differ in {', '.join(_names(found))}, from {stage} on: reductions are "
        "decomposed and add in another order; where every order is exact the difference is gone"
    )
    return Finding(cause, CAUSE, sentence, evidence)


def _names(found: list[str]) -> list[str]:
    return [line.split(":")[0] for line in found]


def _pattern(tensor: Tensor, values: tuple[float, ...]) -> Tensor:
    generator = torch.Generator().manual_seed(tensor.numel())
    drawn = torch.randint(len(values), tensor.shape, generator=generator)
    return torch.tensor(values, dtype=tensor.dtype)[drawn].to(tensor.device)


def _whole(inputs: Inputs) -> Inputs:
    """Activations of small whole numbers: their squares add up exactly in any order."""

    def change(name: str, tensor: Tensor) -> Tensor:
        keep = name in inputs.parameters or not tensor.is_floating_point()
        return tensor if keep else _pattern(tensor, (-3.0, -2.0, -1.0, 1.0, 2.0, 3.0))

    return inputs.map(change)


def _signs(inputs: Inputs) -> Inputs:
    """Everything 1 or -1 and scalars 3: a norm's rstd is then 1/2, and every sum of it exact."""

    def change(name: str, tensor: Tensor) -> Tensor:
        return _pattern(tensor, (-1.0, 1.0)) if tensor.is_floating_point() else tensor

    scalars = {k: 3.0 for k, v in inputs.arguments.items() if isinstance(v, float)}
    return inputs.map(change).with_arguments(**scalars)


def scalar_precision(subject: Subject) -> Finding:
    """Whether a scalar kept in float64 changes bits.

    The experiment: the scalar as it is and as float32 has it, for eager the same number; all else
    that could round otherwise, such as the division of a mean, stays as it is.
    """
    cause, scalars = SCALAR, _scalars(subject.inputs)
    if not scalars:
        return Finding(cause, ABSENT, "there is no floating-point scalar among the arguments")
    if not subject.recording.graphs:
        return Finding(cause, ABSENT, "nothing is compiled by Inductor")
    wide = any(re.search(r"\"f64\[\]\"", graph.aten) for graph in subject.recording.graphs)
    how = "a float64 tensor" if wide else "a constant"
    evidence = [f"in the graphs a scalar is {how}"]
    size = 2.0 ** round(math.log2(abs(next(iter(scalars.values())))) / 2)
    whole = _whole(subject.inputs)
    scaled = whole.map(lambda n, t: t if n in whole.parameters or n in whole.grads else t * size)
    counts = []
    with subject.rounding_as_written():
        for changes in (scalars, {k: torch.tensor(v).item() for k, v in scalars.items()}):
            other = subject.given(scaled.with_arguments(**changes))
            compiled, eager = other.run(NO_GRAD), other.uncompiled(NO_GRAD)
            counts.append(differing_elements(compiled, eager))
            said = ", ".join(f"{k} {v!r}" for k, v in changes.items())
            found = "; ".join(differences(compiled, eager)) or "eager bits"
            evidence.append(f"{said}, squares of its size: {found}")
    if counts[1] < counts[0]:
        sentence = "the compiled code does not round the scalar to float32, as eager does"
        return Finding(cause, CAUSE, sentence + _part(*counts), tuple(evidence))
    sentence = "a scalar that float32 holds exactly changes nothing"
    return Finding(cause, RULED_OUT, sentence, tuple(evidence))


def _part(before: int, after: int) -> str:
    """How many of the elements that differed are explained, where it is not all of them."""
    explained = f"; a part of the difference: {before - after} of {before} elements"
    return explained if after else ""


def _scalars(inputs: Inputs) -> dict[str, float]:
    return {k: v for k, v in inputs.arguments.items() if isinstance(v, float) and v > 0}


def cast_order(subject: Subject) -> Finding:
    """Whether bits change because the compiler leaves out roundings to a 16-bit type."""
    cause = "cast order"
    usual, expected = subject.choices[0].results[EAGER.name], subject.eager[EAGER.name]
    found = differences(usual, expected)
    if subject.case.dtype.itemsize > 2:
        return Finding(cause, ABSENT, f"nothing is rounded to 16 bits in {subject.case.dtype}")
    if not found:
        return Finding(cause, ABSENT, "compiled and eager give the same bits")
    written = subject.rounded_as_written
    left = differences(written, expected)
    evidence = (
        f"compiled as usual: {'; '.join(found)}",
        f"with emulate_precision_casts: {'; '.join(left) or 'eager bits'}",
    )
    before, after = (differing_elements(results, expected) for results in (usual, written))
    if after >= before:
        sentence = "with every rounding in its place no fewer elements differ"
        return Finding(cause, RULED_OUT, sentence, evidence)
    sentence = "the compiled code leaves out roundings between fused operations"
    if subject.inputs.device.type == "cuda":
        sentence += ", or fuses multiply and add, which the option turns off in Triton too"
    return Finding(cause, CAUSE, sentence + _part(before, after), evidence)
