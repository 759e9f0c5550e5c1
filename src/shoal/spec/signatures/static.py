"""Arguments of a reference compared with the source of what it names, so that all mistakes of a job are told at once.

Where the source does not tell (decorators, code in C, a base class of another file), nothing is said: the call will.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from shoal.errors import ShoalError, did_you_mean, error
from shoal.spec.definitions import Definition

_LEADING = {"model": 0, "task": 0, "factory": 0, "optimizer": 1, "schedule": 1}
"""Arguments that Shoal passes by position, for fields whose callables get nothing else from it."""
_CALLED_LATER = ("loss", "augment", "transform")
"""Fields whose classes are made with the arguments alone; their functions get batches as well."""
MAX_BASES = 4


@dataclass(frozen=True)
class Parameters:
    """What a class or function can be given by name, and what it must be given."""

    names: tuple[str, ...]
    required: tuple[str, ...]
    is_class: bool


def argument_problems(
    name: str, args: Mapping[str, Any], definition: Definition, *, field: str
) -> Iterator[tuple[str, ShoalError]]:
    """Wrong and missing arguments of the reference, each with the argument that is wrong ('' if one is missing)."""
    called = name.rpartition(":")[2].rpartition(".")[2]
    found = read_parameters(definition.path, called) if definition.path.endswith(".py") else None
    if found is None:
        return
    for word in args:
        if word not in found.names:
            fix = did_you_mean(word, found.names) or "Remove it: there are no arguments to set."
            yield word, error("SH205", f"{name} takes no argument '{word}'", fix=fix)
    leading = 0 if field in _CALLED_LATER and found.is_class else _LEADING.get(field)
    if leading is not None:
        for word in found.required[leading:]:
            if word not in args:
                yield "", error("SH205", f"{name} needs the argument '{word}'", fix=f"Add `{word}:` under `args`.")


def read_parameters(path: str, name: str) -> Parameters | None:
    """The parameters of a class or function at the top of a file; None if its source does not tell."""
    try:
        stat = Path(path).stat()
        return _read(path, name, stat.st_mtime_ns)
    except (OSError, SyntaxError, ValueError):
        return None


@lru_cache(maxsize=256)
def _read(path: str, name: str, mtime_ns: int) -> Parameters | None:
    body = ast.parse(Path(path).read_bytes(), filename=path).body
    tops = [n for n in body if isinstance(n, ast.ClassDef | ast.FunctionDef)]
    found = {node.name: node for node in tops}
    if name not in found or sum(node.name == name for node in tops) > 1:
        return None
    node = found[name]
    if isinstance(node, ast.FunctionDef):
        return None if node.decorator_list else _parameters(node.args, skip=0, is_class=False)
    made = _constructor(node, found, MAX_BASES)
    return None if made is None else _parameters(made.args, skip=1, is_class=True)


def _constructor(
    node: ast.ClassDef, found: Mapping[str, ast.ClassDef | ast.FunctionDef], bases_left: int
) -> ast.FunctionDef | None:
    """`__init__` of the class, or of its only base in the same file."""
    methods = {one.name: one for one in node.body if isinstance(one, ast.FunctionDef)}
    if node.decorator_list or node.keywords or "__new__" in methods or not bases_left:
        return None
    own = methods.get("__init__")
    if own is not None:
        return None if own.decorator_list else own
    base = node.bases[0] if len(node.bases) == 1 else None
    above = found.get(base.id) if isinstance(base, ast.Name) else None
    return _constructor(above, found, bases_left - 1) if isinstance(above, ast.ClassDef) else None


def _parameters(args: ast.arguments, *, skip: int, is_class: bool) -> Parameters | None:
    if args.kwarg is not None or args.vararg is not None or args.posonlyargs:
        return None
    named = [one.arg for one in args.args[skip:]]
    optional = len(args.defaults)
    required = named[: len(named) - optional] if optional else named
    only = [one.arg for one in args.kwonlyargs]
    required += [word for word, default in zip(only, args.kw_defaults, strict=True) if default is None]
    return Parameters((*named, *only), tuple(required), is_class)
