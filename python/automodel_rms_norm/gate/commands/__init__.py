"""The commands of ``numerics-gate``, a module each.

Each has NAME, HELP, DESCRIPTION, ``add_arguments(parser)`` and ``run(options)``, which returns the
exit status.
"""

from automodel_rms_norm.gate.commands import (
    check,
    diagnose,
    dpo,
    golden,
    info,
    matrix,
    scan,
)

__all__ = ["COMMANDS"]

COMMANDS = (check, golden, diagnose, scan, dpo, matrix, info)
