"""numerics-gate scan: what it can drive and why not, and that nothing measured is lost."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from automodel_rms_norm.gate import cli
from automodel_rms_norm.gate.scan.sources import read_package
from automodel_rms_norm.gate.scan.survey import BY_NORM, BY_RECIPE, survey
from commands import heed_interrupts

PACKAGES = Path(__file__).parent / "scanned"
RECIPES = ("driven_package.norms:needs_a_recipe", "driven_package.norms:other_arguments")
# One small case of each function, one property, and the two graphs compiled afresh once.
SMALL = ["--device", "cpu", "--dtype", "bf16", "--widths", "128", "--quick"]
SMALL += ["--property", "P1", "--compiles", "1"]


@pytest.fixture(autouse=True)
def _importable(monkeypatch):
    monkeypatch.syspath_prepend(str(PACKAGES))


def scan(*arguments: str) -> int:
    return cli.main(["scan", "driven_package", *SMALL, *arguments])


def answers(path: Path) -> dict[str, dict]:
    functions = json.loads(path.read_text())["functions"]
    return {function["function"].rpartition(":")[2]: function for function in functions}


# --- Without running anything ---------------------------------------------------------------------


def test_how_each_function_is_driven_or_why_not():
    entries = survey(read_package("driven_package"), RECIPES)
    driven = {entry.name: entry.driven or entry.why_not for entry in entries}
    assert driven == {
        "good": BY_NORM,
        "by_grad_mode": BY_NORM,
        "crashes": BY_NORM,
        "waits": "no recipe, and its arguments are not a norm's",
        "needs_a_recipe": BY_RECIPE,
        "of_float32": "no recipe, and its arguments are not a norm's",
        "other_arguments": BY_RECIPE,
        "not_a_norm": "no recipe, and its arguments are not a norm's",
        "Exchange": "no recipe: it communicates, and needs a process group",
        "Layer.method": "no recipe: it is a method, and needs its module",
        "norm": BY_NORM,
    }


def test_a_recipe_is_driven_without_a_site_of_its_own():
    recipe = "driven_package.norms:Layer"
    (entry,) = [e for e in survey(read_package("driven_package"), [recipe]) if e.name == "Layer"]
    assert (entry.driven, entry.site.form, entry.settings) == (BY_RECIPE, "inside", "")


def test_list_shows_everything_and_imports_nothing(capsys, tmp_path):
    path = tmp_path / "list.md"
    assert cli.main(["scan", "compiled_package", "--list", "--markdown", str(path)]) == 0
    assert not [name for name in sys.modules if name.startswith("compiled_package")]
    assert "torch.compile, lazy: " in capsys.readouterr().out
    line = (
        r"\| compiled_package/called.py:\d+ \| torch.compile, call \| compiled_package.called:g \|"
    )
    assert re.search(line, path.read_text())


# --- Bad input ------------------------------------------------------------------------------------


def test_an_unknown_package(capsys):
    assert cli.main(["scan", "no_such_package"]) == 2
    assert capsys.readouterr().err == (
        "numerics-gate: no package 'no_such_package' is installed here; "
        "pip install no_such_package\n"
    )


def test_an_unwritable_output(capsys, tmp_path):
    path = tmp_path / "no_such_folder" / "report.json"
    assert cli.main(["scan", "driven_package", "--json", str(path)]) == 2
    assert capsys.readouterr().err == f"numerics-gate: --json {path}: No such file or directory\n"


def test_an_unknown_module_of_recipes(capsys):
    assert cli.main(["scan", "driven_package", "--recipes", "no_such_module"]) == 2
    assert capsys.readouterr().err.startswith("numerics-gate: no RECIPES in no_such_module: ")


# --- Runs -----------------------------------------------------------------------------------------


def test_each_function_has_a_row_whatever_becomes_of_it(capsys, tmp_path):
    path, markdown = tmp_path / "scan.json", tmp_path / "scan.md"
    arguments = ["--json", str(path), "--markdown", str(markdown), "--recipes", "driven_recipes"]
    assert scan(*arguments, "--jobs", "2", "--function", "norms:") == 1
    found = answers(path)

    def p1(name: str) -> dict:
        return found[name]["answer"]["properties"]["P1"]

    assert p1("good")["failures"] == 0
    assert p1("good")["cases"] > 0
    assert p1("by_grad_mode")["failures"] > 0
    assert p1("by_grad_mode")["first_difference"]["context"] == "no_grad"
    graphs = found["by_grad_mode"]["answer"]["graphs"][0]
    assert (graphs["answers"], graphs["compiles"], graphs["differed"]) == (2, 1, 1)
    graphs = found["good"]["answer"]["graphs"][0]
    assert (graphs["answers"], graphs["differed"]) == (1, 0)
    assert p1("needs_a_recipe")["cases"] > 0
    assert "SIGABRT" in found["crashes"]["answer"]["why_not"]
    assert (
        "it takes (x, other), and its recipe gives" in found["other_arguments"]["answer"]["why_not"]
    )
    assert found["not_a_norm"]["answer"] is None
    assert "graphs fails for 1" in capsys.readouterr().out.replace("\n", "")
    assert "| good<br>driven_package/norms.py" in markdown.read_text()


def test_a_function_without_a_case_of_the_dtype_is_not_driven(capsys, tmp_path):
    path = tmp_path / "scan.json"
    arguments = ["--json", str(path), "--recipes", "driven_recipes"]
    assert scan(*arguments, "--function", "of_float32") == 1
    assert answers(path)["of_float32"]["answer"]["why_not"] == "no case of these dtypes"
    said = capsys.readouterr().out
    assert "not driven (1), no case of these dtypes: of_float32" in said
    assert "0 of 1 functions checked" in said


def test_a_function_that_takes_too_long_is_ended(tmp_path):
    path = tmp_path / "scan.json"
    arguments = ["--recipes", "waiting_recipes", "--function", "waits", "--timeout", "10"]
    assert scan("--json", str(path), *arguments) == 1
    assert answers(path)["waits"]["answer"]["why_not"] == "it took more than 10 s"


def test_a_function_that_cannot_be_imported_says_why(tmp_path):
    path = tmp_path / "scan.json"
    assert scan("--json", str(path), "--function", "unimportable") == 1
    why = answers(path)["norm"]["answer"]["why_not"]
    assert "ModuleNotFoundError: No module named 'a_dependency_that_is_not_installed'" in why


@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGTERM], ids=["Ctrl-C", "time limit"])
def test_an_interrupted_run_keeps_what_was_measured(stop, tmp_path):
    path = tmp_path / "scan.json"
    program = (
        "import sys; from automodel_rms_norm.gate import cli; sys.exit(cli.main(sys.argv[1:]))"
    )
    command = [sys.executable, "-c", program, "scan", "driven_package"]
    arguments = [*SMALL, "--json", str(path), "--jobs", "1", "--recipes", "driven_recipes"]
    environment = {**os.environ, "PYTHONPATH": str(PACKAGES)}
    with subprocess.Popen(
        [*command, *arguments],
        env=environment,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=heed_interrupts,
    ) as process:
        first = process.stderr.readline()  # of the first function that is done
        assert "1 of " in first
        process.send_signal(stop)
        assert process.wait(60) == 130
        assert "Traceback" not in process.stderr.read()
    report = json.loads(path.read_text())
    assert report["interrupted"]
    assert answers(path)["good"]["answer"]["properties"]["P1"]["cases"] > 0


# --- Going on -------------------------------------------------------------------------------------


def edited(path: Path, name: str, **changes) -> None:
    """Changes the answer for a function in a file of --json."""
    report = json.loads(path.read_text())
    for function in report["functions"]:
        if function["function"].endswith(f":{name}"):
            function["answer"] |= changes
    path.write_text(json.dumps(report))


def test_a_scan_goes_on_where_another_stopped(tmp_path, capsys):
    before, after = tmp_path / "before.json", tmp_path / "after.json"
    assert scan("--json", str(before), "--function", "norms:good") == 0
    edited(before, "good", graphs=[])  # so that it can be told from a new one
    capsys.readouterr()
    assert scan("--json", str(after), "--function", "norms:", "--resume", str(before)) == 1
    assert answers(after)["good"]["answer"] == answers(before)["good"]["answer"]
    assert answers(after)["by_grad_mode"]["answer"]["properties"]
    assert "driven_package.norms:good" not in capsys.readouterr().err


def test_what_did_not_end_is_measured_again(tmp_path):
    path = tmp_path / "scan.json"
    arguments = ["--json", str(path), "--function", "norms:good"]
    assert scan(*arguments) == 0
    edited(path, "good", why_not="it took more than 10 s", properties={})
    assert scan(*arguments, "--resume", str(path)) == 0
    assert answers(path)["good"]["answer"]["properties"]


def test_a_scan_does_not_go_on_from_something_else(tmp_path, capsys):
    path = tmp_path / "scan.json"
    assert scan("--resume", str(path)) == 2
    assert f"--resume {path} is no file of scan --json: " in capsys.readouterr().err
    path.write_text("[]")
    assert scan("--resume", str(path)) == 2
    assert f"--resume {path} is no file of scan --json: " in capsys.readouterr().err
    assert scan("--json", str(path), "--function", "norms:good") == 0
    assert scan("--resume", str(path), "--widths", "256") == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith(f"numerics-gate: --resume {path} is of another scan: selection ")
    assert "'widths': [128]" in error.partition(", here ")[0]
