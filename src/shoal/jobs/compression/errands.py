"""Who does the work of a compression: its questions to processes, and its training runs."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

from shoal.fleet.forkserver import ForkServer
from shoal.jobs.coroutines import BackgroundCall, Steps, run_steps
from shoal.jobs.run_executor import RunExecutor, RunHandle, open_executor, run_to_end
from shoal.jobs.run_result import RunResult
from shoal.net.wakeup import Wakeup
from shoal.spec.job import Job
from shoal.spec.run_paths import RunPaths

T = TypeVar("T")


class StoppedError(Exception):
    """The compression is to stop; it can go on later. The message is why."""


class Errands(Protocol):
    """Both wait for the result."""

    def ask(self, steps: Steps[T]) -> T: ...

    def train(self, job: Job, paths: RunPaths) -> RunResult:
        """The run of the job in this directory; see `RunExecutor.submit_or_resume`."""


@dataclass(frozen=True)
class OwnErrands:
    """A compression that has this thread for itself."""

    fork_server: ForkServer

    def ask(self, steps: Steps[T]) -> T:
        return run_steps(steps)

    def train(self, job: Job, paths: RunPaths) -> RunResult:
        with open_executor(self.fork_server) as executor:
            return run_to_end(executor, executor.submit_or_resume(job, paths))


@dataclass(frozen=True)
class _Errand(Generic[T]):
    begin: Callable[[RunExecutor], Steps[T]]
    done: Future[T] = field(default_factory=Future)


class SharedErrands:
    """For a compression in a thread of its own. The thread of an executor does the work, among its other runs.

    `control` stops the compression, and says how many workers its training has.
    """

    def __init__(self, control: RunHandle) -> None:
        self._control = control
        self._waiting: list[_Errand[Any]] = []
        self._closed = False
        self._lock = threading.Lock()
        self._wakeup = Wakeup()

    # ---- for the compression ----

    def ask(self, steps: Steps[T]) -> T:
        return self._hand_over(lambda executor: self._unless_stopped(steps))

    def train(self, job: Job, paths: RunPaths) -> RunResult:
        return self._hand_over(lambda executor: self._training(executor, job, paths))

    def _hand_over(self, begin: Callable[[RunExecutor], Steps[T]]) -> T:
        errand = _Errand(begin)
        with self._lock:
            if self._closed:
                raise StoppedError(self._control.stop_reason)
            self._waiting.append(errand)
        self._wakeup.notify()
        return errand.done.result()

    # ---- for the executor ----

    def carry_out(self, executor: RunExecutor, call: Callable[[], T]) -> Steps[T]:
        """Make the call in a thread of its own, and do its errands here: one at a time, because it waits for each."""
        background = BackgroundCall(call)
        try:
            while not background.done:
                self._wakeup.clear()
                for errand in self._take():
                    yield from self._do(errand, executor)
                if not background.done:
                    yield [background.fileno(), self._wakeup.fileno()]
        finally:
            for errand in self._take(close=True):
                errand.done.set_exception(StoppedError(self._control.stop_reason))
            background.wait()
            self._wakeup.close()
        return background.result()

    def _take(self, *, close: bool = False) -> list[_Errand[Any]]:
        with self._lock:
            taken, self._waiting = self._waiting, []
            self._closed |= close
            return taken

    def _do(self, errand: _Errand[T], executor: RunExecutor) -> Steps[None]:
        try:
            errand.done.set_result((yield from errand.begin(executor)))
        except Exception as failure:
            errand.done.set_exception(failure)
        finally:
            if not errand.done.done():  # the executor is closed
                errand.done.set_exception(StoppedError(self._control.stop_reason))

    def _unless_stopped(self, steps: Steps[T]) -> Steps[T]:
        with contextlib.closing(steps):
            while not self._control.stop_reason:
                try:
                    filenos = next(steps)
                except StopIteration as end:
                    result: T = end.value
                    return result
                yield filenos
        raise StoppedError(self._control.stop_reason)

    def _training(self, executor: RunExecutor, job: Job, paths: RunPaths) -> Steps[RunResult]:
        run = executor.submit_or_resume(job, paths)
        try:
            while not run.done:
                run.stop(self._control.stop_reason)
                run.wanted_workers = self._control.wanted_workers
                yield ()
        finally:
            executor.break_off(run)
        return run.result()
