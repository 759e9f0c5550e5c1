import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.plan.queueing import order
from shoal.plan.queueing.elastic_shares import ElasticShares
from shoal.plan.queueing.entry import JobNeeds, QueueEntry
from shoal.plan.queueing.shares import CoreCapacity, FirstComeFirstServed, JobFacts
from shoal.plan.queueing.speed import MIN_SECONDS, Measured, SpeedMeter

POLICIES = st.sampled_from([ElasticShares, FirstComeFirstServed])


@st.composite
def needs(draw):
    least = draw(st.integers(1, 4))
    most = least + draw(st.integers(0, 6))
    return JobNeeds(least=least, most=most, cores=draw(st.integers(1, 2)), lanes=most)


@settings(max_examples=60, deadline=None)
@given(POLICIES, st.lists(needs(), min_size=1, max_size=6), st.integers(1, 8), st.data())
def test_shares_keep_to_bounds_and_cores_and_all_jobs_end(make_policy, every, cores, data):
    policy, now = make_policy(), 0.0
    entries = {n: QueueEntry(id=n, needs=one, priority=data.draw(st.integers(0, 1))) for n, one in enumerate(every, 1)}
    while alive := [e for e in entries.values() if e.state in ("waiting", "running")]:
        now += 20.0
        running = [e for e in alive if e.state == "running"]
        ready = [e for e in alive if e.state == "waiting"]
        facts = {e.id: JobFacts(turn_s=20.0 if e in running else 0.0) for e in alive}
        shares = policy.divide(now, running, ready, cluster=CoreCapacity({"here": cores}), facts=facts)
        given_out = 0
        for entry in alive:
            share = shares.get(entry.id)
            workers = share.workers if share else 0
            if workers:
                assert entry.needs.least <= workers <= entry.needs.most
                given_out += min(workers * entry.needs.cores_per_worker, cores)
            state = "running" if workers else "waiting"
            entries[entry.id] = entry.model_copy(update={"state": state, "workers": workers})
        assert given_out <= cores
        running = [e for e in entries.values() if e.state == "running"]
        assert running, "the machine is idle while jobs wait"
        done = data.draw(st.sampled_from(running))
        entries[done.id] = done.model_copy(update={"state": "finished"})


def test_a_job_that_is_larger_than_the_machine_runs_alone():
    big, small = QueueEntry(id=1, needs=JobNeeds(least=4, most=4)), QueueEntry(id=2)
    for policy in (ElasticShares(), FirstComeFirstServed()):
        shares = policy.divide(
            0.0, [], [big, small], cluster=CoreCapacity({"here": 2}), facts={1: JobFacts(), 2: JobFacts()}
        )
        assert sorted(share.workers for share in shares.values()) in ([0, 4], [0, 1], [1])


def test_a_quota_bounds_the_cores_of_a_user():
    entries = [QueueEntry(id=n, user="ann" if n < 4 else "bob", needs=JobNeeds(most=4, lanes=4)) for n in range(1, 6)]
    facts = {n: JobFacts(speeds={1: 1.0, 2: 1.9, 4: 3.5}) for n in range(1, 6)}
    shares = ElasticShares().divide(0.0, [], entries, cluster=CoreCapacity({"here": 8}, {"ann": 2}), facts=facts)
    assert sum(shares[n].workers for n in (1, 2, 3)) <= 2
    assert sum(shares[n].workers for n in (4, 5)) == 6


def test_a_quota_holds_and_keeps_no_other_user_waiting_when_first_come_is_first_served():
    entries = [QueueEntry(id=n, user="ann" if n < 4 else "bob", needs=JobNeeds(least=2, most=2)) for n in range(1, 6)]
    facts = {n: JobFacts() for n in range(1, 6)}
    cluster = CoreCapacity({"here": 6}, {"ann": 3})
    shares = FirstComeFirstServed().divide(0.0, [], entries, cluster=cluster, facts=facts)
    assert [shares[n].workers for n in range(1, 6)] == [2, 0, 0, 2, 2]
    assert shares[2].why == "the jobs of ann use 2 of 3 cores"
    running = [entries[0].model_copy(update={"state": "running", "workers": 2})]
    shares = FirstComeFirstServed().divide(0.0, running, entries[1:3], cluster=cluster, facts=facts)
    assert [shares[n].workers for n in (2, 3)] == [0, 0], "what already runs counts"


def test_a_job_that_its_users_quota_never_lets_start_says_so():
    entry = QueueEntry(id=1, user="ann", needs=JobNeeds(least=3, most=4))
    cluster = CoreCapacity({"here": 8}, {"ann": 2})
    share = ElasticShares().divide(0.0, [], [entry], cluster=cluster, facts={1: JobFacts()})[1]
    assert (share.workers, share.why) == (0, "It waits: it needs 3 slots at least, and the quota of ann is 2.")


def test_jobs_that_wait_for_a_quota_do_not_hide_those_behind_them():
    many = [QueueEntry(id=n, user="ann", priority=5) for n in range(1, 100)]
    large = [QueueEntry(id=n, user="ann", priority=5, needs=JobNeeds(least=3, most=3)) for n in range(100, 200)]
    last = QueueEntry(id=200, user="bob")
    found = order.window([*large, *many, last], CoreCapacity({"here": 4}, {"ann": 2})).entries
    assert [entry.id for entry in found] == [100, 1, 2, 3, 200]
    assert len(order.window(many, CoreCapacity({"here": 4})).entries) == 2 * 4 + 8


TOO_LARGE = {
    JobNeeds(memory_bytes=1 << 40): "no machine has the 1 core and 1099.5 GB of memory that a worker needs",
    JobNeeds(cores=3): "a worker needs 3 cores, and no machine has more than 2",
    JobNeeds(least=3, most=3, memory_bytes=3 * 10**9): "the machines have room for 2 of its 3 workers, with 1 core and "
    "3.0 GB of memory for each",
    JobNeeds(
        least=2, most=2, copies=2, memory_bytes=2 * 10**9
    ): "the machines have room for 1 of its 2 workers, with 2 cores and 4.0 GB of memory for each",
    JobNeeds(least=5, most=5, memory_bytes=6 * 10**9): "no machine has the 2 cores and 6.0 GB of memory that a worker "
    "needs",
}


@pytest.mark.parametrize("needs", TOO_LARGE)
def test_jobs_that_no_machine_can_take_do_not_hide_those_behind_them(needs):
    many = [QueueEntry(id=n, needs=needs) for n in range(1, 50)]
    last = QueueEntry(id=50)
    cluster = CoreCapacity({"one": 2, "two": 2}, memory_bytes={"one": 5 * 10**9, "two": 3 * 10**9})
    found = order.window([*many, last], cluster)
    assert [entry.id for entry in found.entries] == [50]
    assert found.misfits == dict.fromkeys(range(1, 50), f"It waits: {TOO_LARGE[needs]}.")
    assert order.window(many, CoreCapacity({})).misfits[1] == "It waits: there is no machine."


@settings(max_examples=200, deadline=None)
@given(needs(), st.integers(0, 3), st.lists(st.tuples(st.integers(1, 6), st.integers(0, 9)), min_size=1, max_size=3))
def test_a_job_that_may_be_decided_about_gets_workers_when_nobody_else_is_there(needs, memory, machines):
    """A memory of 0 is unknown, or no limit."""
    needs = needs.model_copy(update={"memory_bytes": memory})
    cluster = CoreCapacity(
        {f"m{n}": cores for n, (cores, _) in enumerate(machines)},
        memory_bytes={f"m{n}": bytes_ for n, (_, bytes_) in enumerate(machines) if bytes_},
    )
    found = order.window([QueueEntry(id=1, needs=needs)], cluster)
    shares = ElasticShares().divide(0.0, [], [QueueEntry(id=1, needs=needs)], cluster=cluster, facts={1: JobFacts()})
    assert bool(found.entries) == bool(shares[1].workers), (found, shares)


def test_speed_is_measured_for_each_number_of_workers_without_the_pause_of_a_change():
    meter = SpeedMeter()
    meter.change_view(1)
    for step in range(11):
        meter.reach_step(step, 100.0 + step)  # one step per second
    meter.change_view(2)
    for step in range(11, 21):
        meter.reach_step(step, 200.0 + step / 2)  # after a long pause: two
    assert meter.speeds() == {1: 1.0, 2: 2.0}
    assert meter.by_workers[2] == Measured(9, 4.5)


def test_too_little_is_not_a_measurement():
    assert Measured(2, 10.0).steps_per_s is None
    assert Measured(100, MIN_SECONDS / 2).steps_per_s is None


def test_memory_bounds_how_many_workers_fit():
    needs = JobNeeds(most=4, lanes=4, memory_bytes=4 * 10**9)
    capacity = CoreCapacity({"here": 8}, memory_bytes={"here": 9 * 10**9})
    facts = {1: JobFacts(speeds={1: 1.0, 2: 1.9, 4: 3.5})}
    shares = ElasticShares().divide(0.0, [], [QueueEntry(id=1, needs=needs)], cluster=capacity, facts=facts)
    assert shares[1].workers == 2


SPEEDS = {1: 100.0, 2: 170.0}
"""Steps per second by number of workers."""
TICK_S, START_S, RESIZE_S = 0.5, 3.0, 0.3


def completion_times(policy, steps, *, every_s):
    """Jobs that arrive one after the other on two cores: the mean time until one has ended, and when all have. A start
    and a resize stop a job; a speed is known for all when a job has trained for a second with so many workers."""
    needs, cluster = JobNeeds(least=1, most=2, lanes=4), CoreCapacity({"here": 2})
    entries, known, left, pause, trained = {}, {}, dict(enumerate(steps, 1)), {}, {}
    arrives_s = {n: (n - 1) * every_s for n in left}
    ended, now = {}, 0.0
    while left:
        for number in [n for n in left if n not in entries and arrives_s[n] <= now]:
            entries[number] = QueueEntry(id=number, needs=needs)
        alive = [entries[n] for n in left if n in entries]
        facts = {
            e.id: JobFacts(
                waiting_since_s=arrives_s[e.id],
                served_s=trained.get(e.id, 0.0),
                turn_s=trained.get(e.id, 0.0),
                speeds=dict(known),
                remaining=left[e.id],
            )
            for e in alive
        }
        running, ready = ([e for e in alive if e.state == state] for state in ("running", "waiting"))
        shares = policy.divide(now, running, ready, cluster=cluster, facts=facts) if alive else {}
        for entry in alive:
            workers = shares[entry.id].workers if entry.id in shares else 0
            if workers != entry.workers:
                pause[entry.id] = RESIZE_S if entry.workers and workers else START_S
                trained[entry.id] = trained.get(entry.id, 0.0) if entry.workers and workers else 0.0
            entries[entry.id] = entry.model_copy(
                update={"workers": workers, "state": "running" if workers else "waiting"}
            )
        now += TICK_S
        for number in [n for n in left if n in entries and entries[n].workers]:
            trains_s = max(TICK_S - pause[number], 0.0)
            pause[number] = max(pause[number] - TICK_S, 0.0)
            trained[number] += trains_s
            workers = entries[number].workers
            if trained[number] >= 1.0:
                known[workers] = SPEEDS[workers]
            left[number] -= trains_s * SPEEDS[workers]
            if left[number] <= 0:
                del left[number]
                ended[number] = now
    times = [ended[n] - arrives_s[n] for n in sorted(ended)]
    return sum(times) / len(times), max(ended.values())


@pytest.mark.parametrize("steps", [(12000, 2000, 6000, 1000, 4000, 1000), (1000, 12000, 1000, 6000, 2000, 4000)])
def test_elastic_workers_let_jobs_wait_less_than_first_come_first_served(steps):
    elastic_s, all_elastic_s = completion_times(ElasticShares(), steps, every_s=10.0)
    first_come_s, all_first_come_s = completion_times(FirstComeFirstServed(), steps, every_s=10.0)
    assert elastic_s < 0.8 * first_come_s
    assert all_elastic_s < 0.9 * all_first_come_s
