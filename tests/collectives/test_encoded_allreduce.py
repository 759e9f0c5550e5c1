"""Encoded lanes between real processes, over shared memory and over sockets: the bits of one worker."""

import os
import signal

import pytest
import torch
from torch import nn

from shoal.codecs.size import size_bytes
from shoal.collectives import buckets, overlap
from shoal.collectives.buckets import EncodedLayout
from shoal.collectives.encoded_allreduce import EncodedAllReduce
from shoal.collectives.group import ViewGroup
from shoal.collectives.outcome import Committed, Discarded
from shoal.collectives.peer_services import PeerServices
from shoal.collectives.transport.frames import FRAME_BYTES
from shoal.errors import ShoalError
from shoal.lanes.flat_layout import FlatLayout
from shoal.spec.view import View
from shoal.strategies.encoded_sync import EncodedAllReduceSync
from tests.collectives.test_overlap import (
    LANES,
    STEPS,
    THREE,
    fingerprint,
    flips_its_count,
    lane_batch,
    mean,
    new_replica,
    one_step,
    sum_with_count,
    train,
    train_over_views,
)
from tests.collectives.worker_processes import TOKEN, WorkerProcesses

CODECS = {
    "bf16": {"kind": "bf16"},
    "int8": {"kind": "int8", "block": 64},
    "sign": {"kind": "sign"},
    "topk": {"kind": "topk", "keep": 0.02, "momentum": 0.9},
    "lowrank": {"kind": "lowrank", "rank": 2},
}


class Plain(nn.Module):
    """All float32; other strides, moving buffers, a parameter that no lane touches, one that some do."""

    steps = 0

    def __init__(self):
        super().__init__()
        self.unused = nn.Parameter(torch.ones(5))
        self.conv = nn.Conv2d(3, 8, 3).to(memory_format=torch.channels_last)
        self.norm = nn.BatchNorm2d(8)
        self.expert = nn.Linear(8 * 36, 8 * 36)
        self.wide = nn.Linear(8 * 36, 300)
        self.head = nn.Linear(300, 4)

    def forward(self, x):
        x = self.norm(self.conv(x)).relu().flatten(1)
        x = self.expert(x) if x.sum() > 1100 else x
        return self.head(self.wide(x).relu())


def small_buckets():
    """Small buckets, so that a small model has many."""
    overlap.BUCKET_BYTES = buckets.BUCKET_BYTES = buckets.FIRST_BUCKET_BYTES = 4000


@pytest.fixture(autouse=True)
def many_buckets(monkeypatch):
    monkeypatch.setattr(buckets, "BUCKET_BYTES", 4000)
    monkeypatch.setattr(buckets, "FIRST_BUCKET_BYTES", 4000)


def encoded(settings, peers, *, group=None, lanes=LANES, loss=mean, told=None):
    replica = new_replica(loss, lanes, Plain)
    tell = None if told is None else lambda kind, **fields: told.append((kind, fields))
    return replica, EncodedAllReduceSync(
        lanes, group or ViewGroup(), settings=settings, replica=replica, peers=peers, report=tell
    )


def single_worker(settings, *, lanes=LANES, loss=mean, steps=STEPS):
    peers = PeerServices(TOKEN, bind="127.0.0.1")
    try:
        replica, sync = encoded(settings, peers, lanes=lanes, loss=loss)
        assert sync.reconfigure(View(number=1, carries={0: list(range(lanes))}), 0) is None
        return train(sync, range(lanes), lanes, loss, replica=replica, steps=steps)[0]
    finally:
        peers.close()


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("remote_seats", [(), (0,), (0, 1, 2)], ids=["one host", "mixed", "all apart"])
def test_the_bits_are_those_of_one_worker(name, remote_seats):
    def act(me):
        small_buckets()
        replica, me.sync = encoded(CODECS[name], me.peers, group=me.group)
        assert me.join() == ""
        return train(me.sync, me.carries[me.seat], LANES, mean, seat=me.seat, replica=replica)

    with WorkerProcesses(THREE, LANES, remote_seats=remote_seats) as workers:
        results = workers.run(act)
    assert {str(outcome) for outcome, _ in results.values()} == {str(single_worker(CODECS[name]))}
    far = [went for _, went in results.values()]
    assert all(went >= 2 for went in far) if remote_seats else not any(far)


def test_a_count_of_its_own():
    def act(me):
        small_buckets()
        replica, me.sync = encoded(CODECS["sign"], me.peers, group=me.group, loss=sum_with_count)
        assert me.join() == ""
        return train(me.sync, me.carries[me.seat], LANES, sum_with_count, seat=me.seat, replica=replica)

    with WorkerProcesses(THREE, LANES, remote_seats=(0, 1, 2)) as workers:
        results = workers.run(act)
    expected = single_worker(CODECS["sign"], loss=sum_with_count)
    assert {str(outcome) for outcome, _ in results.values()} == {str(expected)}


@pytest.mark.parametrize("name", CODECS)
def test_exactly_so_many_bytes_are_sent(name):
    """Two lanes of two workers: a frame, what the codec says of each bucket, and the tail."""
    carries = {0: [0, 1], 1: [2, 3]}

    def act(me):
        small_buckets()
        replica, me.sync = encoded(CODECS[name], me.peers, group=me.group, lanes=4)
        assert me.join() == ""
        outcome, _ = one_step(me.sync, replica, 0, carries[me.seat], 4)
        return outcome.bytes_sent, outcome.bytes_plain

    with WorkerProcesses(carries, 4, remote_seats=(0, 1)) as workers:
        results = workers.run(act)
    layout = FlatLayout(new_replica(mean, 4, Plain).sum_template())
    encoded_layout = EncodedLayout(layout, CODECS[name])
    assert len(encoded_layout.buckets) > 3
    sizes = [bucket.codec.size_bytes((bucket.stop - bucket.start) // 4) for bucket in encoded_layout.buckets]
    if name != "lowrank":
        assert sizes == [
            size_bytes(CODECS[name], (bucket.stop - bucket.start) // 4) for bucket in encoded_layout.buckets
        ]
    sent = FRAME_BYTES + 2 * (sum(sizes) + encoded_layout.tail_bytes)
    plain = FRAME_BYTES + layout.size_bytes
    assert results == {0: (sent, plain), 1: (sent, plain)}


def test_buckets_cover_all_gradients_and_slots_do_not_overlap():
    layout = FlatLayout(new_replica(mean, LANES, Plain).sum_template())
    for settings in CODECS.values():
        encoded_layout = EncodedLayout(layout, settings)
        assert [bucket.start for bucket in encoded_layout.buckets] == [
            0,
            *(bucket.stop for bucket in encoded_layout.buckets[:-1]),
        ]
        assert encoded_layout.buckets[-1].stop + encoded_layout.tail_bytes == layout.size_bytes
        ends = [bucket.offset + bucket.size_bytes for bucket in encoded_layout.buckets]
        assert all(
            end <= start
            for end, start in zip(
                ends, [*(c.offset for c in encoded_layout.buckets[1:]), encoded_layout.tail_offset], strict=True
            )
        )
        assert (
            sum(map(len, encoded_layout.payload(memoryview(bytearray(encoded_layout.lane_bytes)))))
            == encoded_layout.sent_bytes
        )
        assert all(bucket.residual_range[0] % 16 == 0 for bucket in encoded_layout.buckets), (
            "matrices begin at multiples of 64 bytes"
        )


def test_other_kinds_of_gradients_are_refused():
    replica = new_replica(mean, LANES)  # it has a layer of bfloat16
    with pytest.raises(ShoalError, match=r"SH110.*float32 gradients, and some of these are bfloat16"):
        EncodedLayout(FlatLayout(replica.sum_template()), CODECS["int8"])


# --- views


def test_residuals_follow_lanes_that_move():
    """From one to three, back to two, and one of these is not among those from whom lanes come."""
    views = [({0: list(range(LANES))}, 2), (THREE, 2), ({1: [0, 2, 4, 6], 2: [1, 3, 5]}, 2)]

    def act(me):
        small_buckets()
        told = []
        replica, me.sync = encoded(CODECS["topk"], me.peers, group=me.group, told=told)
        step = 0
        for number, (carries, steps) in enumerate(views, start=1):
            if me.seat in carries:
                if step < 2 * (number - 1):  # a newcomer: what it has missed is what all do alike
                    catch_up(replica, 2 * (number - 1))
                    step = 2 * (number - 1)
                assert me.join(number, carries, step) == ""
                for _ in range(steps):
                    outcome, _ = one_step(me.sync, replica, step, carries[me.seat], LANES)
                    assert isinstance(outcome, Committed), outcome
                    step += 1
            elif number == len(views):
                me.sync.hand_over(lambda: False)
            me.send(number)
            assert me.receive() == number, "nobody is in a view before the last is over"
        return told, fingerprint(replica) if me.seat else None

    with WorkerProcesses(THREE, LANES, remote_seats=(2,)) as workers:
        workers.start(act)
        for number in range(1, len(views) + 1):
            assert {workers.result(seat) for seat in THREE} == {number}
            for seat in THREE:
                workers.send(seat, number)
        results = {seat: workers.result(seat) for seat in THREE}
    (_, expected) = single_worker(CODECS["topk"], steps=6)
    assert results == {0: ([], None), 1: ([], expected), 2: ([], expected)}


def catch_up(replica, steps):
    """The steps that others made, made alone."""
    peers = PeerServices(TOKEN, bind="127.0.0.1")
    sync = EncodedAllReduceSync(LANES, ViewGroup(), settings=CODECS["topk"], replica=replica, peers=peers)
    assert sync.reconfigure(View(number=1, carries={0: list(range(LANES))}), 0) is None
    for step in range(steps):
        one_step(sync, replica, step, range(LANES), LANES)
    sync.close()
    peers.close()


@pytest.mark.parametrize("remote_seats", [(), (0, 1, 2)], ids=["one host", "all apart"])
def test_death_while_lanes_are_sent_and_what_was_lost(remote_seats):
    later = {0: [0, 1, 2], 2: [3, 4, 5, 6]}

    def act(me):
        small_buckets()
        told = []
        replica, me.sync = encoded(CODECS["sign"], me.peers, group=me.group, told=told)
        if me.seat == 1:
            die_at(EncodedAllReduce, "_encode", 8)
        return *train_over_views(me, mean, [THREE, later], replica=replica), told

    with WorkerProcesses(THREE, LANES, remote_seats=remote_seats) as workers:
        workers.start(act)
        results = [workers.result(seat) for seat in (0, 2)]
    for whys, _, weights, leaked, _ in results:
        assert len(whys) == 1
        assert "was lost" in whys[0]
        assert weights == results[0][2]
        assert leaked == []
    # the second survivor may hear first that the first one has left the view
    assert any("seat 1 was lost" in whys[0] for whys, *_ in results)
    lost = [fields for _, _, _, _, told in results for kind, fields in told if kind == "residual_lost"]
    assert sorted(row["lane"] for row in lost) == [1, 2, 3]
    assert {row["worker"] for row in lost} == {"worker-1"}


def die_at(kind, name, number):
    original, calls = getattr(kind, name), []

    def replaced(*arguments):
        calls.append(1)
        if len(calls) == number:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*arguments)

    setattr(kind, name, replaced)


def test_invalidated_overlap_ends_the_view_once():
    def act(me):
        small_buckets()
        replica, me.sync = encoded(CODECS["sign"], me.peers, group=me.group, loss=flips_its_count)
        return train_over_views(me, flips_its_count, [THREE] * 4, replica=replica)

    with WorkerProcesses(THREE, LANES, remote_seats=(0, 1, 2)) as workers:
        results = workers.run(act)
    assert len({weights for _, _, weights, _ in results.values()}) == 1
    said = [one for whys, _, _, _ in results.values() for one in whys]
    assert any("the loss has a count of its own in one step" in one for one in said)
    assert all(len(whys) < 4 and leaked == [] for whys, _, _, leaked in results.values())


def test_a_discarded_step_leaves_residuals_unchanged():
    peers = PeerServices(TOKEN, bind="127.0.0.1")
    group = ViewGroup()
    replica, sync = encoded(CODECS["sign"], peers, group=group)
    view = View(number=1, carries={0: list(range(LANES))})
    assert sync.reconfigure(view, 0) is None
    for step in range(2):
        one_step(sync, replica, step, range(LANES), LANES)
    before = {lane: state["memory"].clone() for lane, state in sync.state()["remembered"].items()}
    group.abort(1)
    outcome, _ = one_step(sync, replica, 2, range(LANES), LANES)
    assert isinstance(outcome, Discarded)
    assert sync.reconfigure(view.model_copy(update={"number": 2, "position": 4}), 0) is None
    after = sync.state()["remembered"]
    assert before.keys() == after.keys() == set(range(LANES))
    assert all(torch.equal(before[lane], after[lane]["memory"]) for lane in before)
    outcome, _ = one_step(sync, replica, 2, range(LANES), LANES)
    assert isinstance(outcome, Committed)
    peers.close()
    assert lane_batch(2, 3, LANES) is None, "else no lane was without samples"
