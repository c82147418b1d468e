"""Which expressions compile the function that they are called with, and which functions those are.

torch.compile does, under any name, with any of its settings bound to it; so does a function of the
package that hands one of its parameters to it, and what a function of the package returns that
does.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import NamedTuple

from automodel_rms_norm.gate.scan.names import Names, Value
from automodel_rms_norm.gate.scan.scopes import Definition, Parameter, Scope, Unknown, Use

__all__ = ["Compilation", "compilations"]

_COMPILERS = {"torch.compile", "torch.compiler.compile"}
_FACTORIES = {"torch._dynamo.optimize", "torch._dynamo.eval_frame.optimize"}
_SETTINGS = {"fullgraph", "dynamic", "backend", "mode", "options", "disable"}


class Compilation(NamedTuple):
    """A use at which `function` is compiled: an expression, or what a decorator is on.

    ``form``: decorator, call, in place (Module.compile) or passed on (`function` is the compiler).
    ``settings`` are torch.compile's arguments as written, ``through`` the function of the package
    that calls it, or "".
    """

    use: Use
    form: str
    function: ast.expr | Definition
    settings: tuple[str, ...] = ()
    through: str = ""


class _Compiler(NamedTuple):
    """Where a compiler takes the function, at a place or by a keyword, and what is set already."""

    place: int = 0
    keyword: str = "model"
    settings: tuple[str, ...] = ()
    name: str = ""  # of a function of the package

    def bound(self, call: ast.Call) -> _Compiler:
        """With the settings of a call that names no function."""
        return self if self.name else self._replace(settings=self.settings + _settings(call))

    def argument(self, call: ast.Call) -> ast.expr | None:
        named = (keyword.value for keyword in call.keywords if keyword.arg == self.keyword)
        return next(named, call.args[self.place] if self.place < len(call.args) else None)


def compilations(names: Names) -> list[Compilation]:
    """Every use of the package's at which a function is compiled, in the order of the source."""
    wrappers: dict[Definition, _Compiler] = {}
    while True:  # what is handed to a wrapper may be a wrapper's parameter
        before = len(wrappers)
        found = list(_Finder(names, wrappers).compilations())
        for use, form, function, settings, _ in found:
            if form == "passed on" or isinstance(function, Definition):
                continue
            for value in names.values(function, use.scope):
                if isinstance(value, Parameter) and value.number >= 0:
                    name = value.function.qualname
                    wrapper = _Compiler(value.number, value.name, settings, name)
                    wrappers.setdefault(value.function, wrapper)
        if len(wrappers) == before:
            return found


def _settings(call: ast.Call) -> tuple[str, ...]:
    return tuple(
        f"{keyword.arg}={ast.unparse(keyword.value)}"
        if keyword.arg
        else f"**{ast.unparse(keyword.value)}"
        for keyword in call.keywords
        if keyword.arg != "model"
    )


class _Finder:
    def __init__(self, names: Names, wrappers: dict[Definition, _Compiler]) -> None:
        self.names, self.wrappers = names, wrappers
        self.known: dict[Value, _Compiler | None] = {}

    def compilations(self) -> Iterator[Compilation]:
        for use in self.names.uses:
            if isinstance(use.node, ast.ClassDef):
                continue
            if use.decorated is not None:
                if compiler := self._compiler(use.node, use.scope):
                    how = (compiler.settings, compiler.name)
                    yield Compilation(use, "decorator", use.decorated, *how)
            elif isinstance(use.node, ast.Call):
                yield from self._of_call(use, use.node)

    def _of_call(self, use: Use, call: ast.Call) -> Iterator[Compilation]:
        partial = self._is_partial(call, use.scope)
        if partial:
            call = ast.Call(call.args[0], call.args[1:], call.keywords)
        if compiler := self._compiler(call.func, use.scope):
            if (function := compiler.argument(call)) is not None:
                compiler = compiler.bound(call)
                yield Compilation(use, "call", function, compiler.settings, compiler.name)
        elif isinstance(call.func, ast.Attribute) and self._is_module_compile(call, use.scope):
            yield Compilation(use, "in place", call.func.value, _settings(call))
        elif not partial:
            for given in [*call.args, *(keyword.value for keyword in call.keywords)]:
                if compiler := self._compiler(given, use.scope):
                    how = (compiler.settings, compiler.name)
                    yield Compilation(use, "passed on", given, *how)

    def _is_partial(self, call: ast.Call, scope: Scope) -> bool:
        return bool(call.args) and "functools.partial" in self.names.values(call.func, scope)

    # --- Whether an expression is a compiler ------------------------------------------------------

    def _compiler(self, node: ast.expr, scope: Scope) -> _Compiler | None:
        for value in self.names.values(node, scope):
            if value not in self.known:
                self.known[value] = None  # what a function that returns itself adds
                self.known[value] = self._of_value(value)
            if compiler := self.known[value]:
                return compiler
        return None

    def _of_value(self, value: Value) -> _Compiler | None:
        if isinstance(value, str):
            return _Compiler() if value in _COMPILERS else None
        if isinstance(value, Definition):
            return self.wrappers.get(value)
        if not isinstance(value, Unknown) or not isinstance(value.node, ast.Call):
            return None
        call, scope = value.node, value.scope
        if self._is_partial(call, scope):
            compiler = self._compiler(call.args[0], scope) if len(call.args) == 1 else None
            return compiler and compiler.bound(call)
        for callee in self.names.values(call.func, scope):
            if callee in _FACTORIES:
                return _Compiler().bound(call)
            if isinstance(callee, Definition) and callee not in self.wrappers:
                for returned in callee.scope.returns:
                    if compiler := self._compiler(returned, callee.scope):
                        return compiler
        compiler = self._compiler(call.func, scope)
        return compiler.bound(call) if compiler and compiler.argument(call) is None else None

    # --- torch.nn.Module.compile ------------------------------------------------------------------

    def _is_module_compile(self, call: ast.Call, scope: Scope) -> bool:
        """As far as its form tells: a method of that name, called with torch.compile's settings."""
        assert isinstance(call.func, ast.Attribute)
        if call.func.attr != "compile" or call.args:
            return False
        if any(k.arg is not None and k.arg not in _SETTINGS for k in call.keywords):
            return False
        return not any(
            isinstance(value, str) or self._has_own_compile(value, scope)
            for value in self.names.values(call.func.value, scope)
        )

    def _has_own_compile(self, value: Value, scope: Scope) -> bool:
        """Whether it is an object of a class of the package that defines the method itself."""
        if isinstance(value, Parameter) and value.number < 0:
            return scope.owner is not None and "compile" in scope.owner.bindings
        if isinstance(value, Unknown) and isinstance(value.node, ast.Call):
            return any(
                isinstance(made, Definition) and "compile" in made.scope.bindings
                for made in self.names.values(value.node.func, value.scope)
            )
        return False
