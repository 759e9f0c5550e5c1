"""Each defence of the web page is taken away in a copy of the sources, and its test must fail there."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import shoal
from tests.web.defences import DEFENCES

SOURCES = Path(shoal.__file__).parent
TREE = Path(__file__).parents[2]
SOME_FAILED = 1  # pytest's exit code; 2 to 5 tell that no test was run


def test_every_attack_has_a_defence_that_can_be_taken_away():
    assert {int(number) for one in DEFENCES for number in one.attacks.split()} == set(range(1, 33))


@pytest.mark.parametrize("defence", DEFENCES, ids=lambda one: f"{one.attacks} {one.file}: {one.text.strip()[:40]}")
def test_each_defence_is_in_the_sources_once(defence):
    assert (SOURCES / defence.file).read_text().count(defence.text) == 1
    assert defence.instead != defence.text


@pytest.mark.long
@pytest.mark.parametrize("defence", DEFENCES, ids=lambda one: f"{one.attacks} {one.file}: {one.text.strip()[:40]}")
def test_a_test_fails_without_its_defence(defence, tmp_path):
    shutil.copytree(SOURCES, tmp_path / "shoal")
    file = tmp_path / "shoal" / defence.file
    file.write_text(file.read_text().replace(defence.text, defence.instead))
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-m", "", defence.test],
        cwd=TREE,
        env=os.environ | {"PYTHONPATH": str(tmp_path), "OMP_NUM_THREADS": "1", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == SOME_FAILED, done.stdout[-3000:]
    assert "SyntaxError" not in done.stdout
