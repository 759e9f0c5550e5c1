"""Greetings that say less, or more, than they may."""

import json
import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.collectives.transport import endpoint as endpoints
from shoal.collectives.transport.endpoint import Endpoint, connect_to_peer
from shoal.collectives.transport.greeting import Caller, Greeting
from shoal.net.errors import ProtocolError

TOKEN = "token"
GOOD = {"purpose": "mesh", "seat": 3, "view": 4}
ASKING = {"purpose": "memory", "seat": 3, "view": 4, "step": 7, "lanes": [0, 2]}


@pytest.mark.parametrize("fields", [GOOD, ASKING, GOOD | {"caller": "ab", "connection": 2}])
def test_there_and_back(fields):
    greeting = Greeting.parse(json.dumps(fields).encode())
    assert Greeting.parse(greeting.encode()) == greeting


@pytest.mark.parametrize(
    "change",
    [
        {"purpose": "chat"},
        {"purpose": ["mesh"]},
        {"seat": "3"},
        {"seat": -1},
        {"seat": 1 << 31},
        {"seat": 3.0},
        {"seat": True},
        {"view": None},
        {"view": 1 << 32},
        {"view": 10**400},
        {"caller": 5},
        {"caller": "x" * 33},
        {"connection": -1},
        {"more": 1},
        {"step": 1},
        {"lanes": [1]},
        {"step": 1, "lanes": [1]},
    ],
)
def test_a_field_that_cannot_be(change):
    with pytest.raises(ProtocolError, match="malformed greeting"):
        Greeting.parse(json.dumps(GOOD | change).encode())


@pytest.mark.parametrize(
    "change", [{"step": None}, {"step": -1}, {"step": "1"}, {"lanes": 0}, {"lanes": ["x"]}, {"lanes": [-1]}]
)
def test_a_request_for_residuals_that_cannot_be(change):
    with pytest.raises(ProtocolError, match="malformed greeting"):
        Greeting.parse(json.dumps(ASKING | change).encode())


@given(st.binary(max_size=60) | st.sampled_from([b"[" * 4000, b'{"a":' * 800, b"{}", b"NaN", b"\xff"]))
def test_any_bytes(raw):
    with pytest.raises(ProtocolError):
        Greeting.parse(raw)


def test_the_newer_connection_of_one_caller():
    one, other = Caller(), Caller()
    first, second, foreign = (
        Greeting(purpose="push", seat=0, view=0, caller=caller.name, connection=caller.next_connection())
        for caller in (one, one, other)
    )
    assert first.is_older_than(second)
    assert not second.is_older_than(first)
    assert not first.is_older_than(foreign)
    assert not Greeting(**GOOD).is_older_than(Greeting(**GOOD, connection=5))


# ---- connections that wait for their view ----


@pytest.fixture
def endpoint():
    made = Endpoint(TOKEN)
    yield made
    made.close()


def park(endpoint, seat, view, *, caller=None):
    return connect_to_peer(endpoint.address, TOKEN, Greeting(purpose="mesh", seat=seat, view=view), caller=caller)


def test_a_purpose_without_a_service_is_refused(endpoint):
    with connect_to_peer(endpoint.address, TOKEN, Greeting(purpose="state", seat=1, view=1)) as sock:
        assert sock.recv(1) == b""
    assert endpoint.refused == 1


def test_too_many_that_wait_for_far_views(endpoint, monkeypatch):
    """They cost the next view nothing."""
    monkeypatch.setattr(endpoints, "MAX_PARKED", 3)
    far = [park(endpoint, seat, 900 + seat) for seat in range(3)]
    endpoint_has = [(900, 0), (901, 1), (902, 2)]
    endpoint.wait_for_peers(0, [0], given_up=lambda: sorted(endpoint._parked) == endpoint_has)
    with park(endpoint, 7, 1000) as late:
        assert late.recv(1) == b""
    with park(endpoint, 1, 2) as near:
        assert far[2].recv(1) == b""
        found = endpoint.wait_for_peers(2, [1], given_up=lambda: False)
        found[1].sendall(b"!")
        assert near.recv(1) == b"!"
    for sock in (*far, *found.values()):
        sock.close()


def test_a_late_connection_does_not_replace_a_newer_one(endpoint):
    """Nor does another caller's, which is not that seat."""
    caller = Caller()
    first, second = (park(endpoint, 1, 2, caller=caller) for _ in range(2))
    assert first.recv(1) == b""
    foreign = park(endpoint, 1, 2, caller=Caller())
    assert foreign.recv(1) == b""
    found = endpoint.wait_for_peers(2, [1], given_up=lambda: False)
    found[1].sendall(b"!")
    assert second.recv(1) == b"!"
    for sock in (first, second, foreign, *found.values()):
        sock.close()


def test_a_connection_of_ones_own_counts_before_any_callers(endpoint):
    with park(endpoint, 1, 2) as caller, socket.socketpair()[0] as own:
        endpoint.wait_for_peers(0, [0], given_up=lambda: (2, 1) in endpoint._parked)
        endpoint.park(2, 1, own)
        assert caller.recv(1) == b""
        with park(endpoint, 1, 2) as late:
            assert late.recv(1) == b""
        assert endpoint.wait_for_peers(2, [1], given_up=lambda: False) == {1: own}
