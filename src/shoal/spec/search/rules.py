"""Rules of a search: between its fields, of its space, and with the job around it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from shoal.errors import ShoalError, did_you_mean, error
from shoal.spec.search.config import (
    FACTS,
    SAMPLERS,
    HyperbandPolicyConfig,
    PopulationPolicyConfig,
    SearchConfig,
)
from shoal.spec.search.space import Choice, Dimension, Range, parse_space

if TYPE_CHECKING:
    from shoal.spec.job import Job

MAX_GRID = 100_000
_LENGTH_FIELDS = ("epochs", "steps")
_CHANGED_IN_TRAINING = ("optimizer.args", "optimizer.groups", "loss.args", "model.args", "clip")
"""Sections whose values may change between two steps of one training. A schedule keeps its arguments in its state."""


def check_search(job: Job, *, not_searched: Sequence[str], known_metrics: Sequence[str] | None) -> list[ShoalError]:
    """All errors of `job.search`. `not_searched`: top fields that do not change what is learnt. `known_metrics`: None
    if only the worker knows them."""
    search = job.search
    if search is None:
        return []
    parsed = parse_space(search.space)
    found = [*parsed.problems, *_known_fields(parsed.dimensions, job, not_searched)]
    found += [*_distinct_paths(parsed.dimensions), *_sampler(search, parsed.dimensions)]
    found += [*_policy(search, parsed.dimensions, job), *_metrics(search, known_metrics)]
    return found + list(_start(search, parsed.dimensions))


def _known_fields(dimensions: Sequence[Dimension], job: Job, not_searched: Sequence[str]) -> Iterator[ShoalError]:
    fields = [name for name in type(job).model_fields if name not in (*not_searched, "search")]
    for dimension in dimensions:
        place = f"search.space.{dimension.key}"
        for path in dimension.paths:
            top = path.partition(".")[0]
            if top in type(job).model_fields and top not in fields:
                fix = "Search over fields that change what is learnt."
                yield error("SH106", f"`{top}` does not change what a trial learns", where=place, fix=fix)
            elif top not in fields:
                yield error("SH103", f"a job has no field '{top}'", where=place, fix=did_you_mean(top, fields))
            elif top == "seeds":
                fix = "Write `seeds` into the job or the search: all trials are compared over the same seeds."
                yield error("SH110", "trials with other numbers of seeds cannot be compared", where=place, fix=fix)
            elif top == "seed" and job.search is not None and (job.search.repeat > 1 or job.averages_seeds):
                field = "repeat" if job.search.repeat > 1 else "seeds"
                fix = f"Remove `{top}` from the space, or `{field}`."
                yield error("SH107", f"`{field}` chooses the seeds itself", where=place, fix=fix)


def _distinct_paths(dimensions: Sequence[Dimension]) -> Iterator[ShoalError]:
    """Each field is set by one dimension."""
    owners: dict[str, str] = {}
    for dimension in dimensions:
        for path in {*_set_paths(dimension)}:
            if path in owners and owners[path] != dimension.key:
                message = f"`{path}` is also set by the dimension '{owners[path]}'"
                yield error("SH107", message, where=f"search.space.{dimension.key}", fix="Keep one of the two.")
            owners.setdefault(path, dimension.key)


def _set_paths(dimension: Dimension) -> Iterator[str]:
    """The path of each plain value that the dimension sets."""
    if isinstance(dimension.values, Range):
        yield from dimension.paths
        return
    for option in dimension.values.options:
        parts = option.value if len(dimension.paths) > 1 else [option.value]
        for path, part in zip(dimension.paths, parts, strict=True):
            yield from _leaves(path, part)


def _leaves(path: str, value: Any) -> Iterator[str]:
    if isinstance(value, dict) and value and not {"low", "high", "choose"} & set(value):
        for key, part in value.items():
            yield from _leaves(f"{path}.{key}", part)
    else:
        yield path


def _sampler(search: SearchConfig, dimensions: Sequence[Dimension]) -> Iterator[ShoalError]:
    sampler, place = search.policy.sampler, "search.policy.sampler"
    if sampler.name not in SAMPLERS and not sampler.optuna_name.isidentifier():
        fix = f"{did_you_mean(sampler.name, SAMPLERS)} A sampler of Optuna is optuna:Name, such as optuna:TPESampler."
        yield error("SH106", f"there is no sampler '{sampler.name}'", where=place, fix=fix)
    if sampler.args and not sampler.optuna_name:
        yield error(
            "SH107", f"the sampler {sampler.name} has no arguments", where=f"{place}.args", fix="Remove `args`."
        )
    if sampler.name == "grid":
        yield from _finite(dimensions)
    if sampler.name == "cmaes":
        yield from _numbers_only(dimensions, place)
        if len(search.metric) > 1:
            fix = "Use gp, tpe, nsga2, sobol or random, or one metric."
            yield error("SH110", "cmaes follows one metric only", where=place, fix=fix)


def _finite(dimensions: Sequence[Dimension]) -> Iterator[ShoalError]:
    count = 1
    for dimension in dimensions:
        values = list(_ranges(dimension.values))
        if any(r.step is None and not r.whole for r in values):
            fix = "Add `step`, write a list of choices, or use another sampler."
            yield error(
                "SH110", "a grid needs numbers that can be counted", where=f"search.space.{dimension.key}", fix=fix
            )
            return
        count *= count_values(dimension.values)
    if count > MAX_GRID:
        fix = "Use larger steps, or the sampler random, sobol or gp."
        yield error("SH106", f"the grid has {count:,} points", where="search.space", fix=fix)


def _ranges(values: Range | Choice) -> Iterator[Range]:
    if isinstance(values, Range):
        yield values
    else:
        for option in values.options:
            for _, nested in option.nested:
                yield from _ranges(nested)


def count_values(values: Range | Choice) -> int:
    """Number of different values; 0 if they cannot be counted."""
    if isinstance(values, Range):
        if values.step is not None:
            return int((values.high - values.low) / values.step + 1e-9) + 1
        return int(values.high - values.low) + 1 if values.whole else 0
    total = 0
    for option in values.options:
        parts = [count_values(nested) for _, nested in option.nested]
        if 0 in parts:
            return 0
        product = 1
        for part in parts:
            product *= part
        total += product
    return total


def _numbers_only(dimensions: Sequence[Dimension], place: str) -> Iterator[ShoalError]:
    for dimension in dimensions:
        if isinstance(dimension.values, Choice) and not dimension.values.ordered:
            message = f"cmaes needs numbers, but '{dimension.key}' is a choice"
            yield error("SH110", message, where=place, fix="Use gp, tpe or nsga2, or a range.")


def _policy(search: SearchConfig, dimensions: Sequence[Dimension], job: Job) -> Iterator[ShoalError]:
    policy = search.policy
    paths = [(dimension, path) for dimension in dimensions for path in dimension.paths]
    for dimension, path in paths:
        if path in _LENGTH_FIELDS and policy.kind != "full":
            message = f"trials of another length cannot be compared on the way (`policy: {policy.kind}`)"
            fix = "Use `policy: full`, or remove it from the space."
            yield error("SH110", message, where=f"search.space.{dimension.key}", fix=fix)
    if isinstance(policy, PopulationPolicyConfig):
        yield from _population(search, paths)
    if search.repeat > 1 and job.averages_seeds:
        fix = "Remove `repeat`."
        yield error("SH107", "every trial has several seeds already", where="search.repeat", fix=fix)
    if isinstance(policy, HyperbandPolicyConfig | PopulationPolicyConfig) and job.averages_runs:
        message = f"`policy: {policy.kind}` cannot pause a job between folds or seeds"
        yield error("SH110", message, where="search.policy.kind", fix="Use `policy: promote` or `full`.")


def _population(search: SearchConfig, paths: Sequence[tuple[Dimension, str]]) -> Iterator[ShoalError]:
    for dimension, path in paths:
        inside = any(path.startswith(f"{section}.") for section in _CHANGED_IN_TRAINING)
        if not inside or any(option.nested for option in getattr(dimension.values, "options", ())):
            message = f"`{path}` cannot change while a member trains"
            fix = f"A population searches over values in {', '.join(_CHANGED_IN_TRAINING)}."
            yield error("SH110", message, where=f"search.space.{dimension.key}", fix=fix)
    if search.repeat > 1:
        message = "a member of a population changes its values on the way, so it cannot be repeated with another seed"
        yield error("SH110", message, where="search.repeat", fix="Remove `repeat`.")
    if len(search.metric) > 1:
        fix = "Use one metric, or `policy: promote`."
        yield error("SH110", "members of a population are compared by one metric", where="search.metric", fix=fix)
    if search.policy.sampler.name not in ("random", "sobol", "grid"):
        fix = "Use random, sobol or grid; later values come from the best members."
        message = "a sampler chooses only the first values of a population"
        yield error("SH110", message, where="search.policy.sampler", fix=fix)


def _metrics(search: SearchConfig, known: Sequence[str] | None) -> Iterator[ShoalError]:
    asked = [(f"search.metric.{i}", objective.metric) for i, objective in enumerate(search.metric)]
    asked += [(f"search.constraints.{i}", rule.metric) for i, rule in enumerate(search.constraints)]
    for i, (place, metric) in enumerate(asked):
        if known is not None and metric not in (*known, *FACTS):
            fix = f"{did_you_mean(metric, [*known, *FACTS])} Others are added under `metrics`."
            yield error("SH106", f"the job computes no metric '{metric}'", where=place, fix=fix)
        if known is not None and metric in known and metric in FACTS:
            fix = f"Give the metric of the job another name than {metric}."
            yield error("SH107", f"`{metric}` is the job's metric and a fact of every trial", where=place, fix=fix)
        if place.startswith("search.metric") and metric in [name for _, name in asked[:i]]:
            yield error("SH108", f"the metric '{metric}' is given twice", where=place, fix="Remove one of the two.")
    if search.metric and all(objective.metric in FACTS for objective in search.metric):
        fix = "Add a metric that training changes, such as loss."
        yield error("SH106", "the metrics are known without training", where="search.metric", fix=fix)


def _start(search: SearchConfig, dimensions: Sequence[Dimension]) -> Iterator[ShoalError]:
    by_key = {dimension.key: dimension for dimension in dimensions}
    for i, entry in enumerate(search.start):
        if isinstance(entry, str):
            continue
        for key, value in entry.items():
            place = f"search.start.{i}.{key}"
            if key not in by_key:
                yield error("SH103", f"the space has no '{key}'", where=place, fix=did_you_mean(key, list(by_key)))
            elif not holds(by_key[key].values, value):
                message = f"{json.dumps(value)} is not in the space"
                yield error("SH106", message, where=place, fix="Use a value inside the range or one of the choices.")


def holds(values: Range | Choice, value: Any) -> bool:
    """Whether a value is in a range or among the choices."""
    if isinstance(values, Choice):
        return any(_matches(option.value, value) for option in values.options)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return values.low <= value <= values.high and not (values.whole and value != int(value))


def _matches(template: Any, value: Any) -> bool:
    """Whether a value is an option, with any value inside its ranges."""
    if isinstance(template, dict) and ({"low", "high"} & set(template) or set(template) == {"choose"}):
        nested = parse_space({"x": template}).dimensions
        return bool(nested) and holds(nested[0].values, value)
    if isinstance(template, dict):
        same = isinstance(value, dict) and set(template) == set(value)
        return same and all(_matches(part, value[key]) for key, part in template.items())
    if isinstance(template, list):
        same = isinstance(value, list) and len(template) == len(value)
        return same and all(_matches(part, other) for part, other in zip(template, value, strict=True))
    return bool(template == value) and isinstance(template, bool) == isinstance(value, bool)
