"""The plan of a job's search, and what it takes over from earlier ones."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import chain, zip_longest
from statistics import NormalDist
from typing import Any

from shoal.plan.search.ledger import Ledger
from shoal.plan.search.policies.make import make_policy
from shoal.plan.search.samplers.make import make_sampler
from shoal.plan.search.space import Space
from shoal.plan.search.virtual import VirtualSearch
from shoal.spec.job import Job
from shoal.spec.search import ObjectiveConfig
from shoal.spec.search.own_values import OUTSIDE, in_words_of
from shoal.spec.search.space import parse_space

Values = Mapping[str, Any]

BEST_OF_A_SEARCH = 8
BEST_OF_SEVERAL = 12
"""More would use up the first training's time at the first rung."""
CHEAPER = 0.3
"""What a smaller cost counts beside a better place: in spreads of the values, for the logarithm of the cost."""


def make_search(
    job: Job, *, suggestions: Sequence[Mapping[str, Any]] | None = None, space: Space | None = None
) -> VirtualSearch:
    """The search of a checked job.

    `suggestions`: what is tried first, as values by key of the space; without it the values in `search.start`. The
    caller replaces names of runs and searches there by their values. `space`: instead of the job's, for simulations.
    """
    search = job.search
    assert search is not None
    space = space or Space(search.space, defaults=own_values(job, search.space))
    ledger = Ledger(
        space=space,
        objectives=objectives(job),
        seed=job.seed if search.seed is None else search.seed,
        job_seed=job.seed,
        slots=search.slots,
        folds=job.averages_runs,
        constraints=search.constraints,
    )
    first = suggestions if suggestions is not None else [s for s in search.start if isinstance(s, dict)]
    return VirtualSearch(
        ledger,
        make_policy(search.policy, folds=ledger.folds),
        make_sampler(search.policy.sampler),
        search.budget,
        suggestions=[space.suggest(values) for values in first],
        repeat=search.repeat,
        clock_order=search.order == "clock",
        ties_first=search.policy.kind == "population",  # members that train side by side are compared with each other
    )


def objectives(job: Job) -> list[ObjectiveConfig]:
    """The metrics of the search; without any, the metric that ranks models in the job. Where that says whether smaller
    or larger is better, it holds for the search too."""
    assert job.search is not None
    ranks = ObjectiveConfig(metric=job.best.metric, mode="max" if job.best.sign > 0 else "min")
    told = job.best.metric if job.best.mode != "auto" else None
    return [ranks if goal.metric == told and goal.mode == "auto" else goal for goal in job.search.metric] or [ranks]


def own_values(job: Job, space: Mapping[str, Any]) -> dict[str, Any]:
    """The values that the job itself has for the keys of the space, as the space writes them, where they lie in it."""
    data, found = job.dump(), {}
    for dimension in parse_space(space).dimensions:
        parts = [_value_at(data, path) for path in dimension.paths]
        value = in_words_of(dimension.values, parts if len(parts) > 1 else parts[0])
        if value is not OUTSIDE:
            found[dimension.key] = value
    return found


def _value_at(data: Any, path: str) -> Any:
    """None where the job has nothing: a job without a field is one in which it is null."""
    for part in path.split("."):
        data = data.get(part) if isinstance(data, dict) else None
    return data


def first_trials(searches: Sequence[Sequence[tuple[Values, float]]]) -> list[Values]:
    """The values that a new search tries first, from the values and costs of the trials of each earlier search, the
    best first. Searches take turns: which of them is most like the new one is not known yet."""
    turns = zip_longest(*map(in_order_of_promise, searches))
    found: list[Values] = []
    for values in chain.from_iterable(turns):
        if values is not None and values not in found:
            found.append(values)
    return found[: BEST_OF_A_SEARCH if len(searches) == 1 else max(BEST_OF_SEVERAL, len(searches))]


def in_order_of_promise(trials: Sequence[tuple[Values, float]]) -> list[Values]:
    """A cheap trial stands before one that is only a little better: it shows its value sooner."""

    def promise(place: int) -> float:
        cost = trials[place][1]
        score = NormalDist().inv_cdf(1 - (place + 0.5) / len(trials))
        return score - CHEAPER * math.log(cost) if 0 < cost < math.inf else score

    return [trials[place][0] for place in sorted(range(len(trials)), key=lambda place: (-promise(place), place))]
