"""When lanes agree, and what they agree on."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from shoal.codecs.residual import Residual
from shoal.collectives.buckets import EncodedLayout
from shoal.collectives.lane_residuals import LaneResiduals
from shoal.lanes.flat_layout import FlatLayout
from shoal.lanes.lane_sum import LaneSum, add
from shoal.lanes.replica import Replica
from shoal.strategies.local_sgd.fragments import EncodedFragmentAllReduce
from shoal.strategies.local_sgd.outer_optimizer import OuterOptimizer
from shoal.strategies.local_sgd.replica import LocalReplica
from shoal.strategies.local_sgd.schedule import Segment, SyncSchedule, partition_into_fragments

SCHEDULES = st.builds(SyncSchedule, st.integers(1, 12), st.integers(1, 5))


# ---- schedule ----


def test_rounds_by_example():
    """Two fragments: each leaves once per round, and arrives when the next leaves."""
    assert SyncSchedule(4, 3).segments(12, 24, fragments=2) == [
        Segment(12, 16, leaving_fragment=0),
        Segment(16, 18, arriving_fragment=0, leaving_fragment=1),
        Segment(18, 20, arriving_fragment=1, leaving_fragment=0),
        Segment(20, 22, arriving_fragment=0),
        Segment(22, 24),
    ]
    assert SyncSchedule(4).segments(0, 4, fragments=2) == [Segment(0, 4)]
    assert SyncSchedule().segments(7, 8, fragments=1) == [Segment(7, 8)]


@given(SCHEDULES, st.integers(0, 200), st.integers(1, 200), st.integers(1, 6))
def test_segments_cover_all_steps_and_no_fragment_stays_pending(schedule, start, length, fragments):
    start, steps = start // schedule.steps_per_sync * schedule.steps_per_sync, start + length
    stop = schedule.next_sync(start, steps=steps)
    segments = schedule.segments(start, stop, fragments=fragments)
    assert [segment.start for segment in segments[1:]] == [segment.stop for segment in segments[:-1]]
    assert (segments[0].start, segments[-1].stop) == (start, stop)
    assert all(segment.start < segment.stop for segment in segments)
    under_way = None
    for segment in segments:
        if segment.arriving_fragment is not None:
            assert segment.arriving_fragment == under_way
            under_way = None
        if segment.leaving_fragment is not None:
            assert under_way is None
            assert segment.stop - start >= schedule.steps_per_round
            under_way = segment.leaving_fragment
    assert under_way is None
    assert segments[-1].arriving_fragment is None, "then it is part of the agreement"
    if fragments <= schedule.steps_per_round and stop - start > 2 * schedule.steps_per_round:
        assert {segment.leaving_fragment for segment in segments} - {None} == set(range(fragments)), "each of them goes"


@given(SCHEDULES, st.integers(1, 300))
def test_agreements_lead_to_the_end(schedule, steps):
    at, seen = 0, []
    while at < steps:
        at = schedule.next_sync(at, steps=steps)
        seen.append(at)
    assert seen == [*range(schedule.steps_per_sync, steps, schedule.steps_per_sync), steps]


@given(SCHEDULES, st.integers(1, 50), st.integers(1, 300))
def test_a_mark_is_seen_once_at_the_first_agreement_that_has_reached_it(schedule, interval, steps):
    at, seen = 0, []
    while at < steps:
        before, at = at, schedule.next_sync(at, steps=steps)
        if schedule.crossed_multiple_of(at, interval):
            seen.append((before, at))
    passed = set(range(interval, steps + 1, interval))
    assert {interval * (at // interval) for _, at in seen} <= passed
    assert all(any(before < one <= at for before, at in seen) for one in passed)


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=40), st.integers(1, 8))
def test_fragments_are_all_of_it_in_order(sizes, most):
    found = partition_into_fragments(sizes, most)
    assert [i for one in found for i in one] == list(range(len(sizes)))
    assert len(found) <= most
    assert all(found)


def test_fragments_are_about_equal():
    assert partition_into_fragments([1] * 8, 4) == [range(2), range(2, 4), range(4, 6), range(6, 8)]
    assert partition_into_fragments([5, 1, 1, 1], 2) == [range(1), range(1, 4)]


# ---- the outer step ----


@pytest.mark.parametrize(("lr", "momentum"), [(0.7, 0.9), (1.0, 0.0), (0.3, 0.5)])
def test_the_outer_step_is_that_of_torch(lr, momentum):
    torch.manual_seed(0)
    parameters = [torch.nn.Parameter(torch.randn(3, 4)), torch.nn.Parameter(torch.randn(5))]
    values = [p.detach().clone() for p in parameters]
    known = torch.optim.SGD(parameters, lr=lr, momentum=momentum, nesterov=momentum > 0)
    outer = OuterOptimizer(values, lr=lr, momentum=momentum)
    for _ in range(4):
        changes = [torch.randn_like(v) for v in values]
        outer.step(values, changes, [0, 1])
        for parameter, change in zip(parameters, changes, strict=True):
            parameter.grad = change
        known.step()
        torch.testing.assert_close(values, [p.detach() for p in parameters])


def test_fragments_one_after_the_other_are_the_whole():
    torch.manual_seed(0)
    start = [torch.randn(4), torch.randn(2, 2), torch.randn(3)]
    changes = [[torch.randn_like(v) for v in start] for _ in range(3)]
    whole, parts = [v.clone() for v in start], [v.clone() for v in start]
    together, apart = (OuterOptimizer(start, lr=0.7, momentum=0.9) for _ in range(2))
    for by in changes:
        together.step(whole, by, [0, 1, 2])
        apart.step(parts, [by[2], by[0]], [2, 0])
        apart.step(parts, [by[1]], [1])
    assert all(torch.equal(a, b) for a, b in zip(whole, parts, strict=True))


def test_the_outer_state_comes_back():
    values = [torch.ones(3)]
    outer, other = OuterOptimizer(values, momentum=0.9), OuterOptimizer(values, momentum=0.9)
    outer.step([torch.ones(3)], [torch.randn(3)], [0])
    other.load_state(outer.state())
    change, a, b = torch.randn(3), torch.ones(3), torch.ones(3)
    outer.step([a], [change], [0])
    other.step([b], [change], [0])
    assert torch.equal(a, b)


# ---- what is remembered between fragments ----


def encoded(residual, value, start, stop):
    before, after = residual.before_and_after(start, stop)
    after.fill_(value)
    return None if before is None else before.tolist()


def test_a_part_that_leaves_twice_goes_on_from_what_was_left():
    residual = Residual(4)
    residual.branch()
    assert encoded(residual, 1.0, 0, 2) == [0, 0]
    residual.carry_forward(0, 2)
    assert encoded(residual, 2.0, 0, 2) == [1, 1]
    residual.carry_forward(0, 2)
    assert residual.state() == {}, "for others the step has not happened"
    assert encoded(residual, 3.0, 0, 4) == [2, 2, 0, 0]
    residual.commit()
    assert residual.state()["memory"].tolist() == [3, 3, 3, 3]


def test_a_step_that_does_not_count_leaves_no_trace():
    residual = Residual(2)
    encoded(residual, 5.0, 0, 2)
    residual.commit()
    residual.branch()
    encoded(residual, 6.0, 0, 1)
    residual.carry_forward(0, 1)
    assert residual.state()["memory"].tolist() == [5, 5]
    residual.rollback()
    assert encoded(residual, 7.0, 0, 2) == [5, 5]


def test_a_step_without_an_end_of_its_own_counts_too():
    residual = Residual(2)
    residual.branch()
    encoded(residual, 6.0, 0, 1)
    residual.carry_forward(0, 1)
    residual.commit_unchanged()
    assert residual.state()["memory"].tolist() == [6, 0]


# ---- fragments with a codec ----


FEEDING_BACK = ({"kind": "sign"}, {"kind": "topk", "keep": 0.1, "momentum": None}, {"kind": "int4", "block": 64})


@pytest.mark.parametrize("settings", FEEDING_BACK, ids=lambda it: it["kind"])
def test_what_a_fragment_loses_comes_with_the_next(settings):
    """All that left, and what is still remembered, is all that was given."""
    torch.manual_seed(0)
    parameters = [torch.randn(40, 25), torch.randn(30)]
    like = LaneSum(parameters, [], [], *torch.zeros(2, dtype=torch.float64))
    layout = EncodedLayout(FlatLayout(like), settings)
    residuals = LaneResiduals()
    residuals.start_empty(residuals.enter(0, [0]), layout.residual_floats, lost=False)
    residuals.begin_step()
    part = residuals.fragment(0, layout.residual_floats)
    allreduce = EncodedFragmentAllReduce(layout, {0: [0]}, 0, mesh=None, residuals=part, device=torch.device("cpu"))
    left = [torch.zeros_like(p) for p in parameters]
    for step in range(5):
        sums = allreduce.begin_step()
        sums.push_lane(0, LaneSum([p.clone() for p in parameters], [], [], torch.zeros((), dtype=torch.float64)))
        total = allreduce.run(step, sums).total
        left = [a + b for a, b in zip(left, total.grads, strict=True)]
    remembered = residuals.for_lane(0).before_and_after()[0].view(torch.uint8)[: layout.grads_bytes]
    rests = [place.view_in(remembered) for place in layout.layout.grads]
    for there, rest, whole in zip(left, rests, parameters, strict=True):
        torch.testing.assert_close(there + rest, 5 * whole)
    allreduce.close()


def test_a_lane_that_has_nothing_to_send_keeps_its_residual():
    torch.manual_seed(0)
    parameters = [torch.randn(40, 25)]
    layout = EncodedLayout(
        FlatLayout(LaneSum(parameters, [], [], *torch.zeros(2, dtype=torch.float64))), {"kind": "sign"}
    )
    residuals = LaneResiduals()
    residuals.start_empty(residuals.enter(0, [0, 1]), layout.residual_floats, lost=False)
    residuals.begin_step()
    part = residuals.fragment(0, layout.residual_floats)
    allreduce = EncodedFragmentAllReduce(layout, {0: [0, 1]}, 0, mesh=None, residuals=part, device=torch.device("cpu"))
    kept = []
    for step, lanes in enumerate([[0], [0, 1], [0]]):
        sums = allreduce.begin_step()
        for lane in lanes:
            sums.push_lane(lane, LaneSum([p.clone() for p in parameters], [], [], torch.zeros((), dtype=torch.float64)))
        allreduce.run(step, sums)
        kept.append(residuals.for_lane(1).before_and_after()[0].clone())
    assert not kept[0].any()
    assert kept[1].any()
    assert torch.equal(kept[1], kept[2])
    allreduce.close()


@pytest.mark.parametrize("far", [0, 1])
def test_what_would_be_sent_without_a_codec_is_known(far):
    """Of fragments too: receipts tell what a codec saves."""
    parameters = [torch.randn(40, 25)]
    layout = EncodedLayout(
        FlatLayout(LaneSum(parameters, [], [], *torch.zeros(2, dtype=torch.float64))), {"kind": "sign"}
    )
    mesh = SimpleNamespace(remote_links=[SimpleNamespace(seat=1)] * far)
    allreduce = EncodedFragmentAllReduce(
        layout, {0: [0], 1: [1]}, 0, mesh=mesh, residuals=None, device=torch.device("cpu")
    )
    assert allreduce.plain_bytes >= 4000 * far > layout.sent_bytes * far or allreduce.plain_bytes == far == 0
    allreduce.close()


# ---- lanes of one worker ----


class AliasedBufferModel(nn.Module):
    """With a buffer that may be a view of a parameter: then the parameter's memory cannot be another's."""

    def __init__(self, shared):
        super().__init__()
        self.layer = nn.Linear(4, 3)
        with torch.no_grad():
            self.layer.weight.fill_(0.5), self.layer.bias.fill_(0.1)
        self.register_buffer("seen", self.layer.weight.detach() if shared else torch.zeros(1))

    def forward(self, x):
        return self.layer(x)


def local_replica(shared):
    model = AliasedBufferModel(shared)
    replica = Replica(
        model, torch.optim.AdamW(model.parameters(), lr=0.1), lambda model, x: model(x).square().mean(), seed=0
    )
    return LocalReplica(replica, outer=OuterOptimizer, next_sync=lambda step: 8)


def trained(shared, lanes):
    """In segments of three steps; what each lane did, then another period from where it began."""
    replica, found = local_replica(shared), []
    for _ in range(2):
        replica.begin_step()
        for segment in (range(3), range(3, 6)):
            for lane in lanes:
                for step in segment:
                    replica.inner_step(step, lane, torch.full((2, 4), 1.0 + lane + step), size=2)
        found.append({lane: [t.clone() for t in replica.pseudo_gradient(lane, 4).grads] for lane in lanes})
        replica.undo_step()
    return replica, found


@pytest.mark.parametrize("shared", [False, True])
def test_lanes_of_one_worker_do_not_touch_each_other(shared):
    replica, both = trained(shared, [0, 1])
    for lane in (0, 1):
        _, alone = trained(shared, [lane])
        for period, its in zip(both, alone, strict=True):
            assert all(map(torch.equal, period[lane], its[lane]))
    assert all(map(torch.equal, replica.replica.trainable, local_replica(shared).replica.trainable)), "undone"
    assert torch.equal(replica.replica.model.seen, replica.replica.trainable[0]) is shared


def test_a_lane_that_is_put_away_is_not_copied():
    replica = local_replica(shared=False)
    replica.begin_step()
    places = dict[int, set[int]]()
    for step, lane in [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0)]:
        replica.inner_step(step, lane, torch.ones(2, 4), size=2)
        places.setdefault(lane, set()).add(replica.replica.trainable[0].data_ptr())
    assert [len(its) for its in places.values()] == [1, 1]
    assert places[0] != places[1]


# ---- what lanes agree on ----

RATE, DECAY, OUTER = 0.1, 0.9, {"lr": 0.7, "momentum": 0.5}
SIZES, LATE = (2, 3), 6
"""Samples of each lane in a step; the second lane has none before this step."""
SEGMENTS, FRAGMENTS = SyncSchedule(4, 3).segments(0, 12, fragments=2), ([0], [1])


def squares(model, x):
    return model(x).square().mean()


def scheduled(loss=squares):
    torch.manual_seed(0)
    model = nn.Linear(4, 3).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, DECAY)
    outer = partial(OuterOptimizer, **OUTER)
    replica = Replica(model, optimizer, loss, seed=0, schedule=schedule)
    return LocalReplica(replica, outer=outer, next_sync=lambda step: step + 12)


def batch_of(step, lane):
    return torch.full((SIZES[lane], 4), 1.0 + lane - 0.1 * step, dtype=torch.float64)


def has_samples(step, lane):
    return lane == 0 or step >= LATE


def total_of(stop):
    return sum(SIZES[lane] for step in range(stop) for lane in (0, 1) if has_samples(step, lane))


def run_replica(replica):
    """As a worker does that carries both lanes; what the lanes have after every segment."""
    seen, coming = [], []
    replica.begin_step()
    for segment in SEGMENTS:
        for lane in (0, 1):
            for step in range(segment.start, segment.stop):
                if has_samples(step, lane):
                    replica.inner_step(step, lane, batch_of(step, lane), size=SIZES[lane])
                else:
                    replica.skip_inner_step(step, lane)
        if segment.arriving_fragment is not None:
            replica.apply_fragment(FRAGMENTS[segment.arriving_fragment], coming)
        if segment.leaving_fragment is not None:
            left = [
                replica.send_fragment(lane, FRAGMENTS[segment.leaving_fragment], total_of(segment.stop))
                for lane in (0, 1)
            ]
            coming = [sum(parts) for parts in zip(*(one.grads for one in left if one), strict=True)]
        for lane in (0, 1):
            replica.switch_to_lane(lane)
            seen.append([p.detach().clone() for p in replica.replica.trainable])
    replica.apply(0, add(*(replica.pseudo_gradient(lane, total_of(12)) for lane in (0, 1))))
    return [*seen, [p.detach().clone() for p in replica.replica.trainable]]


def gradients(weight, bias, x):
    """Of the mean of squares, by hand."""
    outputs = x @ weight.T + bias
    return 2 / outputs.numel() * outputs.T @ x, 2 / outputs.numel() * outputs.sum(0)


def expected_by_hand(start):
    """The same from the words of the documentation."""
    common, velocity = [t.clone() for t in start], [torch.zeros_like(t) for t in start]
    lanes, seen, left = [[t.clone() for t in start] for _ in (0, 1)], [], {}

    def mean_of(i, stop):
        done = [sum(SIZES[lane] * has_samples(step, lane) for step in range(stop)) for lane in (0, 1)]
        return sum(done[lane] / sum(done) * (common[i] - lanes[lane][i]) for lane in (0, 1))

    def agree(i, mean):
        velocity[i] = OUTER["momentum"] * velocity[i] + mean
        common[i] = common[i] - OUTER["lr"] * (mean + OUTER["momentum"] * velocity[i])

    for segment in SEGMENTS:
        for lane in (0, 1):
            for step in range(segment.start, segment.stop):
                weight, bias = lanes[lane]
                grads = gradients(weight, bias, batch_of(step, lane)) if has_samples(step, lane) else (0, 0)
                for value, grad in zip(lanes[lane], grads, strict=True):
                    value -= RATE * DECAY**step * grad
        if (i := segment.arriving_fragment) is not None:
            mean, values = left.pop(i)
            agree(i, mean)
            for lane in (0, 1):
                lanes[lane][i] = common[i] + (lanes[lane][i] - values[lane])
        if (i := segment.leaving_fragment) is not None:
            left[i] = mean_of(i, segment.stop), [lanes[lane][i].clone() for lane in (0, 1)]
        seen += [[t.clone() for t in lanes[lane]] for lane in (0, 1)]
    for i in (0, 1):
        agree(i, mean_of(i, 12))
    return [*seen, common]


def test_what_lanes_agree_on_is_what_the_words_say():
    """After every segment and at the end, for two lanes of other sizes, one of which has no samples at first."""
    replica = scheduled()
    start = [p.detach().clone() for p in replica.replica.trainable]
    torch.testing.assert_close(run_replica(replica), expected_by_hand(start))
    assert replica.replica.lr == pytest.approx(RATE * DECAY**12)


def test_a_loss_that_is_divided_by_nothing_does_not_count():
    def masked(model, x):
        return (model(x).square() * (x[:, :1] > 0)).sum(), (x > 0).sum()

    replica = scheduled(masked)
    replica.begin_step()
    replica.inner_step(0, 0, torch.ones(2, 4, dtype=torch.float64), size=2)
    before, change = [p.detach().clone() for p in replica.replica.trainable], replica.pseudo_gradient(0, 2)
    replica.inner_step(1, 0, -torch.ones(2, 4, dtype=torch.float64), size=2)
    assert all(map(torch.equal, before, replica.replica.trainable))
    assert all(map(torch.equal, change.grads, replica.pseudo_gradient(0, 2).grads))
    assert replica.replica.lr == pytest.approx(RATE * DECAY**2)
