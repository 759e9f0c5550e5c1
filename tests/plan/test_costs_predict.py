"""What a choice costs: numbers worked out by hand, the bytes of the real exchange, and what must never turn round."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.collectives import allreduce_plan, overlap
from shoal.plan import lane_assignment
from shoal.plan.costs import traffic
from shoal.plan.costs.model import HostResources, LaneTime, NetworkLink, RunChoice
from shoal.plan.costs.predict import predict
from shoal.plan.costs.worker_layout import WorkerLayout, lay_out_workers, workers_per_host
from tests.plan.cost_model_cases import (
    CODECS,
    FAST_LINK,
    GB,
    HOST,
    LARGE_MODEL,
    MB,
    SLOW_LINK,
    TINY_MODEL,
    link_of_mbit,
    machine,
)

TWO_HOSTS = RunChoice(workers=2, hosts=2)


def test_one_worker_computes_and_applies():
    it = predict(RunChoice(), LARGE_MODEL, machine(), FAST_LINK)
    adding = 7 * 20 * MB / (4 * GB)
    assert it.compute_s == pytest.approx(8 * 0.030 + adding)
    assert (it.apply_s, it.exchange_s, it.encode_s, it.sent_bytes) == (0.005, 0, 0, 0)
    assert it.memory_bytes == 540 * MB, "with two sums more than a step of two lanes has"
    assert it.epoch_s == 100 * it.step_s


def test_making_batches_takes_its_time_with_every_lane():
    longer = replace(LARGE_MODEL, rest_s=0.002)
    one, two = (predict(RunChoice(workers=n), longer, machine(), FAST_LINK).compute_s for n in (1, 2))
    assert one == pytest.approx(8 * 0.002 + predict(RunChoice(), LARGE_MODEL, machine(), FAST_LINK).compute_s)
    assert two == pytest.approx(4 * 0.002 + predict(RunChoice(workers=2), LARGE_MODEL, machine(), FAST_LINK).compute_s)


def test_two_workers_on_two_hosts_send_their_partial_and_hide_what_backward_allows():
    it = predict(TWO_HOSTS, LARGE_MODEL, machine(HOST, HOST), SLOW_LINK)
    wire = 0.2e-3 + 20 * MB / 12.5e6
    assert it.sent_bytes == 20 * MB
    assert it.hidden_s == pytest.approx(0.020), "no longer than backward of the last lane"
    assert it.exchange_s == pytest.approx(wire - 0.020 + 3 * 20 * MB / (4 * GB) + 0.5e-3)


def test_on_one_host_nothing_is_sent_and_the_link_does_not_matter():
    slow, fast = (predict(RunChoice(workers=4), LARGE_MODEL, machine(), link) for link in (SLOW_LINK, FAST_LINK))
    assert slow == fast
    assert slow.sent_bytes == 0
    assert 0 < slow.exchange_s < 0.05


def test_workers_share_the_cores_of_their_host():
    alone, crowded = (
        predict(RunChoice(workers=8), LARGE_MODEL, machine(HostResources(n, 16 * GB)), FAST_LINK) for n in (8, 4)
    )
    assert crowded.compute_s == pytest.approx(2 * alone.compute_s)


def test_busy_cores_slow_each_other_down():
    """Each doubling of them by the same factor."""
    crowded = replace(machine(), crowding=1.2)
    for workers, factor in ((1, 1), (2, 1.2), (4, 1.2**2), (8, 1.2**2)):
        idle, busy = (
            predict(RunChoice(workers=workers), LARGE_MODEL, there, FAST_LINK) for there in (machine(), crowded)
        )
        assert busy.compute_s == pytest.approx(factor * idle.compute_s)


def test_threads_are_taken_as_they_were_measured():
    both = replace(LARGE_MODEL, times={1: LARGE_MODEL.times[1], 2: LaneTime(0.006, 0.012, 0.003)})
    one, two = (predict(RunChoice(workers=2, threads=n), both, machine(), FAST_LINK) for n in (1, 2))
    assert two.compute_s < one.compute_s
    crowded = predict(RunChoice(workers=4, threads=2), both, machine(), FAST_LINK)
    assert crowded.compute_s > predict(RunChoice(workers=4), both, machine(), FAST_LINK).compute_s


def test_a_slower_host_carries_less():
    hosts = machine(HOST, HostResources(4, 16 * GB, speed=1 / 3))
    made = lay_out_workers(TWO_HOSTS, LARGE_MODEL, hosts)
    assert made.lane_counts == {0: 6, 1: 2}
    equal = predict(TWO_HOSTS, LARGE_MODEL, machine(HOST, HOST), FAST_LINK)
    assert equal.compute_s < predict(TWO_HOSTS, LARGE_MODEL, hosts, FAST_LINK).compute_s < 2 * equal.compute_s


def test_a_hopeless_host_is_left_out():
    made = lay_out_workers(TWO_HOSTS, LARGE_MODEL, machine(HOST, HostResources(1, 16 * GB, speed=0.01)))
    assert made.lane_counts == {0: 8}


def test_encoded_lanes_all_go_to_everybody():
    it = predict(replace(TWO_HOSTS, codec="bf16"), LARGE_MODEL, machine(HOST, HOST), SLOW_LINK)
    assert it.sent_bytes == 4 * 10 * MB, "four lanes of half the bytes"
    assert it.encode_s == pytest.approx(4 * (0.002 + 20 * MB / (4 * GB)) + 8 * 0.002)


def test_servers_get_pushes_and_give_values_back():
    lanes, served = (replace(TWO_HOSTS, **change) for change in ({}, {"sync": "server", "servers": 1}))
    it = predict(served, LARGE_MODEL, machine(HOST, HOST), SLOW_LINK)
    assert it.sent_bytes == 20 * MB, "of the worker that is not with the servers"
    assert 20 * MB / 12.5e6 < it.exchange_s < 2 * 20 * MB / 12.5e6, "chunk by chunk, both ways at once"
    assert it.exchange_s > predict(lanes, LARGE_MODEL, machine(HOST, HOST), SLOW_LINK).exchange_s


def test_stale_lanes_push_and_pull_one_by_one():
    exact, stale = (
        predict(replace(TWO_HOSTS, sync="server", servers=1, staleness=s), LARGE_MODEL, machine(HOST, HOST), SLOW_LINK)
        for s in (0, 4)
    )
    assert stale.sent_bytes == 4 * exact.sent_bytes


def test_those_who_never_wait_are_not_held_up_by_the_slowest():
    there = machine(HostResources(1, 16 * GB), HostResources(1, 16 * GB, speed=0.25))
    stale, exact, free = (
        predict(replace(TWO_HOSTS, sync="server", servers=1, staleness=s), LARGE_MODEL, there, FAST_LINK)
        for s in (4, 0, math.inf)
    )
    assert stale.compute_s == pytest.approx(7 * 0.030), "in the long run it waits"
    assert exact.compute_s > stale.compute_s, "it adds its lanes up"
    assert free.compute_s == pytest.approx(8 * 0.030 / 1.25)
    assert free.compute_s < stale.compute_s


def test_workers_of_one_host_may_differ():
    there = machine(replace(HOST, each=(1.0, 0.25)))
    slow, equal = (predict(RunChoice(workers=2), LARGE_MODEL, one, FAST_LINK) for one in (there, machine()))
    assert slow.compute_s == pytest.approx(7 * 0.030, rel=0.1)
    assert equal.compute_s == pytest.approx(4 * 0.030, rel=0.15)


def test_what_others_brought_is_neither_more_nor_less():
    there = machine(HOST, HostResources(3, 16 * GB, brought=3))
    assert workers_per_host(RunChoice(workers=4, hosts=2), there) == [1, 3]
    assert workers_per_host(RunChoice(workers=7, hosts=2), there) == [4, 3]


def test_local_steps_exchange_once_in_a_while_and_keep_a_copy_per_lane():
    lanes = predict(TWO_HOSTS, LARGE_MODEL, machine(HOST, HOST), SLOW_LINK)
    local = predict(replace(TWO_HOSTS, sync="local", every=32), LARGE_MODEL, machine(HOST, HOST), SLOW_LINK)
    assert local.sent_bytes == lanes.sent_bytes / 32
    assert local.apply_s > 4 * 0.005, "every lane has an update of its own"
    assert local.memory_bytes > lanes.memory_bytes
    beside = predict(replace(TWO_HOSTS, sync="local", every=32, settle=4), LARGE_MODEL, machine(HOST, HOST), SLOW_LINK)
    assert beside.exchange_s < local.exchange_s / 2
    assert beside.hidden_s > 0


def test_of_one_large_fragment_less_is_hidden_than_of_equal_ones():
    """Of 1.6 s on the wire. A fragment has until the next one leaves: a quarter of a round of 16 steps, or half."""
    choice, there = replace(TWO_HOSTS, sync="local", every=16, settle=2), machine(HOST, HOST)
    wire = 0.2e-3 + 20 * MB / 12.5e6
    step = 4 * (0.030 + 0.005)
    equal, uneven = (
        predict(choice, replace(LARGE_MODEL, fragments=parts), there, SLOW_LINK)
        for parts in ((0.25,) * 4, (0.99, 0.01))
    )
    assert equal.hidden_s * 16 == pytest.approx(wire / 2), "all of every other round"
    assert uneven.hidden_s * 16 == pytest.approx((8 * step + 0.01 * wire) / 2)
    assert uneven.step_s > equal.step_s


def test_agreeing_costs_passes_over_all_parameters():
    choice = replace(TWO_HOSTS, sync="local", every=16, settle=2)
    slow = replace(machine(HOST, HOST), add_bytes_s=2 * GB)
    quick, slower = (predict(choice, LARGE_MODEL, there, SLOW_LINK) for there in (machine(HOST, HOST), slow))
    passes = 6 * 4 + 5 + 3  # of four lanes, of what is agreed on, and adding up
    assert slower.exchange_s - quick.exchange_s == pytest.approx(passes * 20 * MB / (4 * GB) / 16)


@pytest.mark.parametrize("changes", [{}, {"codec": "int8"}, {"sync": "local", "every": 8, "settle": 4}])
def test_what_travels_beside_computing_takes_time_of_the_core(changes):
    choice, there = replace(TWO_HOSTS, **changes), machine(HOST, HOST)
    free, costly = (
        predict(choice, LARGE_MODEL, replace(there, socket_bytes_s=speed), SLOW_LINK) for speed in (math.inf, 1 * GB)
    )
    moved = 2 * free.sent_bytes * free.hidden_s / (free.hidden_s + free.exchange_s)
    assert free.hidden_s == costly.hidden_s > 0
    assert moved / GB / 2 < costly.exchange_s - free.exchange_s < 2 * moved / GB
    alone = predict(RunChoice(workers=2), LARGE_MODEL, replace(there, socket_bytes_s=1.0), SLOW_LINK)
    assert alone.step_s < 1, "on one host there are no sockets"


NOES = [
    (RunChoice(workers=12), LARGE_MODEL, machine(), "the job has 8 lanes: of 12 workers 4 would have no lane"),
    (
        RunChoice(workers=2),
        replace(LARGE_MODEL, lanes=1),
        machine(),
        "the job has 1 lane: of 2 workers 1 would have no lane",
    ),
    (RunChoice(), LARGE_MODEL, machine(HostResources(4, 0.4 * GB)), "needs 0.5 GB, the machine has 0.4 GB"),
    (TWO_HOSTS, LARGE_MODEL, machine(HOST, HostResources(4, 0.4 * GB)), "needs 0.6 GB, the machine has 0.4 GB"),
    (
        RunChoice(),
        replace(LARGE_MODEL, worker_bytes=9 * GB),
        machine(HostResources(4, 4 * GB)),
        "needs 9.3 GB, the machine has 4.0 GB",
    ),
    (RunChoice(codec="int8"), replace(LARGE_MODEL, no_codecs="they are float64"), machine(), "they are float64"),
    (RunChoice(sync="server", servers=1), replace(LARGE_MODEL, no_servers="LBFGS"), machine(), "LBFGS"),
    (RunChoice(), replace(LARGE_MODEL, only_servers="sparse tables"), machine(), "sparse tables"),
    (
        RunChoice(threads=8),
        replace(LARGE_MODEL, times={8: LARGE_MODEL.times[1]}),
        machine(),
        "8 threads, but a machine has 4 cores",
    ),
]


@pytest.mark.parametrize(("choice", "measured", "there", "why"), NOES, ids=[row[3] for row in NOES])
def test_what_cannot_be_is_refused_with_a_sentence(choice, measured, there, why):
    it = predict(choice, measured, there, FAST_LINK)
    assert it.refused == why
    assert it.step_s == 0


def test_more_copies_need_more_memory():
    needed = [
        predict(RunChoice(workers=2, sync="server", servers=n), LARGE_MODEL, machine(), FAST_LINK).memory_bytes
        for n in (1, 2)
    ]
    assert needed[0] < needed[1]
    remembers, forgets = (
        predict(RunChoice(workers=2, codec=codec), LARGE_MODEL, machine(), FAST_LINK).memory_bytes
        for codec in ("topk", "int8")
    )
    assert remembers > forgets + 200 * MB, "two of 20 MB for each of 8 lanes, for less that is sent"


# ---- the real exchange ----


class LayoutStub:
    """As much of a layout as the plan of an exchange looks at."""

    def __init__(self, size_bytes):
        self.size_bytes = size_bytes


@given(st.integers(2, 6), st.integers(2, 20), st.integers(1, 3), st.sampled_from([6400, 1_280_000, 12_800_000]))
def test_bytes_are_those_of_the_real_exchange(workers, lanes, hosts, size):
    lanes = max(lanes, workers)
    host = {seat: seat % hosts for seat in range(workers)}
    runs = lane_assignment.assign_evenly(lanes, range(workers))
    real = allreduce_plan.AllReducePlan.of(runs, lanes, LayoutStub(size))
    partials = {seat: len(nodes) for seat, nodes in real.nodes.items()}
    made = WorkerLayout(lanes, host, {s: len(r) for s, r in runs.items()}, partials, dict.fromkeys(range(workers), 1.0))
    phases = traffic.allreduce_phases(made, size)
    assert len(phases) == real.phases
    for seat in range(workers):
        far = [peer for peer in range(workers) if host[peer] != host[seat]]
        frames = 2 * 256 * len(far)
        assert sum(p.sent_bytes[seat] for p in phases) == pytest.approx(
            real.sent_bytes(seat, far), abs=frames + 0.01 * size
        )


def test_the_limits_are_those_of_the_exchange():
    assert traffic.LITTLE_BYTES == allreduce_plan.ONE_PHASE_MAX_BYTES
    assert traffic.BUCKET_BYTES == overlap.BUCKET_BYTES


@given(st.integers(1, 5), st.integers(2, 8))
def test_what_leaves_arrives(hosts, workers):
    host = {seat: seat % hosts for seat in range(workers)}
    ones = dict.fromkeys(range(workers), 1)
    for phase in traffic.allreduce_phases(WorkerLayout(workers, host, ones, ones, ones), 5 * MB):
        assert phase.egress_bytes.total() == phase.ingress_bytes.total() == phase.sent_bytes.total()


# ---- what must never turn round ----

SYNCS = [
    {},
    {"codec": "int8"},
    {"codec": "topk"},
    {"sync": "server", "servers": 1},
    {"sync": "server", "servers": 2, "codec": "bf16"},
    {"sync": "server", "servers": 2, "staleness": 4},
    {"sync": "server", "servers": 1, "staleness": math.inf},
    {"sync": "local", "every": 8},
    {"sync": "local", "every": 32, "settle": 4},
]
choices = st.builds(
    lambda hosts, more, how: RunChoice(workers=min(hosts + more, 8), hosts=hosts, **how),
    st.integers(1, 3),
    st.integers(0, 6),
    st.sampled_from(SYNCS),
)
speeds = st.floats(1e5, 1e10)
THREE = machine(HOST, HOST, HostResources(2, 16 * GB, speed=0.5))


@given(choices, speeds, speeds, st.floats(0, 0.1), st.floats(1, 100))
def test_a_faster_link_is_never_slower(choice, send, receive, latency, times):
    slow = predict(choice, LARGE_MODEL, THREE, NetworkLink(latency, send, receive))
    for better in (
        NetworkLink(latency, send * times, receive),
        NetworkLink(latency, send, receive * times),
        NetworkLink(latency / times, send, receive),
    ):
        assert predict(choice, LARGE_MODEL, THREE, better).step_s <= slow.step_s


@given(choices, speeds, st.integers(MB // 2, 10**8), st.integers(0, 10**8))
def test_more_to_exchange_is_never_faster(choice, speed, floats, more):
    """But for a trifle: `topk` sends as much of a few values more, and the last bucket is a smaller part of it."""
    some, more = (replace(LARGE_MODEL, shapes=((n,),), stretch_bytes=4 * n) for n in (floats, floats + more))
    link = NetworkLink(1e-3, speed, speed)
    less, most = (predict(choice, measured, THREE, link) for measured in (some, more))
    assert most.refused or less.step_s <= most.step_s * (1 + 1e-3)
    assert most.refused or less.sent_bytes <= most.sent_bytes
    assert less.memory_bytes <= most.memory_bytes


@given(choices, st.floats(1, 10))
def test_a_slower_lane_is_never_faster(choice, times):
    time = LARGE_MODEL.times[1]
    slower = replace(LARGE_MODEL, times={1: LaneTime(time.forward_s * times, time.backward_s, time.apply_s)})
    assert predict(choice, LARGE_MODEL, THREE, SLOW_LINK).step_s <= predict(choice, slower, THREE, SLOW_LINK).step_s * (
        1 + 1e-9
    )


@given(st.integers(1, 3), st.integers(1, 64), st.integers(1, 64), st.integers(1, 4), speeds)
def test_seldom_exchange_never_sends_or_waits_more(hosts, every, more, settle, speed):
    often, seldom = (
        predict(
            RunChoice(workers=hosts, hosts=hosts, sync="local", every=n, settle=settle),
            LARGE_MODEL,
            THREE,
            NetworkLink(0, speed, speed),
        )
        for n in (every, every + more)
    )
    assert seldom.sent_bytes <= often.sent_bytes
    assert seldom.exchange_s <= often.exchange_s * (1 + 1e-9)


@pytest.mark.parametrize("kind", ["fsdp", "tensor", "pipeline"])
@given(st.integers(2, 8), speeds)
def test_shards_need_less_of_each_and_a_faster_link_is_never_slower(kind, ways, speed):
    there, measured = machine(*[HOST] * 8), replace(LARGE_MODEL, worker_bytes=200 * MB)
    alone = predict(RunChoice(), measured, there, SLOW_LINK)
    slow, fast = (
        predict(RunChoice(workers=ways, hosts=ways, shard=kind), measured, there, NetworkLink(1e-4, s, s))
        for s in (speed, 2 * speed)
    )
    assert slow.memory_bytes < alone.memory_bytes
    assert 0 < fast.step_s <= slow.step_s
    assert slow.sent_bytes > 0 or kind != "fsdp", "of activations nothing is known"


@given(choices, speeds)
def test_nothing_is_negative_and_the_parts_are_the_step(choice, speed):
    for measured in (LARGE_MODEL, TINY_MODEL):
        it = predict(choice, measured, THREE, NetworkLink(1e-4, speed, speed))
        parts = (it.compute_s, it.encode_s, it.exchange_s, it.apply_s)
        assert min(*parts, it.hidden_s, it.sent_bytes) >= 0
        assert it.step_s == pytest.approx(sum(parts))
        assert it.memory_bytes > 0


@pytest.mark.parametrize("codec", CODECS)
def test_a_slow_enough_link_makes_every_codec_worth_it(codec):
    """With a lane per worker."""
    two = replace(LARGE_MODEL, lanes=2)
    plain, coded = (
        predict(replace(TWO_HOSTS, codec=name), two, machine(HOST, HOST), link_of_mbit(10)) for name in ("none", codec)
    )
    assert coded.sent_bytes < plain.sent_bytes
    assert coded.step_s < plain.step_s


def test_local_steps_with_a_codec_send_what_the_codec_makes_of_them():
    local = replace(TWO_HOSTS, sync="local", every=32, settle=4)
    there, model = machine(HOST, HOST), replace(LARGE_MODEL, lanes=2)
    plain, coded = (predict(replace(local, codec=codec), model, there, SLOW_LINK) for codec in ("none", "int8"))
    lanes = predict(replace(TWO_HOSTS, codec="int8"), model, there, SLOW_LINK)
    assert coded.sent_bytes == pytest.approx(lanes.sent_bytes / 32)
    assert coded.sent_bytes < plain.sent_bytes
    assert coded.encode_s == pytest.approx(lanes.encode_s / 32)
