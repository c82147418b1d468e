"""numerics-gate matrix: its rows, its resumption and its errors, with a stand-in for pip.

The stand-in's environments have a `python` and a `numerics-gate` that are shell scripts; what the
real ones do in them is test_build.py's and test_gate.py's.
"""

import json
import subprocess
from pathlib import Path

import pytest
from automodel_rms_norm.gate import cli
from automodel_rms_norm.gate.matrix import steps
from automodel_rms_norm.gate.matrix.table import into_document
from commands import assert_complains

MAKE_VENV = r"""
import os, sys
from pathlib import Path
bin = Path(sys.argv[1]) / "bin"
bin.mkdir(parents=True, exist_ok=True)
gate = '''#!/bin/sh
if [ "$1" = check ]; then
  cat > "$4" <<END
{"holds": true, "properties": [{"property": "P1", "cases": 3, "failures": 0}], "outcomes": [],
 "environment": {"torch": "VERSION+cpu, built", "Python": "3.12.1, Linux",
 "automodel-rms-norm": "0.1.0, CPU only, GNU 12", "CPU": "one", "GPU": "none"}}
END
elif [ "$1 $3" = "golden --write" ]; then echo "$2" > "$4"
fi
'''
python = f'''#!/bin/sh
case "$*" in
  *torch==9.9*) echo "ERROR: No matching distribution found for torch==9.9"; exit 1;;
  *torch==8.8*) echo "ERROR: Could not find torch==8.8 (from versions: none)"; exit 1;;
  *torch==7.7*) touch {bin}/broken;;
  *--no-build-isolation*)
    [ -e {bin}/broken ] && {{
      echo "error: subprocess-exited-with-error"; echo "  a.cpp:1:2: error: no spec.h"; exit 1; }}
    cp {bin}/gate {bin}/numerics-gate;;
esac
'''
for name, text in (("gate", gate), ("python", python)):
    (bin / name).write_text(text)
    (bin / name).chmod(0o755)
"""


@pytest.fixture
def source(tmp_path: Path) -> Path:
    (tmp_path / "source" / ".ci").mkdir(parents=True)
    (tmp_path / "source" / ".ci" / "make_venv.py").write_text(MAKE_VENV)
    return tmp_path / "source"


def matrix(source: Path, versions: str, *more: str) -> int:
    folder = source.parent / "folder"
    files = ["--folder", str(folder), "--json", str(source.parent / "matrix.json")]
    return cli.main(["matrix", "--torch", versions, "--source", str(source), *files, *more])


def rows(source: Path) -> dict[str, dict]:
    report = json.loads((source.parent / "matrix.json").read_text())
    return {row["torch"]: row for row in report["rows"]}


def test_a_row_a_version(source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert matrix(source, "2.8.0,2.9.1", "--targets", "torch") == 0
    assert "torch 2.9.1: golden torch" in capsys.readouterr().err
    row = rows(source)["2.9.1"]
    assert row["holds"]
    assert list(row["done"]) == [
        "environment",
        "install torch",
        "build",
        "check op",
        "golden op",
        "check torch",
        "golden torch",
    ]
    assert row["checks"]["op"]["properties"][0]["cases"] == 3
    assert row["digests"] == {"op": "as 2.8.0", "torch": "as 2.8.0"}
    assert rows(source)["2.8.0"]["digests"]["op"] == "recorded"
    assert not (source.parent / "folder" / "2.9.1" / "venv").exists()


def test_each_install_is_a_step(source: Path) -> None:
    more = ("--install", "rich", "--install", "--no-deps nemo-automodel==0.6.0")
    assert matrix(source, "2.8.0", *more) == 0
    installed = [step for step in rows(source)["2.8.0"]["done"] if step.startswith("install")]
    assert installed == ["install torch", "install rich", "install --no-deps nemo-automodel==0.6.0"]
    log = (source.parent / "folder" / "2.8.0" / "log").read_text()
    assert log.count("--no-build-isolation") == 1
    assert "/constraint.txt --no-deps nemo-automodel==0.6.0\n" in log


@pytest.mark.parametrize(
    ("version", "failed", "reason"),
    [
        ("9.9", "install torch", "No matching distribution found for torch==9.9"),
        ("8.8", "install torch", "(from versions: none); is the package index reachable?"),
        ("7.7", "build", "a.cpp:1:2: error: no spec.h"),
    ],
)
def test_a_version_that_fails_is_a_row(
    source: Path, version: str, failed: str, reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert matrix(source, f"{version},2.9.1") == 1
    found = rows(source)
    assert found[version]["failed"] == failed
    assert found[version]["reason"].endswith(reason)
    assert found["2.9.1"]["holds"]
    assert found["2.9.1"]["digests"]["op"] == f"recorded; {version} has none"
    assert not (source.parent / "folder" / version / "venv").exists()
    assert f"torch {version}: {failed} failed: " in capsys.readouterr().err


def test_an_interruption_loses_nothing(
    source: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = subprocess.run

    def interrupted(words: list[str], **options: object) -> object:
        if "golden" in words and "2.9.1" in str(words):
            raise KeyboardInterrupt
        return real(words, **options)

    monkeypatch.setattr(steps.subprocess, "run", interrupted)
    assert matrix(source, "2.8.0,2.9.1,2.10.0") == 130
    assert "the same command goes on" in capsys.readouterr().err
    found = rows(source)
    assert found["2.8.0"]["holds"]
    assert "check op" in found["2.9.1"]["done"]
    assert found["2.10.0"]["done"] == {}

    monkeypatch.setattr(steps.subprocess, "run", real)
    assert matrix(source, "2.8.0,2.9.1,2.10.0") == 0
    told = capsys.readouterr().err
    assert "torch 2.8.0" not in told
    assert "torch 2.9.1: check op" not in told
    assert "torch 2.9.1: environment" not in told
    assert "torch 2.9.1: golden op" in told
    assert "torch 2.10.0: check op" in told


def test_digests_that_moved_are_said(source: Path) -> None:
    make_venv = source / ".ci" / "make_venv.py"
    make_venv.write_text(MAKE_VENV.replace("fi\n", 'else [ "$2" = op ]\nfi\n', 1))
    assert matrix(source, "2.8.0,2.9.1") == 0
    assert rows(source)["2.9.1"]["digests"] == {"op": "as 2.8.0", "torch": "other than 2.8.0"}


def test_the_document_keeps_its_text(source: Path, tmp_path: Path) -> None:
    document = tmp_path / "compatibility.md"
    document.write_text("# Title\n\n<!-- matrix -->\nformer\n<!-- end -->\n\nafter\n")
    assert matrix(source, "2.8.0", "--markdown", str(document)) == 0
    text = document.read_text()
    assert text.startswith("# Title\n")
    assert text.endswith("<!-- end -->\n\nafter\n")
    assert (
        "| VERSION+cpu | 3.12.1 |  | CPU only, GNU 12 | holds, 3 cases; digests recorded |" in text
    )
    assert "CPU: one. GPU: none." in text
    assert "former" not in text
    assert into_document("no markers", "| a |\n") == "<!-- matrix -->\n| a |\n<!-- end -->\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--torch", "newest"], "'newest' is not a version of torch"),
        (["--torch", "2.8.0", "--source", "/nowhere"], "is not a checkout of automodel-rms-norm"),
        (["--torch", "2.8.0", "--json", "/nowhere/matrix.json"], "/nowhere/matrix.json: No such"),
        (["--torch", "2.8.0", "--folder", "/proc/nothing"], "--folder /proc/nothing: "),
    ],
)
def test_wrong_arguments_are_one_line(
    source: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["matrix", "--source", str(source), "--folder", str(source.parent), *arguments]
    assert_complains(command, message, capsys)


def test_a_file_that_is_no_row_is_said(source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    row = source.parent / "folder" / "2.8.0" / "row.json"
    row.parent.mkdir(parents=True)
    row.write_text("{")
    assert matrix(source, "2.8.0") == 2
    assert "row.json is not a row of the matrix; delete it" in capsys.readouterr().err
