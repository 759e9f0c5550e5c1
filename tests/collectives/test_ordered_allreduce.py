"""Whoever carries which lane, over memory or over sockets: the sum has the bits that one worker gets."""

import pytest
import torch

from shoal.collectives import allreduce_plan
from shoal.collectives.outcome import Committed, Discarded
from tests.collectives.worker_processes import (
    RecordingReplica,
    WorkerProcesses,
    assert_same_bits,
    lane_sum,
    single_worker_total,
)

STEPS = 4


def lanes_by_seat(*carried):
    return dict(enumerate(carried))


CARRYING = {
    "two": (lanes_by_seat([0, 1], [2, 3]), 4),
    "two, uneven": (lanes_by_seat([0, 1, 2], [3]), 4),
    "two, scattered": (lanes_by_seat([0, 3, 4], [1, 2, 5, 6]), 7),
    "three": (lanes_by_seat([0, 1], [2, 3], [4]), 5),
    "three, unaligned": (lanes_by_seat([0], [1, 2, 3], [4, 5, 6]), 7),
    "five": (lanes_by_seat([0, 1, 2], [3, 4], [5, 6, 7], [8], [9, 10]), 11),
    "seats of an older run": ({3: [0, 1, 2], 17: [3], 900: [4, 5]}, 6),
}
PLACES = {"one host": (), "all apart": (0, 1, 2, 3, 4, 3, 17, 900), "mixed": (0, 3)}


def worker(make, *, phases):
    """Commits a few steps and returns the totals with what commit said."""

    def act(me):
        allreduce_plan.ONE_PHASE_MAX_BYTES = 0 if phases == 2 else 1 << 40
        assert me.join() == ""
        replica, said = RecordingReplica(make(0, 0)), []
        for step in range(STEPS):
            outcome = me.sync.commit(replica, step, me.sums(make, step), halt=step == 2 and me.seat == min(me.carries))
            assert isinstance(outcome, Committed), outcome
            said.append((outcome.loss.item(), outcome.halt, outcome.bytes_sent))
        me.sync.close()
        return replica.totals, said

    return act


def check_allreduce(carrying, place, make, *, expected=None, phases=2):
    """What each worker returns; their totals have the bits that one worker gets."""
    carries, lanes = CARRYING[carrying]
    with WorkerProcesses(carries, lanes, remote_seats=PLACES[place]) as workers:
        results = list(workers.run(worker(make, phases=phases)).values())
    for totals, _ in results:
        for step, total in enumerate(totals):
            assert_same_bits(total, single_worker_total(expected or make, lanes, step))
    return results


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("carrying", CARRYING)
def test_the_bits_do_not_depend_on_who_carries_what(carrying, place):
    for _, said in check_allreduce(carrying, place, lane_sum):
        assert [halt for _, halt, _ in said] == [False, False, True, False]
        assert all(sent > 0 for _, _, sent in said)


@pytest.mark.parametrize("place", PLACES)
def test_little_is_added_in_one_phase(place):
    check_allreduce("five", place, lane_sum, phases=1)


def with_empty_lanes(step, lane):
    """Whole workers, whole subtrees and single lanes without samples; the lowest lane too."""
    empty = {0: {1, 4}, 1: {0, 1}, 2: {3, 4, 5, 6}, 3: {0, 1, 2, 3, 4, 5}}[step]
    return None if lane in empty else lane_sum(step, lane, counted=True)


def large(step, lane):
    """More than the kernel takes at once, and rounded when added."""
    made = lane_sum(step, lane, [(5,)])
    made.grads.append(torch.arange(2_500_001) * (0.1 + lane) + step)
    return made


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("carrying", ["two, scattered", "three, unaligned"])
def test_lanes_without_samples_add_nothing_and_counts_travel(carrying, place):
    for totals, _ in check_allreduce(carrying, place, with_empty_lanes_but_blank, expected=with_empty_lanes):
        assert all(total[2] is not None for total in totals)


def with_empty_lanes_but_blank(step, lane):
    return with_empty_lanes(step, lane) if (step, lane) != (0, 0) else lane_sum(0, 0, counted=True)


@pytest.mark.parametrize(("carrying", "place"), [("two", "all apart"), ("three", "mixed"), ("three", "one host")])
def test_megabytes_both_ways_at_once(carrying, place):
    def act(me):
        assert me.join() == ""
        replica = RecordingReplica(large(0, 0))
        for step in range(2):
            outcome = me.sync.commit(replica, step, me.sums(large, step))
            assert isinstance(outcome, Committed), outcome
        for total in replica.totals:
            assert_same_bits(total, single_worker_total(large, lanes, total[0]))
        return len(replica.totals)

    carries, lanes = CARRYING[carrying]
    with WorkerProcesses(carries, lanes, remote_seats=PLACES[place]) as workers:
        assert set(workers.run(act).values()) == {2}


def test_no_samples_at_all():
    def act(me):
        assert me.join() == ""
        return me.sync.commit(RecordingReplica(lane_sum(0, 0)), 0, me.sums(lambda step, lane: None, 0))

    carries, lanes = CARRYING["three"]
    with WorkerProcesses(carries, lanes) as workers:
        assert set(workers.run(act).values()) == {Discarded("no lane had samples")}


@pytest.mark.parametrize("place", PLACES)
def test_gathering(place):
    def act(me):
        assert me.join() == ""
        first = me.group.gather(7, b"from %d" % me.seat)
        replica = RecordingReplica(lane_sum(0, 0))
        me.sync.commit(replica, 0, me.sums(lane_sum, 0))
        large = me.group.gather(8, bytes([me.seat]) * (3_000_000 * me.seat))
        return (
            first,
            {seat: (len(content), content.count(seat)) for seat, content in large.items()},
            len(replica.totals),
        )

    carries, lanes = CARRYING["three"]
    with WorkerProcesses(carries, lanes, remote_seats=PLACES[place]) as workers:
        for first, large, committed in workers.run(act).values():
            assert first == {0: b"from 0", 1: b"from 1", 2: b"from 2"}
            assert large == {0: (0, 0), 1: (3_000_000, 3_000_000), 2: (6_000_000, 6_000_000)}
            assert committed == 1


def test_views_follow_each_other_with_other_members_and_lanes():
    deals = {
        1: lanes_by_seat([0, 1], [2, 3], [4, 5]),
        2: {0: [0, 1, 2], 2: [3, 4, 5]},
        3: lanes_by_seat([5], [1, 2, 3], [0, 4]),
    }
    deals[4] = {1: list(range(6))}

    def act(me):
        replica, step = RecordingReplica(lane_sum(0, 0)), 0
        for number, carries in deals.items():
            for _ in range(2):
                if me.seat in carries:
                    if step % 2 == 0:
                        assert me.join(number, carries) == ""
                    outcome = me.sync.commit(replica, step, me.sums(lane_sum, step, carries))
                    assert isinstance(outcome, Committed), outcome
                step += 1
        return replica.totals

    with WorkerProcesses(deals[1], 6) as workers:
        results = workers.run(act)
    assert [len(totals) for totals in results.values()] == [6, 6, 6]
    for totals in results.values():
        for total in totals:
            assert_same_bits(total, single_worker_total(lane_sum, 6, total[0]))


def test_models_of_other_shapes_do_not_meet():
    def act(me):
        assert me.join() == ""
        make = lambda step, lane: lane_sum(step, lane, [(5 + me.seat,)])  # noqa: E731
        return me.sync.commit(RecordingReplica(make(0, 0)), 0, me.sums(make, 0))

    with WorkerProcesses(*CARRYING["two"]) as workers:
        for outcome in workers.run(act).values():
            assert isinstance(outcome, Discarded)
            assert "other shapes" in outcome.why or "was lost" in outcome.why


def test_gradients_of_another_kind_than_the_model_are_an_error_and_not_rounded():
    def act(me):
        assert me.join() == ""
        template = lane_sum(0, 0, more_kinds=False)
        template.grads[0] = template.grads[0].half()
        with pytest.raises(ValueError, match="not of the kind"):
            me.sync.commit(RecordingReplica(template), 0, me.sums(lambda s, n: lane_sum(s, n, more_kinds=False), 0))
        return True

    with WorkerProcesses(*CARRYING["two"]) as workers:
        assert all(workers.run(act).values())


def test_totals_have_the_strides_that_torch_gives_gradients():
    def act(me):
        assert me.join() == ""
        seen = []
        replica = RecordingReplica(lane_sum(0, 0))
        replica.apply = lambda step, total: (
            seen.extend((g.stride(), g.data_ptr() % 64) for g in total.grads) or total.loss
        )
        me.sync.commit(replica, 0, me.sums(lane_sum, 0))
        return seen

    with WorkerProcesses(*CARRYING["two"]) as workers:
        for seen in workers.run(act).values():
            assert seen == [(g.stride(), 0) for g in lane_sum(0, 0).grads]
    assert lane_sum(0, 0).grads[-1].is_contiguous(memory_format=torch.channels_last)
