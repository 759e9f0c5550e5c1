"""Starts parameter servers from a program in any framework, and reads their values."""

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
from shoal.paramserver.client import ParameterServerClient, Request, ViewEntry
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
    """Start server processes on this machine that hold `values`, and run until they are closed.

    `optimizer` is the name of one of torch's optimizers with its arguments: {"name": "Adam", "args": {"lr": 0.001}}.
    `servers`, `backups`, `staleness`, `staleness_aware` and `placement` are those of `sync: server` in a job. `from_`
    continues from a file that `save` wrote, with its values and optimizer unless others are given.

    Workers on other machines connect to `listen`, an address of this machine. Logs and events are kept in `directory`,
    if given. Servers run in the interpreter `python`, which must have torch; this process needs none.
    """
    saved, saved_optimizer = snapshot.load(from_) if from_ is not None else (None, None)
    initial_values = saved.values if saved is not None and values is None else check_values(values)
    config = build_config(
        initial_values,
        optimizer=optimizer if optimizer is not None else saved_optimizer,
        workers=workers,
        servers=servers,
        backups=backups,
        staleness=staleness,
        staleness_aware=staleness_aware,
        placement=placement,
    )
    if saved is not None and saved_optimizer is not None:
        saved = _resume_snapshot(saved, initial_values, config, saved_optimizer)
    return Servers(config, saved or ServerSnapshot(initial_values), listen=listen, directory=directory, python=python)


def _resume_snapshot(
    saved: ServerSnapshot, values: Arrays, config: StandaloneServerConfig, saved_optimizer: Mapping[str, Any]
) -> ServerSnapshot:
    if NumpyLayout.from_arrays(saved.values).like != config.like:
        raise error("SH705", "the values differ from the saved ones in names, shapes or dtypes", where="values")
    if saved_optimizer.get("name") != config.optimizer.name:
        message = f"it was saved with {saved_optimizer.get('name')}, not {config.optimizer.name}"
        raise error("SH705", message, where="optimizer")
    return ServerSnapshot(values, saved.state, saved.clocks)


class Servers:
    """Servers that this process started. Close it, or use it as a context manager, to stop all processes.

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
            fork_server = stack.enter_context(_fork_server(python))
            self._clients: list[ParameterServerClient] = []
            self._supervisor = Supervisor(
                config, RunPaths.at(root), fork_server, listen=listen, on_change=self._on_change
            )
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
        """Save values, optimizer state and steps to one safetensors file, for `start(from_=...)`.

        Workers push meanwhile, so some chunks may have one update more than others. With staleness 0, `Client.save`
        saves exactly one step.
        """
        pulled = pull_snapshot(self._run, self._layout, synchronous=self._config.synchronous)
        snapshot.save(pulled, path, optimizer=self._config.optimizer.model_dump())

    @property
    def processes(self) -> dict[str, int]:
        """Process ids of the running servers, by name."""
        return self._supervisor.processes

    def scale(self, servers: int) -> None:
        """Change the number of servers; chunks move while workers continue."""
        if servers < 1:
            raise error("SH701", f"{servers} servers", where="servers")
        self._supervisor.scale(servers)

    def leave(self, worker: int) -> None:
        """With staleness above 0, do not wait for this worker until it connects again. A lost connection does the
        same."""
        self._supervisor.leave(worker)

    def close(self) -> None:
        """Stop the servers; workers that still push get an error."""
        self._closed = True
        self._exit.close()

    def __enter__(self) -> Servers:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, failure: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # ---- internals ----

    def _new_client(self, *, seat: int) -> ParameterServerClient:
        client = ParameterServerClient(seat, self.token, aborted=lambda: self._supervisor.failure is not None)
        self._clients.append(client)
        self._on_change()
        return client

    def _on_change(self) -> None:
        """Pass a new chunk table, or the end, to the clients. Also called by the supervisor's thread."""
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
        """Set the servers' state, before any worker can push."""
        lanes = self._config.workers
        hello = self._config.enter_fields(LOADING_VIEW)
        request = SetState(lambda first, last: initial.chunk_state(self._layout, first, last, lanes=lanes))
        client = self._new_client(seat=lanes)
        try:
            self._translate_errors(lambda: client.enter(ViewEntry(LOADING_VIEW, hello, plan_restore=lambda _: request)))
        finally:
            self._clients.remove(client)
            client.close()


def _fork_server(python: str | None) -> contextlib.AbstractContextManager[ForkServer]:
    if python is None and importlib.util.find_spec("torch") is None:
        fix = "pip install torch, or give start(python=...) an interpreter that has shoal and torch."
        raise error("SH207", "servers need torch, and it is not installed here", fix=fix)
    return fork_servers.make_fork_server(1, modules=[SERVER_MODULE], python=python or "")
