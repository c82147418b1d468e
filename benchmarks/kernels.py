"""Bandwidth of the CUDA kernels against a device-to-device copy timed in the same run.

Forward counts x read and y written; backward counts grad_y and x read and grad_x written, with the
time of grad_weight included. Every call works on another set of tensors, so that the L2 cache holds
none of them.
"""

import argparse
import json
import statistics
from collections.abc import Callable

import automodel_rms_norm as arn
import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

HIDDEN = [128, 256, 512, 1024, 2048, 2688, 3072, 4096, 5120, 6144, 7168, 8192, 12288, 16384]
HIDDEN += [32768, 65536]
EPS = 1e-5


def microseconds(calls: list[Callable[[], object]], repeats: int) -> float:
    """The median over `repeats` of the device time of one call, in us; calls are taken in turn."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    times = []
    for repeat in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        calls[repeat % len(calls)]()
        end.record()
        times.append((begin, end))
    torch.cuda.synchronize()
    return statistics.median(begin.elapsed_time(end) for begin, end in times) * 1e3


def measure(hidden: int, size: int, dtype: torch.dtype, repeats: int) -> list[dict[str, object]]:
    rows = size // (hidden * dtype.itemsize)
    sets = []
    for seed in range(3):
        torch.manual_seed(seed)
        x, grad_y = (torch.randn(rows, hidden, device="cuda", dtype=dtype) for _ in range(2))
        weight = (1 + 0.3 * torch.randn(hidden, device="cuda")).to(dtype)
        rstd = torch.ops.automodel.rms_norm_forward(x, weight, EPS, False)[1]
        sets.append((x, grad_y, weight, rstd, torch.empty_like(x)))

    backward = torch.ops.automodel.rms_norm_backward
    cases: dict[str, tuple[int, list[Callable[[], object]]]] = {
        "copy": (2, [lambda s=s: s[4].copy_(s[0]) for s in sets]),
        "forward": (2, [lambda s=s: arn.rms_norm(s[0], s[2], EPS) for s in sets]),
        "backward": (
            3,
            [lambda s=s: backward(s[1], *s[0:3:2], s[3], False, [True, True]) for s in sets],
        ),
        "backward_frozen": (
            3,
            [lambda s=s: backward(s[1], *s[0:3:2], s[3], False, [True, False]) for s in sets],
        ),
    }
    tensor_bytes = rows * hidden * dtype.itemsize
    gbps = {}
    records: list[dict[str, object]] = []
    for what, (tensors, calls) in cases.items():
        us = microseconds(calls, repeats)
        gbps[what] = tensors * tensor_bytes / us / 1e3
        records.append(
            {
                "what": what,
                "impl": "copy" if what == "copy" else "op",
                "rows": rows,
                "hidden": hidden,
                "x_dtype": str(dtype).removeprefix("torch."),
                "weight_dtype": str(dtype).removeprefix("torch."),
                "us": us,
                "gbps": gbps[what],
                "copy_gbps": gbps["copy"],
            }
        )
    return records


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hidden", type=int, nargs="*", default=HIDDEN)
    parser.add_argument("--mib", type=int, default=256, help="MiB of x")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--json", help="write the records to this file")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("kernels.py measures a GPU, and there is none")

    records = []
    for hidden in track(arguments.hidden, "measuring"):
        dtype = getattr(torch, arguments.dtype)
        records += measure(hidden, arguments.mib << 20, dtype, arguments.repeats)
    table = Table(title=f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    for column in ("what", "rows", "hidden", "us", "GB/s", "of the copy"):
        table.add_column(column, justify="left" if column == "what" else "right")
    for r in records:
        share = r["gbps"] / r["copy_gbps"]
        table.add_row(
            r["what"],
            str(r["rows"]),
            str(r["hidden"]),
            f"{r['us']:.1f}",
            f"{r['gbps']:.0f}",
            f"{share:.3f}",
        )
    Console(width=100).print(table)
    if arguments.json:
        environment = {"gpu": torch.cuda.get_device_name()} | arn.build_info()
        del environment["library"]  # a path of this machine
        with open(arguments.json, "w") as file:
            json.dump({"environment": environment, "records": records}, file, indent=1)


if __name__ == "__main__":
    main()
