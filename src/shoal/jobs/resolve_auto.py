"""`sync: auto`: plan a job before it starts."""

from __future__ import annotations

import os

from shoal.errors import error
from shoal.fleet.forkserver import ForkServer
from shoal.jobs.coroutines import Steps, run_steps
from shoal.jobs.fork_servers import ForkServerPool
from shoal.jobs.plan_file import PlanFile
from shoal.jobs.planner import WORKERS_PER_CORE, PlanResult, plan_steps
from shoal.plan.costs.inputs import PlanRequest, sync_section
from shoal.plan.costs.model import RunChoice
from shoal.plan.costs.serialise import plan_fields
from shoal.spec.job import Job
from shoal.spec.load import check_job


def resolve_auto(job: Job, *, fork_server: ForkServer | None = None) -> tuple[Job, PlanFile | None]:
    """The job with the planned settings, and its plan. A job without `sync: auto` is returned unchanged. Planning takes
    some seconds."""
    with ForkServerPool(fork_server) as fork_servers:
        return run_steps(resolve_auto_steps(job, fork_servers))


def resolve_auto_steps(job: Job, fork_servers: ForkServerPool) -> Steps[tuple[Job, PlanFile | None]]:
    """`resolve_auto` as steps that do not block."""
    if job.sync.kind != "auto":
        return job, None
    wanted = PlanRequest(least=job.workers.least, most=_max_workers(job))
    planned = yield from plan_steps(job, wanted, fork_servers)
    pick = planned.plan.pick
    if pick is None:
        raise error("SH621", _why_no_plan(planned), where="sync")
    kept = PlanFile(planned.facts, wanted, plan_fields(planned.plan, pick, planned.notes))
    return apply_choice(job, pick.prediction.choice), kept


def apply_choice(job: Job, choice: RunChoice) -> Job:
    """The job with the settings of this choice. `lanes` is set, because it affects the result and must not follow
    `workers`."""
    body = job.dump() | {"sync": sync_section(choice), "lanes": job.lane_count}
    body |= {"workers": choice.workers, "threads": choice.threads}
    if choice.codec != job.codec.kind:
        body["codec"] = choice.codec
    return check_job(Job.model_validate(body), check_names=False)


def _max_workers(job: Job) -> int:
    room = WORKERS_PER_CORE * len(os.sched_getaffinity(0))
    return max(job.workers.least, min(job.workers.most, job.lane_count, room))


def _why_no_plan(result: PlanResult) -> str:
    """The problem of the first candidate that would be allowed."""
    rows = result.plan.candidates
    first = next((row for row in rows if row.allowed), rows[0])
    offer = result.plan.offer
    instead = f"; {offer.prediction.choice.name} {offer.reason}" if offer else ""
    return f"{first.prediction.choice.name}: {first.reason}{instead}"
