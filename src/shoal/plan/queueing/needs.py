"""What the work of an entry takes from the machines."""

from __future__ import annotations

from shoal.plan.queueing.entry import JobNeeds
from shoal.plan.queueing.work import TRAINING, SearchWork, VerifyWork, Work
from shoal.spec.data import FoldSplitConfig
from shoal.spec.job import Job
from shoal.spec.search.trial_job import workers_of_largest_trial


def needs_of(job: Job, work: Work = TRAINING) -> JobNeeds:
    needs = JobNeeds(
        least=job.workers.least,
        most=job.workers.most,
        cores=job.threads,
        gang=job.workers_per_replica,
        lanes=job.lane_count,
        memory_bytes=job.limits.memory_bytes or 0,
        fixed=bool(job.inexact_reason),
    )
    match work:
        case SearchWork():
            return needs.model_copy(update=_of_search(job))
        case VerifyWork():  # the numbers of workers are what it is about, so nobody else may choose them
            most = max(work.workers)
            return needs.model_copy(update={"least": most, "most": most, "gang": 1, "fixed": False})
    split = job.data.split
    copies = min(split.parallel, split.folds) if job.fold_count > 1 and isinstance(split, FoldSplitConfig) else 1
    if work.kind == TRAINING.kind and copies == 1:
        needs = needs.model_copy(update={"steps": job.steps or 0, "speed_key": speed_key(job)})
    return needs.model_copy(update={"copies": copies})


def speed_key(job: Job) -> str:
    """The same for jobs that differ in name, seed and length alone."""
    return job.model_copy(update={"seed": 0, "steps": 1, "epochs": None}).sha256()


def _of_search(job: Job) -> dict[str, object]:
    """All trials together have the workers of the job. How many there are changes no decision of the search."""
    trial = workers_of_largest_trial(job)
    most = max(job.workers.most // trial, 1) * trial
    return {"least": trial, "most": most, "gang": trial, "lanes": max(most // trial, 1), "fixed": False}
