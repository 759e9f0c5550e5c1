"""A peer reads the state while the main thread stands still, and never while it moves."""

from __future__ import annotations

import contextlib
import socket
import threading

import pytest
import torch

from shoal.collectives import state_server as module
from shoal.collectives.state_server import StateServer, fetch_state
from shoal.collectives.transport.greeting import Greeting
from shoal.net.errors import LinkError
from shoal.spec.view import Address

NOWHERE = Address(host="nowhere", port=1)
STATE = {"w": torch.arange(5.0), "step": 7}
LARGE = torch.ones(4 << 20)  # more than any socket holds: its sender waits for a reader


class StatePeers:
    """Callers of one state_server: each has a thread that serves it, as behind a real endpoint."""

    def __init__(self, state_server: StateServer) -> None:
        self.state_server = state_server
        self.threads: list[threading.Thread] = []
        self.sockets: list[socket.socket] = []

    def __call__(self, address: Address, token: str, greeting: Greeting) -> socket.socket:
        here, there = socket.socketpair()
        self.sockets += [here, there]
        self.threads.append(threading.Thread(target=self.state_server.serve, args=(there, greeting)))
        self.threads[-1].start()
        return here

    def fetch(self, view: int, **options):
        return fetch_state(NOWHERE, "token", seat=1, view=view, max_bytes=1 << 30, connect=self, **options)

    def begin(self, view: int) -> socket.socket:
        """A caller who reads nothing: the thread that serves it stands in the middle of the state."""
        sock = self(NOWHERE, "token", Greeting(purpose="state", seat=2, view=view))
        assert sock.recv(1)
        return sock

    def join(self) -> None:
        for thread in self.threads:
            thread.join(20)
            assert not thread.is_alive()


@pytest.fixture
def state_server():
    return StateServer()


@pytest.fixture
def peers(state_server):
    peers = StatePeers(state_server)
    yield peers
    state_server.close()
    state_server.open(1 << 40, dict)  # whoever still waits has a view that is over
    peers.join()
    for sock in peers.sockets:
        sock.close()


def in_thread(work):
    """What `work` returns or raises, from a thread of its own."""
    outcome = []

    def run():
        try:
            outcome.append(work())
        except LinkError as failure:
            outcome.append(failure)

    thread = threading.Thread(target=run)
    thread.start()

    def result():
        thread.join(20)
        assert not thread.is_alive()
        return outcome[0]

    return result


def waiting(state_server: StateServer, count: int) -> None:
    """Return when so many callers wait at the state_server."""
    while len(state_server._changed._waiters) < count:
        pass


def drained(sock: socket.socket) -> int:
    """How many bytes still came."""
    total = 0
    with contextlib.suppress(ConnectionError):
        while got := len(sock.recv(1 << 20)):
            total += got
    return total


def test_callers_of_the_open_view_are_served(state_server, peers):
    state_server.open(3, lambda: STATE)
    for _ in range(2):
        arrived = peers.fetch(3)
        assert torch.equal(arrived["w"], STATE["w"])
        assert arrived["step"] == 7
    peers.join()
    assert state_server.served_bytes > 2 * STATE["w"].nbytes


def test_callers_who_came_too_early_wait(state_server, peers):
    results = [in_thread(lambda: peers.fetch(3)) for _ in range(3)]
    waiting(state_server, 3)
    state_server.open(3, lambda: STATE)
    assert [result()["step"] for result in results] == [7, 7, 7]


def test_a_caller_of_a_later_view_waits_for_that_view(state_server, peers):
    state_server.open(3, lambda: {"view": 3})
    result = in_thread(lambda: peers.fetch(4))
    waiting(state_server, 1)
    state_server.close()
    state_server.open(4, lambda: {"view": 4})
    assert result() == {"view": 4}


def test_a_caller_of_an_older_view_is_refused_at_once(state_server, peers, monkeypatch):
    monkeypatch.setattr(module, "MAX_WAIT_S", 3600.0)
    state_server.open(3, lambda: STATE)
    with pytest.raises(LinkError, match="closed"):
        peers.fetch(2)
    state_server.close()
    with pytest.raises(LinkError, match="closed"):
        peers.fetch(2)


def test_a_waiting_caller_whose_view_never_comes_is_refused(state_server, peers):
    result = in_thread(lambda: peers.fetch(3))
    waiting(state_server, 1)
    state_server.open(4, lambda: STATE)
    assert isinstance(result(), LinkError)


def test_a_caller_waits_only_so_long(state_server, peers, monkeypatch):
    monkeypatch.setattr(module, "MAX_WAIT_S", 0.01)
    with pytest.raises(LinkError, match="closed"):
        peers.fetch(3)


def test_nobody_is_served_after_close(state_server, peers, monkeypatch):
    monkeypatch.setattr(module, "MAX_WAIT_S", 0.01)
    state_server.open(3, lambda: STATE)
    state_server.close()
    with pytest.raises(LinkError, match="closed"):
        peers.fetch(3)


def test_close_cuts_off_a_reader_who_does_not_read(state_server, peers):
    state_server.open(3, lambda: LARGE)
    stalled = peers.begin(3)
    state_server.close()
    assert drained(stalled) < LARGE.nbytes
    peers.join()
    assert state_server.served_bytes == 0


def test_a_timeout_lets_a_reader_finish(state_server, peers):
    state_server.open(3, lambda: LARGE)
    began = threading.Event()
    result = in_thread(lambda: peers.fetch(3, on_connect=lambda sock: (sock.recv(1, socket.MSG_PEEK), began.set())))
    began.wait()
    state_server.close(timeout_s=20)
    assert torch.equal(result(), LARGE)


def test_close_waits_for_one_who_is_not_at_its_socket(state_server, peers):
    """A reader that is cut off while it copies from a device notices only later."""
    order, reading, go_on = [], threading.Event(), threading.Event()

    def state():
        reading.set()
        go_on.wait()
        order.append("read")
        return STATE

    state_server.open(3, state)
    peers(NOWHERE, "token", Greeting(purpose="state", seat=1, view=3))
    reading.wait()
    closed = in_thread(lambda: (state_server.close(), order.append("closed")))
    while not (state_server._changed._waiters or order):
        pass
    go_on.set()
    closed()
    peers.join()
    assert order == ["read", "closed"]


def test_after_close_nobody_reads(state_server, peers):
    """The main thread changes the state again and again; no caller ever sees one that was half changed."""
    weights = torch.zeros(1 << 18)
    seen = []

    def caller(view):
        with contextlib.suppress(LinkError):
            seen.append(peers.fetch(view).unique())

    for view in range(1, 20):
        state_server.open(view, lambda: weights)
        threads = [threading.Thread(target=caller, args=(view,)) for _ in range(3)]
        for thread in threads:
            thread.start()
        if view % 2:
            for thread in threads:
                thread.join()
        state_server.close(timeout_s=0.001)
        weights.add_(1)
    state_server.open(100, dict)
    peers.join()
    assert len(seen) >= 30
    assert all(len(values) == 1 for values in seen)


def test_opening_an_open_state_server_ends_the_old_view_first(state_server, peers):
    state_server.open(3, lambda: LARGE)
    stalled = peers.begin(3)
    state_server.open(4, lambda: STATE)
    assert drained(stalled) < LARGE.nbytes
    assert peers.fetch(4)["step"] == 7


def test_a_fetch_can_be_aborted_from_another_thread(state_server, peers):
    opened = []
    result = in_thread(lambda: peers.fetch(3, on_connect=opened.append))
    waiting(state_server, 1)
    while not opened:
        pass
    opened[0].shutdown(socket.SHUT_RDWR)
    assert isinstance(result(), LinkError)


def test_a_state_beyond_the_limit_is_refused(state_server, peers):
    state_server.open(3, lambda: LARGE)
    with pytest.raises(LinkError, match="at most"):
        fetch_state(NOWHERE, "token", seat=1, view=3, max_bytes=1000, connect=peers)


def test_a_state_that_fails_leaves_the_server_usable(state_server):
    here, there = socket.socketpair()
    state_server.open(3, lambda: {}["missing"])
    with here:
        with pytest.raises(KeyError):
            state_server.serve(there, Greeting(purpose="state", seat=1, view=3))
        assert here.recv(1) == b""
    state_server.close()
