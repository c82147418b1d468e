"""The checks in a process of their own, watched: one that hangs or dies is a finding of that check.

The process says that it has loaded the target, sends its list of checks, then the outcome of each.
Where none comes in time, or the process ends, a new one goes on with the next check.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
from collections import Counter
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import cast

from automodel_rms_norm.gate import runner
from automodel_rms_norm.gate.checks import Place, Request, Run, checks_of, load_target
from automodel_rms_norm.gate.recipe import RecipeError
from automodel_rms_norm.gate.runner import FAILS, NOT_RUN, Check, Outcome
from automodel_rms_norm.gate.targets import TargetError

__all__ = ["run"]

LOAD_SECONDS, CALL_SECONDS = 600, 60  # at least, whatever the limit of a check
STRIKES = 2  # so many checks of a context without an answer, and the rest of them are left out


_Left = frozenset[tuple[str, str]]  # property and context


class _DiedError(Exception):
    """The process gave no answer; the message says how that came."""


class _Process:
    def __init__(self, target: str, request: Request, begin: int, left_out: _Left) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        arguments = (theirs, target, request, begin, left_out)
        self.process = context.Process(target=_serve, args=arguments)
        self.process.start()
        theirs.close()

    def receive(self, seconds: float) -> object:
        try:
            if not self.pipe.poll(seconds):
                raise _DiedError(f"no answer within {seconds:g} s")
            return self.pipe.recv()
        except (EOFError, ConnectionError) as error:
            self.process.join(10)
            code = self.process.exitcode or 0
            how = signal.Signals(-code).name if code < 0 else f"exit status {code}"
            raise _DiedError(f"its process ended with {how}") from error

    def end(self) -> None:
        """With everything that it started: compilers, fresh processes."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid or 0, signal.SIGKILL)
        self.process.kill()
        self.process.join()
        self.pipe.close()


def run(target: str, request: Request, seconds: float) -> Run:
    """Starts the checks, each with a time limit.

    Raises:
        TargetError: where the target cannot be loaded or called.
    """
    process = _Process(target, request, 0, frozenset())
    try:
        name, places = _opening(process, seconds)
    except BaseException:
        process.end()
        raise
    return Run(name, places, _outcomes(target, request, process, places, seconds))


def _opening(process: _Process, seconds: float) -> tuple[str, list[Place]]:
    stage = "loaded"
    try:
        opening = process.receive(max(LOAD_SECONDS, seconds))
        if opening is None:
            stage = "called"
            opening = process.receive(max(CALL_SECONDS, seconds))
    except _DiedError as error:
        raise TargetError(f"the target could not be {stage}: {error}") from error
    if isinstance(opening, str):
        raise TargetError(opening)
    return cast("tuple[str, list[Place]]", opening)


def _outcomes(
    target: str, request: Request, process: _Process, places: list[Place], seconds: float
) -> Iterator[Outcome]:
    strikes: Counter[tuple[str, str]] = Counter()
    number = 0
    try:
        while number < len(places):
            place = places[number]
            try:
                answer = process.receive(seconds)
                assert isinstance(answer, Outcome)
                yield answer
                number += 1
                continue
            except _DiedError as error:
                yield Outcome(*place, FAILS, str(error))
            number += 1
            strikes[place.property, place.context] += 1
            process.end()
            if number < len(places):
                left_out = frozenset(key for key, count in strikes.items() if count >= STRIKES)
                process = _Process(target, request, number, left_out)
                _opening(process, seconds)
        process.process.join(10)  # so that it takes back what multiprocessing counts for it
    finally:
        process.end()


def _serve(pipe: Connection, text: str, request: Request, begin: int, left_out: _Left) -> None:
    os.setsid()
    try:
        target = load_target(text)
        pipe.send(None)
        checks = checks_of(target, request)
    except (TargetError, RecipeError) as error:
        pipe.send(str(error))
        return
    pipe.send((target.name, [Place.of(check) for check in checks]))

    def answer(check: Check) -> Outcome:
        if (check.property, check.context) in left_out:
            reason = f"{check.context}: {STRIKES} of these checks gave no answer"
            return Outcome(*Place.of(check), NOT_RUN, reason)
        return runner.measure(check) if request.digests else runner.outcome(check)

    for found in runner.run(checks[begin:], answer):
        pipe.send(found)
