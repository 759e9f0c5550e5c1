"""Stretches as runs: each is begun or resumed with `until`, and its result is read from the run's events."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import CancelledError
from dataclasses import dataclass, field

from shoal.errors import ShoalError, error, plural
from shoal.events import Event, RunState
from shoal.events.packed_file import has_content
from shoal.fleet.orphans import find_orphans
from shoal.jobs.fork_servers import hold_data
from shoal.jobs.resume import has_finished
from shoal.jobs.run_executor import RunExecutor, RunHandle
from shoal.jobs.run_result import PAUSED, RunResult
from shoal.jobs.search import trials
from shoal.jobs.search.allocation import HELP_AFTER_S, Work, allocate
from shoal.jobs.search.copies import copy_checkpoint
from shoal.jobs.search.journal import ShapeRow, ToldRow
from shoal.jobs.search.search_dir import SearchPaths
from shoal.plan.search.trial import Stretch
from shoal.spec.job import Job
from shoal.spec.run_paths import RunPaths

SMALL_PARAMETERS = 4_000_000
"""Up to this size a model is saved while the worker of the next stretch starts."""
MAX_FRUITLESS = 3
"""How often in a row a run may lose its workers without a further step before the trial counts as failed."""


@dataclass(eq=False)
class StretchRun:
    """A stretch without a result, and its run while it is active."""

    stretch: Stretch
    job: Job
    shape: ShapeRow
    paths: RunPaths
    handle: RunHandle | None = None
    state: RunState | None = None
    began_s: float = 0.0
    spent_s: float = 0.0
    releasing: bool = False
    last_split: str = "validation"
    fruitless: int = 0
    furthest_step: int = 0

    @property
    def until(self) -> int | None:
        """Where the run pauses; None if it runs to its end."""
        if self.stretch.end >= self.shape.units:
            return None
        return self.shape.boundaries[self.stretch.end - 1] if self.shape.boundaries else self.stretch.end

    @property
    def target_step(self) -> int:
        return self.shape.boundaries[self.stretch.end - 1] if self.shape.boundaries else 0

    @property
    def left_s(self) -> float | None:
        """Seconds to its end at the present speed."""
        if self.state is None or time.monotonic() - self.began_s < HELP_AFTER_S:
            return None
        rate = self.state.facts.get("steps_per_s", 0.0)
        return (self.target_step - self.state.step) / rate if rate else None

    @property
    def work(self) -> Work:
        return Work(
            self.stretch.number,
            (self.stretch.ends, self.stretch.number),
            needs=self.job.workers_per_replica,
            most=self.job.lane_count,
            active=self.handle is not None,
            releasing=self.releasing,
            left_s=self.left_s,
        )

    def on_event(self, paths: RunPaths, event: Event, state: RunState) -> None:
        self.state = state
        if paths.root != self.paths.root:
            return  # a fold: others follow
        if event.kind == "built":
            self.last_split = "test" if "test" in event["samples"] and self.until is None else "validation"
        ended = event.kind == "finished" or (event.kind == "left" and event["why"] == PAUSED)
        if ended or self._only_saves(event):
            self.releasing = True
        elif event.kind == "joined":
            self.releasing = False  # a worker died before the state was saved, and another one trains again

    def _only_saves(self, event: Event) -> bool:
        """Whether the workers have nothing left to compute. The next stretch begins while they save, unless two models
        at once may be too large."""
        if event.kind != "evaluated" or event["split"] != self.last_split or not self.target_step:
            return False
        small = self.shape.facts.get("parameters", math.inf) <= SMALL_PARAMETERS
        return small and event.step is not None and event.step >= self.target_step


def check_workers(count: int, *, needed: int) -> None:
    """SH106 if a trial needs more workers than the search has: it would wait for ever."""
    if count < needed:
        message = f"a trial needs {plural(needed, 'worker')}, and the search has {count}"
        raise error("SH106", message, where="workers", fix=f"Give it --workers {needed} or more.")


def _has_orphans(paths: RunPaths) -> bool:
    return not has_finished(paths) and any(find_orphans(one) for one in (paths, *paths.folds))


@dataclass
class StretchRuns:
    """All stretches without a result. Belongs to the search's thread."""

    paths: SearchPaths
    executor: RunExecutor
    workers: int
    undone: dict[int, StretchRun] = field(default_factory=dict)

    def add(self, stretch: Stretch, job: Job, shape: ShapeRow) -> None:
        self.undone[stretch.number] = StretchRun(stretch, job, shape, self.paths.trial(stretch.trial))

    @property
    def active(self) -> list[StretchRun]:
        return [run for run in self.undone.values() if run.handle is not None]

    def collect(self) -> Iterator[ToldRow]:
        """Results of stretches that have ended. A run that was stopped stays undone."""
        for run in self.active:
            assert run.handle is not None
            if run.handle.done:
                told = self._outcome(run, run.handle)
                run.spent_s += time.monotonic() - run.began_s
                run.handle, run.releasing = None, False
                if told is not None:
                    yield self._finish(run, told)

    def dispatch(self, *, awaited: int | None, takes_results: bool) -> Iterator[ToldRow]:
        """Start, help and release. Yields results of stretches whose runs had done everything before, unless results
        must wait."""
        works = [run.work for run in self.undone.values()]
        given = allocate(works, workers=self.workers, awaited=awaited)
        if works and not given and not self.active:
            check_workers(self.workers, needed=min(work.needs for work in works))
        self._preempt(works, given)
        for number, workers in given.items():
            run = self.undone[number]
            if run.handle is None and (known := self._known(run)) is not None:
                if takes_results:
                    yield self._finish(run, known)
            elif run.handle is None:
                self._start(run)
            if run.handle is not None:
                run.handle.scale(workers)

    def _preempt(self, works: Sequence[Work], given: Mapping[int, int]) -> None:
        """The search has fewer workers than before: some trials save and exit, and go on later."""
        for work in works:
            handle = self.undone[work.number].handle
            if work.active and not work.releasing and work.number not in given and handle is not None:
                handle.stop("preempted")

    def break_off(self) -> None:
        """End what is left of the trials' processes: the search cannot go on."""
        for run in self.active:
            assert run.handle is not None
            self.executor.break_off(run.handle)

    def stop(self, why: str) -> None:
        for run in self.active:
            assert run.handle is not None
            run.handle.stop(why)

    def _finish(self, run: StretchRun, told: ToldRow) -> ToldRow:
        del self.undone[run.stretch.number]
        return told.model_copy(update={"seconds": round(run.spent_s, 3), "t": round(time.time(), 3)})

    def _known(self, run: StretchRun) -> ToldRow | None:
        """The result, if the run is that far: an earlier driver was killed before it wrote the result down. Not if its
        workers wait for a driver: the run is resumed, so that they exit."""
        if not has_content(run.paths.events) or _has_orphans(run.paths):
            return None
        rows = trials.stretch_rows(run.paths, run.stretch, run.shape.boundaries)
        return None if rows is None else ToldRow(number=run.stretch.number, rows=[dict(row) for row in rows])

    def _start(self, run: StretchRun) -> None:
        run.began_s = time.monotonic()
        hold_data(self.executor.fork_servers.for_job(run.job), run.job)
        if run.paths.job.exists():
            run.handle = self.executor.submit_resume(run.paths, like=run.job, until=run.until, on_event=run.on_event)
            return
        if run.stretch.copy_of is not None:
            copy_checkpoint(run.job, run.paths, source=self.paths.trial(run.stretch.copy_of[0]), step=self._copied(run))
        run.handle = self.executor.submit(
            run.job, runs=self.paths.root, reserved=run.paths, until=run.until, on_event=run.on_event
        )

    def _copied(self, run: StretchRun) -> int:
        """The step of the state that a trial begins with."""
        assert run.stretch.copy_of is not None
        return run.shape.boundaries[run.stretch.copy_of[1] - 1]

    def _outcome(self, run: StretchRun, handle: RunHandle) -> ToldRow | None:
        """The result; None if the run must be resumed. Raises what would stop every other trial, too."""
        try:
            result = handle.result()
        except CancelledError:
            return None
        except ShoalError as failure:
            if trials.failure_code(failure) in trials.SEARCH_CODES:
                raise
            return ToldRow(number=run.stretch.number, failure=trials.describe_failure(failure, run.job))
        if result.status == "failed":
            return self._failure(run, result)
        rows = trials.stretch_rows(run.paths, run.stretch, run.shape.boundaries)
        if rows is not None:
            return ToldRow(number=run.stretch.number, rows=[dict(row) for row in rows])
        if result.status in (PAUSED, "finished"):
            trials.forget(run.paths)  # its events are damaged: train it again
        return None

    def _failure(self, run: StretchRun, result: RunResult) -> ToldRow | None:
        failure = result.deciding.error
        assert failure is not None
        code = trials.failure_code(failure)
        if code in trials.SEARCH_CODES:
            raise failure
        machine = code in trials.MACHINE_CODES
        if machine and self._may_retry(run):
            return None
        rows = trials.rows_so_far(run.paths, run.stretch, run.shape.boundaries)
        return ToldRow(
            number=run.stretch.number,
            rows=[dict(row) for row in rows],
            failure=trials.describe_failure(failure, run.job),
            machine=machine,
        )

    def _may_retry(self, run: StretchRun) -> bool:
        """Workers that were killed change nothing: the run goes on as long as it makes steps."""
        step = run.state.step if run.state else 0
        run.fruitless = 0 if step > run.furthest_step else run.fruitless + 1
        run.furthest_step = max(run.furthest_step, step)
        return run.fruitless < MAX_FRUITLESS
