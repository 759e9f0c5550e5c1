"""Machines that join: the real `shoal join` in a fiber, with its agent, its reports and its workers' events.

The agent's fork server makes simulated workers. What a worker prints and the copies of its events go to directories in
memory, where the agent reads them.
"""

from __future__ import annotations

import contextlib
import io
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from shoal.errors import EXIT_RUN, ShoalError
from shoal.events import Event
from shoal.jobs.join import AGENT_VARIABLE, join
from shoal.spec.run_paths import RunPaths
from tests.simulation.machine import SIGKILL
from tests.simulation.world import Process, ProcessEnded, require

if TYPE_CHECKING:
    from tests.simulation.network import SimulatedControlClient
    from tests.simulation.run import SimulatedRun
    from tests.simulation.worker import SimulatedWorker


class Directories:
    """The text files that processes append to, by path, and the events that workers of agents keep."""

    def __init__(self) -> None:
        self.lines: defaultdict[str, list[str]] = defaultdict(list)
        self.events: defaultdict[str, list[Event]] = defaultdict(list)


class SimulatedPath(PurePosixPath):
    """See Path: a file of the history that happens now."""

    directories = Directories()

    def mkdir(self, **_: bool) -> None: ...

    def exists(self) -> bool:
        return True

    def is_file(self) -> bool:
        return False

    @contextlib.contextmanager
    def open(self, mode: str, encoding: str) -> Iterator[io.StringIO]:
        assert mode == "a"
        written = io.StringIO()
        yield written
        self.directories.lines[str(self)] += written.getvalue().splitlines()


class SimulatedPaths(RunPaths):
    """See RunPaths."""

    @classmethod
    def at(cls, root: Any) -> SimulatedPaths:
        return cls(SimulatedPath(root))  # type: ignore[arg-type]


class Tail:
    """See LineTail and EventReader: what is new in a list."""

    def __init__(self, rows: list[Any]) -> None:
        self._rows, self._next = rows, 0

    def read_new(self) -> list[Any]:
        found = self._rows[self._next :]
        self._next += len(found)
        return found


class SimulatedForkServer:
    """See ForkServer: forks workers of one agent. A dead agent forks, kills and waits for nobody."""

    def __init__(self, agent: SimulatedAgent) -> None:
        self.environment: dict[str, str] = {}
        self._agent = agent
        self._alive: dict[str, SimulatedWorker] = {}
        self._exit_codes: dict[str, int | None] = {}

    def start(
        self,
        key: str,
        entry: str,
        arguments: Sequence[str],
        *,
        logs: object,
        environment: Mapping[str, str],
        tied: bool,
    ) -> None:
        require(tied, "a worker would outlive its agent")
        own = str(SimulatedPath(arguments[arguments.index("--run") + 1]) / "events.jsonl")
        worker = self._agent.run.fork(self._agent, environment[AGENT_VARIABLE], output=f"{logs}.log", own_events=own)
        worker.on_exit = lambda: self._exited(key, worker)
        self._alive[key] = worker

    def _exited(self, key: str, worker: SimulatedWorker) -> None:
        self._exit_codes[key] = worker.exit_code
        del self._alive[key]
        self._agent.wake()

    def poll(self, timeout_s: float) -> None:
        fiber = self._agent.world.current
        assert fiber is not None
        if not self._agent.alive:
            raise ProcessEnded
        fiber.block(lambda: self._exit_codes, timeout_s)

    def pop_exit_codes(self, keys: Sequence[str]) -> dict[str, int | None]:
        return {key: self._exit_codes.pop(key) for key in keys if key in self._exit_codes}

    def pop_start_error(self, key: str) -> None:
        return None

    def pid(self, key: str) -> int | None:
        return self._alive[key].address.port if key in self._alive else None

    def kill(self, key: str) -> None:
        if self._agent.alive and key in self._alive:
            self._alive[key].kill()


class SimulatedAgent(Process):
    """The process of one `shoal join`. `asked` gets the user's wish to leave, `exit_code` is set when it returns."""

    def __init__(self, run: SimulatedRun, number: int, *, workers: int) -> None:
        super().__init__(run.world, f"agent-{number}")
        self.run = run
        self.asked: list[str] = []
        self.workers: list[SimulatedWorker] = []
        self.control: SimulatedControlClient | None = None
        self.exit_code: int | None = None
        self._number_of_workers = workers
        self.start(self._main)

    def _main(self) -> None:
        try:
            self.exit_code = join(
                "simulated:1",
                "token",
                base_dir=Path("/simulated"),
                workers=self._number_of_workers,
                show=lambda line: self.world.log(f"{self.name} shows", line),
                fork_server=SimulatedForkServer(self),  # type: ignore[arg-type]
            )
        except ShoalError:
            self.exit_code = EXIT_RUN
        self.world.log(f"{self.name} returns", self.exit_code)
        self.alive = False
        self.check_return()

    def kill(self) -> None:
        """SIGKILL. The kernel kills its workers, which are tied to it."""
        if self.alive:
            for worker in self.workers:
                worker.kill()
            self.world.log(f"{self.name} ends", SIGKILL)
            self.alive = self.frozen = False
            if self.control is not None and self.control._link is not None:
                self.control._link.close_client("killed")
                self.control._link = None

    @property
    def machine(self) -> list[Process]:
        return [self, *self.workers]

    @property
    def is_stuck(self) -> bool:
        """Whether it waits for something that never goes on."""
        return any(process.alive and process.frozen for process in self.machine)

    # ---- invariants ----

    def check_return(self) -> None:
        """It returns when all its workers have, and says whether all was well."""
        codes = [worker.exit_code for worker in self.workers]
        if not self.workers:
            return
        require(None not in codes, f"{self.name} returned, and left workers behind")
        well = not self.asked and not any(codes)
        require((self.exit_code == 0) == well, f"{self.name} returned {self.exit_code} after {codes}")

    def check_output(self, paths: RunPaths, *, disturbed: bool) -> None:
        """The run's logs have what the workers printed, in order. Without a disturbance, only lines at the end lack:
        the run has ended before the agent has sent them."""
        lines = self.run.directories.lines
        lost = disturbed or self.control is None or self.control.connections > 1
        for worker in self.workers:
            if worker.seats:
                printed, logged = lines[worker.output], lines[str(paths.log(worker.seats[0]))]
                rest = iter(printed)
                require(all(line in rest for line in dict.fromkeys(logged)), f"{worker.name} did not print {logged}")
                whole = logged == printed[: len(logged)]
                require(lost or whole, f"{worker.name} printed {printed}, and the log has {logged}")


def check_exit_notes(events: Sequence[Event], workers: Sequence[SimulatedWorker]) -> None:
    """A note of an exit is true and comes once."""
    noted = [event["message"].split()[0] for event in events if event.kind == "note" and "ended by" in event["message"]]
    require(len(noted) == len(set(noted)), f"{noted} were noted more than once")
    killed = {f"worker-{seat}" for one in workers if (one.exit_code or 0) < 0 for seat in one.seats}
    require(set(noted) <= killed, f"{set(noted) - killed} ended by a signal, says the stream")
