"""What the names in a package's source may stand for, as far as source alone tells.

An abstract reading that ignores order: a name that is bound several times stands for each of its
bindings. So ``compile = torch.compile if FLAG else identity`` may be torch.compile.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence

from automodel_rms_norm.gate.scan.scopes import (
    Binding,
    Definition,
    Imported,
    Parameter,
    Scope,
    Unknown,
    Use,
    read,
)
from automodel_rms_norm.gate.scan.sources import Source

__all__ = ["Names", "Value"]

# A str is the dotted name of something outside the package, or of one of its modules.
Value = str | Definition | Parameter | Unknown


class Names:
    """The scopes of all modules of a package, and the uses in them, in the order of the source."""

    def __init__(self, sources: Sequence[Source]) -> None:
        self.modules = {source.module: Scope(source.module) for source in sources}
        self.uses: list[Use] = []
        self._known: dict[object, list[Value]] = {}
        for source in sources:
            self.uses += read(source, self.modules[source.module])

    def values(self, node: ast.expr, scope: Scope) -> list[Value]:
        """What the expression may stand for; itself, as Unknown, where that is not a name."""
        return list(dict.fromkeys(self._values(node, scope)))

    def _values(self, node: ast.expr, scope: Scope) -> list[Value]:
        match node:
            case ast.Name(id=name):
                return self._lookup(name, node, scope)
            case ast.Attribute(value=value):
                bases = self.values(value, scope)
                return [found for base in bases for found in self._member(base, node, scope)]
            case ast.IfExp(body=body, orelse=orelse):
                return [*self.values(body, scope), *self.values(orelse, scope)]
            case ast.BoolOp(values=parts):
                return [found for part in parts for found in self.values(part, scope)]
            case ast.NamedExpr(value=value):
                return self.values(value, scope)
            case ast.Call(func=ast.Name(id="getattr"), args=[value, ast.Constant(str(name)), *_]):
                return self.values(ast.Attribute(value, name, ast.Load()), scope)
        return [Unknown(node, scope)]

    def definition(self, function: str) -> Definition | None:
        """The function or class of the package that ``module:qualname`` names."""
        module, _, qualname = function.partition(":")
        found: Scope | None = self.modules.get(module)
        definition: Definition | None = None
        for name in qualname.split("."):
            bindings = found.bindings.get(name, ()) if found else ()
            definition = next((b for b in bindings if isinstance(b, Definition)), None)
            found = definition.scope if definition else None
        return definition

    def _member(self, base: Value, node: ast.Attribute, scope: Scope) -> list[Value]:
        if isinstance(base, str):
            return self._dotted(f"{base}.{node.attr}")
        owner: Scope | None = None
        if isinstance(base, Definition) and base.scope.is_class:
            owner = base.scope
        elif isinstance(base, Parameter) and base.number < 0:
            owner = scope.owner
        if owner is None:
            return [Unknown(node, scope)]
        bindings = [*owner.bindings.get(node.attr, ()), *owner.attributes.get(node.attr, ())]
        return self._chase(bindings, node, scope) or [Unknown(node, scope)]

    def _lookup(self, name: str, node: ast.expr, scope: Scope) -> list[Value]:
        here: Scope | None = scope
        while here is not None:
            if name in here.globals:
                here = here.top
            if name in here.bindings and (here is scope or not here.is_class):
                return self._chase(here.bindings[name], node, scope)
            here = here.parent
        stars = scope.top.stars
        return [v for star in stars for v in self._dotted(f"{star}.{name}")] or [
            Unknown(node, scope)
        ]

    def _chase(self, bindings: Sequence[Binding], node: ast.expr, scope: Scope) -> list[Value]:
        found: list[Value] = []
        for binding in bindings:
            if binding is None:
                found.append(Unknown(node, scope))
            elif isinstance(binding, Definition | Parameter):
                found.append(binding)
            else:
                found += self._remembered(binding)
        return list(dict.fromkeys(found))

    def _remembered(self, binding: Imported | Unknown) -> list[Value]:
        if binding not in self._known:
            self._known[binding] = []  # what a name that leads back to itself adds
            self._known[binding] = (
                self._dotted(binding.dotted)
                if isinstance(binding, Imported)
                else self.values(binding.node, binding.scope)
            )
        return self._known[binding]

    def _dotted(self, dotted: str) -> list[Value]:
        """What a dotted name is: of this package where one of its modules has it."""
        module, _, name = dotted.rpartition(".")
        scope = self.modules.get(module)
        if scope is None or dotted in self.modules:
            return [dotted]
        if name not in scope.bindings and not scope.stars:
            return [dotted]
        if dotted not in self._known:
            self._known[dotted] = []
            self._known[dotted] = self._lookup(name, ast.Name(name), scope)
        return self._known[dotted]
