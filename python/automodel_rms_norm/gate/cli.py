"""``numerics-gate``: runs the properties of the contract here and says what came of it."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from typing import IO, NoReturn

from rich.console import Console

import automodel_rms_norm as arn
from automodel_rms_norm.gate.check import check, why_no_gpu
from automodel_rms_norm.gate.plan import OP, Property
from automodel_rms_norm.gate.properties import PROPERTIES

__all__ = ["main"]


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        sys.exit(_complaint(f"{message}; see {self.prog} --help"))


def _complaint(sentence: str) -> int:
    print(f"numerics-gate: {sentence}", file=sys.stderr)
    return 2


def _properties(text: str) -> tuple[Property, ...]:
    known = [property.key for property in PROPERTIES]
    chosen = [key.strip().upper() for key in text.split(",")]
    for key in chosen:
        if key not in known:
            raise argparse.ArgumentTypeError(
                f"there is no property {key!r}; choose from {', '.join(known)}"
            )
    return tuple(property for property in PROPERTIES if property.key in chosen)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="numerics-gate", description=__doc__)
    parser.add_argument("--version", action="version", version=f"%(prog)s {arn.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, parser_class=_Parser)
    command = commands.add_parser(
        "check",
        help="does the installed op keep its contract on this machine?",
        description="Checks every property of the numerics contract. Exits with 0 if all hold, 1 "
        "if one does not, 2 for a wrong argument.",
    )
    command.add_argument(
        "--device",
        choices=("auto", "cpu", "cuda"),
        default="auto",
        help="auto is the CPU and, if there is one, the GPU",
    )
    command.add_argument(
        "--property",
        type=_properties,
        default=PROPERTIES,
        metavar="P1,P3",
        help="check these alone",
    )
    command.add_argument("--quick", action="store_true", help="fewer widths and dtypes")
    command.add_argument("--json", metavar="FILE", help="also write every outcome to FILE")
    return parser


def _open(path: str | None) -> IO[str] | None:
    """Opened before the checks run, so that a wrong path costs nothing."""
    return None if path is None else open(path, "w", encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns its exit status: 0, 1, or 2 for a wrong argument."""
    options = _parser().parse_args(arguments)
    if options.device == "cuda" and (reason := why_no_gpu()):
        return _complaint(f"--device cuda: {reason}")
    try:
        output = _open(options.json)
    except OSError as error:
        return _complaint(f"--json {options.json}: {error.strerror}")
    report = check(OP, options.property, options.device, options.quick, Console(stderr=True))
    report.print(Console())
    if output is not None:
        with output:
            json.dump(report.as_json(), output, indent=1)
            output.write("\n")
    return 0 if report.holds else 1
