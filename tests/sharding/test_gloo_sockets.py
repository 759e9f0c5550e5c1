"""Connections that somebody else has opened can be cut, and what they carry is counted."""

import socket

import pytest

from shoal.sharding.gloo_sockets import GlooSockets


@pytest.fixture
def connected():
    """Wires around a connection, its two ends, and who listens."""
    wires = GlooSockets()
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()) as one:
        other, _ = listener.accept()
        with other:
            yield wires, one, other, listener


def test_who_waits_is_woken_and_who_listens_is_left_alone(connected):
    wires, one, other, listener = connected
    wires.freeze()
    wires.shut_down()
    assert one.recv(1) == other.recv(1) == b""
    with socket.create_connection(listener.getsockname()), listener.accept()[0]:
        """It still listens: gloo ends the process else."""


def test_what_comes_later_belongs_to_others(connected):
    wires, _, _, listener = connected
    wires.freeze()
    with socket.create_connection(listener.getsockname()) as later, listener.accept()[0] as end:
        wires.shut_down()
        later.sendall(b"x")
        assert end.recv(1) == b"x"


def test_before_it_is_frozen_every_new_socket_belongs_to_it(connected):
    wires, one, _, _ = connected
    wires.shut_down()
    assert one.recv(1) == b""


def test_bytes_are_counted(connected):
    wires, one, other, _ = connected
    wires.freeze()
    before = wires.sent_bytes()
    one.sendall(b"x" * 100)
    assert other.recv(100, socket.MSG_WAITALL) == b"x" * 100
    other.sendall(b"y")
    assert one.recv(1) == b"y"  # so that the first end knows what arrived
    assert 100 <= wires.sent_bytes() - before <= 110
