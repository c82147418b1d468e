"""What a scan can drive of what it found: by a norm's signature, by a recipe, or not and why."""

from __future__ import annotations

import ast
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from automodel_rms_norm.gate.scan.names import Names
from automodel_rms_norm.gate.scan.scopes import Definition
from automodel_rms_norm.gate.scan.sites import COMPILED, Site, find_sites
from automodel_rms_norm.gate.scan.sources import Package

__all__ = ["BY_NORM", "BY_RECIPE", "INSIDE", "Entry", "survey"]

BY_NORM, BY_RECIPE = "norm's signature", "recipe"

INSIDE = "inside"  # the form of what has a recipe and is compiled within what calls it

_COMPUTES_NOTHING = {
    "op schema": "a schema computes nothing",
    "fake kernel": "it computes shapes alone",
    "op autograd": "it runs in the gradient of its op",
    "op vmap rule": "it runs under vmap alone",
    "op dispatch rule": "it runs its op",
}
_WEIGHTS = {"weight", "gamma", "scale"}
_EPSILONS = {"eps", "epsilon", "variance_epsilon"}


@dataclass(frozen=True)
class Entry:
    """A function that the package compiles or makes an op of, and where.

    ``driven`` is BY_NORM, BY_RECIPE or "", and then ``why_not`` says why.
    """

    function: str
    sites: tuple[Site, ...]
    driven: str
    why_not: str

    @property
    def name(self) -> str:
        """The function's name in its module."""
        return self.function.rpartition(":")[2]

    @property
    def site(self) -> Site:
        """What is compiled, and an op as well, is checked as it is compiled."""
        return next((site for site in self.sites if site.kind == COMPILED), self.sites[0])

    @property
    def settings(self) -> str | None:
        """With which the package compiles what is imported; None where that is done, or is not."""
        site = self.site
        done = site.kind != COMPILED or site.form == "decorator"
        return None if done else site.settings


def survey(package: Package, recipes: Collection[str]) -> list[Entry]:
    """Each function once, by file and line; `recipes` are the names of those that have one.

    What has a recipe and is not compiled on its own is there as well, for it is compiled within
    what calls it.
    """
    names = Names(package.sources)
    paths = {source.module: source.path for source in package.sources}
    sites = find_sites(names)
    known = {site.function for site in sites}
    for name in recipes:
        if name not in known and (found := names.definition(name)):
            path, line = paths[found.module], found.node.lineno
            sites.append(Site(COMPILED, INSIDE, path, line, name))
    grouped: dict[tuple[str, str], list[Site]] = {}
    for site in sites:
        where = site.place if site.why_unknown else ""
        grouped.setdefault((site.function, where), []).append(site)
    entries = [_entry(names, same, recipes) for same in grouped.values()]
    return sorted(entries, key=lambda entry: (entry.site.path, entry.site.line))


def _entry(names: Names, sites: Sequence[Site], recipes: Collection[str]) -> Entry:
    entry = Entry(sites[0].function, tuple(sites), "", "")
    definition = None if entry.site.why_unknown else names.definition(entry.function)
    driven, why_not = _driven(names, entry.site, definition, recipes)
    return replace(entry, driven=driven, why_not=why_not)


def _driven(
    names: Names, site: Site, definition: Definition | None, recipes: Collection[str]
) -> tuple[str, str]:
    if site.why_unknown:
        return "", site.why_unknown
    if reason := _COMPUTES_NOTHING.get(site.kind):
        return "", reason
    if site.function in recipes:
        return BY_RECIPE, ""
    if definition is None:
        return "", "no recipe, and it is of another package"
    if _is_norm(definition):
        return BY_NORM, ""
    called = {
        value
        for use in names.uses
        if use.source.module == definition.module  # for speed
        and isinstance(use.node, ast.Call)
        and use.scope.is_in(definition.scope)
        for value in names.values(use.node.func, use.scope)
        if isinstance(value, str)
    }
    if any(name.startswith("torch.distributed.") for name in called):
        return "", "no recipe: it communicates, and needs a process group"
    if definition.is_method:
        return "", "no recipe: it is a method, and needs its module"
    return "", "no recipe, and its arguments are not a norm's"


def _is_norm(definition: Definition) -> bool:
    """Whether it takes (x, weight, eps), by the names of the last two, and nothing else."""
    node = definition.node
    if isinstance(node, ast.ClassDef) or definition.is_method:
        return False
    arguments = [*node.args.posonlyargs, *node.args.args]
    needed = arguments[: len(arguments) - len(node.args.defaults)]
    return (
        len(arguments) >= 3
        and len(needed) <= 3
        and arguments[1].arg in _WEIGHTS
        and arguments[2].arg in _EPSILONS
    )
