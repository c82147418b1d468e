"""Runs the jobs of a scan, each in a process of its own, and survives what becomes of them."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Generator, Sequence
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory

from automodel_rms_norm.gate.scan.drive import Answer, Job

__all__ = ["measure"]


def measure(
    jobs: Sequence[Job], at_once: int, limit: float
) -> Generator[tuple[Job, Answer], None, None]:
    """The answer to each job, in the order in which they end.

    A process that takes more than `limit` seconds is ended, with whatever it started; so are those
    that run when the iterator is closed. What they had measured is in their answers.
    """
    waiting = deque(enumerate(jobs))
    running: list[_Process] = []
    with TemporaryDirectory() as folder:
        try:
            while waiting or running:
                while waiting and len(running) < at_once:
                    number, job = waiting.popleft()
                    running.append(_Process(job, Path(folder, str(number)), at_once))
                for process in list(running):
                    if process.ended(limit):
                        running.remove(process)
                        yield process.job, process.answer()
                time.sleep(0.05)
        finally:
            for process in running:
                process.kill()


class _Process:
    def __init__(self, job: Job, stem: Path, at_once: int) -> None:
        self.job = job
        given, self.taken, self.errors = (
            stem.with_suffix(suffix) for suffix in (".job", ".answer", ".errors")
        )
        given.write_text(json.dumps(asdict(job)))
        share = str(max(1, (os.cpu_count() or 1) // at_once))
        environment = {
            "OMP_NUM_THREADS": share,
            "TORCHINDUCTOR_COMPILE_THREADS": share,
            **os.environ,
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        }
        command = [sys.executable, "-m", "automodel_rms_norm.gate.scan.drive"]
        with self.errors.open("wb") as errors:
            self.process = subprocess.Popen(
                [*command, str(given), str(self.taken)],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=errors,
                start_new_session=True,  # a group of its own, to be ended with what it starts
            )
        self.start, self.end = time.monotonic(), ""

    def ended(self, limit: float) -> bool:
        if self.process.poll() is not None:
            self.end = self._words(self.process.returncode)
            self.kill()  # compile workers may outlive it
            return True
        if time.monotonic() - self.start > limit:
            self.kill()
            self.end = f"it took more than {limit:g} s"
            return True
        return False

    def answer(self) -> Answer:
        answer = Answer(**json.loads(self.taken.read_text())) if self.taken.exists() else Answer()
        answer.why_not = answer.why_not or self.end
        return answer

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def _words(self, code: int) -> str:
        if code == 0:
            return ""
        if code < 0:
            return f"its process was ended by {signal.Signals(-code).name}"
        lines = self.errors.read_text(errors="replace").strip().splitlines()
        return f"its process ended with {code}: {lines[-1] if lines else 'no message'}"
