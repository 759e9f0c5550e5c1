"""The control channel without sockets: the driver's end, and a real `ControlClient` without its thread.

Messages of one connection keep their order, as TCP guarantees. Everything else is up to chance: how long a message
takes, whether it comes twice, whether a connection breaks with messages under way. While a way is cut, what is sent on
it waits; it is lost if the connection ends first.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

from shoal.fleet import connection_thread, control_client
from shoal.fleet.control_client import ControlClient
from shoal.fleet.control_server import ControlMessage
from shoal.fleet.liveness_clock import LivenessClock
from shoal.fleet.messages import parse_hello
from shoal.net.errors import LinkError, ProtocolError
from shoal.net.messages import JsonMessage, decode_message, encode_message
from shoal.spec.chunk_table import ChunkTable
from shoal.spec.view import View
from tests.simulation.world import InvariantViolation, Process, World, require

CONNECT_TIMEOUT_S = 2.0


def _require_valid(hello: dict[str, Any]) -> None:
    """The driver refuses a malformed greeting as it refuses a worker that it has evicted; here nobody is malformed."""
    try:
        parse_hello(hello)
    except ProtocolError as failure:
        raise InvariantViolation(f"the greeting of a {hello['role']} does not fit the schema: {failure}") from failure


class Network:
    """Which ways are cut, and how long the present messages take."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.cut: set[tuple[Process, Process]] = set()
        self.duplicates = 0.0
        self.has_duplicated = False
        self.connections = 0
        self._last: dict[tuple[object, Process, Process], float] = {}
        self._waiting: list[tuple[object, Process, Process, Callable[..., object], tuple[Any, ...]]] = []

    def send(self, link: object, source: Process, target: Process, call: Callable[..., object], *args: Any) -> None:
        """Call it in the target once the message has arrived. Messages of one `link` keep their order."""
        if (source, target) in self.cut:
            self._waiting.append((link, source, target, call, args))
            return
        key = (link, source, target)
        arrives = max(self._last.get(key, 0.0), self.world.now_s + self.world.latency_s())
        self._last[key] = arrives
        target.at(arrives - self.world.now_s, call, *args)

    def doubles(self) -> bool:
        """Whether the next message comes twice."""
        twice = self.duplicates > 0 and self.world.rng.random() < self.duplicates
        self.has_duplicated = self.has_duplicated or twice
        return twice

    def delay(self, link: object, source: Process, target: Process, delay_s: float) -> None:
        """What is sent on this link from now on arrives after the delay at the earliest."""
        self._last[link, source, target] = self.world.now_s + delay_s

    def heal(self, ways: Iterable[tuple[Process, Process]]) -> None:
        self.cut -= set(ways)
        waiting, self._waiting = self._waiting, []
        for link, source, target, call, args in waiting:
            self.send(link, source, target, call, *args)

    def is_cut(self, one: Process, other: Process) -> bool:
        return (one, other) in self.cut or (other, one) in self.cut


class Link:
    """One connection between a client and a driver's control server."""

    def __init__(self, number: int, client: SimulatedControlClient, server: SimulatedControlServer) -> None:
        self.number, self.client, self.server = number, client, server
        self.inbox: deque[JsonMessage] = deque()
        self.client_lost = self.server_lost = ""
        self.newest = b""
        """The last message that the client has sent."""

    # ---- what ControlClient uses of a MessageConnection, and Outbox of a socket ----

    def read(self) -> Iterable[JsonMessage]:
        while self.inbox:
            yield self.inbox.popleft()
        if self.client_lost:
            raise LinkError(self.client_lost)

    def send(self, message: memoryview) -> int:
        network, raw = self.server.network, bytes(message)
        self.newest = raw
        twice = network.doubles()
        for _ in range(2 if twice else 1):
            network.send(self, self.client.process, self.server.process, self.server.deliver, self, raw)
        return len(message)

    # ---- ends ----

    def to_client(self, message: JsonMessage) -> None:
        if not self.client_lost:
            self.inbox.append(message)
            self.client.turn(self)

    def close_client(self, why: str) -> None:
        """The client leaves; the server learns of it."""
        if not self.client_lost:
            self.client_lost = why
            self.server.network.send(self, self.client.process, self.server.process, self.server.lose, self, why)

    def close_server(self, why: str) -> None:
        """The driver leaves; the client learns of it."""
        if not self.server_lost:
            self.server_lost = why
            self.server.network.send(self, self.server.process, self.client.process, self.break_client, why)

    def break_client(self, why: str) -> None:
        self.client_lost = self.client_lost or why
        self.client.turn(self)


class SimulatedControlServer:
    """See ControlServer."""

    host, port, address, refused = "simulated", 1, "simulated:1", 0

    def __init__(
        self,
        network: Network,
        process: Process,
        on_message: Callable[[], None],
        *,
        may_refuse: Callable[[str], bool] = lambda why: False,
    ) -> None:
        self.network, self.process = network, process
        self._may_refuse = may_refuse
        self._on_message = on_message
        self._links: dict[int, Link] = {}
        self._heard_s: dict[int, float] = {}
        self._inbox: deque[ControlMessage] = deque()
        self._open: set[int] = set()
        self._clock = LivenessClock(2 * connection_thread.PING_INTERVAL_S)
        self._closed = False
        process.at(0.0, self._ping)

    def _ping(self) -> None:
        self._clock.tick()
        for link in self._links.values():
            if (self.process, link.client.process) not in self.network.cut:
                link.inbox.append(JsonMessage("ping", {}, 0))  # read at the client's next turn
        if not self._closed:
            self.process.at(connection_thread.PING_INTERVAL_S, self._ping)

    @property
    def is_listening(self) -> bool:
        return self.process.alive and not self._closed

    def accept(self, link: Link, hello: bytes) -> None:
        if self._closed:
            link.close_server("the driver is gone")
            return
        self._clock.tick()
        self._links[link.number] = link
        self._heard_s[link.number] = self._clock.now_s
        fields = json.loads(hello)
        if fields["role"] != "client":  # a client of `shoal.server` has a greeting of its own
            _require_valid(fields)
        self._put(ControlMessage(link.number, "here", fields))

    def deliver(self, link: Link, raw: bytes) -> None:
        if link.number in self._links:
            self._clock.tick()
            self._heard_s[link.number] = self._clock.now_s
            message = decode_message(raw)
            self._put(ControlMessage(link.number, message.kind, message.fields))

    def lose(self, link: Link, why: str) -> None:
        if self._links.pop(link.number, None) is not None:
            self._put(ControlMessage(link.number, "lost", {"why": why}))

    def _put(self, message: ControlMessage) -> None:
        self._inbox.append(message)
        self._on_message()

    # ---- see ControlServer ----

    def fileno(self) -> int:
        return -1

    def receive(self) -> list[ControlMessage]:
        self._clock.tick()
        found = []
        while self._inbox:
            message = self._inbox.popleft()
            if message.kind == "here":
                self._open.add(message.connection)
            if message.connection in self._open:
                found.append(message)
            if message.kind == "lost":
                self._open.discard(message.connection)
        return found

    def send(self, connection: int, /, kind: str, **fields: Any) -> None:
        self._send([connection], JsonMessage(kind, fields, 0))

    def publish_view(self, view: View, connections: Iterable[int]) -> None:
        self._send(connections, JsonMessage("view", {"view": view.model_dump(mode="json")}, 0))

    def publish_chunk_table(self, table: ChunkTable, connections: Iterable[int]) -> None:
        self._send(connections, JsonMessage("table", {"table": table.model_dump(mode="json")}, 0))

    def _send(self, connections: Iterable[int], message: JsonMessage) -> None:
        message = decode_message(encode_message(message.kind, message.fields))
        for number in connections:
            link = self._links.get(number)
            if link is not None:
                for _ in range(2 if self.network.doubles() else 1):
                    self.network.send(link, self.process, link.client.process, link.to_client, message)

    def silence_s(self, connection: int) -> float:
        if connection not in self._links:
            return float("inf")
        return self._clock.now_s - self._heard_s[connection]

    def key(self, name: str) -> str:
        return ""

    def holds_key(self, name: str, key: str) -> bool:
        """The network of a simulation has no strangers."""
        return True

    def refuse(self, connection: int, why: str, *, name: str = "") -> None:
        """A process that was evicted may call again. Nobody says what it may not say."""
        expected = name in ("a worker", "a server") or self._may_refuse(why)
        require(expected, f"the driver refuses {name}: {why}")
        self.drop(connection)

    def take_refusals(self) -> list[Any]:
        return []

    def drop(self, connection: int) -> None:
        self._open.discard(connection)
        link = self._links.pop(connection, None)
        if link is not None:
            link.close_server("the driver closed the connection")

    def close(self) -> None:
        """The driver ends, in peace or not."""
        self._closed = True
        for number in list(self._links):
            self.drop(number)

    def break_link(self, choose: Callable[[list[Link]], Link]) -> None:
        """A connection breaks. What is under way is lost."""
        if self._links:
            link = choose(list(self._links.values()))
            link.client_lost = link.server_lost = "reset"
            self.lose(link, "reset")
            link.client.process.at(0.0, link.client.turn, link)

    def leave_half_open(self, choose: Callable[[list[Link]], Link], duration_s: float) -> None:
        """The client of a connection gives it up and reconnects. What is under way on it, and its end, come late."""
        links = [link for link in self._links.values() if not link.client_lost]
        if links:
            link = choose(links)
            self.network.delay(link, link.client.process, self.process, duration_s)
            link.client.process.at(0.0, link.client.reconnect, link)


class FiberCondition:
    """See threading.Condition. Only the process's training fiber waits."""

    def __init__(self, process: Process) -> None:
        self._process = process

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...

    def wait_for(self, ready: Callable[[], object], timeout: float | None = None) -> object:
        fiber = self._process.world.current
        assert fiber is not None
        assert fiber.process is self._process
        fiber.block(ready, timeout)
        return ready()

    def notify_all(self) -> None:
        self._process.wake()


class SimulatedControlClient(ControlClient):
    """A real control client. Its thread's loop is cut into turns: connect, read and write, lose the connection."""

    process: Process
    network: Network

    def attach(self, process: Process, network: Network) -> None:
        """Before `connect`."""
        self.process, self.network = process, network
        self._changed = FiberCondition(process)  # type: ignore[assignment]
        self._thread = SimpleNamespace(  # type: ignore[assignment]
            ident=None, start=self._begin, is_alive=lambda: False, join=lambda timeout: None
        )
        self._link: Link | None = None
        self.connections = 0
        self._pause_s = control_client.MIN_BACKOFF_S
        self._beat_at_s = 0.0

    def _begin(self) -> None:
        self._thread.ident = 1  # type: ignore[misc]
        self._attempt()

    def _attempt(self) -> None:
        if self._closing.is_set():
            return
        server = self._find_driver()  # the server itself stands for its address
        if server is None:
            self._lost("nobody has left a contact yet")
            return
        assert isinstance(server, SimulatedControlServer)
        if not server.is_listening:
            self._lost("refused")
            return
        if self.network.is_cut(self.process, server.process) or server.process.frozen:
            self.process.at(CONNECT_TIMEOUT_S, self._lost, "timed out")  # without the handshake nobody is heard
            return
        self.connections += 1
        self.network.connections += 1
        self._link = link = Link(self.network.connections, self, server)
        self._clock.tick()
        self._last_heard_s = self._clock.now_s
        hello = json.dumps(self._hello(), default=str).encode()
        self.network.send(link, self.process, server.process, server.accept, link, hello)
        self.process.at(control_client.HEARTBEAT_INTERVAL_S, self._tick, link)

    def _tick(self, link: Link) -> None:
        if link is self._link:
            self.process.at(control_client.HEARTBEAT_INTERVAL_S, self._tick, link)
            self.turn(link)

    def turn(self, link: Link) -> None:
        """What the thread does after each select."""
        if link is not self._link:
            return
        try:
            self._read_messages(link)  # type: ignore[arg-type]
            if self._welcome is not None:
                self._send_heartbeat()
                self._outbox.flush_to(link)  # type: ignore[arg-type]
        except LinkError as failure:
            self._lost(str(failure))

    def _send_heartbeat(self) -> None:
        now = self.process.world.now_s
        if now >= self._beat_at_s:
            self._beat_at_s = now + control_client.HEARTBEAT_INTERVAL_S - 1e-6
            beat = self._run_callback(lambda: control_client.encode_message("beat", self._heartbeat()))
            self._enqueue(beat or control_client._EMPTY_HEARTBEAT)

    def _lost(self, why: str) -> None:
        link, self._link = self._link, None
        if link is not None:
            link.close_client(why)
        self._last_error = why
        known = self._welcome is not None
        self._pause_s = control_client.MIN_BACKOFF_S if known else min(2 * self._pause_s, control_client.MAX_BACKOFF_S)
        self._welcome = None
        self._clock.tick()
        self.process.at(self._pause_s, self._attempt)

    def reconnect(self, link: Link) -> None:
        """Give up this connection. The last message is not certain to have arrived, so it is sent again."""
        if link is self._link:
            if link.newest:
                self._outbox.put(link.newest)
            self._lost("reset")

    def send(self, kind: str, **fields: Any) -> None:
        super().send(kind, **fields)
        self.flush()

    def wait(self, seat: int, **fields: Any) -> View | None:
        if self._welcome is not None and self._link is not None:
            self.process.at(0.0, self.turn, self._link)  # the wakeup of the thread
        return super().wait(seat, **fields)

    def flush(self) -> None:
        if self._link is not None and self._welcome is not None and not self._link.client_lost:
            self._outbox.flush_to(self._link)  # type: ignore[arg-type]

    def close(self) -> None:
        self._closing.set()
        self.flush()
        if self._link is not None:
            self._link.close_client("bye")
            self._link = None
