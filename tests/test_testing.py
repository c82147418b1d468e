"""The assertions that are offered to others: what they accept, what they find and what they say."""

import math

import automodel_rms_norm as arn
import pytest
import support
import torch
from automodel_rms_norm.contexts import norm_inputs
from automodel_rms_norm.run_modes import run_mode_contexts
from automodel_rms_norm.testing import assert_bitwise_equal, assert_context_parity
from torch import nn

QUIET_NAN, OTHER_NAN = 0x7FC00000, 0x7FC00001 - 2**32 + 2**31  # payloads 0 and 1, signs + and -


def floats(*values: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype)


@pytest.mark.parametrize("dtype", [*support.X_DTYPES, torch.int64, torch.bool], ids=str)
def test_equal_bits_are_accepted(dtype, device):
    tensor = torch.arange(24, device=device).reshape(2, 3, 4).to(dtype)
    assert_bitwise_equal(tensor, tensor.clone())
    assert_bitwise_equal(tensor.transpose(0, 2), tensor.transpose(0, 2).contiguous())
    assert_bitwise_equal(tensor, tensor.cpu())
    assert_bitwise_equal(tensor[:0], tensor[:0])
    assert_bitwise_equal(tensor[0, 0, 0], tensor[0, 0, 0].clone())


def test_any_nan_equals_any_nan():
    payloads = torch.tensor([QUIET_NAN, OTHER_NAN], dtype=torch.int32).view(torch.float32)
    assert bool(payloads.isnan().all())
    assert_bitwise_equal(payloads, payloads.flip(0))
    with pytest.raises(AssertionError, match="1 of 2 elements differ"):
        assert_bitwise_equal(payloads, floats(math.nan, 1.0))


def test_gradients_do_not_matter():
    tensor = floats(1.0, 2.0)
    assert_bitwise_equal(tensor.clone().requires_grad_(), tensor)


@pytest.mark.parametrize(
    ("dtype", "actual_bits", "expected_bits"),
    [
        (torch.bfloat16, "0x3f81", "0x3f80"),
        (torch.float16, "0x3c01", "0x3c00"),
        (torch.float32, "0x3f800001", "0x3f800000"),
        (torch.float64, "0x3ff0000000000001", "0x3ff0000000000000"),
    ],
    ids=str,
)
def test_the_first_difference_is_named(dtype, actual_bits, expected_bits, device):
    expected = torch.ones(3, 4, 5, dtype=dtype, device=device)
    actual = expected.clone()
    above = 1 + torch.finfo(dtype).eps
    actual[1, 2, 3] = above
    actual[2, 0, 0] = -1.0
    with pytest.raises(AssertionError) as caught:
        assert_bitwise_equal(actual, expected, "grad_x")
    assert str(caught.value) == (
        "grad_x: 2 of 60 elements differ\n"
        f"first: grad_x[1, 2, 3] = {above!r} ({actual_bits}), expected 1.0 ({expected_bits}), 1 ulp"
    )


def test_first_means_first_of_a_strided_tensor():
    expected = torch.zeros(4, 3).t()
    actual = expected.clone()
    actual[0, 3] = actual[2, 0] = 1.0
    with pytest.raises(AssertionError, match=r"2 of 12 .*\nfirst: tensor\[0, 3\] = 1.0"):
        assert_bitwise_equal(actual, expected)


@pytest.mark.parametrize(
    ("actual", "expected", "message"),
    [
        (floats(-0.0), floats(0.0), r"-0\.0 \(0x80000000\), expected 0\.0 \(0x00000000\), 0 ulp"),
        (floats(-1e-45), floats(1e-45), r"\(0x80000001\).*\(0x00000001\), 2 ulp"),
        (floats(math.nan), floats(1.0), r"nan \(0x7fc00000\), expected 1\.0 \(0x3f800000\)$"),
        (floats(math.inf), floats(3.4028234663852886e38), r"inf .*, 1 ulp"),
        (torch.tensor(2.0), torch.tensor(1.0), r"tensor\[\] = 2\.0"),
        (torch.tensor([7]), torch.tensor([5]), r"7 \(0x0000000000000007\), expected 5 \(0x0+5\)$"),
        (
            floats(1.0),
            floats(1.0).double(),
            r"^tensor: dtype torch.float32, expected torch.float64",
        ),
        (floats(1.0), floats(1.0, 1.0), r"^tensor: shape \(1,\), expected \(2,\)"),
        (torch.zeros(0, 3), torch.zeros(3, 0), r"^tensor: shape \(0, 3\), expected \(3, 0\)"),
    ],
    ids=str,
)
def test_what_a_difference_says(actual, expected, message):
    with pytest.raises(AssertionError, match=message):
        assert_bitwise_equal(actual, expected)


@pytest.mark.parametrize(
    ("bad", "error", "message"),
    [
        ([1.0], TypeError, "must be a torch.Tensor, got list; torch.as_tensor"),
        (None, TypeError, "must be a torch.Tensor, got NoneType"),
        (torch.ones(1, dtype=torch.complex128), TypeError, "is torch.complex128; compare .*_real"),
        (
            torch.quantize_per_tensor(torch.ones(1), 1.0, 0, torch.quint8),
            TypeError,
            "is quantized; compare its int_repr",
        ),
        (
            torch.ones(1).to_sparse(),
            ValueError,
            r"must be dense, not of layout .*; .* to_dense\(\)",
        ),
        (torch.ones(1, device="meta"), ValueError, "is on the meta device and has no values"),
    ],
    ids=["list", "None", "complex128", "quantized", "sparse", "meta"],
)
def test_what_has_no_bits_is_named(bad, error, message):
    good = floats(1.0)
    with pytest.raises(error, match=f"^actual {message}"):
        assert_bitwise_equal(bad, good)
    with pytest.raises(error, match=f"^expected {message}"):
        assert_bitwise_equal(good, bad)
    with pytest.raises(error, match=f"^x {message}"):
        assert_context_parity(arn.rms_norm, bad, None, 1e-5)
    if bad is not None:
        for argument in ("weight", "grad_y"):
            arguments = {"x": floats(1.0), "weight": None, "eps": 1e-5, argument: bad}
            with pytest.raises(error, match=f"^{argument} {message}"):
                assert_context_parity(arn.rms_norm, **arguments)


def test_context_parity_takes_floating_point_alone():
    with pytest.raises(TypeError, match=r"^x must be of a floating-point dtype, got torch.int64"):
        assert_context_parity(arn.rms_norm, torch.ones(2, 3, dtype=torch.int64), None, 1e-5)


def test_ulp_distance_counts_numbers_between():
    left = floats(1.0, -0.0, -1e-45, 2.0)
    right = floats(1.0000001192092896, 0.0, 1e-45, 1.0)
    assert arn.bits.ulp_distance(left, right).tolist() == [1, 0, 2, 1 << 23]
    with pytest.raises(TypeError, match="float64"):
        arn.bits.ulp_distance(left.double(), right.double())


# --- assert_context_parity ------------------------------------------------------------------------

P1 = [
    "no_grad",
    "inference_mode",
    "x frozen",
    "weight frozen",
    "weight a plain tensor",
    "checkpoint",
    "checkpoint, reentrant",
    "gradients kept",
    "inputs kept",
]
INSIDE = [f"inside a larger compiled function, {context}" for context in ("grad", "no_grad")]
ONCE = ["inference_mode", "x frozen", "weight frozen"]  # compiled in the first mode alone
STATIC = [f"compiled static, {context}" for context in ("grad", "no_grad", *ONCE)]


def op_inputs(device: torch.device | str = "cpu"):
    inputs = support.make_inputs(3, 5, 130, device=device)
    return inputs.x, inputs.weight


@pytest.mark.parametrize("zero_centered_gamma", [False, True])
def test_the_op_has_one_set_of_bits(zero_centered_gamma, device):
    def function(x, weight, eps):
        return arn.rms_norm(x, weight, eps, zero_centered_gamma)

    ran = assert_context_parity(function, *op_inputs(device), 1e-5, fullgraph=True)
    compiled = [
        f"compiled {mode}, {context}"
        for mode in arn.testing.COMPILE_MODES
        for context in ("grad", "no_grad", *(ONCE if mode == "static" else []))
    ]
    graph = ["CUDA graph"] if device.type == "cuda" else []
    assert ran == [*P1, "without the compiler", *compiled, *INSIDE, "export", *graph]


def test_without_weight_its_contexts_are_left_out(device):
    x, _ = op_inputs(device)
    ran = assert_context_parity(arn.rms_norm, x, None, 1e-5, compile_modes=())
    expected = [name for name in P1 if name not in ("x frozen",) and "weight" not in name]
    expected.append("without the compiler")
    assert ran == [*expected, *(["CUDA graph"] if device.type == "cuda" else [])]


def other_bits(x, weight, eps):
    return arn.rms_norm(x, weight, eps + 0.5)


def other_under_no_grad(x, weight, eps):
    return (arn.rms_norm if torch.is_grad_enabled() else other_bits)(x, weight, eps)


def other_in_inference(x, weight, eps):
    return (other_bits if torch.is_inference_mode_enabled() else arn.rms_norm)(x, weight, eps)


def other_when_x_is_frozen(x, weight, eps):
    frozen = torch.is_grad_enabled() and not x.requires_grad
    return (other_bits if frozen else arn.rms_norm)(x, weight, eps)


def other_when_weight_is_frozen(x, weight, eps):
    frozen = torch.is_grad_enabled() and not weight.requires_grad
    return (other_bits if frozen else arn.rms_norm)(x, weight, eps)


def other_for_a_plain_weight(x, weight, eps):
    function = arn.rms_norm if isinstance(weight, nn.Parameter) else other_bits
    return function(x, weight, eps)


def other_when_compiled(x, weight, eps):
    return (other_bits if torch.compiler.is_compiling() else arn.rms_norm)(x, weight, eps)


class HalvedGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tensor):
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx, grad):
        return grad / 2


def other_grad_weight_when_x_is_frozen(x, weight, eps):
    if torch.is_grad_enabled() and not x.requires_grad:
        weight = HalvedGradient.apply(weight)
    return arn.rms_norm(x, weight, eps)


@pytest.mark.parametrize(
    ("function", "modes", "found"),
    [
        (
            other_under_no_grad,
            (),
            ["y, no_grad", "y, inference_mode", "y, checkpoint, reentrant"],
        ),
        (other_in_inference, (), ["y, inference_mode"]),
        (other_when_x_is_frozen, (), ["y, x frozen"]),
        (other_when_weight_is_frozen, (), ["y, weight frozen"]),
        # Reentrant checkpointing recomputes with detached, plain tensors.
        (
            other_for_a_plain_weight,
            (),
            ["y, weight a plain tensor", "grad_x, checkpoint, reentrant"],
        ),
        (other_grad_weight_when_x_is_frozen, (), ["grad_weight, x frozen"]),
        (
            other_when_compiled,
            ("static",),
            [f"y, {name}" for name in (*STATIC, *INSIDE, "export")],
        ),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_context_with_other_bits_is_named(function, modes, found):
    with pytest.raises(AssertionError) as caught:
        assert_context_parity(function, *op_inputs(), 1e-5, compile_modes=modes)
    first, *lines = str(caught.value).splitlines()
    assert first.startswith(f"the bits differ in {len(found)} of ")
    for name, line in zip(found, lines[::2], strict=True):
        against = name.rsplit(", ")[-1] if "compiled" in name else "grad"
        assert line.startswith(f"{name} against {against}: "), line
    assert all(" ulp" in line and "0x" in line for line in lines[1::2])


def test_inputs_are_not_changed():
    x, weight = op_inputs()
    before = x.clone(), weight.clone()
    assert_context_parity(arn.rms_norm, x, weight, 1e-5, compile_modes=())
    assert x.grad is None
    assert not x.requires_grad
    assert not weight.requires_grad
    for tensor, copy in zip((x, weight), before, strict=True):
        assert_bitwise_equal(tensor, copy)


def test_unknown_compile_mode():
    with pytest.raises(ValueError, match="'fast' is not one of static, dynamic, reduce-overhead"):
        assert_context_parity(arn.rms_norm, *op_inputs(), 1e-5, compile_modes=("fast",))


@pytest.mark.cuda
def test_a_cuda_graph_is_replayed_with_new_values():
    """A function that remembers what capture saw must not pass."""
    kept = {}

    def remembering(x, weight, eps):
        if torch.cuda.is_current_stream_capturing():
            return arn.rms_norm(x, weight, eps) * 0 + kept["y"]
        y = arn.rms_norm(x, weight, eps)
        kept["y"] = y.detach()
        return y

    x, weight = op_inputs("cuda")
    inputs = norm_inputs(x, weight, torch.ones_like(x), 1e-5)
    (graph,) = (c for c in run_mode_contexts(inputs) if c.name == "CUDA graph")
    assert graph.difference(remembering, inputs) is not None
