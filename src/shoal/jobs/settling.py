"""`sync: auto`: a job is planned before it starts."""

from __future__ import annotations

import os

from shoal.errors import error
from shoal.fleet.engines.local import Nursery
from shoal.jobs import planning
from shoal.jobs.kept import Kept
from shoal.jobs.planning import WORKERS_PER_CORE, Planned
from shoal.plan.costs.facts import Choice
from shoal.plan.costs.reading import Wanted, sync_section
from shoal.plan.costs.telling import plan_told
from shoal.spec.job import Job
from shoal.spec.load import check_job


def settle(job: Job, *, nursery: Nursery | None = None) -> tuple[Job, Kept | None]:
    """The job with nothing left open: the same one, unless it has `sync: auto`. That is measured and planned, which
    takes some seconds."""
    if job.sync.kind != "auto":
        return job, None
    wanted = Wanted(least=job.workers.least, most=_most(job))
    planned = planning.plan(job, wanted, nursery=nursery)
    pick = planned.plan.pick
    if pick is None:
        raise error("SH621", _why_none(planned), where="sync")
    kept = Kept(planned.facts, wanted, plan_told(planned.plan, pick, planned.notes))
    return concrete(job, pick.prediction.choice), kept


def concrete(job: Job, choice: Choice) -> Job:
    """The job, done this way. `lanes` no longer follows the workers: it is part of the result."""
    body = job.dump() | {"sync": sync_section(choice), "lanes": job.lane_count}
    body |= {"workers": choice.workers, "threads": choice.threads}
    if choice.codec != job.codec.kind:
        body["codec"] = choice.codec
    return check_job(Job.model_validate(body), check_names=False)


def _most(job: Job) -> int:
    room = WORKERS_PER_CORE * len(os.sched_getaffinity(0))
    return max(job.workers.least, min(job.workers.most, job.lane_count, room))


def _why_none(planned: Planned) -> str:
    """What is wrong with the first that would be allowed."""
    rows = planned.plan.rows
    first = next((row for row in rows if row.allowed), rows[0])
    offer = planned.plan.offer
    instead = f"; {offer.prediction.choice.name} {offer.reason}" if offer else ""
    return f"{first.prediction.choice.name}: {first.reason}{instead}"
