"""Nobody is blamed for a silence that we slept through."""

import pytest

from shoal.fleet import liveness_clock
from shoal.fleet.liveness_clock import LivenessClock


@pytest.fixture
def now(monkeypatch):
    time = [100.0]
    monkeypatch.setattr(liveness_clock.time, "monotonic", lambda: time[0])
    return time


def test_time_in_which_we_looked_counts(now):
    clock = LivenessClock(max_gap_s=1.0)
    for _ in range(3):
        now[0] += 0.5
        clock.tick()
    assert clock.now_s == 1.5


def test_a_process_that_was_frozen_counts_one_nap_at_most(now):
    clock = LivenessClock(max_gap_s=1.0)
    now[0] += 3600
    assert clock.now_s == 0.0
    clock.tick()
    assert clock.now_s == 1.0


def test_time_in_which_we_did_not_listen_is_skipped(now):
    clock = LivenessClock(max_gap_s=1.0)
    now[0] += 0.5
    clock.skip()
    now[0] += 0.25
    clock.tick()
    assert clock.now_s == 0.25
