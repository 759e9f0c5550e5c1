"""The roster: one connection per seat, who is expected back, who was evicted. Facts, and no policy."""

import math
import time

import pytest

from shoal.fleet.roster import Peer, Roster, SeatNumbers


class FakeConnections:
    """The part of a control server that a roster uses."""

    def __init__(self):
        self.silent = {}
        self.dropped = []

    def silence_s(self, connection):
        return self.silent.get(connection, 0.0)

    def drop(self, connection):
        self.dropped.append(connection)

    def refuse(self, connection, why, *, name=""):
        self.dropped.append(connection)


@pytest.fixture
def connections():
    return FakeConnections()


@pytest.fixture
def roster(connections):
    return Roster(connections)


def test_a_process_that_connects_has_a_seat_and_a_connection(roster):
    assert roster.connect(3, Peer(10, pid=77, host="here"))
    assert roster.seat_of(10) == 3
    assert (3 in roster, 10 in roster, list(roster)) == (True, False, [3])
    assert (roster[3].pid, roster.host(3), roster.connections) == (77, "here", [10])


def test_a_seat_that_nobody_has_taken(roster):
    assert roster.get(0) is None
    assert roster.host(0) == ""
    assert roster.seat_of(1) is None
    assert roster.connections_of([0]) == []
    roster.disconnect(0)
    roster.remove(0)


def test_the_older_connection_of_a_seat_is_dropped(roster, connections):
    roster.connect(3, Peer(10))
    assert not roster.connect(3, Peer(11)), "it is not new"
    assert connections.dropped == [10]
    assert (roster.seat_of(10), roster.seat_of(11)) == (None, 3)
    assert roster[3].disconnected_at_s is None


def test_a_process_whose_connection_is_lost_keeps_its_seat(roster, connections):
    roster.connect(3, Peer(10))
    roster.disconnect(3)
    roster.disconnect(3)
    assert connections.dropped == [10], "once"
    assert 3 in roster
    assert (roster.seat_of(10), roster.connections) == (None, [])
    roster.connect(3, Peer(11))
    assert (roster.connections, connections.dropped) == ([11], [10])


def test_silence_is_that_of_the_connection_until_it_is_lost(roster, connections):
    roster.connect(3, Peer(10))
    connections.silent[10] = 4.0
    assert roster.silence_s(3) == 4.0
    roster.disconnect(3)
    roster[3].disconnected_at_s = time.monotonic() - 2.0
    assert roster.silence_s(3) == pytest.approx(2.0, abs=0.5)


def test_a_connection_whose_end_is_still_to_be_received_is_silent_from_now_on(roster, connections):
    roster.connect(3, Peer(10))
    connections.silent[10] = math.inf
    assert 0.0 <= roster.silence_s(3) <= roster.silence_s(3) < 60.0
    roster.disconnect(3)
    assert connections.dropped == [10]


def test_a_process_that_is_gone_leaves_nothing_but_its_eviction(roster):
    roster.connect(3, Peer(10))
    roster.expect_back(3, until_s=1.0)
    roster.evict(3, "it hangs")
    roster.remove(3)
    assert (3 in roster, roster.seat_of(10), roster.take_overdue(math.inf)) == (False, None, [])
    assert roster.is_evicted(3)


def test_an_eviction_is_known_until_the_seat_is_readmitted(roster):
    roster.evict(5, "it hangs")
    roster.evict(2, "lost")
    assert roster.evicted == [2, 5]
    assert roster.readmit(5) == "it hangs"
    assert roster.readmit(5) == ""
    assert (roster.is_evicted(5), roster.is_evicted(2)) == (False, True)


def test_processes_that_do_not_come_back_in_time_are_named_once(roster):
    roster.expect_back(1, until_s=10.0)
    roster.expect_back(2, until_s=20.0)
    roster.expect_back(3, until_s=10.0)
    roster.connect(3, Peer(30))
    assert roster.take_overdue(10.0) == []
    assert roster.take_overdue(10.1) == [1]
    assert roster.take_overdue(15.0) == []
    assert roster.take_overdue(math.inf) == [2]


def test_seats_and_messages_are_in_the_order_of_seats(roster):
    for seat in (4, 1, 3):
        roster.connect(seat, Peer(10 * seat))
    assert list(roster) == [1, 3, 4]
    assert roster.connections_of([3, 9, 1]) == [30, 10]


def test_a_seat_number_is_never_given_twice():
    numbers = SeatNumbers(2)
    assert [numbers.take(), numbers.take()] == [2, 3]
    numbers.reserve(7)
    numbers.reserve(5)
    assert numbers.take() == 8
