from hypothesis import given
from hypothesis import strategies as st

from shoal.plan.queueing.lease import LEASE_S, Lease, LeaseWatch


def test_a_lease_that_is_renewed_is_never_free():
    watch, lease = LeaseWatch(), Lease(epoch=1, holder="a")
    for second in range(0, 1000, 10):
        assert not watch.is_free(lease, float(second))
        lease = lease.renewed()


@given(st.floats(0, 1e9), st.lists(st.floats(0.0, LEASE_S / 2), max_size=20))
def test_a_lease_that_stands_still_is_free_after_a_time_of_the_observers_clock_alone(start, gaps):
    """Whatever the clock of the wall does, only the observer's monotonic clock counts."""
    watch, lease, now = LeaseWatch(), Lease(epoch=3, holder="a", beats=7), start
    assert not watch.is_free(lease, now)
    for gap in gaps:
        now += gap
        assert watch.is_free(lease, now) == (now - start >= LEASE_S)
    assert watch.is_free(lease, start + 2 * LEASE_S)


def test_a_lease_is_free_at_once_if_it_was_given_back_or_its_holder_is_dead():
    held = Lease(epoch=3, holder="a")
    assert LeaseWatch().is_free(held.released(), 0.0)
    assert LeaseWatch().is_free(held, 0.0, holder_is_dead=True)
    assert held.taken(holder="b", pid=2).epoch == 4
