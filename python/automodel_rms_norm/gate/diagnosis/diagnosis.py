"""A diagnosis: what was compiled and tuned, what was found out, and the sentence that sums it up;
with its renderings for a terminal, for a document and for programs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from automodel_rms_norm.contexts import EAGER
from automodel_rms_norm.gate.diagnosis import compiler, launch
from automodel_rms_norm.gate.diagnosis.finding import CAUSE, RULED_OUT, UNKNOWN, Finding
from automodel_rms_norm.gate.diagnosis.subject import CONTEXTS, Choice, Subject, differences
from automodel_rms_norm.gate.environment import environment
from automodel_rms_norm.gate.inductor import Graph

__all__ = ["EXPERIMENTS", "Diagnosis", "diagnose"]

EXPERIMENTS: tuple[Callable[[Subject], Finding], ...] = (
    compiler.separate_graphs,
    compiler.autotuned_choice,
    compiler.reduction_decomposition,
    compiler.scalar_precision,
    compiler.cast_order,
    launch.alignment,
    launch.batch_dependent_launch,
    launch.multiprocessor_dependent_sum,
)


@dataclass(frozen=True)
class Diagnosis:
    """``contexts`` and ``free`` have a line for each comparison; ``free`` is of compilations in
    which the autotuner chose by its timings."""

    target: str
    case: str
    environment: dict[str, str]
    contexts: tuple[str, ...]
    graphs: tuple[Graph, ...]
    findings: tuple[Finding, ...]
    free: tuple[str, ...]

    @property
    def causes(self) -> list[Finding]:
        return [finding for finding in self.findings if finding.verdict == CAUSE]

    @property
    def headline(self) -> str:
        """What it comes to, in a sentence for each cause."""
        if self.causes:
            return ". ".join(finding.sentence for finding in self.causes)
        if self.graphs and not any(graph.kernels for graph in self.graphs):
            return "nothing to explain: one kernel, which Inductor neither decomposes nor tunes"
        return "nothing to explain: the same bits in every experiment"

    def as_json(self) -> dict[str, Any]:
        """Plain values, with every graph's ATen and generated code."""
        graphs = [asdict(g) | {"kernels": [asdict(k) for k in g.kernels]} for g in self.graphs]
        return asdict(self) | {"headline": self.headline, "graphs": graphs}

    def as_markdown(self) -> str:
        lines = [f"### {self.target}", "", f"{self.case}.", "", f"**{self.headline}.**", ""]
        lines += [f"- {line}" for line in (*self.contexts, *self.free)]
        lines += ["", "| possible cause | verdict | what the experiment showed |", "|---|---|---|"]
        for finding in self.findings:
            shown = "<br>".join([finding.sentence, *finding.evidence]).replace("|", "\\|")
            lines.append(f"| {finding.cause} | {finding.verdict} | {shown} |")
        for graph in self.graphs:
            lines += ["", f"<details><summary>{_summary(graph)}</summary>", "", "```python"]
            lines += [graph.aten.strip(), "```"]
            for kernel in graph.kernels:
                language = "python" if kernel.language == "triton" else kernel.language
                lines += ["", f"```{language}", kernel.source.strip(), "```"]
            lines += ["", "</details>"]
        lines += ["", *(f"- {name}: {value}" for name, value in self.environment.items())]
        return "\n".join([*lines, ""])

    def print(self, console: Console) -> None:
        """Prints everything but the code."""
        console.print(Text(f"{self.target}: {self.case}"))
        for line in (*self.contexts, *map(_summary, self.graphs), *self.free):
            console.print(Text(line))
        table = Table()
        for heading in ("possible cause", "verdict"):
            table.add_column(heading)
        table.add_column("what the experiment showed", overflow="fold")
        styles = {CAUSE: "red", RULED_OUT: "green", UNKNOWN: "yellow"}
        for finding in self.findings:
            shown = Text("\n".join([finding.sentence, *finding.evidence]))
            verdict = Text(finding.verdict, style=styles.get(finding.verdict, "dim"))
            table.add_row(finding.cause, verdict, shown)
        console.print(table)
        for name, value in self.environment.items():
            console.print(Text(f"{name:20}{value}", style="dim"))
        console.print(Text(self.headline, style="bold red" if self.causes else "bold green"))


def _summary(graph: Graph) -> str:
    kernels = ", ".join(f"{kernel.name} ({kernel.language})" for kernel in graph.kernels)
    calls = ", ".join(graph.custom_ops)
    return f"{graph.kind} graph: {kernels or 'no generated kernel'}" + (f"; {calls}" * bool(calls))


def _contexts(subject: Subject) -> Iterator[str]:
    """Each context against grad mode, uncompiled and compiled; and compiled against uncompiled."""
    compiled = subject.choices[0].results
    for label, results in (("eager", subject.eager), ("compiled", compiled)):
        for context in CONTEXTS[1:]:
            found = differences(results[context.name], results[EAGER.name])
            yield f"{label}, {context.name} against grad: {'; '.join(found) or 'same bits'}"
    found = differences(compiled[EAGER.name], subject.eager[EAGER.name])
    yield f"compiled against eager, grad: {'; '.join(found) or 'same bits'}"


def _free(number: int, choice: Choice) -> str:
    taken = ", ".join(f"{t.kernel} took {t.chosen}" for t in choice.recording.tunings)
    found = differences(choice.results[CONTEXTS[1].name], choice.results[EAGER.name])
    return (
        f"free compilation {number}, no_grad against grad: {'; '.join(found) or 'same bits'} "
        f"({taken})"
    )


def _finding(experiment: Callable[[Subject], Finding], subject: Subject) -> Finding:
    try:
        return experiment(subject)
    except Exception as error:  # whatever the target raises in it is no end of the others
        lines = str(error).strip().splitlines() or [""]
        name = experiment.__name__.replace("_", " ")
        return Finding(name, UNKNOWN, f"raised {type(error).__name__}: {lines[0]}")


def _other(subject: Subject, findings: list[Finding]) -> Finding:
    """What differs and has none of the causes above."""
    cause, lines = "other", []
    for context in CONTEXTS[1:]:
        found = differences(subject.eager[context.name], subject.eager[EAGER.name])
        lines += [f"uncompiled, {context.name} against grad: {line}" for line in found]
    left = differences(subject.rounded_as_written, subject.eager[EAGER.name])
    explained = {finding.cause for finding in findings if finding.verdict == CAUSE}
    if not explained & {compiler.REDUCTION, compiler.SCALAR}:
        lines += [f"compiled against eager: {line}" for line in left]
    if lines:
        return Finding(cause, CAUSE, "a difference that none of the above explains", tuple(lines))
    return Finding(cause, RULED_OUT, "no difference is left unexplained")


def diagnose(subject: Subject, runs: int, tell: Callable[[str], None]) -> Diagnosis:
    """Runs every experiment.

    Args:
        subject: the target on its inputs.
        runs: how often to compile with the autotuner free, where it tunes anything.
        tell: is given a line before each experiment.
    """
    tell("compiling for every choice of the autotuner")
    contexts = tuple(_contexts(subject))
    findings = []
    for experiment in EXPERIMENTS:
        tell(experiment.__name__.replace("_", " "))
        findings.append(_finding(experiment, subject))
    findings.append(_other(subject, findings))
    tuned = bool(subject.recording.tunings)
    return Diagnosis(
        subject.target.name,
        subject.case.label,
        environment(),
        contexts,
        tuple(subject.recording.graphs),
        tuple(findings),
        tuple(_free(number, subject.free()) for number in range(runs if tuned else 0)),
    )
