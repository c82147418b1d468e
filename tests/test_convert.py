"""integrations.transformers.convert on modules of any kind: what it takes for a norm of the op's,
and what it leaves and why. test_transformers.py has it on models of Hugging Face.
"""

from collections.abc import Callable

import automodel_rms_norm as arn
import pytest
import torch
from automodel_rms_norm.integrations import IntegrationError
from automodel_rms_norm.integrations.transformers import SAME_ROUNDING, Conversion, convert
from torch import nn


class Own(nn.Module):
    """A norm of the formula, with what a test adds to it."""

    def __init__(self, hidden: int = 64) -> None:
        super().__init__()
        self.eps = 1e-5
        self.weight = nn.Parameter(1 + 0.4 * torch.randn(hidden))

    def forward(self, x):
        y = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + self.eps)
        return (y * self.weight.float()).to(x.dtype)


class Gated(Own):
    """As Mamba2's, which its model always gives a gate."""

    def forward(self, x, gate=None):
        return super().forward(x) if gate is None else super().forward(x) * gate


class Doubled(Own):
    def forward(self, x):
        return 2 * super().forward(x)


class SlightlyLarger(Own):
    """By much more than float32 rounds, and less than bfloat16 does."""

    def forward(self, x):
        return super().forward(x) * (1 + 2e-4)


class Clamped(Own):
    def forward(self, x):
        return super().forward(x).clamp(-8, 8)


class WithoutUpcast(Own):
    """The formula in float32, and far from it in 16 bit."""

    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight.to(x.dtype)


class OtherInAMixture(Own):
    """Only where x alone is bfloat16."""

    def forward(self, x):
        y = super().forward(x)
        return y.mul(1.05) if x.dtype != self.weight.dtype else y


class Dropping(Own):
    def forward(self, x):
        return nn.functional.dropout(super().forward(x), 0.5, self.training)


class NormWithGamma(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gamma, self.norm_eps = nn.Parameter(torch.ones(64)), 1e-5


class OfTheSecondDimension(Own):
    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(1, keepdim=True) + self.eps) * self.weight


class OtherInTraining(Own):
    def forward(self, x):
        return super().forward(x) * (2 if self.training else 1)


class OfTwoDimensions(Own):
    def forward(self, x):
        rows, _ = x.shape
        return super().forward(x) if rows else x


class WithoutEps(Own):
    def forward(self, x):
        self.eps = 0
        return super().forward(x)


class Wide(Own):
    def forward(self, x):
        return super().forward(x).float()


class Scaleless(nn.Module):
    eps = 1e-5

    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)


def biased() -> nn.Module:
    norm = Own()
    norm.bias = nn.Parameter(torch.zeros(64))
    return norm


def buffered() -> nn.Module:
    norm = Own()
    norm.register_buffer("steps", torch.zeros(()))
    return norm


def hooked(register: str) -> Callable[[], nn.Module]:
    def make_norm() -> nn.Module:
        norm = Own()
        getattr(norm, register)(lambda *_: None)
        return norm

    return make_norm


HOOKS = [
    "register_forward_pre_hook",
    "register_forward_hook",
    "register_full_backward_pre_hook",
    "register_full_backward_hook",
    "register_state_dict_pre_hook",
    "register_state_dict_post_hook",
    "register_load_state_dict_pre_hook",
    "register_load_state_dict_post_hook",
]


def parametrized() -> nn.Module:
    return nn.utils.parametrize.register_parametrization(Own(), "weight", nn.Identity())


def replaced_forward() -> nn.Module:
    norm = Own()
    norm.forward = norm.forward
    return norm


def quantised() -> nn.Module:
    norm = Own()
    norm.weight = nn.Parameter(torch.ones(64, dtype=torch.int8), requires_grad=False)
    return norm


class Subclass(torch.Tensor):
    """As quantised weights are, whose dtype is what they stand for."""


def of_a_subclass() -> nn.Module:
    norm = Own()
    norm.weight = nn.Parameter(norm.weight.detach().as_subclass(Subclass))
    return norm


def without_a_number() -> nn.Module:
    norm = Own()
    norm.eps = None
    return norm


LEFT: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "bias": (biased, "has bias, which the op has not"),
    "layer norm": (lambda: nn.LayerNorm(64), "has bias, which the op has not"),
    "buffer": (buffered, "has the buffer steps, which the op has not"),
    **{hook: (hooked(hook), "has hooks, which would be lost") for hook in HOOKS},
    "parametrization": (parametrized, "has a parametrization, which would be lost"),
    "forward": (replaced_forward, "has a forward of its own instance"),
    "quantised weight": (quantised, "has a weight of torch.int8"),
    "weight of a subclass": (of_a_subclass, "has a weight that is a Subclass, not a plain one"),
    "gate": (Gated, "has the argument gate, which the op has not"),
    "two dimensions": (OfTwoDimensions, "cannot be called with x alone: ValueError"),
    "second dimension": (OfTheSecondDimension, "computes something else than"),
    "training": (OtherInTraining, "computes something else in training"),
    "another formula": (Doubled, "computes something else"),
    "a slightly larger gain": (SlightlyLarger, "computes something else than"),
    "a clamp": (Clamped, "computes something else than"),
    "dropout": (Dropping, "computes something else in training"),
    "no upcast": (
        lambda: WithoutUpcast().bfloat16(),
        "is further from the formula in torch.bfloat16 than two roundings",
    ),
    "no upcast, float32 weight": (
        WithoutUpcast,
        "is further from the formula in torch.bfloat16 than two roundings",
    ),
    "a mixture of dtypes": (
        OtherInAMixture,
        "is further from the formula for bfloat16 x than two roundings",
    ),
    "weight of two dimensions": (
        lambda: nn.RMSNorm((4, 16), eps=1e-5),
        "has a weight of shape (4, 16); the op takes one of x's last dimension",
    ),
    "no elements": (lambda: nn.RMSNorm(0, eps=1e-5), "has a weight of shape (0,)"),
    "gamma": (NormWithGamma, "has gamma, which the op has not"),
    "TorchScript": (lambda: torch.jit.script(nn.RMSNorm(64, eps=1e-5)), "is a TorchScript module"),
    "no eps in the sum": (WithoutEps, "computes something else"),
    "no eps": (without_a_number, "has no number called"),
    "another result": (lambda: Wide().bfloat16(), "returns torch.float32 for torch.bfloat16 x"),
    "no weight": (Scaleless, "put RMSNorm(dim, eps, elementwise_affine=False) in its place"),
    "converted": (lambda: arn.RMSNorm(64), "is the op already"),
}


@pytest.mark.parametrize("kind", LEFT)
def test_what_the_op_does_not_match_is_left_with_the_reason(kind: str) -> None:
    make_norm, reason = LEFT[kind]
    norm = make_norm()
    model = nn.Sequential(nn.Linear(64, 64), norm)
    result = convert(model)
    assert not result.converted
    assert list(result.left) == ["1"]
    assert reason in result.left["1"]
    assert model[1] is norm
    assert f"1: {result.left['1']}" in str(result)


def test_a_norm_is_known_by_what_it_computes() -> None:
    model = nn.Sequential(Own(), nn.Linear(64, 64), Own())
    model.eval()
    result = convert(model)
    assert result == Conversion({"0": SAME_ROUNDING, "2": SAME_ROUNDING})
    assert not model[0].training
    assert model[0].eps == 1e-5


def test_tied_weights_stay_tied() -> None:
    first, second = Own(), Own()
    second.weight = first.weight
    model = nn.Sequential(first, second, first)
    convert(model)
    assert model[0].weight is model[1].weight is first.weight
    assert model[0] is model[2]


def test_a_model_on_the_meta_device_can_be_converted() -> None:
    model = nn.Sequential(Own().to("meta"))
    assert convert(model).converted == {"0": SAME_ROUNDING}
    assert model[0].weight.is_meta


def test_a_norm_that_is_compiled_by_itself_is_left() -> None:
    """Its compiled forward is bound to the original."""
    compiled = torch.compile(Own(), backend="eager")
    assert "is compiled by itself" in convert(nn.Sequential(compiled)).left["0._orig_mod"]
    model = torch.compile(nn.Sequential(Own()), backend="eager")
    assert list(convert(model).converted) == ["_orig_mod.0"]


def test_layers_without_a_size_yet_are_no_norms() -> None:
    model = nn.Sequential(nn.LazyLinear(8), Own())
    assert list(convert(model).converted) == ["1"]


def test_the_model_must_not_be_the_norm() -> None:
    assert "is the whole model" in convert(Own()).left[""]


def test_the_default_device_and_the_random_state_are_left_alone() -> None:
    model = nn.Sequential(Own(), Dropping())
    state = torch.random.get_rng_state()
    with torch.device("meta"):
        assert list(convert(model).converted) == ["0"]
        assert torch.empty(1).is_meta
    assert torch.equal(torch.random.get_rng_state(), state)
    assert model[0].weight.device.type == "cpu"


def test_what_is_no_module_is_refused() -> None:
    with pytest.raises(TypeError, match="model must be a torch"):
        convert(None)


def test_a_model_without_norms_is_refused() -> None:
    with pytest.raises(IntegrationError, match="Sequential has no module that looks like an RMSNo"):
        convert(nn.Sequential(nn.Linear(8, 8), nn.ReLU()))
