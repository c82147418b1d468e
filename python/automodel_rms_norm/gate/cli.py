"""``numerics-gate``: runs the properties of the contract here and says what came of it."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from typing import IO, NoReturn

import torch
from rich.console import Console

import automodel_rms_norm as arn
from automodel_rms_norm.gate.cases import DTYPES
from automodel_rms_norm.gate.check import Selection, check, why_no_gpu
from automodel_rms_norm.gate.environment import environment
from automodel_rms_norm.gate.properties import PROPERTIES
from automodel_rms_norm.gate.targets import BUILT_IN, TargetError, load

__all__ = ["main"]


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        sys.exit(_complaint(f"{message}; see {self.prog} --help"))


def _complaint(sentence: str) -> int:
    print(f"numerics-gate: {sentence}", file=sys.stderr)
    return 2


def _keys(text: str) -> tuple[str, ...]:
    known = [property.key for property in PROPERTIES]
    chosen = [key.strip().upper() for key in text.split(",")]
    for key in chosen:
        if key not in known:
            raise argparse.ArgumentTypeError(
                f"there is no property {key!r}; choose from {', '.join(known)}"
            )
    return tuple(key for key in known if key in chosen)


def _dtypes(text: str) -> tuple[torch.dtype, ...]:
    chosen = [name.strip() for name in text.split(",")]
    for name in chosen:
        if name not in DTYPES:
            raise argparse.ArgumentTypeError(
                f"there is no dtype {name!r}; choose from {', '.join(DTYPES)}"
            )
    return tuple(DTYPES[name] for name in chosen)


def _counts(text: str) -> tuple[int, ...]:
    if not all(part.strip().isdecimal() and int(part) > 0 for part in text.split(",")):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of positive numbers")
    return tuple(int(part) for part in text.split(","))


def _count(text: str) -> int:
    counts = _counts(text)
    if len(counts) != 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number")
    return counts[0]


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="numerics-gate", description=__doc__)
    parser.add_argument("--version", action="version", version=f"%(prog)s {arn.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, parser_class=_Parser)
    commands.add_parser(
        "info",
        help="versions of everything that can move a bit",
        description="Prints versions, hardware and how this package was built.",
    )
    command = commands.add_parser(
        "check",
        help="does a norm keep the properties of the contract on this machine?",
        description="Checks every property of the numerics contract. Exits with 0 if all hold, 1 "
        "if one does not, 2 for a wrong argument or a target that cannot be loaded.",
    )
    command.add_argument(
        "target",
        nargs="?",
        default="op",
        help=f"{', '.join(BUILT_IN)}, or module:attribute, which names a function of (x, weight, "
        "eps), a subclass of torch.nn.Module with (hidden, eps=) or of torch.autograd.Function; "
        "default: this package's op",
    )
    command.add_argument(
        "--device",
        choices=("auto", "cpu", "cuda"),
        default="auto",
        help="auto is the CPU and, if there is one, the GPU",
    )
    command.add_argument(
        "--property", type=_keys, default=(), metavar="P1,P3", help="check these alone"
    )
    command.add_argument(
        "--expect",
        type=_keys,
        default=(),
        metavar="P1,P3",
        help="only these must hold; the others are checked and shown",
    )
    command.add_argument("--quick", action="store_true", help="fewer widths and dtypes")
    command.add_argument("--dtype", type=_dtypes, default=(), metavar=",".join(DTYPES), help="of x")
    command.add_argument("--widths", type=_counts, default=(), metavar="N,N")
    command.add_argument("--rows", type=_count, metavar="M")
    command.add_argument("--json", metavar="FILE", help="also write every outcome to FILE")
    command.add_argument("--markdown", metavar="FILE", help="also write the report to FILE")
    return parser


def _open(path: str | None) -> IO[str] | None:
    """Opened before the checks run, so that a wrong path costs nothing."""
    return None if path is None else open(path, "w", encoding="utf-8")


def _check(options: argparse.Namespace) -> int:
    if options.device == "cuda" and (reason := why_no_gpu()):
        return _complaint(f"--device cuda: {reason}")
    if "" not in sys.path:
        sys.path.insert(0, "")  # a target may be a file of the current folder
    try:
        target = load(options.target)
    except TargetError as error:
        return _complaint(str(error))
    outputs: dict[str, IO[str] | None] = {}
    for name in ("json", "markdown"):
        path = getattr(options, name)
        try:
            outputs[name] = _open(path)
        except OSError as error:
            return _complaint(f"--{name} {path}: {error.strerror}")
    report = check(
        target,
        [p for p in PROPERTIES if p.key in options.property or not options.property],
        options.device,
        Selection(options.quick, options.dtype, options.widths, options.rows),
        Console(stderr=True),
        options.expect,
    )
    report.print(Console())
    if json_file := outputs["json"]:
        with json_file:
            json.dump(report.as_json(), json_file, indent=1)
            json_file.write("\n")
    if markdown_file := outputs["markdown"]:
        with markdown_file:
            markdown_file.write(report.as_markdown())
    return 0 if report.holds else 1


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns its exit status: 0, 1, or 2 for a wrong argument."""
    options = _parser().parse_args(arguments)
    if options.command == "info":
        for name, value in environment().items():
            print(f"{name:20}{value}")
        return 0
    return _check(options)
