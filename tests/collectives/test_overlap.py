"""Gradients that go ahead while backward runs: the same bits, and whatever goes wrong ends the view with a reason."""

import hashlib
import os
import random
import signal
import threading

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from shoal.collectives import allreduce_plan, overlap
from shoal.collectives.group import ViewGroup
from shoal.collectives.ordered_allreduce import OrderedAllReduce
from shoal.collectives.outcome import Committed, Discarded
from shoal.collectives.overlap import OverlappedSend, SinkState
from shoal.data.batch import Batch
from shoal.lanes.flat_layout import FlatLayout
from shoal.lanes.reduction_tree import TreeSum
from shoal.lanes.replica import Replica, add
from shoal.spec.view import View
from shoal.strategies.ordered_sync import OrderedAllReduceSync
from tests.collectives.worker_processes import WorkerProcesses, lane_sum

STEPS = 5


class Model(nn.Module):
    """A parameter used twice, one that some lanes do not touch, one that none does, other dtypes and strides, moving
    buffers; and enough bytes that they do not leave at once."""

    def __init__(self):
        super().__init__()
        self.unused = nn.Parameter(torch.ones(5))
        self.conv = nn.Conv2d(3, 8, 3).to(memory_format=torch.channels_last)
        self.norm = nn.BatchNorm2d(8)
        self.narrow = nn.Linear(8 * 36, 16, bias=False).bfloat16()
        self.twice = nn.Linear(16, 16)
        self.expert = nn.Linear(16, 16)
        self.wide = nn.Linear(16, 3000)
        self.head = nn.Linear(3000, 4)
        self.drop = nn.Dropout(0.2)

    def forward(self, x):
        x = self.drop(self.norm(self.conv(x)).relu()).flatten(1)
        x = self.twice(self.narrow(x.bfloat16()).float())
        x = self.expert(x) if x.sum() > 0 else x
        return self.head(self.wide(self.twice(x)).relu())


def mean(module, batch):
    return F.cross_entropy(module(*batch.inputs), batch.target)


def sum_with_count(module, batch):
    return F.cross_entropy(module(*batch.inputs), batch.target, reduction="sum"), batch.size


def recomputed(module, batch):
    return F.cross_entropy(checkpoint(module, *batch.inputs, use_reentrant=False), batch.target)


def lane_batch(step, lane, lanes):
    """Sizes differ; now and then a lane has no samples, the last one too."""
    size = 0 if (step + lane) % 7 == 5 else 2 + lane % 2
    if size == 0:
        return None
    generator = torch.Generator().manual_seed(100 * step + lane)
    inputs = torch.randn(size, 3, 8, 8, generator=generator).to(memory_format=torch.channels_last)
    return Batch((inputs,), torch.randint(0, 4, (size,), generator=generator), size)


def new_replica(loss, lanes, make=Model):
    torch.manual_seed(0)
    module = make()
    replica = Replica(module, torch.optim.AdamW(module.parameters(), lr=0.01), loss, seed=1)
    replica.probe(lane_batch(0, 0, lanes))
    return replica


def one_step(sync, replica, step, carried, lanes, *, halt=False):
    """What the loop does. Returns the outcome, and whether gradients went ahead."""
    batches = {lane: lane_batch(step, lane, lanes) for lane in range(lanes)}
    total = sum(batch.size for batch in batches.values() if batch)
    sums, sink = sync.begin_step(), None
    replica.begin_step()
    for lane in carried:
        batch = batches[lane]
        if batch and lane == carried[-1]:
            sink = sync.gradient_sink(replica, step, sums, lane, halt=halt)
        done = batch and replica.forward_backward(step, lane, batch, share=batch.size / total, sink=sink)
        sums.push_lane(lane, done)
    outcome = sync.commit(replica, step, sums, halt=halt)
    if isinstance(outcome, Discarded):
        replica.undo_step()
    return outcome, sink is not None


def train(sync, carried, lanes, loss, *, steps=STEPS, seat=0, replica=None):
    replica, said, went = replica or new_replica(loss, lanes), [], 0
    for step in range(steps):
        outcome, overlapped = one_step(sync, replica, step, carried, lanes, halt=step == 3 and seat == 0)
        assert isinstance(outcome, Committed), outcome
        said.append((outcome.loss.item(), outcome.halt))
        went += overlapped
    return (said, fingerprint(replica)), went


def fingerprint(replica):
    digest = hashlib.sha256()
    moments = [t for state in replica.optimizer.state_dict()["state"].values() for t in state.values()]
    for tensor in [*replica.model.state_dict().values(), *moments]:
        digest.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def single_worker(lanes, loss):
    sync = OrderedAllReduceSync(lanes, ViewGroup())
    assert sync.reconfigure(View(number=1, carries={0: list(range(lanes))}), 0) is None
    outcome, went = train(sync, range(lanes), lanes, loss)
    assert went == 0
    return outcome


CARRYING = {
    "one lane each": ({0: [0], 1: [1]}, 2),
    "blocks": ({0: [0, 1, 2, 3], 1: [4, 5, 6, 7]}, 8),
    "several partials": ({0: [0, 3, 4], 1: [1, 2, 5, 6]}, 7),
    "three": ({0: [0], 1: [1, 2, 3], 2: [4, 5, 6]}, 7),
}
THREE = CARRYING["three"][0]
LANES = 7


def small_buckets(phases=2):
    """Small shares and buckets, so that a small model has many."""
    allreduce_plan.ONE_PHASE_MAX_BYTES = 0 if phases == 2 else 1 << 40
    overlap.BUCKET_BYTES = 1000


@pytest.mark.parametrize("phases", [1, 2])
@pytest.mark.parametrize("carrying", CARRYING)
def test_the_bits_are_those_of_one_worker(carrying, phases):
    def act(me):
        small_buckets(phases)
        assert me.join() == ""
        return train(me.sync, me.carries[me.seat], lanes, mean, seat=me.seat)

    carries, lanes = CARRYING[carrying]
    with WorkerProcesses(carries, lanes, remote_seats=tuple(carries)) as workers:
        results = workers.run(act)
    assert {str(outcome) for outcome, _ in results.values()} == {str(single_worker(lanes, mean))}
    assert all(went >= 2 for _, went in results.values())


@pytest.mark.parametrize("loss", [sum_with_count, recomputed])
@pytest.mark.parametrize("remote_seats", [(0,), (0, 1, 2)], ids=["mixed", "all apart"])
def test_counts_checkpointing_and_members_on_one_host(loss, remote_seats):
    def act(me):
        small_buckets()
        assert me.join() == ""
        return train(me.sync, me.carries[me.seat], LANES, loss, seat=me.seat)

    with WorkerProcesses(THREE, LANES, remote_seats=remote_seats) as workers:
        results = workers.run(act)
    assert {str(outcome) for outcome, _ in results.values()} == {str(single_worker(LANES, loss))}
    assert all(went >= 2 for _, went in results.values())


def test_on_one_host_nothing_overlaps():
    def act(me):
        assert me.join() == ""
        return train(me.sync, me.carries[me.seat], LANES, mean)[1]

    with WorkerProcesses(THREE, LANES) as workers:
        assert set(workers.run(act).values()) == {0}


# --- what went ahead was wrong


def draws_unexpectedly(module, batch):
    """From a generator that is seeded only for those who draw from it; in lane 0 among others."""
    scale = random.random() if batch.size == 2 and module.steps >= 2 else 1.0
    return mean(module, batch) * scale


def flips_its_count(module, batch):
    return sum_with_count(module, batch) if module.steps >= 2 else mean(module, batch)


def comes_in_parts(module, batch):
    """A reentrant checkpoint has a backward of its own: the parameter used in and outside of it is fed twice."""
    x = module.narrow(torch.ones(batch.size, 8 * 36, dtype=torch.bfloat16)).float()
    x = module.twice(checkpoint(module.twice, x, use_reentrant=True)) if module.steps >= 2 else module.twice(x)
    return F.cross_entropy(module.head(module.wide(x).relu()), batch.target)


def train_over_views(me, loss, carryings, *, watch=lambda step: None, replica=None):
    """Train over as many views as it takes. Returns why each of them ended, and what came of it."""
    replica, whys, step, after = replica or new_replica(loss, LANES), [], 0, 0
    for number, carries in enumerate(carryings, start=1):
        replica.model.steps = step
        assert me.join(number, carries, step) == ""
        while step < STEPS + 1:
            watch(step)
            outcome, went = one_step(me.sync, replica, step, carries[me.seat], LANES)
            if isinstance(outcome, Discarded):
                whys.append(outcome.why)
                break
            after += went and bool(whys)
            step = replica.model.steps = step + 1
    return whys, after, fingerprint(replica), me.leaked_resources()


def single_worker_over_views(loss):
    sync, replica = OrderedAllReduceSync(LANES, ViewGroup()), new_replica(loss, LANES)
    assert sync.reconfigure(View(number=1, carries={0: list(range(LANES))}), 0) is None
    for step in range(STEPS + 1):
        replica.model.steps = step
        one_step(sync, replica, step, range(LANES), LANES)
    return fingerprint(replica)


INVALIDATING = {
    "a generator was drawn from": draws_unexpectedly,
    "the loss has a count of its own in one step": flips_its_count,
    "a parameter's gradient came in more than one part": comes_in_parts,
}


@pytest.mark.parametrize("why", INVALIDATING)
def test_invalidated_overlap_ends_the_view_once(why):
    def act(me):
        small_buckets()
        return train_over_views(me, INVALIDATING[why], [THREE] * 4)

    Model.steps = 0
    with WorkerProcesses(THREE, LANES, remote_seats=(0, 1, 2)) as workers:
        results = workers.run(act)
    expected = single_worker_over_views(INVALIDATING[why])
    said = [one for whys, _, _, _ in results.values() for one in whys]
    assert any(why in one for one in said)
    assert all(why in one or "was lost" in one or "some lanes came with a count" in one for one in said)
    for whys, _, weights, leaked in results.values():
        assert len(whys) < 4
        assert weights == expected
        assert leaked == []


# --- losing peers meanwhile


def at_nth_push(number, act):
    """Replace the moment in which gradients are sent, so that something happens at the `number`-th of them."""
    original, calls = OrderedAllReduce._send_ready, []

    def push(self, it, until):
        calls.append(1)
        if len(calls) == number:
            act()
        original(self, it, until)

    OrderedAllReduce._send_ready = push


@pytest.mark.parametrize("remote_seats", [(0, 1, 2), (0,)], ids=["all apart", "mixed"])
def test_death_in_the_middle_of_overlapped_sending(remote_seats):
    later = {0: [0, 1, 2], 2: [3, 4, 5, 6]}

    def act(me):
        small_buckets()
        if me.seat == 1:
            at_nth_push(5, lambda: os.kill(os.getpid(), signal.SIGKILL))
        return train_over_views(me, mean, [THREE, later])

    with WorkerProcesses(THREE, LANES, remote_seats=remote_seats) as workers:
        workers.start(act)
        results = [workers.result(seat) for seat in (0, 2)]
    expected = single_worker_over_views(mean)
    for whys, after, weights, leaked in results:
        assert len(whys) == 1
        assert "seat 1 was lost" in whys[0]
        assert after > 0
        assert weights == expected
        assert leaked == []


@pytest.mark.parametrize("when", ["while it sends", "after it has sent"])
def test_abort_during_overlapped_sending(when):
    """By another thread, in the middle of backward; the view that follows is not touched."""

    def act(me):
        small_buckets()

        def abort():
            thread = threading.Thread(target=me.group.abort, args=(1,))
            thread.start()
            thread.join()

        if me.seat == 1:
            at_nth_push(4 if when == "while it sends" else 7, abort)
        return train_over_views(me, mean, [THREE, THREE])

    with WorkerProcesses(THREE, LANES, remote_seats=(0, 1, 2)) as workers:
        results = workers.run(act)
    expected = single_worker_over_views(mean)
    assert "aborted" in results[1][0][0]
    for whys, after, weights, leaked in results.values():
        assert len(whys) == 1
        assert after > 0
        assert weights == expected
        assert leaked == []


# --- the sink


def gradient_sink(met=()):
    seen = []
    made = lane_sum(0, 0, [(20,), (3, 5), (40,)], more_kinds=False)
    made.float_buffers = [torch.ones(7)]
    made.grads.insert(1, torch.ones(9).bfloat16())
    layout = FlatLayout(made)
    room = layout.views(torch.zeros(layout.size_bytes, dtype=torch.uint8))
    taken = SinkState(set(range(4)))
    return made, room, taken, OverlappedSend(room.grads, layout.grads, met, state=taken, on_ready=seen.append), seen


def test_ready_is_what_lies_before_the_first_gap(monkeypatch):
    monkeypatch.setattr(overlap, "BUCKET_BYTES", 1)
    made, room, taken, it, seen = gradient_sink()
    it.accept(2, made.grads[2])
    assert seen == []
    it.accept(3, made.grads[3])  # the last parameter lies first
    assert seen == [192 + 64]
    it.accept(1, made.grads[1])  # of another kind: behind the others
    it.accept(0, None)
    assert seen == [256, 256 + 128 + 64]
    assert torch.equal(room.grads[3], made.grads[3])
    assert not room.grads[0].any()
    assert not taken.missing


def test_order_is_that_of_the_tree():
    values = [lane_sum(0, lane, [(257,)], more_kinds=False) for lane in range(4)]
    expected = (values[0].grads[0] + values[1].grads[0]) + (values[2].grads[0] + values[3].grads[0])
    sums = TreeSum(4, add)
    for lane in (0, 1, 2):
        sums.push_lane(lane, values[lane])
    top, met = sums.merge_path((0, 3))
    assert top == (2, 0)
    layout = FlatLayout(values[3])
    room = layout.views(torch.zeros(layout.size_bytes, dtype=torch.uint8))
    others = [(sums.partials[node].grads, first) for node, first in met]
    OverlappedSend(room.grads, layout.grads, others, state=SinkState({0}), on_ready=lambda until: None).accept(
        0, values[3].grads[0]
    )
    assert torch.equal(room.grads[0], expected)
