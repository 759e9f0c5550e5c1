"""What a queue can be asked to do with a job."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt, TypeAdapter

from shoal.spec.base import Spec
from shoal.spec.job import MAX_WORKERS


class TrainingWork(Spec):
    """Train the job, with all its folds."""

    kind: Literal["training"] = "training"


class SearchWork(Spec):
    """Run the search of the job."""

    kind: Literal["search"] = "search"


class VerifyWork(Spec):
    """Train the job with each of these numbers of workers, and compare."""

    kind: Literal["verify"] = "verify"
    workers: Annotated[tuple[Annotated[int, Field(ge=1, le=MAX_WORKERS)], ...], Field(min_length=2, max_length=100)]


class CompressWork(Spec):
    """Compress what a run trained: the run in this directory, or that of job `of` of the queue. How: `compress` of the
    job."""

    kind: Literal["compress"] = "compress"
    run: Annotated[str, Field(max_length=300)] = ""
    of: NonNegativeInt = 0


SubmittedWork = Annotated[TrainingWork | SearchWork | VerifyWork, Field(discriminator="kind")]
"""What may come with a job from another machine. A compression names a run, which may be another user's."""
Work = TrainingWork | SearchWork | VerifyWork | CompressWork
CheckedWork = Annotated[Work, Field(discriminator="kind")]
WORK: TypeAdapter[Work] = TypeAdapter(CheckedWork)
TRAINING = TrainingWork()
