"""python -m tools.house_gates: check size limits and duplicate class names of the source tree. Run by `make check`.

Limits and exceptions are in `tools/house_limits.toml`. The exceptions may only shrink: one that is no longer needed
fails the check too, until it is removed from the file. `--numbers` prints the counts.
"""

from __future__ import annotations

import argparse
import ast
import math
import statistics
import sys
import tokenize
import tomllib
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
LIMITS = Path(__file__).with_name("house_limits.toml")
Function = ast.FunctionDef | ast.AsyncFunctionDef
LAYOUT_TOKENS = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}


@dataclass
class Tree:
    """Counts over the source files below a directory."""

    code_lines: Counter[str] = field(default_factory=Counter)  # by room
    file_lines: dict[str, int] = field(default_factory=dict)
    files: Counter[str] = field(default_factory=Counter)  # by directory
    arguments: dict[str, int] = field(default_factory=dict)
    function_lines: list[int] = field(default_factory=list)
    classes: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    importers: dict[str, set[str]] = field(default_factory=dict)


def count(source: Path) -> Tree:
    """Count over every module of the package in `source`."""
    tree = Tree()
    paths = sorted(source.rglob("*.py"))
    modules = {_dotted(source, path): path for path in paths}
    tree.importers = {name: set() for name, path in modules.items() if path.stem not in ("__init__", "__main__")}
    for name, path in modules.items():
        parsed = ast.parse(path.read_text())
        relative = path.relative_to(source)
        room = relative.parts[0] if len(relative.parts) > 1 else "."
        lines = code_lines(path)
        tree.code_lines[room] += lines
        tree.file_lines[str(relative)] = lines
        if path.stem != "__init__":
            tree.files[str(relative.parent)] += 1
        for node in ast.walk(parsed):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                tree.classes[node.name].append(str(relative))
        for qualified, function in functions(parsed):
            tree.arguments[f"{relative}:{qualified}"] = argument_count(function)
            tree.function_lines.append((function.end_lineno or function.lineno) - function.lineno + 1)
        for imported in imported_modules(parsed, modules):
            if imported in tree.importers and imported != name:
                tree.importers[imported].add(name)
    return tree


def _dotted(source: Path, path: Path) -> str:
    parts = (source.name, *path.relative_to(source).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def code_lines(path: Path) -> int:
    """Lines that hold code: no blank lines, comments or docstrings."""
    with path.open("rb") as file:
        tokens = list(tokenize.tokenize(file.readline))
    lines: set[int] = set()
    for token in tokens[1:]:
        if token.type not in LAYOUT_TOKENS:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            lines.difference_update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(lines)


def functions(node: ast.AST, prefix: str = "") -> Iterator[tuple[str, Function]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, Function | ast.ClassDef):
            name = f"{prefix}{child.name}"
            if isinstance(child, Function):
                yield name, child
            yield from functions(child, f"{name}.")
        else:
            yield from functions(child, prefix)


def argument_count(function: Function) -> int:
    every = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
    return len([argument for argument in every if argument.arg not in ("self", "cls")])


def imported_modules(parsed: ast.Module, modules: Mapping[str, Path]) -> Iterator[str]:
    for node in ast.walk(parsed):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (
                f"{node.module}.{alias.name}" for alias in node.names if f"{node.module}.{alias.name}" in modules
            )


def problems(tree: Tree, limits: Mapping[str, Any]) -> list[str]:
    """Violations of the limits, one sentence each."""
    found = []
    total = sum(tree.code_lines.values())
    if total > limits["code_lines"]:
        found.append(
            f"src has {total} code lines and {limits['code_lines']} are agreed. Remove code, or raise `code_lines` in "
            f"{LIMITS.name} and say in CHANGELOG.md what the new lines are for."
        )
    found += _ratchet("files in a room", dict(tree.files), limits["files_per_room"], limits["more_files"])
    found += _ratchet("code lines in a file", tree.file_lines, limits["lines_per_file"], limits["longer_files"])
    found += _ratchet("arguments", tree.arguments, limits["arguments"], limits["more_arguments"])
    for name, places in sorted(tree.classes.items()):
        if len(places) > 1:
            found.append(
                f"The class name {name} is defined {len(places)} times: {', '.join(places)}. Rename all but one."
            )
    single = sorted(name for name, importers in tree.importers.items() if len(importers) == 1)
    percent, agreed = math.ceil(100 * len(single) / max(len(tree.importers), 1)), limits["one_importer_percent"]
    if percent > agreed:
        found.append(
            f"{len(single)} modules, {percent} % of all, are imported by exactly one other, and {agreed} % are agreed. "
            "Merge a small one into its reader."
        )
    elif percent < agreed:
        found.append(f"Lower `one_importer_percent` in {LIMITS.name} to {percent}.")
    return found


def _ratchet(what: str, found: Mapping[str, int], limit: int, exceptions: Mapping[str, int]) -> list[str]:
    """Violations of one limit: numbers above it without an exception, and exceptions that are not exactly needed."""
    violations = []
    for name, number in sorted(found.items()):
        if name not in exceptions:
            if number > limit:
                violations.append(f"{name}: {number} {what}, and {limit} are agreed.")
        elif number > exceptions[name]:
            violations.append(f"{name}: {number} {what}, and {exceptions[name]} is its exception.")
        elif number < exceptions[name]:
            wanted = f"lower it to {number}" if number > limit else "remove it"
            violations.append(f"{name}: the exception for {what} in {LIMITS.name} is not needed any more: {wanted}.")
    violations += [
        f"{name}: an exception for {what}, but there is no such thing." for name in exceptions if name not in found
    ]
    return violations


def numbers(tree: Tree) -> dict[str, Any]:
    """The counts, as a summary."""
    lengths = sorted(tree.function_lines)
    return {
        "files": len(tree.file_lines),
        "code lines": sum(tree.code_lines.values()),
        "rooms": len([room for room in tree.code_lines if room != "."]),
        "largest room (files)": max(tree.files.values()),
        "longest file (code lines)": max(tree.file_lines.values()),
        "function lines (median, p90, max)": (
            int(statistics.median(lengths)),
            lengths[int(len(lengths) * 0.9)],
            lengths[-1],
        ),
        "most arguments": max(tree.arguments.values()),
        "functions with more than 8 arguments": sum(n > 8 for n in tree.arguments.values()),
        "modules with one importer": sum(len(importers) == 1 for importers in tree.importers.values()),
        "class names defined twice": sum(len(places) > 1 for places in tree.classes.values()),
    }


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.house_gates", description=__doc__)
    parser.add_argument("--numbers", action="store_true", help="print what was counted")
    asked = parser.parse_args()
    tree = count(ROOT / "src" / "shoal")
    if asked.numbers:
        for name, value in numbers(tree).items():
            print(f"{name}: {value}")
        for room, lines in sorted(tree.code_lines.items()):
            print(f"  {room}: {lines} code lines")
    found = problems(tree, tomllib.loads(LIMITS.read_text()))
    print("\n".join(found) if found else "The house is in order.")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
