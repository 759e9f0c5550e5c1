"""The thread that drives stand-alone servers: it watches and replaces them, and publishes the chunk table."""

from __future__ import annotations

import select
import threading
import time
from collections import deque
from collections.abc import Callable

from shoal.errors import ShoalError, error, error_from_fields
from shoal.events import EventReader, EventWriter
from shoal.fleet.control_server import ControlMessage, ControlServer
from shoal.fleet.driver_address import DriverAddress, write_driver_address
from shoal.fleet.engine import Exit
from shoal.fleet.engines.make import make_engine
from shoal.fleet.forkserver import ForkServer
from shoal.fleet.roster import Peer, Roster, SeatNumbers
from shoal.jobs.remote.seat_launches import DirectoryLaunches
from shoal.jobs.server_group import ServerGroup
from shoal.net.handshake import new_token
from shoal.net.wakeup import Wakeup
from shoal.server.client_membership import ClientMembership
from shoal.server.config import StandaloneServerConfig
from shoal.server.numpy_layout import NumpyLayout
from shoal.spec.chunk_table import ChunkTable
from shoal.spec.engine import LocalEngineConfig
from shoal.spec.run_paths import RunPaths
from shoal.spec.view import View

SERVER_MODULE = "shoal.server.main"
MAX_RESTARTS = 3
POLL_INTERVAL_S = 0.1
HEARTBEAT_TIMEOUT_S = 5.0
"""Seconds without a heartbeat before a client counts as disconnected. Clients send four heartbeats a second."""


class Supervisor:
    """A server group and its clients, driven by a thread of its own. `on_change` is called in that thread after a new
    table or a failure."""

    def __init__(
        self,
        config: StandaloneServerConfig,
        paths: RunPaths,
        fork_server: ForkServer,
        *,
        listen: str,
        on_change: Callable[[], None],
    ) -> None:
        self.failure: ShoalError | None = None
        self._config = config
        self._on_change = on_change
        self.token = new_token()
        self.control = ControlServer(self.token, listen=listen)
        address = DriverAddress(self.control.host, self.control.port, self.token, self.control.secret)
        write_driver_address(paths.driver_address, address)
        self._engine = make_engine(LocalEngineConfig(), paths, fork_server)
        self._stream = EventWriter(paths.events, "starter")
        self._events = EventReader(paths.events)
        self._server_group = ServerGroup(
            config.sync,
            paths,
            self._engine,
            self.control,
            self._stream,
            seat_numbers=SeatNumbers(),
            restarts=MAX_RESTARTS,
            launches=DirectoryLaunches(paths, server_module=SERVER_MODULE),
        )
        self._server_group.set_chunk_boundaries(NumpyLayout(config.like).cuts)
        self._clients = ClientMembership(config.workers, Roster(self.control))
        self._view: View | None = None
        self._published_chunk_table: ChunkTable | None = None
        self._wakeup = Wakeup()
        self._callbacks: deque[Callable[[], None]] = deque()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="shoal-servers", daemon=True)
        self._thread.start()

    # ---- from any thread ----

    @property
    def chunk_table(self) -> ChunkTable | None:
        return self._published_chunk_table

    @property
    def address(self) -> str:
        return self.control.address

    @property
    def processes(self) -> dict[str, int]:
        return self._server_group.pids

    def scale(self, servers: int) -> None:
        self._call_soon(lambda: self._server_group.scale(servers))

    def leave(self, worker: int) -> None:
        self._call_soon(lambda: self._client_lost(worker))

    def close(self) -> None:
        self._call_soon(self._stop)
        self._thread.join()

    def _call_soon(self, callback: Callable[[], None]) -> None:
        self._callbacks.append(callback)
        self._wakeup.notify()

    # ---- the thread ----

    def _run(self) -> None:
        poll = select.poll()
        for source in (self._wakeup, self._engine, self.control):
            poll.register(source.fileno(), select.POLLIN)
        try:
            while not self._closing:
                poll.poll(1000 * POLL_INTERVAL_S)
                self._tick()
        except Exception as failure:
            self._fail(error("SH703", f"the thread that tends the servers failed: {failure!r}"))
            raise
        finally:
            self._shut_down()

    def _tick(self) -> None:
        self._wakeup.clear()
        while self._callbacks:
            self._callbacks.popleft()()
        for message in self.control.receive():
            self._handle_message(message)
        for one in self._engine.poll(0):
            self._handle_exit(one)
        clients = self._clients.roster
        for worker in [worker for worker in clients if clients.silence_s(worker) > HEARTBEAT_TIMEOUT_S]:
            clients.disconnect(worker)
            self._client_lost(worker)
        if self.failure is None:
            if lost := self._server_group.tick(time.monotonic(), clients.connections):
                self._fail(error("SH703", f"what the servers held is lost: {lost.why}"))
            self._publish_changes()

    def _publish_changes(self) -> None:
        """Call `on_change` after a new table, and send a new view to clients and servers."""
        if self._server_group.chunk_table is not self._published_chunk_table:
            self._published_chunk_table = self._server_group.chunk_table
            self._on_change()
        if view := self._clients.next_view():
            self._view = view
            self.control.publish_view(view, [*self._clients.roster.connections, *self._server_group.connections])

    def _stop(self) -> None:
        self._closing = True

    def _fail(self, failure: ShoalError) -> None:
        if self.failure is None:
            self.failure = failure
            self._publish_stop(failure.message)
            self._on_change()

    def _publish_stop(self, why: str) -> None:
        self._view = self._clients.next_view(stop=why)
        if self._view is not None:
            self.control.publish_view(self._view, self._clients.roster.connections)

    def _shut_down(self) -> None:
        if self.failure is None:
            self._publish_stop("whoever started the servers has stopped them")
        self._engine.close()
        self._server_group.flush_stats()
        self.control.close()
        self._stream.close()
        self._wakeup.close()

    # ---- messages of servers and workers ----

    def _handle_message(self, message: ControlMessage) -> None:
        if message.kind == "here":
            self._handle_hello(message)
        elif self._server_group.owns_connection(message.connection):
            self._server_group.handle(message)
        elif (worker := self._clients.roster.seat_of(message.connection)) is not None:
            if message.kind == "in":
                self._clients.mark_entered(worker)
            elif message.kind == "lost":
                self._client_lost(worker)

    def _handle_hello(self, message: ControlMessage) -> None:
        role = message.fields.get("role")
        if role == "server":
            self._server_group.handle_hello(message)
            if self._view is not None and self._server_group.owns_connection(message.connection):
                self.control.publish_view(self._view, [message.connection])
        elif role == "client":
            self._admit_client(message)
        else:
            self.control.drop(message.connection)

    def _admit_client(self, message: ControlMessage) -> None:
        """A worker connects. It is refused while another process is connected with its number; otherwise it may replace
        one that is gone."""
        fields = message.fields
        worker = fields.get("worker")
        if why := self._clients.why_refused(worker):
            self.control.send(message.connection, "welcome", refused=why)
            return
        assert isinstance(worker, int)
        present = self._clients.present
        pid, host = fields.get("pid"), fields.get("host")
        away = self._clients.add(worker, Peer(message.connection, host=str(host), managed=False, same_host=False))
        config = self._config.model_dump(mode="json")
        self.control.send(message.connection, "welcome", terms=config, present=present, away=away)
        self._stream.emit("note", message=f"worker {worker} is here: process {pid} on {host}")
        if self._view is not None:
            self.control.publish_view(self._view, [message.connection])
        self._server_group.send_chunk_table(message.connection)

    def _client_lost(self, worker: int) -> None:
        if worker in self._clients.roster:
            self._stream.emit("note", message=f"worker {worker} is gone")
        self._clients.remove(worker)

    def _handle_exit(self, process_exit: Exit) -> None:
        """Handle the exit of a server. An error that a server reported is fatal: a new server would fail too."""
        if why := self._server_group.handle_exit(process_exit):
            self._fail(error("SH703", why))
        for event in self._events.read_new():
            if event.kind == "failed" and str(event["code"]).startswith("SH"):
                self._fail(error_from_fields({name: event[name] for name in ("code", "message", "where", "fix")}))
