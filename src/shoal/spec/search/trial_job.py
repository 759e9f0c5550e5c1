"""The job of a trial, and the check that a whole space gives valid jobs."""

from __future__ import annotations

import contextlib
import copy
import json
from collections.abc import Iterator, Mapping
from typing import Any

from shoal.errors import ErrorGroup, ShoalError, error, plural
from shoal.spec.job import Job, MonitorConfig
from shoal.spec.load import make_job
from shoal.spec.overrides import apply_overrides
from shoal.spec.search.config import FACTS
from shoal.spec.search.space import Choice, Dimension, Range, parse_space
from shoal.spec.yaml_document import YamlDocument

MAX_CHECKED_CHOICES = 64
"""Choices of one dimension that are tried as jobs."""
BETWEEN = 0.382
"""Where a range is tried besides its ends: at no round number, so that a field of whole numbers refuses it."""


def make_trial_job(job: Job, changes: Mapping[str, Any], *, check_names: bool = True) -> Job:
    """The job with a trial's values and without `search`, checked like a job file. Raises `ErrorGroup`.

    Its best weights are those that the search counts: by the metric of the search, unless the job has a `best`.
    """
    data = {key: value for key, value in job.dump().items() if key != "search"}
    data["best"] = _best(job).model_dump()
    document = YamlDocument("", data)
    assignments = [f"{path}={json.dumps(value)}" for path, value in changes.items()]
    data = apply_overrides(document, assignments, model=Job).data
    made = make_job(data, base_dir=job.base_dir, check_names=check_names)
    if made.fold_count != job.fold_count:
        message = f"a trial would be {plural(made.fold_count, 'run')} instead of {job.fold_count}"
        raise error("SH110", message, where="data.split", fix="Keep the number of folds the same in all trials.")
    if made.sync.kind == "auto":
        raise _unplanned()
    return made


def _best(job: Job) -> MonitorConfig:
    goals = job.search.metric if job.search is not None else []
    if len(goals) != 1 or goals[0].metric in (*FACTS, job.best.metric) or job.best != MonitorConfig():
        return job.best
    return MonitorConfig(metric=goals[0].metric, mode="max" if goals[0].sign > 0 else "min")


def check_space(job: Job, *, check_names: bool = True) -> None:
    """Try the first 64 choices of every dimension, and both ends of every range and a value between them, as jobs; the
    other dimensions at their first value.

    Raises `ErrorGroup`; `where` of each error is the dimension. Combinations of several values may still fail: such a
    trial is recorded with its error. `check_names` also reads the source of names that choices refer to.
    """
    assert job.search is not None
    if job.sync.kind == "auto":
        raise _unplanned()
    dimensions = parse_space(job.search.space).dimensions
    problems: dict[str, ShoalError] = {}
    for dimension, changes in _probes(dimensions):
        try:
            make_trial_job(job, changes, check_names=check_names)
        except ErrorGroup as group:
            found = [*group.errors]
        except ShoalError as problem:
            found = [problem]
        else:
            continue
        for each in found:
            told = each.at(f"search.space.{_responsible(each.where, dimension, dimensions).key}")
            problems.setdefault(str(told), told)
    if problems:
        raise ErrorGroup(list(problems.values()))


def workers_of_largest_trial(job: Job) -> int:
    """How many workers one trial may need: the most that any of the jobs that `check_space` tries asks for."""
    assert job.search is not None
    dimensions = parse_space(job.search.space).dimensions
    needed = [job.workers_per_replica]
    if any(path.partition(".")[0] == "shard" for dimension in dimensions for path in dimension.paths):
        for _, changes in _probes(dimensions):
            with contextlib.suppress(ShoalError):
                needed.append(make_trial_job(job, changes, check_names=False).workers_per_replica)
    return max(needed)


def _unplanned() -> ShoalError:
    fix = "Write the sync that `shoal plan` recommends."
    return error("SH110", "a search needs a fixed `sync`: planning measures the machine", where="sync", fix=fix)


def _responsible(field: str, probed: Dimension, dimensions: list[Dimension]) -> Dimension:
    """The dimension that sets the field of an error; else the one that was tried."""
    for dimension in [probed, *dimensions]:
        if any(field == p or field.startswith(f"{p}.") or p.startswith(f"{field}.") for p in dimension.paths):
            return dimension
    return probed


def _probes(dimensions: list[Dimension]) -> Iterator[tuple[Dimension, dict[str, Any]]]:
    firsts = {dimension.key: next(_values(dimension.values)) for dimension in dimensions}
    for dimension in dimensions:
        for value in _values(dimension.values):
            yield dimension, changes_of(dimensions, {**firsts, dimension.key: value})


def changes_of(dimensions: list[Dimension], values: Mapping[str, Any]) -> dict[str, Any]:
    """Values by path from values by key. A section stands before the fields inside it."""
    changes: dict[str, Any] = {}
    for dimension in dimensions:
        if dimension.key in values:
            value = values[dimension.key]
            changes.update(zip(dimension.paths, value if len(dimension.paths) > 1 else [value], strict=True))
    return dict(sorted(changes.items(), key=lambda item: item[0].count(".")))


def _values(values: Range | Choice) -> Iterator[Any]:
    """Both ends of a range and a value between them; every choice, with those of the ranges inside it."""
    if isinstance(values, Range):
        yield from (values.low, values.high, _between(values))
        return
    for option in values.options[:MAX_CHECKED_CHOICES]:
        inner = [list(_values(nested)) for _, nested in option.nested]
        for turn in range(max(map(len, inner), default=1)):
            made = copy.deepcopy(option.value)
            for (at, _), choices in zip(option.nested, inner, strict=True):
                made = put(made, at, choices[min(turn, len(choices) - 1)])
            yield made


def _between(values: Range) -> int | float:
    low, high = values.low, values.high
    if values.step is not None:
        return low + values.step
    if values.log:
        found = low * (high / low) ** BETWEEN
    else:
        found = low + BETWEEN * (high - low)
    return round(found) if values.whole else float(f"{found:.4g}")


def put(value: Any, at: tuple[str | int, ...], part: Any) -> Any:
    """The value with `part` at a place inside it. Changes the value."""
    here = value
    for key in at[:-1]:
        here = here[key]
    here[at[-1]] = part
    return value
