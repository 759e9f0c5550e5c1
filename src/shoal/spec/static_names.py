"""The names that a module defines, read from its source. Nothing is imported, so checking is fast and safe."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import Literal

MAX_STARS = 6


BindingKind = Literal["class", "function", "value", "import", "other"]


@dataclass(frozen=True)
class Binding:
    """How a statement binds a name. Of an import: `module` and `level` as written, and the `name` in it ('': the module
    itself)."""

    kind: BindingKind
    module: str = ""
    level: int = 0
    name: str = ""


@dataclass(frozen=True)
class ModuleNames:
    """The top level of a module. `is_dynamic`: it defines names at run time, so only an import can list them."""

    names: frozenset[str]
    exported: tuple[str, ...] = ()
    star_imports: tuple[tuple[int, str], ...] = ()
    is_dynamic: bool = False
    bindings: Mapping[str, tuple[Binding, ...]] = field(default_factory=dict)


def find_module(name: str, *, first: str = "") -> ModuleSpec | None:
    """The spec that `import` would find with the directory `first` on sys.path; no parent module is executed."""
    top, *rest = name.split(".")
    spec = _find_top(top, first)
    for part in rest:
        if spec is None or spec.submodule_search_locations is None:
            return None
        spec = _find_submodule(f"{spec.name}.{part}", list(spec.submodule_search_locations))
    return spec


def _find_top(name: str, first: str) -> ModuleSpec | None:
    """A plain directory of the name has the lowest priority, as in an import."""
    own = PathFinder.find_spec(name, [first]) if first else None
    return own if own and own.origin else _ask_finders(name, None) or own


def _find_submodule(name: str, path: list[str]) -> ModuleSpec | None:
    try:
        return _ask_finders(name, path)
    except KeyError:  # a directory without __init__.py: Python would need its parent imported
        spec = ModuleSpec(name, None, is_package=True)
        folders = (Path(folder, name.rpartition(".")[2]) for folder in path)
        spec.submodule_search_locations = [str(folder) for folder in folders if folder.is_dir()]
        return spec


def _ask_finders(name: str, path: list[str] | None) -> ModuleSpec | None:
    """Ask all finders, not only the one for sys.path: packages installed in editable mode have their own."""
    for finder in sys.meta_path:
        find = getattr(finder, "find_spec", None)
        if find and (spec := find(name, path)):
            return spec  # type: ignore[no-any-return]
    return None


def siblings(name: str, *, first: str = "") -> list[str]:
    """The full names of the modules beside a module that was not found."""
    parent = name.rpartition(".")[0]
    spec = find_module(parent, first=first) if parent else None
    folders = list(spec.submodule_search_locations or ()) if spec else [] if parent else [first]
    prefix = f"{parent}." if parent else ""
    return sorted(prefix + stem for folder in folders for stem in _modules(Path(folder)))


def _modules(folder: Path) -> Iterator[str]:
    for entry in folder.iterdir() if folder.is_dir() else ():
        if entry.suffix == ".py" and entry.stem != "__init__":
            yield entry.stem
        elif (entry / "__init__.py").is_file():
            yield entry.name


def names_of_module(spec: ModuleSpec, *, first: str = "", depth: int = 0) -> ModuleNames:
    """The names that `module.name` can find, including star imports."""
    if spec.origin is None or not spec.origin.endswith(".py"):
        return ModuleNames(frozenset(), is_dynamic=spec.origin is not None)
    package = spec.name if spec.submodule_search_locations is not None else spec.name.rpartition(".")[0]
    return names_in_file(Path(spec.origin), package=package, first=first, depth=depth)


def names_in_file(path: Path, *, package: str = "", first: str = "", depth: int = 0) -> ModuleNames:
    """The same for a source file, inside or outside a package."""
    own = parse_names(path)
    for level, module in own.star_imports:
        own = _with_star_import(own, absolute_module(package, level, module), first=first, depth=depth)
    return own


def _with_star_import(own: ModuleNames, module: str, *, first: str, depth: int) -> ModuleNames:
    spec = find_module(module, first=first) if depth < MAX_STARS else None
    if spec is None:
        return ModuleNames(own.names, own.exported, is_dynamic=True)
    other = names_of_module(spec, first=first, depth=depth + 1)
    return ModuleNames(
        own.names | other.names, own.exported + other.exported, is_dynamic=own.is_dynamic or other.is_dynamic
    )


def absolute_module(package: str, level: int, module: str) -> str:
    """`from ..x import *` in package a.b is a.x."""
    if level == 0:
        return module
    base = package.split(".")[: len(package.split(".")) - level + 1]
    return ".".join([*base, module] if module else base)


def parse_names(path: Path) -> ModuleNames:
    """Parse a source file, once per version of it. The caller handles SyntaxError, OSError and ValueError."""
    stat = path.stat()
    return _parse_names(str(path), stat.st_mtime_ns, stat.st_size)


@lru_cache(maxsize=256)
def _parse_names(path: str, mtime_ns: int, size: int) -> ModuleNames:
    tree = ast.parse(Path(path).read_bytes(), filename=path)
    bindings: dict[str, tuple[Binding, ...]] = {}
    exported: list[str] = []
    stars: list[tuple[int, str]] = []
    is_open = False
    for node in _top_level(tree.body):
        for name, binding in _bindings(node):
            bindings[name] = (*bindings.get(name, ()), binding)
        exported += _exported_names(node)
        stars += _star_imports(node)
        is_open = is_open or _defines_dynamic_names(node)
    names = frozenset([*bindings, *exported])
    shown = exported or sorted(n for n in names if not n.startswith("_"))
    return ModuleNames(names, tuple(shown), tuple(stars), is_open or "__getattr__" in names, bindings)


def _top_level(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements that run on import, including those inside if, try, with and loops."""
    for node in body:
        yield node
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            continue
        for part in ("body", "orelse", "finalbody"):
            yield from _top_level(getattr(node, part, ()))
        for handler in getattr(node, "handlers", ()):
            yield from _top_level(handler.body)


def _bindings(node: ast.stmt) -> Iterator[tuple[str, Binding]]:
    """The names that a statement binds."""
    if isinstance(node, ast.ClassDef):
        yield node.name, Binding("class")
    elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        yield node.name, Binding("function")
    elif isinstance(node, ast.Import):
        for a in node.names:
            top = a.name.partition(".")[0]
            yield a.asname or top, Binding("import", a.name if a.asname else top)
    elif isinstance(node, ast.ImportFrom):
        for a in node.names:
            if a.name != "*":
                yield a.asname or a.name, Binding("import", node.module or "", node.level, a.name)
    else:
        targets = [*getattr(node, "targets", ()), getattr(node, "target", None)]
        targets += [item.optional_vars for item in getattr(node, "items", ())]
        inside = (n for target in filter(None, targets) for n in ast.walk(target))
        kind: BindingKind = "value" if _is_literal(node) else "other"
        yield from ((n.id, Binding(kind)) for n in inside if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store))


def _is_literal(node: ast.stmt) -> bool:
    """Whether a statement assigns a number, a text or a collection, which nobody can call."""
    literals = (ast.Constant, ast.JoinedStr, ast.List, ast.Tuple, ast.Set, ast.Dict)
    plain_targets = all(isinstance(target, ast.Name) for target in getattr(node, "targets", ()))
    return isinstance(node, ast.Assign | ast.AnnAssign) and plain_targets and isinstance(node.value, literals)


def _exported_names(node: ast.stmt) -> list[str]:
    """The literal names in `__all__ = [...]` and `__all__ += [...]`."""
    targets = getattr(node, "targets", None) or [getattr(node, "target", None)]
    if not any(isinstance(t, ast.Name) and t.id == "__all__" for t in targets):
        return []
    items = getattr(getattr(node, "value", None), "elts", ())
    return [e.value for e in items if isinstance(e, ast.Constant) and isinstance(e.value, str)]


def _star_imports(node: ast.stmt) -> list[tuple[int, str]]:
    if isinstance(node, ast.ImportFrom) and any(a.name == "*" for a in node.names):
        return [(node.level, node.module or "")]
    return []


def _defines_dynamic_names(node: ast.stmt) -> bool:
    """Whether a statement calls globals(), vars(), exec() or setattr(), which may define any name."""
    if not isinstance(node, ast.Expr | ast.Assign | ast.AugAssign | ast.For):
        return False
    makers = ("globals", "vars", "exec", "setattr")
    calls = (n.func for n in ast.walk(node) if isinstance(n, ast.Call))
    return any(isinstance(f, ast.Name) and f.id in makers for f in calls)
