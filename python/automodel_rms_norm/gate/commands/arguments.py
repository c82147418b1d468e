"""What the commands share: types of arguments, and the error that becomes one line."""

from __future__ import annotations

import argparse
import sys
from typing import IO

import torch

from automodel_rms_norm.gate.properties import PROPERTIES
from automodel_rms_norm.gate.recipe import DTYPES, Recipe
from automodel_rms_norm.gate.targets import BUILT_IN, load

__all__ = [
    "UsageError",
    "add_target",
    "count",
    "counts",
    "dtypes",
    "keys",
    "load_target",
    "open_output",
]


class UsageError(Exception):
    """A wrong argument, found after parsing; the message says what to do. Exit status 2."""


def keys(text: str) -> tuple[str, ...]:
    known = [property.key for property in PROPERTIES]
    chosen = [key.strip().upper() for key in text.split(",")]
    for key in chosen:
        if key not in known:
            raise argparse.ArgumentTypeError(
                f"there is no property {key!r}; choose from {', '.join(known)}"
            )
    return tuple(key for key in known if key in chosen)


def dtypes(text: str) -> tuple[torch.dtype, ...]:
    chosen = [name.strip() for name in text.split(",")]
    for name in chosen:
        if name not in DTYPES:
            raise argparse.ArgumentTypeError(
                f"there is no dtype {name!r}; choose from {', '.join(DTYPES)}"
            )
    return tuple(DTYPES[name] for name in chosen)


def counts(text: str) -> tuple[int, ...]:
    if not all(part.strip().isdecimal() and int(part) > 0 for part in text.split(",")):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of positive numbers")
    return tuple(int(part) for part in text.split(","))


def count(text: str) -> int:
    found = counts(text)
    if len(found) != 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number")
    return found[0]


def add_target(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "target",
        nargs="?",
        default="op",
        help=f"{', '.join(BUILT_IN)}, or module:attribute, which names a function of (x, weight, "
        "eps), a subclass of torch.nn.Module with (hidden, eps=) or of torch.autograd.Function, or "
        "a Recipe; default: this package's op",
    )


def load_target(text: str) -> Recipe:
    """The target that `text` names, which may be in a file of the current folder.

    Raises:
        TargetError: see `targets.load`.
    """
    if "" not in sys.path:
        sys.path.insert(0, "")
    return load(text)


def open_output(option: str, path: str | None) -> IO[str] | None:
    """Opened before anything runs, so that a wrong path costs nothing.

    Raises:
        UsageError: if it cannot be written.
    """
    try:
        return None if path is None else open(path, "w", encoding="utf-8")
    except OSError as error:
        raise UsageError(f"--{option} {path}: {error.strerror}") from error
