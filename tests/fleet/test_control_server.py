"""The driver's end, with callers that behave, and callers that do not."""

import contextlib
import json
import math
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections import Counter

import pytest

from shoal.errors import ShoalError
from shoal.fleet import connection_thread, control_server
from shoal.fleet.control_server import ControlServer
from shoal.net.errors import LinkError
from shoal.net.handshake import new_token
from shoal.net.listener import connect_host
from shoal.net.messages import MAX_MESSAGE_BYTES
from shoal.spec.view import View
from tests.fleet.fake_driver import TIMEOUT_S

TOKEN = new_token()


class FakeClient:
    """A worker's end without a mind of its own."""

    def __init__(self, control, **hello):
        self.sock = connect_host(control.host, control.port, TOKEN, json.dumps(hello).encode())
        self.sock.settimeout(TIMEOUT_S)
        self.lines = self.sock.makefile("rb")

    def say(self, kind, **fields):
        self.sock.sendall(json.dumps({"kind": kind} | fields).encode() + b"\n")

    def rows(self):
        """All that comes, until the driver hangs up."""
        with contextlib.suppress(ConnectionResetError):
            for line in self.lines:
                yield json.loads(line)

    def next(self, kind):
        return next(row for row in self.rows() if row["kind"] == kind)

    def close(self):
        self.lines.close()
        self.sock.close()


@pytest.fixture
def control():
    with contextlib.closing(ControlServer(TOKEN)) as made:
        yield made


@pytest.fixture
def connect_client(control):
    """A caller that the driver has seen."""
    with contextlib.ExitStack() as stack:

        def connect(**hello):
            caller = stack.enter_context(contextlib.closing(FakeClient(control, **hello)))
            (said,) = receive_until(control, "here")
            assert said.fields == hello
            caller.number = said.connection
            return caller

        yield connect


def receive_until(control, kind, count=1):
    """What is said until so many of a kind have come."""
    found = []
    while sum(said.kind == kind for said in found) < count:
        assert select.select([control], [], [], TIMEOUT_S)[0], f"no '{kind}' after {found}"
        found += control.receive()
    return found


def open_files():
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the listing's own
            yield os.readlink(f"/proc/self/fd/{fd}")


def kinds(said):
    return [(one.connection, one.kind) for one in said]


def test_a_caller_is_here_then_speaks_then_is_lost(control, connect_client):
    one, two = connect_client(seat=1), connect_client(seat=2)
    assert one.number != two.number
    one.say("standing", view=3, position=14)
    (said,) = receive_until(control, "standing")
    assert (said.connection, said.fields) == (one.number, {"view": 3, "position": 14})
    one.say("last")
    one.close()
    assert kinds(receive_until(control, "lost")) == [(one.number, "last"), (one.number, "lost")]
    assert connect_client(seat=1).number not in (one.number, two.number)


def test_nothing_to_take_is_nothing(control):
    assert control.receive() == []
    assert not select.select([control], [], [], 0)[0]


def test_rows_and_views_go_down_in_order_to_those_they_are_for(control, connect_client):
    one, two = connect_client(), connect_client()
    control.send(one.number, "welcome", name="one")
    control.publish_view(View(number=7, carries={0: [0, 1], 3: [2]}), [one.number, two.number])
    control.send(two.number, "bye")
    control.send(999, "nobody")
    assert [one.next("welcome")["name"], View.model_validate(one.next("view")["view"]).carries] == [
        "one",
        {0: [0, 1], 3: [2]},
    ]
    heard = [row["kind"] for row in (two.next("view"), two.next("bye"))]
    assert heard == ["view", "bye"]


def test_a_busy_driver_is_heard_although_it_does_not_take(control, monkeypatch):
    monkeypatch.setattr(connection_thread, "PING_INTERVAL_S", 0.02)
    with contextlib.closing(FakeClient(control)) as caller:
        assert [caller.next("ping")["kind"] for _ in range(5)] == ["ping"] * 5
    assert kinds(receive_until(control, "lost")) == [(1, "here"), (1, "lost")]


def test_a_killed_worker_is_lost_exactly_once(control, connect_client, tmp_path):
    program = (
        "import sys, json\nfrom shoal.fleet.driver_address import DriverAddress\n"
        "from shoal.fleet.control_client import ControlClient\n"
        "host, port, token = json.loads(sys.stdin.readline())\n"
        "client = ControlClient(lambda: DriverAddress(host, port, token), lambda: {'seat': 5}, heartbeat=dict)\n"
        "client.connect(30)\n"
        "client.wait(5, after=0, position=0)\n"
    )
    worker = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, text=True)
    worker.stdin.write(json.dumps([control.host, control.port, TOKEN]) + "\n")
    worker.stdin.flush()
    (said,) = receive_until(control, "here")
    control.send(said.connection, "welcome")
    receive_until(control, "standing")
    receive_until(control, "beat", 2)
    os.kill(worker.pid, signal.SIGKILL)
    worker.communicate()
    heard = receive_until(control, "lost")
    connect_client(seat=6)
    heard += control.receive()
    assert kinds(heard).count((said.connection, "lost")) == 1
    assert kinds(heard)[-1] == (said.connection, "lost")
    assert control.silence_s(said.connection) == math.inf


def test_strangers_are_refused_and_others_are_not_disturbed(control, connect_client):
    friend = connect_client()
    with socket.create_connection((control.host, control.port)) as half_open:
        half_open.send(b"SHOAL")
        with socket.create_connection((control.host, control.port)) as noise:
            noise.sendall(b"GET / HTTP/1.0\r\n\r\n" + bytes(100))
            with contextlib.suppress(ConnectionResetError):
                assert noise.recv(100) == b""
        with pytest.raises(LinkError, match="token"):
            connect_host(control.host, control.port, new_token(), b"{}")
        friend.say("hello")
        assert kinds(receive_until(control, "hello")) == [(friend.number, "hello")]
    while control.refused < 3:  # the listener sees the closed end by itself
        friend.say("again")
        assert kinds(receive_until(control, "again")) == [(friend.number, "again")]
    assert control.refused == 3


@pytest.mark.parametrize("hello", [b"", b"noise", b"[]", b"7", b"\xff\x00"])
def test_a_hello_that_is_no_object_is_refused(control, connect_client, hello):
    with connect_host(control.host, control.port, TOKEN, hello) as caller:
        caller.settimeout(TIMEOUT_S)
        assert caller.recv(1) == b""
    assert control.refused == 1
    connect_client(seat=1)


@pytest.mark.parametrize(
    "garbage",
    [
        b"\n",
        b"garbage\n",
        b"[1, 2]\n",
        b'{"no": "kind"}\n',
        b'{"kind": "here"}\n',
        b'{"kind": "lost"}\n',
        b"\xff\xfe\xfd\n",
        b"[" * 100_000 + b"\n",
        b"a" * (MAX_MESSAGE_BYTES + 1),
        b'{"kind": "' + b"a" * MAX_MESSAGE_BYTES + b'"}\n',
    ],
    ids=["empty", "noise", "list", "no-kind", "here", "lost", "not-utf8", "deep", "endless", "long"],
)
def test_a_caller_that_breaks_the_language_is_lost_and_others_are_not_disturbed(control, connect_client, garbage):
    friend, foe = connect_client(), connect_client()
    foe.say("good")
    with contextlib.suppress(OSError):  # it may be hung up on before it is done
        foe.sock.sendall(garbage)
    assert kinds(receive_until(control, "lost")) == [(foe.number, "good"), (foe.number, "lost")]
    assert control.refused == 1
    assert all(row["kind"] == "ping" for row in foe.rows())
    friend.say("undisturbed")
    assert kinds(receive_until(control, "undisturbed")) == [(friend.number, "undisturbed")]


def test_who_never_reads_blocks_nobody_and_is_lost(control, connect_client):
    friend, deaf = connect_client(), connect_client()
    text = "a" * 500_000
    for _ in range(40):
        control.send(deaf.number, "more", text=text)
    control.send(friend.number, "less")
    assert friend.next("less") == {"kind": "less"}
    (said,) = receive_until(control, "lost")
    assert (said.connection, said.fields["why"]) == (deaf.number, "it does not read")
    assert control.refused == 0


def test_who_reads_late_gets_all_of_it(control, connect_client):
    slow = connect_client()
    for number in range(10):
        control.send(slow.number, "more", number=number, text="a" * 500_000)
    assert [slow.next("more")["number"] for _ in range(10)] == list(range(10))
    slow.say("thanks")
    assert kinds(receive_until(control, "thanks")) == [(slow.number, "thanks")]


def test_a_dropped_caller_is_closed_and_not_told_of_again(control, connect_client):
    dropped, friend = connect_client(), connect_client()
    dropped.say("too late")
    control.drop(dropped.number)
    assert all(row["kind"] == "ping" for row in dropped.rows())
    friend.say("on time")
    assert kinds(receive_until(control, "on time")) == [(friend.number, "on time")]
    control.drop(dropped.number)
    control.send(dropped.number, "nothing")
    assert control.silence_s(dropped.number) == math.inf


def test_silence_is_counted_for_each_caller(control, connect_client, monkeypatch):
    silent, lively = connect_client(), connect_client()
    while control.silence_s(silent.number) < 0.2:
        lively.say("beat")
        receive_until(control, "beat")
    assert control.silence_s(lively.number) < control.silence_s(silent.number)
    silent.say("beat")
    receive_until(control, "beat")
    assert control.silence_s(silent.number) < control.silence_s(lively.number)
    assert control.silence_s(12345) == math.inf


def test_a_driver_that_does_not_take_holds_its_callers_up_and_loses_nothing(control, connect_client, monkeypatch):
    monkeypatch.setattr(control_server, "MAX_INBOX_BYTES", 1 << 20)
    flood, friend = connect_client(), connect_client()
    rows = 300

    def speak():
        for number in range(rows):
            flood.say("flood", number=number, text="a" * 100_000)

    speaking = threading.Thread(target=speak)
    speaking.start()
    while not control._inbox_full():
        select.select([control], [], [], TIMEOUT_S)
    held = len(control._inbox)
    for _ in range(200):  # as many times could it have read 64 KiB
        control.send(friend.number, "still sent")
        assert friend.next("still sent")
    assert len(control._inbox) <= held + 2
    assert control.silence_s(friend.number) < TIMEOUT_S
    heard = receive_until(control, "flood", rows)
    assert [said.fields["number"] for said in heard] == list(range(rows))
    speaking.join()


def test_a_taken_port_is_left_alone_and_the_old_one_is_had_again(connect_client, control):
    connect_client()
    with contextlib.closing(ControlServer(TOKEN, port=control.port)) as other:
        assert other.port != control.port
        with contextlib.closing(FakeClient(other)):
            receive_until(other, "here")
    control.close()
    with contextlib.closing(ControlServer(TOKEN, port=control.port)) as again:
        assert again.port == control.port


@pytest.mark.parametrize(("listen", "host"), [("127.0.0.1", "127.0.0.1"), ("::1", "::1"), ("localhost", None)])
def test_it_listens_where_it_is_told_to(listen, host):
    if ":" in listen and not os.path.exists("/proc/net/if_inet6"):
        pytest.skip("no IPv6 here")
    with contextlib.closing(ControlServer(TOKEN, listen=listen)) as control, contextlib.closing(FakeClient(control)):
        assert control.host in ((host,) if host else ("127.0.0.1", "::1"))
        receive_until(control, "here")


def test_an_address_for_everybody_is_reached_by_both_families():
    if not socket.has_dualstack_ipv6():
        pytest.skip("no dual stack here")
    with contextlib.closing(ControlServer(TOKEN, listen="::")) as control:
        for host in ("127.0.0.1", "::1"):
            with connect_host(host, control.port, TOKEN, b"{}"):
                receive_until(control, "here")


@pytest.mark.parametrize(("listen", "port"), [("no-such-host.invalid", 0), ("203.0.113.7", 0), ("127.0.0.1", 70_000)])
def test_where_nobody_can_listen_is_an_error_with_a_fix(listen, port):
    with pytest.raises(ShoalError) as failure:
        ControlServer(TOKEN, listen=listen, port=port)
    assert failure.value.code == "SH611"
    assert listen in str(failure.value)


def test_what_was_sent_arrives_although_the_driver_leaves_at_once(connect_client, control):
    caller = connect_client()
    for number in range(8):
        caller.say("unread")
        control.send(caller.number, "more", number=number, text="a" * 500_000)
    control.publish_view(View(number=1, stop="done"), [caller.number])
    got = []
    reading = threading.Thread(target=lambda: got.extend(caller.rows()) or caller.close())
    reading.start()
    control.close()
    reading.join()
    assert [row["number"] for row in got if row["kind"] == "more"] == list(range(8))
    assert got[-1]["view"]["stop"] == "done"


def test_close_leaves_no_thread_and_no_open_file():
    def count():
        """By name: what earlier tests have open may be closed meanwhile."""
        threads = [thread for thread in threading.enumerate() if thread.name == "shoal-control"]
        return Counter([*map(str, threads), *open_files()])

    before = count()
    for _ in range(5):
        control = ControlServer(TOKEN)
        with contextlib.closing(FakeClient(control)) as caller:
            receive_until(control, "here")
            closing = threading.Thread(target=control.close)
            closing.start()
            assert all(row["kind"] == "ping" for row in caller.rows())
        closing.join()
        control.close()
    assert not count() - before


def test_the_token_is_shown_nowhere(control, connect_client, capfd):
    caller = connect_client(seat=1)
    caller.say("word")
    said = receive_until(control, "word")
    with contextlib.suppress(LinkError):
        connect_host(control.host, control.port, "wrong", b"{}")
    texts = [
        repr(control),
        str(control),
        repr(said),
        repr(control._connection_thread),
        repr(control._listener),
        *capfd.readouterr(),
    ]
    assert not any(TOKEN in text for text in texts)
