"""What runs of one process know of the hosts that they share."""

import pytest

from shoal.fleet.engines.host_use import GRACE_S, MAX_MISSING_S, MIN_MISSING_S, HostUse


@pytest.fixture
def now():
    return [100.0]


@pytest.fixture
def use(now):
    return HostUse(lambda: now[0])


def test_a_host_that_comes_back_soon_was_never_missing(use, now):
    use.lose("a")
    now[0] += GRACE_S - 1
    assert (use.is_lost("a"), use.is_missing("a"), use.is_missing("b")) == (True, False, False)
    use.find("a")
    now[0] += 1000
    assert not use.is_lost("a")
    assert not use.is_missing("a")


def test_a_missing_host_is_tried_again_and_then_missing_for_longer_each_time(use, now):
    use.lose("a")
    now[0] += GRACE_S
    missing_s = []
    for _ in range(5):
        assert use.is_missing("a")
        use.lose("a")  # a run tries it all the time, which changes nothing
        began_s = now[0]
        while use.is_missing("a"):
            now[0] += 1
        missing_s.append(now[0] - began_s)
        assert use.is_lost("a"), "nobody waits for it"
        use.lose("a")
    assert missing_s == [MIN_MISSING_S, 2 * MIN_MISSING_S, 4 * MIN_MISSING_S, MAX_MISSING_S, MAX_MISSING_S]


def test_only_a_host_that_was_ready_or_is_lost_may_miss(use):
    assert not use.may_miss("a")
    use.find("a")
    use.lose("b")
    assert use.may_miss("a")
    assert use.may_miss("b")
