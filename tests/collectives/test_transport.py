"""Who gets in, what a peer may send, and what is left of it afterwards."""

import array
import contextlib
import os
import signal
import socket
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.collectives import allreduce_plan
from shoal.collectives.group import ViewGroup
from shoal.collectives.outcome import Committed, Discarded
from shoal.collectives.transport import frames
from shoal.collectives.transport.connection import PeerError, PeerLink
from shoal.collectives.transport.endpoint import Endpoint, connect_to_peer
from shoal.collectives.transport.frames import PeerFrame
from shoal.collectives.transport.greeting import Greeting
from shoal.collectives.transport.shared_memory import SharedMemory, attach
from shoal.collectives.tree_reduce import TreeReduce
from shoal.lanes.flat_layout import FlatLayout
from shoal.lanes.reduction_tree import TreeSum
from shoal.net.errors import LinkError
from shoal.net.handshake import receive_exactly
from shoal.net.listener import connect
from shoal.spec.view import View
from shoal.strategies.ordered_sync import OrderedAllReduceSync
from tests.collectives.worker_processes import TOKEN, RecordingReplica, WorkerProcesses, lane_sum


@pytest.fixture
def endpoint():
    made = Endpoint(TOKEN, services={"state": lambda sock, greeting: sock.sendall(greeting.encode())})
    yield made
    made.close()


def as_remote(address):
    return address.model_copy(update={"host_id": "elsewhere"})


@pytest.mark.parametrize("far", [False, True])
def test_state_callers_are_served_in_a_thread_of_their_own(endpoint, far):
    address = as_remote(endpoint.address) if far else endpoint.address
    with connect_to_peer(address, TOKEN, Greeting(purpose="state", seat=4, view=9)) as sock:
        assert sock.family == (socket.AF_INET if far else socket.AF_UNIX)
        hello = Greeting(purpose="state", seat=4, view=9).encode()
        assert receive_exactly(sock, len(hello)) == hello
        assert sock.recv(1) == b""


def test_callers_wait_for_their_view_and_late_ones_are_refused(endpoint):
    early = connect_to_peer(endpoint.address, TOKEN, Greeting(purpose="mesh", seat=2, view=5))
    other = connect_to_peer(endpoint.address, TOKEN, Greeting(purpose="mesh", seat=3, view=4))
    taken = endpoint.wait_for_peers(4, [3], given_up=lambda: False)
    assert list(taken) == [3]
    endpoint.drop_views_before(5)
    late = connect_to_peer(endpoint.address, TOKEN, Greeting(purpose="mesh", seat=3, view=4))
    assert late.recv(1) == b""
    assert endpoint.refused == 1
    found = endpoint.wait_for_peers(5, [2], given_up=lambda: False)
    found[2].sendall(b"!")
    assert early.recv(1) == b"!"
    for sock in (early, other, late, *taken.values(), *found.values()):
        sock.close()


@pytest.mark.parametrize(
    "hello", [b"", b"[1]", b"{}", b"nonsense", b'{"purpose": "mesh", "seat": "1", "view": 1}', b"[" * 4000, b"\xff"]
)
def test_greetings_that_say_nothing_are_refused(endpoint, hello):
    with connect(socket.AF_UNIX, "\0" + endpoint.address.unix, TOKEN, hello) as sock:
        assert sock.recv(1) == b""
    assert endpoint.refused == 1


def test_strangers_are_refused(endpoint):
    with pytest.raises(LinkError):
        connect_to_peer(endpoint.address, "another", Greeting(purpose="mesh", seat=1, view=1))
    endpoint.wait_for_peers(1, [1], given_up=lambda: True)


def test_memory_of_a_peer_can_be_read_and_not_written():
    arena = SharedMemory(8192)
    arena.buffer.raw[5] = 9
    seen = attach(os.dup(arena.fd), 8192)
    assert seen.tensor[5] == 9
    arena.buffer.raw[5] = 8
    assert seen.raw[5] == 8
    assert seen.raw.readonly
    with pytest.raises(OSError, match="not permitted"):
        os.ftruncate(arena.fd, 0)
    with pytest.raises(OSError, match="not permitted"):
        os.write(arena.fd, b"x")
    arena.close()
    arena.close()


# --- a peer that knows the token and lies

VIEW, CARRIES, LANES = 3, {0: [0, 1], 1: [2]}, 3


def frame(kind, step=0, view=VIEW, seat=1, **more):
    return PeerFrame(kind, view, step, seat, **more).pack()


def digest():
    return FlatLayout(lane_sum(0, 0)).digest


def arena_bytes():
    return 1 << 16


def setup(**changes):
    return frame(frames.SETUP, **({"filled": digest(), "size": arena_bytes()} | changes))


@contextlib.contextmanager
def against_malicious_peer(endpoint, says, *, far, fds=()):
    """A sync whose only peer says what is given, all of it before the sync listens."""
    address = as_remote(endpoint.address) if far else endpoint.address
    with connect_to_peer(address, TOKEN, Greeting(purpose="mesh", seat=1, view=VIEW)) as liar:
        liar.sendall(frame(frames.HERE))
        for part in says[:1]:
            liar.sendmsg([part], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else [])
        for part in says[1:]:
            liar.sendall(part)
        liar.shutdown(socket.SHUT_WR)
        sync = OrderedAllReduceSync(LANES, ViewGroup(endpoint, TOKEN))
        view = View(number=VIEW, carries=CARRIES, addresses={0: endpoint.address, 1: endpoint.address})
        assert sync.reconfigure(view, 0) is None
        yield sync
        sync.close()


def commit(sync):
    tree = TreeSum(LANES, lambda a, b: a)
    for lane in CARRIES[0]:
        tree.push_lane(lane, lane_sum(0, lane))
    replica = RecordingReplica(lane_sum(0, 0))
    outcome = sync.commit(replica, 0, tree)
    assert replica.totals == []
    return outcome


LIES = {
    "nothing": [],
    "noise": [b"\x00" * 64],
    "half a frame": [frame(frames.PARTIAL)[:30]],
    "another view": [setup(view=VIEW - 1)],
    "another step": [setup(step=1)],
    "another seat": [setup(seat=0)],
    "another kind": [frame(frames.GATHER)],
    "another model": [setup(filled=1)],
    "little memory": [setup(size=10)],
    "another deal": [setup(), frame(frames.PARTIAL, filled=2)],
    "unknown flags": [setup(), frame(frames.PARTIAL, filled=1, flags=64)],
    "too many bytes": [setup(), frame(frames.PARTIAL, filled=1, size=1 << 60)],
    "too few bytes": [setup(), frame(frames.PARTIAL, filled=1, size=64)],
    "an end in the middle": [
        setup(),
        frame(frames.PARTIAL, filled=1, size=FlatLayout(lane_sum(0, 0)).size_bytes),
        b"xy",
    ],
}


@pytest.mark.parametrize("lie", LIES)
def test_a_lie_over_tcp_discards_the_step_and_names_the_liar(endpoint, lie):
    with against_malicious_peer(endpoint, LIES[lie], far=True) as sync:
        outcome = commit(sync)
    assert isinstance(outcome, Discarded)
    assert outcome.why.startswith("seat 1 ")


def unsealed():
    fd = os.memfd_create("plain")
    os.ftruncate(fd, arena_bytes())
    return fd


def pipe_end():
    ends = os.pipe()
    os.close(ends[1])
    return ends[0]


def other_size():
    arena = SharedMemory(4096)
    return arena.fd


@pytest.mark.parametrize("fds", [[], [unsealed], [pipe_end], [other_size], [unsealed] * 3], ids=len)
def test_memory_that_is_none_discards_the_step(endpoint, fds):
    given_fds = [make() for make in fds]
    with against_malicious_peer(endpoint, [setup()], far=False, fds=given_fds) as sync:
        outcome = commit(sync)
    for fd in given_fds:
        os.close(fd)
    assert isinstance(outcome, Discarded)
    assert outcome.why.startswith("seat 1 ")
    assert "memory" in outcome.why or "closed" in outcome.why


@pytest.mark.parametrize("lie", ["noise", "another view", "another seat", "unknown flags"])
def test_forged_notifications_of_shared_memory(endpoint, lie):
    arena = SharedMemory(arena_bytes())
    with against_malicious_peer(endpoint, LIES[lie], far=False, fds=[arena.fd]) as sync:
        outcome = commit(sync)
    arena.close()
    assert isinstance(outcome, Discarded)
    assert outcome.why.startswith("seat 1 ")


@pytest.mark.parametrize("change", [{"view": 6}, {"step": 3}, {"step": 5}, {"seat": 2}, {"kind": frames.PARTIAL + 1}])
def test_what_belongs_to_another_view_or_step_is_refused(change):
    """Late, early, or somebody else's."""
    ours, theirs = socket.socketpair()
    with theirs, contextlib.closing(PeerLink(1, ours, view=7)) as link:
        link.expect(frames.PARTIAL, 4)
        theirs.sendall(PeerFrame(frames.PARTIAL, 7, 4, 1)._replace(**change).pack())
        with pytest.raises(PeerError, match="seat 1 sent"):
            link.receive(lambda link, frame: [])


def test_a_gathering_has_a_limit(endpoint):
    with against_malicious_peer(endpoint, [frame(frames.GATHER, step=5, size=(1 << 30) + 1)], far=True) as sync:
        outcome = sync._group.gather(5, b"mine")
    assert "is the most" in outcome.why


def test_whom_to_blame_is_passed_on(endpoint):
    with against_malicious_peer(endpoint, [frame(frames.LEFT, step=77)], far=True) as sync:
        assert commit(sync) == Discarded("seat 77 was lost, as seat 1 says")


@settings(deadline=None, max_examples=60)
@given(st.lists(st.binary(max_size=200), max_size=3), st.booleans())
def test_no_malformed_input_does_harm(noise, starts_well):
    endpoint = Endpoint(TOKEN)
    try:
        with against_malicious_peer(endpoint, [setup()] * starts_well + noise, far=True) as sync:
            assert isinstance(commit(sync), Discarded)
    finally:
        endpoint.close()


# --- many views

THREE = {0: [0, 1], 1: [2, 3], 2: [4]}


def join_connect_threads():
    """Threads that connect end by themselves."""
    for thread in threading.enumerate():
        if thread.name in ("shoal-call", "shoal-caller"):
            thread.join()


@pytest.mark.parametrize("remote_seats", [(), (0,)], ids=["one host", "mixed"])
def test_hundreds_of_views_leave_nothing_behind(remote_seats):
    def act(me):
        replica, seen = RecordingReplica(lane_sum(0, 0)), []
        for number in range(1, 301):
            assert me.join(number) == ""
            if number % 10 == 0:
                assert isinstance(me.sync.commit(replica, number, me.sums(lane_sum, number)), Committed)
            if number in (20, 300):
                assert me.group.gather(0, b"").keys() == {0, 1, 2}  # all have come so far
                join_connect_threads()
                seen.append((len(os.listdir("/proc/self/fd")), threading.active_count()))
                me.group.gather(1, b"")
        return seen, me.leaked_resources()

    with WorkerProcesses(THREE, 5, remote_seats=remote_seats) as workers:
        for seen, left in workers.run(act).values():
            assert seen[0] == seen[1]
            assert left == []


def test_a_frozen_worker_does_not_take_numbers_of_a_later_view():
    """It stands still while it reads; the others go on in another view, in the same memory."""

    def act(me):
        allreduce_plan.ONE_PHASE_MAX_BYTES = 1 << 40
        if me.seat == 1:
            original, runs = TreeReduce.restart, []

            def frozen(self):
                runs.append(1)
                if len(runs) == 2:
                    os.kill(os.getpid(), signal.SIGSTOP)
                original(self)

            TreeReduce.restart = frozen
        assert me.join() == ""
        replica, later = RecordingReplica(lane_sum(0, 0)), {0: [0, 1], 2: [2, 3, 4]}
        outcomes = [me.sync.commit(replica, step, me.sums(lane_sum, step)) for step in range(2)]
        if me.seat != 1:
            assert me.join(2, later) == ""
            outcomes += [me.sync.commit(replica, step, me.sums(lane_sum, step, later)) for step in range(2, 4)]
        return [outcome.why if isinstance(outcome, Discarded) else "" for outcome in outcomes], len(replica.totals)

    with WorkerProcesses(THREE, 5) as workers:
        workers.start(act)
        for seat in (0, 2):
            assert workers.result(seat) == ([""] * 4, 4)
        os.waitpid(workers.pids[1], os.WUNTRACED)
        os.kill(workers.pids[1], signal.SIGCONT)
        (first, second), committed = workers.result(1)
    assert first == ""
    assert "continued without this worker" in second
    assert committed == 1
