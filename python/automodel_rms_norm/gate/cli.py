"""``numerics-gate``: does a norm compute the same bits wherever it is called, and if not, why?"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import NoReturn

import automodel_rms_norm as arn
from automodel_rms_norm.gate.commands import COMMANDS
from automodel_rms_norm.gate.commands.arguments import UsageError
from automodel_rms_norm.gate.recipe import RecipeError
from automodel_rms_norm.gate.targets import TargetError

__all__ = ["main"]


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        sys.exit(_complaint(f"{message}; see {self.prog} --help"))


def _complaint(sentence: str) -> int:
    print(f"numerics-gate: {sentence}", file=sys.stderr)
    return 2


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="numerics-gate", description=__doc__)
    parser.add_argument("--version", action="version", version=f"%(prog)s {arn.__version__}")
    subparsers = parser.add_subparsers(dest="command", required=True, parser_class=_Parser)
    for command in COMMANDS:
        subparser = subparsers.add_parser(
            command.NAME, help=command.HELP, description=command.DESCRIPTION
        )
        command.add_arguments(subparser)
        subparser.set_defaults(run=command.run)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns its exit status: 0, 1, or 2 for a wrong argument."""
    options = _parser().parse_args(arguments)
    try:
        status: int = options.run(options)
    except (UsageError, TargetError, RecipeError) as error:
        return _complaint(str(error))
    return status
