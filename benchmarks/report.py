"""Makes the figures of DOCUMENTS from benchmarks/results, so that none is typed.

Between `<!-- FILE NAME -->` and `<!-- end -->` a document has what NAME is in results/FILE.json:
`environment`, `plot` (drawn to docs/images/FILE.svg), `not_run`, or a table of the program that
wrote the file. --check writes nothing and fails where the document is not what it would write.
"""

import argparse
import importlib
import json
import re
from pathlib import Path

import harness
from harness import Program, Record

ROOT = Path(__file__).parents[1]
DOCUMENTS = [ROOT / "docs" / name for name in ("performance.md", "training.md", "investigation.md")]
RESULTS = ROOT / "benchmarks" / "results"
SECTION = re.compile(r"<!-- (\w+) (\w+) -->\n.*?<!-- end -->", re.DOTALL)
NOTHING = "Not measured yet."


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true")
    arguments = parser.parse_args(argv)
    for path in DOCUMENTS:
        before = path.read_text()
        after = document(before)
        if not arguments.check:
            draw(before)
            path.write_text(after)
        elif after != before:
            parser.exit(
                1, f"{path.name} is not of the committed results: run benchmarks/report.py\n"
            )


def document(text: str) -> str:
    """`text` with its sections made anew."""
    return SECTION.sub(
        lambda m: f"<!-- {m[1]} {m[2]} -->\n{section(m[1], m[2])}\n<!-- end -->", text
    )


def section(file: str, name: str) -> str:
    if not (RESULTS / f"{file}.json").exists():
        return NOTHING
    program, environment, records = read(file)
    if name == "environment":
        return sentence(environment)
    if name == "plot":
        return f"![{program.name}](images/{file}.svg)"
    tables = {table.name: table for table in [*program.tables(records), harness.not_run(records)]}
    if name not in tables:
        return NOTHING
    return tables[name].markdown() if tables[name].rows else "None."


def read(file: str) -> tuple[Program, Record, list[Record]]:
    """The program that wrote a file, its environment and its records."""
    found = json.loads((RESULTS / f"{file}.json").read_text())
    return importlib.import_module(found["program"]).PROGRAM, found["environment"], found["records"]


def sentence(environment: Record) -> str:
    """Where it was measured, and with what."""
    parts = [environment.get("gpu") or environment.get("cpu", "")]
    if not environment.get("gpu"):
        threads = environment["threads"]
        parts.append(f"{threads} thread{'s' if threads > 1 else ''}, {environment['cpu_isa']}")
    parts.append(f"torch {environment['torch']}")
    parts += [f"{name} {version}" for name, version in environment.get("packages", {}).items()]
    parts.append(f"contract version {environment['contract']['version']}")
    return ", ".join(parts) + "."


def draw(text: str) -> None:
    for match in SECTION.finditer(text):
        file, name = match.groups()
        if name == "plot" and (RESULTS / f"{file}.json").exists():
            program, _, records = read(file)
            harness.plot(program.panels(records), ROOT / "docs" / "images" / f"{file}.svg")


if __name__ == "__main__":
    main()
