"""A YAML file as plain data, with the line of each field.

Avoids the traps of YAML 1.1: `1e-3` is a number, `010` is ten, `12:30` and `2024-01-01` are text, and a key is always
the text that was written, even if it is `on`, `no` or `1`.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from yaml.constructor import SafeConstructor

from shoal.errors import ErrorGroup, ShoalError, error, suggest_path

SET_OPTION = "--set"
YAML_FILES = (".yaml", ".yml")
MAX_BYTES = 4 << 20
MAX_NODES = 200_000
MAX_FAST_DEPTH = 1000


@dataclass(frozen=True)
class YamlDocument:
    """The content of a file. `lines` maps a field (`data.split.folds`) to its line, or to `--set`."""

    name: str
    data: dict[str, Any]
    lines: Mapping[str, int | str] = field(default_factory=dict)

    def where(self, field_path: str) -> str:
        """`job.yaml:12 data.split.folds`: the line of the field, or of the nearest section around it."""
        field_path = self._as_written(field_path)
        line = self._line(field_path)
        if line == SET_OPTION:
            return f"{SET_OPTION} {field_path}"
        return f"{self.name}:{line} {field_path}".rstrip() if line else f"{self.name} {field_path}".rstrip()

    def _as_written(self, field_path: str) -> str:
        """The field as the user wrote it: `loss.name` becomes `loss` if the file has `loss: MSELoss`."""
        here: Any = self.data
        keys = field_path.split(".")
        place = 0
        while place < len(keys):
            if not isinstance(here, dict | list):
                return ".".join(keys[:place])
            here, used = _step_down(here, keys[place:])
            place += used
        return field_path

    def _line(self, field_path: str) -> int | str:
        while field_path and field_path not in self.lines:
            field_path = field_path.rpartition(".")[0]
        return self.lines.get(field_path, 0)


def _step_down(section: dict[str, Any] | list[Any], keys: Sequence[str]) -> tuple[Any, int]:
    """What the first of these keys lead to, and how many they are: a key of a search space may have dots of its own."""
    if isinstance(section, list):
        return section[int(keys[0])], 1
    for used in range(len(keys), 0, -1):
        if (key := ".".join(keys[:used])) in section:
            return section[key], used
    return {}, 1


def read_document(path: str | Path, *, own: bool = False) -> YamlDocument:
    """Read a job file; the errors name its lines. `own`: `write_value` wrote it."""
    return parse_document(_read_text(Path(path)), name=str(path), own=own)


def parse_document(text: str, *, name: str, own: bool = False) -> YamlDocument:
    """Parse a YAML text whose top level is a mapping."""
    data, lines = _parse(text, name, own=own)
    for number, line in enumerate(text.splitlines() if isinstance(data, str) else (), 1):
        if no_space := _no_space_error(line, f"{name}:{number}"):
            raise no_space
    if not isinstance(data, dict):
        found = "the file is empty" if data is None else "the file is not made of `field: value` lines"
        raise error("SH105", found, where=name, fix="Write fields: data:, model:, loss:, epochs: …")
    return YamlDocument(name, data, lines)


def parse_value(text: str, *, name: str) -> Any:
    """One value, as after `--set field=`."""
    return _parse(text, name)[0]


def write_value(data: Any) -> str:
    """YAML text that `parse_document` reads back to equal data."""
    text = _dump(data, readable=True)
    # PyYAML writes Unicode line breaks unescaped, and then reads them as line breaks.
    return _dump(data, readable=False) if re.search("[\x85\u2028\u2029]", text) else text


def _dump(data: Any, *, readable: bool) -> str:
    dumper = _FastDumper if _FastDumper and str(data).isascii() else _Yaml12Dumper  # libyaml escapes some letters
    return yaml.dump(data, Dumper=dumper, sort_keys=False, allow_unicode=readable, width=100)


def _read_text(path: Path) -> str:
    try:
        size = path.stat().st_size
        if path.is_dir():
            fix = suggest_path(path / "job.yaml", suffixes=YAML_FILES)
            raise error("SH101", "this is a directory, not a job file", where=str(path), fix=fix)
        if size > MAX_BYTES:
            raise error("SH101", f"the file has {size:,} bytes, too many for a job file", where=str(path))
        return path.read_bytes().decode("utf-8-sig")
    except FileNotFoundError:
        fix = suggest_path(path, suffixes=YAML_FILES)
        raise error("SH101", "no such file", where=str(path), fix=fix) from None
    except OSError as failure:
        raise error("SH101", f"cannot be read: {failure.strerror}", where=str(path)) from None
    except UnicodeDecodeError as failure:
        line = failure.object[: failure.start].count(b"\n") + 1
        message = f"byte {failure.start} (0x{failure.object[failure.start]:02x}) is not UTF-8 text"
        raise error("SH102", message, where=f"{path}:{line}", fix="Save the file as UTF-8.") from None


# ---- YAML ----


class _Yaml12Loader(yaml.SafeLoader):
    """SafeLoader with the scalars of YAML 1.2, except that yes, no, on and off are booleans."""


class _Yaml12Dumper(yaml.SafeDumper):
    """Quotes texts that `_Yaml12Loader` would read as another type."""


_BOOL = re.compile(r"yes|no|on|off|true|false", re.IGNORECASE)
_INT = re.compile(r"[-+]?[0-9][0-9_]*|0o[0-7]+|0x[0-9a-fA-F]+")
_FLOAT = re.compile(
    r"[-+]?(?:[0-9][0-9_]*\.?|[0-9][0-9_]*\.[0-9_]+|\.[0-9]+)(?:[eE][-+]?[0-9]+)?|[-+]?\.inf|\.nan",
    re.IGNORECASE,
)
_TAG = "tag:yaml.org,2002:"


def _set_resolvers() -> None:
    _Yaml12Loader.yaml_implicit_resolvers = {}
    for tag, pattern, first in (
        ("bool", rf"(?:{_BOOL.pattern})$", "yYnNtTfFoO"),
        ("int", rf"(?:{_INT.pattern})$", "-+0123456789"),
        ("float", rf"(?:{_FLOAT.pattern})$", "-+.0123456789"),
        ("null", r"(?:~|null|Null|NULL|)$", "~nN\0"),
        ("merge", r"<<$", "<"),
    ):
        flags = re.IGNORECASE if tag in ("bool", "float") else 0
        keys = [c if c != "\0" else "" for c in first]
        _Yaml12Loader.add_implicit_resolver(_TAG + tag, re.compile(pattern, flags), keys)


def _in_c(name: str) -> Any:
    """A class of PyYAML in C, with the scalars of `_Yaml12Loader`; None if PyYAML was built without libyaml."""
    if not yaml.__with_libyaml__:
        return None
    return type(name, (getattr(yaml, name),), {"yaml_implicit_resolvers": _Yaml12Loader.yaml_implicit_resolvers})


_set_resolvers()
_FastLoader, _FastDumper = _in_c("CSafeLoader"), _in_c("CSafeDumper")
_Yaml12Dumper.yaml_implicit_resolvers = _Yaml12Loader.yaml_implicit_resolvers

_SCALAR_PARSERS: dict[str, Callable[[str], Any]] = {
    _TAG + "str": str,
    _TAG + "null": lambda text: None,
    _TAG + "bool": lambda text: text.lower() in ("yes", "on", "true"),
    _TAG + "int": lambda text: int(text, 0) if text[:2] in ("0o", "0x") else int(text.replace("_", "")),
    _TAG + "float": lambda text: float(re.sub(r"_|\.(?=inf|nan)", "", text.lower())),
}

# Messages of the YAML parser, and their meaning in plain words.
_PLAIN_MESSAGES = (
    (r"character '(.)' that cannot start", r"the value starts with '\1'", r"Put the value in quotes."),
    (r"mapping values are not allowed", "a ':' is in the wrong place",
     "Check the indentation of this line and the one above; put a value that contains ': ' in quotes."),
    (r"could not find expected ':'", "this line has no ':' after the field", "Write `field: value`."),
    (r"found '([]}])'", r"a '\1' that nothing opened", "Remove it, or open the bracket."),
    (r"expected <block end>", "this line is not indented like its neighbours", "Line it up with them."),
    (r"undefined alias|scanning an alias", "an alias (*name) without its anchor (&name)",
     "Put a value that starts with '*' in quotes, or add the anchor."),
    (r"but found another document", "the file holds several documents", "Keep one; remove the line `---`."),
)  # fmt: skip
_NO_SPACE = re.compile(r"\s*(?:- +)?([A-Za-z_][\w.-]*):(?!//)[^\s:]")
_BRACKETS = {"{": "}", "[": "]"}
_BRACKET_TOKENS = re.compile(r"""'[^']*'|"(?:\\.|[^"\\])*"|[ \n]#[^\n]*|\n(?=\w+: )|[][{}]""")


def _parse(text: str, name: str, *, own: bool = False) -> tuple[Any, dict[str, int | str]]:
    walk = _NodeConverter(name)
    try:
        node = _compose(text, own=own)
        value = None if node is None else walk.convert(node, "")
    except yaml.MarkedYAMLError as failure:
        raise _yaml_error(failure, text, name) from None
    except yaml.reader.ReaderError as failure:
        where = f"{name}:{text[: failure.position].count(chr(10)) + 1}"
        message = f"the character {chr(int(failure.character))!r} is not allowed"
        raise error("SH102", message, where=where) from None
    except RecursionError:
        raise error("SH102", "sections are nested too deeply", where=name) from None
    if walk.problems:
        raise ErrorGroup(walk.problems)
    return value, walk.lines


def _compose(text: str, *, own: bool) -> yaml.Node | None:
    """The nodes of the text. libyaml is ten times as fast, but it accepts some mistakes and recurses on the C stack: it
    gets only texts that were written here, and none that may be nested deeply."""
    deepest = text.count("[") + text.count("{") + max(map(len, text.splitlines()), default=0)
    if own and _FastLoader is not None and deepest < MAX_FAST_DEPTH:
        with contextlib.suppress(yaml.YAMLError):
            fast: yaml.Node | None = yaml.compose(text, Loader=_FastLoader)
            return fast
    node: yaml.Node | None = yaml.compose(text, Loader=_Yaml12Loader)
    return node


def _yaml_error(failure: yaml.MarkedYAMLError, text: str, name: str) -> ShoalError:
    """The error at the place where the mistake is, which may be far above the line at which the parser noticed it."""
    noticed = failure.problem_mark or failure.context_mark
    problem = f"{failure.problem or ''} {failure.context or ''}".strip()
    if noticed is None:
        return error("SH102", problem, where=name)
    lines = text.splitlines()
    begun = failure.context_mark or noticed
    for found in (
        _bracket_error(problem, text, begun, noticed, name),
        _quote_error(problem, lines, begun, name),
        _tab_error(problem, lines, noticed, name),
        _missing_space_error(problem, lines, begun, noticed, name),
        _anchor_error(problem, begun, noticed, name),
    ):
        if found is not None:
            return found
    for pattern, message, fix in _PLAIN_MESSAGES:
        if match := re.search(pattern, problem):
            place = begun if "could not find expected ':'" in problem else noticed
            return error("SH102", match.expand(message), where=_place(name, place), fix=fix)
    return error("SH102", problem, where=_place(name, noticed))


def _place(name: str, mark: yaml.Mark) -> str:
    return f"{name}:{mark.line + 1}:{mark.column + 1}"


def _bracket_error(problem: str, text: str, begun: yaml.Mark, noticed: yaml.Mark, name: str) -> ShoalError | None:
    if not re.search(r"expected ',' or|expected the node content", problem):
        return None
    start = begun.index if text[begun.index : begun.index + 1] in _BRACKETS else _open_bracket(text[: noticed.index])
    if start is None:
        return None
    line, column = text.count("\n", 0, start) + 1, start - text.rfind("\n", 0, start)
    opened, closed = text[start], _closing_bracket(text, start)
    if not closed:
        message = f"the '{opened}' is never closed"
        return error("SH102", message, where=f"{name}:{line}:{column}", fix=f"Add the missing '{_BRACKETS[opened]}'.")
    if closed != _BRACKETS[opened]:
        message = f"the '{opened}' of line {line} is closed by '{closed}'"
        return error("SH102", message, where=_place(name, noticed), fix=f"Close it by '{_BRACKETS[opened]}'.")
    message = f"a ',' or a value is missing between the brackets of line {line}"
    return error("SH102", message, where=_place(name, noticed), fix="Separate the values by single commas.")


def _open_bracket(text: str) -> int | None:
    """The position of the innermost bracket that the text opens and does not close."""
    opened: list[int] = []
    for token in _BRACKET_TOKENS.finditer(text):
        if token[0] in _BRACKETS:
            opened.append(token.start())
        elif token[0] in _BRACKETS.values():
            del opened[-1:]
    return opened[-1] if opened else None


def _closing_bracket(text: str, start: int) -> str:
    """The character that closes the bracket at `start`; '' if there is none. A line that starts a field in the first
    column ends the search: what follows belongs to the next field."""
    depth = 0
    for token in _BRACKET_TOKENS.finditer(text, start):
        if token[0] == "\n":
            return ""
        if token[0] in _BRACKETS:
            depth += 1
        elif token[0] in _BRACKETS.values():
            depth -= 1
            if depth == 0:
                return token[0]
    return ""


def _quote_error(problem: str, lines: list[str], begun: yaml.Mark, name: str) -> ShoalError | None:
    if "scanning a quoted scalar" not in problem or "end of stream" not in problem:
        return None
    quote = lines[begun.line][begun.column]
    return error("SH102", f"the {quote} is never closed", where=_place(name, begun), fix=f"Add the missing {quote}.")


def _tab_error(problem: str, lines: list[str], noticed: yaml.Mark, name: str) -> ShoalError | None:
    if r"character '\t' that cannot start" not in problem:
        return None
    if lines[noticed.line][: noticed.column].strip():
        message, fix = "a tab stands before the value", "Write a space instead of the tab."
    else:
        message, fix = "a tab is used to indent", "Indent with spaces."
    return error("SH102", message, where=_place(name, noticed), fix=fix)


def _missing_space_error(
    problem: str, lines: list[str], begun: yaml.Mark, noticed: yaml.Mark, name: str
) -> ShoalError | None:
    """The error for `field:value`, which YAML reads as one word."""
    if "mapping values are not allowed" in problem:
        above = [i for i in range(noticed.line) if lines[i].strip() and not lines[i].lstrip().startswith("#")]
        number = above[-1] if above else noticed.line
    elif "could not find expected ':'" in problem:
        number = begun.line
    else:
        return None
    return _no_space_error(lines[number], f"{name}:{number + 1}")


def _no_space_error(line: str, where: str) -> ShoalError | None:
    match = _NO_SPACE.match(line)
    if match is None:
        return None
    message = f"a space is missing after '{match[1]}:'"
    return error("SH102", message, where=where, fix=f"Write `{match[1]}: value`.")


def _anchor_error(problem: str, begun: yaml.Mark, noticed: yaml.Mark, name: str) -> ShoalError | None:
    match = re.search(r"duplicate anchor '(.*?)'", problem)
    if match is None:
        return None
    message = f"the anchor &{match[1]} is defined here and on line {begun.line + 1}"
    return error("SH102", message, where=_place(name, noticed), fix="Rename one of them.")


class _NodeConverter:
    """Converts nodes to plain data, and records the line of each field and every duplicate field."""

    def __init__(self, name: str) -> None:
        self.lines: dict[str, int | str] = {}
        self.problems: list[ShoalError] = []
        self._name = name
        self._merge_constructor = SafeConstructor()
        self._merged: set[int] = set()
        self._ancestors: set[int] = set()
        self._node_count = 0

    def convert(self, node: yaml.Node, place: str) -> Any:
        self._node_count += 1
        if id(node) in self._ancestors or self._node_count > MAX_NODES:
            raise self._error_at(node, "an alias (*name) contains itself or expands without end")
        self._ancestors.add(id(node))
        try:
            return self._convert_node(node, place)
        finally:
            self._ancestors.discard(id(node))

    def _convert_node(self, node: yaml.Node, place: str) -> Any:
        if isinstance(node, yaml.MappingNode) and node.tag == _TAG + "map":
            return self._mapping(node, place)
        if isinstance(node, yaml.SequenceNode) and node.tag == _TAG + "seq":
            return [self._item(child, _child_path(place, i)) for i, child in enumerate(node.value)]
        if isinstance(node, yaml.ScalarNode) and node.tag in _SCALAR_PARSERS:
            try:
                return _SCALAR_PARSERS[node.tag](node.value)
            except ValueError:
                raise self._error_at(node, f"'{node.value}' does not fit its tag") from None
        raise self._error_at(node, f"the tag {node.tag.replace(_TAG, '!!')} is not supported")

    def _item(self, node: yaml.Node, place: str) -> Any:
        self.lines[place] = node.start_mark.line + 1
        return self.convert(node, place)

    def _mapping(self, node: yaml.MappingNode, place: str) -> dict[str, Any]:
        if id(node) not in self._merged:  # an alias leads here again after the keys of `<<` were merged
            self._report_duplicate_keys(node, place)
            self._merge_constructor.flatten_mapping(node)
            self._merged.add(id(node))
        found = {}
        for key, child in node.value:
            if node.flow_style and child.value == "" and (no_space := _no_space_error(key.value, self._where(key))):
                raise no_space
            inner = _child_path(place, self._key(key))
            self.lines[inner] = key.start_mark.line + 1
            found[key.value] = self.convert(child, inner)
        return found

    def _report_duplicate_keys(self, node: yaml.MappingNode, place: str) -> None:
        first: dict[str, int] = {}
        for key, _ in node.value:
            line = key.start_mark.line + 1
            if self._key(key) in first:
                where = f"{self._name}:{line} {_child_path(place, key.value)}"
                message = f"'{key.value}' is given here and on line {first[key.value]}"
                self.problems.append(error("SH108", message, where=where))
            first.setdefault(key.value, line)

    def _key(self, key: yaml.Node) -> str:
        if not isinstance(key, yaml.ScalarNode) or key.value == "":
            raise self._error_at(key, "the name of a field must be plain text")
        return str(key.value)

    def _error_at(self, node: yaml.Node, message: str) -> ShoalError:
        return error("SH102", message, where=self._where(node))

    def _where(self, node: yaml.Node) -> str:
        return _place(self._name, node.start_mark)


def _child_path(place: str, key: str | int) -> str:
    return f"{place}.{key}" if place else str(key)
