"""Runs checks on several processes of one host, each check in a process group of its own.

The processes are forked from one that has torch imported, so that a world of four costs one import.
"""

import ast
import contextlib
import datetime
import importlib
import multiprocessing
import os
import sys
import tempfile
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

# For parametrize: on the CPU, and on a GPU.
BACKENDS = ["gloo", pytest.param("nccl", marks=pytest.mark.cuda)]
_TIMEOUT = datetime.timedelta(seconds=60)
_PRELOAD = ["automodel_rms_norm", "torch.distributed.tensor.parallel", "torch.distributed.fsdp"]


def mesh_of(*sizes: int, names: tuple[str, ...] | None = None) -> DeviceMesh:
    return init_device_mesh(device().type, sizes, mesh_dim_names=names)


def device() -> torch.device:
    """The rank's: a GPU of its own under NCCL, else the CPU."""
    return torch.device("cuda", dist.get_rank()) if dist.get_backend() == "nccl" else _CPU


_CPU = torch.device("cpu")


def names(module: str) -> list[str]:
    """The checks of a module of this folder: its functions that begin with check_."""
    source = (Path(__file__).parent / f"{module}.py").read_text()
    return [
        node.name
        for node in ast.parse(source).body
        if isinstance(node, ast.FunctionDef) and node.name.startswith("check_")
    ]


@contextlib.contextmanager
def _process_group(backend: str, rank: int, world: int, file: str) -> Iterator[None]:
    dist.init_process_group(
        backend, init_method=f"file://{file}", rank=rank, world_size=world, timeout=_TIMEOUT
    )
    try:
        yield
    finally:
        dist.destroy_process_group()


def _run(
    module: str,
    checks: list[str],
    backend: str,
    rank: int,
    world: int,
    folder: str,
    paths: list[str],
) -> None:
    torch.set_num_threads(1)
    sys.path[:0] = paths
    if backend == "nccl":
        torch.cuda.set_device(rank)
    for name in checks:
        torch.manual_seed(0)
        try:
            with _process_group(backend, rank, world, os.path.join(folder, name)):
                getattr(importlib.import_module(module), name)()
            report = ""
        except Exception:
            report = f"rank {rank} of {world}:\n{traceback.format_exc()}"
        with open(os.path.join(folder, f"{name}.{rank}"), "w") as file:
            file.write(report)


def run(
    module: str,
    checks: list[str],
    world: int,
    backend: str = "gloo",
    paths: Sequence[str | Path] = (),
) -> dict[str, str]:
    """The checks by name with what went wrong in each, "" where nothing did.

    `paths` are where packages are found that this process has not got.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOAD)
    with tempfile.TemporaryDirectory() as folder:
        arguments = (module, checks, backend, world, folder, [str(path) for path in paths])
        processes = [
            context.Process(target=_run, args=(*arguments[:3], rank, *arguments[3:]))
            for rank in range(world)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join()

        def report(name: str, rank: int) -> str:
            try:
                with open(os.path.join(folder, f"{name}.{rank}")) as file:
                    return file.read()
            except FileNotFoundError:
                return f"rank {rank} died, exit code {processes[rank].exitcode}"

        return {name: "".join(report(name, rank) for rank in range(world)) for name in checks}
