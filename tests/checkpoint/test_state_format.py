"""A state goes through a socket to the last bit, or not at all."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import struct
import threading
import tracemalloc
import zlib

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from shoal.checkpoint import state_format
from shoal.checkpoint.state_format import pack_state, receive_state, send_state, unpack_state
from shoal.errors import CheckpointError
from shoal.net.errors import LinkError

from .states import bit_equal, states, training_state

PLENTY = 1 << 30


@contextlib.contextmanager
def sending(send):
    """The end of a socket to read from, while a thread sends into the other end and closes it."""
    here, there = socket.socketpair()

    def work():
        with there, contextlib.suppress(OSError, LinkError):
            send(there)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        with here:
            yield here
    finally:
        thread.join()


def received(content: bytes, *, max_bytes: int = PLENTY):
    with sending(lambda sock: sock.sendall(content)) as sock:
        return receive_state(sock, max_bytes=max_bytes)


def crafted(header: object, body: bytes = b"") -> bytes:
    """Right checksums around any header: what a peer with a mistake could send."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    start = struct.pack("<8sQI", b"SHOALST\x01", len(text), zlib.crc32(text))
    return start + text + body + struct.pack("<I", zlib.crc32(body))


@given(states)
@settings(max_examples=150, deadline=None)
def test_a_state_comes_back_exactly(state):
    sent = []
    with sending(lambda sock: sent.append(send_state(sock, state))) as sock:
        arrived = receive_state(sock, max_bytes=PLENTY)
        assert sock.recv(1) == b""
    assert bit_equal(arrived, state)
    assert sent == [len(pack_state(state))]
    assert bit_equal(unpack_state(pack_state(state)), state)


def test_a_state_larger_than_every_buffer():
    state = {"large": torch.randn(1500, 1000), "many": [torch.full((), float(i)) for i in range(700)]}
    with sending(lambda sock: send_state(sock, state)) as sock:
        assert bit_equal(receive_state(sock, max_bytes=len(pack_state(state))), state)


def test_bits_of_nan_and_odd_layouts_survive():
    nans = torch.tensor([0x7FC00001, 0x7F800001, -1], dtype=torch.int32).view(torch.float32)
    conjugate = torch.tensor([1 + 2j, 3 - 4j], dtype=torch.complex64).conj()
    state = [nans, conjugate, torch.arange(12).reshape(3, 4).t()[1:], torch.empty(0, 3), torch.tensor(7)]
    assert bit_equal(unpack_state(pack_state(state)), state)


def test_tied_tensors_come_back_equal_and_apart():
    weight = torch.randn(3)
    arrived = unpack_state(pack_state({"a": weight, "b": weight}))
    arrived["a"].zero_()
    assert bit_equal(arrived["b"], weight)


def test_tensors_that_arrived_are_the_receivers_own():
    content = pack_state({"a": torch.ones(4)})
    unpack_state(content)["a"].zero_()
    assert bit_equal(unpack_state(content)["a"], torch.ones(4))


def test_a_parameter_is_sent_without_its_gradient():
    arrived = unpack_state(pack_state([torch.nn.Parameter(torch.ones(2))]))
    assert bit_equal(arrived[0], torch.ones(2))
    assert not arrived[0].requires_grad


def test_a_state_that_cannot_be_saved_is_said_before_a_byte_is_sent():
    here, there = socket.socketpair()
    with here, there:
        with pytest.raises(CheckpointError, match="cannot be saved"):
            send_state(there, {"ok": torch.ones(2), "bad": object()})
        there.close()
        assert here.recv(1) == b""


def test_a_socket_that_takes_little_at_a_time():
    class Narrow:
        taken = b""

        def sendmsg(self, buffers):
            some = b"".join(buffers)[:7]
            self.taken += some
            return len(some)

    narrow, state = Narrow(), {"a": torch.arange(30.0), "b": [torch.tensor(i) for i in range(20)]}
    assert send_state(narrow, state) == len(narrow.taken)
    assert bit_equal(unpack_state(narrow.taken), state)


def test_a_receiver_that_goes_away_is_a_link_error():
    here, there = socket.socketpair()
    here.close()
    with there, pytest.raises(LinkError):
        send_state(there, torch.zeros(1 << 20))


# ---- damage ----

SAMPLE = pack_state({"model": {"w": torch.arange(40.0), "n": torch.tensor(3)}, "step": 3, "loss": float("nan")})


@given(st.integers(0, len(SAMPLE) - 1))
@example(0)
@example(len(SAMPLE) - 1)
@settings(max_examples=60, deadline=None)
def test_a_truncated_state_is_refused(size):
    with pytest.raises(LinkError):
        received(SAMPLE[:size])
    with pytest.raises(LinkError):
        unpack_state(SAMPLE[:size])


@pytest.mark.parametrize("bit", range(8))
def test_every_flipped_bit_is_refused(bit):
    for store_path in range(len(SAMPLE)):
        damaged = bytearray(SAMPLE)
        damaged[store_path] ^= 1 << bit
        with pytest.raises(LinkError):
            unpack_state(bytes(damaged))


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_flipped_bits_on_a_socket_are_refused(data):
    damaged = bytearray(SAMPLE)
    for store_path in data.draw(st.sets(st.integers(0, len(SAMPLE) - 1), min_size=1, max_size=4)):
        damaged[store_path] ^= data.draw(st.integers(1, 255))
    with pytest.raises(LinkError):
        received(bytes(damaged))


@given(st.binary(max_size=200))
@settings(max_examples=60, deadline=None)
def test_malformed_bytes_are_refused(noise):
    with pytest.raises(LinkError):
        received(noise)
    with pytest.raises(LinkError):
        unpack_state(noise)


def test_nothing_may_follow_what_was_packed():
    with pytest.raises(LinkError, match="follow"):
        unpack_state(SAMPLE + b"x")


anything = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=4)
    | st.sampled_from(["/w", "F32", "BOOL"]),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from(["tensor", "dict", "tuple", "float", "x"]), inner, max_size=2)
    ),
    max_leaves=15,
)
tables = st.lists(st.tuples(anything, st.sampled_from(["F32", "BOOL", "X", ""]) | anything, anything), max_size=3)


@given(st.tuples(anything, tables | anything) | anything, st.binary(max_size=40))
@example([{"float": 10**400}, []], b"")
@settings(max_examples=300, deadline=None)
def test_a_peer_with_a_mistake_crashes_nobody(header, body):
    with contextlib.suppress(LinkError):
        unpack_state(crafted(header, body))


@pytest.mark.parametrize(
    "header",
    [b"[" * 100_000, b"[1," + b"9" * 5000 + b"]", b"\xff\xfe", b'{"a":1}', b"", b"[[]]"],
)
def test_hostile_json_is_refused(header):
    with pytest.raises(LinkError):
        unpack_state(crafted(header))


@pytest.mark.parametrize("shape", [[True], [1.0], [-1, -1], [1 << 70, 0], "1", [[1]], None])
def test_no_tensor_has_such_a_shape(shape):
    with pytest.raises(LinkError):
        unpack_state(crafted([{"tensor": "/w"}, [["/w", "F32", shape]]], b"1234"))


def test_messages_stay_short_whatever_the_peer_sends():
    for header in ([{"x" * 10_000: 1}, []], [1, [["n" * 10_000, "?", []]]], [1, [["n", "F32", ["x" * 10_000]]]]):
        with pytest.raises(LinkError) as caught:
            unpack_state(crafted(header))
        assert len(str(caught.value)) < 400


# ---- limits ----


def test_the_limit_is_exact():
    state = training_state(3)
    content = pack_state(state)
    needed = len(content) - 24  # all but the frame: the start's 20 bytes and the checksum's 4
    assert bit_equal(received(content, max_bytes=needed), state)
    with pytest.raises(LinkError, match="at most"):
        received(content, max_bytes=needed - 1)


def test_a_header_longer_than_the_limit_is_refused_unread():
    with pytest.raises(LinkError, match="the header of the state has"):
        received(struct.pack("<8sQI", b"SHOALST\x01", state_format.MAX_HEADER_BYTES + 1, 0), max_bytes=1 << 40)
    with pytest.raises(LinkError, match="the header of the state has"):
        received(struct.pack("<8sQI", b"SHOALST\x01", 1000, 0), max_bytes=999)


@given(st.lists(st.lists(st.integers(0, 2**40), max_size=4), min_size=1, max_size=4))
@settings(max_examples=60, deadline=None)
def test_nothing_is_reserved_beyond_the_limit(shapes):
    reserved = []
    empty = state_format._empty
    content = crafted([None, [[str(i), "F64", shape] for i, shape in enumerate(shapes)]])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(state_format, "_empty", lambda dtype, shape: reserved.append(made := empty(dtype, shape)) or made)
        with contextlib.suppress(LinkError):
            unpack_state(content)
        with contextlib.suppress(LinkError):
            received(content, max_bytes=5000)
    assert sum(tensor.nbytes for tensor in reserved) <= 5000


def test_a_stated_size_reserves_no_python_memory_before_it_is_checked():
    tracemalloc.start()
    try:
        with pytest.raises(LinkError):
            received(struct.pack("<8sQI", b"SHOALST\x01", 1 << 62, 0) + os.urandom(100), max_bytes=1 << 20)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
