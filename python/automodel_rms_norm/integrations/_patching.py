"""Replacing names in somebody else's module, and putting them back."""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any, NamedTuple

__all__ = ["IntegrationError", "Patch", "calls", "parameter_names", "require"]

_INHERITED = object()


class IntegrationError(RuntimeError):
    """The stack is not there, or is not one that is known; the message says what to do."""


def require(module: str, distribution: str) -> ModuleType:
    """The module; an IntegrationError where it cannot be imported."""
    try:
        return importlib.import_module(module)
    except Exception as error:  # an import runs anybody's code
        lines = str(error).strip().splitlines() or [""]
        version = _version(distribution)
        found = f" {version} is installed: take a release that has it," if version else ""
        raise IntegrationError(
            f"cannot import {module}: {type(error).__name__}: {lines[0]};{found} "
            f"pip install {distribution}, or repair that installation"
        ) from error


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def parameter_names(function: object) -> list[str]:
    """The names of what a function takes; none where that cannot be known."""
    try:
        return list(inspect.signature(function).parameters)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return []


def calls(function: Any, name: str) -> bool:
    """Whether the code of a function, under its decorators, looks that name up."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    return code is not None and name in code.co_names


class _Replaced(NamedTuple):
    owner: Any
    name: str
    before: Any
    replacement: Any


class Patch:
    """An attribute of a stack that is to be the op, replaced and restored.

    Args:
        stack: how messages call it.
        distribution: of the stack, for its version.
        find: imports the stack and returns (owner, attribute, replacement), the same replacement
            at each call. Raises IntegrationError where the stack does not offer what is to be
            replaced.
    """

    def __init__(
        self, stack: str, distribution: str, find: Callable[[], tuple[Any, str, Any]]
    ) -> None:
        self._stack = stack
        self._distribution = distribution
        self._find = find
        self._replaced: list[_Replaced] = []

    def version(self) -> str:
        return f"{self._distribution} {_version(self._distribution) or 'of unknown version'}"

    def enable(self) -> None:
        """Replaces it, and says so in the log. Does nothing where it is done already, which it is
        not in a module that was reloaded since."""
        owner, name, replacement = self._find()
        replaced = _Replaced(owner, name, vars(owner).get(name, _INHERITED), replacement)
        if replaced.before is replacement:
            return
        self._replaced.append(replaced)
        setattr(owner, name, replacement)
        logging.getLogger(self._stack).info(
            "%s: replaced %s.%s by the ops of automodel_rms_norm",
            self.version(),
            owner.__name__,
            name,
        )

    def disable(self) -> None:
        """Puts back what was there. Where somebody else has replaced it since, it stays as it is,
        and the log warns. Does nothing where nothing is replaced."""
        while self._replaced:
            owner, name, before, replacement = self._replaced.pop()
            if vars(owner).get(name) is not replacement:
                logging.getLogger(self._stack).warning(
                    "%s.%s has been replaced since and is left as it is", owner.__name__, name
                )
            elif before is _INHERITED:
                delattr(owner, name)
            else:
                setattr(owner, name, before)

    @contextmanager
    def enabled(self) -> Iterator[None]:
        """Enabled within; afterwards as before."""
        was_enabled = bool(self._replaced)
        self.enable()
        try:
            yield
        finally:
            if was_enabled:
                self.enable()
            else:
                self.disable()

    def refuse(self, reason: str) -> IntegrationError:
        """The error for a version that is not known."""
        return IntegrationError(
            f"{self.version()} cannot be patched: {reason}; replace its norms by "
            "automodel_rms_norm.RMSNorm in the model instead"
        )
