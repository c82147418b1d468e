"""The op and the CUDA runtime: graphs, streams, devices, memory, synchronisation."""

import contextlib
import threading
import warnings
from collections.abc import Callable, Iterator

import automodel_rms_norm as arn
import pytest
import support
import torch
from automodel_rms_norm.testing import assert_bitwise_equal
from torch import Tensor, nn

EPS = 1e-5
OPS = torch.ops.automodel

pytestmark = pytest.mark.cuda


def delay() -> None:
    """Keeps the current stream busy for some tenths of a second: a race with it is a lost one."""
    torch.cuda._sleep(400_000_000)


# --- CUDA graphs ----------------------------------------------------------------------------------


@pytest.mark.case("Sparse-vLLM-12")
@pytest.mark.parametrize("hidden", [128, 4096, 16384])
@pytest.mark.parametrize("dtype", support.X_DTYPES, ids=str)
def test_a_replayed_graph_has_the_bits_of_eager(dtype: torch.dtype, hidden: int) -> None:
    """Forward and backward, replayed over new contents of the same tensors."""
    first = support.make_inputs(33, hidden, dtype=dtype, device="cuda")
    x, weight = first.x.clone().requires_grad_(), nn.Parameter(first.weight.clone())
    grad_y = first.grad_y.clone()

    def step() -> tuple[Tensor, ...]:
        y = arn.rms_norm(x, weight, EPS)
        return (y, *torch.autograd.grad(y, (x, weight), grad_y))

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = step()

    for seed in range(3):
        inputs = support.make_inputs(33, hidden, dtype=dtype, device="cuda", seed=seed)
        with torch.no_grad():
            for static, new in zip((x, weight, grad_y), inputs, strict=True):
                static.copy_(new)
        graph.replay()
        replayed = support.Outputs(*(tensor.detach().clone() for tensor in outputs))
        support.assert_same(replayed, support.forward_backward(arn.rms_norm, inputs))


def test_the_first_call_of_a_shape_may_be_captured() -> None:
    """Nothing is allocated, queried or tuned on first use in a way that a capture forbids."""
    x = support.make_inputs(17, 5120, device="cuda").x
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="global"):
        y = arn.rms_norm(x, None, EPS)
    graph.replay()
    assert_bitwise_equal(y, arn.rms_norm(x, None, EPS), "y")


def test_make_graphed_callables_trains_with_the_bits_of_eager() -> None:
    inputs = support.make_inputs(33, 1024, device="cuda")
    module = arn.RMSNorm(1024, device="cuda")
    with torch.no_grad():
        module.weight.copy_(inputs.weight)
    expected = support.forward_backward(arn.rms_norm, inputs)
    graphed = torch.cuda.make_graphed_callables(module, (inputs.x.clone().requires_grad_(),))
    x = inputs.x.clone().requires_grad_()
    module.weight.grad = None
    y = graphed(x)
    y.backward(inputs.grad_y)
    assert_bitwise_equal(y.detach(), expected.y, "y")
    assert_bitwise_equal(x.grad, expected.grad_x, "grad_x")
    assert_bitwise_equal(module.weight.grad, expected.grad_weight, "grad_weight")


# --- Streams --------------------------------------------------------------------------------------


@pytest.mark.case("pytorch-157363")
def test_work_goes_to_the_current_stream() -> None:
    """Inputs are written by a side stream after a long kernel: another stream would read zeros."""
    inputs = support.make_inputs(64, 4096, device="cuda")
    expected = support.forward_backward(arn.rms_norm, inputs)
    late = support.Inputs(*(torch.zeros_like(tensor) for tensor in inputs))
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        delay()
        for tensor, value in zip(late, inputs, strict=True):
            tensor.copy_(value)
        actual = support.forward_backward(arn.rms_norm, late)
    side.synchronize()
    support.assert_same(actual, expected)


def test_backward_runs_on_the_stream_of_forward() -> None:
    inputs = support.make_inputs(64, 4096, device="cuda")
    expected = support.forward_backward(arn.rms_norm, inputs)
    x, weight = inputs.x.clone().requires_grad_(), nn.Parameter(inputs.weight)
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        delay()
        y = arn.rms_norm(x, weight, EPS)
    torch.cuda.current_stream().wait_stream(side)
    y.backward(inputs.grad_y)
    torch.cuda.synchronize()
    assert_bitwise_equal(x.grad, expected.grad_x, "grad_x")
    assert_bitwise_equal(weight.grad, expected.grad_weight, "grad_weight")


def test_streams_and_threads_at_once() -> None:
    """Each thread has a stream, and partial sums that another's must not overwrite."""
    threads = 6
    cases = [
        support.make_inputs(257 + 64 * number, 2048, device="cuda", seed=number)
        for number in range(threads)
    ]
    expected = [support.forward_backward(arn.rms_norm, inputs) for inputs in cases]
    torch.cuda.synchronize()
    results: dict[int, list[support.Outputs]] = {number: [] for number in range(threads)}

    def work(number: int) -> None:
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            for _ in range(20):
                results[number].append(support.forward_backward(arn.rms_norm, cases[number]))
        stream.synchronize()

    workers = [threading.Thread(target=work, args=(number,)) for number in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    for number, outputs in results.items():
        assert len(outputs) == 20
        for one in outputs:
            support.assert_same(one, expected[number])


@pytest.mark.multi_gpu
def test_another_devices_side_stream_is_respected() -> None:
    inputs = support.make_inputs(33, 4096, device="cuda:1")
    expected = arn.rms_norm(inputs.x, inputs.weight, EPS)
    torch.cuda.synchronize(1)
    stream = torch.cuda.Stream(1)
    with torch.cuda.device(1), torch.cuda.stream(stream), torch.cuda.device(0):
        y = arn.rms_norm(inputs.x, inputs.weight, EPS)
        assert torch.cuda.current_device() == 0
    torch.cuda.synchronize(1)
    assert_bitwise_equal(y, expected, "y")


# --- Memory and synchronisation -------------------------------------------------------------------


def peak_bytes(run: Callable[[], object]) -> int:
    """Bytes asked of the allocator at the peak of run(), above what there was before."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_stats()["requested_bytes.all.current"]
    run()
    torch.cuda.synchronize()
    return torch.cuda.memory_stats()["requested_bytes.all.peak"] - before


def test_forward_allocates_y_and_rstd_alone() -> None:
    x, weight, _ = support.make_inputs(1024, 4096, device="cuda")
    y_bytes = x.numel() * x.element_size()
    with torch.no_grad():
        assert peak_bytes(lambda: arn.rms_norm(x, weight, EPS)) <= y_bytes
    rstd_bytes = 1024 * 4
    leaf = x.clone().requires_grad_()
    assert peak_bytes(lambda: arn.rms_norm(leaf, weight, EPS)) <= y_bytes + rstd_bytes


@pytest.mark.case("Liger-1067")
def test_a_frozen_weight_has_no_gradient_and_no_partial_sums() -> None:
    x, weight, grad_y = support.make_inputs(1024, 4096, device="cuda")
    _, rstd = OPS.rms_norm_forward(x, weight, EPS, False)
    x_bytes = x.numel() * x.element_size()

    def backward(*mask: bool) -> int:
        return peak_bytes(lambda: OPS.rms_norm_backward(grad_y, x, weight, rstd, False, mask))

    assert backward(True, False) <= x_bytes
    assert backward(True, True) >= x_bytes + weight.numel() * weight.element_size()
    assert backward(False, True) < x_bytes


def test_strided_rows_are_read_in_place() -> None:
    wide, weight, _ = support.make_inputs(1024, 3 * 2048, device="cuda")
    x = wide[:, 2048:4096]
    with torch.no_grad():
        peak = peak_bytes(lambda: arn.rms_norm(x, weight[:2048], EPS))
    assert peak <= x.numel() * x.element_size()


@contextlib.contextmanager
def sync_is_an_error() -> Iterator[None]:
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


@pytest.mark.parametrize("rows", [0, 1, 4096])
def test_the_host_never_waits_for_the_device(rows: int) -> None:
    """Nor do the kernels' launches: both passes return while the stream is still held up."""
    inputs = support.make_inputs(rows, 1024, device="cuda")
    support.forward_backward(arn.rms_norm, inputs)
    torch.cuda.synchronize()
    with sync_is_an_error():
        delay()
        held_up = torch.cuda.Event()
        held_up.record()
        support.forward_backward(arn.rms_norm, inputs)
        assert not held_up.query()
    torch.cuda.synchronize()


@pytest.mark.case("flash-attention-1620")
def test_no_error_is_left_for_the_next_call() -> None:
    """After empty batches, which launch nothing, the next CUDA call is fine."""
    for shape in ((3, 0, 2520), (0, 7168)):
        inputs = support.make_inputs(*shape, device="cuda")
        outputs = support.forward_backward(arn.rms_norm, inputs)
        assert torch.count_nonzero(outputs.grad_weight) == 0
        torch.cuda.synchronize()
        assert torch.ones(3, device="cuda").sum().item() == 3


def test_repeated_passes_have_the_same_bits_with_other_work_running() -> None:
    inputs = support.make_inputs(4096, 1024, device="cuda")
    expected = support.forward_backward(arn.rms_norm, inputs)
    noise = torch.randn(2048, 2048, device="cuda")
    side = torch.cuda.Stream()
    for _ in range(30):
        with torch.cuda.stream(side):
            noise @ noise
        support.assert_same(support.forward_backward(arn.rms_norm, inputs), expected)


def test_deterministic_mode_has_neither_error_nor_warning() -> None:
    """With more rows than blocks; compiled in test_compile.py."""
    inputs = support.make_inputs(4096, 1024, device="cuda")
    expected = support.forward_backward(arn.rms_norm, inputs)
    torch.use_deterministic_algorithms(True)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            actual = support.forward_backward(arn.rms_norm, inputs)
    finally:
        torch.use_deterministic_algorithms(False)
    support.assert_same(actual, expected)
