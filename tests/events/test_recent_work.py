"""Which worker holds the others back now: what was slow an hour ago does not count."""

import pytest

from shoal.events import Event
from shoal.events.run_state import RunState
from shoal.plan.stragglers import slowest_worker


def rows(first, last, *, t, every_s, slow, steps=1):
    """Steps of two workers, of which worker-1 takes `slow` times as long."""
    for n in range(first, last):
        for who, factor in (("worker-0", 1.0), ("worker-1", slow)):
            work_s = 0.2 * every_s * factor
            yield Event("step", t + n * every_s, who, n * steps, {"steps": steps, "compute_s": work_s * steps})


def joined(t, who, lanes):
    return Event("joined", t, who, 0, {"lanes": lanes, "saves": who == "worker-0"})


def state_after(*events):
    state = RunState()
    for event in events:
        state.apply(event)
    return state


def slowest(state):
    return slowest_worker({one.name: one.step_work_s or 0.0 for one in state.training_workers})


BEGIN = [joined(0.0, "worker-0", [0]), joined(0.0, "worker-1", [1])]


@pytest.mark.parametrize("every_s", [0.05, 0.5, 60.0])
def test_a_worker_that_has_recovered_is_not_told_of(every_s):
    slow = list(rows(1, 2000, t=0.0, every_s=every_s, slow=2.0))
    name, share = slowest(state_after(*BEGIN, *slow))
    assert (name, share) == ("worker-1", pytest.approx(0.5))
    well = int(max(400.0 / every_s, 400))
    name, share = slowest(state_after(*BEGIN, *slow, *rows(2000, 2000 + well, t=0.0, every_s=every_s, slow=1.0)))
    assert share < 0.05


@pytest.mark.parametrize("every_s", [0.05, 0.5, 60.0])
def test_a_worker_that_becomes_slow_late_is_told_of(every_s):
    well = list(rows(1, 5000, t=0.0, every_s=every_s, slow=1.0))
    late = int(max(200.0 / every_s, 200))
    name, share = slowest(state_after(*BEGIN, *well, *rows(5000, 5000 + late, t=0.0, every_s=every_s, slow=2.0)))
    assert (name, share > 0.4) == ("worker-1", True)


def test_a_single_long_step_is_no_verdict():
    well = list(rows(1, 500, t=0.0, every_s=0.5, slow=1.0))
    _, share = slowest(state_after(*BEGIN, *well, *rows(500, 501, t=0.0, every_s=0.5, slow=2.0)))
    assert share < 0.05


def test_nothing_is_said_of_few_steps_or_of_other_lanes():
    assert slowest(state_after(*BEGIN, *rows(1, 15, t=0.0, every_s=0.5, slow=2.0))) is None
    many = list(rows(1, 500, t=0.0, every_s=0.5, slow=2.0))
    assert slowest(state_after(*BEGIN, *many, joined(300.0, "worker-1", [1, 2]))) is None


def test_a_clock_that_jumps_back_forgets_nothing():
    many = list(rows(1, 500, t=1e6, every_s=0.5, slow=2.0))
    assert slowest(state_after(*BEGIN, *many, *rows(500, 510, t=0.0, every_s=0.5, slow=2.0)))[0] == "worker-1"
