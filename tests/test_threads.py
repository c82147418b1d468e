"""Many Python threads at once, on the CPU and on one GPU: the bits of one thread."""

import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import automodel_rms_norm as arn
import support
import torch
from automodel_rms_norm.testing import assert_bitwise_equal

THREADS = 8
CALLS = 12


def test_threads_at_once_get_the_bits_of_one(device: torch.device) -> None:
    """Each with shapes of its own, enough rows for torch's pool, all starting together."""
    cases = [
        support.make_inputs(61 + 40 * number, 512, device=device, seed=number)
        for number in range(THREADS)
    ]
    expected = [support.forward_backward(arn.rms_norm, inputs) for inputs in cases]
    together = threading.Barrier(THREADS)

    def work(number: int) -> list[support.Outputs]:
        together.wait()
        return [support.forward_backward(arn.rms_norm, cases[number]) for _ in range(CALLS)]

    with ThreadPoolExecutor(THREADS) as pool:
        for number, results in enumerate(pool.map(work, range(THREADS))):
            for outputs in results:
                for name in outputs._fields:
                    actual, wanted = getattr(outputs, name), getattr(expected[number], name)
                    assert_bitwise_equal(actual, wanted, f"{name} of thread {number}")


def test_threads_share_a_module_and_its_weight(device: torch.device) -> None:
    module = arn.RMSNorm(512, device=device)
    x = support.make_inputs(64, 512, device=device).x
    with torch.no_grad():
        expected = module(x)

        def work(_: int) -> torch.Tensor:
            with torch.no_grad():  # grad mode belongs to a thread
                return module(x)

        with ThreadPoolExecutor(THREADS) as pool:
            for y in pool.map(work, range(THREADS * CALLS)):
                assert_bitwise_equal(y, expected, "y")


def test_the_first_call_may_come_from_many_threads() -> None:
    """What is found on first use (the op's handle, the instruction set) is found once, safely."""
    program = """
import threading, torch, automodel_rms_norm as arn
x = torch.ones(4, 96)
start = threading.Barrier(8)
failures = []
def work():
    start.wait()
    leaf = x.clone().requires_grad_()
    y = arn.rms_norm(leaf, None, 0.0)
    y.sum().backward()
    if not torch.equal(y.detach(), x): failures.append(y)
threads = [threading.Thread(target=work) for _ in range(8)]
for thread in threads: thread.start()
for thread in threads: thread.join()
raise SystemExit(len(failures))
"""
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0


def test_backward_in_another_thread(device: torch.device) -> None:
    inputs = support.make_inputs(64, 512, device=device)
    expected = support.forward_backward(arn.rms_norm, inputs)
    x, weight = inputs.x.clone().requires_grad_(), torch.nn.Parameter(inputs.weight)
    y = arn.rms_norm(x, weight, 1e-5)
    thread = threading.Thread(target=lambda: y.backward(inputs.grad_y))
    thread.start()
    thread.join()
    assert_bitwise_equal(x.grad, expected.grad_x, "grad_x")
    assert_bitwise_equal(weight.grad, expected.grad_weight, "grad_weight")
