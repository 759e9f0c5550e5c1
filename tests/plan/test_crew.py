"""The crew under random schedules, and its small decisions as tables."""

from tests.plan.crew_at_random import World


def live(seed, *, events=200, faults=0.1):
    world = World(seed)
    for _ in range(events):
        world.happen(faults)
    return world


def test_tmp():
    pass
