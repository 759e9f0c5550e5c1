"""Rows come out as they went in, however the bytes were cut; nothing grows without bound."""

import contextlib
import json
import select
import socket

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.net.errors import LinkError, ProtocolError
from shoal.net.messages import (
    MAX_MESSAGE_BYTES,
    MessageConnection,
    Outbox,
    decode_message,
    decode_object,
    encode_message,
)
from shoal.net.wakeup import Wakeup

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)
FIELDS = st.dictionaries(st.text().filter(lambda name: name != "kind"), VALUES, max_size=4)


@pytest.fixture
def pair():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield MessageConnection(ours, Outbox()), theirs


def read_all(link):
    rows = []
    while True:
        before = len(rows)
        rows += link.read()
        if len(rows) == before:
            return rows


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.text(), FIELDS), max_size=5), st.lists(st.integers(1, 40), min_size=1))
def test_rows_survive_any_cutting(rows, cuts):
    data = b"".join(encode_message(kind, fields) for kind, fields in rows)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        link, found, turn = MessageConnection(ours, Outbox()), [], 0
        while data:
            cut = cuts[turn % len(cuts)]
            theirs.sendall(data[:cut])
            found += link.read()
            data, turn = data[cut:], turn + 1
    assert [(row.kind, row.fields) for row in found] == rows


@pytest.mark.parametrize(
    "line",
    [b"", b"{", b"\xff\xfe\x00", b"[1]", b"7", b"null", b'"here"', b"{}", b'{"kind": 1}', b"[" * 200_000, b"1" * 9999],
)
def test_what_is_not_a_row_is_an_error_of_language(line):
    with pytest.raises(ProtocolError):
        decode_message(line)


@given(st.binary(max_size=200))
def test_no_bytes_are_anything_but_an_object_or_an_error_of_language(data):
    with contextlib.suppress(ProtocolError):
        assert isinstance(decode_object(data), dict)


def test_rows_before_the_garbage_are_heard(pair):
    link, theirs = pair
    theirs.sendall(encode_message("one", {}) + b"garbage\n" + encode_message("two", {}))
    rows = link.read()
    assert next(rows).kind == "one"
    with pytest.raises(ProtocolError):
        next(rows)


def test_the_longest_row_goes_through_and_a_longer_one_is_refused_on_both_sides(pair):
    link, theirs = pair
    empty = len(encode_message("x", {"text": ""}))
    longest = encode_message("x", {"text": "a" * (MAX_MESSAGE_BYTES - empty)})
    assert len(longest) == MAX_MESSAGE_BYTES
    assert len(decode_message(longest[:-1]).fields["text"]) == MAX_MESSAGE_BYTES - empty
    with pytest.raises(ValueError, match="'x'"):
        encode_message("x", {"text": "a" * (MAX_MESSAGE_BYTES - empty + 1)})
    with pytest.raises(ProtocolError):
        decode_message(longest)
    theirs.setblocking(False)
    with pytest.raises(ProtocolError, match="too long"):  # noqa: PT012 - it does not matter which read it is
        while True:
            select.select([], [theirs], [], 30)
            theirs.send(b"a" * 65536)
            list(link.read())


def test_a_closed_end_is_heard_after_its_last_row(pair):
    link, theirs = pair
    theirs.sendall(encode_message("last", {"n": 1}) + b'{"kind": "half')
    theirs.close()
    assert [row.kind for row in link.read()] == ["last"]
    with pytest.raises(LinkError, match="closed"):
        list(link.read())


def test_a_full_socket_takes_the_rest_later():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        outbox = Outbox()
        link = MessageConnection(ours, outbox)
        rows = [encode_message("n", {"n": n, "text": "a" * 50_000}) for n in range(40)]
        for row in rows:
            outbox.put(row)
        link.write()
        assert link.has_unsent
        other = MessageConnection(theirs, Outbox())
        found = []
        while len(found) < len(rows):
            found += other.read()
            link.write()
        assert [row.fields["n"] for row in found] == list(range(40))
        assert outbox.size_bytes == 0


def test_the_oldest_rows_are_dropped_but_not_the_one_that_is_half_sent():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        outbox = Outbox()
        link = MessageConnection(ours, outbox)
        outbox.put(encode_message("big", {"text": "a" * 900_000}))
        link.write()
        assert link.has_unsent, "half of it is gone"
        for n in range(10):
            outbox.put(encode_message("small", {"n": n, "text": "a" * 1000}))
        assert outbox.drop_oldest(900_000 + 5_000) == 6
        other, found = MessageConnection(theirs, Outbox()), []
        while len(found) < 5:
            found += other.read()
            link.write()
        assert [row.kind for row in found] == ["big"] + 4 * ["small"]
        assert [row.fields["n"] for row in found[1:]] == [6, 7, 8, 9]


def test_a_row_that_was_half_sent_is_sent_whole_on_the_next_connection():
    outbox = Outbox()
    outbox.put(encode_message("big", {"text": "a" * 900_000}))
    outbox.put(encode_message("next", {}))
    for last in (False, True):
        ours, theirs = socket.socketpair()
        with ours, theirs:
            outbox.rewind()
            link, other, found = MessageConnection(ours, outbox), MessageConnection(theirs, Outbox()), []
            link.write()
            while last and len(found) < 2:
                found += other.read()
                link.write()
    assert [row.kind for row in found] == ["big", "next"]
    assert len(found[0].fields["text"]) == 900_000


def test_goodbye_comes_after_the_last_row():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        outbox = Outbox()
        outbox.put(encode_message("big", {"text": "a" * 900_000}))
        link, other, found = MessageConnection(ours, outbox), MessageConnection(theirs, Outbox()), []
        link.finish_sending()
        with pytest.raises(LinkError, match="closed"):  # noqa: PT012
            while True:
                found += other.read()
                if link.has_unsent:
                    link.write()
        assert [row.kind for row in found] == ["big"]
        theirs.sendall(encode_message("still", {}))
        assert [row.kind for row in link.read()] == ["still"], "the other direction is open"


def test_what_json_does_not_know_becomes_text():
    assert json.loads(encode_message("x", {"path": ValueError("a")})) == {"kind": "x", "path": "a"}


def test_many_wakeups_are_one_and_a_closed_one_is_silent():
    bell = Wakeup()
    for _ in range(20_000):
        bell.notify()
    assert select.select([bell], [], [], 0)[0]
    bell.clear()
    assert not select.select([bell], [], [], 0)[0]
    bell.notify()
    assert select.select([bell], [], [], 0)[0]
    bell.close()
    bell.notify()
    bell.clear()
