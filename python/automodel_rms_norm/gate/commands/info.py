"""``numerics-gate info``: versions of everything that can move a bit."""

from __future__ import annotations

import argparse

from automodel_rms_norm.gate.environment import environment

NAME = "info"
HELP = "versions of everything that can move a bit"
DESCRIPTION = "Prints versions, hardware and how this package was built."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    pass


def run(options: argparse.Namespace) -> int:
    for name, value in environment().items():
        print(f"{name:20}{value}")
    return 0
