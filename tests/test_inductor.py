"""gate/inductor.py: what is recorded of a compilation, and the choice as an argument."""

import functools
from collections.abc import Callable

import baselines
import pytest
import support
import torch
import torch._inductor.cpu_vec_isa
from automodel_rms_norm.gate import inductor
from torch import Tensor

EPS = 1e-5


def both_passes(
    function: Callable[..., Tensor], inputs: support.Inputs
) -> tuple[Tensor, Tensor, Tensor]:
    """y of no_grad, y of grad mode and grad_weight."""
    compiled = torch.compile(function, dynamic=True)
    with torch.no_grad():
        y = compiled(inputs.x, inputs.weight, EPS)
    trained = support.forward_backward(compiled, inputs, EPS)
    return y, trained.y, trained.grad_weight


def test_graphs_and_kernels_are_recorded(device: torch.device) -> None:
    inputs = support.make_inputs(16, 96, device=device)
    with inductor.recorded() as recording:
        both_passes(baselines.automodel_0_6, inputs)
    assert sorted(graph.kind for graph in recording.graphs) == ["backward", "forward", "inference"]
    language = "triton" if device.type == "cuda" else "cpp"
    for graph in recording.graphs:
        assert graph.kernels
        assert all(kernel.language == language for kernel in graph.kernels)
        assert all(kernel.name in graph.code and kernel.source for kernel in graph.kernels)
    forward = next(graph for graph in recording.graphs if graph.kind == "forward")
    assert "aten.rsqrt" in forward.aten


def test_nothing_compiled_before_is_reused() -> None:
    inputs = support.make_inputs(4, 32)
    compiled = torch.compile(baselines.automodel_0_6, dynamic=True)
    for _ in range(2):
        with inductor.recorded() as recording, torch.no_grad():
            compiled(inputs.x, inputs.weight, EPS)
        assert [graph.kind for graph in recording.graphs] == ["inference"]


def test_each_choice_is_one_run_on_the_cpu() -> None:
    inputs = support.make_inputs(4, 32)
    runs = list(inductor.each_choice(lambda: both_passes(baselines.automodel_0_6, inputs)))
    assert len(runs) == 1
    assert runs[0][1].tunings == []
    assert runs[0][1].choices == 1


@pytest.mark.cuda
def test_each_choice_takes_every_candidate_once() -> None:
    inputs = support.make_inputs(4096, 4096, device="cuda")
    runs = list(inductor.each_choice(lambda: both_passes(baselines.automodel_0_6, inputs)))
    assert len(runs) > 1
    for number, (_, recording) in enumerate(runs):
        assert recording.tunings
        for tuning in recording.tunings:
            assert tuning.chosen == number % len(tuning.candidates)
            assert len(set(tuning.candidates)) == len(tuning.candidates)


class FakeAutotuner:
    """As many launchers as a kernel has candidates, and the two methods that are replaced."""

    def __init__(self, candidates: int) -> None:
        self.launchers = [
            type("Launcher", (), {"config": f"config {i}"}) for i in range(candidates)
        ]
        self.inductor_meta = {"kernel_name": f"kernel_of_{candidates}"}

    def benchmark_all_configs(self) -> dict[type, float]:
        raise AssertionError("nothing is to be timed when the choice is forced")

    def autotune_to_one_config(self) -> None:
        timings = self.benchmark_all_configs()
        self.launchers = [min(timings, key=timings.get)]


def test_choices_are_enumerated_and_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU: two kernels of 2 and 3 candidates, tuned as Inductor tunes."""
    monkeypatch.setattr(inductor, "_autotuner", lambda: FakeAutotuner)

    def tune() -> tuple[str, ...]:
        kernels = [FakeAutotuner(2), FakeAutotuner(3)]
        for kernel in kernels:
            kernel.autotune_to_one_config()
        return tuple(kernel.launchers[0].config for kernel in kernels)

    runs = list(inductor.each_choice(tune))
    assert [result for result, _ in runs] == [
        ("config 0", "config 0"),
        ("config 1", "config 1"),
        ("config 0", "config 2"),
    ]
    last = runs[-1][1]
    assert last.choices == 3
    assert [(t.kernel, len(t.candidates), t.chosen) for t in last.tunings] == [
        ("kernel_of_2", 2, 0),
        ("kernel_of_3", 3, 2),
    ]


def test_a_torch_without_the_method_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inductor, "_autotuner", lambda: object)
    reason = f"torch {torch.__version__} has no CachingAutotuner.benchmark_all_configs"
    assert inductor.why_not_forced() == reason
    with pytest.raises(RuntimeError, match="choice cannot be forced"), inductor.forced_choice(0):
        pass
    with inductor.recorded() as recording:
        pass
    assert recording.tunings == []


@pytest.mark.parametrize("found", [["avx512", "avx2"], ["avx2"], []])
def test_the_trial_of_vector_isas_is_spared_where_every_one_passed_it(
    found: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    @functools.cache
    def valid_vec_isa_list() -> list[str]:
        return ["avx512", "avx2"] if torch._inductor.config.cpp.vec_isa_ok else found

    isas = torch._inductor.cpu_vec_isa
    monkeypatch.setattr(isas, "valid_vec_isa_list", valid_vec_isa_list)
    assert inductor.probed_vector_isas() == {}
    valid_vec_isa_list()
    spared = {"TORCHINDUCTOR_VEC_ISA_OK": "1"} if len(found) == 2 else {}
    assert inductor.probed_vector_isas() == spared
    assert valid_vec_isa_list() == found
