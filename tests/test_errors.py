"""Bad input raises before anything is allocated or launched, and the message has the op's name, the
argument and both values."""

import math

import automodel_rms_norm as arn
import pytest
import support
import torch

X, WEIGHT, _ = support.make_inputs(4, 8, dtype=torch.float32, weight_dtype=torch.float32)
LENGTH = "weight must have x.size(-1) = 8 elements, got"
SHAPE = "weight must have 1 dimension of x.size(-1) = 8 elements, got shape"
HIDDEN = "x.size(-1) must be at least 1, got 0 in a tensor of shape"
DENSE = "must be a dense strided tensor, got layout"
X_DTYPE = "x must be bfloat16, float16, float32 or float64, got"
EPS = "eps must be at least 0 and finite in Float, got"
DEVICE = "weight must be on the device of x,"


def quantized(tensor: torch.Tensor) -> torch.Tensor:
    return torch.quantize_per_tensor(tensor, 0.1, 0, torch.quint8)


X_DTYPES = {
    torch.bool: "Bool",
    torch.uint8: "Byte",
    torch.int8: "Char",
    torch.int16: "Short",
    torch.int32: "Int",
    torch.int64: "Long",
    torch.complex64: "ComplexFloat",
    torch.complex128: "ComplexDouble",
    torch.float8_e4m3fn: "Float8_e4m3fn",
}
# x and weight of two dtypes that do not go together.
PAIRS = [
    *((torch.float32, weight, "Float", name) for weight, name in X_DTYPES.items()),
    (torch.float64, torch.int64, "Double", "Long"),
    (torch.bfloat16, torch.float64, "BFloat16", "Double"),
    (torch.float16, torch.float64, "Half", "Double"),
    (torch.float32, torch.float64, "Float", "Double"),
]
# What changes from good arguments, and what is raised then.
BAD = {
    "weight_short": (RuntimeError, f"{LENGTH} 7", {"weight": WEIGHT[:7]}),
    "weight_long": (RuntimeError, f"{LENGTH} 16", {"weight": WEIGHT.repeat(2)}),
    "weight_of_one": (RuntimeError, f"{LENGTH} 1", {"weight": WEIGHT[:1]}),
    "weight_empty": (RuntimeError, f"{LENGTH} 0", {"weight": WEIGHT[:0]}),
    "weight_2d": (RuntimeError, f"{SHAPE} [1, 8]", {"weight": WEIGHT[None]}),
    "weight_0d": (RuntimeError, f"{SHAPE} []", {"weight": WEIGHT[0]}),
    "x_0d": (RuntimeError, "x must have at least 1 dimension, got a 0-dim", {"x": X[0, 0]}),
    "x_0d_alone": (RuntimeError, "x must have at least 1", {"x": X[0, 0], "weight": None}),
    "no_hidden": (RuntimeError, f"{HIDDEN} [4, 0]", {"x": X[:, :0], "weight": WEIGHT[:0]}),
    "no_hidden_alone": (RuntimeError, f"{HIDDEN} [0]", {"x": X[0, :0], "weight": None}),
    "x_meta-Liger-1303": (RuntimeError, f"{DEVICE} meta, got cpu", {"x": X.to("meta")}),
    "w_meta-Liger-1303": (RuntimeError, f"{DEVICE} cpu, got meta", {"weight": WEIGHT.to("meta")}),
    "x_sparse": (RuntimeError, f"x {DENSE} Sparse", {"x": X.to_sparse()}),
    "x_sparse_csr": (RuntimeError, f"x {DENSE} SparseCsr", {"x": X.to_sparse_csr()}),
    "x_nested": (
        RuntimeError,
        f"x {DENSE.replace('layout', 'a nested tensor of layout')} Strided",
        {"x": torch.nested.nested_tensor([X, X])},
    ),
    "x_mkldnn": (RuntimeError, f"x {DENSE} Mkldnn", {"x": X.to_mkldnn()}),
    "x_quantized": (RuntimeError, f"x {DENSE} Strided with dtype QUInt8", {"x": quantized(X)}),
    "weight_sparse": (RuntimeError, f"weight {DENSE} Sparse", {"weight": WEIGHT.to_sparse()}),
    "weight_mkldnn": (RuntimeError, f"weight {DENSE} Mkldnn", {"weight": WEIGHT.to_mkldnn()}),
    "weight_quantized": (RuntimeError, f"weight {DENSE} Strided", {"weight": quantized(WEIGHT)}),
    "eps_negative": (ValueError, f"{EPS} -1e-05", {"eps": -1e-5}),
    "eps_nan": (ValueError, f"{EPS} nan", {"eps": math.nan}),
    "eps_infinite": (ValueError, f"{EPS} inf", {"eps": math.inf}),
    "eps_infinite_in_float": (ValueError, f"{EPS} 1e+300", {"eps": 1e300}),
    "eps_minus_infinite": (ValueError, f"{EPS} -inf", {"eps": -math.inf}),
    **{
        f"x_{dtype}": (TypeError, f"{X_DTYPE} {name}", {"x": X.to(dtype)})
        for dtype, name in X_DTYPES.items()
    },
    **{
        f"{x_dtype}-{weight_dtype}-sglang-32807": (
            TypeError,
            f"weight of dtype {weight_name} does not go with x of dtype {x_name}",
            {"x": X.to(x_dtype), "weight": WEIGHT.to(weight_dtype)},
        )
        for x_dtype, weight_dtype, x_name, weight_name in PAIRS
    },
}
OPS = torch.ops.automodel
CALLS = {
    "function": ("rms_norm", arn.rms_norm),
    "op": ("rms_norm", lambda x, weight, eps: OPS.rms_norm(x, weight, eps, True)),
    "inner": (
        "rms_norm_forward",
        lambda x, weight, eps: OPS.rms_norm_forward(x, weight, eps, False),
    ),
}
MODES = {
    "no_grad": torch.no_grad,
    "inference": torch.inference_mode,
    "grad": torch.enable_grad,
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("bad", BAD)
def test_bad_input_raises(bad, call, mode):
    error, message, changed = BAD[bad]
    op, function = CALLS[call]
    arguments = {"x": X, "weight": WEIGHT, "eps": 1e-5, **changed}
    with MODES[mode]():
        support.assert_raises(error, f"{op}: {message}", lambda: function(**arguments))


@pytest.mark.parametrize("argument", ["x", "weight"])
@pytest.mark.parametrize("bad", ["weight_short", "weight_2d", "eps_nan", "w_meta-Liger-1303"])
def test_bad_input_raises_where_a_gradient_is_wanted(bad, argument):
    error, message, changed = BAD[bad]
    arguments = {"x": X, "weight": WEIGHT, "eps": 1e-5, **changed}
    arguments[argument] = arguments[argument].clone().requires_grad_()
    support.assert_raises(error, f"rms_norm: {message}", lambda: arn.rms_norm(**arguments))


ON_CUDA = ["weight_short", "weight_2d", "no_hidden", "eps_nan", "x_torch.int64", "x_sparse"]


@pytest.mark.cuda
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("bad", ON_CUDA)
def test_bad_input_on_a_gpu_raises(bad, call):
    error, message, changed = BAD[bad]
    op, function = CALLS[call]
    arguments = {"x": X, "weight": WEIGHT, **changed}
    arguments = {name: value.cuda() for name, value in arguments.items() if name != "eps"}
    eps = changed.get("eps", 1e-5)
    support.assert_raises(error, f"{op}: {message}", lambda: function(**arguments, eps=eps), "cuda")


def test_good_arguments_do_not_raise():
    for _, function in CALLS.values():
        function(X, WEIGHT, 1e-5)
