"""The scopes of a module, what its names are bound to, and its calls, decorators and classes."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import dataclass, field

from automodel_rms_norm.gate.scan.sources import Source

__all__ = ["Binding", "Definition", "Imported", "Parameter", "Scope", "Unknown", "Use", "read"]

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda


@dataclass(frozen=True)
class Definition:
    """A function or class of the package."""

    module: str
    qualname: str
    node: FunctionNode | ast.ClassDef = field(repr=False, compare=False)
    scope: Scope = field(repr=False, compare=False)  # its own

    def __str__(self) -> str:
        return f"{self.module}:{self.qualname}"

    @property
    def is_method(self) -> bool:
        return self.scope.parent is not None and self.scope.parent.is_class


@dataclass(frozen=True)
class Parameter:
    """A parameter of a function of the package; its number is counted as a caller does."""

    function: Definition
    name: str
    number: int


@dataclass(frozen=True)
class Unknown:
    """An expression whose value source does not tell, with the scope that it stands in."""

    node: ast.expr = field(repr=False)
    scope: Scope = field(repr=False)


@dataclass(eq=False)
class Scope:
    """A module, class or function body."""

    module: str
    qualname: str = ""
    parent: Scope | None = None
    is_class: bool = False
    bindings: dict[str, list[Binding]] = field(default_factory=dict)
    attributes: dict[str, list[Binding]] = field(default_factory=dict)  # self.NAME, of a class
    globals: set[str] = field(default_factory=set)
    stars: list[str] = field(default_factory=list)  # modules of `from module import *`
    returns: list[ast.expr] = field(default_factory=list)

    def inner(self, name: str) -> str:
        if not self.qualname:
            return name
        return f"{self.qualname}.{name}" if self.is_class else f"{self.qualname}.<locals>.{name}"

    def is_in(self, other: Scope) -> bool:
        """Whether it is `other` or inside of it."""
        return self is other or (self.parent is not None and self.parent.is_in(other))

    @property
    def top(self) -> Scope:
        return self if self.parent is None else self.parent.top

    @property
    def owner(self) -> Scope | None:
        """The class whose method this scope is in."""
        if self.parent is None:
            return None
        return self.parent if self.parent.is_class else self.parent.owner


@dataclass(frozen=True)
class Imported:
    dotted: str


# None is a binding of unknown value, such as a loop's variable.
Binding = Imported | Definition | Parameter | Unknown | None


@dataclass(frozen=True)
class Use:
    """A call, a decorator or a class, and where it stands.

    ``decorated`` is what a decorator is on; ``assigned`` the target of the assignment whose whole
    value a call is.
    """

    source: Source
    node: ast.expr | ast.ClassDef
    scope: Scope
    conditional: bool
    decorated: Definition | None = None
    assigned: ast.expr | None = None


def read(source: Source, scope: Scope) -> list[Use]:
    """Fills `scope`, the module's, and those in it; its uses, in the order of the source."""
    reader = _Reader(source, scope)
    reader.visit(source.tree)
    return reader.uses


class _Reader(ast.NodeVisitor):
    """Fills the scopes of a module, and lists its uses."""

    def __init__(self, source: Source, scope: Scope) -> None:
        self.source, self.scope = source, scope
        self.uses: list[Use] = []
        self.conditions = 0

    def _bind(self, name: str, binding: Binding) -> None:
        scope = self.scope.top if name in self.scope.globals else self.scope
        scope.bindings.setdefault(name, []).append(binding)

    def _use(
        self,
        node: ast.expr | ast.ClassDef,
        decorated: Definition | None = None,
        assigned: ast.expr | None = None,
    ) -> None:
        conditional = self.conditions > 0
        self.uses.append(Use(self.source, node, self.scope, conditional, decorated, assigned))

    # Imports

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            name = alias.asname or alias.name.partition(".")[0]
            self._bind(name, Imported(alias.name if alias.asname else name))

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        parts = self.source.module.split(".")
        up = node.level - (1 if self.source.is_package else 0)
        start = parts[: len(parts) - up] if node.level else []
        module = ".".join([*start, *([node.module] if node.module else [])])
        for alias in node.names:
            if alias.name == "*":
                self.scope.top.stars.append(module)
            else:
                self._bind(alias.asname or alias.name, Imported(f"{module}.{alias.name}"))

    # Definitions

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        inside = Scope(self.source.module, self.scope.inner(node.name), self.scope)
        definition = Definition(self.source.module, inside.qualname, node, inside)
        self._decorators(node, definition)
        self._bind(node.name, definition)
        for default in [*node.args.defaults, *filter(None, node.args.kw_defaults)]:
            self.visit(default)
        static = any(
            isinstance(d, ast.Name) and d.id == "staticmethod" for d in node.decorator_list
        )
        self._parameters(node.args, definition, int(self.scope.is_class and not static))
        self._inside(inside, node.body)

    visit_AsyncFunctionDef = visit_FunctionDef  # noqa: N815

    def visit_Lambda(self, node: ast.Lambda) -> None:
        inside = Scope(self.source.module, self.scope.inner("<lambda>"), self.scope)
        definition = Definition(self.source.module, inside.qualname, node, inside)
        self._parameters(node.args, definition, 0)
        inside.returns.append(node.body)
        self._inside(inside, [node.body])

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        inside = Scope(self.source.module, self.scope.inner(node.name), self.scope, is_class=True)
        definition = Definition(self.source.module, inside.qualname, node, inside)
        self._decorators(node, definition)
        self._bind(node.name, definition)
        self._use(node, definition)
        for base in [*node.bases, *(keyword.value for keyword in node.keywords)]:
            self.visit(base)
        self._inside(inside, node.body)

    def _decorators(
        self, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef, definition: Definition
    ) -> None:
        for decorator in node.decorator_list:
            self._use(decorator, definition)
            for child in ast.iter_child_nodes(decorator):  # the decorator itself is that use
                self.visit(child)

    def _parameters(self, arguments: ast.arguments, function: Definition, bound: int) -> None:
        """`bound` parameters come from the object: their number is negative."""
        names = [*arguments.posonlyargs, *arguments.args]
        for place, argument in enumerate([*names, *arguments.kwonlyargs]):
            parameter = Parameter(function, argument.arg, place - bound)
            function.scope.bindings[argument.arg] = [parameter]
        for rest in filter(None, (arguments.vararg, arguments.kwarg)):
            function.scope.bindings[rest.arg] = [None]

    def _inside(self, scope: Scope, body: Sequence[ast.AST]) -> None:
        before, conditions = self.scope, self.conditions
        self.scope, self.conditions = scope, 0
        for node in body:
            self.visit(node)
        self.scope, self.conditions = before, conditions

    def visit_Return(self, node: ast.Return) -> None:
        if node.value is not None:
            self.scope.returns.append(node.value)
            self.visit(node.value)

    # Bindings

    def visit_Global(self, node: ast.Global) -> None:
        self.scope.globals.update(node.names)

    def visit_Assign(self, node: ast.Assign) -> None:
        for target in node.targets:
            self._assign(target, node.value)
        self._assigned(node.targets[0], node.value)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self._assign(node.target, node.value)
            self._assigned(node.target, node.value)

    def visit_NamedExpr(self, node: ast.NamedExpr) -> None:
        self._assign(node.target, node.value)
        self.visit(node.value)

    def _assigned(self, target: ast.expr, value: ast.expr) -> None:
        self.visit(target)
        if isinstance(value, ast.Call):
            self._use(value, assigned=target)
            self.generic_visit(value)
        else:
            self.visit(value)

    def _assign(self, target: ast.expr, value: ast.expr | None) -> None:
        binding = None if value is None else Unknown(value, self.scope)
        if isinstance(target, ast.Name):
            self._bind(target.id, binding)
        elif isinstance(target, ast.Attribute):
            if _is_self(target.value, self.scope) and (owner := self.scope.owner):
                owner.attributes.setdefault(target.attr, []).append(binding)
        elif isinstance(target, ast.Tuple | ast.List):
            parts: Sequence[ast.expr | None] = [None] * len(target.elts)
            if isinstance(value, ast.Tuple | ast.List) and len(value.elts) == len(parts):
                parts = value.elts
            for element, part in zip(target.elts, parts, strict=True):
                self._assign(element, part)
        elif isinstance(target, ast.Starred):
            self._assign(target.value, None)

    def _loop(self, node: ast.For | ast.AsyncFor | ast.comprehension) -> None:
        self._assign(node.target, None)
        self.generic_visit(node)

    visit_For = visit_AsyncFor = visit_comprehension = _loop  # noqa: N815

    def visit_withitem(self, node: ast.withitem) -> None:
        if node.optional_vars is not None:
            self._assign(node.optional_vars, None)
        self.generic_visit(node)

    def visit_ExceptHandler(self, node: ast.ExceptHandler) -> None:
        if node.name:
            self._bind(node.name, None)
        self._conditionally(node)

    # Uses

    def visit_Call(self, node: ast.Call) -> None:
        self._use(node)
        self.generic_visit(node)

    def _conditionally(self, node: ast.AST) -> None:
        self.conditions += 1
        self.generic_visit(node)
        self.conditions -= 1

    visit_If = visit_IfExp = visit_BoolOp = visit_Match = _conditionally  # noqa: N815


def _is_self(node: ast.expr, scope: Scope) -> bool:
    """Whether the name is the first parameter of the method that the scope is, or is in."""
    if not isinstance(node, ast.Name):
        return False
    here: Scope | None = scope
    while here is not None and node.id not in here.bindings:
        here = here.parent
    return here is not None and any(
        isinstance(binding, Parameter) and binding.number < 0 for binding in here.bindings[node.id]
    )
