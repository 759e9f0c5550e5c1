"""`shoal check --static` reads the job and the source, and executes nothing of either."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from shoal.errors import ErrorGroup
from shoal.spec.base import Ref, Spec
from shoal.spec.job import Job
from shoal.spec.load import load_job
from shoal.spec.names import iter_refs

TRAP = """
from pathlib import Path
with (Path(__file__).resolve().parent / "executed").open("a") as file:
    file.write(__name__)
class Anything:
    def __init__(self, *args, **kwargs): Path("executed").touch()
"""
COMMON = {
    "optimizer": {"name": "trap.py:Anything", "args": {"lr": 1}},
    "schedule": {"name": "pkg.trap:Anything"},
    "watchers": ["trap.py:Anything"],
    "steps": 1,
}
SOURCE = {"kind": "python", "factory": "trap.py:Anything", "collate": "trap.py:Anything"}
PARTS = {
    "name": "parts", "model": "trap.py:Anything", "loss": "pkg/trap.py:Anything", "metrics": ["trap:Anything"],
    "data": {"source": SOURCE, "validation": SOURCE, "test": SOURCE, "augment": ["trap.py:Anything", "pkg:Anything"],
             "transform": "pkg:Anything", "sampler": {"kind": "balanced", "by": "size"}},
    **COMMON,
}  # fmt: skip
CLUSTERS = {"clusters": {"features": "trap.py:Anything", "count": 2}, "split": {"kind": "grouped", "by": "cluster"}}
TASK = {"name": "task", "task": "trap.py:Anything", "data": {"source": SOURCE, **CLUSTERS}, **COMMON}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "pkg").mkdir()
    for name in ("trap.py", "pkg/__init__.py", "pkg/trap.py"):
        (tmp_path / name).write_text(TRAP)
    for job in (PARTS, TASK):
        (tmp_path / f"{job['name']}.yaml").write_text(yaml.safe_dump(job))
    return tmp_path


def check(folder: Path, job: str, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", "from shoal.cli import main; main()", "check", job, "--static", *options]
    environment = os.environ | {"COLUMNS": "200"}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("job", ["parts", "task"])
def test_nothing_of_the_users_is_executed(folder: Path, job: str) -> None:
    done = check(folder, f"{job}.yaml", "--json")
    assert done.returncode == 0, done.stderr
    names = {place: ref.name for place, _, ref in iter_refs(load_job(folder / f"{job}.yaml"))}
    assert json.loads(done.stdout) == {"static": True, "names": names}
    assert list(folder.rglob("executed")) == []
    assert list(folder.rglob("__pycache__")) == []


def test_the_trap_works(folder: Path) -> None:
    subprocess.run([sys.executable, "trap.py"], cwd=folder, check=True)
    assert (folder / "executed").is_file()


def test_the_jobs_above_use_every_field_that_takes_a_name(folder: Path) -> None:
    used = {field for job in ("parts", "task") for _, field, _ in iter_refs(load_job(folder / f"{job}.yaml"))}
    assert used == set(_name_fields(Job))


def _name_fields(spec: type[Spec]) -> Iterator[str]:
    for name, field in spec.model_fields.items():
        for kind in _classes(field.annotation):
            if issubclass(kind, Ref):
                yield name
            elif issubclass(kind, Spec):
                yield from _name_fields(kind)


def _classes(hint: Any) -> Iterator[type]:
    if isinstance(hint, type) and not typing.get_args(hint):
        yield hint
    for part in typing.get_args(hint):
        yield from _classes(part)


def test_what_is_not_known_is_said(folder: Path) -> None:
    done = check(folder, "task.yaml")
    assert ["optimizer", "trap.py:Anything"] in [line.split() for line in done.stdout.splitlines()]
    assert "Nothing was executed" in done.stdout


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("os:system", "SH210"),
        ("trap.py:Path", "SH210"),
        ("trap.py:Nothing", "SH202"),
        ("nowhere.py:Anything", "SH201"),
    ],
)
def test_wrong_names_are_refused_without_executing_them(folder: Path, name: str, words: str) -> None:
    (folder / "bad.yaml").write_text(yaml.safe_dump(TASK | {"task": name}))
    with pytest.raises(ErrorGroup, match=words) as caught:
        load_job(folder / "bad.yaml")
    assert "bad.yaml" in str(caught.value)
    assert list(folder.rglob("executed")) == []
