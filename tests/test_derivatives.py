"""Second and higher derivatives, forward-mode AD and torch.func, against the formula in plain torch
operations and against finite differences. The contract says nothing of their bits.
"""

from collections.abc import Callable

import automodel_rms_norm as arn
import baselines
import pytest
import support
import torch
from automodel_rms_norm.testing import assert_bitwise_equal
from torch import Tensor
from torch.autograd import forward_ad, gradcheck, gradgradcheck
from torch.func import grad, hessian, jacfwd, jacrev, jvp, linearize, vjp, vmap

EPS = 1e-3
OPS = torch.ops.automodel
slow_but_right = pytest.mark.filterwarnings("ignore:There is a performance drop")


def leaves(*shape: int, device: torch.device | str = "cpu", count: int = 3) -> list[Tensor]:
    """Tensors of x's shape, and weight last; float64."""
    options = {"dtype": torch.float64, "weight_dtype": torch.float64, "device": device}
    weight = support.make_inputs(*shape, **options).weight
    return [support.make_inputs(*shape, seed=i, **options).x for i in range(count - 1)] + [weight]


def added_formula(x: Tensor, residual: Tensor, weight: Tensor | None) -> tuple[Tensor, Tensor]:
    return baselines.formula(x + residual, weight, EPS), x + residual


def added(x: Tensor, residual: Tensor, weight: Tensor | None) -> tuple[Tensor, Tensor]:
    return arn.add_rms_norm(x, residual, weight, EPS)


# --- Finite differences ---------------------------------------------------------------------------


def check_all(function: Callable[..., object], *arguments: Tensor | None) -> None:
    given = tuple(a if a is None else a.clone().requires_grad_() for a in arguments)
    assert gradcheck(function, given, check_forward_ad=True)
    assert gradgradcheck(function, given, check_fwd_over_rev=True)


@pytest.mark.parametrize("zero_centered_gamma", [False, True])
@pytest.mark.parametrize("weighted", [True, False], ids=["weight", "weightless"])
@pytest.mark.parametrize("shape", [(5,), (2, 5), (2, 2, 5)], ids=str)
def test_rms_norm(shape, weighted, zero_centered_gamma, device):
    x, weight = leaves(*shape, device=device, count=2)
    check_all(
        lambda x, weight: arn.rms_norm(x, weight, EPS, zero_centered_gamma),
        x,
        weight if weighted else None,
    )


@pytest.mark.parametrize("weighted", [True, False], ids=["weight", "weightless"])
@pytest.mark.parametrize("outputs", [[0, 1], [0], [1]], ids=["both", "y", "sum"])
def test_add_rms_norm(outputs, weighted, device):
    x, residual, weight = leaves(2, 5, device=device)
    weighted = weighted and 0 in outputs

    def function(x: Tensor, residual: Tensor, weight: Tensor | None = None) -> tuple[Tensor, ...]:
        return tuple(added(x, residual, weight)[output] for output in outputs)

    check_all(function, x, residual, *([weight] if weighted else []))


@pytest.mark.parametrize("frozen", [0, 1], ids=["x", "weight"])
def test_with_a_frozen_argument(frozen, device):
    arguments = leaves(2, 5, device=device, count=2)
    kept = arguments.pop(frozen)

    def function(other: Tensor) -> Tensor:
        return arn.rms_norm(*([kept, other] if frozen == 0 else [other, kept]), EPS)

    check_all(function, *arguments)


def test_the_inner_forward_ops(device):
    x, residual, weight = leaves(2, 5, device=device)
    check_all(lambda x, w: OPS.rms_norm_forward(x, w, EPS, False), x, weight)
    check_all(lambda *given: OPS.add_rms_norm_forward(*given, EPS, False), x, residual, weight)


@pytest.mark.parametrize("mask", [[True, True], [True, False], [False, True]], ids=str)
def test_the_inner_backward_ops_with_rstd_an_argument_of_its_own(mask, device):
    grad_y, x, grad_sum, weight = leaves(2, 5, device=device, count=4)
    rstd = torch.rand(2, dtype=torch.float64, device=device) + 0.5

    def pick(outputs: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
        return tuple(o for o, wanted in zip(outputs, mask, strict=True) if wanted)

    check_all(
        lambda g, x, w, r: pick(OPS.rms_norm_backward(g, x, w, r, False, mask)),
        grad_y,
        x,
        weight,
        rstd,
    )
    if mask[0]:
        check_all(
            lambda g, s, x, w, r: pick(OPS.add_rms_norm_backward(g, s, x, w, r, False, mask)),
            grad_y,
            grad_sum,
            x,
            weight,
            rstd,
        )


# --- torch.func -----------------------------------------------------------------------------------


def scalar(norm: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda *arguments: norm(*arguments).pow(3).sum()


TRANSFORMS: dict[str, Callable[..., object]] = {
    "grad": lambda f, x, w: grad(scalar(f), (0, 1))(x, w),
    "vjp": lambda f, x, w: vjp(f, x, w)[1](x + 1),
    "jvp": lambda f, x, w: jvp(f, (x, w), (x + 1, w - 2)),
    "jvp of x": lambda f, x, w: jvp(lambda x: f(x, w), (x,), (x + 1,)),
    "jvp of weight": lambda f, x, w: jvp(lambda w: f(x, w), (w,), (w + 1,)),
    "linearize": lambda f, x, w: linearize(lambda x: f(x, w), x)[1](x + 1),
    "jacrev": lambda f, x, w: jacrev(f, (0, 1))(x, w),
    "jacfwd": lambda f, x, w: jacfwd(f, (0, 1))(x, w),
    "hessian": lambda f, x, w: hessian(scalar(f), (0, 1))(x, w),
    "jacrev of jacrev": lambda f, x, w: jacrev(jacrev(scalar(f)))(x, w),
    "jacfwd of jacfwd": lambda f, x, w: jacfwd(jacfwd(scalar(f)))(x, w),
    "jacrev of jacfwd": lambda f, x, w: jacrev(jacfwd(scalar(f)), 1)(x, w),
    "jvp of vjp": lambda f, x, w: jvp(lambda x: vjp(f, x, w)[1](x), (x,), (x + 1,)),
    "grad of grad": lambda f, x, w: grad(lambda x: grad(scalar(f))(x, w).pow(2).sum())(x),
    "third derivative": lambda f, x, w: grad(
        lambda x: grad(lambda x: grad(scalar(f))(x, w).pow(2).sum())(x).pow(2).sum()
    )(x),
    "vmap": lambda f, x, w: vmap(f, (0, None))(x, w),
    "vmap of grad": lambda f, x, w: vmap(grad(scalar(f), (0, 1)), (0, None))(x, w),
    "vmap of jvp": lambda f, x, w: vmap(lambda x: jvp(lambda x: f(x, w), (x,), (x + 1,)))(x),
    "vmap of hessian": lambda f, x, w: vmap(hessian(scalar(f)), (0, None))(x, w),
    "autograd.functional.jvp": lambda f, x, w: torch.autograd.functional.jvp(
        lambda x: f(x, w), x, x + 1
    ),
}


def tensors_of(result: object) -> list[Tensor]:
    if isinstance(result, Tensor):
        return [result]
    return [tensor for part in result for tensor in tensors_of(part)]


@pytest.mark.case("autograd-several")
@slow_but_right
@pytest.mark.parametrize("residual", [False, True], ids=["norm", "add_norm"])
@pytest.mark.parametrize("name", TRANSFORMS)
def test_transform(name: str, residual: bool, device: torch.device) -> None:
    x, more, weight = leaves(3, 2, 5, device=device)

    def joined(pair: tuple[Tensor, Tensor]) -> Tensor:
        return pair[0] * pair[1].sin()

    if residual:
        more = more[0]  # one for all, where x is mapped over

        def ours(x: Tensor, w: Tensor) -> Tensor:
            return joined(added(x, more.expand_as(x), w))

        def theirs(x: Tensor, w: Tensor) -> Tensor:
            return joined(added_formula(x, more.expand_as(x), w))
    else:

        def ours(x: Tensor, w: Tensor) -> Tensor:
            return arn.rms_norm(x, w, EPS)

        def theirs(x: Tensor, w: Tensor) -> Tensor:
            return baselines.formula(x, w, EPS)

    actual, expected = (
        tensors_of(TRANSFORMS[name](function, x, weight)) for function in (ours, theirs)
    )
    assert len(actual) == len(expected)
    for one, other in zip(actual, expected, strict=True):
        assert one.dtype == other.dtype
        # Two float64 computations of some hundred roundings each, 2^10 in all, of sums that cancel
        # to no less than 2^-10 of their terms.
        assert (one - other).abs().max() <= 2.0 ** (20 - 53) * (1 + other.abs().max())


# --- What does not change -------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", support.X_DTYPES, ids=str)
def test_forward_mode_leaves_y_its_bits_and_gives_a_tangent_of_its_dtype(dtype, device):
    inputs = support.make_inputs(4, 40, dtype=dtype, device=device)
    x, weight, tangent = inputs
    with forward_ad.dual_level():
        y, dy = forward_ad.unpack_dual(arn.rms_norm(forward_ad.make_dual(x, tangent), weight, EPS))
    assert_bitwise_equal(y, arn.rms_norm(x, weight, EPS), "y")
    assert dy.dtype == dtype
    expected = jvp(
        lambda x: baselines.formula(x, weight.double(), EPS), (x.double(),), (tangent.double(),)
    )[1]
    # One rounding to the dtype, and 2^6 in the accumulate type of terms no larger than 2^4.
    u = torch.finfo(dtype).eps / 2
    accumulate = torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32).eps
    assert ((dy.double() - expected).abs() <= u * expected.abs() + 2.0**10 * accumulate).all()


@slow_but_right
@pytest.mark.parametrize("dtype", support.X_DTYPES, ids=str)
def test_transforms_leave_y_and_first_derivatives_their_bits(dtype, device):
    inputs = support.make_inputs(4, 40, dtype=dtype, device=device)
    x, weight, grad_y = inputs

    def norm(x: Tensor, weight: Tensor) -> Tensor:
        return arn.rms_norm(x, weight, EPS)

    def gradients(x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        return vjp(norm, x, weight)[1](grad_y)

    expected = support.forward_backward(arn.rms_norm, inputs, EPS)
    directions = (torch.ones_like(x), torch.ones_like(weight))
    y, first = vjp(norm, x, weight)[0], gradients(x, weight)
    support.assert_same(support.Outputs(y, *first), expected)
    y, first = (jvp(function, (x, weight), directions)[0] for function in (norm, gradients))
    support.assert_same(support.Outputs(y, *first), expected)
    assert_bitwise_equal(linearize(norm, x, weight)[0], expected.y, "y")

    one_hot = torch.eye(40, dtype=dtype, device=device)
    rows = torch.stack([vjp(norm, x[0], weight)[1](row)[0] for row in one_hot])
    assert_bitwise_equal(jacrev(norm)(x[0], weight), rows, "the Jacobian")


def test_a_tangent_of_zeros_is_no_tangent_of_nothing(device):
    """A weight with a tangent and an x without."""
    x, weight = leaves(3, 5, device=device, count=2)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(weight, torch.ones_like(weight))
        y, dy = forward_ad.unpack_dual(arn.rms_norm(x, dual, EPS))
    xhat = arn.rms_norm(x, None, EPS)
    assert (dy - xhat).abs().max() <= 2.0**-50
    assert_bitwise_equal(y, arn.rms_norm(x, weight, EPS), "y")


def test_double_backward_through_a_compiled_forward_is_refused_by_torch(fresh_dynamo):
    """torch's own limit, with its own message."""
    x, weight = (t.requires_grad_() for t in leaves(3, 5, count=2))
    y = torch.compile(arn.rms_norm, backend="aot_eager")(x, weight, EPS)
    (first,) = torch.autograd.grad(y.pow(2).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="does not currently support double backward"):
        first.sum().backward()
