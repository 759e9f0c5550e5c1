"""The gates find what they are for, and exceptions can only shrink."""

import tomllib

import pytest
from tools.house_gates import LIMITS, count, problems

from tools import house_gates

NONE = {
    "code_lines": 100,
    "files_per_room": 2,
    "lines_per_file": 20,
    "arguments": 3,
    "one_importer_percent": 0,
    "more_files": {},
    "longer_files": {},
    "more_arguments": {},
}


@pytest.fixture
def package(tmp_path):
    """A small package that no gate objects to."""
    source = tmp_path / "house"
    (source / "room").mkdir(parents=True)
    (source / "__init__.py").write_text("")
    (source / "room" / "__init__.py").write_text('"""A room."""\n')
    (source / "room" / "one.py").write_text("class One:\n    def act(self, a, b, *, c): ...\n")
    return source


def found(package, **changes):
    return problems(count(package), NONE | changes)


def test_a_tidy_package_has_no_problem(package):
    assert found(package) == []


def test_docstrings_comments_and_blank_lines_are_no_code(tmp_path):
    path = tmp_path / "module.py"
    path.write_text(
        '"""Doc\nof two lines."""\n\n# comment\nx = """a\nb"""  # two\n\n\ndef f():\n    """Doc."""\n    return x\n'
    )
    assert house_gates.code_lines(path) == 4


def test_code_lines_are_limited(package):
    (only,) = found(package, code_lines=1)
    assert "2 code lines" in only


def test_a_class_name_stands_once(package):
    (package / "room" / "two.py").write_text("class One: ...\n")
    (only,) = found(package)
    assert "The class name One is defined 2 times: room/one.py, room/two.py" in only


def test_files_of_a_room_are_limited(package):
    for name in ("two", "three"):
        (package / "room" / f"{name}.py").write_text("")
    (only,) = found(package)
    assert only == "room: 3 files in a room, and 2 are agreed."


def test_an_exception_is_as_large_as_it_is_and_no_larger(package):
    (package / "room" / "two.py").write_text("def f(a, b, c, d): ...\n")
    assert found(package, more_arguments={"room/two.py:f": 4}) == []
    assert "exception" in found(package, more_arguments={"room/two.py:f": 5})[0]
    assert "agreed" in found(package)[0]


def test_an_exception_that_is_not_needed_is_named(package):
    (only,) = found(package, more_arguments={"room/one.py:One.act": 4})
    assert "remove it" in only
    (only,) = found(package, more_arguments={"room/gone.py:f": 4})
    assert "no such thing" in only


def test_modules_with_one_reader_are_counted(package):
    (package / "room" / "two.py").write_text("from house.room import one\n")
    assert "exactly one other" in found(package)[0]
    assert found(package, one_importer_percent=50) == []
    assert "to 50." in found(package, one_importer_percent=51)[0]


def test_the_file_of_limits_has_every_limit():
    assert tomllib.loads(LIMITS.read_text()).keys() == NONE.keys()
