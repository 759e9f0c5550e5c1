"""Workers of this machine that join a run which somebody drives elsewhere."""

from __future__ import annotations

import contextlib
import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from shoal.errors import EXIT_INTERRUPTED, EXIT_OK, EXIT_RUN, EXIT_TERMINATED, ShoalError, error, error_from_fields
from shoal.events import Event, EventReader, LineTail
from shoal.fleet.driver_address import DriverAddress
from shoal.fleet.engine import Exit
from shoal.fleet.engines.local import ForkServer, LocalEngine
from shoal.jobs import commands
from shoal.jobs.executor import catch_stop_signals
from shoal.jobs.run_driver import make_fork_server
from shoal.jobs.worker_group import WORKER_MODULE
from shoal.net import tls
from shoal.net.address import parse_address
from shoal.spec.certificates import load_tls_contexts
from shoal.spec.job import MAX_WORKERS
from shoal.spec.run_paths import RunPaths
from shoal.spec.view import Seat

TOKEN_VARIABLE = "SHOAL_TOKEN"  # noqa: S105
POLL_S = 0.1
SIGNAL_INTERVAL_S = 1.0


def join(
    where: str,
    token: str,
    *,
    base_dir: Path,
    workers: int = 1,
    tls_dir: Path | None = None,
    show: Callable[[str], None],
    fork_server: ForkServer | None = None,
) -> int:
    """Work for the run at `where` (HOST:PORT) until it ends or somebody asks to stop. The exit code.

    `base_dir` is where the job's code and data lie on this machine, `tls_dir` where the certificates for a run that
    uses TLS do. `show` gets a line for what happens.
    """
    contact = _parse_address(where, token)
    if not 1 <= workers <= MAX_WORKERS:
        raise error("SH609", f"{workers} workers", where="--workers", fix=f"Ask for 1 to {MAX_WORKERS}.")
    tls.configure(load_tls_contexts(tls_dir, where="--tls") if tls_dir else None)
    welcome = commands.fetch_welcome(contact)
    with (
        tempfile.TemporaryDirectory(prefix="shoal-join-") as scratch,
        _fork_server(fork_server, welcome["threads"]) as mine,
    ):
        environment = mine.environment | {TOKEN_VARIABLE: token}  # never on a command line, where all can read it
        engine = LocalEngine(mine, name=scratch, logs=Path(scratch) / "logs", environment=environment)
        party = Agent(engine, Path(scratch), show)
        try:
            secured = ["--tls", str(tls_dir.resolve())] if tls_dir else []
            party.start(workers, ["--join", where, "--dir", str(base_dir.resolve()), *secured])
            return party.supervise()
        finally:
            engine.close()


def _parse_address(where: str, token: str) -> DriverAddress:
    try:
        host, port = parse_address(where)
    except ValueError as failure:
        raise error("SH609", str(failure), where=where, fix="Write HOST:PORT, as `shoal run` shows it.") from failure
    if not token:
        raise error("SH615", "there is no token", where=TOKEN_VARIABLE)
    return DriverAddress(host, port, token)


@contextlib.contextmanager
def _fork_server(given: ForkServer | None, threads: int) -> Iterator[ForkServer]:
    if given is not None:
        yield given
    else:
        with make_fork_server(threads) as own:
            yield own


@dataclass
class AgentWorker:
    """One worker of ours; `name` is what the driver calls it."""

    paths: RunPaths
    reader: EventReader
    output: LineTail
    name: str = "worker"
    errors: list[ShoalError] = field(default_factory=list)
    left: bool = False


class Agent:
    """All workers that one `join` started."""

    def __init__(self, engine: LocalEngine, scratch: Path, show: Callable[[str], None]) -> None:
        self._engine = engine
        self._scratch = RunPaths(scratch)
        self._show = show
        self._workers: dict[int, AgentWorker] = {}
        self._leaving = False
        self._exit_code = EXIT_OK

    def start(self, number: int, arguments: list[str]) -> None:
        for n in range(number):
            paths = RunPaths(self._scratch.root / f"guest-{n}")
            paths.root.mkdir()
            self._workers[n] = AgentWorker(paths, EventReader(paths.events), LineTail(self._scratch.log(n)))
            self._engine.start([Seat(number=n)], WORKER_MODULE, [*arguments, "--run", str(paths.root)])

    def supervise(self) -> int:
        """Until all are gone. Being asked to stop means a planned leave for them, too."""
        asked_at = 0.0
        with catch_stop_signals() as asked:
            while self._engine.seats:
                exits = self._engine.poll(POLL_S)
                self._read_output()
                for one in exits:
                    self._handle_exit(one)
                if asked and time.monotonic() > asked_at + SIGNAL_INTERVAL_S:
                    if not self._leaving:
                        self._show("leaving as soon as others have what is held here (once more: at once)")
                    self._leaving, asked_at = True, time.monotonic()
                    self._terminate_workers()
        if asked and self._exit_code == EXIT_OK:
            return EXIT_INTERRUPTED if asked[0] == "interrupted" else EXIT_TERMINATED
        return self._exit_code

    def _terminate_workers(self) -> None:
        """A process that was just born hears no signals yet: it is asked again until it is gone."""
        for seat in self._engine.seats:
            pid = self._engine.pid(seat)
            if pid is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGTERM)

    def _read_output(self) -> None:
        for guest in self._workers.values():
            for line in guest.output.read_new():
                self._show(line)
            for event in guest.reader.read_new():
                self._handle_event(guest, event)

    def _handle_event(self, worker: AgentWorker, event: Event) -> None:
        worker.name = event.who
        if event.kind == "joined":
            self._show(f"{worker.name}: trains from step {event.step} on, lanes {', '.join(map(str, event['lanes']))}")
        elif event.kind == "left":
            worker.left = True
            self._show(f"{worker.name}: left at step {event.step} ({event['why']})")
        elif event.kind == "failed":
            worker.errors.append(_reported_error(event))

    def _handle_exit(self, one: Exit) -> None:
        guest = self._workers[one.seat]
        for failure in guest.errors:
            self._show(f"{guest.name}: {failure}")
        if self._leaving and one.code == -signal.SIGTERM:
            self._show(f"{guest.name}: gone before it had joined")
            return
        if one.code != 0 and not guest.errors:
            log = self._scratch.error_log(one.seat).read_text(encoding="utf-8", errors="replace")[-2000:]
            self._show(f"{guest.name}: ended by {one.reason}\n{log}".rstrip())
        if one.code == 0 and not guest.left:
            self._show(f"{guest.name}: the run is finished")
        if one.code != 0:
            self._exit_code = self._exit_code or (guest.errors[0].exit_code if guest.errors else EXIT_RUN)


def _reported_error(event: Event) -> ShoalError:
    if event["code"] == "BUG":
        return error("SH603", f"{event['message']}\n{event['where']}", fix="This is a bug in Shoal: please report it.")
    return error_from_fields(event.fields)
