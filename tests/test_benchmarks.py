"""The benchmark programs run, what they write is what report.py reads, and its document is of the
committed results."""

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import automodel_rms_norm as arn
import baselines
import pytest
import support
import torch

ROOT = Path(__file__).parents[1]
BENCHMARKS = ROOT / "benchmarks"
TINY = {
    "kernels": "--hidden 128 4096 --mib 0.1 --variants bf16 bf16-none bf16-zero",
    "small": "--rows 1 8 --hidden 128 --copy-bytes 4096",
    "block": "--rows 8 --hidden 128",
    "growth": "--most-elements 2048 --hidden 128 --rows 4",
    "host": "--batch 2",
    "cpu": "--shapes 8x128 16x256 --threads 1 2",
    "training": "--steps 1 --modes norms_only_micro_batches",
}


@pytest.fixture(autouse=True)
def programs(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The programs can be imported, and torch's settings are as before."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    dynamo, functorch = torch._dynamo.config, torch._functorch.config
    limits = ("recompile_limit", "accumulated_recompile_limit")
    with (
        dynamo.patch({name: getattr(dynamo, name) for name in limits}),
        functorch.patch(donated_buffer=functorch.donated_buffer),
    ):
        yield
    torch._dynamo.reset()


def run(program: str, device: torch.device, folder: Path, *more: str) -> list[dict]:
    """The records of a tiny run, which also wrote JSON and a plot."""
    arguments = [*TINY[program].split(), "--device", str(device), "--repeats", "2", "--quiet"]
    files = ["--json", str(folder / "run.json"), "--plot", str(folder / "run.svg")]
    return importlib.import_module(program).PROGRAM.main([*arguments, *files, *more])


@pytest.mark.parametrize("program", TINY)
def test_a_program_measures_and_writes_what_the_report_reads(
    program: str, device: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if program == "cpu" and device.type == "cuda":
        pytest.skip("cpu.py measures no GPU")
    expected = ["op", "torch", "automodel_0_6"]
    if device.type == "cpu":
        # Inductor would compile C++ for minutes.
        monkeypatch.setattr(torch, "compile", lambda function, **_options: function)
        records = run(program, device, tmp_path)
    else:
        records = run(program, device, tmp_path, "--impls", *expected)
    measured = {r["impl"] for r in records if r["us"] is not None}
    assert measured >= set(expected[:1] if program == "growth" else expected)
    assert all(r["why"] for r in records if r["us"] is None)
    written = json.loads((tmp_path / "run.json").read_text())
    assert written["records"] == records
    assert str(ROOT) not in (tmp_path / "run.json").read_text()
    assert (tmp_path / "run.svg").stat().st_size > 1000

    report = importlib.import_module("report")
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    for table in importlib.import_module(program).PROGRAM.tables(records):
        if table.rows:
            text = report.document(f"a\n<!-- run {table.name} -->\nold\n<!-- end -->\nb")
            assert text.startswith(f"a\n<!-- run {table.name} -->\n|")
            assert text.endswith("|\n<!-- end -->\nb")
            assert report.document(text) == text


def test_records_of_a_second_run_replace_those_of_the_same_case(tmp_path: Path) -> None:
    first = run("kernels", torch.device("cpu"), tmp_path, "--impls", "op")
    second = run("kernels", torch.device("cpu"), tmp_path, "--impls", "op", "--what", "forward")
    written = json.loads((tmp_path / "run.json").read_text())["records"]
    assert len(written) == len(first) > len(second)
    assert all(record in written for record in second)


def test_a_peer_that_is_not_here_is_a_record_that_says_why(tmp_path: Path) -> None:
    records = run("kernels", torch.device("cpu"), tmp_path, "--impls", "op", "liger", "quack")
    for name in ("liger", "quack"):
        reasons = {r["why"] for r in records if r["impl"] == name}
        assert reasons == {"needs a GPU"}


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_a_program_for_gpus_says_that_there_is_none() -> None:
    done = subprocess.run(
        [sys.executable, BENCHMARKS / "kernels.py"],
        capture_output=True,
        text=True,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
    )
    assert done.returncode == 77  # what `make bench` goes on after
    assert done.stderr == "kernels measures a GPU, and there is none\n"


def test_the_document_is_of_the_committed_results() -> None:
    importlib.import_module("report").main(["--check"])


# --- What is compared computes the same -----------------------------------------------------------


@pytest.mark.parametrize("name", list(baselines.baselines(torch.device("cpu"))))
def test_baselines_compute_the_norm(name: str, device: torch.device) -> None:
    """To rounding: they are timed against the op, so they must do its work."""
    norm, add_norm, why = baselines.baselines(device)[name]
    if device.type == "cpu":
        norm = baselines.traceable().get(name, norm)  # not compiled, which takes long there
        add_norm = baselines.after_add(norm)
    if why or name == "liger_in_place":
        pytest.skip(why or "writes over grad_y")
    if device.type == "cpu" and name == "automodel_0_6_static":
        pytest.skip("compiled alone")
    inputs = support.make_inputs(64, 1024, device=device)
    actual = support.forward_backward(norm, inputs)
    expected = support.forward_backward(arn.rms_norm, inputs)
    for ours, theirs in zip(expected, actual, strict=True):
        torch.testing.assert_close(theirs, ours, rtol=0.02, atol=0.02)
    y, total = add_norm(inputs.x, inputs.grad_y, inputs.weight, 1e-5)
    assert torch.equal(total, inputs.x + inputs.grad_y)
    torch.testing.assert_close(y, arn.rms_norm(total, inputs.weight, 1e-5), rtol=0.02, atol=0.02)
