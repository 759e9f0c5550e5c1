"""Work that never blocks: a generator that yields the descriptors it waits for, and is resumed at every tick.

So a run reads top to bottom (plan, make the directory, drive, return the result) and many of them share one thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future
from multiprocessing.connection import wait
from typing import Generic, TypeVar

from shoal.net.wakeup import Wakeup

TICK_S = 0.05
"""Work is resumed this often, also when none of its descriptors is readable."""

T = TypeVar("T")
Steps = Generator[Sequence[int], None, T]


def run_steps(steps: Steps[T]) -> T:
    """All of it, in a thread that has nothing else to do."""
    while True:
        try:
            filenos = next(steps)
        except StopIteration as end:
            result: T = end.value
            return result
        wait(filenos, TICK_S)


def in_thread(call: Callable[[], T]) -> Steps[T]:
    """A call that takes its time, made in a thread of its own."""
    background = BackgroundCall(call)
    while not background.done:
        yield [background.fileno()]
    return background.result()


class BackgroundCall(Generic[T]):
    """A call in a thread of its own. `fileno` is readable when it is done. `result` waits for it, and raises what the
    call raised."""

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

    def result(self) -> T:
        try:
            return self._future.result()
        finally:
            self._wakeup.close()
