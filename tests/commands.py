"""What the tests of numerics-gate's commands share."""

import signal
from collections.abc import Sequence

import pytest
from automodel_rms_norm.gate import cli


def assert_complains(
    arguments: Sequence[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command says `sentence` in one line and exits with 2."""
    try:
        status = cli.main(arguments)
    except SystemExit as stopped:
        status = stopped.code
    assert status == 2
    error = capsys.readouterr().err
    assert error.startswith("numerics-gate: ")
    assert sentence in error
    assert error.count("\n") == 1


def heed_interrupts() -> None:
    """Of a child process, before it begins: a shell's background job ignores Ctrl-C otherwise."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
