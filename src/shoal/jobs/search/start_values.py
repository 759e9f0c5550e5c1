"""What a search tries first: values, and those of runs and of earlier searches."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from shoal.errors import error
from shoal.jobs import run_dir
from shoal.jobs.search.journal import read_rows
from shoal.jobs.search.search_dir import SearchPaths
from shoal.jobs.search.table import Judge, SearchTable
from shoal.plan.search.make import own_values
from shoal.spec.job import Job
from shoal.spec.load import load_run_job
from shoal.spec.search.rules import holds
from shoal.spec.search.space import Dimension, parse_space

BEST_OF_A_SEARCH = 8


def with_start_values(job: Job, runs: Path) -> Job:
    """The job with values in place of the names in `search.start`, so that a resumed search begins with the same. SH601
    if there is no such run, SH106 if none of its values lies in the space."""
    search = job.search
    assert search is not None
    if all(isinstance(one, dict) for one in search.start):
        return job
    values: list[dict[str, Any] | str] = []
    for i, one in enumerate(search.start):
        values += [one] if isinstance(one, dict) else _values_of(one, job, runs, where=f"search.start.{i}")
    return job.model_copy(update={"search": search.model_copy(update={"start": values})})


def _values_of(name: str, job: Job, runs: Path, *, where: str) -> list[dict[str, Any]]:
    assert job.search is not None
    paths = run_dir.find(name, runs)
    dimensions = parse_space(job.search.space).dimensions
    if paths.search_journal.is_file():
        found = list(_ranked_values(SearchPaths(paths), dimensions))
    else:
        found = [own_values(load_run_job(paths.job), job.search.space)]
    fitting: list[dict[str, Any]] = []
    for values in found:
        inside = _inside(values, dimensions)
        if inside and inside not in fitting:  # trials that were repeated with another seed have the same
            fitting.append(inside)
    if not fitting:
        raise error(
            "SH106", f"no values of '{name}' lie in the space", where=where, fix="Remove it, or widen the space."
        )
    return fitting[:BEST_OF_A_SEARCH]


def _ranked_values(paths: SearchPaths, dimensions: list[Dimension]) -> Iterator[dict[str, Any]]:
    """The values of its trials, the best first."""
    judge = Judge.of(load_run_job(paths.job))
    for trial in judge.ranked(SearchTable.of(read_rows(paths.journal)[0])):
        yield values_by_key(trial.changes, dimensions)


def values_by_key(changes: Mapping[str, Any], dimensions: list[Dimension]) -> dict[str, Any]:
    """Values by key of the space, from those by path."""
    found = {}
    for one in dimensions:
        if all(path in changes for path in one.paths):
            parts = [changes[path] for path in one.paths]
            found[one.key] = parts if len(parts) > 1 else parts[0]
    return found


def _inside(values: Mapping[str, Any], dimensions: list[Dimension]) -> dict[str, Any]:
    by_key = {one.key: one for one in dimensions}
    return {key: value for key, value in values.items() if key in by_key and holds(by_key[key].values, value)}
