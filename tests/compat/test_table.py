"""The mechanism of docs/compatibility.md."""

import os
import subprocess
import sys

import pytest

from tests.compat.rows import PAGE, TESTS, Row, declared_rows, page, rows_of_file

SUITE = '''
"""Things of others.

More words.
"""
import pytest


@pytest.mark.compat_row("one", "works", how="`model:`")
def test_works():
    pass


@pytest.mark.compat_row("two", "works")
@pytest.mark.parametrize("value", [1, 2])
def test_fails_once(value):
    assert value == 1


@pytest.mark.compat_row("three", "refused SH414")
def test_is_not_there():
    pytest.importorskip("a_library_that_nobody_has")


@pytest.mark.compat("four", "works")
def test_is_not_selected():
    pass
'''


def test_the_page_has_the_rows_that_the_tests_declare():
    assert PAGE.read_text() == page(declared_rows()), "make test-compat"


def test_rows_are_read_from_files_without_importing_them(tmp_path):
    file = tmp_path / "test_things.py"
    file.write_text(SUITE.replace("import pytest\n", "import pytest, a_library_that_nobody_has\n", 1))
    assert rows_of_file(file) == [
        Row("Things of others", "one", "works", "`model:`"),
        Row("Things of others", "two", "works"),
        Row("Things of others", "three", "refused SH414"),
        Row("Things of others", "four", "works"),
    ]


@pytest.mark.parametrize("result", ["fine", "refused", "refused SH1"])
def test_a_result_is_works_or_a_code(result):
    with pytest.raises(ValueError, match="neither"):
        Row.declare("section", "thing", result)


def test_only_what_passed_is_written(tmp_path):
    """Rows with a failed or a skipped test are left out, and so is what was not run."""
    (tmp_path / "conftest.py").write_text("from tests.compat.table import *\n")
    (tmp_path / "test_things.py").write_text(SUITE)
    target = tmp_path / "page.md"
    command = [sys.executable, "-m", "pytest", "-m", "compat_row", "--compatibility-table", str(target)]
    subprocess.run(command, cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(TESTS.parent)}, capture_output=True)
    assert target.read_text() == page([Row("Things of others", "one", "works", "`model:`")])


@pytest.mark.long
def test_pytest_understands_the_command_of_make():
    """An option that a file of tests defines is only known if no word of the command hides where the tests are."""
    found = subprocess.run(["make", "-n", "test-compat"], cwd=TESTS.parent, capture_output=True, text=True, check=True)
    (command,) = (line for line in found.stdout.splitlines() if "pytest" in line)
    done = subprocess.run(f"{command} --help", shell=True, cwd=TESTS.parent, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
