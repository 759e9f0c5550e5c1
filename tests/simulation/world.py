"""Virtual time: a queue of events, processes that may die or freeze, and fibers that run only in their turn.

Real code of a worker blocks. It runs in a fiber: a thread that has the turn only while the world waits for it, and
gives the turn back wherever a real worker would wait. So a history is a function of its seed.
"""

from __future__ import annotations

import _thread
import heapq
import random
import threading
from collections.abc import Callable
from typing import Any

START_S = 1000.0
EPOCH_S = 1_700_000_000.0


class InvariantViolation(BaseException):
    """Something happened that must never happen. No Exception: real code must not catch it."""


class ProcessEnded(GeneratorExit):
    """Ends the fibers of a process that is gone. Nothing in a worker catches it: it is no failure of user code."""


def require(holds: object, message: str) -> None:
    if not holds:
        raise InvariantViolation(message)


class World:
    """The clock and the events to come. `current` is the fiber that has the turn."""

    def __init__(self, seed: int) -> None:
        self.now_s = START_S
        self.rng = random.Random(seed)
        self.slowness = 1.0
        self.current: Fiber | None = None
        self.trace: list[tuple[float, str, Any]] = []
        self._queue: list[tuple[float, int, Callable[..., object], tuple[Any, ...]]] = []
        self._count = 0
        self._fibers: list[Fiber] = []

    def at(self, delay_s: float, call: Callable[..., object], *args: Any) -> None:
        self._count += 1
        heapq.heappush(self._queue, (self.now_s + delay_s, self._count, call, args))

    def run(self, *, until_s: float, done: Callable[[], bool]) -> bool:
        """Let events happen until `done()` or the time. Returns whether it is done."""
        queue = self._queue
        while not done():
            if not queue or queue[0][0] > until_s:
                return False
            self.now_s, _, call, args = heapq.heappop(queue)
            call(*args)
        return True

    def log(self, what: str, detail: Any = "") -> None:
        self.trace.append((self.now_s - START_S, what, detail))

    def latency_s(self) -> float:
        """Mostly a millisecond, sometimes long."""
        draw = self.rng.random()
        return self.slowness * (0.0002 + 0.004 * draw if draw < 0.95 else (draw - 0.95) * 8.0)

    def fiber(self, process: Process, body: Callable[[], object]) -> Fiber:
        made = Fiber(self, process, body)
        self._fibers.append(made)
        return made

    def close(self) -> None:
        """End all fibers."""
        for fiber in self._fibers:
            fiber.process.alive = False
            fiber.end()
        self._fibers.clear()
        self._queue.clear()


class Process:
    """Something that can die or freeze: then nothing happens in it, and what arrives waits until it goes on."""

    def __init__(self, world: World, name: str) -> None:
        self.world, self.name = world, name
        self.alive, self.frozen = True, False
        self.fibers: list[Fiber] = []
        self._deferred: list[tuple[Callable[..., object], tuple[Any, ...]]] = []

    def at(self, delay_s: float, call: Callable[..., object], *args: Any) -> None:
        """Call it in this process after the delay, if the process lives then."""
        self.world.at(delay_s, self._call, call, args)

    def _call(self, call: Callable[..., object], args: tuple[Any, ...]) -> None:
        if not self.alive:
            return
        if self.frozen:
            self._deferred.append((call, args))
            return
        call(*args)

    def freeze(self) -> None:
        self.frozen = True

    def thaw(self) -> None:
        if not self.frozen:
            return
        self.frozen = False
        deferred, self._deferred = self._deferred, []
        for call, args in deferred:
            self._call(call, args)

    def start(self, body: Callable[[], object]) -> Fiber:
        fiber = self.world.fiber(self, body)
        self.fibers.append(fiber)
        self.at(0.0, fiber.resume)
        return fiber

    def wake(self) -> None:
        """Something has changed: fibers look whether they can go on."""
        for fiber in self.fibers:
            fiber.wake()


class _Carrier:
    """A thread that carries one fiber after the other."""

    idle: list[_Carrier] = []

    def __init__(self) -> None:
        self._go, self._back = _thread.allocate_lock(), _thread.allocate_lock()
        self._go.acquire()
        self._back.acquire()
        self.body: Callable[[], object] | None = None
        self.failure: BaseException | None = None
        threading.Thread(target=self._run, name="simulated", daemon=True).start()

    @classmethod
    def take(cls) -> _Carrier:
        return cls.idle.pop() if cls.idle else cls()

    def _run(self) -> None:
        while True:
            self._go.acquire()
            assert self.body is not None
            try:
                self.body()
            except ProcessEnded:
                pass
            except BaseException as failure:
                self.failure = failure
            self.body = None
            self._back.release()

    def give(self) -> None:
        self._go.release()
        self._back.acquire()

    def pause(self) -> None:
        self._back.release()
        self._go.acquire()


class Fiber:
    """One thread of a process."""

    def __init__(self, world: World, process: Process, body: Callable[[], object]) -> None:
        self.process, self.ended = process, False
        self._world, self._body = world, body
        self._carrier: _Carrier | None = None
        self._ready: Callable[[], object] | None = None
        self._expired = self._checking = False
        self._waits = 0

    # ---- in the fiber ----

    def block(self, ready: Callable[[], object], timeout_s: float | None = None) -> bool:
        """Wait until `ready()`. Returns False after the timeout."""
        if ready():
            return True
        if timeout_s is not None and timeout_s <= 0:
            return False
        self._ready, self._expired = ready, False
        self._waits += 1
        if timeout_s is not None:
            self.process.at(timeout_s, self._expire, self._waits)
        self._pause()
        self._ready = None
        return not self._expired

    def sleep(self, seconds: float) -> None:
        self.block(lambda: False, seconds)

    def _pause(self) -> None:
        assert self._carrier is not None
        self._carrier.pause()
        if not self.process.alive:
            raise ProcessEnded

    # ---- in the world ----

    def resume(self) -> None:
        """Give it the turn, until it waits or ends. What it raises is raised here."""
        before, self._world.current = self._world.current, self
        carrier = self._carrier
        if carrier is None:
            carrier = self._carrier = _Carrier.take()
            carrier.body = self._body
        carrier.give()
        self._world.current = before
        if carrier.body is None:
            self.ended, self._carrier = True, None
            _Carrier.idle.append(carrier)
            failure, carrier.failure = carrier.failure, None
            if failure is not None:
                raise failure

    def wake(self) -> None:
        if self._ready is not None and not self._checking and not self.ended:
            self._checking = True
            self.process.at(0.0, self._check)

    def _check(self) -> None:
        self._checking = False
        if self._ready is not None and self._ready():
            self.resume()

    def _expire(self, wait: int) -> None:
        if self._ready is not None and wait == self._waits:
            self._expired = not self._ready()
            self.resume()

    def end(self) -> None:
        if self._carrier is not None:
            self.resume()


class VirtualTime:
    """Stands for the module `time` in Shoal's modules."""

    def __init__(self) -> None:
        self.world: World | None = None

    def monotonic(self) -> float:
        assert self.world is not None
        return self.world.now_s

    perf_counter = monotonic

    def thread_time(self) -> float:
        return 0.0

    process_time = thread_time

    def time(self) -> float:
        return EPOCH_S + self.monotonic()
