"""Which stretch gets workers: by virtual end, then the one that everybody waits for."""

from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.jobs.search.allocation import HELP_FOR_S, Work, allocate


def work(number, ends, **changes):
    return Work(number, (ends, number), **changes)


def test_the_earliest_virtual_end_begins_first():
    works = [work(0, 5.0), work(1, 3.0), work(2, 4.0)]
    assert allocate(works, workers=2, awaited=1) == {1: 1, 2: 1}


def test_active_stretches_keep_their_workers():
    works = [work(0, 9.0, active=True), work(1, 3.0)]
    assert allocate(works, workers=1, awaited=1) == {0: 1}


def test_idle_workers_help_the_awaited_stretch():
    long = 10 * HELP_FOR_S
    works = [work(0, 9.0, active=True, most=8, left_s=long), work(1, 3.0, active=True, most=3, left_s=long)]
    assert allocate(works, workers=8, awaited=1) == {0: 5, 1: 3}


def test_helpers_go_back_when_something_new_is_decided():
    works = [work(0, 1.0, active=True, most=4, left_s=100.0), work(1, 2.0), work(2, 3.0)]
    assert allocate(works, workers=3, awaited=0) == {0: 1, 1: 1, 2: 1}


def test_nobody_helps_a_stretch_that_ends_soon():
    assert allocate([work(0, 1.0, active=True, most=4, left_s=0.1)], workers=4, awaited=0) == {0: 1}
    assert allocate([work(0, 1.0, active=True, most=4)], workers=4, awaited=0) == {0: 1}


def test_a_sharded_trial_gets_whole_replicas():
    works = [work(0, 1.0, needs=2, most=4), work(1, 2.0, needs=2, most=4)]
    assert allocate(works, workers=3, awaited=0) == {0: 2}


def test_workers_that_exit_make_room():
    works = [work(0, 1.0, active=True, releasing=True), work(1, 2.0)]
    assert allocate(works, workers=1, awaited=0) == {1: 1}


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.floats(0, 9), st.integers(1, 4)), max_size=8), st.integers(1, 8))
def test_never_more_workers_than_there_are(rows, workers):
    works = [work(i, ends, active=active, most=most, left_s=99.0) for i, (active, ends, most) in enumerate(rows)]
    given_out = allocate(works, workers=workers, awaited=0)
    running = sum(w.active for w in works)
    assert sum(given_out.values()) <= max(workers, running)
    assert all(1 <= n <= works[i].most for i, n in given_out.items())
