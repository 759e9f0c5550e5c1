"""Which job comes first, and whose speed counts how much.

A job with little work left counts more, because its end makes room soonest. With m jobs of known size, the one with
the i-th largest remaining time has the weight (i/m)^r - ((i-1)/m)^r: the shares that minimise the mean completion time
where speed grows with the power 1 - 1/r of the workers. No weight is below 0.4 of the mean one, so that the longest
jobs, which end last, do not stand still while others come. Jobs of unknown size have the mean weight, 1/m.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from shoal.plan.scheduling.views import Floats, Ints

PRIORITY_FACTOR = 2.0
"""Each level of priority doubles the weight."""
MAX_LEVEL = 32


@dataclass(frozen=True)
class Standing:
    """Numbers of all jobs, one row each: remaining time with the smallest size (NaN if unknown), and so on."""

    remaining_s: Floats
    waited_s: Floats
    age_s: Floats
    submitted_s: Floats
    priority: Ints
    slots: Ints


@dataclass(frozen=True)
class Weighting:
    """`exponent` 1 treats all jobs alike (proportional fairness), 2 favours those with little work left. No job counts
    less than `least` of the mean.

    `patience_s`: a job that has waited so long in all comes before everybody, first come first served. Such jobs take
    at most `starved_share` of the slots, but one of them always runs.
    """

    exponent: float = 2.2
    least: float = 0.4
    patience_s: float = 3600.0
    starved_share: float = 0.25

    def weights(self, jobs: Standing) -> Floats:
        count = len(jobs.remaining_s)
        weights = np.full(count, 1.0 / max(count, 1))
        known = np.flatnonzero(~np.isnan(jobs.remaining_s))
        if len(known):
            ranked = known[np.lexsort((known, -jobs.remaining_s[known]))]
            edges = np.linspace(0.0, 1.0, len(known) + 1) ** self.exponent
            weights[ranked] = np.maximum(np.diff(edges) * len(known), self.least) / count
        level = np.clip(jobs.priority, -MAX_LEVEL, MAX_LEVEL)
        return np.asarray(weights * PRIORITY_FACTOR**level)

    def order(self, jobs: Standing, total_slots: int) -> Ints:
        """Starved jobs, then by priority; within a priority the highest ratio of age and remaining time."""
        known = jobs.remaining_s[~np.isnan(jobs.remaining_s)]
        usual_s = float(np.sort(known)[len(known) // 2]) if len(known) else 1.0
        time = np.where(np.isnan(jobs.remaining_s), usual_s, jobs.remaining_s)
        ratio = (jobs.age_s + time) / np.maximum(time, 1e-9)
        order = np.lexsort((jobs.submitted_s, -ratio, -jobs.priority))
        return _to_front(order, self._starved(jobs, total_slots))

    def _starved(self, jobs: Standing, total_slots: int) -> Ints:
        late = np.flatnonzero((jobs.waited_s > self.patience_s) & (jobs.slots > 0) & (jobs.slots <= total_slots))
        late = late[np.lexsort((late, jobs.submitted_s[late]))]
        used = np.cumsum(jobs.slots[late])
        return late[: max(int(np.searchsorted(used, self.starved_share * total_slots, side="right")), 1)]


def _to_front(order: Ints, first: Ints) -> Ints:
    return np.concatenate([first, order[~np.isin(order, first)]])
