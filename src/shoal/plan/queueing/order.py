"""Which waiting job is next, and why the others wait."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from shoal.plan.queueing.entry import QueueEntry
from shoal.plan.queueing.shares import CoreCapacity, misfit

MAX_OVERTAKEN = 20
"""Starts of jobs behind it, or of later ones of higher priority, after which a job goes before them all."""


def runnable(entries: Mapping[int, QueueEntry]) -> list[QueueEntry]:
    """The waiting jobs that nothing but room keeps from starting, the next one first.

    Order: jobs that were overtaken too often, the earliest first; then higher priority, then the user with fewer jobs
    before this one (running, or earlier in this order), then the user whose jobs ran longer ago, then the earlier
    submission. So a user with 10,000 jobs does not keep out the others, and nothing keeps out a job for ever.
    """
    ready = [e for e in entries.values() if e.state == "waiting" and not unfinished_predecessors(e, entries)]
    ready.sort(key=lambda e: e.id)
    turns = Counter(e.user for e in entries.values() if e.state == "running")
    last = _last_served(entries)
    keyed = []
    for entry in ready:
        place = (-entry.priority, turns[entry.user], last.get(entry.user, 0))
        keyed.append(
            ((True, *place, entry.id) if entry.overtaken < MAX_OVERTAKEN else (False, 0, 0, 0, entry.id), entry)
        )
        turns[entry.user] += 1
    return [entry for _, entry in sorted(keyed, key=lambda pair: pair[0])]


def _last_served(entries: Mapping[int, QueueEntry]) -> dict[str, int]:
    """By user: the newest change of a job that runs or has run. Changes are counted, so no clock matters."""
    found: dict[str, int] = {}
    for entry in entries.values():
        if entry.attempts and entry.state != "waiting":
            found[entry.user] = max(entry.change, found.get(entry.user, 0))
    return found


@dataclass(frozen=True)
class Window:
    """The jobs that a decision is about. `misfits`: why those that were passed by would not fit even an empty
    cluster."""

    entries: list[QueueEntry]
    misfits: dict[int, str] = field(default_factory=dict)


def window(ready: Iterable[QueueEntry], cluster: CoreCapacity) -> Window:
    """The first jobs of this order that could start, more of them than there is room for.

    A user with a quota has at most one more of them than cores, and one that the quota does not let start at all. So
    jobs that wait for a quota, or for machines that are not there, do not hide those behind them.
    """
    found = Window([])
    counts: Counter[tuple[str, bool]] = Counter()
    why = lru_cache(maxsize=None)(lambda needs: misfit(needs, cluster))
    for entry in ready:
        if len(found.entries) >= 2 * cluster.cores + 8:
            break
        if reason := why(entry.needs):
            found.misfits[entry.id] = reason
            continue
        if (quota := cluster.quotas.get(entry.user)) is not None:
            fits = entry.needs.least * entry.needs.cores_per_worker <= quota
            counts[entry.user, fits] += 1
            if counts[entry.user, fits] > (quota + 1 if fits else 1):
                continue
        found.entries.append(entry)
    return found


def unfinished_predecessors(entry: QueueEntry, entries: Mapping[int, QueueEntry]) -> list[int]:
    """The jobs that it comes after and that have not finished. One that is not in the queue any more has."""
    return [number for number in entry.after if number in entries and entries[number].state != "finished"]


def may_start(entry: QueueEntry, *, running: Sequence[QueueEntry], ready: Sequence[QueueEntry]) -> bool:
    """Whether the job may start beside these, as far as early deaths matter.

    A job that ended early before is tried alone: only when all others have outlived their first seconds, and nobody
    starts until it has too. If the daemon dies with it, it alone is charged. New jobs wait until all such are tried;
    runs that are resumed do not.
    """
    if any(one.early_deaths and not one.proven for one in running):
        return False
    if entry.early_deaths:
        return all(one.proven for one in running)
    return bool(entry.attempts) or not any(one.early_deaths for one in ready)


def overtaken_by(started: QueueEntry, ready: Iterable[QueueEntry], could_start: Container[int]) -> list[int]:
    """The jobs that count one more start before theirs, of those that could have started instead.

    These are the ones before it in this order, and earlier submissions of lower priority; of each user and priority
    only the first. Every job is the first at some time, so each gets its turn.
    """
    passed: dict[tuple[str, int], int] = {}
    is_before = True
    for entry in ready:
        is_before &= entry.id != started.id
        is_earlier = entry.id < started.id and entry.priority < started.priority
        if (is_before or is_earlier) and entry.id in could_start:
            passed.setdefault((entry.user, entry.priority), entry.id)
    return sorted(passed.values())


def only_want_room(
    ready: Iterable[QueueEntry],
    *,
    running: Iterable[QueueEntry],
    quotas: Mapping[str, int],
    misfits: Container[int],
) -> set[int]:
    """The ready jobs that neither a quota nor the size of the machines keeps waiting."""
    fitting = [entry for entry in ready if entry.id not in misfits]
    return {entry.id for entry in fitting} - over_quota([*running, *fitting], quotas)


def over_quota(entries: Iterable[QueueEntry], quotas: Mapping[str, int]) -> set[int]:
    """The jobs that the quota of their user keeps waiting, if these get their least workers in this order."""
    used: Counter[str] = Counter()
    found = set()
    for entry in entries:
        least = entry.needs.least * entry.needs.cores_per_worker
        if used[entry.user] + least > quotas.get(entry.user, math.inf):
            found.add(entry.id)
        else:
            used[entry.user] += least
    return found


def explain(entry: QueueEntry, entries: Mapping[int, QueueEntry], *, served: bool, before: Mapping[int, int]) -> str:
    """`served`: whether a daemon lives. `before`: how many jobs start before each, from `jobs_before`."""
    if entry.state == "running":
        orphaned = "" if served else "no daemon lives: `shoal up` resumes it. "
        stopping = "it is being stopped. " if entry.cancel_requested else ""
        return f"{orphaned}{stopping}{entry.reason}".strip()
    if entry.state != "waiting":
        return entry.reason
    if unfinished := unfinished_predecessors(entry, entries):
        names = ", ".join(f"{number} ({entries[number].state})" for number in unfinished)
        return f"it comes after {names}"
    if not served:
        return "no daemon lives: `shoal up` starts one, and so does the next `shoal submit`"
    return entry.reason or f"{before.get(entry.id, 0):,} waiting jobs are before it"


def jobs_before(entries: Mapping[int, QueueEntry]) -> dict[int, int]:
    """By job: how many others may start before it."""
    return {entry.id: rank for rank, entry in enumerate(runnable(entries))}
