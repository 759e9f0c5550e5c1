"""Nobody is starved, whatever the policy prefers: histories of a queue that a policy divides, with daemons that die."""

import random

import pytest

from shoal.plan.queueing import order
from shoal.plan.queueing.elastic_shares import ElasticShares
from shoal.plan.queueing.entry import JobNeeds
from shoal.plan.queueing.shares import CoreCapacity, FirstComeFirstServed
from tests.plan.queueing.simulated_queue import TICK_S, SimulatedQueue

POLICIES = pytest.mark.parametrize("make_policy", [ElasticShares, FirstComeFirstServed])
NEEDS = (
    JobNeeds(), JobNeeds(most=2, lanes=2), JobNeeds(least=2, most=2), JobNeeds(least=2, most=4, gang=2, lanes=4),
    JobNeeds(cores=2), JobNeeds(memory_bytes=4), JobNeeds(least=9, most=9),
)  # fmt: skip
NEVER = (JobNeeds(memory_bytes=50), JobNeeds(cores=3, most=1), JobNeeds(least=3, most=3, memory_bytes=9))


@POLICIES
@pytest.mark.parametrize("cores", [1, 2])
@pytest.mark.parametrize("restart_s", [0, 1800])
def test_a_long_job_does_not_wait_for_thousands_of_short_ones_of_another_user(make_policy, cores, restart_s):
    queue = SimulatedQueue(CoreCapacity({"here": cores}), make_policy)
    for _ in range(2999):
        queue.submit(10.0, user="ann")
    bob = queue.submit(3600.0, user="bob")
    while bob not in queue.started_s:
        queue.tick()
        if restart_s and queue.now_s % restart_s == 0:
            queue.start_daemon()
    assert queue.started_s[bob] <= (order.MAX_OVERTAKEN + 1) * TICK_S


@pytest.mark.parametrize("cores", [1, 2])
def test_what_was_overtaken_often_goes_first_also_after_daemons_that_die(cores):
    """One job of the same user, too: neither turns nor patience, which is lost with each daemon, would help it."""
    queue = SimulatedQueue(CoreCapacity({"here": cores}))
    last = queue.submit(1000.0, user="ann")
    while queue.entries[last].state != "finished":
        for _ in range(2 * cores):
            queue.submit(10.0, user="ann")
        queue.tick()
        queue.start_daemon()
        assert queue.now_s < 1000.0 + 40 * TICK_S


@POLICIES
def test_no_stream_of_urgent_jobs_starves_another(make_policy):
    queue = SimulatedQueue(CoreCapacity({"here": 1}), make_policy)
    first, second = queue.submit(10.0, priority=-5), queue.submit(10.0, priority=-7)
    for turn in range(60):
        queue.submit(10.0, priority=1 + turn % 3)
        queue.tick()
    assert {queue.entries[first].state, queue.entries[second].state} == {"finished"}


@POLICIES
def test_a_user_with_many_jobs_that_wait_for_long_does_not_keep_out_another(make_policy):
    queue = SimulatedQueue(CoreCapacity({"here": 2}), make_policy)
    for _ in range(100):
        queue.submit(30.0, user="many")
    for _ in range(20):
        queue.tick()
    few = queue.submit(30.0, user="few")
    queue.tick()
    queue.tick()
    if make_policy is ElasticShares:
        assert few in queue.started_s, "one of the jobs of `many` makes room"
    queue.tick()
    assert few in queue.started_s, "it is the next"


def test_jobs_at_their_quota_take_no_place_of_those_that_were_overtaken():
    queue = SimulatedQueue(CoreCapacity({"here": 2}, {"ann": 1}))
    for _ in range(30):
        queue.submit(10**6, user="ann")
    queue.tick()
    assert queue.entries[1].state == "running"
    for number in range(2, 31):
        queue.put(queue.entries[number].model_copy(update={"overtaken": order.MAX_OVERTAKEN}))
    bob = queue.submit(1000.0, user="bob", priority=-1)
    while bob not in queue.started_s:
        queue.submit(10.0, user="eve", priority=1)
        queue.tick()
        assert queue.now_s < 40 * TICK_S


def check_history(seed):
    """Random jobs, machines, quotas and ends of daemons; then urgent jobs for ever: all old ones end."""
    chance = random.Random(seed)
    nodes = chance.choice([{"a": 1}, {"a": 2}, {"a": 2, "b": 1}, {"a": 2, "b": 2, "c": 2}])
    memory = {name: 10 for name in nodes if chance.random() < 0.8}
    quotas = {"ann": chance.randint(1, 2)} if chance.random() < 0.3 else {}
    queue = SimulatedQueue(CoreCapacity(nodes, quotas, memory))
    for _ in range(chance.randint(1, 25)):
        what = chance.random()
        if what < 0.6:
            needs = chance.choice(NEEDS if what < 0.5 else NEVER)
            user, priority = chance.choice(["ann", "bob", "eve"]), chance.randint(-1, 1)
            queue.submit(chance.choice([10.0, 30.0, 200.0]), user=user, priority=priority, needs=needs)
        elif what < 0.9:
            queue.tick()
        else:
            end_daemon(queue, chance)
    old = {
        entry.id
        for entry in order.window(queue.entries.values(), CoreCapacity(nodes, {}, memory)).entries
        if entry.needs.least * entry.needs.cores_per_worker <= quotas.get(entry.user, 99)
    }
    rounds = 0
    while any(not queue.entries[number].has_ended for number in old):
        for _ in range(2):
            queue.submit(10.0, user=chance.choice(["bob", "urgent"]), priority=2)
        queue.tick()
        if chance.random() < 0.02:
            end_daemon(queue, chance)
        rounds += 1
        assert rounds < 100 + 50 * len(old), (seed, [queue.entries[n] for n in old if not queue.entries[n].has_ended])


def end_daemon(queue, chance):
    if chance.random() < 0.5:
        queue.end_daemon()
    queue.start_daemon()


def test_no_history_with_the_elastic_policy_starves_a_job():
    for seed in range(10):
        check_history(seed)


@pytest.mark.long
def test_no_history_of_many_with_the_elastic_policy_starves_a_job():
    for seed in range(10, 400):
        check_history(seed)
