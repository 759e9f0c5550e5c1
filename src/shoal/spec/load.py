"""Load and validate a job file, and save a job. All problems of a file are reported at once."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from shoal.errors import ErrorGroup, ShoalError
from shoal.spec.explain import explain, stray_booleans
from shoal.spec.files import check_files
from shoal.spec.job import Job
from shoal.spec.migrate import migrate_job
from shoal.spec.names import check_names as check_all_names
from shoal.spec.overrides import apply_overrides
from shoal.spec.remote.hostfile import with_hosts_of_file
from shoal.spec.rules import check_rules
from shoal.spec.run_paths import write_atomically
from shoal.spec.yaml_document import YamlDocument, read_document, write_value

LocateField = Callable[[str], str]


def load_job(path: str | Path, *, overrides: Sequence[str] = (), check_names: bool = True) -> Job:
    """Read, override and check a job file. Raises `ErrorGroup` with an error for each problem.

    `check_names=False` skips the checks that depend on this machine: names and files that the job refers to.
    """
    return _load(read_document(path), Path(path).parent, overrides, check_names=check_names)


def load_run_job(path: str | Path, *, overrides: Sequence[str] = ()) -> Job:
    """The job in a run directory, which earlier versions may have written with other field names.

    Names and files that it refers to are not checked: they may be on another machine.
    """
    document = read_document(path, own=True)
    migrated = replace(document, data=migrate_job(document.data))
    return _load(migrated, Path(path).parent, overrides, check_names=False)


def _load(document: YamlDocument, folder: Path, overrides: Sequence[str], *, check_names: bool) -> Job:
    document = apply_overrides(document, overrides, model=Job)
    job = _validate(document.data, folder=folder, where=document.where, check_names=check_names)
    return check_job(job, where=document.where, check_names=check_names)


def make_job(data: Mapping[str, Any], *, base_dir: str | Path = ".", check_names: bool = True) -> Job:
    """A checked job from plain data, with the same errors as for a file; `where` is only the field."""
    job = _validate(dict(data), folder=Path(base_dir), where=str, check_names=check_names)
    return check_job(job, check_names=check_names)


def check_job(job: Job, *, where: LocateField = str, check_names: bool = True) -> Job:
    """Check rules between fields, names and files. Raises `ErrorGroup`.

    Returns the job with an absolute `base_dir`; a relative one starts at the current directory.
    """
    try:
        job = with_hosts_of_file(_with_absolute_paths(job))
    except ErrorGroup as failure:
        _raise_problems(failure.errors, where)
    problems = check_rules(job)
    if check_names:
        problems += check_all_names(job) + check_files(job)
    _raise_problems(problems, where)
    return job


def save_job(job: Job, path: str | Path) -> None:
    """Write the job so that `load_job` reads an equal job from any directory."""
    write_atomically(Path(path), write_value(_with_absolute_paths(job).dump()))


def _with_absolute_paths(job: Job) -> Job:
    """The job with absolute paths, because a run may be resumed from any directory."""
    base = Path(job.base_dir).resolve()
    where = job.checkpoint.path
    if where is not None and "://" not in where:
        where = str(base / Path(where).expanduser())
    tls = job.network.tls and str(base / Path(job.network.tls).expanduser())
    return job.model_copy(
        update={
            "base_dir": str(base),
            "checkpoint": job.checkpoint.model_copy(update={"path": where}),
            "network": job.network.model_copy(update={"tls": tls}),
        }
    )


def _validate(data: dict[str, Any], *, folder: Path, where: LocateField, check_names: bool) -> Job:
    data = {**data, "base_dir": _base_dir(folder, data.get("base_dir"))}
    try:
        job = Job.model_validate(data)
    except ValidationError as failure:
        problems = [*explain(failure, model=Job), *stray_booleans(data, model=Job)]
        _raise_problems([*problems, *(_wrong_names(data, failure) if check_names else [])], where)
        raise
    _raise_problems(stray_booleans(data, model=Job), where)
    return job


def _wrong_names(data: dict[str, Any], failure: ValidationError) -> list[ShoalError]:
    """Problems of names and files in the rest of a job, without the sections in which a field is wrong. None if the
    rest is no job."""
    rest = copy.deepcopy(data)
    wrong = [_steps_to(rest, problem["loc"]) for problem in failure.errors(include_url=False)]
    for steps in wrong:
        _remove(rest, steps)
    sections = [".".join(steps[:-1] or steps) for steps in wrong]
    try:
        job = Job.model_validate(rest)
    except ValidationError:
        return []
    return [
        problem
        for problem in (*check_all_names(job), *check_files(job))
        if not any(f"{problem.where}.".startswith(f"{section}.") for section in sections)
    ]


def _steps_to(data: Any, location: Sequence[str | int]) -> list[str]:
    """The keys that lead to a field, or to the list that it is in. Names of alternatives, which pydantic's locations
    have too, are none of them."""
    steps: list[str] = []
    for step in location:
        if isinstance(data, dict) and step in data:
            data = data[step]
            steps.append(str(step))
    return steps


def _remove(data: Any, steps: Sequence[str]) -> None:
    for step in steps[:-1]:
        data = data.get(step, {})
    for last in steps[-1:]:
        data.pop(last, None)


def _base_dir(folder: Path, written: Any) -> Any:
    return str(folder.joinpath(written or "").resolve()) if isinstance(written, str | None) else written


def _raise_problems(problems: Sequence[ShoalError], where: LocateField) -> None:
    placed = [problem.at(where(problem.where)) for problem in problems]
    if placed:
        raise ErrorGroup(list({str(problem): problem for problem in placed}.values()))
