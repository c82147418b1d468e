"""Where a package compiles a function or registers a custom op, with file and line."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass

from automodel_rms_norm.gate.scan.compilers import Compilation, compilations
from automodel_rms_norm.gate.scan.custom_ops import Registration, registrations
from automodel_rms_norm.gate.scan.names import Names, Value
from automodel_rms_norm.gate.scan.scopes import Definition, Parameter, Scope, Use

__all__ = ["COMPILED", "Site", "find_sites"]

COMPILED = "torch.compile"


@dataclass(frozen=True)
class Site:
    """A line of a package's source at which a function is compiled or an op registered.

    Attributes:
        kind: COMPILED, or what is registered.
        form: of COMPILED: decorator, call, lazy (in a function, or behind a condition), in place
            (as a module's method), passed on (given to another function as a compiler).
        path, line: relative to the folder that holds the package.
        function: ``module:qualname`` of what is compiled or registered; where source does not tell
            what that is, the expression.
        why_unknown: why source does not tell; "" where it does.
        settings: of COMPILED: the keyword arguments as written. Otherwise the op as written.
        through: the function of the package that compiles what it is given, or "".
    """

    kind: str
    form: str
    path: str
    line: int
    function: str
    why_unknown: str = ""
    settings: str = ""
    through: str = ""

    @property
    def place(self) -> str:
        return f"{self.path}:{self.line}"

    @property
    def what(self) -> str:
        return f"{self.kind}, {self.form}" if self.form else self.kind


def find_sites(names: Names) -> list[Site]:
    """The sites of a package, by file and line."""
    found = [site for each in compilations(names) for site in _of_compilation(names, each)]
    found += [_of_registration(each) for each in registrations(names)]
    return sorted(set(found), key=lambda site: (site.path, site.line, site.function))


def _of_registration(registration: Registration) -> Site:
    use, kind, function, op = registration
    name, why = (op, "no function of this package") if function is None else _defined(function)
    return Site(kind, "", use.source.path, use.node.lineno, name, why, op)


def _of_compilation(names: Names, compilation: Compilation) -> Iterator[Site]:
    use, form, function, settings, through = compilation
    if isinstance(function, Definition):
        functions = [_defined(function)]
    elif form == "passed on":
        assert isinstance(use.node, ast.Call)
        functions = [(ast.unparse(function), f"{ast.unparse(use.node.func)} is given the compiler")]
    else:
        values = names.values(function, use.scope)
        known = [value for value in values if isinstance(value, str | Definition)]
        functions = [_named(value, function, use.scope) for value in known or values[:1]]
        form = _form(use, function) if form == "call" else form
    for name, why in functions:
        place = (use.source.path, use.node.lineno)
        yield Site(COMPILED, form, *place, name, why, ", ".join(settings), through)


def _form(use: Use, function: ast.expr) -> str:
    """Of a function that is compiled by a call."""
    match use.assigned, function:
        case ast.Attribute(value=target), ast.Attribute(value=owner) if ast.dump(
            target
        ) == ast.dump(owner):
            return "in place"
    in_function = bool(use.scope.qualname) and not use.scope.is_class
    return "lazy" if in_function or use.conditional else "call"


def _defined(function: Definition) -> tuple[str, str]:
    return str(function), "it is made inside a function" if "<" in function.qualname else ""


def _named(value: Value, node: ast.expr, scope: Scope) -> tuple[str, str]:
    """The name of what an expression stands for; or its text, and why it has none."""
    if isinstance(value, Definition):
        return _defined(value)
    if isinstance(value, str):
        module, _, name = value.rpartition(".")
        return f"{module}:{name}", ""
    text, owner = ast.unparse(node), scope.owner
    if isinstance(value, Parameter):
        return text, f"it is an argument of {value.function.qualname}"
    match node:
        case ast.Attribute(value=ast.Name(id="self"), attr=name) if (
            owner is not None and name not in owner.attributes
        ):
            return f"{scope.module}:{owner.qualname}.{name}", ""  # of a class that it derives from
    return text, "source does not tell what it is"
