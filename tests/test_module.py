"""RMSNorm, the drop-in for AutoModel's Float32RMSNorm."""

import copy
import inspect
import io
import pickle
from collections.abc import Callable
from pathlib import Path

import automodel_rms_norm as arn
import pytest
import support
import torch
from automodel_rms_norm.testing import assert_bitwise_equal
from torch import nn

HIDDEN = 96


def trained(device: torch.device | str = "cpu", **options: object) -> arn.RMSNorm:
    """A module whose weight is away from its initial value."""
    module = arn.RMSNorm(HIDDEN, device=device, **options)
    with torch.no_grad():
        module.weight.copy_(support.make_inputs(HIDDEN).weight)
    return module


class Float32RMSNorm(nn.Module):
    """The constructor and the state of the class in nemo-automodel 0.4.0 to 0.7.0."""

    def __init__(self, dim, eps=1e-5, device=None, dtype=torch.bfloat16):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim, device=device, dtype=dtype))


# --- As AutoModel's -------------------------------------------------------------------------------


def test_the_constructor_begins_as_automodels() -> None:
    theirs = list(inspect.signature(Float32RMSNorm).parameters.values())
    ours = list(inspect.signature(arn.RMSNorm).parameters.values())
    for their, our in zip(theirs, ours, strict=False):
        assert (our.name, our.default, our.kind) == (their.name, their.default, their.kind)
    assert all(parameter.default in (False, True) for parameter in ours[len(theirs) :])


def test_defaults_are_those_of_automodel() -> None:
    module = arn.RMSNorm(HIDDEN)
    assert module.eps == 1e-5
    assert module.weight.dtype == torch.bfloat16
    assert module.weight.requires_grad
    assert_bitwise_equal(module.weight.detach(), Float32RMSNorm(HIDDEN).weight.detach(), "weight")


@pytest.mark.case("Megatron-DeepSpeed-380")
def test_state_dicts_go_both_ways() -> None:
    theirs, ours = Float32RMSNorm(HIDDEN), trained()
    assert list(ours.state_dict()) == ["weight"]
    theirs.load_state_dict(ours.state_dict(), strict=True)
    assert_bitwise_equal(theirs.weight.detach(), ours.weight.detach(), "weight")
    fresh = arn.RMSNorm(HIDDEN)
    fresh.load_state_dict(theirs.state_dict(), strict=True)
    assert_bitwise_equal(fresh.weight.detach(), ours.weight.detach(), "weight")


def test_forward_is_the_op(device: torch.device) -> None:
    inputs = support.make_inputs(3, 5, HIDDEN, device=device)
    module = trained(device)
    y = module(inputs.x)
    y.backward(inputs.grad_y)
    expected = support.forward_backward(
        arn.rms_norm, support.Inputs(inputs.x, module.weight, inputs.grad_y)
    )
    assert_bitwise_equal(y.detach(), expected.y, "y")
    assert_bitwise_equal(module.weight.grad, expected.grad_weight, "grad_weight")


def test_eps_reaches_the_op() -> None:
    x = support.make_inputs(4, HIDDEN, dtype=torch.float32).x * 1e-3
    module = arn.RMSNorm(HIDDEN, eps=1e-2)
    assert_bitwise_equal(module(x).detach(), arn.rms_norm(x, module.weight, 1e-2).detach(), "y")
    assert not torch.equal(module(x), arn.RMSNorm(HIDDEN, eps=1e-5)(x))


# --- Initial values -------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", support.X_DTYPES, ids=str)
@pytest.mark.parametrize(("zero_centered_gamma", "value"), [(False, 1.0), (True, 0.0)])
def test_reset_makes_every_gain_one(
    device: torch.device, dtype: torch.dtype, zero_centered_gamma: bool, value: float
) -> None:
    module = arn.RMSNorm(
        HIDDEN, device=device, dtype=dtype, zero_centered_gamma=zero_centered_gamma
    )
    assert torch.equal(module.weight, torch.full_like(module.weight, value))
    with torch.no_grad():
        module.weight.fill_(7)
    module.reset_parameters()
    assert torch.equal(module.weight, torch.full_like(module.weight, value))
    assert module.weight.dtype == dtype


@pytest.mark.case("Liger-74")
def test_a_zero_centred_weight_of_zeros_is_a_gain_of_one(device: torch.device) -> None:
    x = support.make_inputs(5, HIDDEN, device=device).x
    plain = arn.RMSNorm(HIDDEN, device=device)
    centred = arn.RMSNorm(HIDDEN, device=device, zero_centered_gamma=True)
    assert_bitwise_equal(centred(x).detach(), plain(x).detach(), "y")


def test_a_meta_module_materialises(device: torch.device) -> None:
    module = arn.RMSNorm(HIDDEN, device="meta")
    assert module.weight.device.type == "meta"
    module = module.to_empty(device=device)
    module.reset_parameters()
    assert torch.equal(module.weight, torch.ones(HIDDEN, device=device, dtype=torch.bfloat16))


def test_a_meta_module_takes_a_state_dict_by_assignment() -> None:
    module = arn.RMSNorm(HIDDEN, device="meta")
    module.load_state_dict(trained().state_dict(), assign=True)
    assert_bitwise_equal(module.weight.detach(), trained().weight.detach(), "weight")


def test_without_weight_there_is_no_state(device: torch.device) -> None:
    module = arn.RMSNorm(HIDDEN, device=device, elementwise_affine=False)
    assert module.weight is None
    assert not module.state_dict()
    assert not list(module.parameters())
    module.reset_parameters()
    x = support.make_inputs(5, HIDDEN, device=device).x
    assert_bitwise_equal(module(x), arn.rms_norm(x, None, 1e-5), "y")


# --- Copies ---------------------------------------------------------------------------------------


def saved_and_loaded(module: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.case("Megatron-DeepSpeed-380")
@pytest.mark.parametrize(
    "duplicate",
    [
        copy.deepcopy,
        lambda module: pickle.loads(pickle.dumps(module)),
        saved_and_loaded,
    ],
    ids=["deepcopy", "pickle", "torch-save"],
)
@pytest.mark.parametrize("elementwise_affine", [True, False])
def test_a_copy_is_the_same_and_separate(
    duplicate: Callable[[nn.Module], nn.Module], elementwise_affine: bool
) -> None:
    if elementwise_affine:
        module = trained(eps=1e-3, zero_centered_gamma=True)
    else:
        module = arn.RMSNorm(HIDDEN, eps=1e-3, elementwise_affine=False)
    twin = duplicate(module)
    x = support.make_inputs(5, HIDDEN).x
    assert repr(twin) == repr(module)
    assert_bitwise_equal(twin(x).detach(), module(x).detach(), "y")
    if elementwise_affine:
        with torch.no_grad():
            twin.weight.zero_()
        assert module.weight.abs().sum() > 0


def test_forward_hooks_see_y() -> None:
    module = trained()
    seen = []
    module.register_forward_hook(lambda _module, _args, y: seen.append(y.shape))
    x = support.make_inputs(5, HIDDEN).x
    module(x)
    assert seen == [x.shape]


def test_dtype_conversion_converts_the_weight() -> None:
    module = trained().to(torch.float32)
    assert module.weight.dtype == torch.float32
    x = support.make_inputs(5, HIDDEN).x
    assert_bitwise_equal(module(x).detach(), trained()(x).detach(), "y of the same gains")


def test_repr_says_what_was_constructed() -> None:
    assert repr(arn.RMSNorm(8, eps=1e-6, zero_centered_gamma=True)) == (
        "RMSNorm(8, eps=1e-06, dtype=torch.bfloat16, zero_centered_gamma=True, "
        "elementwise_affine=True)"
    )
    assert "dtype=None" in repr(arn.RMSNorm(8, elementwise_affine=False))


# --- Training -------------------------------------------------------------------------------------


@pytest.mark.case("speculators-PR-711")
@pytest.mark.parametrize(
    ("zero_centered_gamma", "moves"),
    [
        pytest.param(False, False, id="near-one-is-stuck"),
        pytest.param(True, True, id="zero-centred-moves"),
    ],
)
def test_a_bfloat16_gain_follows_a_learning_rate_of_1e_5(
    device: torch.device, zero_centered_gamma: bool, moves: bool
) -> None:
    """bfloat16 has steps of 2^-8 below 1 and 2^-7 above it: 1e-5 is rounded away there."""
    module = arn.RMSNorm(HIDDEN, device=device, zero_centered_gamma=zero_centered_gamma)
    start = module.weight.detach().clone()
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-5)
    inputs = support.make_inputs(4, HIDDEN, device=device)
    for _ in range(50):
        optimizer.zero_grad()
        module(inputs.x).backward(inputs.grad_y)
        optimizer.step()
    moved = (module.weight.detach() != start).float().mean().item()
    assert moved > 0.9 if moves else moved == 0


def test_the_package_is_typed() -> None:
    folder = Path(arn.__file__).parent
    assert (folder / "py.typed").is_file()
    for function in (arn.rms_norm, arn.build_info, arn.RMSNorm.__init__, arn.RMSNorm.forward):
        hints = inspect.signature(function)
        assert hints.return_annotation is not inspect.Signature.empty
        for name, parameter in hints.parameters.items():
            assert name == "self" or parameter.annotation is not inspect.Parameter.empty


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"dim": 0}, "dim must be an integer of at least 1, got 0"),
        ({"dim": "a"}, "dim must be an integer of at least 1, got 'a'"),
        ({"dim": (64,)}, r"dim must be an integer of at least 1, got \(64,\)"),
        ({"dim": 64, "eps": None}, "eps must be a finite number of at least 0, got None"),
        ({"dim": 64, "eps": -1e-5}, "eps must be a finite number of at least 0, got -1e-05"),
        ({"dim": 64, "eps": float("nan")}, "eps must be a finite number of at least 0, got nan"),
    ],
)
def test_a_wrong_argument_is_refused_at_once(arguments, message):
    with pytest.raises(ValueError, match=message):
        arn.RMSNorm(**arguments)
