"""Work that never blocks: a generator yields the file descriptors that it waits for, and is resumed at every tick.

A run then reads from top to bottom (plan, create the directory, drive, return the result), and many runs share one
thread.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future
from multiprocessing.connection import wait
from typing import Generic, TypeVar

from shoal.net.wakeup import Wakeup

TICK_S = 0.05
"""Seconds after which work is resumed even if none of its descriptors is readable."""

T = TypeVar("T")
Steps = Generator[Sequence[int], None, T]


def run_steps(steps: Steps[T]) -> T:
    """Run the steps to their end, blocking this thread."""
    while True:
        try:
            filenos = next(steps)
        except StopIteration as end:
            result: T = end.value
            return result
        wait(filenos, TICK_S)


def all_steps(several: Sequence[Steps[T]]) -> Steps[list[T]]:
    """Run all steps at the same time. The first failure ends the others."""
    results: dict[int, T] = {}
    waiting: dict[int, Sequence[int]] = dict.fromkeys(range(len(several)), ())
    with contextlib.ExitStack() as stack:
        for steps in several:
            stack.callback(steps.close)
        while waiting:
            for number in list(waiting):
                try:
                    waiting[number] = next(several[number])
                except StopIteration as end:
                    results[number] = end.value
                    del waiting[number]
            if waiting:
                yield list(dict.fromkeys(fileno for filenos in waiting.values() for fileno in filenos))
    return [results[number] for number in range(len(several))]


def in_thread(call: Callable[[], T]) -> Steps[T]:
    """Run a slow call in a thread of its own, as steps."""
    background = BackgroundCall(call)
    while not background.done:
        yield [background.fileno()]
    return background.result()


class BackgroundCall(Generic[T]):
    """A call in a thread of its own. `fileno` is readable when the call is done. `result` waits for it, and raises the
    call's exception."""

    def __init__(self, call: Callable[[], T]) -> None:
        self._future: Future[T] = Future()
        self._wakeup = Wakeup()
        threading.Thread(target=self._run, args=(call,), name="shoal-background", daemon=True).start()

    def _run(self, call: Callable[[], T]) -> None:
        try:
            self._future.set_result(call())
        except BaseException as failure:
            self._future.set_exception(failure)
        self._wakeup.notify()

    def fileno(self) -> int:
        return self._wakeup.fileno()

    @property
    def done(self) -> bool:
        return self._future.done()

    def wait(self) -> None:
        """Until the call is done, however it ends."""
        self._future.exception()

    def result(self) -> T:
        try:
            return self._future.result()
        finally:
            self._wakeup.close()
