"""What a heartbeat says of the training thread."""

import threading
import time

from shoal.train.activity import RECENT_LANES, Activity


def test_a_heartbeat_says_what_the_worker_does_and_how_often_it_did():
    activity = Activity()
    for step in range(3):
        activity.begin("data", step)
        activity.begin("compute", step)
    beat = activity.heartbeat()
    assert (beat["phase"], beat["step"], beat["units"], beat["units_in_phase"]) == ("compute", 2, 6, 2)
    assert activity.phase == "compute"
    assert beat["since_s"] >= 0
    assert "line" not in beat


def test_a_new_worker_builds():
    assert Activity().heartbeat()["phase"] == "building"


def test_a_lane_takes_what_is_typical_of_the_last_ones():
    activity = Activity()
    for _ in range(RECENT_LANES - 1):
        activity.record_lane_time(0.2)
    assert activity.heartbeat()["lane_s"] is None, "too few to say"
    activity.record_lane_time(50.0)
    assert activity.heartbeat()["lane_s"] == 0.2
    for _ in range(RECENT_LANES):
        activity.record_lane_time(0.1)
    assert activity.heartbeat()["lane_s"] == 0.1


def test_all_lanes_and_their_time_are_counted():
    """Their mean shows a worker that is stopped now and then, which the median of short lanes hides."""
    activity = Activity()
    before = activity.heartbeat()
    assert (before["lanes_timed"], before["lanes_timed_s"]) == (0, 0.0)
    for _ in range(2 * RECENT_LANES):
        activity.record_lane_time(0.5)
    after = activity.heartbeat()
    assert (after["lanes_timed"], after["lanes_timed_s"]) == (2 * RECENT_LANES, RECENT_LANES)


def test_moved_bytes_come_from_the_strategy():
    activity = Activity()
    assert activity.heartbeat()["moved_bytes"] == 0
    activity.moved_bytes = lambda: 7
    assert activity.heartbeat()["moved_bytes"] == 7


def test_a_worker_that_is_long_at_it_says_in_which_line():
    activity = Activity()
    activity._current = ("compute", 3, 1, time.monotonic() - 5)
    beat = activity.heartbeat()
    assert beat["since_s"] >= 5
    assert "test_activity.py" in beat["line"]


def test_the_line_is_that_of_the_training_thread():
    """A heartbeat is sent by another thread."""
    activity, found = Activity(), []
    other = threading.Thread(target=lambda: found.append(activity.current_line()))
    other.start()
    other.join()
    assert "test_activity.py" in found[0]
    assert "test_the_line_is_that_of_the_training_thread" in found[0]
