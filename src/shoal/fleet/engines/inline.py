"""InlineEngine: seats as threads of this process, for tests of everything that uses an engine."""

from __future__ import annotations

import os
import select
import signal
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from shoal.fleet.engine import Exit, Launch, Node
from shoal.net.wakeup import Wakeup
from shoal.spec.view import Seat

NODE = "inline"
Entry = Callable[[Seat, Sequence[str], threading.Event], int]
"""Runs a seat and returns its exit code. It must return soon after the event is set; its code is then ignored."""


@dataclass(eq=False)
class InlineProcess:
    """A thread that behaves like a process: it has one exit code, and after `kill` it counts as ended at once."""

    seat: Seat
    killed: threading.Event = field(default_factory=threading.Event)
    code: int | None = None
    on_exit: Callable[[], None] = lambda: None
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _thread: threading.Thread | None = None

    def run(self, entry: Entry, arguments: Sequence[str]) -> None:
        def body() -> None:
            try:
                code = entry(self.seat, arguments, self.killed)
            except Exception:
                code = 1
            self._end(code)

        self._thread = threading.Thread(target=body, name=f"shoal-{self.seat.name}", daemon=True)
        self._thread.start()

    def kill(self) -> None:
        self._end(-signal.SIGKILL)
        self.killed.set()

    def join(self) -> None:
        assert self._thread is not None
        self._thread.join()

    def _end(self, code: int) -> None:
        with self._lock:
            if self.code is not None:
                return
            self.code = code
        self.on_exit()


def _no_such_entry(seat: Seat, arguments: Sequence[str], killed: threading.Event) -> int:
    return 1


class InlineMachine:
    """The processes of all runs, by run and seat, which outlive an engine. `entries` are its programs, by name."""

    def __init__(self, entries: Mapping[str, Entry]) -> None:
        self.entries = dict(entries)
        self.processes: dict[tuple[str, int], InlineProcess] = {}

    def launch(self, run: str, launch: Launch) -> InlineProcess:
        process = InlineProcess(launch.seat)
        self.processes[run, launch.seat.number] = process
        process.run(self.entries.get(launch.entry, _no_such_entry), launch.arguments)
        return process


class InlineEngine:
    """See Engine. Engines for the same `run` and machine see each other's processes, like the engines of successive
    drivers. There are no logs: threads share the output of this process."""

    def __init__(self, machine: InlineMachine, run: str) -> None:
        self._machine = machine
        self._run = run
        self._processes: dict[int, InlineProcess] = {}
        self._exited = Wakeup()

    def capacity(self) -> list[Node]:
        memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return [Node(NODE, os.cpu_count() or 1, memory_bytes, gpus=0, shares_run_dir=True)]

    def start(self, launches: Sequence[Launch]) -> None:
        for launch in launches:
            if launch.seat.number in self._processes:
                raise ValueError(f"{launch.seat.name} runs already")
            if launch.node not in (None, NODE):
                raise ValueError(f"there is no node {launch.node!r}")
        for launch in launches:
            self._watch(self._machine.launch(self._run, launch))

    def poll(self, timeout_s: float) -> list[Exit]:
        if not self._ended():
            select.select([self._exited], [], [], timeout_s)
        self._exited.clear()
        ended = self._ended()
        for process in ended:
            del self._processes[process.seat.number]
            del self._machine.processes[self._run, process.seat.number]
        return [Exit.with_code(process.seat.number, process.code) for process in ended]

    def fileno(self) -> int:
        return self._exited.fileno()

    def running(self) -> list[int]:
        return sorted(self._processes)

    def waiting(self) -> list[int]:
        return []

    def stop(self, seats: Sequence[int]) -> None:
        for seat in seats:
            if seat in self._processes:
                self._processes[seat].kill()

    def reattach(self) -> list[Seat]:
        left = [process for (run, _), process in self._machine.processes.items() if run == self._run]
        for process in left:
            self._watch(process)
        return sorted((process.seat for process in left), key=lambda seat: seat.number)

    def close(self) -> None:
        processes = list(self._processes.values())
        self.stop(self.running())
        self.poll(0)
        for process in processes:
            process.join()
        self._exited.close()

    def _watch(self, process: InlineProcess) -> None:
        self._processes[process.seat.number] = process
        process.on_exit = self._exited.notify
        if process.code is not None:  # it ended before it was watched
            self._exited.notify()

    def _ended(self) -> list[InlineProcess]:
        return [process for process in self._processes.values() if process.code is not None]
