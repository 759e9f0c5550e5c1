"""What is hard to meet with real processes: orders of events that depend on who is slow."""

import contextlib
import itertools
import json
import os
import socket
import threading

import pytest
import torch

from shoal.checkpoint import state_format
from shoal.collectives.transport.endpoint import connect_to_peer
from shoal.collectives.transport.greeting import Caller, Greeting
from shoal.net.errors import LinkError
from shoal.net.handshake import receive_exactly
from shoal.paramserver import protocol
from shoal.paramserver.chunk_state import chunk_state_from_replica, group_hyperparameters, param_group_indices
from shoal.paramserver.event_loop import ServerLoop
from shoal.paramserver.protocol import HEADER_BYTES, ServerFrame, unpack
from shoal.paramserver.server import ParameterServer, ServerConfig
from shoal.spec.chunk_table import ChunkTable
from shoal.spec.view import Address
from tests.paramserver.workloads import CounterWorkload

WORKLOAD = CounterWorkload(keys=100)


class FakeConnection:
    """A connection whose other end is the test."""

    same_host, paused = False, False

    def __init__(self, peer):
        self.peer, self.payload, self.sent = peer, bytearray(), []

    def allocate_payload(self, size):
        self.payload = bytearray(size)
        return [memoryview(self.payload)]

    def send(self, frame, *payload, fd=-1):
        self.sent.append((frame, b"".join(bytes(part) for part in payload)))

    def kinds(self):
        return [frame.kind for frame, _ in self.sent]

    unsent_buffers = 0


class ServerHarness:
    """A server with one worker before it and a successor behind it."""

    def __init__(self, **config):
        self.replica = WORKLOAD.replica()
        self.cuts = self.replica.layout.chunk_offsets
        self.server = ParameterServer(
            100,
            ServerConfig(WORKLOAD.lanes, **config),
            connect_to=lambda *_: None,
            on_filled=lambda *_: None,
            run_in_thread=lambda *_: None,
        )
        address = Address(host="x", port=1)
        chains = [[100, 101] for _ in self.cuts[1:]]
        table = ChunkTable(
            number=1,
            cuts=self.cuts,
            chains=chains,
            filling=[[] for _ in chains],
            addresses={100: address, 101: address},
        )
        self.server.set_chunk_table(table)
        self.worker, self.successor = FakeConnection(0), FakeConnection(101)
        self.server.add_client(self.worker)

    def deliver(self, connection, frame, content=b""):
        frame = frame._replace(size=len(content))
        places = self.server.buffer_for(connection, frame)
        assert places not in ("skip", "hold"), places
        for place in places:
            place[:], content = content[: len(place)], content[len(place) :]
        self.server.handle_frame(connection, frame)

    def enter(self, view, **more):
        hyper = [
            {k: v for k, v in group.items() if k != "initial_lr"}
            for group in group_hyperparameters(self.replica.optimizer)
        ]
        model = {
            "layout": self.replica.layout.describe(),
            "optimizer": "SGD",
            "groups": param_group_indices(self.replica),
        }
        words = {"carries": {"0": [0, 1, 2, 3]}, "model": {**model, "hyper": hyper}, **more}
        self.deliver(self.worker, ServerFrame(protocol.ENTER, 1, view=view), json.dumps(words).encode())
        self.hyper = json.dumps({"groups": hyper, "clip_value": None}).encode()

    def connect(self):
        assert self.server.replication.add_successor(101, self.successor, 1)
        empty = torch.zeros(2, len(self.cuts) - 1, dtype=torch.int64).numpy().tobytes()
        self.deliver(self.successor, ServerFrame(protocol.STAMPS, 1, seat=101), empty)

    def acknowledge(self):
        """All that the successor has been sent."""
        for frame, _ in [it for it in self.successor.sent if it[0].kind in (protocol.SET, protocol.RECORD)]:
            self.deliver(self.successor, ServerFrame(protocol.ACK, 1, frame.piece, number=frame.number))


def initialised(successor=None, **config):
    """Everything is set, and the worker is in."""
    harness = ServerHarness(**config)
    harness.successor = successor or harness.successor
    if config.get("waits_for_views"):
        harness.server.set_view(1, {0: [0, 1, 2, 3]})
    harness.enter(1, lead=True)
    harness.connect()
    for piece_state in harness.server.piece_states.values():
        state = chunk_state_from_replica(
            harness.replica,
            harness.replica.layout,
            piece_state.piece.first_chunk,
            piece_state.piece.end_chunk,
            lanes=WORKLOAD.lanes,
        )
        harness.deliver(
            harness.worker, ServerFrame(protocol.SET, 1, piece_state.piece.index, 1), state_format.pack_state(state)
        )
    harness.deliver(harness.worker, ServerFrame(protocol.READY, 1, view=1))
    assert protocol.ENTERED not in harness.worker.kinds()
    harness.acknowledge()
    assert harness.worker.kinds().count(protocol.ENTERED) == 1
    harness.deliver(harness.worker, ServerFrame(protocol.HYPER, 1), harness.hyper)
    return harness


def test_only_the_driver_makes_a_view():
    """Whoever has the token could else keep all workers out: their views would have passed."""
    harness = initialised(staleness=0.0, waits_for_views=True)
    with pytest.raises(AssertionError, match="hold"):
        harness.enter(1000, ready=True)
    harness.server.set_view(2, {0: [0, 1], 1: [2, 3]})
    with pytest.raises(LinkError, match="does not exist"):
        harness.enter(2, ready=True)
    harness.enter(1)
    assert harness.worker.kinds()[-1] == protocol.REFUSED
    assert harness.server.view == 1
    harness.server.set_view(3, {0: [3, 2, 1, 0]})
    harness.enter(3, ready=True)
    assert (harness.server.view, harness.worker.kinds()[-1]) == (3, protocol.ENTERED)


def push(harness, piece=0, step=0):
    piece_state = harness.server.piece_states[piece]
    size = piece_state.piece.stop - piece_state.piece.start
    harness.deliver(harness.worker, ServerFrame(protocol.PUSH, 1, piece, 1, 0, step), bytes(size))


def test_who_enters_is_let_in_when_all_that_was_pushed_has_reached_the_end_of_the_chain():
    """It would write over what is still being sent: where lanes push for themselves, records lie in its memory."""
    harness = initialised(staleness=float("inf"))
    push(harness)
    assert protocol.RECORD in harness.successor.kinds()
    harness.worker.sent.clear()
    harness.enter(2, ready=False, lead=True)
    harness.deliver(harness.worker, ServerFrame(protocol.READY, 1, view=2))
    assert harness.worker.kinds() == [protocol.STATUS]
    harness.acknowledge()
    (answer,) = [content for frame, content in harness.worker.sent if frame.kind == protocol.ENTERED]
    assert "clocks" in json.loads(answer)


def test_who_comes_again_in_the_same_view_is_let_in_at_once():
    """It waits for an answer to what it has pushed, and may find it in the memory that it is shown."""
    harness = initialised(staleness=float("inf"))
    push(harness)
    harness.worker.sent.clear()
    harness.enter(1, ready=True)
    assert harness.worker.kinds() == [protocol.ENTERED]


def test_an_answer_waits_for_the_chain_and_comes_once():
    harness = initialised(staleness=float("inf"))
    harness.worker.sent.clear()
    push(harness)
    push(harness)  # again, for it heard nothing
    assert not harness.worker.sent
    harness.acknowledge()
    assert harness.worker.kinds() == [protocol.VALUES]
    assert harness.server.updates.stats.repeats == 1


def test_an_acknowledgement_of_what_was_not_sent_is_refused():
    harness = initialised(staleness=float("inf"))
    with pytest.raises(LinkError, match="acknowledges"):
        harness.deliver(harness.successor, ServerFrame(protocol.ACK, 1, 0, number=1000))


def test_a_successor_with_old_content_gets_nothing_from_one_that_holds_nothing():
    """After the run went back to a checkpoint: some servers still hold something, and all are about to be set."""
    harness = ServerHarness(staleness=0.0)
    harness.enter(1, lead=True)
    harness.server.replication.add_successor(101, harness.successor, 1)
    theirs = torch.full((2, len(harness.cuts) - 1), 7, dtype=torch.int64).numpy().tobytes()
    harness.deliver(harness.successor, ServerFrame(protocol.STAMPS, 1, seat=101), theirs)
    sets = [content for frame, content in harness.successor.sent if frame.kind == protocol.SET]
    assert sets == [b""] * len(harness.server.piece_states)
    assert harness.worker.kinds() == [protocol.STATUS]
    state = chunk_state_from_replica(harness.replica, harness.replica.layout, 0, 1, lanes=WORKLOAD.lanes)
    harness.deliver(harness.worker, ServerFrame(protocol.SET, 1, 0, 1), state_format.pack_state(state))
    assert harness.successor.sent[-1][1]


def test_a_late_caller_of_an_old_view_is_told_that_it_has_passed():
    harness = initialised(staleness=0.0)
    harness.enter(3, lead=True)
    harness.worker.sent.clear()
    harness.enter(2)
    ((frame, _),) = harness.worker.sent
    assert (frame.kind, frame.view) == (protocol.REFUSED, 3)


def test_a_view_that_nobody_entered_has_passed_too():
    """After a take-over the driver tells two views at once. A worker that enters the first of them must hear of the
    second, else it takes the refusal for a final one and the run ends."""
    harness = initialised(staleness=0.0, waits_for_views=True)
    harness.server.set_view(3, {0: [0, 1, 2, 3]})
    harness.worker.sent.clear()
    harness.enter(2)
    ((frame, _),) = harness.worker.sent
    assert (frame.kind, frame.view, harness.server.view) == (protocol.REFUSED, 3, 1)


def test_a_second_connection_of_a_seat_replaces_the_first():
    """What still comes over the first must not be answered instead of what is asked over the second."""
    host = ServerLoop(100, "token", ServerConfig(1, 0.0), bind="127.0.0.1")
    thread = threading.Thread(target=host.run)
    thread.start()
    with contextlib.ExitStack() as stack:
        stack.callback(thread.join)
        stack.callback(host.stop)

        caller = Caller()

        def call():
            greeting = Greeting(purpose="push", seat=0, view=1)
            return stack.enter_context(connect_to_peer(host.endpoint.address, "token", greeting, caller=caller))

        first, second = call(), call()  # the server's threads may end these handshakes in any order
        first.settimeout(60)
        second.settimeout(60)
        assert first.recv(1) == b""
        chains = [[100]]
        host.set_chunk_table(
            ChunkTable(number=1, cuts=[0, 1], chains=chains, filling=[[]], addresses={100: host.endpoint.address})
        )
        assert unpack(receive_exactly(second, HEADER_BYTES), protocol.SERVER_KINDS).kind == protocol.STALE


@pytest.mark.parametrize("purpose", ["push", "chain"])
def test_a_late_first_connection_does_not_replace_the_second(purpose):
    """As when the thread with the first handshake is the slower one."""
    host = ServerLoop(100, "token", ServerConfig(1, 0.0), bind="127.0.0.1")
    caller = Caller()
    first, second = (
        Greeting(purpose=purpose, seat=0, view=1, caller=caller.name, connection=caller.next_connection())
        for _ in range(2)
    )
    pairs = [socket.socketpair() for _ in range(3)]
    with contextlib.ExitStack() as stack:
        for one in itertools.chain(*pairs):
            stack.enter_context(one)
        stack.callback(host.endpoint.close)
        host._admit(pairs[0][0], second)
        host._admit(pairs[1][0], first)
        assert pairs[1][1].recv(1) == b""
        assert [one.greeting for one in host._connections.values()] == [second]
        assert host.stats()["refused"] == 1
        host._admit(pairs[2][0], first.model_copy(update={"caller": "another process"}))
        assert pairs[0][1].recv(1) == b""
        assert len(host._connections) == 1


@pytest.mark.parametrize("purpose", ["mesh", "state", "follow", "memory", "pace"])
def test_a_greeting_with_a_purpose_of_workers_is_refused(purpose):
    host = ServerLoop(100, "token", ServerConfig(1, 0.0), bind="127.0.0.1")
    thread = threading.Thread(target=host.run)
    thread.start()
    asked = {"step": 1, "lanes": [0]} if purpose == "memory" else {}
    try:
        greeting = Greeting(purpose=purpose, seat=0, view=1, **asked)
        with connect_to_peer(host.endpoint.address, "token", greeting) as sock:
            assert sock.recv(1) == b""
        assert host.stats()["refused"] == 1
        client = Greeting(purpose="push", seat=0, view=1)
        with connect_to_peer(host.endpoint.address, "token", client) as sock:
            sock.sendall(ServerFrame(protocol.PULL, 0).pack())
            assert sock.recv(1) == b""  # it refers to a piece that the server does not hold
        assert thread.is_alive()
    finally:
        host.stop()
        thread.join()


class SameHostConnection(FakeConnection):
    """On the same host: `given` is the descriptor that comes with what is heard."""

    same_host, given = True, -1

    def send(self, frame, *payload, fd=-1):
        super().send(frame, *payload)
        self.given = fd if fd >= 0 else self.given

    def take_fd(self):
        return os.dup(self.given)


@pytest.mark.parametrize("moment", ["never", "before", "meanwhile"])
def test_sums_that_are_those_of_another_step_by_now(moment):
    """A successor reads them from this server's memory, unless it was too slow and is not waited for any more."""
    harness = initialised(SameHostConnection(101), staleness=0)
    piece_state = harness.server.piece_states[0]
    content = (
        torch.arange((piece_state.piece.stop - piece_state.piece.start) // 4, dtype=torch.float32).numpy().tobytes()
    )
    harness.deliver(harness.worker, ServerFrame(protocol.PUSH, 1, 0, 1, 0, 0, number=1), content)

    other = ServerHarness(staleness=0)
    other.server.seat = 101
    other.server.chunk_table = None
    other.server.set_chunk_table(harness.server.chunk_table)
    connection = SameHostConnection(100)
    connection.given = harness.successor.given
    other.server.replication.add_predecessor(connection)
    *before, (record, nothing) = [
        it for it in harness.successor.sent if it[0].piece == 0 or it[0].kind == protocol.JOIN
    ]
    assert (record.kind, nothing) == (protocol.RECORD, b"")
    for frame, words in before:
        other.deliver(connection, frame, words)
    chunk, mine, theirs = piece_state.piece.first_chunk, other.server.chunk_store, harness.server.chunk_store
    if moment == "never":
        other.deliver(connection, record)
        assert state_format.pack_state(mine.read_state(chunk, chunk + 1)) == state_format.pack_state(
            theirs.read_state(chunk, chunk + 1)
        )
        return
    if moment == "before":
        harness.server.shared_sums.begin_write(piece_state)
    apply_record = other.server.updates.apply_record
    other.server.updates.apply_record = lambda *it: (
        apply_record(*it),
        harness.server.shared_sums.begin_write(piece_state),
    )
    with pytest.raises(LinkError, match="overwrote its sums"):
        other.deliver(connection, record)
    assert int(mine.seq[chunk]) == (int(theirs.seq[chunk]) - 1 if moment == "before" else 0)
    assert bool(mine.term[chunk]) == (moment == "before"), "what was made of the wrong sums is held"
