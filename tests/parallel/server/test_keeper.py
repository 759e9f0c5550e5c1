"""What is hard to meet with real processes: orders of events that depend on who is slow."""

import contextlib
import json
import os
import threading

import pytest
import torch

from shoal.checkpoint import live
from shoal.parallel.links.endpoint import reach
from shoal.parallel.server import frames
from shoal.parallel.server.chunks import groups_of, hyper_of, scatter
from shoal.parallel.server.frames import FRAME_BYTES, Frame, heard, unpack
from shoal.parallel.server.host import Host
from shoal.parallel.server.keeper import Keeper, Terms
from shoal.spec.table import Table
from shoal.spec.view import Address
from shoal.wire.handshake import LinkError, receive
from tests.parallel.server.cargo import Tally

CARGO = Tally(keys=100)


class Pen:
    """A line whose other end is the test."""

    same_host, held = False, False

    def __init__(self, peer):
        self.peer, self.said, self.sent = peer, bytearray(), []

    def room(self, size):
        self.said = bytearray(size)
        return [memoryview(self.said)]

    def send(self, frame, *payload, fd=-1):
        self.sent.append((frame, b"".join(bytes(part) for part in payload)))

    def kinds(self):
        return [frame.kind for frame, _ in self.sent]

    unsent = 0


class Desk:
    """A keeper with one worker before it and a successor behind it."""

    def __init__(self, **terms):
        self.replica = CARGO.replica()
        self.cuts = self.replica.layout.cuts
        self.keeper = Keeper(
            100, Terms(CARGO.lanes, **terms), call=lambda *_: None, filled=lambda *_: None, apart=lambda *_: None
        )
        address = Address(host="x", port=1)
        chains = [[100, 101] for _ in self.cuts[1:]]
        table = Table(
            number=1,
            cuts=self.cuts,
            chains=chains,
            filling=[[] for _ in chains],
            addresses={100: address, 101: address},
        )
        self.keeper.learn(table)
        self.worker, self.successor = Pen(0), Pen(101)
        self.keeper.welcome(self.worker)

    def hear(self, pen, frame, content=b""):
        frame = frame._replace(size=len(content))
        places = self.keeper.place(pen, frame)
        assert places not in ("skip", "hold")
        for place in places:
            place[:], content = content[: len(place)], content[len(place) :]
        self.keeper.got(pen, frame)

    def enter(self, view, **more):
        hyper = [{k: v for k, v in group.items() if k != "initial_lr"} for group in hyper_of(self.replica.optimizer)]
        model = {"layout": self.replica.layout.describe(), "optimizer": "SGD", "groups": groups_of(self.replica)}
        words = {"carries": {"0": [0, 1, 2, 3]}, "model": {**model, "hyper": hyper}, **more}
        self.hear(self.worker, Frame(frames.ENTER, 1, view=view), json.dumps(words).encode())
        self.hyper = json.dumps({"groups": hyper, "clip_value": None}).encode()

    def connect(self):
        assert self.keeper.chain.connected(101, self.successor, 1)
        empty = torch.zeros(2, len(self.cuts) - 1, dtype=torch.int64).numpy().tobytes()
        self.hear(self.successor, Frame(frames.STAMPS, 1, seat=101), empty)

    def acknowledge(self):
        """All that the successor has been sent."""
        for frame, _ in [it for it in self.successor.sent if it[0].kind in (frames.SET, frames.RECORD)]:
            self.hear(self.successor, Frame(frames.ACK, 1, frame.piece, number=frame.number))


def begun(successor=None, **terms):
    """Everything is set, and the worker is in."""
    desk = Desk(**terms)
    desk.successor = successor or desk.successor
    desk.enter(1, lead=True)
    desk.connect()
    for post in desk.keeper.posts.values():
        state = scatter(desk.replica, desk.replica.layout, post.piece.first, post.piece.last, lanes=CARGO.lanes)
        desk.hear(desk.worker, Frame(frames.SET, 1, post.piece.index, 1), live.pack(state))
    desk.hear(desk.worker, Frame(frames.READY, 1, view=1))
    assert frames.ENTERED not in desk.worker.kinds()
    desk.acknowledge()
    assert desk.worker.kinds().count(frames.ENTERED) == 1
    desk.hear(desk.worker, Frame(frames.HYPER, 1), desk.hyper)
    return desk


def push(desk, piece=0, step=0):
    post = desk.keeper.posts[piece]
    size = post.piece.stop - post.piece.start
    desk.hear(desk.worker, Frame(frames.PUSH, 1, piece, 1, 0, step), bytes(size))


def test_who_enters_is_let_in_when_all_that_was_pushed_has_reached_the_end_of_the_chain():
    """It would write over what is still being sent: where lanes push for themselves, records lie in its memory."""
    desk = begun(staleness=float("inf"))
    push(desk)
    assert frames.RECORD in desk.successor.kinds()
    desk.worker.sent.clear()
    desk.enter(2, ready=False, lead=True)
    desk.hear(desk.worker, Frame(frames.READY, 1, view=2))
    assert desk.worker.kinds() == [frames.STATUS]
    desk.acknowledge()
    (answer,) = [content for frame, content in desk.worker.sent if frame.kind == frames.ENTERED]
    assert "clocks" in heard(answer)


def test_who_comes_again_in_the_same_view_is_let_in_at_once():
    """It waits for an answer to what it has pushed, and may find it in the memory that it is shown."""
    desk = begun(staleness=float("inf"))
    push(desk)
    desk.worker.sent.clear()
    desk.enter(1, ready=True)
    assert desk.worker.kinds() == [frames.ENTERED]


def test_an_answer_waits_for_the_chain_and_comes_once():
    desk = begun(staleness=float("inf"))
    desk.worker.sent.clear()
    push(desk)
    push(desk)  # again, for it heard nothing
    assert not desk.worker.sent
    desk.acknowledge()
    assert desk.worker.kinds() == [frames.VALUES]
    assert desk.keeper.orders.seen.repeats == 1


def test_an_acknowledgement_of_what_was_not_sent_is_refused():
    desk = begun(staleness=float("inf"))
    with pytest.raises(LinkError, match="acknowledges"):
        desk.hear(desk.successor, Frame(frames.ACK, 1, 0, number=1000))


def test_a_successor_with_old_content_gets_nothing_from_one_that_holds_nothing():
    """After the run went back to a checkpoint: some servers still hold something, and all are about to be set."""
    desk = Desk(staleness=0.0)
    desk.enter(1, lead=True)
    desk.keeper.chain.connected(101, desk.successor, 1)
    theirs = torch.full((2, len(desk.cuts) - 1), 7, dtype=torch.int64).numpy().tobytes()
    desk.hear(desk.successor, Frame(frames.STAMPS, 1, seat=101), theirs)
    sets = [content for frame, content in desk.successor.sent if frame.kind == frames.SET]
    assert sets == [b""] * len(desk.keeper.posts)
    assert desk.worker.kinds() == [frames.STATUS]
    state = scatter(desk.replica, desk.replica.layout, 0, 1, lanes=CARGO.lanes)
    desk.hear(desk.worker, Frame(frames.SET, 1, 0, 1), live.pack(state))
    assert desk.successor.sent[-1][1]


def test_a_late_caller_of_an_old_view_is_told_that_it_has_passed():
    desk = begun(staleness=0.0)
    desk.enter(3, lead=True)
    desk.worker.sent.clear()
    desk.enter(2)
    ((frame, _),) = desk.worker.sent
    assert (frame.kind, frame.view) == (frames.REFUSED, 3)


def test_a_second_line_of_a_seat_takes_the_place_of_the_first():
    """What still comes over the first must not be answered instead of what is asked over the second."""
    host = Host(100, "token", Terms(1, 0.0), bind="127.0.0.1")
    thread = threading.Thread(target=host.run)
    thread.start()
    with contextlib.ExitStack() as stack:
        stack.callback(thread.join)
        stack.callback(host.stop)
        call = lambda: stack.enter_context(reach(host.endpoint.address, "token", purpose="push", seat=0, view=1))  # noqa: E731
        first = call()
        second = call()
        first.settimeout(60)
        second.settimeout(60)
        assert first.recv(1) == b""
        chains = [[100]]
        host.learn(Table(number=1, cuts=[0, 1], chains=chains, filling=[[]], addresses={100: host.endpoint.address}))
        assert unpack(receive(second, FRAME_BYTES)).kind == frames.STALE


class Near(Pen):
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
    desk = begun(Near(101), staleness=0)
    post = desk.keeper.posts[0]
    content = torch.arange((post.piece.stop - post.piece.start) // 4, dtype=torch.float32).numpy().tobytes()
    desk.hear(desk.worker, Frame(frames.PUSH, 1, 0, 1, 0, 0, number=1), content)

    other = Desk(staleness=0)
    other.keeper.seat = 101
    other.keeper.table = None
    other.keeper.learn(desk.keeper.table)
    line = Near(100)
    line.given = desk.successor.given
    other.keeper.chain.admit(line)
    *before, (record, nothing) = [it for it in desk.successor.sent if it[0].piece == 0 or it[0].kind == frames.JOIN]
    assert (record.kind, nothing) == (frames.RECORD, b"")
    for frame, words in before:
        other.hear(line, frame, words)
    chunk, mine, theirs = post.piece.first, other.keeper.shard, desk.keeper.shard
    if moment == "never":
        other.hear(line, record)
        assert live.pack(mine.take(chunk, chunk + 1)) == live.pack(theirs.take(chunk, chunk + 1))
        return
    if moment == "before":
        desk.keeper.sums.begin(post)
    carry_out = other.keeper.orders.carry_out
    other.keeper.orders.carry_out = lambda *it: (carry_out(*it), desk.keeper.sums.begin(post))
    with pytest.raises(LinkError, match="gone on"):
        other.hear(line, record)
    assert int(mine.seq[chunk]) == (int(theirs.seq[chunk]) - 1 if moment == "before" else 0)
    assert bool(mine.term[chunk]) == (moment == "before"), "what was made of the wrong sums is held"
