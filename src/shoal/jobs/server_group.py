"""The servers of one run are started, watched and replaced here. `plan` decides which server holds which chunks."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from shoal.errors import plural
from shoal.events import EventWriter
from shoal.fleet.control_server import ControlMessage, ControlServer
from shoal.fleet.engine import Engine, Exit
from shoal.fleet.messages import (
    BeatMessage,
    FilledMessage,
    ServerHello,
    parse_hello,
    parse_server_message,
    printable,
)
from shoal.fleet.roster import RECONNECT_TIMEOUT_S, START_TIMEOUT_S, Peer, Roster, SeatNumbers
from shoal.jobs.liveness import LivenessCheck
from shoal.jobs.remote.seat_launches import DirectoryLaunches, SeatLaunches
from shoal.net.errors import ProtocolError
from shoal.net.host_id import host_id
from shoal.plan.chunk_placement import ChunkPlacement, ChunksLost
from shoal.plan.placement_stats import moved_bytes, placement_stats
from shoal.spec.chunk_table import ChunkTable, build_pieces
from shoal.spec.job import ServerSyncConfig
from shoal.spec.run_paths import RunPaths
from shoal.spec.view import Seat, View

STATS_INTERVAL_S = 3.0


class ServerGroup:
    """A roster of servers and the placement of chunks. Belongs to the driver's thread.

    Call `tick` whenever something is readable, and periodically. A server that dies before it holds any chunk is
    restarted, up to `restarts` times in a row. After that the run continues with the remaining servers, if any. Without
    `launches`, servers open the run's directory.
    """

    def __init__(
        self,
        sync: ServerSyncConfig,
        paths: RunPaths,
        engine: Engine,
        control: ControlServer,
        stream: EventWriter,
        *,
        seat_numbers: SeatNumbers,
        restarts: int,
        launches: SeatLaunches | None = None,
    ) -> None:
        self.seats: set[int] = set()
        self.chunk_table: ChunkTable | None = None
        self._placement = ChunkPlacement(servers=sync.servers, backups=sync.backups, method=sync.placement)
        self._paths = paths
        self._engine = engine
        self._control = control
        self._stream = stream
        self._restarts = self._restarts_left = restarts
        self._launches = launches or DirectoryLaunches(paths)
        self._seat_numbers = seat_numbers
        self._roster = Roster(control)
        self._liveness = LivenessCheck(self._roster)
        self._released: set[int] = set()  # seats that were asked to leave
        self._served_before: set[int] = set()  # seats that have held chunks
        self._died_since_table: set[int] = set()
        self._table_reasons: list[str] = []  # events since the last table
        self._reported_stats: dict[int, Mapping[str, float]] = {}  # last reported stats by seat
        self._newest_table_number = self._lost_table_number = (
            0  # the newest table, and the newest one whose chunks are lost
        )
        self._next_report_s = 0.0
        self._view: View | None = None  # the newest in which workers train

    @property
    def wanted(self) -> int:
        return self._placement.wanted_servers

    @property
    def connected_seats(self) -> list[int]:
        return list(self._roster)

    @property
    def connections(self) -> list[int]:
        """Open connections to servers."""
        return self._roster.connections

    @property
    def pids(self) -> dict[str, int]:
        """pids of connected servers, by name. May be called from any thread."""
        peers = {seat: self._roster.get(seat) for seat in self._roster}
        return {_name(seat): peer.pid for seat, peer in peers.items() if peer is not None}

    # ---- facts ----

    def start(self, reattached: Iterable[int]) -> None:
        """Expect the servers that outlived an earlier driver. `tick` starts the missing ones."""
        self._report_wanted("")
        for seat in reattached:
            self._expect(seat)
            self._roster.expect_back(seat, until_s=time.monotonic() + RECONNECT_TIMEOUT_S)

    def handle_hello(self, message: ControlMessage) -> None:
        """A server connects. It is refused if its hello is malformed or its seat unknown, evicted or not its own."""
        try:
            hello = parse_hello({**message.fields, "role": "server"})
            assert isinstance(hello, ServerHello)
            seat = hello.seat
            self._check_admission(hello)
        except ProtocolError as failure:
            self._control.refuse(message.connection, str(failure), name="a server")
            return
        peer = Peer(
            message.connection,
            hello.pid,
            printable(hello.host),
            managed=hello.attachment.managed,
            same_host=hello.address.host_id == host_id(),
        )
        if self._roster.connect(seat, peer):
            self._stream.emit("server_started", server=_name(seat), pid=peer.pid, host=peer.host)
            self._table_reasons.append(f"{_name(seat)} arrived")
        self.observe_chunk_table(hello.table)
        self._placement.arrived(seat, hello.address)
        self._control.send(message.connection, "welcome", seat=seat, run=self._paths.name)
        self.send_chunk_table(message.connection)
        if self._view is not None:
            self._control.publish_view(self._view, [message.connection])

    def _check_admission(self, hello: ServerHello) -> None:
        taken = self._roster.is_other_process(hello.seat, hello.pid)
        if taken or hello.seat not in self.seats or self._roster.is_evicted(hello.seat):
            raise ProtocolError(f"seat {hello.seat} is not a server's, or was taken from it")
        if not self._control.holds_key(_name(hello.seat), hello.key):
            raise ProtocolError(f"it does not have the key of seat {hello.seat}")

    def observe_chunk_table(self, table: ChunkTable | None) -> None:
        """Record the newest table that a worker or server has seen; it may be an earlier driver's."""
        if table is not None:
            self._newest_table_number = max(self._newest_table_number, table.number)
            self._placement.observe_table(table)

    def is_lost(self, table: ChunkTable | None) -> bool:
        """Whether the chunks of this table are lost."""
        return table is not None and table.number <= self._lost_table_number

    def owns_connection(self, connection: int) -> bool:
        return self._roster.seat_of(connection) is not None

    def handle(self, message: ControlMessage) -> None:
        """Handle a server's message. A malformed message closes the connection."""
        seat = self._roster.seat_of(message.connection)
        assert seat is not None, "see owns_connection"
        if message.kind == "lost":
            self._roster.disconnect(seat)
            return
        try:
            received = parse_server_message(message.kind, message.fields)
        except ProtocolError as failure:
            self._control.refuse(message.connection, str(failure), name=_name(seat))
            self._roster.disconnect(seat)
            return
        match received:
            case BeatMessage():
                self._roster[seat].last_heartbeat = received
            case FilledMessage():
                self._placement.filled(seat, received.seat, received.table)
                self._table_reasons.append(f"{_name(received.seat)} is filled")

    def set_chunk_boundaries(self, boundaries: Sequence[int]) -> None:
        """Set the chunk boundaries that a worker computed from the model. They ascend."""
        self._placement.set_boundaries(boundaries)

    def handle_exit(self, one: Exit) -> str:
        """Handle the exit of a server. Returns why the run cannot continue, or ''."""
        seat = one.seat
        why = self._roster.readmit(seat) or one.reason
        self._report_stats([seat])
        self._roster.disconnect(seat)
        self._roster.remove(seat)
        self._launches.dismiss(seat)
        self.seats.discard(seat)
        self._placement.gone(seat)
        if seat in self._released:
            self._stream.emit("server_left", server=_name(seat))
            return ""
        self._stream.emit("server_died", server=_name(seat), reason=why)
        self._died_since_table.add(seat)
        self._table_reasons.append(f"{_name(seat)} is gone")
        return "" if seat in self._served_before else self._failed_to_start(seat, why)

    def scale(self, servers: int, *, why: str = "scaled") -> None:
        self._restarts_left = self._restarts
        self._placement.scale(servers)
        self._table_reasons.append(f"wanted: {plural(servers, 'server')}")
        self._report_wanted(why)

    def drain(self, seat: int) -> None:
        """Let the server leave once other servers hold its chunks."""
        if seat in self._roster:
            self._placement.drain(seat)
            self._table_reasons.append(f"{_name(seat)} leaves")
            self._report_wanted(f"{_name(seat)} is drained")

    # ---- actions ----

    def tick(self, now_s: float, worker_connections: Iterable[int]) -> ChunksLost | None:
        """Evict failed servers, start missing ones, and send the next table to servers and workers.

        Returns ChunksLost if the servers lost parameters: the workers must then restart from a checkpoint.
        """
        if self._liveness.is_due(now_s):
            self._check_liveness(now_s)
        if now_s >= self._next_report_s:
            self._next_report_s = now_s + STATS_INTERVAL_S
            self._report_stats(self._roster)
        self._start_servers(self._placement.missing_servers())
        self._release(self._placement.releasable_seats())
        decided = self._placement.decide()
        if isinstance(decided, ChunksLost):
            self._declare_lost(decided.why)
            return decided
        if decided is not None:
            self._publish(decided, worker_connections)
        return None

    def send_chunk_table(self, connection: int) -> None:
        """Send the newest table to a process that has just connected."""
        if self.chunk_table is not None:
            self._control.publish_chunk_table(self.chunk_table, [connection])

    def publish_view(self, view: View) -> None:
        """Tell the servers which workers take part: they believe nobody else."""
        self._view = view
        self._control.publish_view(view, self.connections)

    def flush_stats(self) -> None:
        """Report the stats that have not been reported yet, at the end of a run."""
        self._report_stats(self._roster)

    def _expect(self, seat: int) -> None:
        self.seats.add(seat)
        self._placement.expect(seat)

    def _start_servers(self, number: int) -> None:
        seats = [Seat(number=self._seat_numbers.take(), role="server") for _ in range(number)]
        for seat in seats:
            self._expect(seat.number)
            self._roster.expect_start(seat.number, until_s=time.monotonic() + START_TIMEOUT_S)
        if seats:
            self._stream.emit("seats_given", seats=[seat.name for seat in seats])
            self._engine.start([self._launches.launch(seat) for seat in seats])

    def _release(self, seats: Iterable[int]) -> None:
        going = [seat for seat in seats if seat in self.seats and seat not in self._released]
        self._released.update(going)
        self._engine.stop(going)

    def _publish(self, table: ChunkTable, worker_connections: Iterable[int]) -> None:
        old, self.chunk_table, self._newest_table_number = self.chunk_table, table, table.number
        self._control.publish_chunk_table(table, [*self.connections, *worker_connections])
        self._stream.emit(
            "chunk_table",
            why=", ".join(dict.fromkeys(self._table_reasons)),
            **_chunk_table_fields(old, table, self._died_since_table),
        )
        self._table_reasons.clear()
        self._died_since_table.clear()
        proven = {seat for chain in table.chains for seat in chain}
        if proven - self._served_before:
            self._served_before |= proven
            self._restarts_left = self._restarts

    def _declare_lost(self, why: str) -> None:
        self._stream.emit("servers_lost", reason=why)
        self._placement.reset()
        self.chunk_table, self._lost_table_number = None, self._newest_table_number

    def _failed_to_start(self, seat: int, why: str) -> str:
        self._restarts_left -= 1
        if self._restarts_left >= 0:
            return ""
        able = self.seats & self._served_before
        failure = f"{_name(seat)} ended by {why} before it could serve; no restarts left"
        if not able:
            return failure
        self.scale(len(able), why=failure)
        return ""

    def _check_liveness(self, now_s: float) -> None:
        """Servers are always checked as idle: they wait for workers and for each other, so only heartbeats matter."""
        staying = [seat for seat in self._roster if seat not in self._released and not self._roster.is_evicted(seat)]
        for failure in self._liveness.find_failures(now_s, idle=staying):
            self._evict(failure.seat, failure.why)

    def _evict(self, seat: int, why: str) -> None:
        self._stream.emit("evicted", server=_name(seat), host=self._roster.host(seat), reason=why)
        self._roster.evict(seat, why)
        self._launches.dismiss(seat)
        self._engine.stop([seat])

    def _report_wanted(self, why: str) -> None:
        self._stream.emit("servers_wanted", number=self.wanted, why=why)

    def _report_stats(self, seats: Iterable[int]) -> None:
        for seat in [seat for seat in seats if seat in self._roster]:
            served = self._roster[seat].last_heartbeat.served
            if served and served != self._reported_stats.get(seat):
                self._reported_stats[seat] = served
                self._stream.emit("server_stats", server=_name(seat), stats=served)


def _name(seat: int) -> str:
    return f"server-{seat}"


def _chunk_table_fields(old: ChunkTable | None, new: ChunkTable, died: set[int]) -> dict[str, Any]:
    """`copies`: the minimum number of copies of a chunk. `failovers`: how many servers died that were primaries."""
    same = old is not None and old.cuts == new.cuts
    return {
        "number": new.number,
        "servers": {_name(seat): asdict(held) for seat, held in placement_stats(new).items()},
        "chunks": len(new.chains),
        "pieces": len(build_pieces(new)),
        "copies": min(len(chain) for chain in new.chains),
        "moved_bytes": moved_bytes(old, new) if old is not None and same else 0,
        "failovers": len(died & {chain[0] for chain in old.chains}) if old is not None else 0,
    }
