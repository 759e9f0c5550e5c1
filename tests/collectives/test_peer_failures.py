"""Peers die, lie, come late; the control thread aborts. Whatever happens, the others get a reason and nothing leaks."""

import os
import signal
import threading

import pytest

from shoal.collectives import allreduce_plan
from shoal.collectives.ordered_allreduce import OrderedAllReduce
from shoal.collectives.outcome import Committed, Discarded
from shoal.collectives.transport import frames
from shoal.collectives.transport.connection import PeerLink
from shoal.collectives.transport.mesh import Mesh
from tests.collectives.worker_processes import (
    RecordingReplica,
    WorkerProcesses,
    assert_same_bits,
    lane_sum,
    single_worker_total,
)

THREE = {0: [0, 1], 1: [2, 3], 2: [4]}
LANES = 5
MOMENTS = {
    "before it lays down": (OrderedAllReduce, "_write_partials", "before"),
    "before it rings": (OrderedAllReduce, "_reduce_scatter", "before"),
    "after it rang": (OrderedAllReduce, "_reduce_scatter", "after"),
    "before the second ring": (OrderedAllReduce, "_all_gather", "before"),
    "after the second ring": (OrderedAllReduce, "_all_gather", "after"),
    "in the middle of sending": (PeerLink, "send", "middle"),
}


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def die_at(owner, name, when):
    """Replace a method by one that does not survive the second call."""
    original, calls = getattr(owner, name), []

    def fatal(self, *args, **kwargs):
        if name == "send":
            return send_partial_frame(self)
        calls.append(1)
        if len(calls) == 2 and when == "before":
            die()
        result = original(self, *args, **kwargs)
        if len(calls) == 2 and when == "after":
            die()
        return result

    setattr(owner, name, fatal)


def send_partial_frame(link):
    if link._outgoing and link._outgoing[0][4] == frames.PARTIAL:
        link._sock.send(link._outgoing[0][:20])
        die()
    while link._outgoing:
        link._sent(link._sock.sendmsg(link._outgoing, link._ancillary()))


def until_discarded(me, replica, *, first=0):
    for step in range(first, first + 100):
        outcome = me.sync.commit(replica, step, me.sums(lane_sum, step))
        if isinstance(outcome, Discarded):
            return outcome.why
        replica.step = step + 1
    raise AssertionError("nobody missed the dead one")


@pytest.mark.parametrize("remote_seats", [(), (0, 1, 2), (0,)], ids=["one host", "all apart", "mixed"])
@pytest.mark.parametrize("moment", MOMENTS)
def test_the_death_of_a_member_is_named_and_the_others_go_on(moment, remote_seats):
    def act(me):
        allreduce_plan.ONE_PHASE_MAX_BYTES = 0
        if me.seat == 1:
            die_at(*MOMENTS[moment])
        assert me.join() == ""
        replica = RecordingReplica(lane_sum(0, 0))
        why = until_discarded(me, replica)
        stands = len(replica.totals)
        me.send((why, stands))
        carries = {0: [0, 1, 2], 2: [3, 4]}
        assert me.join(2, carries) == ""
        for step in range(stands, stands + 3):
            assert isinstance(me.sync.commit(replica, step, me.sums(lane_sum, step, carries)), Committed)
        return replica.totals, me.leaked_resources()

    with WorkerProcesses(THREE, LANES, remote_seats=remote_seats) as workers:
        workers.start(act)
        stood = [workers.result(seat) for seat in (0, 2)]
        assert all("seat 1 was lost" in why for why, _ in stood)
        if stood[0][1] != stood[1][1]:
            return  # one of them committed the step, the other did not: the driver would let it catch up
        for seat in (0, 2):
            totals, leaked = workers.result(seat)
            assert leaked == []
            for total in totals:
                assert_same_bits(total, single_worker_total(lane_sum, LANES, total[0]))


def test_a_discarded_step_leaves_the_replica_alone():
    def act(me):
        if me.seat == 1:
            die_at(OrderedAllReduce, "_reduce_scatter", "before")
        assert me.join() == ""
        replica = RecordingReplica(lane_sum(0, 0))
        why = until_discarded(me, replica)
        again = me.sync.commit(replica, 1, me.sums(lane_sum, 1))
        return why, [step for step, _, _ in replica.totals], again, me.group.gather(0, b"")

    with WorkerProcesses(THREE, LANES) as workers:
        workers.start(act)
        for seat in (0, 2):
            why, committed, again, gathered = workers.result(seat)
            assert committed == [0]
            assert again == gathered == Discarded(why)


def test_death_while_others_gather():
    """The first survivor that notices names seat 1. It may have to leave in the middle of a message, and cannot say why
    then: to the other survivor it is the one that was lost."""

    def act(me):
        assert me.join() == ""
        if me.seat == 1:
            die()
        return me.group.gather(0, bytes(5_000_000))

    with WorkerProcesses(THREE, LANES, remote_seats=(0,)) as workers:
        workers.start(act)
        reasons = [workers.result(seat).why for seat in (0, 2)]
    assert any("seat 1 was lost" in why for why in reasons)
    assert all("was lost" in why for why in reasons)


@pytest.mark.parametrize("remote_seats", [(), (0, 1, 2)], ids=["one host", "all apart"])
@pytest.mark.parametrize("waits_in", ["reconfigure", "commit", "gather"])
def test_abort_wakes_whoever_waits_and_hits_no_later_view(waits_in, remote_seats):
    """Seat 2 does not come; the control thread of the others learns that from somewhere else."""

    def act(me):
        if me.seat == 2:
            if waits_in != "reconfigure":
                me.join()
            me.send("present")
            me.endpoint.wait_for_peers(2, [0, 1], given_up=lambda: False)  # until all have come to the second view
            me.send("seen")
            signal.pause()
        original = Mesh._exchange if waits_in != "reconfigure" else type(me.endpoint).wait_for_peers

        def announced(self, *args, **kwargs):
            aborter.start()
            return original(self, *args, **kwargs)

        aborter = threading.Thread(target=lambda: me.group.abort(1))
        owner, name = (Mesh, "_exchange") if waits_in != "reconfigure" else (type(me.endpoint), "wait_for_peers")
        replica = RecordingReplica(lane_sum(0, 0))
        if waits_in == "reconfigure":
            setattr(owner, name, announced)
            outcome = me.join()
            setattr(owner, name, original)
        else:
            assert me.join() == ""
            setattr(owner, name, announced)
            outcome = (
                me.sync.commit(replica, 0, me.sums(lane_sum, 0)) if waits_in == "commit" else me.group.gather(0, b"")
            )
            setattr(owner, name, original)
            outcome = outcome.why
        aborter.join()
        assert me.group.aborted()
        assert isinstance(me.sync.commit(replica, 0, me.sums(lane_sum, 0)), Discarded)
        carries = {0: [0, 1, 2], 1: [3, 4]}
        assert me.join(1, THREE) == "view 1 was aborted"
        assert me.join(2, carries) == ""
        me.group.abort(1)
        assert not me.group.aborted()
        assert isinstance(me.sync.commit(replica, 0, me.sums(lane_sum, 0, carries)), Committed)
        return outcome

    with WorkerProcesses(THREE, LANES, remote_seats=remote_seats) as workers:
        workers.start(act)
        outcomes = [workers.result(seat) for seat in (0, 1)]
    assert any("view 1 was aborted" in why for why in outcomes)
    assert all("aborted" in why or "was lost" in why or "not reached" in why for why in outcomes)
