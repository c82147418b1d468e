"""The answers of an earlier scan, for one that goes on where it stopped."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from automodel_rms_norm.gate.scan.drive import Answer
from automodel_rms_norm.gate.scan.report import Row, ScanReport
from automodel_rms_norm.gate.scan.sources import ScanError

__all__ = ["resume"]

# What another machine of the same kind may have otherwise.
_OF_THE_MACHINE = ("CPU", "Python")


def resume(report: ScanReport, path: str) -> None:
    """Fills in what the file of another scan's ``--json`` has measured to its end.

    Raises:
        ScanError: if it is no such file, or of another package, selection or environment.
    """
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
        answers = {_key(function): function["answer"] for function in found["functions"]}
        there = _compared(found)
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ScanError(f"{path} is no file of scan --json: {error}") from error
    here = _compared(report.as_json())
    for name, value in here.items():
        if there[name] != value:
            raise ScanError(f"{path} is of another scan: {name} {there[name]}, here {value}")
    report.rows = [_answered(row, answers) for row in report.rows]


def _answered(row: Row, answers: dict[str, Any]) -> Row:
    answer = answers.get(_key(asdict(row.entry)))
    return replace(row, answer=Answer(**answer)) if answer and not answer["why_not"] else row


def _key(function: dict[str, Any]) -> str:
    return json.dumps([function["function"], function["sites"]])


def _compared(report: dict[str, Any]) -> dict[str, Any]:
    environment = {k: v for k, v in report["environment"].items() if k not in _OF_THE_MACHINE}
    values = {name: report[name] for name in ("package", "version", "asked", "selection")}
    plain: dict[str, Any] = json.loads(json.dumps({**values, **environment}))
    return plain
