"""The implementations that are compared, their inputs, and one call of each kind of work.

| what            | counted in GB/s: tensors of x's size                               |
|-----------------|--------------------------------------------------------------------|
| forward         | 2: x read, y written                                               |
| backward        | 3: grad_y, x read, grad_x written; its time includes grad_weight   |
| backward_frozen | 3: the same with the weight frozen, or without a weight            |
| add_forward     | 4: x, residual read, sum, y written                                |
| add_backward    | 4: grad_y, grad_sum, sum read, the gradient of x and residual written |
"""

import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypeVar

import automodel_rms_norm as arn
import torch
from timing import Absent, Call
from torch import Tensor, nn

sys.path.append(str(Path(__file__).parents[1] / "tests"))
from baselines import Baseline, baselines, traceable

T = TypeVar("T")

EPS = 1e-5
TENSORS = {
    "forward": 2,
    "backward": 3,
    "backward_frozen": 3,
    "add_forward": 4,
    "add_backward": 4,
}


class Variant(NamedTuple):
    """The dtypes of x and weight (None: no weight), and whether the gain is weight + 1."""

    x_dtype: torch.dtype = torch.bfloat16
    weight_dtype: torch.dtype | None = torch.bfloat16
    zero_centered_gamma: bool = False

    def fields(self) -> dict[str, object]:
        """As a record has them."""
        return {
            "x_dtype": name_of(self.x_dtype),
            "weight_dtype": name_of(self.weight_dtype),
            "zero_centered_gamma": self.zero_centered_gamma,
        }


def name_of(dtype: torch.dtype | None) -> str:
    return str(dtype).removeprefix("torch.").lower()


class Problem(NamedTuple):
    """Inputs of one call; residual and grad_sum only where a residual is added."""

    x: Tensor
    weight: nn.Parameter | None
    grad_y: Tensor
    residual: Tensor | None
    grad_sum: Tensor | None


def make_problem(
    rows: int,
    hidden: int,
    variant: Variant,
    device: torch.device,
    seed: int = 0,
    adds: bool = False,
) -> Problem:
    """Random inputs, with gains away from 1; all but the gradients require gradients."""
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*size: int, dtype: torch.dtype = variant.x_dtype) -> Tensor:
        return torch.randn(*size, generator=generator, device=device, dtype=dtype)

    weight = None
    if variant.weight_dtype is not None:
        gain = 0.3 * normal(hidden, dtype=torch.float32) + (not variant.zero_centered_gamma)
        weight = nn.Parameter(gain.to(variant.weight_dtype))
    x, grad_y = normal(rows, hidden).requires_grad_(), normal(rows, hidden)
    if not adds:
        return Problem(x, weight, grad_y, None, None)
    return Problem(x, weight, grad_y, normal(rows, hidden).requires_grad_(), normal(rows, hidden))


def op(zero_centered_gamma: bool = False) -> Baseline:
    """Ours; without add_rms_norm where this build has none."""
    add_norm = getattr(arn, "add_rms_norm", None)
    options = {"zero_centered_gamma": zero_centered_gamma}
    return Baseline(partial(arn.rms_norm, **options), add_norm and partial(add_norm, **options))


def implementations(names: list[str] | None, device: torch.device) -> dict[str, Baseline]:
    """Ours and the baselines, all or those called `names`."""
    return chosen({"op": op(), **baselines(device)}, names)


def norm_functions(names: list[str] | None) -> dict[str, Callable[..., Tensor]]:
    """The same that a compiled function can contain, themselves not compiled."""
    known = {"op": arn.rms_norm, **traceable()}
    return chosen(known, names and [name for name in names if name in known])


def chosen(known: dict[str, T], names: list[str] | None) -> dict[str, T]:
    if names is None:
        return known
    if unknown := sorted(set(names) - set(known)):
        raise SystemExit(f"no implementation is called {unknown[0]}; there are {', '.join(known)}")
    return {name: known[name] for name in names}


def make_call(what: str, implementation: Baseline, problem: Problem) -> Call:
    """A call that does the work `what` and nothing else.

    A backward pass is autograd's, so that every implementation is called alike.
    """
    if implementation.why:
        raise Absent(implementation.why)
    x, weight, grad_y, residual, grad_sum = problem
    if what == "backward_frozen" and weight is not None:
        weight = nn.Parameter(weight.detach(), requires_grad=False)

    def forward() -> object:
        if not what.startswith("add_"):
            return implementation.norm(x, weight, EPS)
        if implementation.add_norm is None:
            raise Absent("has no residual add")
        return implementation.add_norm(x, residual, weight, EPS)

    if what.endswith("forward"):
        return torch.no_grad()(forward)
    outputs = forward()
    adds = what.startswith("add_")
    leaves = [x, *([residual] if adds else [])]
    if weight is not None and weight.requires_grad:
        leaves.append(weight)
    grads = (grad_y, grad_sum) if adds else (grad_y,)
    return lambda: torch.autograd.grad(outputs, leaves, grads, retain_graph=True)


def makers(
    what: str, compared: Mapping[str, Baseline], problems: list[Problem]
) -> dict[str, partial[list[Call]]]:
    """For `timing.build`: the calls of each implementation, one for each problem."""
    return {
        name: partial(lambda each: [make_call(what, each, p) for p in problems], implementation)
        for name, implementation in compared.items()
    }
