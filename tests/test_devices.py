"""The op runs where its tensors are, whatever device is current; other devices are an error."""

import automodel_rms_norm as arn
import pytest
import support
import torch
from test_errors import CALLS


class OnAnotherDevice(torch.Tensor):
    """A tensor without memory whose dispatch key is that of its device."""

    @staticmethod
    def __new__(cls, device: str) -> "OnAnotherDevice":
        make = torch.Tensor._make_wrapper_subclass
        return make(cls, (4, 8), dtype=torch.float32, device=device)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise AssertionError(f"{func} reached Python")


def assert_refused(call: str, device: str, message: str) -> None:
    op, function = CALLS[call]
    x = OnAnotherDevice(device)
    with torch._C._DisableTorchDispatch():
        support.assert_raises(
            NotImplementedError, f"{op}: {message}", lambda: function(x, None, 1e-5)
        )


@pytest.mark.parametrize("device", ["xpu", "xla", "privateuseone"])
@pytest.mark.parametrize("call", CALLS)
def test_an_unsupported_device_raises(call, device):
    assert_refused(call, device, f"x must be on a cpu or cuda device, got {device}")


@pytest.mark.skipif(bool(arn.build_info()["cuda"]), reason="this build has CUDA kernels")
@pytest.mark.parametrize("call", CALLS)
def test_a_cuda_tensor_in_a_cpu_build_raises(call):
    message = "x is on cuda, but this automodel-rms-norm was built without CUDA kernels; install"
    assert_refused(call, "cuda", message)


@pytest.mark.case("Liger-1303")
@pytest.mark.parametrize(
    "other",
    [
        pytest.param("cpu", marks=pytest.mark.cuda),
        pytest.param("cuda:1", marks=pytest.mark.multi_gpu),
    ],
)
def test_tensors_on_two_devices_raise(other):
    good = support.make_inputs(4, 8, device="cuda:0")
    rstd = support.run_op(good).rstd
    message = f"weight must be on the device of x, cuda:0, got {other}"
    with pytest.raises(RuntimeError, match=message):
        arn.rms_norm(good.x, good.weight.to(other), 1e-5)
    message = f"weight must be on the device of x, {other}, got cuda:0"
    with pytest.raises(RuntimeError, match=message):
        arn.rms_norm(good.x.to(other), good.weight, 1e-5)
    for name, grad_y, bad_rstd in (
        ("grad_y", good.grad_y.to(other), rstd),
        ("rstd", good.grad_y, rstd.to(other)),
    ):
        message = f"{name} must be on the device of x, cuda:0, got {other}"
        with pytest.raises(RuntimeError, match=message):
            torch.ops.automodel.rms_norm_backward(
                grad_y, good.x, good.weight, bad_rstd, False, [True, True]
            )


@pytest.mark.case("apex-1022", "Liger-1303")
@pytest.mark.multi_gpu
@pytest.mark.parametrize("zero_centered", [False, True], ids=["plain", "zero_centered"])
def test_the_op_runs_on_the_device_of_x(zero_centered):
    with torch.cuda.device(0):
        inputs = support.make_inputs(300, 1000, zero_centered_gamma=zero_centered, device="cuda:1")
        results = support.run_op(inputs, 1e-5, zero_centered)
        outputs = support.forward_backward(arn.rms_norm, inputs, 1e-5, zero_centered)
        assert torch.cuda.current_device() == 0
    expected = support.run_reference(inputs, 1e-5, zero_centered)
    support.assert_same(results, expected)
    support.assert_same(outputs, support.Outputs(expected.y, *expected[2:]))
    assert {tensor.device.index for tensor in (*results, *outputs)} == {1}
