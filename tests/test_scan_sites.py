"""numerics-gate scan finds every form of compiled function and custom op, and nothing else."""

import functools
import io
import re
import sys
import tokenize
from pathlib import Path

import pytest
from automodel_rms_norm.gate.scan.names import Names
from automodel_rms_norm.gate.scan.sites import COMPILED, Site, find_sites
from automodel_rms_norm.gate.scan.sources import ScanError, read_package

PACKAGES = Path(__file__).parent / "scanned"
PACKAGE = PACKAGES / "compiled_package"


@pytest.fixture(autouse=True)
def _importable(monkeypatch):
    monkeypatch.syspath_prepend(str(PACKAGES))


@functools.cache
def sites() -> list[Site]:
    return find_sites(Names(read_package("compiled_package").sources))


def listed(path: Path) -> dict[int, tuple[str, str, str]]:
    """What the comments of a file say is to be listed: kind, form and function by line."""
    expected = {}
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if match := re.search(r"# listed: (.*?), (.*?), (.*)$", line):
            expected[number + 1] = match.groups()
    return expected


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: path.stem)
def test_every_form_is_listed_and_nothing_else(path):
    found = {
        site.line: (site.kind, site.form, site.function.removeprefix("compiled_package."))
        for site in sites()
        if site.path == str(path.relative_to(PACKAGES))
    }
    assert found == listed(path)


def test_the_package_is_not_imported():
    assert sites()
    assert not [name for name in sys.modules if name.startswith("compiled_package")]


def test_settings_are_those_of_every_call_on_the_way():
    decorated = [site for site in sites() if site.form == "decorator"]
    by_function = {site.function.rpartition(":")[2]: site for site in decorated}
    assert by_function["called"].settings == "dynamic=True, options={'max_autotune': True}"
    assert by_function["partial"].settings == "mode='max-autotune'"
    assert by_function["alias_of_partial"].settings == "dynamic=True"
    assert by_function["alias_of_call"].settings == "fullgraph=True"
    assert by_function["bare"].settings == ""
    assert by_function["by_factory"].settings == "**settings"
    assert by_function["by_wrapper"].through == "compile_model"


def test_a_function_that_source_does_not_tell_has_a_reason():
    for site in sites():
        assert bool(site.why_unknown) == (
            ("compiled_package." not in site.function and "torch.nn" not in site.function)
            or "<" in site.function
        )
    reasons = {site.function: site.why_unknown for site in sites()}
    assert reasons["network"] == "it is an argument of compile_model"
    assert "inside a function" in reasons["compiled_package.decorated:outer.<locals>.closure"]
    assert reasons["torch.compile"] == "map is given the compiler"


def test_a_file_that_cannot_be_parsed_is_reported(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "half_broken").mkdir()
    (tmp_path / "half_broken" / "__init__.py").write_text("import torch\n")
    (tmp_path / "half_broken" / "broken.py").write_text("def syntax error\n")
    package = read_package("half_broken")
    assert [source.module for source in package.sources] == ["half_broken"]
    assert list(package.unread) == ["half_broken/broken.py"]
    assert package.unread["half_broken/broken.py"].startswith("SyntaxError")


# --- Real packages --------------------------------------------------------------------------------


def named_in_code(path: Path) -> set[int]:
    """The lines on which `torch.compile` or `@….custom_op` is code, not text or a comment."""
    lines = set()
    tokens = [
        token
        for token in tokenize.tokenize(io.BytesIO(path.read_bytes()).readline)
        if token.type in (tokenize.NAME, tokenize.OP)
    ]
    for first, dot, second in zip(tokens, tokens[1:], tokens[2:], strict=False):
        if (first.string, dot.string, second.string) == ("torch", ".", "compile"):
            lines.add(first.start[0])
    return lines


@pytest.mark.parametrize("name", ["transformers"])
@pytest.mark.long
def test_no_line_of_a_real_package_with_the_text_is_missed(name):
    package = read_package(name)
    found = {
        (site.path, site.line)
        for site in find_sites(Names(package.sources))
        if site.kind == COMPILED
    }
    root = Path(__import__(name).__file__).parent.parent
    missed = []
    for source in package.sources:
        path = root / source.path
        if b"torch.compile" in path.read_bytes():
            missed += [
                f"{source.path}:{line}: {path.read_text().splitlines()[line - 1].strip()}"
                for line in sorted(named_in_code(path))
                if (source.path, line) not in found
            ]
    # What is left are uses that compile nothing: an alias, a test for it, a patch of it.
    compiling = [line for line in missed if re.search(r"torch\.compile\s*\(|@torch\.compile", line)]
    assert compiling == []


# --- Bad input ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["no_such_package", "no-such-package", "a..b", "", "os.nothing"])
def test_an_unknown_package(name):
    with pytest.raises(ScanError, match=f"no package {name!r} is installed here; pip install"):
        read_package(name)


def test_a_single_module(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "single_module.py").write_text(
        "import torch\n\n\n@torch.compile\ndef f(x):\n    return x\n"
    )
    package = read_package("single_module")
    assert [site.function for site in find_sites(Names(package.sources))] == ["single_module:f"]


def test_a_package_of_a_package():
    package = read_package("compiled_package.sub")
    assert [source.module for source in package.sources] == [
        "compiled_package.sub",
        "compiled_package.sub.settings",
    ]


@pytest.mark.parametrize("name", ["without_source", "sys"])
def test_a_package_without_source(name, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "without_source").mkdir()
    (tmp_path / "without_source" / "__init__.pyc").write_bytes(b"")
    with pytest.raises(ScanError, match=f"{name} has no Python source"):
        read_package(name)


def test_a_distribution_by_its_name():
    assert read_package("pytest-timeout").sources[0].module == "pytest_timeout"
