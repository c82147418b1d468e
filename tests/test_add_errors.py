"""Bad input of add_rms_norm's ops raises before anything is allocated or launched, and the message
has the op's name, the argument and both values."""

import math

import added
import automodel_rms_norm as arn
import pytest
import support
import torch
from added import OPS
from test_devices import OnAnotherDevice
from test_errors import DENSE, DEVICE, EPS, HIDDEN, LENGTH, MODES, SHAPE, X_DTYPE, quantized

INPUTS = added.make_inputs(4, 8, dtype=torch.float32, weight_dtype=torch.float32)
X, RESIDUAL, WEIGHT, GRAD_Y, GRAD_SUM = INPUTS
_, SUM, RSTD, *_ = added.run_op(INPUTS)


def like(name: str, tensor: torch.Tensor, rows: str) -> dict[str, tuple]:
    """What is wrong with a tensor that should be like the tensor called `rows`."""
    shape = f"{name} must have shape [4, 8], got"
    dtype = f"{name} must have the dtype of {rows}, Float, got"
    device = f"{name} must be on the device of {rows}, cpu, got"
    return {
        f"{name}_short": (RuntimeError, f"{shape} [3, 8]", {name: tensor[:3]}),
        f"{name}_transposed": (RuntimeError, f"{shape} [8, 4]", {name: tensor.T}),
        f"{name}_flat": (RuntimeError, f"{shape} [32]", {name: tensor.flatten()}),
        f"{name}_broadcast": (RuntimeError, f"{shape} [1, 8]", {name: tensor[:1]}),
        f"{name}_vector": (RuntimeError, f"{shape} [8]", {name: tensor[0]}),
        f"{name}_half": (TypeError, f"{dtype} Half", {name: tensor.half()}),
        f"{name}_double": (TypeError, f"{dtype} Double", {name: tensor.double()}),
        f"{name}_device": (RuntimeError, f"{device} meta", {name: tensor.to("meta")}),
        f"{name}_sparse": (RuntimeError, f"{name} {DENSE} Sparse", {name: tensor.to_sparse()}),
        f"{name}_mkldnn": (RuntimeError, f"{name} {DENSE} Mkldnn", {name: tensor.to_mkldnn()}),
        f"{name}_quantized": (RuntimeError, f"{name} {DENSE} Strided", {name: quantized(tensor)}),
    }


FORWARD = {"x": X, "residual": RESIDUAL, "weight": WEIGHT, "eps": 1e-5}
BAD_FORWARD = {
    **like("residual", RESIDUAL, "x"),
    "x_0d": (RuntimeError, "x must have at least 1 dimension, got a 0-dim", {"x": X[0, 0]}),
    "x_long": (TypeError, f"{X_DTYPE} Long", {"x": X.long()}),
    "x_sparse": (RuntimeError, f"x {DENSE} Sparse", {"x": X.to_sparse()}),
    "x_meta": (RuntimeError, f"{DEVICE} meta, got cpu", {"x": X.to("meta")}),
    "no_hidden": (
        RuntimeError,
        f"{HIDDEN} [4, 0]",
        {"x": X[:, :0], "residual": X[:, :0], "weight": WEIGHT[:0]},
    ),
    "weight_short": (RuntimeError, f"{LENGTH} 7", {"weight": WEIGHT[:7]}),
    "weight_2d": (RuntimeError, f"{SHAPE} [1, 8]", {"weight": WEIGHT[None]}),
    "weight_double": (
        TypeError,
        "weight of dtype Double does not go with x of dtype Float",
        {"weight": WEIGHT.double()},
    ),
    "eps_negative": (ValueError, f"{EPS} -1e-05", {"eps": -1e-5}),
    "eps_nan": (ValueError, f"{EPS} nan", {"eps": math.nan}),
}
CALLS = {
    "function": ("add_rms_norm", arn.add_rms_norm),
    "op": ("add_rms_norm", OPS.add_rms_norm),
    "inner": (
        "add_rms_norm_forward",
        lambda **arguments: OPS.add_rms_norm_forward(**arguments, zero_centered_gamma=False),
    ),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("bad", BAD_FORWARD)
def test_bad_input_raises(bad, call, mode):
    error, message, changed = BAD_FORWARD[bad]
    op, function = CALLS[call]
    arguments = {**FORWARD, **changed}
    with MODES[mode]():
        support.assert_raises(error, f"{op}: {message}", lambda: function(**arguments))


@pytest.mark.parametrize("argument", ["x", "residual", "weight"])
@pytest.mark.parametrize("bad", ["residual_short", "residual_half", "weight_short", "eps_nan"])
def test_bad_input_raises_where_a_gradient_is_wanted(bad, argument):
    error, message, changed = BAD_FORWARD[bad]
    arguments = {**FORWARD, **changed}
    arguments[argument] = arguments[argument].clone().requires_grad_()
    call = lambda: arn.add_rms_norm(**arguments)  # noqa: E731
    support.assert_raises(error, f"add_rms_norm: {message}", call)


BACKWARD = {
    "grad_y": GRAD_Y,
    "grad_sum": GRAD_SUM,
    "sum": SUM,
    "weight": WEIGHT,
    "rstd": RSTD,
    "zero_centered_gamma": False,
    "output_mask": [True, True],
}
MASK = "output_mask asks for the gradient of weight, but weight is None"
RSTD_DTYPE = "rstd must have dtype Float for sum of dtype Float, got Double"
BAD_BACKWARD = {
    **like("grad_y", GRAD_Y, "sum"),
    **like("grad_sum", GRAD_SUM, "sum"),
    "sum_long": (TypeError, f"{X_DTYPE.replace('x', 'sum', 1)} Long", {"sum": SUM.long()}),
    "sum_0d": (RuntimeError, "sum must have at least 1 dimension", {"sum": SUM[0, 0]}),
    "sum_sparse": (RuntimeError, f"sum {DENSE} Sparse", {"sum": SUM.to_sparse()}),
    "rstd_short": (RuntimeError, "rstd must have shape [4], got [3]", {"rstd": RSTD[:3]}),
    "rstd_dtype": (TypeError, RSTD_DTYPE, {"rstd": RSTD.double()}),
    "rstd_device": (
        RuntimeError,
        "rstd must be on the device of sum, cpu, got meta",
        {"rstd": RSTD.to("meta")},
    ),
    "weight_short": (
        RuntimeError,
        "weight must have sum.size(-1) = 8 elements, got 7",
        {"weight": WEIGHT[:7]},
    ),
    "weight_dtype": (
        TypeError,
        "weight of dtype Double does not go with sum of dtype Float",
        {"weight": WEIGHT.double()},
    ),
    "mask_without_weight": (RuntimeError, MASK, {"weight": None}),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("bad", BAD_BACKWARD)
def test_bad_input_of_backward_raises(bad, mode):
    error, message, changed = BAD_BACKWARD[bad]
    call = lambda: OPS.add_rms_norm_backward(**{**BACKWARD, **changed})  # noqa: E731
    with MODES[mode]():
        support.assert_raises(error, f"add_rms_norm_backward: {message}", call)


def on_cuda(arguments: dict[str, object]) -> dict[str, object]:
    return {k: v.cuda() if isinstance(v, torch.Tensor) else v for k, v in arguments.items()}


@pytest.mark.cuda
@pytest.mark.parametrize("bad", ["residual_short", "residual_half", "weight_short", "eps_nan"])
def test_bad_input_on_a_gpu_raises(bad):
    error, message, changed = BAD_FORWARD[bad]
    arguments = on_cuda({**FORWARD, **changed})
    call = lambda: arn.add_rms_norm(**arguments)  # noqa: E731
    support.assert_raises(error, f"add_rms_norm: {message}", call, "cuda")


@pytest.mark.cuda
def test_a_residual_on_another_device_raises():
    arguments = {**on_cuda(FORWARD), "residual": RESIDUAL}
    message = "add_rms_norm: residual must be on the device of x, cuda:0, got cpu"
    with pytest.raises(RuntimeError, match=message):
        arn.add_rms_norm(**arguments)
    arguments = {**on_cuda(BACKWARD), "grad_sum": GRAD_SUM}
    message = "add_rms_norm_backward: grad_sum must be on the device of sum, cuda:0, got cpu"
    with pytest.raises(RuntimeError, match=message):
        OPS.add_rms_norm_backward(**arguments)


def refuse(device: str, call: str) -> str:
    """The message without the op's name."""
    tensor = OnAnotherDevice(device)
    rstd = torch.Tensor._make_wrapper_subclass(OnAnotherDevice, (4,), device=device)
    arguments = {"x": tensor, "residual": tensor, "weight": None, "eps": 1e-5}
    op, function = "add_rms_norm_backward", OPS.add_rms_norm_backward
    if call in CALLS:
        op, function = CALLS[call]
    else:
        arguments = {
            **BACKWARD,
            **dict.fromkeys(("grad_y", "grad_sum", "sum"), tensor),
            "rstd": rstd,
            "weight": None,
            "output_mask": [True, False],
        }
    with torch._C._DisableTorchDispatch(), pytest.raises(NotImplementedError) as raised:
        function(**arguments)
    message = str(raised.value)
    assert message.startswith(f"{op}: ")
    return message.removeprefix(f"{op}: ")


@pytest.mark.parametrize("device", ["xpu", "xla", "privateuseone"])
@pytest.mark.parametrize("call", [*CALLS, "backward"])
def test_an_unsupported_device_raises(call, device):
    name = "sum" if call == "backward" else "x"
    expected = f"{name} must be on a cpu or cuda device, got {device}"
    assert refuse(device, call).startswith(expected)


@pytest.mark.skipif(bool(arn.build_info()["cuda"]), reason="this build has CUDA kernels")
@pytest.mark.parametrize("call", [*CALLS, "backward"])
def test_a_cuda_tensor_in_a_cpu_build_raises(call):
    name = "sum" if call == "backward" else "x"
    message = f"{name} is on cuda, but this automodel-rms-norm was built without CUDA kernels"
    assert refuse("cuda", call).startswith(message)


def test_good_arguments_do_not_raise():
    for _, function in CALLS.values():
        function(**FORWARD)
    OPS.add_rms_norm_backward(**BACKWARD)
