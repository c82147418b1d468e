"""Replacing names in somebody else's module, and putting them back."""

from __future__ import annotations

import importlib
import importlib.metadata
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any

__all__ = ["IntegrationError", "Patch", "require"]

_INHERITED = object()


class IntegrationError(RuntimeError):
    """The stack is not there, or is not one that is known; the message says what to do."""


def require(module: str, distribution: str) -> ModuleType:
    """The module; an IntegrationError where it cannot be imported."""
    try:
        return importlib.import_module(module)
    except Exception as error:  # an import runs anybody's code
        lines = str(error).strip().splitlines() or [""]
        raise IntegrationError(
            f"cannot import {module}: {type(error).__name__}: {lines[0]}; "
            f"pip install {distribution}, or repair that installation"
        ) from error


class Patch:
    """Attributes of a stack that are to be the op's, replaced and restored together.

    Args:
        stack: how messages call it.
        distribution: of the stack, for its version.
        find: imports the stack and returns (owner, attribute, replacement) for each. Raises
            IntegrationError where the stack does not offer what is to be replaced.
    """

    def __init__(
        self, stack: str, distribution: str, find: Callable[[], Sequence[tuple[Any, str, Any]]]
    ) -> None:
        self._stack = stack
        self._distribution = distribution
        self._find = find
        # What was there; not empty while it is enabled.
        self._before: list[tuple[Any, str, Any]] = []

    def version(self) -> str:
        try:
            return f"{self._distribution} {importlib.metadata.version(self._distribution)}"
        except importlib.metadata.PackageNotFoundError:
            return f"{self._distribution} of unknown version"

    def enable(self) -> None:
        """Replaces them all, or none; says so in the log. Does nothing where it is done already."""
        if self._before:
            return
        replacements = self._find()
        for owner, name, replacement in replacements:
            self._before.append((owner, name, vars(owner).get(name, _INHERITED)))
            setattr(owner, name, replacement)
        logging.getLogger(self._stack).info(
            "%s: replaced %s by the ops of automodel_rms_norm",
            self.version(),
            ", ".join(f"{owner.__name__}.{name}" for owner, name, _ in replacements),
        )

    def disable(self) -> None:
        """Puts back what was there. Does nothing where nothing is replaced."""
        while self._before:
            owner, name, before = self._before.pop()
            if before is _INHERITED:
                delattr(owner, name)
            else:
                setattr(owner, name, before)

    @contextmanager
    def enabled(self) -> Iterator[None]:
        """Enabled within; afterwards as before."""
        was_enabled = bool(self._before)
        self.enable()
        try:
            yield
        finally:
            if not was_enabled:
                self.disable()

    def refuse(self, reason: str) -> IntegrationError:
        """The error for a version that is not known."""
        return IntegrationError(
            f"{self.version()} cannot be patched: {reason}; replace its norms by "
            "automodel_rms_norm.RMSNorm in the model instead"
        )
