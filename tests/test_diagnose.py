"""numerics-gate diagnose: each cause is found where it is the cause, and nowhere else.

A stand-in for the compiler makes one cause at a time: the `compiled` function is Python too.
"""

import json
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import reduce
from pathlib import Path

import pytest
import torch
from automodel_rms_norm.contexts import Inputs
from automodel_rms_norm.gate import cli, inductor
from automodel_rms_norm.gate.diagnosis import compiler, launch, subject
from automodel_rms_norm.gate.diagnosis.diagnosis import EXPERIMENTS, diagnose
from automodel_rms_norm.gate.diagnosis.finding import ABSENT, CAUSE, RULED_OUT, UNKNOWN
from automodel_rms_norm.gate.diagnosis.subject import Choice, Subject
from automodel_rms_norm.gate.inductor import Graph, Recording, Tuning
from automodel_rms_norm.gate.norms import norm_recipe
from automodel_rms_norm.gate.recipe import Recipe, Selection
from automodel_rms_norm.testing import assert_bitwise_equal
from torch import Tensor, nn

Norm = Callable[[Tensor, Tensor, float], Tensor]


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The rows' squares are added in the order of their index."""
    return _norm(x, weight, eps, 1)


def other_order(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return _norm(x, weight, eps, -1)


def _norm(x: Tensor, weight: Tensor, eps: float, step: int) -> Tensor:
    x32 = x.float()
    mean = reduce(torch.add, x32.square().unbind(-1)[::step]) / x.shape[-1]
    return (x32 * torch.rsqrt(mean + eps).unsqueeze(-1) * weight.float()).to(x.dtype)


def eps_in_float64(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """An eps that float32 cannot hold is another one."""
    inexact = float(torch.tensor(eps)) != eps
    return norm(x, weight, eps * (1 + 2**-20) if inexact else eps)


def no_rounding_to_16_bits(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return norm(x, weight, eps)


def rounded_between(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return norm(x, torch.ones_like(weight), eps) * weight


def unless_emulated(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    emulated = torch._inductor.config.emulate_precision_casts
    return (rounded_between if emulated else no_rounding_to_16_bits)(x, weight, eps)


def emulated_but_for_a_column(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    another = 2 * rounded_between(x, weight, eps)
    return torch.cat([another[:, :1], unless_emulated(x, weight, eps)[:, 1:]], dim=-1)


def beside_eps(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """What is fused with eps rounds otherwise; eps itself is the same number to float32."""
    float32 = torch.tensor(eps).item()
    power_of_two = math.frexp(float32)[0] == 0.5
    return norm(x, weight, float32 if power_of_two else float32 * (1 + 2**-20))


def beside_eps_unless_emulated(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """As Triton's fused multiply-add, which emulate_precision_casts turns off."""
    emulated = torch._inductor.config.emulate_precision_casts
    return (norm if emulated else eps_in_float64)(x, weight, eps)


def by_alignment(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return (other_order if x.storage_offset() else norm)(x, weight, eps)


def by_rows(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return norm(x, weight, 2 * eps if x.shape[0] == 1 else eps)


def by_threads(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return (other_order if torch.get_num_threads() == 1 else norm)(x, weight, eps)


def by_grad_mode(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return (norm if torch.is_grad_enabled() else other_order)(x, weight, eps)


KERNEL = "triton_red_0 = async_compile.triton('triton_red_0', '''source''')"
GRAPHS = [Graph(kind, "", KERNEL) for kind in ("forward", "backward", "inference")]


class Compiled(Subject):
    """Of a case whose compiler is Python functions, one for each choice of the autotuner."""

    by_choice: tuple[Norm, ...] = ()
    tuned = False

    @property
    def choices(self) -> list[Choice]:
        candidates = tuple(f"R0_BLOCK: {2048 << i}" for i in range(len(self.by_choice)))
        tunings = [Tuning("triton_red_0", candidates, 0)] if self.tuned else []
        return [
            Choice(
                {c.name: c.run(function, self.inputs) for c in subject.CONTEXTS},
                Recording(GRAPHS, tunings),
            )
            for function in self.by_choice
        ]

    def compiled(self, backend: str = "inductor") -> Norm:
        return self.by_choice[0] if backend == "inductor" else self.function

    def given(self, inputs: Inputs) -> "Compiled":
        other = Compiled(self.target, replace(self.case, inputs=inputs))
        vars(other).update(by_choice=self.by_choice, tuned=self.tuned)
        return other

    @contextmanager
    def first_choice(self) -> Iterator[None]:
        yield


def made(
    function: Norm, *by_choice: Norm, dtype: torch.dtype = torch.float32, tuned: bool = False
) -> Compiled:
    recipe = norm_recipe(function, name="fake")
    case = next(recipe.cases(Selection(dtypes=(dtype,), widths=(192,), rows=8)))
    fake = Compiled(recipe, case)
    vars(fake).update(by_choice=by_choice or (function,), tuned=tuned)
    return fake


ONE_CAUSE = {
    "reduction decomposition": made(norm, other_order),
    "scalar precision (eps as fp64)": made(norm, eps_in_float64),
    "cast order": made(rounded_between, unless_emulated, dtype=torch.bfloat16),
    "separate graphs": made(norm, by_grad_mode),
    "alignment": made(by_alignment),
    "batch-dependent launch": made(by_rows),
    "thread-count-dependent dw": made(by_threads),
}


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("cause", ONE_CAUSE)
def test_a_cause_is_found_and_no_other(cause: str) -> None:
    diagnosis = diagnose(ONE_CAUSE[cause], runs=1, tell=lambda line: None)
    assert [finding.cause for finding in diagnosis.causes] == [cause]
    assert diagnosis.causes[0].evidence
    assert diagnosis.headline == diagnosis.causes[0].sentence


def test_the_choice_of_the_autotuner() -> None:
    finding = compiler.autotuned_choice(made(norm, norm, other_order, tuned=True))
    assert finding.verdict == CAUSE
    assert finding.sentence == (
        "two graphs, each autotuned over 2 configurations with different reduction order; "
        "2 answers, 2 of the gradients; a fixed choice gives equal bits"
    )
    assert finding.evidence == (
        "triton_red_0 has 2 candidates: 0: R0_BLOCK: 2048; 1: R0_BLOCK: 4096",
        "choice 0: grad answer 0, no_grad answer 0, inference_mode answer 0, gradients answer 0",
        "choice 1: grad answer 1, no_grad answer 1, inference_mode answer 1, gradients answer 1",
    )
    alike = compiler.autotuned_choice(made(norm, norm, norm, tuned=True))
    assert alike.verdict == RULED_OUT
    assert alike.sentence == "the configurations that it is autotuned over give the same bits"
    assert compiler.autotuned_choice(made(norm)).verdict == ABSENT


def test_the_order_of_casts_is_judged_by_elements() -> None:
    def found(compiled: Norm) -> compiler.Finding:
        return compiler.cast_order(made(rounded_between, compiled, dtype=torch.bfloat16))

    gone, fewer, unchanged = map(
        found, (unless_emulated, emulated_but_for_a_column, no_rounding_to_16_bits)
    )
    sentence = "the compiled code leaves out roundings between fused operations"
    assert (gone.verdict, gone.sentence) == (CAUSE, sentence)
    assert fewer.verdict == CAUSE
    before, after = (line.count(" elements differ") for line in fewer.evidence)
    assert before == after  # the same results still differ, each in fewer elements
    assert fewer.sentence.startswith(f"{sentence}; a part of the difference: ")
    assert unchanged.verdict == RULED_OUT
    assert unchanged.sentence == "with every rounding in its place no fewer elements differ"


def test_what_the_order_of_casts_leaves_is_explained_or_said() -> None:
    partly = made(rounded_between, emulated_but_for_a_column, dtype=torch.bfloat16)
    diagnosis = diagnose(partly, runs=1, tell=lambda line: None)
    assert [finding.cause for finding in diagnosis.causes] == ["cast order", "other"]


@pytest.mark.parametrize("compiled", [beside_eps, beside_eps_unless_emulated])
def test_what_is_rounded_beside_a_scalar_is_not_its_precision(compiled: Norm) -> None:
    assert compiler.scalar_precision(made(norm, compiled)).verdict == RULED_OUT


def test_nothing_differs() -> None:
    diagnosis = diagnose(made(norm), runs=1, tell=lambda line: None)
    assert diagnosis.causes == []
    assert diagnosis.headline.startswith("nothing to explain")


def test_what_no_experiment_explains_is_said() -> None:
    def another(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return norm(x, weight, eps) * 2

    diagnosis = diagnose(made(norm, another), runs=1, tell=lambda line: None)
    assert [finding.cause for finding in diagnosis.causes] == ["other"]


def test_an_experiment_that_raises_is_no_end(monkeypatch: pytest.MonkeyPatch) -> None:
    def alone(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        if x.shape[0] == 1:
            raise ValueError("rows come in pairs")
        return norm(x, weight, eps)

    diagnosis = diagnose(made(alone), runs=1, tell=lambda line: None)
    assert len(diagnosis.findings) == len(EXPERIMENTS) + 1
    (finding,) = (f for f in diagnosis.findings if f.verdict == UNKNOWN)
    assert finding.cause == "batch dependent launch"
    assert finding.sentence == "raised ValueError: rows come in pairs"


def test_half_the_multiprocessors(monkeypatch: pytest.MonkeyPatch) -> None:
    properties = torch._inductor.runtime.hints.DeviceProperties
    real = properties(type="cuda", index=0, multi_processor_count=132, cc=90)
    monkeypatch.setattr(properties, "create", lambda device: real)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device=None: real)
    with inductor.half_the_multiprocessors():
        assert properties.create("cuda") == replace_count(real, 66)
        assert torch.cuda.get_device_properties().multi_processor_count == 66
        assert torch.cuda.get_device_properties().cc == 90
    assert properties.create("cuda").multi_processor_count == 132


def replace_count(properties: tuple, count: int) -> tuple:
    return properties._replace(multi_processor_count=count)


def test_a_recipe_without_rows_or_scalars() -> None:
    recipe = Recipe(lambda weight: weight * 2, {"weight": made(norm).target.inputs["weight"]})
    case = next(recipe.cases(Selection(dtypes=(torch.bfloat16,), widths=(16,))))
    fake = Compiled(replace(recipe, name="double"), case)
    vars(fake).update(by_choice=(recipe.function,), tuned=False)
    assert launch.alignment(fake).verdict == ABSENT
    assert launch.batch_dependent_launch(fake).verdict == ABSENT
    assert compiler.scalar_precision(fake).verdict == ABSENT


class Held(nn.Module):
    """A norm that has its eps from its constructor."""

    def __init__(self, hidden: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return norm(x, self.weight, self.eps)


def test_a_scalar_of_a_module_can_be_changed() -> None:
    recipe = norm_recipe(module=lambda hidden, eps, **_: Held(hidden, eps))
    case = next(recipe.cases(Selection(dtypes=(torch.float32,), widths=(16,), rows=2)))
    of_module = Subject(recipe, case).given(case.inputs.with_arguments(eps=3.0))
    of_function = norm(*of_module.inputs.tensors.values(), eps=3.0)
    assert_bitwise_equal(of_module.uncompiled()["y"], of_function, "y")


# --- The command, with the compiler ---------------------------------------------------------------

SMALL = ["--device", "cpu", "--hidden", "128", "--rows", "4"]


def test_of_the_op_there_is_nothing_to_explain(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = ["--json", str(tmp_path / "op.json"), "--markdown", str(tmp_path / "op.md")]
    assert cli.main(["diagnose", "op", *SMALL, *files]) == 0
    said = "nothing to explain: one kernel, which Inductor neither decomposes nor tunes"
    assert said in capsys.readouterr().out
    assert f"**{said}.**" in (tmp_path / "op.md").read_text()
    report = json.loads((tmp_path / "op.json").read_text())
    assert report["headline"] == said
    assert {g["kind"] for g in report["graphs"]} == {"forward", "backward", "inference"}


@pytest.mark.long
@pytest.mark.case("Automodel-3106")
def test_of_the_affected_function_on_a_cpu(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "affected.json"
    files = ["--json", str(path), "--markdown", str(tmp_path / "affected.md")]
    size = ["--device", "cpu", "--hidden", "768", "--rows", "64"]
    assert cli.main(["diagnose", "baselines:automodel_0_6", *size, *files]) == 1
    report = json.loads(path.read_text())
    verdicts = {finding["cause"]: finding["verdict"] for finding in report["findings"]}
    assert verdicts["reduction decomposition"] == CAUSE
    assert verdicts["separate graphs"] == RULED_OUT
    assert verdicts["autotuned choice"] == ABSENT
    assert "compiled, no_grad against grad: same bits" in report["contexts"]
    assert "```cpp" in (tmp_path / "affected.md").read_text()
    assert report["headline"].startswith("compiled and eager differ in y")


@pytest.mark.cuda
@pytest.mark.case("Automodel-3106")
def test_of_the_affected_function_on_a_gpu(tmp_path: Path) -> None:
    path = tmp_path / "affected.json"
    assert cli.main(["diagnose", "baselines:automodel_0_6", "--json", str(path)]) == 1
    report = json.loads(path.read_text())
    findings = {finding["cause"]: finding for finding in report["findings"]}
    assert findings["separate graphs"]["verdict"] == RULED_OUT
    choice = findings["autotuned choice"]
    assert choice["verdict"] == CAUSE
    assert choice["sentence"].startswith("two graphs, each autotuned over ")
    assert choice["sentence"].endswith("; a fixed choice gives equal bits")
    assert len(report["free"]) == 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nothing"], "there is no target 'nothing'"),
        (["torch", "--dtype", "fp64"], "--dtype fp64: torch has no case of it"),
        (["op", "--json", "/nowhere/x.json"], "--json /nowhere/x.json: No such file"),
    ],
)
def test_wrong_arguments_are_one_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["diagnose", *arguments, "--device", "cpu"]) == 2
    complaint = capsys.readouterr().err
    assert message in complaint
    assert complaint.count("\n") == 1
