"""Start servers from a program of any kind, and look at what they hold."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

from shoal.errors import error
from shoal.fleet.engines.local import Nursery
from shoal.jobs import run as jobs_run
from shoal.parallel.links.memory import Memory
from shoal.parallel.server.client import Client as Lines
from shoal.parallel.server.client import Entry, Errand
from shoal.parallel.server.errands import Pull, SetAll
from shoal.server import holding
from shoal.server.client import pulled
from shoal.server.flat import Arrays, Flat
from shoal.server.holding import Holding
from shoal.server.tender import ENTRY, Tender
from shoal.server.terms import SETTING_VIEW, ServerTerms, checked_terms, checked_values
from shoal.spec.paths import RunPaths
from shoal.wire.handshake import LinkError


def start(
    values: Mapping[str, Any] | None = None,
    *,
    optimizer: str | Mapping[str, Any] | None = None,
    workers: int = 1,
    servers: int = 1,
    backups: int | None = None,
    staleness: int | float | Literal["inf"] = 0,
    staleness_aware: bool = False,
    placement: Literal["table", "ring"] = "table",
    from_: str | os.PathLike[str] | None = None,
    listen: str = "127.0.0.1",
    directory: str | os.PathLike[str] | None = None,
    python: str | None = None,
) -> Servers:
    """Start server processes on this machine that hold `values`, and go on until they are closed.

    `optimizer` is one of torch's by name with its arguments: {"name": "Adam", "args": {"lr": 0.001}}. `servers`,
    `backups`, `staleness`, `staleness_aware` and `placement` are those of `sync: server` in a job. `from_` goes on from
    a file that `save` wrote; values and optimizer are its own then, unless they are given.

    Workers elsewhere connect to `listen`, an address of this machine. Logs and events are kept in `directory`, if one
    is given. Servers run in the interpreter `python`, which must have torch; this process needs none.
    """
    held, kept = holding.load(from_) if from_ is not None else (None, None)
    mine = held.values if held is not None and values is None else checked_values(values)
    terms = checked_terms(
        mine,
        optimizer=optimizer if optimizer is not None else kept,
        workers=workers,
        servers=servers,
        backups=backups,
        staleness=staleness,
        staleness_aware=staleness_aware,
        placement=placement,
    )
    if held is not None and kept is not None:
        held = _continued(held, mine, terms, kept)
    return Servers(terms, held or Holding(mine), listen=listen, directory=directory, python=python)


def _continued(held: Holding, values: Arrays, terms: ServerTerms, kept: Mapping[str, Any]) -> Holding:
    if Flat.of(held.values).like != terms.like:
        raise error("SH705", "the values are not like those that were saved", where="values")
    if kept.get("name") != terms.optimizer.name:
        message = f"it was saved with {kept.get('name')}, not {terms.optimizer.name}"
        raise error("SH705", message, where="optimizer")
    return Holding(values, held.state, held.clocks)


class Servers:
    """Servers that this process started. Close it, or use it as a context: nothing is left then.

    `address` and `token` are for workers: `connect(address, token=token, worker=0)`.
    """

    def __init__(
        self,
        terms: ServerTerms,
        held: Holding,
        *,
        listen: str,
        directory: str | os.PathLike[str] | None,
        python: str | None,
    ) -> None:
        self._terms = terms
        self._flat = Flat(terms.like)
        self._exit = contextlib.ExitStack()
        self._one_at_a_time = threading.Lock()
        self._closed = False
        with contextlib.ExitStack() as stack:
            root = Path(directory or stack.enter_context(tempfile.TemporaryDirectory(prefix="shoal-servers-")))
            root.mkdir(parents=True, exist_ok=True)
            terms.write(root)
            nursery = stack.enter_context(_nursery(python))
            self._lines: list[Lines] = []
            self._tender = Tender(terms, RunPaths.at(root), nursery, listen=listen, news=self._hear)
            stack.callback(self._tender.close)
            self.address, self.token, self.directory = self._tender.address, self._tender.token, root
            self._set(held)
            self._looking = self._line(seat=terms.workers + 1)
            stack.callback(self._looking.close)
            self._exit = stack.pop_all()

    # ---- for users ----

    def pull(self) -> Arrays:
        """The newest values."""
        memory = Memory.private(self._flat.size_bytes)
        self._run(Pull(self._flat, memory))
        return {name: value.copy() for name, value in self._flat.views(memory.raw).items()}

    def save(self, path: str | os.PathLike[str]) -> None:
        """Values, optimizer state and steps in one safetensors file, for `start(from_=...)`.

        Workers go on meanwhile, so that some parts may have had an update more than others; what a worker saves itself
        is exactly one step, with staleness 0.
        """
        found = pulled(self._run, self._flat, together=self._terms.together)
        holding.save(found, path, optimizer=self._terms.optimizer.model_dump())

    @property
    def processes(self) -> dict[str, int]:
        """Process ids of the servers that run now, by name."""
        return self._tender.processes

    def scale(self, servers: int) -> None:
        """Another number of servers from now on; what they hold moves while workers go on."""
        if servers < 1:
            raise error("SH701", f"{servers} servers", where="servers")
        self._tender.scale(servers)

    def leave(self, worker: int) -> None:
        """Where staleness is above 0: nobody waits for it until it connects again. A lost connection does the same."""
        self._tender.leave(worker)

    def close(self) -> None:
        """Stop the servers; workers that still push are told."""
        self._closed = True
        self._exit.close()

    def __enter__(self) -> Servers:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, failure: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # ---- how it is done ----

    def _line(self, *, seat: int) -> Lines:
        line = Lines(seat, self.token, aborted=lambda: self._tender.failure is not None)
        self._lines.append(line)
        self._hear()
        return line

    def _hear(self) -> None:
        """Also in the tender's thread: another table, or an end."""
        tender = getattr(self, "_tender", None)
        for line in list(self._lines):
            if tender is not None and tender.table is not None:
                line.learn(tender.table)
            line.wake()

    def _run(self, errand: Errand) -> None:
        if self._closed:
            raise error("SH703", "the servers were closed")
        with self._one_at_a_time:
            self._told(lambda: self._looking.run(errand))

    def _told(self, act: Any) -> None:
        try:
            act()
        except LinkError as failure:
            raise (self._tender.failure or error("SH703", str(failure))) from failure

    def _set(self, held: Holding) -> None:
        """Let the servers hold it: nobody trains before."""
        lanes = self._terms.workers
        words = {"carries": {str(lanes): list(range(lanes))}, "model": self._terms.model}
        errand = SetAll(lambda first, last: held.chunks(self._flat, first, last, lanes=lanes))
        line = self._line(seat=lanes)
        try:
            self._told(lambda: line.enter(Entry(SETTING_VIEW, words, judge=lambda _: errand)))
        finally:
            self._lines.remove(line)
            line.close()


def _nursery(python: str | None) -> contextlib.AbstractContextManager[Nursery]:
    if python is None and importlib.util.find_spec("torch") is None:
        fix = "pip install torch, or give start(python=...) an interpreter that has shoal and torch."
        raise error("SH207", "servers need torch, and it is not installed here", fix=fix)
    return jobs_run.make_nursery(1, modules=[ENTRY], python=python or "")
