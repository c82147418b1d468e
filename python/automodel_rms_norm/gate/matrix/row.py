"""What is known of one version of torch, kept in a file after every step."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["Row"]


@dataclass
class Row:
    """One version.

    Attributes:
        torch: the version, as asked for.
        done: the seconds that each finished step took.
        failed: the step that failed; "" where none has.
        reason: why it failed, in one line.
        environment: what `numerics-gate info` names.
        checks: by target, its report as `numerics-gate check --json` writes it, but the outcomes.
        digests: by target, what `numerics-gate golden` said of it.
    """

    torch: str
    done: dict[str, float] = field(default_factory=dict)
    failed: str = ""
    reason: str = ""
    environment: dict[str, str] = field(default_factory=dict)
    checks: dict[str, dict[str, Any]] = field(default_factory=dict)
    digests: dict[str, str] = field(default_factory=dict)

    @classmethod
    def load(cls, path: Path, torch: str) -> Row:
        """From `path`, where there is such a file.

        Raises:
            ValueError: if the file is not one that `save` wrote.
        """
        if not path.exists():
            return cls(torch)
        try:
            return cls(**json.loads(path.read_text(encoding="utf-8")))
        except (TypeError, ValueError) as error:
            raise ValueError(f"{path} is not a row of the matrix; delete it: {error}") from error

    def save(self, path: Path) -> None:
        """Never leaves half a file."""
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_suffix(".unfinished")
        unfinished.write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")
        os.replace(unfinished, path)

    @property
    def holds(self) -> bool:
        """Whether every step succeeded and this package's op keeps its contract."""
        return not self.failed and bool(self.checks) and self.checks["op"]["holds"]
