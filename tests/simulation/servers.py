"""Parameter servers in virtual time: a real `ServerGroup` and its placement, control clients, and modelled servers.

A modelled server keeps, for each chunk, the numbers of the updates it has applied, in order. Updates pass along the
chain: each server applies what it has not applied yet and forwards it; the last one acknowledges. A server sends all
that it holds to its successor whenever a table gives it one, and reports a filling one as filled once that has
arrived. The client pushes each update to the primaries until it is acknowledged.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from shoal.fleet.control_server import ControlMessage
from shoal.fleet.engine import Launch
from shoal.fleet.roster import SeatNumbers
from shoal.jobs.run_driver import first_free_seat
from shoal.jobs.server_group import ServerGroup
from shoal.paramserver.main import STARTED_BY_ENGINE
from shoal.plan.chunk_placement import ChunksLost
from shoal.spec.chunk_table import ChunkTable
from shoal.spec.job import ServerSyncConfig
from shoal.spec.view import Address
from tests.simulation.agents import Directories
from tests.simulation.history import Fault
from tests.simulation.machine import SIGKILL, EventLog, Machine, SimulatedEngine, SimulatedStream
from tests.simulation.network import Network, SimulatedControlClient, SimulatedControlServer
from tests.simulation.standins import happening
from tests.simulation.worker import PATHS
from tests.simulation.world import START_S, InvariantViolation, Process, World, require

CUTS = [0, 100, 200, 260]
CHUNKS = len(CUTS) - 1
UPDATES = 12
TICK_S, SOON_S, RETRY_S, CALM_S = 0.25, 0.01, 0.3, 400.0


class SimulatedServer(Process):
    """One server's process."""

    def __init__(self, run: ServerRun, number: int, seat: int) -> None:
        super().__init__(run.world, f"server-{seat}")
        self.run, self.seat = run, seat
        self.address = Address(host="simulated", port=number)
        self.exit_code: int | None = None
        self.on_exit: Callable[[], None] = lambda: None
        self.table: ChunkTable | None = None
        self.era = run.losses
        self.applied: list[list[int]] = [[] for _ in range(CHUNKS)]
        self._in_sync: set[tuple[int, int]] = set()
        self.control = SimulatedControlClient(
            run.driver_address, self._hello, heartbeat=lambda: {"phase": "serving"}, on_chunk_table=self._adopt
        )
        self.control.attach(self, run.network)
        self.at(0.1 * self.world.rng.random(), self.control._begin)

    def _hello(self) -> dict[str, Any]:
        return {
            "role": "server",
            "seat": self.seat,
            "attachment": STARTED_BY_ENGINE.model_dump(),
            "pid": self.address.port,
            "host": self.name,
            "address": self.address.model_dump(),
            "table": self.table.model_dump(mode="json") if self.table else None,
        }

    def _adopt(self, table: ChunkTable) -> None:
        if self.era != self.run.losses:  # the run has returned to a checkpoint: what servers held is void
            self.era, self.applied = self.run.losses, [[] for _ in range(CHUNKS)]
        self.table = table
        self._in_sync.clear()
        for chunk in range(CHUNKS):
            if (successor := self._successor(chunk)) is not None:
                held = list(self.applied[chunk])
                self._send(successor, successor.receive_all, table.number, chunk, held, self)

    def _order(self, chunk: int) -> list[int]:
        assert self.table is not None
        return self.table.chains[chunk] + self.table.filling[chunk]

    def _successor(self, chunk: int) -> SimulatedServer | None:
        order = self._order(chunk)
        place = order.index(self.seat) + 1 if self.seat in order else len(order)
        return self.run.server_at(self.table.addresses[order[place]]) if self.table and place < len(order) else None

    def _send(self, target: Process, call: Callable[..., object], *args: Any) -> None:
        self.run.network.send("chain", self, target, call, *args)

    # ---- the chain ----

    def receive_all(self, number: int, chunk: int, held: list[int], sender: SimulatedServer) -> None:
        """A predecessor's whole content. It is newer than what this server has."""
        if self.table is None or self.table.number < number:
            self.at(0.05, self.receive_all, number, chunk, held, sender)
        elif self.table.number == number:
            self.applied[chunk] = held
            self._send(sender, sender.is_in_sync, number, chunk, self.seat)

    def is_in_sync(self, number: int, chunk: int, seat: int) -> None:
        if self.table is None or self.table.number != number:
            return
        self._in_sync.add((chunk, seat))
        successor_chunks = [c for c in range(CHUNKS) if (s := self._successor(c)) is not None and s.seat == seat]
        fills = any(seat in self.table.filling[c] for c in successor_chunks)
        if fills and all((c, seat) in self._in_sync for c in successor_chunks):
            self.control.send("filled", seat=seat, table=number)

    def push(self, client: PushingClient, number: int, chunk: int, update: int) -> None:
        """A client's update, at the primary. It is ignored under another table: the client sends it again."""
        if self.table is not None and self.table.number == number and self.table.chains[chunk][0] == self.seat:
            self.receive(client, number, chunk, update)

    def receive(self, client: PushingClient, number: int, chunk: int, update: int) -> None:
        if self.table is None or self.table.number != number or self.era != client.era:
            return
        if update not in self.applied[chunk]:
            self.applied[chunk].append(update)
        successor = self._successor(chunk)
        if successor is None:
            self._send(client, client.acknowledged, chunk, update)
        elif (chunk, successor.seat) in self._in_sync:
            self._send(successor, successor.receive, client, number, chunk, update)

    def kill(self) -> None:
        if self.alive:
            self.world.log(f"{self.name} ends")
            if self.control._link is not None:
                self.control._link.close_client("killed")
            self.alive, self.exit_code, self.frozen = False, SIGKILL, False
            self.on_exit()


class PushingClient(Process):
    """Pushes one update after the other, each to all chunks, and says where parameters may be cut."""

    def __init__(self, run: ServerRun) -> None:
        super().__init__(run.world, f"client-{run.losses}")
        self.run, self.era = run, run.losses
        self.table: ChunkTable | None = None
        self.acknowledged_updates: list[set[int]] = [set() for _ in range(CHUNKS)]
        self.update = 0
        self.control = SimulatedControlClient(
            run.driver_address, self._hello, heartbeat=dict, on_chunk_table=self._adopt, on_welcome=self._welcome
        )
        self.control.attach(self, run.network)
        self.at(0.0, self.control._begin)
        self.at(RETRY_S, self._push)

    def _hello(self) -> dict[str, Any]:
        return {"role": "client", "table": self.table.model_dump(mode="json") if self.table else None}

    def _welcome(self, fields: dict[str, Any]) -> None:
        self.control.send("cuts", cuts=CUTS)

    def _adopt(self, table: ChunkTable) -> None:
        self.table = table
        self.at(0.0, self._send_update)

    def _push(self) -> None:
        self.at(RETRY_S, self._push)
        self._send_update()

    def _send_update(self) -> None:
        if self.table is None or self.update >= UPDATES:
            return
        for chunk in range(CHUNKS):
            if self.update not in self.acknowledged_updates[chunk]:
                primary = self.run.server_at(self.table.addresses[self.table.chains[chunk][0]])
                self.run.network.send("push", self, primary, primary.push, self, self.table.number, chunk, self.update)

    def acknowledged(self, chunk: int, update: int) -> None:
        self.acknowledged_updates[chunk].add(update)
        if update == self.update and all(update in done for done in self.acknowledged_updates):
            self.update += 1
            self._send_update()


class ServerDriver(Process):
    """A driver that has servers only."""

    def __init__(self, run: ServerRun, number: int) -> None:
        super().__init__(run.world, f"driver-{number}")
        self.run = run
        self._soon = False
        self.engine = SimulatedEngine(run.machine, self.poke)  # type: ignore[arg-type]
        self.control = SimulatedControlServer(run.network, self, self.poke)
        self.clients: set[int] = set()
        left = [seat.number for seat in self.engine.reattach()]
        numbers = SeatNumbers(first_free_seat([*run.log.names, *(f"server-{seat}" for seat in left)]))
        self.group = ServerGroup(
            run.sync, PATHS, self.engine, self.control, SimulatedStream(run.log, "driver"),  # type: ignore[arg-type]
            seat_numbers=numbers, restarts=50,
        )  # fmt: skip
        self.group.start(left)
        self.at(0.0, self._tick)

    def poke(self) -> None:
        if not self._soon and self.alive:
            self._soon = True
            self.at(SOON_S, self._act_soon)

    def _act_soon(self) -> None:
        self._soon = False
        self.act()

    def _tick(self) -> None:
        self.at(TICK_S, self._tick)
        self.act()

    def act(self) -> None:
        for one in self.engine.poll(0):
            require(not self.group.handle_exit(one), "the servers gave up")
        for message in self.control.receive():
            self._handle(message)
        before = self.group.chunk_table
        lost = self.group.tick(self.world.now_s, self.clients)
        if lost is not None:
            self.run.check_loss(lost)
        elif self.group.chunk_table is not before:
            self.run.check_table(self.group.chunk_table)

    def _handle(self, message: ControlMessage) -> None:
        if message.kind == "here" and message.fields["role"] == "server":
            self.group.handle_hello(message)
        elif message.kind == "here":
            told = message.fields.get("table")
            self.clients.add(message.connection)
            self.control.send(message.connection, "welcome", seat=0)
            self.group.observe_chunk_table(None if told is None else ChunkTable.model_validate(told))
            self.group.send_chunk_table(message.connection)
        elif self.group.owns_connection(message.connection):
            self.group.handle(message)
        elif message.kind == "cuts":
            self.group.set_chunk_boundaries(message.fields["cuts"])
        elif message.kind == "lost":
            self.clients.discard(message.connection)

    def crash(self) -> None:
        self.control.close()
        self.alive = False


class ServerRun:
    """Servers, a client, and drivers that come and go."""

    def __init__(self, seed: int, *, servers: int, backups: int) -> None:
        self.world = World(seed)
        self.network = Network(self.world)
        self.log = EventLog(self.world)
        self.directories = Directories()
        self.machine = Machine(self._launch, self.log)  # type: ignore[arg-type]
        self.sync = ServerSyncConfig(kind="server", servers=servers, backups=backups)
        self.servers: list[SimulatedServer] = []
        self.newest: ChunkTable | None = None
        self.losses = self._drivers = 0
        self.driver: ServerDriver | None = None
        self.client: PushingClient

    def begin(self) -> None:
        self.client = PushingClient(self)
        self.new_driver()

    def new_driver(self) -> None:
        if self.driver is None or not self.driver.alive:
            self._drivers += 1
            self.driver = ServerDriver(self, self._drivers)

    def driver_address(self) -> Any:
        return self.driver.control if self.driver is not None else None

    def _launch(self, launch: Launch) -> SimulatedServer:
        self.servers.append(SimulatedServer(self, len(self.servers), launch.seat.number))
        self.log.names.add(launch.seat.name)
        return self.servers[-1]

    def server_at(self, address: Address) -> SimulatedServer:
        return self.servers[address.port]

    def alive_servers(self) -> list[SimulatedServer]:
        return [server for server in self.servers if server.alive]

    # ---- invariants ----

    def check_table(self, table: ChunkTable | None) -> None:
        """A server leads a chunk only if it holds every acknowledged update of it."""
        assert table is not None
        self.world.log("table", f"{table.number} {table.chains} {table.filling}")
        known = max((server.table.number for server in self.alive_servers() if server.table), default=0)
        require(table.number > known, "the number of a table does not grow")
        self.newest = table
        for chunk, chain in enumerate(table.chains):
            primary = self.server_at(table.addresses[chain[0]])
            missing = self.client.acknowledged_updates[chunk] - set(primary.applied[chunk])
            void = primary.era != self.losses
            require(not primary.alive or void or not missing, f"{primary.name} leads chunk {chunk} without {missing}")

    def check_loss(self, lost: ChunksLost) -> None:
        assert self.newest is not None
        self.world.log("lost", lost.why)
        held = [any(self.server_at(self.newest.addresses[s]).alive for s in chain) for chain in self.newest.chains]
        require(not all(held), "chunks were given up that a living server holds")
        self.losses += 1
        self.client.alive = False  # the driver evicts the workers; new ones begin at the checkpoint
        if self.client.control._link is not None:
            self.client.control._link.close_client("killed")
        self.client = PushingClient(self)

    def check_end(self) -> None:
        assert self.newest is not None
        for chunk, chain in enumerate(self.newest.chains):
            for seat in chain:
                server = self.server_at(self.newest.addresses[seat])
                whole = sorted(server.applied[chunk]) == list(range(UPDATES))
                require(not server.alive or whole, f"{server.name} has {server.applied[chunk]} of chunk {chunk}")


def run_server_history(seed: int) -> ServerRun:
    """One history of servers. Raises InvariantViolation."""
    rng = random.Random(seed)
    run = ServerRun(seed, servers=rng.randint(1, 4), backups=rng.randint(0, 2))
    at_s = 0.3 + rng.random()
    with happening(run):  # type: ignore[arg-type]
        try:
            for _ in range(rng.choice((0, 1, 2, 3, 5))):
                fault = Fault(at_s, rng.choice(tuple(SERVER_FAULTS)), rng.random(), rng.random(), 4 * rng.random())
                run.world.at(at_s, _inject, run, fault)
                at_s += rng.expovariate(1.0) * rng.choice((0.05, 0.5, 2.0))
            run.begin()
            done = run.world.run(until_s=START_S + at_s + CALM_S, done=lambda: run.client.update >= UPDATES)
            require(done, "updates are not acknowledged any more")
            run.check_end()
        finally:
            run.world.close()
    return run


def fails_with_servers(seed: int) -> BaseException | None:
    try:
        run_server_history(seed)
    except (Exception, InvariantViolation) as failure:
        return failure
    return None


def _inject(run: ServerRun, fault: Fault) -> None:
    run.world.log(f"FAULT {fault.kind}")
    SERVER_FAULTS[fault.kind](run, fault)


def _kill(run: ServerRun, fault: Fault) -> None:
    if alive := run.alive_servers():
        alive[int(fault.which * len(alive))].kill()


def _freeze(run: ServerRun, fault: Fault) -> None:
    if alive := run.alive_servers():
        server = alive[int(fault.which * len(alive))]
        server.freeze()
        run.world.at(fault.duration_s, server.thaw)


def _cut(run: ServerRun, fault: Fault) -> None:
    others: list[Process] = [run.client, *run.alive_servers()]
    one = others.pop(int(fault.which * len(others)))
    if others:
        other = others[int(fault.other * len(others))]
        ways = [(one, other)] if fault.duration_s < 2.0 else [(one, other), (other, one)]
        run.network.cut.update(ways)
        run.world.at(fault.duration_s, run.network.heal, ways)


def _scale(run: ServerRun, fault: Fault) -> None:
    if run.driver is not None and run.driver.alive:
        run.driver.group.scale(1 + int(4 * fault.which))


def _drain(run: ServerRun, fault: Fault) -> None:
    if run.driver is not None and run.driver.alive and (seats := run.driver.group.connected_seats):
        run.driver.group.drain(seats[int(fault.which * len(seats))])


def _crash_driver(run: ServerRun, fault: Fault) -> None:
    if run.driver is not None and run.driver.alive:
        run.driver.crash()
        run.world.at(fault.duration_s, run.new_driver)


def _break_connection(run: ServerRun, fault: Fault) -> None:
    if run.driver is not None and run.driver.alive:
        run.driver.control.break_link(lambda links: links[int(fault.which * len(links))])


SERVER_FAULTS: dict[str, Callable[[ServerRun, Fault], None]] = {
    one.__name__.lstrip("_"): one for one in (_kill, _freeze, _cut, _scale, _drain, _crash_driver, _break_connection)
}
