"""Many runs in one process and one thread: each continues, fails or stops independently of the others."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError
from multiprocessing.connection import wait
from pathlib import Path
from types import FrameType, TracebackType
from typing import TypeVar

from shoal.errors import EXIT_TERMINATED
from shoal.events import Event, EventWriter, RunState, load_state
from shoal.fleet.engines.host_use import HostUse
from shoal.fleet.forkserver import ForkServer
from shoal.fleet.messages import ScaleRequest
from shoal.jobs import run_dir
from shoal.jobs.compression.shrink_legs import run_legs
from shoal.jobs.coroutines import TICK_S, Steps
from shoal.jobs.folds import FoldSchedule
from shoal.jobs.fork_servers import ForkServerPool
from shoal.jobs.remote.code_archive import find_code
from shoal.jobs.resolve_auto import resolve_auto_steps
from shoal.jobs.resume import job_to_resume, moved_to
from shoal.jobs.run_driver import RunDriver
from shoal.jobs.run_result import PAUSED, RunResult
from shoal.spec.job import Job
from shoal.spec.load import save_job
from shoal.spec.receipt import read_receipt_file
from shoal.spec.run_paths import RunPaths

T = TypeVar("T")
OnEvent = Callable[[RunPaths, Event, RunState], str | None]
"""Called with every event of a run. A returned reason (such as "pruned") stops the run at the next step boundary."""


class RunHandle:
    """A submitted run. `paths` is None until its directory exists; a job with `sync: auto` is planned first."""

    def __init__(self, until: int | None = None) -> None:
        self.paths: RunPaths | None = None
        self.until = until
        self.stop_reason = ""
        self.wanted_workers: int | None = None
        self._result: RunResult | None = None
        self._failure: BaseException | None = None

    @property
    def done(self) -> bool:
        return self._result is not None or self._failure is not None

    def result(self) -> RunResult:
        """The result. Raises the error that kept the run from starting or continuing; CancelledError if it was stopped
        before it started."""
        if self._failure is not None:
            raise self._failure
        assert self._result is not None, "it goes on"
        return self._result

    def stop(self, why: str) -> None:
        self.stop_reason = self.stop_reason or why

    def scale(self, wanted_workers: int) -> None:
        """As `shoal scale` does, also before the run has started. Each fold gets so many workers."""
        self.wanted_workers = wanted_workers

    def set_result(self, result: RunResult) -> None:
        self._result = result

    def set_failure(self, failure: BaseException) -> None:
        self._failure = failure


class RunExecutor:
    """Belongs to one thread. Runs advance while `tick` is called; how many run at the same time is the caller's policy.

    Each run is a generator (see `steps`): an exception ends only its own run. Nothing in a tick blocks, so slow
    planning or a slow shutdown of one run does not delay the others. `close` aborts the runs that are still active.
    """

    def __init__(self, fork_servers: ForkServerPool, *, host_use: HostUse | None = None) -> None:
        self.fork_servers = fork_servers
        self._host_use = host_use or HostUse()
        self._active: dict[RunHandle, Steps[RunResult]] = {}
        self._filenos: dict[RunHandle, Sequence[int] | None] = {}  # None: it has not started

    def submit(
        self,
        job: Job,
        *,
        runs: Path,
        on_event: OnEvent | None = None,
        trace: bool = False,
        reserved: RunPaths | None = None,
        until: int | None = None,
    ) -> RunHandle:
        """Run a checked job in a new directory; a job with `sync: auto` is planned first. A job with folds is one run.

        `until`: pause the run after the first evaluation at or after this step, or after so many folds. A paused run
        may be resumed to the bits of an undisturbed one.

        `trace`: the workers record a digest of the state after every step (only for a job without folds); see
        `jobs.verify`. `reserved`: the directory to use, such as one from `run_dir.reserve`.
        """
        return self._add(
            lambda handle: self._new_run(handle, job, runs, on_event, trace=trace, reserved=reserved), until
        )

    def submit_resume(
        self,
        paths: RunPaths,
        *,
        overrides: Sequence[str] = (),
        like: Job | None = None,
        on_event: OnEvent | None = None,
        until: int | None = None,
    ) -> RunHandle:
        """Resume from the newest valid checkpoint; finished folds are not run again. `until`: see `submit`.

        `overrides` (`path=value`) change how the run continues (`workers=2`, `shard=none`), but not what it trains.
        `like`: it goes on where this job would run: with its engine and network.
        """
        return self._add(lambda handle: self._resumed_run(handle, paths, overrides, like, on_event), until)

    def submit_or_resume(
        self, job: Job, paths: RunPaths, *, on_event: OnEvent | None = None, trace: bool = False
    ) -> RunHandle:
        """The run of a job in this directory: begun there, resumed with the job's engine and network, or as it ended
        there. For work that is made of runs and may have been killed at any time."""
        return self._add(lambda handle: self._begun_or_resumed(handle, job, paths, on_event, trace=trace))

    def submit_steps(self, make_steps: Callable[[RunHandle], Steps[RunResult]]) -> RunHandle:
        """Advance other work as a run is advanced, such as a search whose trials are runs of this executor."""
        return self._add(make_steps)

    def stop(self, run: RunHandle, why: str) -> None:
        """Stop at the next step boundary: one worker saves, all exit, and `why` becomes the run's status."""
        run.stop(why)

    @property
    def active(self) -> list[RunHandle]:
        """Runs that have not ended. A job with folds and each of its active folds count separately."""
        return list(self._active)

    def tick(self, timeout_s: float = TICK_S, *, also: Sequence[int] = ()) -> None:
        """Wait until a run has something to do, one of `also` is readable, or the timeout expires, then advance every
        run."""
        filenos = self._filenos.values()
        wait({*also, *(fileno for some in filenos for fileno in some or ())}, 0 if None in filenos else timeout_s)
        for handle in reversed(list(self._active)):  # folds before the run that waits for them
            self._resume(handle)

    def run_until_done(self, *runs: RunHandle) -> None:
        """Block until these runs have ended, or all runs if none is given. Ctrl-C and SIGTERM stop every active run."""
        with catch_stop_signals() as asked:
            while any(not run.done for run in runs or self._active):
                for handle in self._active if asked else ():
                    handle.stop(asked[0])
                self.tick()

    def close(self) -> None:
        """Abort all active runs. No process of theirs is left."""
        with contextlib.ExitStack() as stack:
            for handle in self._active:
                stack.callback(self.break_off, handle)

    def __enter__(self) -> RunExecutor:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # ---- implementation ----

    def _add(self, make_steps: Callable[[RunHandle], Steps[RunResult]], until: int | None = None) -> RunHandle:
        handle = RunHandle(until)
        self._active[handle] = make_steps(handle)
        self._filenos[handle] = None
        return handle

    def _resume(self, handle: RunHandle) -> None:
        if handle not in self._active:
            return  # another run ended it in this tick
        try:
            self._filenos[handle] = next(self._active[handle])
        except StopIteration as end:
            handle.set_result(end.value)
            self._forget(handle)
        except Exception as failure:
            handle.set_failure(failure)
            self._forget(handle)

    def break_off(self, handle: RunHandle) -> None:
        """Abort a run: none of its processes is left. It can be resumed."""
        steps = self._active.get(handle)
        if steps is not None:
            self._forget(handle)
            handle.set_failure(CancelledError("the run was broken off"))
            steps.close()

    def _forget(self, handle: RunHandle) -> None:
        del self._active[handle]
        del self._filenos[handle]

    def _new_run(
        self,
        handle: RunHandle,
        job: Job,
        runs: Path,
        on_event: OnEvent | None,
        *,
        trace: bool,
        reserved: RunPaths | None,
    ) -> Steps[RunResult]:
        job = run_dir.resolve_init_from(job, run_dir.check_runs(runs))
        if not job.engine.shares_run_dir:
            find_code(Path(job.base_dir))  # what cannot be sent is told before the run has a directory
        self.fork_servers.for_job(job)  # start loading torch early
        job, plan_file = yield from _unless_stopped(handle, resolve_auto_steps(job, self.fork_servers))
        paths = run_dir.create(job, runs, reserved=reserved)
        if plan_file:
            plan_file.write(paths)
        return (yield from self._locked_run(handle, job, paths, on_event, trace=trace))

    def _resumed_run(
        self,
        handle: RunHandle,
        paths: RunPaths,
        overrides: Sequence[str],
        like: Job | None,
        on_event: OnEvent | None,
        *,
        trace: bool = False,
    ) -> Steps[RunResult]:
        job = job_to_resume(paths, overrides)
        moved = job if like is None else moved_to(like, job, paths)
        save = bool(overrides) or moved is not job
        return (yield from self._locked_run(handle, moved, paths, on_event, trace=trace, save=save))

    def _begun_or_resumed(
        self, handle: RunHandle, job: Job, paths: RunPaths, on_event: OnEvent | None, *, trace: bool
    ) -> Steps[RunResult]:
        if (own := read_receipt_file(paths.receipt).own) is not None:
            handle.paths = paths
            return RunResult(paths, "finished", own)
        if paths.job.is_file():
            return (yield from self._resumed_run(handle, paths, (), job, on_event, trace=trace))
        return (yield from self._new_run(handle, job, paths.root.parent, on_event, trace=trace, reserved=paths))

    def _locked_run(
        self,
        handle: RunHandle,
        job: Job,
        paths: RunPaths,
        on_event: OnEvent | None,
        *,
        trace: bool = False,
        save: bool = False,
    ) -> Steps[RunResult]:
        handle.paths = paths
        with run_dir.driver_lock(paths):
            if save:
                save_job(job, paths.job)
            if job.fold_count > 1:
                return (yield from self._folds(handle, job, paths, on_event))
            if job.shrink is not None:
                return (yield from self._legs(handle, job, paths, on_event, trace=trace))
            return (yield from self._one_run(handle, job, paths, on_event, trace=trace))

    def _legs(
        self, handle: RunHandle, job: Job, paths: RunPaths, on_event: OnEvent | None, *, trace: bool
    ) -> Steps[RunResult]:
        """A run whose model becomes smaller on the way. A caller's `until` counts for both legs."""
        until = handle.until

        def drive(leg: Job, where: RunPaths, pause_at: int | None) -> Steps[RunResult]:
            handle.until = pause_at
            return self._one_run(handle, leg, where, on_event, trace=trace)

        return (yield from run_legs(job, paths, drive=drive, fork_server=self.fork_servers.for_job(job), until=until))

    def _one_run(
        self, handle: RunHandle, job: Job, paths: RunPaths, on_event: OnEvent | None, *, trace: bool = False
    ) -> Steps[RunResult]:
        """Drive the run. If the workers died at the pause before the state was saved, they train that part again."""
        handle.paths = paths
        for _ in range(job.elastic.restarts):
            result = yield from self._drive(handle, job, paths, on_event, trace=trace)
            if result.status != PAUSED or (result.saved_step or 0) >= (handle.until or 0):
                return result
        return (yield from self._drive(handle, job, paths, on_event, trace=trace))

    def _drive(
        self, handle: RunHandle, job: Job, paths: RunPaths, on_event: OnEvent | None, *, trace: bool
    ) -> Steps[RunResult]:
        watch = None if on_event is None else lambda event, state: on_event(paths, event, state)
        fork_server = self.fork_servers.for_job(job)
        with contextlib.closing(
            RunDriver(job, paths, fork_server, on_event=watch, trace=trace, until=handle.until, host_use=self._host_use)
        ) as driver:
            driver.start()
            scaled: int | None = None
            while True:
                if handle.wanted_workers not in (None, scaled) and not driver.stop_reason:
                    scaled = handle.wanted_workers
                    driver.commands.handle(ScaleRequest(kind="scale", wanted=scaled))
                if driver.stop_reason != PAUSED:
                    handle.stop(driver.stop_reason or driver.stop_requested)
                if handle.stop_reason:
                    driver.stop(handle.stop_reason)
                result = driver.tick()
                if result is not None:
                    return result
                yield driver.filenos()

    def _folds(self, handle: RunHandle, job: Job, paths: RunPaths, on_event: OnEvent | None) -> Steps[RunResult]:
        """Run each fold as a run of its own. Stopping one fold stops all."""
        schedule = FoldSchedule(job, paths, until=handle.until)
        active: list[RunHandle] = []
        with contextlib.closing(EventWriter(paths.events, "driver")) as stream:
            stream.emit("run_started", run=paths.name)
            try:
                while True:
                    for fold in list(active):
                        handle.stop(fold.stop_reason)
                        fold.stop(handle.stop_reason)
                        fold.wanted_workers = handle.wanted_workers
                        if fold.done:
                            active.remove(fold)
                            schedule.add(fold.result())
                    while not handle.stop_reason and (following := schedule.take_next(len(active))):
                        active.append(self._add_fold(*following, on_event))
                        active[-1].wanted_workers = handle.wanted_workers
                    if not active:
                        break
                    yield ()
            finally:
                for fold in active:
                    self.break_off(fold)
            result = schedule.finish(handle.stop_reason)
            stream.emit("run_ended", status=result.status)
            return result

    def _add_fold(self, paths: RunPaths, job: Job, on_event: OnEvent | None) -> RunHandle:
        return self._add(lambda handle: self._one_run(handle, job, paths, on_event))


def _unless_stopped(handle: RunHandle, steps: Steps[T]) -> Steps[T]:
    """The steps, with CancelledError once the run is stopped: it has no directory yet that could be resumed."""
    with contextlib.closing(steps):
        while True:
            try:
                filenos = next(steps)
            except StopIteration as end:
                result: T = end.value
                return result
            if handle.stop_reason:
                raise CancelledError(handle.stop_reason)
            yield filenos


# ---- one run, blocking ----


def run(
    job: Job, *, runs: Path, on_event: OnEvent | None = None, fork_server: ForkServer | None = None, trace: bool = False
) -> RunResult:
    """See `RunExecutor.submit`. A caller that runs many jobs may pass one fork server for all of them."""
    with open_executor(fork_server) as executor:
        return run_to_end(executor, executor.submit(job, runs=runs, on_event=on_event, trace=trace))


def resume(
    paths: RunPaths,
    *,
    overrides: Sequence[str] = (),
    on_event: OnEvent | None = None,
    fork_server: ForkServer | None = None,
) -> RunResult:
    """See `RunExecutor.submit_resume`."""
    with open_executor(fork_server) as executor:
        return run_to_end(executor, executor.submit_resume(paths, overrides=overrides, on_event=on_event))


@contextlib.contextmanager
def open_executor(fork_server: ForkServer | None = None, *, host_use: HostUse | None = None) -> Iterator[RunExecutor]:
    """An executor with its own fork servers, or with the caller's. `host_use`: what its runs know of their hosts."""
    with ForkServerPool(fork_server) as fork_servers, RunExecutor(fork_servers, host_use=host_use) as executor:
        yield executor


def run_to_end(executor: RunExecutor, run: RunHandle) -> RunResult:
    """The result of the run. A signal during planning has its default effect on this process: there is nothing to
    resume yet."""
    executor.run_until_done(run)
    try:
        return run.result()
    except CancelledError:
        if run.stop_reason == "terminated":
            raise SystemExit(EXIT_TERMINATED) from None
        raise KeyboardInterrupt from None


@contextlib.contextmanager
def catch_stop_signals() -> Iterator[list[str]]:
    """Yields a list that gets the reason when a stop signal arrives; a second signal raises KeyboardInterrupt."""
    asked: list[str] = []
    names = {signal.SIGINT: "interrupted", signal.SIGTERM: "terminated"}

    def note(number: int, frame: FrameType | None) -> None:
        if asked:
            raise KeyboardInterrupt
        asked.append(names[signal.Signals(number)])

    try:
        old = {number: signal.signal(number, note) for number in names}
    except ValueError:  # not the main thread: signals are handled elsewhere
        yield asked
        return
    try:
        yield asked
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)


def load_run_state(paths: RunPaths) -> RunState:
    """The state of a run, folded from its events; "broken off" if it has not ended and no driver is alive."""
    with run_dir.readable(paths):
        state = load_state(paths.events, paths.state_snapshot)
    state.status = run_dir.current_status(state.status, paths)
    return state
