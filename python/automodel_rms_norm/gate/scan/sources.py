"""The modules of an installed package, read from disk: nothing of the package is imported."""

from __future__ import annotations

import ast
import sys
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from importlib.machinery import ModuleSpec
from pathlib import Path

__all__ = ["Package", "ScanError", "Source", "read_package"]


class ScanError(Exception):
    """The package cannot be scanned; the message says what to do."""


@dataclass(frozen=True)
class Source:
    """A module that could be parsed. ``path`` is relative to the folder of the package."""

    module: str
    is_package: bool
    path: str
    tree: ast.Module = field(repr=False)


@dataclass(frozen=True)
class Package:
    """``unread`` has the path of each file that is no Python of this interpreter, and why."""

    name: str
    version: str
    sources: tuple[Source, ...]
    unread: dict[str, str]


def read_package(name: str) -> Package:
    """Every module of the package, or of the distribution, `name`.

    Raises:
        ScanError: if it is not installed, or has no Python source.
    """
    found = list(_roots(name))
    if not found:
        raise ScanError(f"no package {name!r} is installed here; pip install {name}")
    sources, unread = list[Source](), dict[str, str]()
    files = [(file, root, module) for module, root in found for file in _files(root)]
    for file, root, module in sorted(files):
        path = str(file.relative_to(root.parent))
        try:
            tree = _parse(file)
        except (SyntaxError, ValueError, RecursionError, OSError) as error:
            unread[path] = f"{type(error).__name__}: {str(error).splitlines()[0]}"
            continue
        sources.append(Source(_dotted(module, root, file), file.stem == "__init__", path, tree))
    if not sources and not unread:
        raise ScanError(f"{name} has no Python source that could be read")
    return Package(name, _version(name), tuple(sources), unread)


def _parse(file: Path) -> ast.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the package's own invalid escapes
        return ast.parse(file.read_bytes(), str(file))


def _files(root: Path) -> Iterator[Path]:
    return root.rglob("*.py") if root.is_dir() else iter([root] if root.suffix == ".py" else [])


def _dotted(module: str, root: Path, file: Path) -> str:
    if file == root:
        return module
    parts = file.relative_to(root).with_suffix("").parts
    return ".".join([module, *(parts[:-1] if parts[-1] == "__init__" else parts)])


# --- Where it is ----------------------------------------------------------------------------------


def _roots(name: str) -> Iterator[tuple[str, Path]]:
    """Dotted name, and folder or file, of what `name` installs."""
    modules = [name] if _spec(name) else _of_distribution(name)
    for module in modules:
        spec = _spec(module)
        if spec is None:
            continue
        for folder in spec.submodule_search_locations or ():
            yield module, Path(folder)
        if not spec.submodule_search_locations and spec.origin:
            yield module, Path(spec.origin)


def _spec(name: str) -> ModuleSpec | None:
    """As importlib.util.find_spec, which would import the parents of a dotted name."""
    path: Sequence[str] | None = None
    spec: ModuleSpec | None = None
    parts = name.split(".")
    if not all(part.isidentifier() for part in parts):
        return None
    for count in range(1, len(parts) + 1):
        dotted = ".".join(parts[:count])
        finders = (getattr(finder, "find_spec", None) for finder in sys.meta_path)
        specs = (find(dotted, path) for find in finders if find)
        spec = next((found for found in specs if found), None)
        if spec is None:
            return None
        path = spec.submodule_search_locations or []
    return spec


def _of_distribution(name: str) -> list[str]:
    """The packages of a distribution: nemo-automodel has nemo_automodel."""
    if not _installed(name):
        return []
    wanted = metadata.distribution(name).name
    return [
        module
        for module, distributions in metadata.packages_distributions().items()
        if wanted in distributions
    ]


def _version(name: str) -> str:
    owners = metadata.packages_distributions().get(name.partition(".")[0], [name])
    versions = dict.fromkeys(metadata.version(owner) for owner in owners if _installed(owner))
    return ", ".join(versions) or "of unknown version"


def _installed(distribution: str) -> bool:
    try:
        metadata.version(distribution)
    except (metadata.PackageNotFoundError, ValueError):
        return False
    return True
