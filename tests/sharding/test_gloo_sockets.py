"""Connections that somebody else has opened can be cut, and what they carry is counted."""

import socket

import pytest

from shoal.sharding.gloo_sockets import GlooSockets


@pytest.fixture
def connected():
    """Sockets around a connection, its two ends, and who listens."""
    sockets = GlooSockets()
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()) as one:
        other, _ = listener.accept()
        with other:
            yield sockets, one, other, listener


def test_who_waits_is_woken_and_who_listens_is_left_alone(connected):
    sockets, one, other, listener = connected
    sockets.freeze()
    sockets.shut_down()
    assert one.recv(1) == other.recv(1) == b""
    with socket.create_connection(listener.getsockname()), listener.accept()[0]:
        """It still listens: gloo ends the process else."""


def test_what_comes_later_belongs_to_others(connected):
    sockets, _, _, listener = connected
    sockets.freeze()
    with socket.create_connection(listener.getsockname()) as later, listener.accept()[0] as end:
        sockets.shut_down()
        later.sendall(b"x")
        assert end.recv(1) == b"x"


def test_before_it_is_frozen_every_new_socket_belongs_to_it(connected):
    sockets, one, _, _ = connected
    sockets.shut_down()
    assert one.recv(1) == b""


def test_bytes_are_counted(connected):
    sockets, one, other, _ = connected
    sockets.freeze()
    before = sockets.sent_bytes()
    one.sendall(b"x" * 100)
    assert other.recv(100, socket.MSG_WAITALL) == b"x" * 100
    other.sendall(b"y")
    assert one.recv(1) == b"y"  # so that the first end knows what arrived
    assert 100 <= sockets.sent_bytes() - before <= 110
