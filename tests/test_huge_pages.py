"""Large outputs of the CPU kernels are asked for as huge pages."""

import os
from collections.abc import Iterator
from pathlib import Path

import automodel_rms_norm as arn
import pytest
import support
import torch

MIB = 1 << 20

pytestmark = [
    pytest.mark.skipif(
        not Path("/sys/kernel/mm/transparent_hugepage").exists(),
        reason="this kernel has no transparent huge pages",
    ),
    pytest.mark.skipif(
        os.environ.get("THP_MEM_ALLOC_ENABLE", "0") != "0",
        reason="torch asks for huge pages itself (THP_MEM_ALLOC_ENABLE)",
    ),
]


def mappings() -> Iterator[tuple[range, list[str]]]:
    """The addresses of each mapping of this process, and its flags."""
    addresses = range(0)
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, _, rest = line.partition(" ")
        if name == "VmFlags:":
            yield addresses, rest.split()
        elif not name.endswith(":"):
            first, last = name.split("-")
            addresses = range(int(first, 16), int(last, 16))


def is_advised(tensor: torch.Tensor, offset: int) -> bool:
    address = tensor.data_ptr() + offset
    return any("hg" in flags for addresses, flags in mappings() if address in addresses)


def test_large_outputs_are_advised() -> None:
    """At 40 MiB malloc maps each tensor anew, so none has the advice of one before it."""
    x = torch.ones(2560, 4096).requires_grad_()
    weight = support.make_inputs(1, 4096).weight
    y, total = arn.add_rms_norm(x, x.detach(), weight, 1e-5)
    (grad_x,) = torch.autograd.grad(arn.rms_norm(x, weight, 1e-5), x, torch.ones_like(x))
    for output in (y, total, grad_x):
        assert is_advised(output, 20 * MIB)
    assert not is_advised(x, 20 * MIB)
