"""What a search tries first: values, and those of runs and of earlier searches."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from shoal.errors import error
from shoal.jobs import run_dir
from shoal.jobs.search.journal import read_rows
from shoal.jobs.search.search_dir import SearchPaths
from shoal.jobs.search.table import Judge, SearchTable
from shoal.plan.search.make import Values, first_trials, own_values
from shoal.spec.job import Job
from shoal.spec.load import load_run_job
from shoal.spec.search.rules import holds
from shoal.spec.search.space import Dimension, parse_space


def with_start_values(job: Job, runs: Path) -> Job:
    """The job with values in place of the names in `search.start`, so that a resumed search begins with the same: a
    user's own and those of runs, then those of earlier searches. SH601 if there is no such run, SH106 if none of its
    values lies in the space."""
    search = job.search
    assert search is not None
    if all(isinstance(one, dict) for one in search.start):
        return job
    values: list[Values] = []
    searches: list[list[tuple[Values, float]]] = []
    for i, one in enumerate(search.start):
        if isinstance(one, dict):
            values.append(one)
        elif (paths := run_dir.find(one, runs)).search_journal.is_file():
            searches.append(_fitting(_ranked_values(SearchPaths(paths), job), job, one, where=f"search.start.{i}"))
        else:
            found = [(own_values(load_run_job(paths.job), search.space), 0.0)]
            values += [inside for inside, _ in _fitting(found, job, one, where=f"search.start.{i}")]
    start = [*values, *(one for one in first_trials(searches) if one not in values)]
    return job.model_copy(update={"search": search.model_copy(update={"start": start})})


def _fitting(found: Iterable[tuple[Values, float]], job: Job, name: str, *, where: str) -> list[tuple[Values, float]]:
    """As far as they lie in the space, each once: trials that were repeated with another seed have the same."""
    assert job.search is not None
    dimensions = parse_space(job.search.space).dimensions
    fitting: list[tuple[Values, float]] = []
    for values, cost in found:
        inside = _inside(values, dimensions)
        if inside and all(inside != known for known, _ in fitting):
            fitting.append((inside, cost))
    if not fitting:
        raise error(
            "SH106", f"no values of '{name}' lie in the space", where=where, fix="Remove it, or widen the space."
        )
    return fitting


def _ranked_values(paths: SearchPaths, job: Job) -> Iterator[tuple[Values, float]]:
    """The values and costs of its trials, the best first."""
    assert job.search is not None
    judge, dimensions = Judge.of(load_run_job(paths.job)), parse_space(job.search.space).dimensions
    for trial in judge.ranked(SearchTable.of(read_rows(paths.journal)[0])):
        yield values_by_key(trial.changes, dimensions), trial.cost


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
