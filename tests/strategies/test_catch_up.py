"""A newcomer that follows others while they train: a real publisher and a real subscription over a socket pair."""

import copy
import socket
import threading
import time
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from shoal.collectives import state_stream
from shoal.collectives.outcome import Discarded
from shoal.collectives.state_stream import StatePublisher, StateSubscription, total_from_entry
from shoal.collectives.transport.mesh import CONNECT_TIMEOUT_S
from shoal.lanes.flat_layout import FlatLayout
from shoal.lanes.replica import Replica
from shoal.net.errors import LinkError
from shoal.spec.view import Address, View
from shoal.strategies import catch_up
from shoal.strategies.catch_up import CatchUp
from shoal.strategies.local_sgd.outer_optimizer import OuterOptimizer
from shoal.strategies.local_sgd.replica import LocalReplica
from tests.collectives.worker_processes import lane_sum

HERE = Address(host="127.0.0.1", port=1)
VIEW = View(number=1, followers=[1], source=0, addresses={0: HERE})


class Follower:
    """What a strategy gives its CatchUp; `refuses` is an entry that it cannot apply."""

    def __init__(self, peers):
        self.progress, self.applied, self.settled, self.refuses = SimpleNamespace(position=None), [], 0, None
        self.catch_up = CatchUp(peers, self.progress, apply=self.apply, settle=self.settle)

    def apply(self, entry):
        if entry["kind"] == self.refuses:
            raise LinkError("it does not fit")
        self.applied.append(entry["kind"])
        self.progress.position = entry.get("position", self.progress.position)

    def settle(self):
        self.settled += 1


@contextmanager
def followed():
    """A publisher that trains, and a follower that is connected to it."""
    publisher, (ours, theirs) = StatePublisher(), socket.socketpair()
    serving = threading.Thread(target=lambda: (publisher.serve(ours), ours.close()), daemon=True)
    peers = SimpleNamespace(subscribe=lambda *_, max_bytes, **__: StateSubscription(theirs, max_bytes=max_bytes))
    follower = Follower(peers)
    assert follower.catch_up.connect(VIEW, 1, max_bytes=1 << 20)
    serving.start()
    deadline = time.monotonic() + 10
    while not publisher.active:
        assert time.monotonic() < deadline
        threading.Event().wait(0.001)
    try:
        yield publisher, follower
    finally:
        publisher.drop_subscribers()
        serving.join(10)
        follower.catch_up.close()


FIELDS = {
    "step": {"step": 0, "total": {}},
    "fragment": {"step": 0, "which": [], "changes": []},
    "evaluated": {"metrics": {}},
}


def entry(kind, position):
    return {"kind": kind, "position": position, "values": torch.ones(3), **FIELDS[kind]}


def until_current(follower):
    while True:
        caught_up = follower.catch_up.poll()
        if caught_up is not False:
            return caught_up


def test_a_state_and_everything_since():
    with followed() as (publisher, follower):
        publisher.start_subscribers(lambda: {"weights": torch.zeros(3)})
        assert until_current(follower) is True
        publisher.publish(entry("step", 2))
        publisher.publish(entry("evaluated", 3))
        assert follower.catch_up.advance_to(3)
        assert follower.applied == ["state", "step", "evaluated"]


def test_nothing_is_published_before_a_follower_has_the_state():
    with followed() as (publisher, follower):
        publisher.publish(entry("step", 2))
        publisher.start_subscribers(lambda: {"weights": torch.zeros(3)})
        assert until_current(follower) is True
        assert follower.applied == ["state"]


def test_to_a_position_that_does_not_come_the_whole_state_is_needed():
    with followed() as (publisher, follower):
        publisher.start_subscribers(dict)
        assert until_current(follower) is True
        publisher.drop_subscribers()
        assert not follower.catch_up.advance_to(9)
        assert follower.settled == 1


def test_a_source_that_stands_still_is_not_waited_for():
    """It sends a state only between two steps, and makes none before this worker has entered the view."""
    assert catch_up.SILENCE_S < CONNECT_TIMEOUT_S
    with followed() as (_, follower):
        assert not follower.catch_up.advance_to(4)
        assert follower.catch_up.poll() is None
        assert follower.settled == 1


def test_an_entry_that_stalls_ends_the_following(monkeypatch):
    monkeypatch.setattr(state_stream, "STALL_TIMEOUT_S", 0.01)
    ours, theirs = socket.socketpair()
    with ours:
        peers = SimpleNamespace(subscribe=lambda *_, max_bytes, **__: StateSubscription(theirs, max_bytes=max_bytes))
        follower = Follower(peers)
        assert follower.catch_up.connect(VIEW, 1, max_bytes=1 << 20)
        ours.sendall(b"\0")
        assert follower.catch_up.poll() is None
        assert follower.settled == 1


def test_an_entry_that_does_not_fit_ends_the_following():
    with followed() as (publisher, follower):
        follower.refuses = "fragment"
        publisher.start_subscribers(dict)
        publisher.publish(entry("fragment", 5))
        assert until_current(follower) in (True, None)
        assert follower.catch_up.poll() is None
        assert follower.settled == 1
        assert follower.catch_up.poll() is None, "and it stays so"


@pytest.mark.parametrize(
    "sent",
    [
        {},
        {"kind": 3},
        {"kind": ["step"]},
        {"kind": "gossip"},
        {"kind": "step", "step": "0", "total": {}},
        {"kind": "step"},
    ],
)
def test_what_is_no_entry_ends_the_following(sent):
    with followed() as (publisher, follower):
        publisher.start_subscribers(dict)
        assert until_current(follower) is True
        publisher.publish(sent)
        assert until_current(follower) is None
        assert follower.settled == 1


@pytest.mark.parametrize("spoilt", ["grads", "loss", "count", "shape", "dtype"])
def test_a_total_of_another_model_is_none(spoilt):
    like = lane_sum(0, 0, counted=True)
    layout = FlatLayout(like)
    total = {
        "grads": list(like.grads),
        "averaged": list(like.float_buffers),
        "first": list(like.int_buffers),
        "loss": like.loss,
        "count": like.count,
    }
    assert layout.fits(total_from_entry({"total": total}, layout, torch.device("cpu")))
    if spoilt in total:
        total[spoilt] = 3
    elif spoilt == "shape":
        total["grads"][0] = torch.zeros(1)
    else:
        total["grads"][0] = total["grads"][0].to(torch.complex64)
    with pytest.raises(LinkError, match=r"a sum of other shapes|no sum"):
        total_from_entry({"total": total}, layout, torch.device("cpu"))


def test_too_many_followers(monkeypatch):
    monkeypatch.setattr(state_stream, "MAX_SUBSCRIBERS", 1)
    with followed() as (publisher, _):
        while not publisher.active:  # the first one's thread has begun
            threading.Event().wait(0.001)
        with pytest.raises(LinkError, match="follow this one"):
            publisher.serve(None)


def test_without_a_connection_there_is_nothing_to_follow():
    follower = Follower(SimpleNamespace(subscribe=lambda *_, **__: Discarded("no route")))
    assert not follower.catch_up.connect(VIEW, 1, max_bytes=1)
    assert follower.catch_up.poll() is None
    assert not follower.catch_up.advance_to(1)
    follower.catch_up.close()
    assert follower.settled == 0


@pytest.mark.parametrize("position", [4, 5])
def test_a_worker_that_is_there_already_needs_nothing(position):
    with followed() as (_, follower):
        follower.progress.position = position
        assert follower.catch_up.advance_to(4) is (position == 4)
        assert follower.applied == []


def test_fragments_since_the_last_commit_are_undone_when_the_following_ends():
    """They belong to an agreement that may never count; what is saved is the last commit."""
    model = nn.Linear(2, 2)
    replica = Replica(model, torch.optim.SGD(model.parameters(), lr=0.1), lambda model, x: model(x).mean(), seed=0)
    local = LocalReplica(replica, outer=partial(OuterOptimizer, momentum=0.5), next_sync=lambda step: step + 8)
    before = copy.deepcopy(local.state())
    with followed() as (_, follower):
        follower.catch_up._settle = local.undo_step
        local.apply_fragment([0], [torch.ones(2, 2)])
        assert not torch.equal(local.state()["outer"]["velocity"][0], before["outer"]["velocity"][0])
        follower.catch_up.close()
    assert torch.equal(local.state()["outer"]["velocity"][0], before["outer"]["velocity"][0])
    assert torch.equal(local.state()["model"]["weight"], before["model"]["weight"])
