"""numerics-gate, interrupted by Ctrl-C or a time limit: what was measured is kept, and no more."""

import json
import os
import signal
import subprocess
import sys
import textwrap

import pytest
from commands import heed_interrupts

NORM = """
    import time
    import automodel_rms_norm as arn

    def waits(x, weight, eps):
        if x.dim() == 4:  # of another rank, which P3 asks after other cases
            time.sleep(600)
        return arn.rms_norm(x, weight, eps)
"""
PROGRAM = "import sys; from automodel_rms_norm.gate import cli; sys.exit(cli.main(sys.argv[1:]))"
STOPS = pytest.mark.parametrize(
    "stop", [signal.SIGINT, signal.SIGTERM], ids=["Ctrl-C", "time limit"]
)


def interrupted(folder, stop, command, *arguments):
    """The status and the words of a command that is stopped in P3, after P1."""
    (folder / "slow.py").write_text(textwrap.dedent(NORM))
    few = ["--device", "cpu", "--property", "P1,P3", "--widths", "32", "--rows", "5"]
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM, command, "slow:waits", *arguments, *few],
        cwd=folder,
        env={**os.environ, "COLUMNS": "200"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=heed_interrupts,
    ) as process:
        while not (line := process.stderr.readline()).startswith("P1 "):
            assert line, "it ended before P1 did"
        process.send_signal(stop)
        printed, errors = process.communicate(timeout=60)
    assert "Traceback" not in errors
    assert errors.splitlines()[-1] == "numerics-gate: interrupted"
    return process.returncode, printed


@STOPS
def test_check_reports_what_was_measured_and_does_not_hold(stop, tmp_path):
    status, printed = interrupted(tmp_path, stop, "check", "--json", "report.json")
    assert status == 130
    assert "cases; interrupted, " in printed
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["interrupted"]
    assert not report["holds"]
    first, second = report["properties"]
    assert first["cases"] > 0
    assert first["failures"] == 0
    assert second["not_run"]["interrupted"] > 0


def test_golden_writes_no_part_of_a_recording(tmp_path):
    status, _ = interrupted(tmp_path, signal.SIGINT, "golden", "--write", "bits.json")
    assert status == 130
    assert not (tmp_path / "bits.json").exists()
