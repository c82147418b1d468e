"""Which uses register a custom op, and which classes are an autograd.Function."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import NamedTuple

from automodel_rms_norm.gate.scan.names import Names, Value
from automodel_rms_norm.gate.scan.scopes import Definition, Scope, Unknown, Use

__all__ = ["Registration", "registrations"]

_OP = "custom op"
_AUTOGRAD = "custom autograd"
_REGISTRARS = {
    "custom_op": _OP,
    "triton_op": _OP,
    "define": "op schema",
    "impl": "op kernel",
    "register_kernel": "op kernel",
    "register_fake": "fake kernel",
    "_register_fake": "fake kernel",
    "impl_abstract": "fake kernel",
    "register_autograd": "op autograd",
    "register_vmap": "op vmap rule",
    "register_torch_dispatch": "op dispatch rule",
}
_FUNCTIONS = {"torch.autograd.Function", "torch.autograd.function.Function"}


class Registration(NamedTuple):
    """A use that registers something for an op, and what: a function or class of the package.

    ``op`` is the op as written: its name, or the function that became it.
    """

    use: Use
    kind: str
    function: Definition | None
    op: str = ""


def registrations(names: Names) -> Iterator[Registration]:
    """In the order of the source."""
    finder = _Finder(names)
    for use in names.uses:
        if isinstance(use.node, ast.ClassDef):
            if use.decorated is not None and finder.is_autograd(use.decorated):
                yield Registration(use, _AUTOGRAD, use.decorated)
        elif kind := finder.registrar(use.node, use.scope):
            yield finder.registration(use, use.node, kind)


class _Finder:
    def __init__(self, names: Names) -> None:
        self.names = names

    def registration(self, use: Use, node: ast.expr, kind: str) -> Registration:
        arguments = node.args if isinstance(node, ast.Call) else []
        callee = _callee(node)
        values = [(argument, self.names.values(argument, use.scope)) for argument in arguments]
        function = use.decorated or next(
            (v for _, found in values for v in found if isinstance(v, Definition)), None
        )
        texts = (
            ast.unparse(argument)
            for argument, found in values
            if not any(isinstance(v, Definition) or self._is_library(v) for v in found)
        )
        # op.register_fake and the like say the op in front.
        before = ast.unparse(callee.value) if isinstance(callee, ast.Attribute) else ""
        return Registration(use, kind, function, next(texts, before))

    def registrar(self, node: ast.expr, scope: Scope) -> str | None:
        """What a call, or a decorator without arguments, registers."""
        callee = _callee(node)
        for value in self.names.values(callee, scope):
            if isinstance(value, str):
                module, _, name = value.rpartition(".")
                if module == "torch.library":
                    return _REGISTRARS.get(name)
        if isinstance(callee, ast.Attribute) and callee.attr in _REGISTRARS:
            bases = self.names.values(callee.value, scope)
            if any(self._is_library(base) or self._is_op(base) for base in bases):
                return _REGISTRARS[callee.attr]
        return None

    def is_autograd(self, definition: Definition, depth: int = 0) -> bool:
        """Whether the class derives from autograd.Function, at most a few classes up."""
        node, scope = definition.node, definition.scope.parent
        if not isinstance(node, ast.ClassDef) or scope is None or depth > 8:
            return False
        return any(
            value in _FUNCTIONS
            or (isinstance(value, Definition) and self.is_autograd(value, depth + 1))
            for base in node.bases
            for value in self.names.values(base, scope)
        )

    def _is_library(self, value: Value) -> bool:
        return (
            isinstance(value, Unknown)
            and isinstance(value.node, ast.Call)
            and "torch.library.Library" in self.names.values(value.node.func, value.scope)
        )

    def _is_op(self, value: Value) -> bool:
        """Whether torch.library.custom_op or triton_op made it."""
        if isinstance(value, Unknown) and isinstance(value.node, ast.Call):
            return self.registrar(value.node, value.scope) == _OP
        if not isinstance(value, Definition) or isinstance(value.node, ast.Lambda):
            return False
        scope = value.scope.parent
        assert scope is not None
        return any(self.registrar(node, scope) == _OP for node in value.node.decorator_list)


def _callee(node: ast.expr) -> ast.expr:
    return node.func if isinstance(node, ast.Call) else node
