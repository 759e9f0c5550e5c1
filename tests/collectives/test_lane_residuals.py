"""What lanes remember, and how it gets from one worker to another."""

import socket
import threading

import pytest
import torch

from shoal.checkpoint.state_format import send_state
from shoal.collectives import lane_residuals
from shoal.collectives.lane_residuals import LaneResiduals, receive_residuals
from shoal.collectives.outcome import Discarded
from shoal.collectives.peer_services import PeerServices
from shoal.collectives.transport.greeting import Greeting
from shoal.net.errors import LinkError
from shoal.spec.view import View

FLOATS = 4


def carrying(*lanes, step=0, lost=False):
    one = LaneResiduals()
    missing = one.enter(step, lanes)
    one.start_empty(missing, FLOATS, lost=lost)
    return one


def encode(one, **values):
    one.begin_step()
    for name, value in values.items():
        one.for_lane(int(name[1:])).before_and_after()[1].fill_(value)


def plain(found):
    return {lane: state["memory"][0].item() if state else None for lane, state in found.items()}


def test_a_step_counts_when_it_is_committed():
    one = carrying(0, 1)
    encode(one, l0=1.0, l1=2.0)
    assert plain(one.at_step(0)) == {0: None, 1: None}
    assert one.commit() == set()
    assert plain(one.at_step(1)) == {0: 1.0, 1: 2.0}
    assert one.at_step(0) == {}


def test_the_next_step_can_be_fetched_before_it_is_committed():
    """Who asks has committed it."""
    one = carrying(0, 1)
    encode(one, l0=1.0, l1=2.0)
    one.commit()
    assert one.at_step(2) == {}, "nothing was encoded"
    encode(one, l0=3.0)
    assert plain(one.at_step(2)) == {0: 3.0, 1: 2.0}, "lane 1 had no samples"
    assert plain(one.at_step(2, [1, 7])) == {1: 2.0}
    assert plain(one.at_step(1)) == {0: 1.0, 1: 2.0}


def test_a_view_after_a_step_that_counted_elsewhere():
    one = carrying(0)
    encode(one, l0=1.0)
    assert one.enter(1, [0]) == set()
    assert plain(one.at_step(1)) == {0: 1.0}


def test_a_view_at_the_same_step_finds_it_as_it_was():
    one = carrying(0)
    encode(one, l0=1.0)
    one.commit()
    encode(one, l0=5.0)
    assert one.enter(1, [0]) == set()
    assert plain(one.at_step(1)) == {0: 1.0}
    assert one.at_step(2) == {}


def test_who_missed_steps_knows_nothing():
    one = carrying(0, 1)
    encode(one, l0=1.0)
    one.commit()
    assert one.enter(3, [0]) == {0}
    other = carrying(0)
    encode(other, l0=1.0)
    other.commit()
    assert other.enter(2, [0]) == {0}, "it took no part in the second step"


def test_lanes_that_went_away_are_kept_until_others_have_made_a_step():
    one = carrying(0, 1)
    encode(one, l0=1.0, l1=2.0)
    one.commit()
    assert one.enter(1, [1]) == set()
    assert plain(one.at_step(1)) == {0: 1.0, 1: 2.0}
    encode(one, l1=3.0)
    assert plain(one.at_step(2)) == {1: 3.0}
    one.commit()
    assert plain(one.at_step(2)) == {1: 3.0}


def test_what_was_lost_is_told_once_and_given_to_nobody_before():
    one = carrying(0, 1, step=7, lost=True)
    assert one.at_step(7) == {}
    assert one.enter(7, [0, 1]) == {0, 1}, "somebody else may know it"
    one.start_empty({0, 1}, FLOATS, lost=True)
    encode(one, l0=1.0)
    assert one.commit() == {0}
    assert plain(one.at_step(8)) == {0: 1.0}, "lane 1 had no samples yet"
    encode(one, l0=1.0, l1=1.0)
    assert one.commit() == {1}


def test_a_checkpoint_is_for_all_lanes():
    one = LaneResiduals()
    one.load(5, {0: {"memory": torch.ones(FLOATS)}, 1: {}}, FLOATS)
    assert one.enter(5, [1, 2]) == {2}
    assert plain(one.at_step(5)) == {0: 1.0, 1: None}


# --- between workers


@pytest.fixture
def pair():
    two = [PeerServices("token", bind="127.0.0.1") for _ in range(2)]
    yield two
    for one in two:
        one.close()


def view_of(pair, number=3):
    return View(number=number, carries={0: [0], 1: [1]}, addresses={i: p.endpoint.address for i, p in enumerate(pair)})


def filled(peers, *lanes):
    one = peers.residuals
    one.start_empty(one.enter(0, lanes), FLOATS, lost=False)
    encode(one, **{f"l{lane}": lane + 1.0 for lane in lanes})
    one.commit()
    return one


def test_asking(pair):
    filled(pair[0], 0, 1, 2)
    found = pair[1].fetch_residuals(view_of(pair), 1, source=0, step=1, lanes=[1, 2, 5], floats=FLOATS)
    assert plain(found) == {1: 2.0, 2: 3.0}
    assert pair[1].fetch_residuals(view_of(pair), 1, source=0, step=4, lanes=[1], floats=FLOATS) == {}


def test_something_of_another_size_is_not_taken(pair):
    filled(pair[0], 0)
    found = pair[1].fetch_residuals(view_of(pair), 1, source=0, step=1, lanes=[0], floats=FLOATS + 1)
    assert isinstance(found, Discarded)
    assert "of another size" in found.why


def test_nobody_there_and_given_up(pair):
    pair[0].close()
    found = pair[1].fetch_residuals(view_of(pair), 1, source=0, step=1, lanes=[0], floats=FLOATS)
    assert isinstance(found, Discarded)
    pair[1].abort(3)
    assert isinstance(pair[1].fetch_residuals(view_of(pair), 1, source=0, step=1, lanes=[0], floats=FLOATS), Discarded)


@pytest.mark.parametrize(
    "answers", [[[]], [{9: {}}], [{0: {}}, {"step": 2}], [{0: {"memory": 1}}, {"step": 1}], [{0: {}}]]
)
def test_answers_that_are_none(answers):
    here, there = socket.socketpair()
    with here, there:
        for answer in answers:
            send_state(there, answer)
        there.close()
        with pytest.raises(LinkError):
            receive_residuals(here, step=1, lanes=[0], floats=FLOATS)


def test_what_changed_while_it_was_sent_is_not_confirmed(monkeypatch):
    one = carrying(0)
    encode(one, l0=1.0)
    one.commit()
    sent = []

    def send(sock, state):
        sent.append(state)
        if len(sent) == 1:
            for _ in range(2):
                encode(one, l0=9.0)
                one.commit()

    monkeypatch.setattr(lane_residuals, "send_state", send)
    one.serve(None, Greeting(purpose="memory", seat=1, view=1, step=1, lanes=[0]))
    assert [list(state) for state in sent] == [[0]]


def test_who_leaves_waits_until_others_have_it(pair):
    held = filled(pair[0], 0, 1)
    thread = threading.Thread(target=held.hand_over, args=(lambda: False,))
    thread.start()
    pair[1].fetch_residuals(view_of(pair), 1, source=0, step=1, lanes=[0], floats=FLOATS)
    assert thread.is_alive()
    pair[1].fetch_residuals(view_of(pair), 1, source=0, step=1, lanes=[1], floats=FLOATS)
    thread.join(5)
    assert not thread.is_alive()


def test_who_leaves_does_not_wait_for_ever(monkeypatch):
    one = carrying(0)
    one.hand_over(lambda: True)
    monkeypatch.setattr(lane_residuals, "HAND_OVER_TIMEOUT_S", 0.1)
    one.hand_over(lambda: False)
    LaneResiduals().hand_over(lambda: False)
