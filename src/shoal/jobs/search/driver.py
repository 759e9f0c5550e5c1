"""Drives one search: decides, starts stretches, writes results down, until nothing is left to decide."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from shoal.errors import EXIT_INTERRUPTED, EXIT_OK, EXIT_TERMINATED, EXIT_TRAIN, ShoalError, error
from shoal.fleet.engines.make import capacity_of
from shoal.fleet.forkserver import ForkServer
from shoal.jobs import run_dir
from shoal.jobs.coroutines import TICK_S, Steps
from shoal.jobs.fork_servers import ForkServerPool
from shoal.jobs.probes import PROBE_MODULE
from shoal.jobs.resume import load_moved
from shoal.jobs.run_executor import RunExecutor, RunHandle, catch_stop_signals
from shoal.jobs.run_result import RunResult
from shoal.jobs.search import search_dir
from shoal.jobs.search.journal import (
    AnyRow,
    ClosedRow,
    DecidedRow,
    DifferenceRow,
    EndedRow,
    Journal,
    ShapeRow,
    StartedRow,
    ToldRow,
    rows_of,
)
from shoal.jobs.search.keep import Keeper
from shoal.jobs.search.keep_population import PopulationKeeper
from shoal.jobs.search.receipt import SearchReceipt, make_receipt, read_receipt, read_winner, write_receipt
from shoal.jobs.search.replay import check_again, replay
from shoal.jobs.search.search_dir import SearchPaths
from shoal.jobs.search.shapes import ShapeProbe
from shoal.jobs.search.start_values import with_start_values
from shoal.jobs.search.stretches import StretchRuns, check_workers
from shoal.jobs.search.table import Judge, SearchTable, mean_and_error
from shoal.jobs.search.trials import trial_job
from shoal.jobs.worker_group import initial_workers
from shoal.plan.search.make import make_search
from shoal.plan.search.policies.population import Population
from shoal.plan.search.samplers.make import make_sampler
from shoal.plan.search.trial import SearchEnd, ShapeWanted, Stretch, Wait
from shoal.spec.job import Job
from shoal.spec.load import load_run_job
from shoal.spec.search.trial_job import check_space, workers_of_largest_trial

UPDATE_S = 0.2
STOPPED = "stopped"
"""The status of a search that `shoal stop` has stopped."""


@dataclass(frozen=True)
class SearchProgress:
    """What a display shows. `runs`: the stretches that have no result, some of them active. `earlier_rows` of the
    journal were written by earlier drivers."""

    paths: SearchPaths
    job: Job
    rows: Sequence[AnyRow]
    table: SearchTable
    runs: StretchRuns
    earlier_rows: int
    elapsed_s: float

    @property
    def eta_s(self) -> float | None:
        """Seconds to the end of the budget at the present speed: of the part of it that ends first."""
        assert self.job.search is not None
        budget = self.job.search.budget
        tried = sum(bool(trial.rows or trial.failure) for trial in Judge.of(self.job).begun(self.table))
        parts = [self.table.spent / (budget.trainings or math.inf), tried / (budget.trials or math.inf)]
        parts.append(self.elapsed_s / (3600 * (budget.hours or math.inf)))
        return self.elapsed_s * max(1 / max(parts) - 1, 0.0) if max(parts) > 0 else None


@dataclass(frozen=True)
class SearchOutcome:
    """A search that has ended with a receipt, or was stopped and can be resumed."""

    paths: SearchPaths
    status: str
    receipt: SearchReceipt | None = None

    @property
    def exit_code(self) -> int:
        if self.receipt is not None:
            return EXIT_TRAIN if self.receipt.winner is None else EXIT_OK
        return EXIT_INTERRUPTED if self.status == "interrupted" else EXIT_TERMINATED


OnUpdate = Callable[[SearchProgress], None]


class SearchDriver:
    """One search. Belongs to one thread; it holds the search's lock while `run` runs."""

    def __init__(
        self,
        job: Job,
        paths: SearchPaths,
        executor: RunExecutor,
        *,
        workers: int,
        on_update: OnUpdate | None = None,
    ) -> None:
        assert job.search is not None
        self.job = job
        self.search = job.search
        self.paths = paths
        self.executor = executor
        self.runs = StretchRuns(paths, executor, workers)
        self._on_update = on_update or (lambda progress: None)
        self._updated_s = 0.0
        self._plan = make_search(job)
        self._journal = Journal(paths.journal)
        self._table = SearchTable.of(self._journal.rows)
        self._shapes = {row.trial: row for row in rows_of(self._journal.rows, ShapeRow)}
        self._keeper = Keeper(job, paths)
        self._population: PopulationKeeper | None = None
        if isinstance(self._plan.policy, Population):
            self._population = PopulationKeeper(self._plan.policy, paths, self.search.keep_bytes)
        self._probe = ShapeProbe(executor.fork_servers, capacity_of(job.engine), latency=self.search.wants_latency)
        self._jobs: dict[int, Job] = {}  # of the trial that was proposed last
        self._asking: Steps[ShapeRow] | None = None
        self._asking_filenos: list[int] = []
        self._awaited: int | None = None
        self._checking: Iterator[DifferenceRow | None] = iter(())
        self._end: SearchEnd | None = None
        self._began_s = time.monotonic()
        self._earlier_s = earlier_seconds(self._journal.rows)
        self._earlier_rows = len(self._journal.rows)

    def run(self) -> SearchOutcome:
        """Run the search to its end, or until Ctrl-C, SIGTERM or `shoal stop`: then all trials save and exit."""
        control = RunHandle()
        steps = self.steps(control)
        with contextlib.closing(steps), catch_stop_signals() as asked:
            while True:
                if asked:
                    control.stop(asked[0])
                try:
                    filenos = next(steps)
                except StopIteration as end:
                    outcome: SearchOutcome = end.value
                    return outcome
                self.executor.tick(TICK_S, also=filenos)

    def steps(self, control: RunHandle) -> Steps[SearchOutcome]:
        """The search as work that never blocks. Trials advance while the executor ticks. `control` stops it, and says
        how many workers all trials have together; that changes no decision."""
        with contextlib.closing(self._journal), contextlib.ExitStack() as trials:
            trials.callback(self.runs.break_off)
            self._begin()
            while not control.stop_reason:
                self.runs.workers = control.wanted_workers or self.runs.workers
                self._advance()
                if self._end is not None:
                    return self._finish(self._end)
                self._check()
                self._update()
                yield self._asking_filenos
                if self._stop_requested():
                    control.stop(STOPPED)
            return (yield from self._stop(control.stop_reason))

    def _stop_requested(self) -> bool:
        """Whether `shoal stop` asks to stop. The request is used up."""
        if not self.paths.stop_request.exists():
            return False
        self.paths.stop_request.unlink(missing_ok=True)
        return True

    # ---- the beginning ----

    def _begin(self) -> None:
        """Continue where the journal ends. Whether this machine would decide the same is checked while trials train."""
        self.paths.stop_request.unlink(missing_ok=True)  # it was meant for an earlier driver
        earlier = list(self._journal.rows)
        unfinished = replay(self._plan, earlier)
        self._checking = check_again(make_search(self.job), earlier)
        self._write(StartedRow(job_sha256=self.job.sha256(), workers=self.runs.workers, t=round(time.time(), 3)))
        for stretch in unfinished.values():
            self._add(stretch)

    def _check(self, *, all_rows: bool = False) -> None:
        """Check one more row of the journal, or all that are left."""
        for difference in self._checking if all_rows else islice(self._checking, 1):
            if difference is not None:
                self._write(difference)

    def _write(self, row: AnyRow) -> None:
        self._journal.append(row)
        self._table.apply(row)

    # ---- one tick ----

    def _advance(self) -> None:
        """Take results in, decide, start what was decided. While a shape is asked for, results wait: a replay must
        find them in the same order."""
        self._answer()
        if self._asking is None:
            for told in self.runs.collect():
                self._tell(told)
            self._decide()
        for told in self.runs.dispatch(awaited=self._awaited, takes_results=self._asking is None):
            self._tell(told)
        if self._asking is None and self._end is None:
            self._decide()

    def _tell(self, told: ToldRow) -> None:
        self._write(self._averaged(told) if self.job.averages_runs else told)
        self._plan.tell(told.number, told.result)
        busy = {run.stretch.trial for run in self.runs.undone.values()}
        for row in self._keeper.make_room(self._table, busy=busy):
            self._write(row)
        if self._population is not None:
            self._population.make_room(self._plan.ledger, self._shapes, busy=busy | self._donors())

    def _donors(self) -> set[int]:
        """Trials whose states will be copied by stretches that have not begun."""
        return {run.stretch.copy_of[0] for run in self.runs.undone.values() if run.stretch.copy_of is not None}

    def _averaged(self, told: ToldRow) -> ToldRow:
        """The result with the mean over all folds or seeds of its trial so far."""
        trial = self._table.trials[self._table.decisions[told.number].trial]
        means, errors = mean_and_error([*trial.rows, *told.rows])
        return told.model_copy(update={"mean": means, "error": errors})

    def _decide(self) -> None:
        """Decide until a result or a shape is missing."""
        self._close_if_late()
        while self._asking is None and self._end is None:
            decision = self._plan.decide()
            match decision:
                case Stretch():
                    self._write(DecidedRow.of(decision))
                    self._add(decision)
                case ShapeWanted():
                    self._ask(decision)
                case Wait():
                    self._awaited = decision.number
                    return
                case SearchEnd():
                    self._end = decision

    def _add(self, stretch: Stretch) -> None:
        job = self._jobs.pop(stretch.trial, None) or trial_job(self.job, stretch.changes, self.paths)
        self.runs.add(stretch, job, self._shapes[stretch.trial])

    def _close_if_late(self) -> None:
        hours = self.search.budget.hours
        if hours is not None and self.elapsed_s > hours * 3600 and not rows_of(self._journal.rows, ClosedRow):
            row = ClosedRow(why=f"{hours:g} hours are over")
            self._write(row)
            self._plan.close(row.why)

    # ---- shapes ----

    def _ask(self, wanted: ShapeWanted) -> None:
        known = self._shapes.get(wanted.trial)
        if known is not None and known.changes == dict(wanted.changes):
            self._plan.tell_shape(wanted.trial, known.shape)  # an earlier driver asked, and was killed
            return
        try:
            job: Job | ShoalError = trial_job(self.job, wanted.changes, self.paths)
        except ShoalError as failure:
            job = failure
        self._jobs = {wanted.trial: job} if isinstance(job, Job) else {}
        self._asking = self._probe.ask(wanted, job, self.search.cost)
        self._answer()

    def _answer(self) -> None:
        """Advance the probe. Once it has an answer, the plan is told."""
        if self._asking is None:
            return
        try:
            self._asking_filenos = list(next(self._asking))
        except StopIteration as end:
            row: ShapeRow = end.value
            self._asking, self._asking_filenos = None, []
            self._write(row)
            self._shapes[row.trial] = row
            self._plan.tell_shape(row.trial, row.shape)

    # ---- the end ----

    def _finish(self, end: SearchEnd) -> SearchOutcome:
        self._check(all_rows=True)
        if self._table.ended is None:
            runs = read_winner(self.paths, end.best)
            self._write(EndedRow(best=end.best, why=end.why, weights_sha256=runs.weights_sha256 if runs else ""))
        receipt = make_receipt(
            self.job, self.paths, self._journal.rows, workers=self.runs.workers, total_s=self.elapsed_s
        )
        write_receipt(self.paths, receipt)
        self._update(force=True)
        return SearchOutcome(self.paths, "finished", receipt)

    def _stop(self, why: str) -> Steps[SearchOutcome]:
        """Let all trials save and exit. Results of those that end meanwhile are read by the next driver."""
        if self._asking is not None:
            self._asking.close()
        self.runs.stop(why)
        while any(run.handle is not None and not run.handle.done for run in self.runs.active):
            yield ()
        self._update(force=True)
        return SearchOutcome(self.paths, why)

    @property
    def elapsed_s(self) -> float:
        """Seconds of all drivers of this search."""
        return self._earlier_s + time.monotonic() - self._began_s

    def _update(self, *, force: bool = False) -> None:
        now = time.monotonic()
        if force or now - self._updated_s >= UPDATE_S:
            self._updated_s = now
            rows, earlier = self._journal.rows, self._earlier_rows
            progress = SearchProgress(self.paths, self.job, rows, self._table, self.runs, earlier, self.elapsed_s)
            self._on_update(progress)


def earlier_seconds(rows: list[AnyRow]) -> float:
    """Seconds that earlier drivers worked, as far as the journal tells."""
    total, began, last = 0.0, 0.0, 0.0
    for row in rows:
        if isinstance(row, StartedRow):
            total += max(last - began, 0.0)
            began = last = row.t
        elif isinstance(row, ToldRow):
            last = max(last, row.t)
    return total + max(last - began, 0.0)


# ---- a search among other runs ----


def submit_search(executor: RunExecutor, paths: SearchPaths, *, like: Job, on_result: Callable[[], None]) -> RunHandle:
    """Run the search of a directory, or go on with it, as one of the executor's runs, where the job `like` would run.
    `on_result` is called when a trial has a new result."""
    return executor.submit_steps(lambda handle: _search_steps(handle, executor, paths, like, on_result))


def _search_steps(
    handle: RunHandle, executor: RunExecutor, paths: SearchPaths, like: Job, on_result: Callable[[], None]
) -> Steps[RunResult]:
    handle.paths = paths.run

    def on_update(progress: SearchProgress) -> None:
        if any(isinstance(row, ToldRow) for row in progress.rows[progress.earlier_rows :]):
            on_result()

    with run_dir.driver_lock(paths.run):
        job = load_moved(like, paths.run)
        needed = workers_of_largest_trial(job)
        workers = handle.wanted_workers or needed
        check_workers(workers, needed=needed)
        outcome = yield from SearchDriver(job, paths, executor, workers=workers, on_update=on_update).steps(handle)
    return RunResult(paths.run, outcome.status)


# ---- whole searches, blocking ----


def run_search(
    job: Job,
    *,
    runs: Path,
    workers: int | None = None,
    on_update: OnUpdate | None = None,
    fork_server: ForkServer | None = None,
) -> SearchOutcome:
    """Start the search of a checked job in a new directory, and run it to its end."""
    check_searchable(job)
    count = _workers_of(job, workers)
    job = with_start_values(job, run_dir.check_runs(runs))
    return _drive(job, search_dir.create(job, runs), count, on_update, fork_server)


def resume_search(
    paths: SearchPaths,
    *,
    workers: int | None = None,
    on_update: OnUpdate | None = None,
    fork_server: ForkServer | None = None,
) -> SearchOutcome:
    """Go on with a search that was stopped or killed. One that has ended gives its receipt again."""
    job = load_run_job(paths.job)
    if (receipt := read_receipt(paths.receipt)) is not None:
        return SearchOutcome(paths, "finished", receipt)
    return _drive(job, paths, _workers_of(job, workers), on_update, fork_server)


def check_searchable(job: Job) -> None:
    """Raise the errors of a job that cannot be searched, before anything is written."""
    if job.search is None:
        raise error(
            "SH104", "the job has no `search`", where="search", fix="Add `search: {space: …}`, or --space FILE."
        )
    make_sampler(job.search.policy.sampler)  # its errors
    check_space(job)


def _workers_of(job: Job, asked: int | None) -> int:
    """The workers of all trials together. SH106 if they are too few for one of the trials."""
    count = initial_workers(job, capacity_of(job.engine)) if asked is None else asked
    check_workers(count, needed=workers_of_largest_trial(job))
    return count


def _drive(
    job: Job, paths: SearchPaths, workers: int, on_update: OnUpdate | None, fork_server: ForkServer | None
) -> SearchOutcome:
    with run_dir.driver_lock(paths.run), open_search_executor(fork_server) as executor:
        return SearchDriver(job, paths, executor, workers=workers, on_update=on_update).run()


@contextlib.contextmanager
def open_search_executor(fork_server: ForkServer | None) -> Iterator[RunExecutor]:
    with ForkServerPool(fork_server, preload=[PROBE_MODULE]) as fork_servers, RunExecutor(fork_servers) as executor:
        yield executor
