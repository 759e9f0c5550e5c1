"""Machines without processes and disks: an engine, the run's stream of events, and the storage of checkpoints."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, BinaryIO

from shoal.checkpoint.manifest import blob_path, parse_manifest, step_from_path
from shoal.events import Event, RunState
from shoal.events.stream import _require_schema
from shoal.fleet.engine import Exit, Launch, Node
from shoal.spec.view import Seat
from tests.simulation.world import EPOCH_S, Process, World, require

if TYPE_CHECKING:
    from tests.simulation.worker import SimulatedWorker

CORES = 64
SIGKILL = -9


class Machine:
    """The processes of the run, which outlive an engine."""

    def __init__(self, start: Callable[[Launch], SimulatedWorker], log: EventLog) -> None:
        self.start, self.log = start, log
        self.processes: dict[int, SimulatedWorker] = {}
        self.deaths = 0
        self.killed_at_end: list[SimulatedWorker] = []


class SimulatedEngine:
    """See Engine. `on_exit` is called when a process ends."""

    def __init__(self, machine: Machine, on_exit: Callable[[], None]) -> None:
        self._machine = machine
        self._watched: dict[int, SimulatedWorker] = {}
        self._on_exit = on_exit
        self._closed = False

    def capacity(self) -> list[Node]:
        return [Node("simulated", CORES, 1 << 34, gpus=0, shares_run_dir=True)]

    def start(self, launches: Sequence[Launch]) -> None:
        for launch in launches:
            seat = launch.seat.number
            require(launch.seat.name not in self._machine.log.names, f"{launch.seat.name} was there before")
            process = self._machine.start(launch)
            self._machine.processes[seat] = process
            self._watch(seat, process)

    def _watch(self, seat: int, process: SimulatedWorker) -> None:
        self._watched[seat] = process
        process.on_exit = self._on_exit

    def poll(self, timeout_s: float) -> list[Exit]:
        ended = [seat for seat, process in self._watched.items() if process.exit_code is not None]
        found = []
        for seat in ended:
            process = self._watched.pop(seat)
            del self._machine.processes[seat]
            self._machine.deaths += process.exit_code != 0 and not self._closed
            found.append(Exit.with_code(seat, process.exit_code))
        return found

    def fileno(self) -> int:
        return -1

    def running(self) -> list[int]:
        return sorted(self._watched)

    def waiting(self) -> list[int]:
        return []

    def stop(self, seats: Sequence[int]) -> None:
        for seat in seats:
            if seat in self._watched:
                self._watched[seat].kill()

    def reattach(self) -> list[Seat]:
        dead = [seat for seat, process in self._machine.processes.items() if process.exit_code is not None]
        for seat in dead:
            del self._machine.processes[seat]
        for seat, process in self._machine.processes.items():
            self._watch(seat, process)
        return [Seat(number=seat) for seat in self.running()]

    def close(self) -> None:
        self._closed = True
        self._machine.killed_at_end = [process for process in self._watched.values() if process.alive]
        self.stop(self.running())
        self.poll(0)


class EventLog:
    """The run's stream. It outlives drivers and workers."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.events: list[Event] = []
        self.names: set[str] = set()
        self.evicted_at_s: dict[str, float] = {}


class SimulatedStream:
    """See EventWriter."""

    def __init__(self, log: EventLog, who: str) -> None:
        self._log, self.who = log, who

    def emit(self, kind: str, *, step: int | None = None, **fields: Any) -> Event:
        if kind == "run_started":
            fields["schema"] = 1
        _require_schema(kind, step, fields)
        event = Event(kind, EPOCH_S + self._log.world.now_s, self.who, step, fields)
        self.append(event)
        return event

    def append(self, event: Event) -> None:
        self._log.events.append(event)
        self._log.names.add(event.who)
        if event.kind == "evicted":
            self._log.evicted_at_s[event.get("worker", "")] = self._log.world.now_s
        if event.kind != "step":
            self._log.world.log(f"{event.who} {event.kind}", event.fields.get("why") or event.step)

    def flush(self) -> None: ...

    def close(self) -> None: ...


class SimulatedReader:
    """See RunStateReader."""

    def __init__(self, log: EventLog) -> None:
        self._log, self._next, self.state = log, 0, RunState()

    def read_new(self) -> Iterator[Event]:
        while self._next < len(self._log.events):
            event = self._log.events[self._next]
            self._next += 1
            self.state.apply(event)
            yield event

    def catch_up(self) -> RunState:
        for _ in self.read_new():
            pass
        return self.state

    def save_if_due(self) -> None: ...

    def save(self) -> None: ...


class Disk:
    """The files of all checkpoints. A file is there completely or not at all; temporary files may be left over."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.files: dict[str, bytes] = {}
        self.readers: list[Process] = []
        self.saves: dict[Process, tuple[str, bytes]] = {}
        self.newest_complete = -1
        self._blobs: dict[bytes, dict[str, int]] = {}

    def complete_steps(self) -> list[int]:
        found = []
        for path in sorted(self.files, reverse=True):
            step = step_from_path(path)
            if step is None:
                continue
            if all(len(self.files.get(blob, b"")) == size for blob, size in self._blobs_of(path).items()):
                found.append(step)
        return found

    def _blobs_of(self, path: str) -> dict[str, int]:
        raw = self.files[path]
        if raw not in self._blobs:
            self._blobs[raw] = {blob_path(digest): size for digest, size in parse_manifest(raw).blobs.items()}
        return self._blobs[raw]

    def check(self, path: str) -> None:
        """After each change: a checkpoint that was complete stays until a newer one is complete."""
        if step_from_path(path) is not None or path.startswith("blobs/"):
            complete = self.complete_steps()
            require(
                self.newest_complete < 0 or (complete and complete[0] >= self.newest_complete),
                f"the checkpoint of step {self.newest_complete} is gone, and there is no newer one",
            )
            steps = [step for one in self.files if (step := step_from_path(one)) is not None]
            require(max(steps, default=-1) == (complete[0] if complete else -1), "the newest manifest lacks a blob")
            self.newest_complete = complete[0] if complete else -1


def _conflict(one: tuple[str, bytes], other: tuple[str, bytes]) -> bool:
    """Whether two writes are of one path, and the order matters. It does not if they are of the same checkpoint: a
    saver that leaves finishes its save while the next one repeats it, and each replaces the file as a whole."""
    (path, data), (other_path, other_data) = one, other
    if path != other_path or path.startswith("blobs/"):
        return False
    if step_from_path(path) is None:
        return data != other_data
    first, second = (replace(parse_manifest(raw), created=0.0) for raw in (data, other_data))
    return first != second


class SimulatedFiles:
    """See CheckpointFiles: the disk as one process uses it. Writing takes time, and the process may die meanwhile."""

    where, has_locks = "simulated", True

    def __init__(self, disk: Disk, process: Process) -> None:
        self._disk, self._process = disk, process

    def open(self, path: str) -> BinaryIO:
        if path not in self._disk.files:
            raise FileNotFoundError(path)
        return io.BytesIO(self._disk.files[path])

    def write(self, path: str, chunks: Iterable[memoryview | bytes]) -> None:
        disk, world = self._disk, self._disk.world
        fiber = world.current
        assert fiber is not None
        data = b"".join(chunks)
        writers = [one.name for one, other in disk.saves.items() if one.alive and _conflict(other, (path, data))]
        require(not writers, f"{writers} and {self._process.name} write {path} at once")
        disk.saves[self._process] = path, data
        temporary = f".tmp-{self._process.name}"
        disk.files[temporary] = data
        fiber.sleep(0.002 + 0.1 * world.rng.random() ** 4)
        del disk.files[temporary]
        del disk.saves[self._process]
        disk.files[path] = data
        world.log(f"{self._process.name} wrote", path[-12:])
        disk.check(path)

    def remove(self, path: str) -> None:
        if self._disk.files.pop(path, None) is not None:
            self._disk.check(path)

    def sizes(self, under: str = "") -> dict[str, int]:
        return {path: len(data) for path, data in self._disk.files.items() if path.startswith(under)}

    @contextlib.contextmanager
    def save_lock(self) -> Iterator[None]:
        self._disk.readers.append(self._process)
        try:
            yield
        finally:
            self._disk.readers.remove(self._process)

    @contextlib.contextmanager
    def sweep_lock(self) -> Iterator[bool]:
        yield not any(process.alive for process in self._disk.readers)

    def is_stale(self, path: str) -> bool:
        return True


class FiberFuture:
    """See Future: the result of a call in a fiber."""

    def __init__(self, process: Process) -> None:
        self._process, self._value, self._done = process, None, False

    def done(self) -> bool:
        return self._done

    def set(self, value: Any) -> None:
        self._value, self._done = value, True
        self._process.wake()

    def exception(self) -> None:
        """Wait until it is done. A save never raises."""
        current = self._process.world.current
        assert current is not None
        current.block(self.done)

    def result(self) -> Any:
        self.exception()
        return self._value


class FiberExecutor:
    """See ThreadPoolExecutor: each call is a fiber of the process."""

    def __init__(self, process: Process) -> None:
        self._process = process

    def submit(self, call: Callable[..., Any], *args: Any) -> FiberFuture:
        future = FiberFuture(self._process)
        self._process.start(lambda: future.set(call(*args)))
        return future

    def shutdown(self) -> None: ...
