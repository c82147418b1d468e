"""Reproduces NVIDIA-NeMo/Automodel issue 3106 with torch alone: no RL, no model, no other package.

    python reproduce_3106.py                      # on the GPU if there is one
    python reproduce_3106.py --device cpu

AutoModel's float32 RMSNorm under torch.compile is two graphs: one for no_grad, as the reference
policy of a DPO job runs, one for grad mode, as the trained policy runs. On a GPU Inductor's
autotuner picks a configuration for each of the two by timing, and the configurations add in
different orders. Here every candidate is taken in turn, so that nothing is left to chance; then the
autotuner chooses freely, a few times.

Exit status: 1 if it is reproduced, that is, if y of grad mode and y of no_grad can have different
bits for the same weights and input; 0 if not; 2 if it cannot be tried here.
"""

import argparse
import ast
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import metadata
from typing import NamedTuple
from unittest import mock

import torch
import torch._inductor.config
from torch import Tensor
from torch._inductor.runtime.triton_heuristics import CachingAutotuner

EPS = 1e-5
OPTIONS: dict[str, object] = {}  # of Inductor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`_float32_rms_norm_fwd` of nemo-automodel 0.4.0 to 0.6.0; compiled below as it is there."""
    input_dtype = x.dtype
    x = x.float()
    x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)
    return (weight * x).to(input_dtype)


class Answer(NamedTuple):
    """What a graph gave; the gradients in grad mode only."""

    y: Tensor
    grad_x: Tensor | None = None
    grad_weight: Tensor | None = None


class Problem(NamedTuple):
    x: Tensor
    weight: torch.nn.Parameter
    grad_y: Tensor

    def train(self, function: Callable[..., Tensor]) -> Answer:
        x = self.x.clone().requires_grad_()
        y = function(x, self.weight, EPS)
        return Answer(y.detach(), *torch.autograd.grad(y, (x, self.weight), self.grad_y))

    def infer(self, function: Callable[..., Tensor]) -> Answer:
        with torch.no_grad():
            return Answer(function(self.x, self.weight, EPS))


def make_problem(rows: int, hidden: int, dtype: torch.dtype, device: str) -> Problem:
    """Random values, the weight away from 1, drawn on the CPU to be the same everywhere."""
    generator = torch.Generator().manual_seed(0)
    x, grad_y = torch.randn(2, 1, rows, hidden, generator=generator).to(device, dtype)
    weight = (1 + 0.1 * torch.randn(hidden, generator=generator)).to(device, dtype)
    return Problem(x, torch.nn.Parameter(weight), grad_y)


def triton_version() -> str:
    try:
        return metadata.version("triton")
    except metadata.PackageNotFoundError:
        return "none"


def compiled() -> Callable[..., Tensor]:
    torch._dynamo.reset()
    return torch.compile(rms_norm, dynamic=True, options=OPTIONS)


def inductor_option(text: str) -> None:
    """NAME=VALUE, for every later compilation: does it take the fault away?"""
    name, _, value = text.partition("=")
    if not hasattr(torch._inductor.config, name):
        raise argparse.ArgumentTypeError(f"Inductor has no option {name!r}")
    try:
        OPTIONS[name] = ast.literal_eval(value)
    except (SyntaxError, ValueError) as error:
        raise argparse.ArgumentTypeError(f"{value!r} is not a Python literal") from error


def difference(left: Tensor, right: Tensor) -> str:
    count = int((left != right).sum())
    if not count:
        return "same bits"
    largest = (left.double() - right.double()).abs().max().item()
    return f"{count} of {left.numel()} elements differ, by up to {largest:.3g}"


@contextmanager
def autotuner_takes(choice: int, candidates: list[list[str]]) -> Iterator[None]:
    """Inductor's autotuner takes candidate `choice`, modulo how many a kernel has, and appends
    each kernel's candidates to the list."""

    def benchmark(self: CachingAutotuner, *_: object, **__: object) -> dict[object, float]:
        candidates.append([str(launcher.config) for launcher in self.launchers])
        chosen = choice % len(self.launchers)
        return {launcher: float(i != chosen) for i, launcher in enumerate(self.launchers)}

    with mock.patch.object(CachingAutotuner, "benchmark_all_configs", benchmark):
        yield


def every_answer(run: Callable[[Callable[..., Tensor]], Answer]) -> tuple[list[Answer], list[str]]:
    """Of one graph, compiled anew for every candidate of the kernel with the most, and those."""
    answers: list[Answer] = []
    most = ["the only one"]
    while len(answers) < len(most):
        candidates: list[list[str]] = []
        with autotuner_takes(len(answers), candidates):
            answers.append(run(compiled()))
        most = max([most, *candidates], key=len)
    return answers, most


def print_answers(graph: str, answers: list[Answer], most: list[str], known: list[Tensor]) -> None:
    """Which of the `known` values of y each candidate gives; new ones are added."""
    for number, (answer, configuration) in enumerate(zip(answers, most, strict=True)):
        if not any(torch.equal(answer.y, y) for y in known):
            known.append(answer.y)
        which = next(i for i, y in enumerate(known) if torch.equal(answer.y, y))
        print(f"  {graph}, candidate {number}, {configuration}: y is answer {which}")


def free_runs(problem: Problem, runs: int) -> int:
    """How many of `runs` fresh compilations gave y of grad mode and of no_grad different bits."""
    different = 0
    for number in range(runs):
        function = compiled()
        trained, inferred = problem.train(function), problem.infer(function)
        different += not torch.equal(trained.y, inferred.y)
        print(f"  compilation {number}: {difference(trained.y, inferred.y)}")
    return different


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"))
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    parser.add_argument("--rows", type=int, help="default: 4096 on a GPU, 64 on a CPU")
    parser.add_argument("--hidden", type=int, default=2688, help="default: Nemotron Nano V3's")
    parser.add_argument("--runs", type=int, default=6, help="free compilations; default: 6")
    parser.add_argument(
        "--inductor",
        type=inductor_option,
        action="append",
        metavar="NAME=VALUE",
        help="an option of Inductor, for example deterministic=True; may be repeated",
    )
    options = parser.parse_args(arguments)
    torch._inductor.config.force_disable_caches = True  # a cached choice is not made again
    warnings.filterwarnings("ignore", message="dynamo_pgo force disabled")
    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cuda" and not torch.cuda.is_available():
        print("there is no CUDA GPU here; try --device cpu", file=sys.stderr)
        return 2
    rows = options.rows or (4096 if device == "cuda" else 64)
    where = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    print(f"{where}, torch {torch.__version__}, triton {triton_version()}")
    print(f"{options.dtype} x of (1, {rows}, {options.hidden}), weight a Parameter, eps {EPS}")
    print("".join(f"Inductor's {name} is {value!r}\n" for name, value in OPTIONS.items()), end="")
    problem = make_problem(rows, options.hidden, getattr(torch, options.dtype), device)

    eager, eager_inferred = problem.train(rms_norm), problem.infer(rms_norm)
    print(f"\neager, y of grad against no_grad: {difference(eager.y, eager_inferred.y)}")

    print("\ncompiled, every candidate of Inductor's autotuner:")
    known: list[Tensor] = []
    trained, candidates = every_answer(problem.train)
    print_answers("grad", trained, candidates, known)
    inferred, candidates = every_answer(problem.infer)
    print_answers("no_grad", inferred, candidates, known)

    print("\ncompiled, y of grad against no_grad, by the candidate that each graph has:")
    possible = 0
    for i, left in enumerate(trained):
        for j, right in enumerate(inferred):
            possible += not torch.equal(left.y, right.y)
            print(f"  grad {i}, no_grad {j}: {difference(left.y, right.y)}")

    print("\ncompiled against eager, in grad mode:")
    for i, answer in enumerate(trained):
        for name, left, right in zip(Answer._fields, answer, eager, strict=True):
            print(f"  candidate {i}, {name}: {difference(left, right)}")

    print("\ncompiled, y of grad against no_grad, the autotuner free:")
    seen = free_runs(problem, options.runs)

    print()
    if not possible and not seen:
        print("not reproduced: grad mode and no_grad have the same bits")
        return 0
    pairs = len(trained) * len(inferred)
    print(
        f"reproduced: {possible} of {pairs} pairs of candidates, and {seen} of {options.runs} free "
        "compilations, give the same weights and input different outputs in grad mode and no_grad"
    )
    return 1


if __name__ == "__main__":
    sys.exit(main())
