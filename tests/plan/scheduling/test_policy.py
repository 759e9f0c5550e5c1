"""Decisions for small clusters."""

from shoal.plan.scheduling import JobView, MeasuredSpeed, NodeView, SchedulingPolicy

SPEED = MeasuredSpeed(48, {(1, 1): 1.0, (2, 1): 0.55, (4, 1): 0.3, (8, 2): 0.2})
FOUR_NODES = {node: NodeView(4) for node in range(4)}


def test_one_job_gets_the_most_it_asked_for():
    decision = SchedulingPolicy().decide(0, {"a": JobView("a", SPEED, 1, 8, remaining=100)}, FOUR_NODES, {})
    assert decision.allocation == {"a": (0, 0, 0, 0, 1, 1, 1, 1)}
    assert decision.why("a") == "It has 8 workers on 2 nodes. It asked for at most 8."


def test_the_job_with_less_work_left_gets_more():
    jobs = {key: JobView(key, SPEED, 1, 16, remaining=work) for key, work in (("long", 900.0), ("short", 30.0))}
    five_nodes = {**FOUR_NODES, 4: NodeView(4)}
    found = SchedulingPolicy().decide(0, jobs, five_nodes, {}).allocation
    assert (len(found["short"]), len(found["long"])) == (16, 4)


def test_a_decision_that_is_repeated_changes_nothing():
    jobs = {f"j{n}": JobView(f"j{n}", SPEED, 1, 16, remaining=100.0 * n) for n in range(1, 6)}
    policy = SchedulingPolicy()
    first = policy.decide(0, jobs, FOUR_NODES, {})
    assert policy.decide(0, jobs, FOUR_NODES, first.allocation).allocation == first.allocation


def job(key, **asked):
    return JobView(key, SPEED, **{"most": 16, "remaining": 100.0, **asked})


def decided(*jobs, nodes=None, current=None, policy=None):
    policy = policy or SchedulingPolicy()
    return policy.decide(0.0, {one.id: one for one in jobs}, nodes or FOUR_NODES, current or {})


def test_a_quota_limits_all_jobs_of_a_user_together():
    policy = SchedulingPolicy(quotas={"ann": 3})
    jobs = [job(f"a{n}", user="ann") for n in range(4)]
    decision = decided(*jobs, job("b", user="bob"), policy=policy)
    assert sum(len(decision.allocation.get(one.id, ())) for one in jobs) == 3
    assert len(decision.allocation["b"]) > 3
    waiting = next(one.id for one in jobs if one.id not in decision.allocation)
    assert decision.why(waiting) == "It waits: the jobs of ann use 3 of 3 slots."


def test_the_higher_priority_comes_first():
    jobs = [job(f"j{n}", least=8, most=8, priority=n) for n in range(3)]
    decision = decided(*jobs)
    assert set(decision.allocation) == {"j1", "j2"}
    assert decision.why("j0") == "It waits: 2 jobs that come first use the 16 slots."


def test_workers_come_in_whole_gangs():
    assert len(decided(job("a", gang=3, least=3)).allocation["a"]) == 15


def test_memory_limits_the_workers_of_a_node():
    nodes = {node: NodeView(4, memory_bytes=10) for node in range(2)}
    decision = decided(job("a", memory_bytes=4), nodes=nodes)
    assert decision.allocation == {"a": (0, 0, 1, 1)}
    assert decided(job("a", memory_bytes=11), nodes=nodes).why("a").startswith("It waits: the cluster has 8 slots")


def test_a_job_that_memory_keeps_out_leaves_its_slots_to_others():
    nodes = {0: NodeView(4, memory_bytes=10)}
    first, second = job("a", least=2, most=2, memory_bytes=5), job("b", least=2, most=2, memory_bytes=5)
    decision = decided(first, second, job("c", most=1, remaining=1e6), nodes=nodes)
    assert set(decision.allocation) == {"a", "c"}
    assert decision.why("b") == "It waits: no nodes have the free slots and the memory that its workers need."


def test_workers_of_a_vanished_node_are_replaced():
    before = decided(job("a", least=2), job("b", least=2)).allocation
    left = {node: FOUR_NODES[node] for node in (1, 2)}
    after = decided(job("a", least=2), job("b", least=2), nodes=left, current=before).allocation
    assert {node for nodes in after.values() for node in nodes} == {1, 2}
    assert len(after) == 2


def test_jobs_on_several_nodes_get_whole_nodes():
    jobs = [job("wide", least=8, most=8), *(job(f"j{n}", most=1) for n in range(8))]
    small = decided(*jobs[1:], current={}).allocation
    spread = {f"j{n}": (n % 4,) for n in range(8)}
    found = decided(*jobs, current=spread).allocation
    assert len(small) == 8
    assert sorted(found["wide"].count(node) for node in set(found["wide"])) == [4, 4]
    assert sum(len(nodes) for nodes in found.values()) == 16


def test_a_costly_resize_must_pay_for_itself():
    slow = job("a", resize_s=59.0, most=16, remaining=1.0)
    assert len(decided(slow, current={"a": (0,) * 4}).allocation["a"]) == 4
    assert len(decided(job("a", remaining=1.0, resize_s=0.1), current={"a": (0,) * 4}).allocation["a"]) > 4


def test_a_job_grows_when_its_size_was_measured():
    fresh = JobView("a", MeasuredSpeed(48), most=16, remaining=100.0)
    decision = decided(fresh)
    assert len(decision.allocation["a"]) == 1
    assert decision.why("a").endswith(
        "Its speed with more than 1 is not known yet; it may grow once this size is measured."
    )
    tried = JobView("a", MeasuredSpeed(48, {(1, 1): 1.0}), most=16, remaining=100.0)
    assert len(decided(tried).allocation["a"]) == 2


def test_an_empty_cluster_and_an_empty_queue():
    assert decided(job("a"), nodes={0: NodeView(0)}).allocation == {}
    assert SchedulingPolicy().decide(0.0, {}, FOUR_NODES, {}).allocation == {}
    assert SchedulingPolicy().decide(0.0, {"a": job("a")}, {}, {}).allocation == {}
