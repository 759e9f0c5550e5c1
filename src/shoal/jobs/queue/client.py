"""What users do with a queue: submit, look, cancel, release, end the daemon."""

from __future__ import annotations

import getpass
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path

from shoal.errors import ShoalError, error
from shoal.jobs.queue.background import ensure_served
from shoal.jobs.queue.daemon_lock import is_served
from shoal.jobs.queue.queue_file import QueuePaths
from shoal.jobs.queue.queue_store import HistoryRow, QueueStore
from shoal.jobs.queue.served_with import refuse_other_daemon
from shoal.plan.queueing import transitions
from shoal.plan.queueing.entry import MAX_PRIORITY, QueueEntry
from shoal.plan.queueing.needs import speed_key
from shoal.plan.queueing.order import explain, jobs_before
from shoal.plan.queueing.work import TRAINING, VerifyWork, Work
from shoal.spec.job import Job

MAX_USER_CHARACTERS = 64
POLL_S = 0.05


@dataclass(frozen=True)
class QueueView:
    """The queue at one moment. `daemon_pid` is 0 if no daemon lives."""

    entries: dict[int, QueueEntry]
    daemon_pid: int = 0
    quotas: dict[str, int] | None = None

    def why(self, entry: QueueEntry) -> str:
        return explain(entry, self.entries, served=bool(self.daemon_pid), before=self._before)

    @cached_property
    def _before(self) -> dict[int, int]:
        return jobs_before(self.entries)


def submit(
    jobs: Iterable[Job],
    *,
    runs: Path,
    user: str = "",
    priority: int = 0,
    after: Sequence[int] = (),
    start: bool = True,
    work: Work = TRAINING,
) -> list[QueueEntry]:
    """Add checked jobs to the queue of this directory of runs, and see to it that a daemon serves it. `work` is what is
    to be done with each."""
    _check_priority(priority)
    user = user or getpass.getuser()
    if len(user) > MAX_USER_CHARACTERS or not user.isprintable():
        fix = f"Write at most {MAX_USER_CHARACTERS} printable characters."
        raise error("SH609", "a bad name of a user", where="--user", fix=fix)
    paths = QueuePaths.of(runs)
    if start:
        refuse_other_daemon(paths)
    with QueueStore(paths) as store:
        made = store.submit(_checked(jobs, work), user=user, priority=priority, after=after, work=work)
    if start:
        ensure_served(paths)
    return made


def _checked(jobs: Iterable[Job], work: Work) -> Iterator[Job]:
    from shoal.jobs.queue import entry_kinds  # loads all that a daemon runs, which who only looks does without

    for job in jobs:
        entry_kinds.KINDS[work.kind].check(job, work)
        named = f"{job.name[:57]}-verify" if isinstance(work, VerifyWork) else job.name
        yield job.model_copy(update={"name": named})


def submit_compression(
    parent: str,
    *,
    runs: Path,
    sets: Sequence[str] = (),
    user: str = "",
    priority: int = 0,
    after: Sequence[int] = (),
    start: bool = True,
) -> QueueEntry:
    """Add the compression of a run, or of what job `parent` of the queue trains: it then comes after that job."""
    from shoal.jobs.queue.compression import find_parent

    with QueueStore(QueuePaths.of(runs)) as store:
        job, work = find_parent(parent, store, sets)
    after = [*after, work.of] if work.of else after
    return submit([job], runs=runs, user=user, priority=priority, after=after, start=start, work=work)[0]


def look(runs: Path) -> QueueView:
    """The queue as it is. Starts nothing."""
    paths = QueuePaths.of(runs)
    if not paths.file.exists():
        return QueueView({})
    with QueueStore(paths, create=False) as store:
        lease = store.lease()
        entries = {entry.id: entry for entry in store.entries()}
        return QueueView(entries, lease.pid if is_served(paths) else 0, store.quotas())


def read_history(runs: Path, number: int | None = None) -> list[HistoryRow]:
    paths = QueuePaths.of(runs)
    if not paths.file.exists():
        return []
    with QueueStore(paths, create=False) as store:
        if number is not None:
            store.get(number)
        return store.history(number)


def cancel(runs: Path, number: int) -> QueueEntry:
    """Cancel a job. A running one is saved and stopped; this returns when that is asked for, not when it is done."""
    return _change(runs, number, transitions.request_cancel)


def release(runs: Path, number: int) -> QueueEntry:
    """Let a held or failed job go on."""
    return _change(runs, number, transitions.release)


def set_priority(runs: Path, number: int, priority: int) -> QueueEntry:
    """Change the priority of a job that has not ended."""
    _check_priority(priority)
    return _change(runs, number, partial(transitions.change_priority, priority=priority), start=False)


def set_quota(runs: Path, user: str, cores: int | None) -> None:
    with QueueStore(QueuePaths.of(runs)) as store:
        store.set_quota(user, cores)


def keep_planned_speeds(runs: Path, job: Job, speeds: Mapping[int, float]) -> str:
    """Let the queue of these runs know what a plan predicts of a job. Returns why it cannot; '' if it can."""
    try:
        with QueueStore(QueuePaths.of(runs)) as store:
            store.set_planned_speeds(speed_key(job), speeds)
    except ShoalError as failure:
        return f"The queue does not learn these speeds: {failure.message}."
    return ""


def down(runs: Path) -> bool:
    """Let the daemon save and stop all runs, and wait until none serves the queue: one that takes over meanwhile is
    asked too. Returns whether there was one."""
    paths = QueuePaths.of(runs)
    if not is_served(paths):
        return False
    with QueueStore(paths, create=False) as store:
        while is_served(paths):
            if not store.lease().stop_requested:  # a daemon that takes the lease begins without the request
                store.change_lease(lambda old: old.model_copy(update={"stop_requested": True}))
            time.sleep(POLL_S)
    return True


def _check_priority(priority: int) -> None:
    if not -MAX_PRIORITY <= priority <= MAX_PRIORITY:
        fix = f"Write -{MAX_PRIORITY} to {MAX_PRIORITY}."
        raise error("SH609", f"priority {priority}", where="--priority", fix=fix)


def _change(runs: Path, number: int, change: Callable[[QueueEntry], QueueEntry], *, start: bool = True) -> QueueEntry:
    paths = QueuePaths.of(runs)
    if not paths.file.exists():
        raise error("SH646", f"there is no job {number}: the queue is empty", where=str(paths.runs))
    with QueueStore(paths, create=False) as store:
        try:
            entry = store.apply(number, change)
        except transitions.WrongStateError as failure:
            raise error("SH647", str(failure), where=str(number)) from failure
    if start and not entry.has_ended:
        ensure_served(paths)
    return entry


class LocalQueue:
    """The queue of a directory of runs on this machine, with the verbs of `RemoteQueue`."""

    def __init__(self, runs: Path) -> None:
        self._runs = runs

    def submit(
        self, job: Job, *, user: str = "", priority: int = 0, after: Sequence[int] = (), work: Work = TRAINING
    ) -> QueueEntry:
        return submit([job], runs=self._runs, user=user, priority=priority, after=after, work=work)[0]

    def submit_compression(
        self, parent: str, sets: Sequence[str], *, user: str = "", priority: int = 0, after: Sequence[int] = ()
    ) -> QueueEntry:
        return submit_compression(parent, runs=self._runs, sets=sets, user=user, priority=priority, after=after)

    def look(self) -> QueueView:
        return look(self._runs)

    def history(self, number: int | None = None) -> list[HistoryRow]:
        return read_history(self._runs, number)

    def cancel(self, number: int) -> QueueEntry:
        return cancel(self._runs, number)

    def release(self, number: int) -> QueueEntry:
        return release(self._runs, number)

    def set_priority(self, number: int, priority: int) -> QueueEntry:
        return set_priority(self._runs, number, priority)
