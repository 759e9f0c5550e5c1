"""From the roster to the failure detector: which processes are found frozen, silent or not back."""

import subprocess
import sys

import pytest

from shoal.fleet.messages import BeatMessage
from shoal.fleet.roster import Peer, Roster
from shoal.jobs.liveness import CHECK_INTERVAL_S, NOT_BACK, LivenessCheck, process_state, read_heartbeat
from shoal.plan.failure_detector import SILENT_BUILDING_S, SILENT_S
from tests.fleet.test_roster import FakeConnections

WORKING = BeatMessage(kind="beat", phase="compute", units=3, units_in_phase=2, since_s=0.1, step=4, line="a.py:3")


@pytest.fixture
def connections():
    return FakeConnections()


@pytest.fixture
def roster(connections):
    made = Roster(connections)
    for seat in (0, 1):
        made.connect(seat, Peer(10 + seat, pid=2**22 + seat, last_heartbeat=WORKING))
    return made


def watch(check, now_s, seconds, **seats):
    """Look as often as a driver does; the failures that were found."""
    found = []
    for _ in range(round(seconds / CHECK_INTERVAL_S)):
        now_s += CHECK_INTERVAL_S
        found += check.find_failures(now_s, **seats)
    return found


def test_a_heartbeat_has_what_the_process_last_said(roster, connections):
    connections.silent[10] = 0.5
    beat = read_heartbeat(roster, 0)
    assert (beat.seat, beat.heard_s, beat.phase, beat.units, beat.step, beat.line) == (
        0,
        0.5,
        "compute",
        3,
        4,
        "a.py:3",
    )
    assert (beat.units_in_phase, beat.since_s, beat.moved_bytes, beat.stopped) == (2, 0.1, 0, False)


def test_a_process_that_has_just_connected_is_building(roster):
    roster.connect(2, Peer(12))
    assert read_heartbeat(roster, 2).phase == "building"


def test_processes_that_are_heard_are_left_alone(roster):
    assert watch(LivenessCheck(roster), 100.0, 5.0, training=[0, 1], idle=[]) == []
    assert watch(LivenessCheck(roster), 100.0, 5.0, idle=[0, 1]) == []


@pytest.mark.parametrize("role", ["training", "idle"])
def test_a_silent_process_is_found_once(roster, connections, role):
    connections.silent[11] = SILENT_S + 1
    seats = {"training": [], "idle": []} | {role: [0, 1]}
    (failure,) = watch(LivenessCheck(roster), 100.0, 5.0, **seats)
    assert failure.seat == 1


def test_a_process_that_builds_may_be_silent_for_longer(roster, connections):
    roster.connect(2, Peer(12))
    connections.silent[12] = (SILENT_S + SILENT_BUILDING_S) / 2
    assert watch(LivenessCheck(roster), 100.0, 40.0, idle=[2]) == []
    connections.silent[12] = SILENT_BUILDING_S + 1
    assert [failure.seat for failure in watch(LivenessCheck(roster), 100.0, 40.0, idle=[2])] == [2]


def test_of_an_idle_process_it_does_not_count_how_long_it_takes(roster):
    roster[0].last_heartbeat = roster[1].last_heartbeat = WORKING.model_copy(update={"since_s": 10_000.0})
    assert watch(LivenessCheck(roster), 100.0, 5.0, idle=[0, 1]) == []
    assert len(watch(LivenessCheck(roster), 100.0, 5.0, training=[0, 1], idle=[])) == 2


def test_a_process_that_did_not_come_back_is_named(roster):
    roster.expect_back(7, until_s=101.0)
    check = LivenessCheck(roster)
    assert check.find_failures(101.0, idle=[]) == []
    (failure,) = check.find_failures(101.1, idle=[])
    assert (failure.seat, failure.why) == (7, NOT_BACK)


def test_it_is_looked_every_tenth_of_a_second(roster):
    check = LivenessCheck(roster)
    assert [check.is_due(now) for now in (100.0, 100.05, 100.11, 100.12, 100.3)] == [True, False, True, False, True]


def test_the_state_of_a_process():
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        assert process_state(process.pid) in ("R", "S", "D")
        process.communicate(b"\n")
    assert process_state(process.pid) == ""
