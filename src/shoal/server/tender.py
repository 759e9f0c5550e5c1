"""The thread of whoever started servers: it watches and replaces them, and tells everybody who holds what."""

from __future__ import annotations

import itertools
import select
import threading
import time
from collections import deque
from collections.abc import Callable

from shoal.errors import ShoalError, error, from_row
from shoal.events import Stream, read
from shoal.fleet.contact import Contact, write_contact
from shoal.fleet.control import Control, Said
from shoal.fleet.engine import Exit
from shoal.fleet.engines.local import LocalEngine, Nursery
from shoal.jobs.harbour import Harbour
from shoal.server.crowd import Crowd
from shoal.server.flat import Flat
from shoal.server.terms import ServerTerms
from shoal.spec.paths import RunPaths
from shoal.spec.table import Table
from shoal.spec.view import View
from shoal.wire.bell import Bell
from shoal.wire.handshake import new_token

ENTRY = "shoal.server.process"
RESTARTS = 3
TURN_S = 0.1
SILENT_S = 5.0
"""A worker tells four times a second that it lives. Longer silence is a lost connection that nobody closed."""


class Tender:
    """`news` is called in its thread when there is another table, or an end. `soon` may be called by any thread."""

    def __init__(
        self, terms: ServerTerms, paths: RunPaths, nursery: Nursery, *, listen: str, news: Callable[[], None]
    ) -> None:
        self.failure: ShoalError | None = None
        self._terms = terms
        self._paths = paths
        self._news = news
        self.token = new_token()
        self.control = Control(self.token, listen=listen)
        write_contact(paths.control, Contact(self.control.host, self.control.port, self.token))
        self._engine = LocalEngine(nursery, name=str(paths.root), logs=paths.logs)
        self._stream = Stream(paths.events, "starter")
        self._harbour = Harbour(
            terms.sync,
            paths,
            self._engine,
            self.control,
            self._stream,
            new_seat=itertools.count().__next__,
            restarts=RESTARTS,
            entry=ENTRY,
        )
        self._harbour.sized(Flat(terms.like).cuts)
        self._crowd = Crowd(terms.workers)
        self._view: View | None = None
        self._told: Table | None = None
        self._bell = Bell()
        self._wishes: deque[Callable[[], None]] = deque()
        self._closing = False
        self._thread = threading.Thread(target=self._tend, name="shoal-servers", daemon=True)
        self._thread.start()

    # ---- from any thread ----

    @property
    def table(self) -> Table | None:
        return self._told

    @property
    def address(self) -> str:
        host = self.control.host
        return f"[{host}]:{self.control.port}" if ":" in host else f"{host}:{self.control.port}"

    @property
    def processes(self) -> dict[str, int]:
        return self._harbour.processes

    def scale(self, servers: int) -> None:
        self._soon(lambda: self._harbour.scale(servers))

    def leave(self, worker: int) -> None:
        self._soon(lambda: self._gone(worker))

    def close(self) -> None:
        self._soon(self._end)
        self._thread.join()

    def _soon(self, wish: Callable[[], None]) -> None:
        self._wishes.append(wish)
        self._bell.ring()

    # ---- the thread ----

    def _tend(self) -> None:
        poll = select.poll()
        for source in (self._bell, self._engine, self.control):
            poll.register(source.fileno(), select.POLLIN)
        try:
            while not self._closing:
                poll.poll(1000 * TURN_S)
                self._turn()
        except Exception as failure:
            self._fail(error("SH703", f"the thread that tends the servers failed: {failure!r}"))
            raise
        finally:
            self._say_goodbye()

    def _turn(self) -> None:
        self._bell.clear()
        while self._wishes:
            self._wishes.popleft()()
        for said in self.control.take():
            self._hear(said)
        for one in self._engine.poll(0):
            self._ended(one)
        for worker, caller in list(self._crowd.callers.items()):
            if self.control.heard_s(caller) > SILENT_S:
                self.control.drop(caller)
                self._gone(worker)
        if self.failure is None:
            if why := self._harbour.tend(time.monotonic(), self._crowd.callers.values()):
                self._fail(error("SH703", f"what the servers held is lost: {why}"))
            self._tell()

    def _tell(self) -> None:
        """Whoever must know of another table or view."""
        if self._harbour.table is not self._told:
            self._told = self._harbour.table
            self._news()
        if view := self._crowd.view():
            self._view = view
            self.control.publish(view, [*self._crowd.callers.values(), *self._harbour.callers])

    def _end(self) -> None:
        self._closing = True

    def _fail(self, failure: ShoalError) -> None:
        if self.failure is None:
            self.failure = failure
            self._publish_end(failure.message)
            self._news()

    def _publish_end(self, why: str) -> None:
        self._view = self._crowd.view(stop=why)
        if self._view is not None:
            self.control.publish(self._view, self._crowd.callers.values())

    def _say_goodbye(self) -> None:
        if self.failure is None:
            self._publish_end("whoever started the servers has stopped them")
        self._engine.close()
        self._harbour.conclude()
        self.control.close()
        self._stream.close()
        self._bell.close()

    # ---- what servers and workers say ----

    def _hear(self, said: Said) -> None:
        if said.kind == "here":
            self._here(said)
        elif self._harbour.knows(said.caller):
            self._harbour.hear(said)
        elif (worker := self._crowd.worker(said.caller)) is not None:
            if said.kind == "in":
                self._crowd.is_in(said.caller)
            elif said.kind == "lost":
                self._gone(worker)

    def _here(self, said: Said) -> None:
        role = said.fields.get("role")
        if role == "server":
            self._harbour.welcome(said)
            if self._view is not None and self._harbour.knows(said.caller):
                self.control.publish(self._view, [said.caller])
        elif role == "client":
            self._welcome(said)
        else:
            self.control.drop(said.caller)

    def _welcome(self, said: Said) -> None:
        """A worker connects. One that is heard keeps its place; a new one takes that of one that is gone."""
        worker, crowd = said.fields.get("worker"), self._crowd
        why = crowd.why_not(worker)
        if not why and worker in crowd.callers:
            why = f"worker {worker} is here already"
        if why:
            self.control.send(said.caller, "welcome", refused=why)
            return
        assert isinstance(worker, int)
        present = [other for other in crowd.callers if other not in crowd.away]
        away = crowd.comes(worker, said.caller)
        terms = self._terms.model_dump(mode="json")
        self.control.send(said.caller, "welcome", terms=terms, present=present, away=away)
        pid, host = said.fields.get("pid"), said.fields.get("host")
        self._stream.emit("note", message=f"worker {worker} is here: process {pid} on {host}")
        if self._view is not None:
            self.control.publish(self._view, [said.caller])
        self._harbour.show(said.caller)

    def _gone(self, worker: int) -> None:
        if worker in self._crowd.callers:
            self._stream.emit("note", message=f"worker {worker} is gone")
        self._crowd.goes(worker)

    def _ended(self, one: Exit) -> None:
        """A server's process is gone. One that says why it cannot serve would say it again."""
        if why := self._harbour.ended(one):
            self._fail(error("SH703", why))
        for event in read(self._paths.events):
            if event.kind == "failed" and str(event["code"]).startswith("SH"):
                self._fail(from_row({name: event[name] for name in ("code", "message", "where", "fix")}))
