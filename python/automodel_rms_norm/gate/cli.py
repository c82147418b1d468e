"""``numerics-gate``: does a norm compute the same bits wherever it is called, and if not, why?"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
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


@contextmanager
def _terminable() -> Iterator[None]:
    """SIGTERM, which a time limit sends, interrupts as Ctrl-C does."""

    def interrupt(number: int, frame: object) -> NoReturn:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns its exit status: 0, 1, 2 for a wrong argument, 130 if interrupted."""
    options = _parser().parse_args(arguments)
    try:
        with _terminable():
            status: int = options.run(options)
    except (UsageError, TargetError, RecipeError) as error:
        return _complaint(str(error))
    except KeyboardInterrupt:  # a command that has something to keep has kept it
        _complaint("interrupted")
        return 130
    return status
