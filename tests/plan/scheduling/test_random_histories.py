"""Thousands of random histories: what must hold after every decision, and that every job ends."""

import pytest

from shoal.plan.scheduling import NodeView
from tests.plan.scheduling.histories import LANES, PATIENCE_S, History

STEPS = 6
MOST_STEPS = 4000


def live_through(seed: int) -> None:
    history = History(seed)
    for _ in range(STEPS):
        history.disturb()
        history.step(history.rng.choice((1.0, 20.0, 60.0)))
    waiting = {key for key, job in history.jobs.items() if history.can_ever_run(job)}
    for _ in range(MOST_STEPS):
        if not waiting & set(history.jobs):
            return
        history.step(60.0)
    raise AssertionError(f"seed {seed}: {waiting & set(history.jobs)} never ended")


@pytest.mark.parametrize("block", range(4))
def test_histories(block):
    for seed in range(100 * block, 100 * block + 100):
        live_through(seed)


@pytest.mark.long
@pytest.mark.parametrize("block", range(8))
def test_many_histories(block):
    for seed in range(1000 + 1000 * block, 2000 + 1000 * block):
        live_through(seed)


@pytest.mark.parametrize("seed", range(5))
def test_a_flood_of_higher_priority_starves_nobody(seed):
    """New jobs of higher priority fill the cluster again and again. The old one starts when its patience is over."""
    history = History(seed)
    history.nodes, history.policy.quotas = {"n0": NodeView(2)}, {}
    plain = {"user": "ann", "slots": 1, "memory_bytes": 0, "gang": 1, "least": 1, "most": LANES}
    for _ in range(2):
        history.arrive(priority=5, remaining=1e9, **plain)
    old = history.arrive(priority=0, remaining=100.0, **plain)
    while history.now < PATIENCE_S:
        history.step(20.0)
        assert old.id not in history.current
    for _ in range(10):
        history.arrive(priority=5, remaining=50.0, **plain)
        history.step(20.0)
    assert old.id not in history.jobs
