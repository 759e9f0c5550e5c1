"""Where the code of a name is defined, and what it is: read from source, through imports; nothing is executed."""

from __future__ import annotations

import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Literal

from shoal.spec import static_names
from shoal.spec.static_names import Binding, ModuleNames

MAX_IMPORTS = 12
_OWN_PLACES = tuple(f"{sysconfig.get_path(kind)}/" for kind in ("stdlib", "platstdlib"))


@dataclass(frozen=True)
class Definition:
    """The code that a name leads to. `module` is its dotted name, '' for a file that is named by its path; `path` is
    its source, '' if it has none. `other`: only executing the module would tell what it is."""

    kind: Literal["class", "function", "value", "module", "other"]
    module: str = ""
    path: str = ""

    @property
    def is_standard_library(self) -> bool:
        return is_standard_library(self.module, self.path)

    @property
    def place(self) -> str:
        return self.module or Path(self.path).name


def is_standard_library(module: str, path: str) -> bool:
    """Whether code comes with Python itself. A user's own file of the same name does not."""
    if not path.endswith((".py", ".so")):
        return module.partition(".")[0] in sys.stdlib_module_names
    return path.startswith(_OWN_PLACES) and not {"site-packages", "dist-packages"} & set(Path(path).parts)


def definitions_in_file(path: Path, attributes: tuple[str, ...], *, base: str) -> list[Definition]:
    """Where `file.py:a.b` leads. Several if the file binds the name in several ways."""
    return list(_in_source(_Source(path, "", ""), attributes, base, MAX_IMPORTS))


def definitions_in_module(module: str, attributes: tuple[str, ...], *, base: str) -> list[Definition]:
    """Where `package.module:a.b` leads. None if there is no such module."""
    return list(_in_module(module, attributes, base, MAX_IMPORTS))


@dataclass(frozen=True)
class _Source:
    path: Path
    module: str
    package: str


def _in_module(module: str, attributes: tuple[str, ...], base: str, imports_left: int) -> Iterator[Definition]:
    spec = static_names.find_module(module, first=base)
    if spec is None:
        return
    origin = spec.origin or ""
    if not attributes:
        yield Definition("module", module, origin)
    elif static_names.find_module(f"{module}.{attributes[0]}", first=base) is not None and not _binds(spec, attributes):
        yield from _in_module(f"{module}.{attributes[0]}", attributes[1:], base, imports_left)
    elif not origin.endswith(".py"):  # written in C, or a namespace
        yield Definition("other", module, origin)
    else:
        package = module if spec.submodule_search_locations is not None else module.rpartition(".")[0]
        yield from _in_source(_Source(Path(origin), module, package), attributes, base, imports_left)


def _binds(spec: ModuleSpec, attributes: tuple[str, ...]) -> bool:
    """Whether a module binds the name to something else than its submodule of that name."""
    name, origin = attributes[0], spec.origin or ""
    if not origin.endswith(".py"):
        return False
    itself = {(1, "", name), (0, spec.name, name)}
    bindings = static_names.parse_names(Path(origin)).bindings.get(name, ())
    return any((one.level, one.module, one.name) not in itself for one in bindings)


def _in_source(source: _Source, attributes: tuple[str, ...], base: str, imports_left: int) -> Iterator[Definition]:
    names = static_names.parse_names(source.path)
    bindings = names.bindings.get(attributes[0], ())
    if imports_left <= 0:
        yield Definition("other", source.module, str(source.path))
    elif bindings:
        for binding in dict.fromkeys(bindings):
            yield from _follow(source, binding, attributes, base, imports_left - 1)
    else:
        yield from _through_stars(source, names, attributes, base, imports_left - 1)


def _follow(
    source: _Source, binding: Binding, attributes: tuple[str, ...], base: str, imports_left: int
) -> Iterator[Definition]:
    if binding.kind == "import":
        module = static_names.absolute_module(source.package, binding.level, binding.module)
        if binding.level and not source.package:  # a file that is named by its path imports a file beside it
            yield from _beside(source, binding, attributes, base, imports_left)
            return
        further = ((binding.name,) if binding.name else ()) + attributes[1:]
        found = list(_in_module(module, further, base, imports_left))
        yield from found or [Definition("other", module)]  # not installed: the import will fail
    else:
        # What a class or a function has as its attributes is code of the same place.
        kind = binding.kind if len(attributes) == 1 else "other"
        yield Definition(kind, source.module, str(source.path))


def _beside(
    source: _Source, binding: Binding, attributes: tuple[str, ...], base: str, imports_left: int
) -> Iterator[Definition]:
    further = (*filter(None, binding.module.split(".")), binding.name)
    folder = source.path.parents[binding.level - 1]
    while further and (folder / further[0]).is_dir():
        folder, further = folder / further[0], further[1:]
    path = folder / f"{further[0]}.py" if further else folder / "__init__.py"
    rest = further[1:] + attributes[1:]
    if not path.is_file():
        yield Definition("other", "", str(path))
    elif rest:
        yield from _in_source(_Source(path, "", ""), rest, base, imports_left)
    else:
        yield Definition("module", "", str(path))


def _through_stars(
    source: _Source, names: ModuleNames, attributes: tuple[str, ...], base: str, imports_left: int
) -> Iterator[Definition]:
    """The name comes from a star import, or the module makes it as it runs."""
    for level, module in reversed(names.star_imports):
        full = static_names.absolute_module(source.package, level, module)
        spec = static_names.find_module(full, first=base)
        if spec and attributes[0] in static_names.names_of_module(spec, first=base).names:
            yield from _in_module(full, attributes, base, imports_left)
            return
    yield Definition("other", source.module, str(source.path))
