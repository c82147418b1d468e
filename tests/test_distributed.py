"""The ops under DTensor, tensor parallel plans, FSDP2, HSDP and context parallelism.

What is checked is in the modules named here; it is run on two and on four processes.
"""

import functools

import pytest
import ranks
import support

MODULES = ["sharding_checks", "parallel_checks", "exact_checks"]
CHECKS = [(module, name) for module in MODULES for name in ranks.names(module)]
# Four processes on two cores take a minute for the models.
RUNS = [
    pytest.param(
        world, *check, marks=[pytest.mark.long] if (world, check[0]) == (4, MODULES[1]) else []
    )
    for world in (2, 4)
    for check in CHECKS
]
OF_SEVERAL_PROCESSES = [
    "check_rows_keep_their_bits_on_a_mesh_of_two_dimensions",
    "check_strided_shards_of_rows",
    "check_hybrid_sharding",
    "check_sharded_weights_and_unequal_ranks_are_refused",
]


@functools.cache
def reports(module: str, world: int, backend: str) -> dict[str, str]:
    return ranks.run(module, ranks.names(module), world, backend)


@pytest.mark.parametrize(("world", "module", "name"), RUNS)
def test_on_gloo(world: int, module: str, name: str) -> None:
    report = reports(module, world, "gloo")[name]
    assert not report, report


@pytest.mark.multi_gpu
@pytest.mark.parametrize(("world", "module", "name"), RUNS)
def test_on_nccl(world: int, module: str, name: str) -> None:
    if reason := support.why_not_gpus(world):
        pytest.skip(reason)
    report = reports(module, world, "nccl")[name]
    assert not report, report


@pytest.mark.cuda
@pytest.mark.parametrize(
    ("module", "name"), [c for c in CHECKS if c[1] not in OF_SEVERAL_PROCESSES]
)
def test_on_nccl_with_one_gpu(module: str, name: str) -> None:
    report = reports(module, 1, "nccl")[name]
    assert not report, report
