"""An entry of the queue, and the states that it goes through."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt, PositiveInt

from shoal.spec.base import Spec

EntryState = Literal["waiting", "running", "held", "finished", "failed", "cancelled"]
EntryKind = Literal["training", "search", "verify", "compress"]
ENDED: tuple[EntryState, ...] = ("finished", "failed", "cancelled")
MAX_PRIORITY = 100


class JobNeeds(Spec):
    """What the scheduler must know of a job: its bounds on workers, and what one worker takes.

    `cores` and `memory_bytes` are of one worker; 0 bytes: it has no limit. `gang`: workers are added and removed in
    multiples of this. `copies`: runs at the same time (parallel folds); each has its own workers. `fixed`: another
    number of workers gives other bits, so it keeps its first number. `steps`: of the whole run; 0: not known before it
    runs. `speed_key`: jobs that share it differ in nothing that a step takes time for; '': only equal jobs do.
    """

    least: PositiveInt = 1
    most: PositiveInt = 1
    cores: PositiveInt = 1
    gang: PositiveInt = 1
    copies: PositiveInt = 1
    lanes: PositiveInt = 1
    memory_bytes: NonNegativeInt = 0
    fixed: bool = False
    steps: NonNegativeInt = 0
    speed_key: str = ""

    @property
    def cores_per_worker(self) -> int:
        """Cores that one more worker of every copy takes."""
        return self.cores * self.copies


class QueueEntry(Spec):
    """A submitted job.

    `run` is the name of its run directory, '' before its first start. `epoch` is that of the daemon that runs it, 0 if
    none does. `proven`: its present attempt has made a new step, or outlived the first seconds. `early_deaths` counts
    the attempts in a row that did not. `fruitless` counts those, with the present one, that have made no new step,
    however long they took. `overtaken` counts the starts of jobs that stood behind it, and of later ones of higher
    priority. `blocked_by` is the failed job that it waited for. `change` numbers the changes of the whole queue: it
    grows with each change.
    """

    id: PositiveInt
    kind: EntryKind = "training"
    name: str = "job"
    user: str = ""
    priority: Annotated[int, Field(ge=-MAX_PRIORITY, le=MAX_PRIORITY)] = 0
    after: tuple[PositiveInt, ...] = ()
    needs: JobNeeds = JobNeeds()
    sha256: str = ""
    state: EntryState = "waiting"
    reason: str = ""
    run: str = ""
    epoch: NonNegativeInt = 0
    attempts: NonNegativeInt = 0
    proven: bool = False
    early_deaths: NonNegativeInt = 0
    fruitless: NonNegativeInt = 0
    cancel_requested: bool = False
    workers: NonNegativeInt = 0
    overtaken: NonNegativeInt = 0
    blocked_by: NonNegativeInt = 0
    submitted_t: float = 0.0
    started_t: float = 0.0
    ended_t: float = 0.0
    change: NonNegativeInt = 0

    @property
    def has_ended(self) -> bool:
        return self.state in ENDED

    def in_seats(self) -> QueueEntry:
        """As it counts where a worker takes one place, however many threads it has."""
        return self.model_copy(update={"needs": self.needs.model_copy(update={"cores": 1})})
