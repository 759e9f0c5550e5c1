"""What a queue can run: jobs, and searches over them. Each kind knows how its work begins, goes on and has ended."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from shoal.jobs import run_dir
from shoal.jobs.resume import has_finished
from shoal.jobs.run_executor import OnEvent, RunExecutor, RunHandle
from shoal.jobs.search import search_dir
from shoal.jobs.search.driver import check_searchable, submit_search
from shoal.jobs.search.receipt import read_receipt
from shoal.jobs.search.search_dir import SearchPaths
from shoal.jobs.search.start_values import with_start_values
from shoal.plan.queueing.entry import EntryKind
from shoal.spec.job import Job
from shoal.spec.run_paths import RunPaths


@dataclass(frozen=True)
class Watch:
    """What an attempt calls: `on_event` for every event of its run, `on_progress` when a result is kept for good."""

    on_event: OnEvent
    on_progress: Callable[[], None]


class Kind(Protocol):
    def check(self, job: Job) -> None:
        """Raise what is wrong with a job of this kind before it is submitted."""

    def has_finished(self, paths: RunPaths) -> bool: ...

    def start(self, executor: RunExecutor, job: Job, paths: RunPaths, watch: Watch) -> RunHandle:
        """Begin in a reserved directory."""

    def resume(self, executor: RunExecutor, paths: RunPaths, watch: Watch) -> RunHandle: ...


class TrainingKind:
    def check(self, job: Job) -> None:
        pass

    def has_finished(self, paths: RunPaths) -> bool:
        return has_finished(paths)

    def start(self, executor: RunExecutor, job: Job, paths: RunPaths, watch: Watch) -> RunHandle:
        return executor.submit(job, runs=paths.root.parent, on_event=watch.on_event, reserved=paths)

    def resume(self, executor: RunExecutor, paths: RunPaths, watch: Watch) -> RunHandle:
        return executor.submit_resume(paths, on_event=watch.on_event)


class SearchKind:
    def check(self, job: Job) -> None:
        check_searchable(job)

    def has_finished(self, paths: RunPaths) -> bool:
        return read_receipt(SearchPaths(paths).receipt) is not None

    def start(self, executor: RunExecutor, job: Job, paths: RunPaths, watch: Watch) -> RunHandle:
        check_searchable(job)
        job = with_start_values(job, run_dir.check_runs(paths.root.parent))
        search = search_dir.create(job, paths.root.parent, reserved=paths)
        return submit_search(executor, search, on_result=watch.on_progress)

    def resume(self, executor: RunExecutor, paths: RunPaths, watch: Watch) -> RunHandle:
        search = SearchPaths(paths)
        search.journal.touch(exist_ok=True)  # whoever created the directory may have been killed before
        return submit_search(executor, search, on_result=watch.on_progress)


KINDS: Mapping[EntryKind, Kind] = {"training": TrainingKind(), "search": SearchKind()}
