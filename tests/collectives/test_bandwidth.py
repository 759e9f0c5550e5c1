"""A link is measured by those at its ends, in a moment, whatever its speed."""

import socket
import threading

import pytest

from shoal.collectives.transport.bandwidth import answer_link_test, measure_link
from shoal.net.errors import LinkError


def tcp_pair():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        here = socket.create_connection(listener.getsockname())
        return here, listener.accept()[0]


def test_both_ways():
    here, there = tcp_pair()
    answering = threading.Thread(target=answer_link_test, args=(there,))
    answering.start()
    with here:
        found = measure_link(here)
    answering.join()
    there.close()
    assert 0 < found.latency_s < 0.035, "no piece waits for a delayed acknowledgement, which takes 0.04 s"
    assert min(found.send_bytes_s, found.receive_bytes_s) > 1e6


def test_a_slow_way_back_is_told_from_a_fast_way_there():
    """The kernel lets a socket send no faster than it is told."""
    here, there = tcp_pair()
    there.setsockopt(socket.SOL_SOCKET, getattr(socket, "SO_MAX_PACING_RATE", 47), 2_000_000)
    answering = threading.Thread(target=answer_link_test, args=(there,))
    answering.start()
    with here:
        found = measure_link(here)
    answering.join()
    there.close()
    assert found.receive_bytes_s < 4_000_000
    assert found.send_bytes_s > found.receive_bytes_s


def test_one_that_goes():
    here, there = tcp_pair()
    there.close()
    with here, pytest.raises(LinkError):
        measure_link(here)


@pytest.mark.parametrize(
    "said", [b"", b"s", b"s" + bytes(8), b"r" + b"\xff" * 8, b"r" + (1 << 40).to_bytes(8, "little")]
)
def test_nonsense_ends_it(said):
    here, there = tcp_pair()
    here.sendall(said)
    here.shutdown(socket.SHUT_WR)
    answer_link_test(there)
    there.close()
    assert here.recv(1) == b""
    here.close()
