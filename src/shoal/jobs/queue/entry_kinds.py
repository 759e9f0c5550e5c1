"""What a queue can run: jobs, searches over them, verifications and compressions. Each kind knows how its work begins,
goes on and has ended."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from shoal.errors import error
from shoal.events import Event, RunState
from shoal.jobs import run_dir
from shoal.jobs.compression.compress import check_compressible
from shoal.jobs.compression.shrink_legs import last_leg
from shoal.jobs.queue.compression import compression_steps, ended_compression
from shoal.jobs.queue.verification import check_verifiable, ended_verification, verification_steps
from shoal.jobs.resume import has_finished
from shoal.jobs.run_executor import OnEvent, RunExecutor, RunHandle
from shoal.jobs.run_result import RunResult
from shoal.jobs.search import search_dir
from shoal.jobs.search.driver import check_searchable, submit_search
from shoal.jobs.search.receipt import read_receipt
from shoal.jobs.search.search_dir import SearchPaths
from shoal.jobs.search.start_values import with_start_values
from shoal.plan.queueing.entry import EntryKind
from shoal.plan.queueing.work import CompressWork, VerifyWork, Work
from shoal.spec.job import Job
from shoal.spec.run_paths import RunPaths


@dataclass(frozen=True)
class Watch:
    """What an attempt calls: `on_event` for every event of its run, `on_progress` when a result is kept for good."""

    on_event: OnEvent
    on_progress: Callable[[], None]

    def of_parts(self) -> OnEvent:
        """For runs that are parts of the work: only whether they make new steps counts."""
        first: dict[RunPaths, int] = {}

        def watch(paths: RunPaths, event: Event, state: RunState) -> None:
            if state.step > first.setdefault(paths, state.step):
                self.on_progress()

        return watch


@dataclass(frozen=True)
class Assignment:
    """What is to be done, in a directory that was reserved for it, and in which it may have begun. `load_job` reads the
    job as it was submitted, with the engine and the network that the daemon gives it now: what has begun goes on there.
    """

    work: Work
    paths: RunPaths
    load_job: Callable[[], Job]


class Kind(Protocol):
    def check(self, job: Job, work: Work) -> None:
        """Raise what is wrong with a job of this kind before it is submitted."""

    def ended(self, paths: RunPaths) -> RunResult | None:
        """The result, if it has one: whoever worked on it may have been killed before the queue knew."""

    def begin(self, executor: RunExecutor, given: Assignment, watch: Watch) -> RunHandle:
        """Begin, or go on."""


class TrainingKind:
    def check(self, job: Job, work: Work) -> None:
        pass

    def ended(self, paths: RunPaths) -> RunResult | None:
        return RunResult(paths, "finished") if has_finished(last_leg(paths)) else None

    def begin(self, executor: RunExecutor, given: Assignment, watch: Watch) -> RunHandle:
        paths = given.paths
        if paths.job.is_file():
            return executor.submit_resume(paths, like=given.load_job(), on_event=watch.on_event)
        return executor.submit(given.load_job(), runs=paths.root.parent, on_event=watch.on_event, reserved=paths)


class SearchKind:
    def check(self, job: Job, work: Work) -> None:
        check_searchable(job)

    def ended(self, paths: RunPaths) -> RunResult | None:
        return None if read_receipt(SearchPaths(paths).receipt) is None else RunResult(paths, "finished")

    def begin(self, executor: RunExecutor, given: Assignment, watch: Watch) -> RunHandle:
        search, runs, job = SearchPaths(given.paths), given.paths.root.parent, given.load_job()
        if not search.job.is_file():
            check_searchable(job)
            search_dir.create(with_start_values(job, run_dir.check_runs(runs)), runs, reserved=given.paths)
        search.journal.touch(exist_ok=True)  # whoever created the directory may have been killed before
        return submit_search(executor, search, like=job, on_result=watch.on_progress)


class VerifyKind:
    def check(self, job: Job, work: Work) -> None:
        assert isinstance(work, VerifyWork)
        check_verifiable(job, work)

    def ended(self, paths: RunPaths) -> RunResult | None:
        return ended_verification(paths)

    def begin(self, executor: RunExecutor, given: Assignment, watch: Watch) -> RunHandle:
        work, job = given.work, given.load_job()
        assert isinstance(work, VerifyWork)
        return executor.submit_steps(
            lambda handle: verification_steps(handle, executor, job, work, given.paths, watch.of_parts())
        )


class CompressKind:
    def check(self, job: Job, work: Work) -> None:
        check_compressible(job)

    def ended(self, paths: RunPaths) -> RunResult | None:
        return ended_compression(paths)

    def begin(self, executor: RunExecutor, given: Assignment, watch: Watch) -> RunHandle:
        work, job = given.work, given.load_job()
        assert isinstance(work, CompressWork)
        if not work.run:
            raise error("SH606", f"job {work.of} has no run", where="compress")
        return executor.submit_steps(
            lambda handle: compression_steps(handle, executor, job, work, given.paths, watch.on_progress)
        )


KINDS: Mapping[EntryKind, Kind] = {
    "training": TrainingKind(),
    "search": SearchKind(),
    "verify": VerifyKind(),
    "compress": CompressKind(),
}
