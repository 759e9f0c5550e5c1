"""Workers of this machine that join a run which somebody drives elsewhere."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from shoal.errors import EXIT_INTERRUPTED, EXIT_OK, EXIT_RUN, EXIT_TERMINATED, ShoalError, error, from_row
from shoal.events import Event, Lines, Reader
from shoal.fleet.contact import Contact
from shoal.fleet.engine import Exit
from shoal.fleet.engines.local import LocalEngine, Nursery
from shoal.jobs import wishes
from shoal.jobs.drive import asked_to_stop
from shoal.jobs.helm import WORKER
from shoal.jobs.run import make_nursery
from shoal.spec.certificates import read_certificates
from shoal.spec.job import MOST_WORKERS
from shoal.spec.paths import RunPaths
from shoal.spec.view import Seat
from shoal.wire import tls

TOKEN_VARIABLE = "SHOAL_TOKEN"  # noqa: S105
LOOK_S = 0.1
ASK_AGAIN_S = 1.0


def join(
    where: str,
    token: str,
    *,
    base_dir: Path,
    workers: int = 1,
    tls_dir: Path | None = None,
    show: Callable[[str], None],
    nursery: Nursery | None = None,
) -> int:
    """Work for the run at `where` (HOST:PORT) until it ends or somebody asks to stop. The exit code.

    `base_dir` is where the job's code and data lie on this machine, `tls_dir` where the certificates for a run that
    uses TLS do. `show` gets a line for what happens.
    """
    contact = _contact(where, token)
    if not 1 <= workers <= MOST_WORKERS:
        raise error("SH609", f"{workers} workers", where="--workers", fix=f"Ask for 1 to {MOST_WORKERS}.")
    tls.use(read_certificates(tls_dir, where="--tls") if tls_dir else None)
    welcome = wishes.greet(contact)
    with tempfile.TemporaryDirectory(prefix="shoal-join-") as scratch, _nursery(nursery, welcome["threads"]) as mine:
        environment = mine.environment | {TOKEN_VARIABLE: token}  # never on a command line, where all can read it
        engine = LocalEngine(mine, name=scratch, logs=Path(scratch) / "logs", environment=environment)
        party = Party(engine, Path(scratch), show)
        try:
            secured = ["--tls", str(tls_dir.resolve())] if tls_dir else []
            party.start(workers, ["--join", where, "--dir", str(base_dir.resolve()), *secured])
            return party.attend()
        finally:
            engine.close()


def _contact(where: str, token: str) -> Contact:
    found = re.fullmatch(r"\[?([^\[\]\s]+?)\]?:(\d{1,5})", where)
    if not found:
        raise error("SH609", f"'{where}' is no address", where=where, fix="Write HOST:PORT, as `shoal run` shows it.")
    if not token:
        raise error("SH615", "there is no token", where=TOKEN_VARIABLE)
    return Contact(found[1], int(found[2]), token)


@contextlib.contextmanager
def _nursery(brought: Nursery | None, threads: int) -> Iterator[Nursery]:
    if brought is not None:
        yield brought
    else:
        with make_nursery(threads) as own:
            yield own


@dataclass
class Guest:
    """One worker of ours; `name` is what the driver calls it."""

    paths: RunPaths
    reader: Reader
    printed: Lines
    name: str = "worker"
    errors: list[ShoalError] = field(default_factory=list)
    left: bool = False


class Party:
    """All workers that one `join` started."""

    def __init__(self, engine: LocalEngine, scratch: Path, show: Callable[[str], None]) -> None:
        self._engine = engine
        self._scratch = RunPaths(scratch)
        self._show = show
        self._guests: dict[int, Guest] = {}
        self._leaving = False
        self._code = EXIT_OK

    def start(self, number: int, arguments: list[str]) -> None:
        for n in range(number):
            paths = RunPaths(self._scratch.root / f"guest-{n}")
            paths.root.mkdir()
            self._guests[n] = Guest(paths, Reader(paths.events), Lines(self._scratch.log(n)))
            self._engine.start([Seat(number=n)], WORKER, [*arguments, "--run", str(paths.root)])

    def attend(self) -> int:
        """Until all are gone. Being asked to stop means a planned leave for them, too."""
        asked_at = 0.0
        with asked_to_stop() as asked:
            while self._engine.seats:
                exits = self._engine.poll(LOOK_S)
                self._look()
                for one in exits:
                    self._gone(one)
                if asked and time.monotonic() > asked_at + ASK_AGAIN_S:
                    if not self._leaving:
                        self._show("leaving as soon as others have what is held here (once more: at once)")
                    self._leaving, asked_at = True, time.monotonic()
                    self._ask_to_leave()
        if asked and self._code == EXIT_OK:
            return EXIT_INTERRUPTED if asked[0] == "interrupted" else EXIT_TERMINATED
        return self._code

    def _ask_to_leave(self) -> None:
        """A process that was just born hears no signals yet: it is asked again until it is gone."""
        for seat in self._engine.seats:
            pid = self._engine.pid(seat)
            if pid is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGTERM)

    def _look(self) -> None:
        for guest in self._guests.values():
            for line in guest.printed.new():
                self._show(line)
            for event in guest.reader.new():
                self._hear(guest, event)

    def _hear(self, guest: Guest, event: Event) -> None:
        guest.name = event.who
        if event.kind == "joined":
            self._show(f"{guest.name}: trains from step {event.step} on, lanes {', '.join(map(str, event['lanes']))}")
        elif event.kind == "left":
            guest.left = True
            self._show(f"{guest.name}: left at step {event.step} ({event['why']})")
        elif event.kind == "failed":
            guest.errors.append(_error(event))

    def _gone(self, one: Exit) -> None:
        guest = self._guests[one.seat]
        for failure in guest.errors:
            self._show(f"{guest.name}: {failure}")
        if self._leaving and one.code == -signal.SIGTERM:
            self._show(f"{guest.name}: gone before it had joined")
            return
        if one.code != 0 and not guest.errors:
            log = self._scratch.errors(one.seat).read_text(encoding="utf-8", errors="replace")[-2000:]
            self._show(f"{guest.name}: ended by {one.reason}\n{log}".rstrip())
        if one.code == 0 and not guest.left:
            self._show(f"{guest.name}: the run is finished")
        if one.code != 0:
            self._code = self._code or (guest.errors[0].exit_code if guest.errors else EXIT_RUN)


def _error(event: Event) -> ShoalError:
    if event["code"] == "BUG":
        return error("SH603", f"{event['message']}\n{event['where']}", fix="This is a bug in Shoal: please report it.")
    return from_row(event.fields)
