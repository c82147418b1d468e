"""What the commands share: types of arguments, and the error that becomes one line."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

import torch

from automodel_rms_norm.gate import plot
from automodel_rms_norm.gate.checks import load_target, why_no_gpu
from automodel_rms_norm.gate.plan import Property
from automodel_rms_norm.gate.properties import PROPERTIES, chosen
from automodel_rms_norm.gate.recipe import DTYPES, Selection
from automodel_rms_norm.gate.report import Report
from automodel_rms_norm.gate.targets import BUILT_IN

__all__ = [
    "UsageError",
    "add_experiment",
    "add_selection",
    "add_target",
    "check_expected",
    "check_output",
    "keys",
    "load_target",
    "one_device",
    "properties",
    "selection",
    "write_outputs",
    "write_report",
]


class UsageError(Exception):
    """A wrong argument, found after parsing; the message says what to do. Exit status 2."""


def keys(text: str) -> tuple[str, ...]:
    try:
        return chosen(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def dtypes(text: str) -> tuple[torch.dtype, ...]:
    chosen = [name.strip() for name in text.split(",")]
    for name in chosen:
        if name not in DTYPES:
            raise argparse.ArgumentTypeError(
                f"there is no dtype {name!r}; choose from {', '.join(DTYPES)}"
            )
    return tuple(DTYPES[name] for name in chosen)


def _is_count(text: str) -> bool:
    return text.strip().isdecimal() and int(text) > 0


def counts(text: str) -> tuple[int, ...]:
    if not all(map(_is_count, text.split(","))):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of positive numbers")
    return tuple(int(part) for part in text.split(","))


def count(text: str) -> int:
    if not _is_count(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number")
    return int(text)


def seconds(text: str) -> float:
    try:
        if (value := float(text)) >= 0:
            return value
    except ValueError:
        pass
    raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds")


def add_target(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "target",
        nargs="?",
        default="op",
        help=f"{', '.join(BUILT_IN)}, or module:attribute, which names a function of (x, weight, "
        "eps), a subclass of torch.nn.Module with (hidden, eps=) or of torch.autograd.Function, or "
        "a Recipe; default: this package's op",
    )


def add_experiment(parser: argparse.ArgumentParser) -> None:
    """The options of `one_device`, and ``--runs``."""
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), help="default: the GPU if there is one"
    )
    parser.add_argument(
        "--runs",
        type=count,
        default=3,
        metavar="N",
        help="how often to compile with the autotuner free, where it tunes; default: 3",
    )


def one_device(options: argparse.Namespace) -> str:
    """The asked device, or else the GPU if there is one.

    Raises:
        UsageError: for a GPU that is not there.
    """
    reason = why_no_gpu()
    if options.device == "cuda" and reason:
        raise UsageError(f"--device cuda: {reason}")
    device: str = options.device or ("cpu" if reason else "cuda")
    return device


def add_selection(
    parser: argparse.ArgumentParser, limited: str = "case", limit: float = 300.0
) -> None:
    """The options of `selection`, and ``--timeout`` for each of what is `limited`."""
    parser.add_argument(
        "--device",
        choices=("auto", "cpu", "cuda"),
        default="auto",
        help="auto is the CPU and, if there is one, the GPU",
    )
    parser.add_argument(
        "--property", type=keys, default=(), metavar="P1,P3", help="check these alone"
    )
    parser.add_argument("--quick", action="store_true", help="fewer widths, dtypes and run modes")
    parser.add_argument("--dtype", type=dtypes, default=(), metavar=",".join(DTYPES), help="of x")
    parser.add_argument("--widths", type=counts, default=(), metavar="N,N")
    parser.add_argument("--rows", type=count, metavar="M")
    parser.add_argument(
        "--timeout",
        type=seconds,
        default=limit,
        metavar="SECONDS",
        help=f"for each {limited}, in a process of its own (default {limit:g}); 0: no limit",
    )


def selection(options: argparse.Namespace) -> Selection:
    """Of the options of `add_selection`.

    Raises:
        UsageError: for a GPU that is not there.
    """
    if options.device == "cuda":
        one_device(options)
    return Selection(options.quick, options.dtype, options.widths, options.rows)


def properties(options: argparse.Namespace) -> list[Property]:
    return [p for p in PROPERTIES if p.key in options.property or not options.property]


def check_expected(expected: Sequence[str], asked: Sequence[str]) -> None:
    """That what must hold is checked at all.

    Raises:
        UsageError: for a property that is not among those asked.
    """
    if left_out := [key for key in expected if key not in asked]:
        raise UsageError(
            f"--expect {left_out[0]}: it is not checked; what is: {', '.join(asked) or 'nothing'}"
        )


def write_report(options: argparse.Namespace, values: object, markdown: str) -> None:
    """To the files of ``--json`` and ``--markdown`` that `check_output` has found writable."""
    if options.json:
        Path(options.json).write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")
    if options.markdown:
        Path(options.markdown).write_text(markdown, encoding="utf-8")


def write_outputs(report: Report, options: argparse.Namespace) -> None:
    """The same, and ``--plot``."""
    write_report(options, report.as_json(), report.as_markdown())
    if options.plot:
        plot.write(report, options.plot)


def check_output(option: str, path: str | Path | None) -> None:
    """Before anything runs, so that a wrong path costs nothing.

    Raises:
        UsageError: if it cannot be written.
    """
    if path is None:
        return
    if option == "--plot" and (reason := plot.why_not(str(path))):
        raise UsageError(f"--plot {path}: {reason}")
    output = Path(path)
    new = not output.exists()
    try:
        output.open("a", encoding="utf-8").close()
        if new:  # a run that comes to nothing leaves nothing
            output.unlink()
    except OSError as error:
        raise UsageError(f"{option} {path}: {error.strerror}") from error
