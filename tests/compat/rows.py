"""The rows of docs/compatibility.md, as the tests declare them, and the page made of them.

A test declares a row by a marker: `@pytest.mark.compat("DCGAN", "works", how="...")`. The result is `works`, or
`refused SH414` with the code of the error. `compat_row` does the same for a test that needs no extra library. The
first line of the test file's docstring is the section.
"""

import ast
import re
from dataclasses import dataclass
from pathlib import Path

TESTS = Path(__file__).parents[1]
PAGE = TESTS.parent / "docs" / "compatibility.md"
MARKERS = ("compat", "compat_row")
RESULT = re.compile(r"works|refused SH\d{3}")
HEAD = """# What works with other libraries

Written by `make test-compat` from the tests that passed, with the versions that `constraints.txt` names. "Works" means,
where the row is about training: the same SHA-256 of weights and state, and the same metrics, on 1 worker, on 2 of which
one is killed in the middle, and after a run that ended half-way is resumed on another number of workers.
Watchers change no bit of the weights, on 1 or 2 workers. Predictions are the same bytes on any number of processes, and
exported models compute what the run's model computes. Ports of scripts are also compared with the originals. "Refused"
names the [error](errors.md).
"""


@dataclass(frozen=True, order=True)
class Row:
    section: str
    thing: str
    result: str
    how: str = ""

    @classmethod
    def declare(cls, section, thing, result="works", how=""):
        """Of a marker's arguments."""
        if not RESULT.fullmatch(result):
            raise ValueError(f"the result of '{thing}' is neither 'works' nor 'refused SHnnn': {result!r}")
        return cls(section, thing, result, how)


def section_of(text):
    """The first line of a test file's docstring."""
    return (ast.get_docstring(ast.parse(text)) or "Others").splitlines()[0].rstrip(".")


def rows_of_file(path):
    """The rows that a test file declares, read without importing it: its libraries may not be there."""
    text = path.read_text()
    if "mark.compat" not in text:
        return []
    section = section_of(text)
    return [
        Row.declare(
            section, *map(ast.literal_eval, call.args), **{k.arg: ast.literal_eval(k.value) for k in call.keywords}
        )
        for call in ast.walk(ast.parse(text))
        if isinstance(call, ast.Call)
        and isinstance(call.func, ast.Attribute)
        and call.func.attr in MARKERS
        and isinstance(call.func.value, ast.Attribute)
        and call.func.value.attr == "mark"
    ]


def declared_rows():
    return sorted({row for path in TESTS.rglob("test_*.py") for row in rows_of_file(path)})


def page(rows):
    """docs/compatibility.md with these rows."""
    parts = [HEAD]
    for section in sorted({row.section for row in rows}):
        parts.append(f"\n## {section}\n\n| thing | result | how |\n|---|---|---|\n")
        parts += [f"| {row.thing} | {row.result} | {row.how} |\n" for row in sorted(rows) if row.section == section]
    return "".join(parts)
