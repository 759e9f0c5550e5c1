"""Names that a job refers to: `package.module:name`, `dir/file.py:name`, or a short name of its field.

`check_ref` reads source code without importing, for the driver, which must not load torch. `import_ref` and
`build_ref` are for the worker. `ref_of` is the inverse: from an object to its name.
"""

from __future__ import annotations

import difflib
import functools
import hashlib
import importlib
import importlib.util
import inspect
import os
import re
import signal
import sys
import sysconfig
import traceback
import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoal.errors import (
    ShoalError,
    closest_name,
    describe_exception,
    did_you_mean,
    error,
    from_os_error,
    is_out_of_memory,
    suggest_path,
)
from shoal.spec import static_names
from shoal.spec.base import Ref
from shoal.spec.definitions import is_standard_library

USER_PACKAGE = "shoal_user"
MAX_NAMES = 30
FIX_NOT_CALLABLE = "Refer to a class or a function."
_DOTTED = r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*"


@dataclass(frozen=True)
class ParsedRef:
    """The parts of a reference: from a file, from a module, or (neither) a short name."""

    text: str
    attrs: tuple[str, ...]
    file: str = ""
    module: str = ""


def parse_ref(ref: Ref | str) -> ParsedRef:
    """Parse a reference. SH203 if the syntax is wrong."""
    text = ref.name if isinstance(ref, Ref) else ref
    place, colon, attrs = text.rpartition(":")
    if colon and re.fullmatch(_DOTTED, attrs):
        if place.endswith(".py"):
            return ParsedRef(text, tuple(attrs.split(".")), file=place)
        if re.fullmatch(_DOTTED, place):
            return ParsedRef(text, tuple(attrs.split(".")), module=place)
    if not colon and re.fullmatch(r"[A-Za-z_]\w*", text):
        return ParsedRef(text, (text,))
    raise error("SH203", f"'{text}' is not written as module:name", fix=_suggest_spelling(text))


def _suggest_spelling(text: str) -> str:
    """A fix for a name with wrong syntax."""
    if called := re.fullmatch(r"([^()]+)\((.*)\)", text):
        name, given = called[1].strip(), called[2].strip()
        name = re.sub(r"^(?:torch\.)?(?:nn|optim\.lr_scheduler|optim)\.(\w+)$", r"\1", name)
        name = re.sub(rf"({_DOTTED})\.(\w+)", r"\1:\2", name) if ":" not in name and ".py" not in name else name
        return f"Shoal calls it: write {{name: {name}, args: {{…}}}}." if given else f"Shoal calls it: write {name}."
    guesses = (
        (r"(.+\.py)", r"\1:name, with the class or function that the file defines"),
        (r"(.+\.py)(?:::|/|\.|#)(\w+)", r"\1:\2"),
        (rf"({_DOTTED})\.(\w+)", r"\1:\2"),
        (r"([\w./\\-]+[/\\][\w-]+):(\w+)", r"\1.py:\2"),
        (rf"({_DOTTED})(?:::|/|#|: )(\w+)", r"\1:\2"),
    )
    for pattern, form in guesses:
        if match := re.fullmatch(pattern, text):
            return f"Write {match.expand(form)}."
    return "Write package.module:name or file.py:name."


# ---- checking without importing ----


def check_ref(ref: Ref | str, *, base_dir: str | Path, default_modules: Sequence[str] = ()) -> None:
    """Check that a name exists by reading source code; nothing is imported or executed.

    Raises SH201 (no such module or file), SH202 (no such name in it), SH203 (wrong syntax) or SH204 (the source does
    not parse). If a module may define names dynamically, any name is accepted.
    """
    name, base = parse_ref(ref), str(Path(base_dir).resolve())
    if name.file:
        _check_defined([_file_outline(name, base)], name, place=name.file)
    elif name.module:
        inner = f"{name.module}.{name.attrs[0]}"
        if len(name.attrs) == 1 or static_names.find_module(inner, first=base) is None:
            _check_defined([_module_outline(name.module, base)], name, place=name.module)
    else:
        modules = _modules_of_short_name(name, default_modules)
        _check_defined([_module_outline(m, base) for m in modules], name, place=" or ".join(modules))


def _modules_of_short_name(name: ParsedRef, default_modules: Sequence[str]) -> Sequence[str]:
    if default_modules:
        return default_modules
    message = f"'{name.text}' is a short name, but this field has no short names"
    raise error("SH203", message, fix=f"Write file.py:{name.text} or package.module:{name.text}.")


def _file_outline(name: ParsedRef, base: str) -> static_names.ModuleNames:
    path = _user_file(name, base)
    try:
        return static_names.names_in_file(path, first=base)
    except (SyntaxError, ValueError, OSError) as failure:
        raise _source_error(failure, path) from None


def _user_file(name: ParsedRef, base: str) -> Path:
    path = Path(base, name.file)
    if path.is_file():
        return path
    raise error("SH201", f"no such file: {name.file}", fix=suggest_path(path, suffixes=(".py",)))


def _module_outline(module: str, base: str) -> static_names.ModuleNames:
    spec = static_names.find_module(module, first=base)
    if spec is None:
        raise _missing_module_error(module, base)
    try:
        return static_names.names_of_module(spec, first=base)
    except (SyntaxError, ValueError, OSError) as failure:
        raise _source_error(failure, Path(spec.origin or module)) from None


def _missing_module_error(module: str, base: str) -> ShoalError:
    """The error for the first part of a dotted name that does not exist."""
    parts = module.split(".")
    prefixes = [".".join(parts[: i + 1]) for i in range(len(parts))]
    missing = next((p for p in prefixes if static_names.find_module(p, first=base) is None), module)
    close = closest_name(missing, static_names.siblings(missing, first=base))
    hint = f"Did you mean '{close}'? " if close else ""
    message = f"no module named '{missing}'"
    if "." in missing:
        return error("SH201", message, fix=hint.strip() or "Check the spelling.")
    return error("SH201", message, fix=f"{hint}Install the package, or put {missing}.py beside the job file.")


def _source_error(failure: Exception, path: Path) -> ShoalError:
    if isinstance(failure, SyntaxError):
        text = f": `{failure.text.strip()}`" if failure.text else ""
        where = f"{path}:{failure.lineno or 1}"
        return error("SH204", f"{failure.msg}{text}", where=where, fix="Fix this line.")
    return error("SH204", f"cannot be read: {failure}", where=str(path))


def _check_defined(outlines: Sequence[static_names.ModuleNames], name: ParsedRef, *, place: str) -> None:
    if not any(o.is_dynamic or name.attrs[0] in o.names for o in outlines):
        exported = [n for o in outlines for n in o.exported]
        raise _missing_name_error(name.attrs[0], exported, place=place)


def _missing_name_error(word: str, names: Sequence[str], *, place: str) -> ShoalError:
    if len(names) > MAX_NAMES:
        names = difflib.get_close_matches(word, names, n=10, cutoff=0.3)
    return error("SH202", f"{place} has no '{word}'", fix=did_you_mean(word, names))


# ---- importing ----


def import_ref(ref: Ref | str, *, base_dir: str | Path, default_modules: Sequence[str] = ()) -> Any:
    """Import the object of a name. Puts `base_dir` on sys.path, because the user's files may import each other.

    A file becomes one module, however often it is named. Raises SH201 to SH204; `where` is the user's line. SH210 if
    the object belongs to Python's standard library: such a name is a mistake or an attack (`os:system`).
    """
    name, base = parse_ref(ref), str(Path(base_dir).resolve())
    if base not in sys.path:
        sys.path.insert(0, base)
    if name.file:
        home = _load_file(_user_file(name, base))
    elif name.module:
        home = _load_module(name.module, base)
    else:
        modules = [_load_module(m, base) for m in _modules_of_short_name(name, default_modules)]
        home = next((m for m in modules if hasattr(m, name.text)), modules[0])
    found = _attribute(home, name)
    _refuse_standard_library(name, found)
    return found


def _refuse_standard_library(name: ParsedRef, found: Any) -> None:
    """Only classes, functions and methods tell where they are from."""
    if inspect.isclass(found) or inspect.isroutine(found):
        module = sys.modules.get(getattr(found, "__module__", None) or "")
        path = getattr(module, "__file__", None) or ""
        if module is not None and is_standard_library(module.__name__, path):
            raise standard_library_error(name.text, module.__name__)


def standard_library_error(name: str, module: str) -> ShoalError:
    return error("SH210", f"'{name}' is of {module}, which is part of Python and has nothing that a job could name")


def _attribute(module: types.ModuleType, name: ParsedRef) -> Any:
    found: Any = module
    for i, attr in enumerate(name.attrs):
        if not hasattr(found, attr):
            place = ".".join([name.file or name.module or module.__name__, *name.attrs[:i]])
            raise _missing_name_error(attr, [n for n in dir(found) if not n.startswith("_")], place=place)
        found = getattr(found, attr)
    return found


def _load_module(module: str, base: str) -> types.ModuleType:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as failure:
        if failure.name and f"{module}.".startswith(f"{failure.name}."):
            raise _missing_module_error(module, base) from None
        raise _user_code_error("SH204", failure, f"importing {module}") from failure
    except BaseException as failure:
        if not is_users_failure(failure):
            raise
        raise _user_code_error("SH204", failure, f"importing {module}") from failure


def _load_file(path: Path) -> types.ModuleType:
    """Import a file under a name derived from its path, so that the same path gives the same module and classes."""
    real = Path(os.path.realpath(path))
    full = f"{_package_of(real.parent)}.{real.stem.replace('.', '_')}"
    if full in sys.modules:
        return sys.modules[full]
    spec = importlib.util.spec_from_file_location(full, real)
    if spec is None or spec.loader is None:
        raise error("SH201", f"{path} is not a Python file")
    module = sys.modules[full] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException as failure:
        del sys.modules[full]
        if not is_users_failure(failure):
            raise
        raise _user_code_error("SH204", failure, f"importing {path.name}", place=str(path)) from failure
    return module


def _package_of(folder: Path) -> str:
    """A separate package for each directory, so that its files may use `from . import`."""
    name = f"{USER_PACKAGE}.d{hashlib.sha256(str(folder).encode()).hexdigest()[:12]}"
    for full, path in ((USER_PACKAGE, []), (name, [str(folder)])):
        if full not in sys.modules:
            package = sys.modules[full] = types.ModuleType(full)
            package.__path__ = path
    return name


def user_error(code: str, failure: BaseException, doing: str, *, place: str = "", fix: str = "") -> ShoalError:
    """The error for an exception that comes out of the user's code: its message, at its line. A full disk or an
    exhausted limit is not the code's fault, and keeps its own code."""
    where = user_line(failure) or place
    limit = from_os_error(failure, doing=doing, where=where)
    return limit or error(code, f"{doing}: {describe_exception(failure)}", where=where, fix=fix)


def _user_code_error(code: str, failure: BaseException, doing: str, *, place: str = "") -> ShoalError:
    """The error for an exception of an import or a call."""
    if isinstance(failure, SyntaxError):
        return _source_error(failure, Path(failure.filename or place))
    fix = ""
    if isinstance(failure, ModuleNotFoundError) and USER_PACKAGE not in str(failure):
        fix = f"Install the package {failure.name}, or fix the import."
    elif isinstance(failure, SystemExit) and code == "SH204":
        fix = "Put what the script does under `if __name__ == '__main__':`."
    return user_error(code, failure, f"{doing} failed", place=place, fix=fix)


def is_users_failure(failure: BaseException) -> bool:
    """Whether an exception that comes out of the user's code is the user's error, `sys.exit` included. Errors of Shoal
    are not, nor is Ctrl-C: workers ignore its signal, so that there only the user's code raises KeyboardInterrupt."""
    if isinstance(failure, KeyboardInterrupt):
        return signal.getsignal(signal.SIGINT) == signal.SIG_IGN
    return not isinstance(failure, ShoalError | GeneratorExit)


def user_line(failure: BaseException) -> str:
    """`file:line` of the innermost frame in the user's own code, or ''."""
    return _innermost_user_line(traceback.extract_tb(failure.__traceback__))


def calling_user_line() -> str:
    """`file:line` of the user's code that has called the function that asks, or ''."""
    return _innermost_user_line(traceback.extract_stack())


def _innermost_user_line(frames: traceback.StackSummary) -> str:
    for frame in reversed(frames):
        if is_user_file(frame.filename):
            return f"{frame.filename}:{frame.lineno}"
    return ""


_INSTALLED = ("/site-packages/", "/dist-packages/")
"""Also packages of another environment that this one sees: the system's, or the user's own."""


def is_user_file(path: str) -> bool:
    """Whether source code at this path is the user's own."""
    return not path.startswith(("<", *_library_paths())) and not any(name in path for name in _INSTALLED)


@functools.cache
def _library_paths() -> tuple[str, ...]:
    """Directories with code that is not the user's: the standard library, installed packages, this package."""
    paths = [sysconfig.get_path(kind) for kind in ("stdlib", "platstdlib", "purelib", "platlib")]
    return (*paths, str(Path(__file__).parent.parent))


# ---- calling ----


def build_ref(
    ref: Ref, *leading: Any, base_dir: str | Path, default_modules: Sequence[str] = (), field: str = "", **extra: Any
) -> Any:
    """Import a name and call it with `leading`, the job's `args` and `extra` (which wins). `field` is the place of an
    error that has no line of the user's own.

    Raises SH205 if the arguments do not fit the signature, SH206 if the object cannot be called, SH208 with
    the user's own line if the call fails, SH407 if the memory does not suffice.
    """
    made = import_ref(ref, base_dir=base_dir, default_modules=default_modules)
    arguments = {**ref.args, **extra}
    if not callable(made):
        raise error("SH206", f"'{ref.name}' is {_article(type(made).__name__)}, which cannot be called",
                    fix=FIX_NOT_CALLABLE)  # fmt: skip
    _check_arguments(ref.name, made, len(leading), arguments)
    try:
        return made(*leading, **arguments)
    except BaseException as failure:
        if not is_users_failure(failure):
            raise
        code = "SH407" if is_out_of_memory(failure) else "SH208"
        raise _user_code_error(code, failure, f"calling {ref.name}", place=field) from failure


def _check_arguments(name: str, made: Any, leading: int, arguments: Mapping[str, Any]) -> None:
    try:
        parameters = inspect.signature(made).parameters.values()
    except (TypeError, ValueError):  # written in C, without a signature: the call reports wrong arguments
        return
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    ours = {p.name for p in [p for p in parameters if p.kind in positional][:leading]}
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
    free = {p.name: p for p in parameters if p.name not in ours and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    for word in arguments:
        if word in ours:
            raise error("SH205", f"the argument '{word}' of {name} is given already", fix="Remove it.")
        if word not in free and not takes_any:
            fix = did_you_mean(word, free) or "Remove it: there are no arguments to set."
            raise error("SH205", f"{name} takes no argument '{word}'", fix=fix)
    for word, parameter in free.items():
        if parameter.default is parameter.empty and word not in arguments:
            fix = f"Add `{word}:` under `args`."
            raise error("SH205", f"{name} needs the argument '{word}'", fix=fix)


def _article(word: str) -> str:
    return f"an {word}" if word[0].lower() in "aeiou" else f"a {word}"


# ---- from an object to its name ----


def ref_of(thing: Any, *, base_dir: str | Path | None = None) -> str:
    """The name by which a worker finds a class or function: `module:name`, or `file.py:name` for one in a script.

    Raises SH608 for objects that only this process has (notebook cells, lambdas, local definitions). The file is
    relative to `base_dir` if it is inside.
    """
    if not isinstance(thing, type | types.FunctionType | types.BuiltinFunctionType):
        raise error("SH608", f"{_article(type(thing).__name__)} object is neither a class nor a function")
    name, module = thing.__qualname__, sys.modules.get(thing.__module__)
    if "<" in name or module is None or _lookup(module, name) is not thing:
        raise error("SH608", f"'{name}' is defined inside another function, or under another name")
    spec = getattr(module, "__spec__", None)
    file = getattr(module, "__file__", None)
    if module.__name__ == "__main__" and spec is not None:  # python -m package.module
        return f"{spec.name}:{name}"
    if module.__name__ == "__main__" and not (file or "").endswith(".py"):
        raise error("SH608", f"'{name}' is defined in a notebook or at the prompt")
    if file and _is_users_file(module.__name__, file):
        return f"{_short_path(file, base_dir)}:{name}"
    return f"{module.__name__}:{name}"


def _is_users_file(module: str, file: str) -> bool:
    """Whether it is a script or a file beside it, which a worker would not find on its own sys.path."""
    if module == "__main__" or module.startswith(f"{USER_PACKAGE}."):
        return True
    return "." not in module and file.endswith(".py") and is_user_file(file)


def _lookup(module: types.ModuleType, name: str) -> Any:
    found: Any = module
    for attr in name.split("."):
        found = getattr(found, attr, None)
    return found


def _short_path(file: str, base_dir: str | Path | None) -> str:
    path = Path(file).resolve()
    base = Path(base_dir).resolve() if base_dir is not None else None
    return str(path.relative_to(base)) if base and path.is_relative_to(base) else str(path)
