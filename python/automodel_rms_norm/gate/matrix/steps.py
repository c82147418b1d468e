"""One version of torch in an environment of its own: made, built, checked, and deleted again."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from automodel_rms_norm.gate.matrix.row import Row

__all__ = ["Plan", "measure"]

Step = tuple[str, Callable[[], None]]


class _StepError(Exception):
    """A step failed; the message is the reason, in one line."""


@dataclass(frozen=True)
class Plan:
    """What to do with every version.

    Attributes:
        source: a checkout of this package.
        folder: gets a folder for each version: its row, its log, its digests, its environment.
        python: the interpreter.
        targets: as `numerics-gate check` takes them; "op" first.
        install: more requirements with options of pip install, for one pip install each.
        extent: `--quick` or nothing, of `numerics-gate check` and `golden`.
        limit: `--timeout` and its seconds, of both.
        reference: the version whose digests the others are compared with.
        keep: whether an environment stays when its version is done.
    """

    source: Path
    folder: Path
    python: str
    targets: Sequence[str]
    install: Sequence[Sequence[str]]
    extent: Sequence[str]
    limit: Sequence[str]
    reference: str
    keep: bool = False

    def row(self, version: str) -> Path:
        """The file that has a version's row."""
        return self.folder / version / "row.json"


@dataclass(frozen=True)
class _Version:
    plan: Plan
    row: Row
    folder: Path

    @property
    def bin(self) -> Path:
        return self.folder / "venv" / "bin"

    @property
    def log(self) -> Path:
        return self.folder / "log"

    def run(
        self, *command: str | Path, cwd: Path | None = None, may_fail: bool = False
    ) -> tuple[int, str]:
        """The status of a command and its output, which goes to the log.

        Raises:
            _StepError: for a status that is not 0, or, if it `may_fail`, neither 0 nor 1.
        """
        words = [str(word) for word in command]
        # Nothing of this interpreter's own packages reaches the environment.
        env = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME")}
        with open(self.log, "a+", encoding="utf-8", errors="replace") as log:
            log.write(f"$ {shlex.join(words)}\n")
            log.flush()
            start = log.tell()
            done = subprocess.run(
                words,
                cwd=cwd,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=env | {"PYTHONNOUSERSITE": "1"},
            )
            log.seek(start)
            output = log.read()
        if done.returncode not in ((0, 1) if may_fail else (0,)):
            raise _StepError(_reason(output))
        return done.returncode, output

    def pip_install(self, *words: str) -> None:
        pip = (self.bin / "python", "-m", "pip", "--disable-pip-version-check", "install")
        self.run(*pip, *words)

    def gate(self, *words: str | Path, may_fail: bool = False) -> tuple[int, str]:
        return self.run(self.bin / "numerics-gate", *words, may_fail=may_fail)

    # --- What makes the environment, and is gone with it ------------------------------------------

    def setup(self) -> Iterator[Step]:
        yield "environment", self.make_environment
        yield "install torch", self.install_torch
        for words in self.plan.install:
            yield f"install {shlex.join(words)}", partial(self.install_more, words)

    def make_environment(self) -> None:
        self.run(self.plan.python, self.plan.source / ".ci" / "make_venv.py", self.folder / "venv")

    def discard(self) -> None:
        if not self.plan.keep:
            shutil.rmtree(self.folder / "venv", ignore_errors=True)

    def install_torch(self) -> None:
        listing = (self.bin / "python", ".ci/requirements.py", "build", "run")
        _, requirements = self.run(*listing, cwd=self.plan.source)
        self.pip_install(f"torch=={self.row.torch}", *requirements.split("\n")[:-1])

    def install_more(self, words: Sequence[str]) -> None:
        constraint = self.folder / "constraint.txt"
        constraint.write_text(f"torch=={self.row.torch}\n", encoding="utf-8")
        self.pip_install("--constraint", str(constraint), *words)

    def build(self) -> None:
        """Again with an environment that is there, for the sources may have changed."""
        self.pip_install("--no-deps", "--no-build-isolation", str(self.plan.source))

    # --- What is measured, and stays --------------------------------------------------------------

    def checks(self) -> Iterator[Step]:
        for target in self.plan.targets:
            yield f"check {target}", partial(self.check, target)
            yield f"golden {target}", partial(self.golden, target)

    def check(self, target: str) -> None:
        path = self.folder / "check.json"
        path.unlink(missing_ok=True)
        options = (*self.plan.extent, *self.plan.limit)
        _, output = self.gate("check", target, "--json", path, *options, may_fail=True)
        if not path.exists():  # Python's own status after an error is that of a failed check
            raise _StepError(_reason(output))
        report = json.loads(path.read_text(encoding="utf-8"))
        del report["outcomes"]
        self.row.environment = report.pop("environment")
        self.row.checks[target] = report

    def golden(self, target: str) -> None:
        name = re.sub(r"\W", "_", target) + ".json"
        reference = self.plan.row(self.plan.reference).with_name(name)
        options = (*self.plan.extent, *self.plan.limit)
        self.gate("golden", target, "--write", self.folder / name, *options)
        if self.plan.reference == self.row.torch:
            self.row.digests[target] = "recorded"
        elif not reference.exists():
            self.row.digests[target] = f"recorded; {self.plan.reference} has none"
        else:
            differ, _ = self.gate("golden", target, reference, *self.plan.limit, may_fail=True)
            self.row.digests[target] = f"{'other than' if differ else 'as'} {self.plan.reference}"


def _reason(output: str) -> str:
    """The line of a failed command's output that says why."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    # pip's first complaint is the cause, but that of a process which it started; later ones are
    # about itself.
    said = re.compile(r"(ERROR|(\S+ )?error(?!: subprocess-exited)|numerics-gate|[\w.]+Error): ")
    reason = next(filter(said.match, lines), [*lines, "it printed nothing"][-1])
    if "from versions: none" in reason:
        reason += "; is the package index reachable?"
    return reason.removeprefix("ERROR: ")


def measure(plan: Plan, version: str, tell: Callable[[str], None]) -> Row:
    """The version's row, after the steps that it lacked. Saved after each of them.

    Args:
        tell: is given a line at every step.

    Raises:
        ValueError: if there is a file of that name that is no row.
    """
    path = plan.row(version)
    row = Row.load(path, version)
    row.failed = row.reason = ""
    here = _Version(plan, row, path.parent)
    here.folder.mkdir(parents=True, exist_ok=True)
    steps = [step for step in here.checks() if step[0] not in row.done]
    if steps:
        made = (here.bin / "numerics-gate").exists()
        steps = [*(() if made else here.setup()), ("build", here.build), *steps]
    for name, step in steps:
        tell(f"torch {version}: {name}")
        start = time.monotonic()
        try:
            step()
        except (_StepError, OSError, ValueError, subprocess.SubprocessError) as error:
            row.failed, row.reason = name, " ".join(str(error).split())
            row.save(path)
            if not (here.bin / "numerics-gate").exists():  # of no use to the next try
                here.discard()
            tell(f"torch {version}: {name} failed: {row.reason}; see {here.log}")
            return row
        row.done[name] = round(time.monotonic() - start, 1)
        row.save(path)
    here.discard()
    return row
