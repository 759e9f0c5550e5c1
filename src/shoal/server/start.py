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

from shoal.collectives.transport.shared_memory import ByteBuffer
from shoal.errors import error
from shoal.fleet.forkserver import ForkServer
from shoal.jobs import fork_servers
from shoal.net.errors import LinkError
from shoal.paramserver.client import ParameterServerClient as Lines
from shoal.paramserver.client import Request, ViewEntry
from shoal.paramserver.requests import Pull, SetState
from shoal.server import snapshot
from shoal.server.client import pull_snapshot
from shoal.server.config import LOADING_VIEW, StandaloneServerConfig, build_config, check_values
from shoal.server.numpy_layout import Arrays, NumpyLayout
from shoal.server.snapshot import ServerSnapshot
from shoal.server.supervisor import SERVER_MODULE, Supervisor
from shoal.spec.run_paths import RunPaths


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
    saved, saved_optimizer = snapshot.load(from_) if from_ is not None else (None, None)
    mine = saved.values if saved is not None and values is None else check_values(values)
    config = build_config(
        mine,
        optimizer=optimizer if optimizer is not None else saved_optimizer,
        workers=workers,
        servers=servers,
        backups=backups,
        staleness=staleness,
        staleness_aware=staleness_aware,
        placement=placement,
    )
    if saved is not None and saved_optimizer is not None:
        saved = _resume_snapshot(saved, mine, config, saved_optimizer)
    return Servers(config, saved or ServerSnapshot(mine), listen=listen, directory=directory, python=python)


def _resume_snapshot(
    saved: ServerSnapshot, values: Arrays, config: StandaloneServerConfig, saved_optimizer: Mapping[str, Any]
) -> ServerSnapshot:
    if NumpyLayout.from_arrays(saved.values).like != config.like:
        raise error("SH705", "the values are not like those that were saved", where="values")
    if saved_optimizer.get("name") != config.optimizer.name:
        message = f"it was saved with {saved_optimizer.get('name')}, not {config.optimizer.name}"
        raise error("SH705", message, where="optimizer")
    return ServerSnapshot(values, saved.state, saved.clocks)


class Servers:
    """Servers that this process started. Close it, or use it as a context: nothing is left then.

    `address` and `token` are for workers: `connect(address, token=token, worker=0)`.
    """

    def __init__(
        self,
        config: StandaloneServerConfig,
        initial: ServerSnapshot,
        *,
        listen: str,
        directory: str | os.PathLike[str] | None,
        python: str | None,
    ) -> None:
        self._config = config
        self._layout = NumpyLayout(config.like)
        self._exit = contextlib.ExitStack()
        self._lock = threading.Lock()
        self._closed = False
        with contextlib.ExitStack() as stack:
            root = Path(directory or stack.enter_context(tempfile.TemporaryDirectory(prefix="shoal-servers-")))
            root.mkdir(parents=True, exist_ok=True)
            config.write(root)
            nursery = stack.enter_context(_fork_server(python))
            self._clients: list[Lines] = []
            self._supervisor = Supervisor(config, RunPaths.at(root), nursery, listen=listen, on_change=self._on_change)
            stack.callback(self._supervisor.close)
            self.address, self.token, self.directory = self._supervisor.address, self._supervisor.token, root
            self._load_snapshot(initial)
            self._reader = self._new_client(seat=config.workers + 1)
            stack.callback(self._reader.close)
            self._exit = stack.pop_all()

    # ---- for users ----

    def pull(self) -> Arrays:
        """The newest values."""
        memory = ByteBuffer.private(self._layout.size_bytes)
        self._run(Pull(self._layout, memory))
        return {name: value.copy() for name, value in self._layout.views(memory.raw).items()}

    def save(self, path: str | os.PathLike[str]) -> None:
        """Values, optimizer state and steps in one safetensors file, for `start(from_=...)`.

        Workers go on meanwhile, so that some parts may have had an update more than others; what a worker saves itself
        is exactly one step, with staleness 0.
        """
        found = pull_snapshot(self._run, self._layout, synchronous=self._config.synchronous)
        snapshot.save(found, path, optimizer=self._config.optimizer.model_dump())

    @property
    def processes(self) -> dict[str, int]:
        """Process ids of the servers that run now, by name."""
        return self._supervisor.processes

    def scale(self, servers: int) -> None:
        """Another number of servers from now on; what they hold moves while workers go on."""
        if servers < 1:
            raise error("SH701", f"{servers} servers", where="servers")
        self._supervisor.scale(servers)

    def leave(self, worker: int) -> None:
        """Where staleness is above 0: nobody waits for it until it connects again. A lost connection does the same."""
        self._supervisor.leave(worker)

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

    def _new_client(self, *, seat: int) -> Lines:
        client = Lines(seat, self.token, aborted=lambda: self._supervisor.failure is not None)
        self._clients.append(client)
        self._on_change()
        return client

    def _on_change(self) -> None:
        """Also in the tender's thread: another table, or an end."""
        supervisor = getattr(self, "_supervisor", None)
        for client in list(self._clients):
            if supervisor is not None and supervisor.chunk_table is not None:
                client.set_chunk_table(supervisor.chunk_table)
            client.wake()

    def _run(self, request: Request) -> None:
        if self._closed:
            raise error("SH703", "the servers were closed")
        with self._lock:
            self._translate_errors(lambda: self._reader.run(request))

    def _translate_errors(self, act: Any) -> None:
        try:
            act()
        except LinkError as failure:
            raise (self._supervisor.failure or error("SH703", str(failure))) from failure

    def _load_snapshot(self, initial: ServerSnapshot) -> None:
        """Let the servers hold it: nobody trains before."""
        lanes = self._config.workers
        words = {"carries": {str(lanes): list(range(lanes))}, "model": self._config.model}
        request = SetState(lambda first, last: initial.chunk_state(self._layout, first, last, lanes=lanes))
        client = self._new_client(seat=lanes)
        try:
            self._translate_errors(lambda: client.enter(ViewEntry(LOADING_VIEW, words, plan_restore=lambda _: request)))
        finally:
            self._clients.remove(client)
            client.close()


def _fork_server(python: str | None) -> contextlib.AbstractContextManager[ForkServer]:
    if python is None and importlib.util.find_spec("torch") is None:
        fix = "pip install torch, or give start(python=...) an interpreter that has shoal and torch."
        raise error("SH207", "servers need torch, and it is not installed here", fix=fix)
    return fork_servers.make_fork_server(1, modules=[SERVER_MODULE], python=python or "")
