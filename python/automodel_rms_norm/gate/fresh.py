"""The results of fresh processes: what a target gives anew, without this process's caches."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from automodel_rms_norm.contexts import Results
from automodel_rms_norm.gate.inductor import probed_vector_isas, recompiling
from automodel_rms_norm.gate.plan import Plan
from automodel_rms_norm.gate.recipe import Case
from automodel_rms_norm.gate.runner import NotRunError

__all__ = ["fresh_results"]


def fresh_results(plan: Plan, case: Case) -> tuple[Results, Results]:
    """What two fresh processes give for a main case of the plan, on the CPU.

    Both run all main cases, once.

    Raises:
        NotRunError: where the target cannot be loaded there.
    """
    if not plan.target.source:
        raise NotRunError("in a fresh process: the target is an object of this process alone")
    answer = _both(plan)
    if isinstance(answer, str):
        raise NotRunError(f"in a fresh process: {answer}")
    number = plan.main_cases.index(case)
    one, other = (results[number] for results in answer)
    if isinstance(one, str) or isinstance(other, str):
        raise RuntimeError(one if isinstance(one, str) else other)
    return one, other


@lru_cache(maxsize=1)
def _both(plan: Plan) -> tuple[list[Results | str], ...] | str:
    anew = {"TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1"}
    environment = {**os.environ, **probed_vector_isas(), **anew}
    with TemporaryDirectory() as folder:
        given, *taken = (Path(folder, name) for name in ("given", "one", "other"))
        torch.save((plan.target.source, plan.main_cases), given)
        command = [sys.executable, "-m", __name__, str(given)]
        processes = [
            subprocess.Popen([*command, str(path)], env=environment, stderr=subprocess.PIPE)
            for path in taken
        ]
        for process in processes:
            _, errors = process.communicate()
            if process.returncode:
                lines = errors.decode(errors="replace").strip().splitlines()
                return lines[-1] if lines else f"it ended with {process.returncode}"
        return tuple(torch.load(path, weights_only=False) for path in taken)


def _answer(given: str, taken: str) -> None:
    from automodel_rms_norm.gate.targets import load

    source, cases = torch.load(given, weights_only=False)
    target = load(source)
    answers: list[Results | str] = []
    for case in cases:
        torch.compiler.reset()
        try:
            with recompiling():
                results = target.results(case, case.inputs)
            answers.append({name: tensor.cpu() for name, tensor in results.items()})
        except Exception as error:  # a finding of that case
            answers.append(f"{type(error).__name__}: {error}")
    torch.save(answers, taken)


if __name__ == "__main__":
    _answer(*sys.argv[1:])
