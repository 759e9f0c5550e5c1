"""The listener: who knows the token comes in, everybody else is refused and counted, and nobody holds up the others."""

import contextlib
import os
import select
import socket
import threading

import pytest

from shoal.errors import ShoalError
from shoal.net import handshake
from shoal.net import listener as listener_module
from shoal.net.errors import LinkError
from shoal.net.handshake import new_token
from shoal.net.listener import AuthenticatedListener, connect, connect_host, listen_in_range
from tests.fleet.slurm_cluster import free_ports

TOKEN = new_token()


class CountedListener(AuthenticatedListener):
    """Notifies `changed` of each refusal: a caller may know of it before the listener has counted it."""

    def __init__(self, *args, changed, **options):
        self.changed = changed
        super().__init__(*args, **options)

    def _refuse(self, sock):
        super()._refuse(sock)
        with self.changed:
            self.changed.notify_all()


class ListenerHarness:
    """A listener whose connections are kept in order."""

    def __init__(self, welcome=None, token=TOKEN, tls_contexts=None):
        listener = socket.create_server(("127.0.0.1", 0))
        self.address = listener.getsockname()
        self.accepted = []
        self.changed = threading.Condition()
        self.tls_contexts = tls_contexts
        self.listener = CountedListener(
            [listener], token, welcome or self.receive, tls_contexts=tls_contexts, changed=self.changed
        )

    def receive(self, sock, hello):
        with self.changed:
            self.accepted.append((sock, hello))
            self.changed.notify_all()

    def wait_accepted(self, number):
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.accepted) > number, 30)
            return self.accepted[number]

    def assert_refused(self, number):
        with self.changed:
            assert self.changed.wait_for(lambda: self.listener.refused >= number, 30)
        assert self.listener.refused == number

    def connect(self):
        return socket.create_connection(self.address, timeout=30)

    def call(self, hello=b"me", token=TOKEN, **tls):
        """With the same contexts as the listener, or with other `tls_contexts`."""
        contexts = tls.get("tls_contexts", self.tls_contexts)
        return connect(socket.AF_INET, self.address, token, hello, tls_contexts=contexts)

    def close(self):
        self.listener.close()
        for sock, _ in self.accepted:
            sock.close()


@pytest.fixture
def harness():
    with contextlib.closing(ListenerHarness()) as made:
        yield made


def read_until_closed(sock):
    """What came before the other side hung up."""
    got = b""
    with sock, contextlib.suppress(ConnectionResetError):
        while data := sock.recv(4096):
            got += data
    return got


def still_serves(harness):
    before = len(harness.accepted)
    with harness.call(b"again"):
        assert harness.wait_accepted(before)[1] == b"again"


def test_who_knows_the_token_is_let_in_with_its_hello(harness):
    with harness.call(b'{"seat": 3}') as caller:
        sock, hello = harness.wait_accepted(0)
        assert hello == b'{"seat": 3}'
        sock.sendall(b"down")
        caller.sendall(b"upwards")
        assert handshake.receive_exactly(caller, 4) == b"down"
        assert handshake.receive_exactly(sock, 7) == b"upwards"
    assert harness.listener.refused == 0


def test_small_rows_are_sent_at_once(harness):
    with harness.call() as caller:
        for sock in (caller, harness.wait_accepted(0)[0]):
            assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_a_wrong_token_is_refused_on_both_sides(harness):
    with pytest.raises(LinkError, match="token"):
        harness.call(token=new_token())
    still_serves(harness)
    harness.assert_refused(1)
    assert len(harness.accepted) == 1


def test_who_does_not_check_us_is_still_checked(harness):
    """A caller that plays the game but cannot prove itself."""
    with harness.connect() as stranger:
        stranger.sendall(handshake.MAGIC + bytes(16) + b"\x02\x00" + b"me")
        proof = handshake.receive_exactly(stranger, 48)[16:]
        stranger.sendall(proof)  # what the listener itself said, played back
        assert read_until_closed(stranger) == b""
    harness.assert_refused(1)
    assert harness.accepted == []


@pytest.mark.parametrize(
    "noise",
    [
        b"GET / HTTP/1.1\r\nHost: a\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(500),
        b"SSH-2.0-OpenSSH_9.6\r\n" + b"x" * 10,
        bytes(range(256)) * 400,
        handshake.MAGIC + bytes(16) + b"\xff\xff" + b"x" * 70_000,
    ],
    ids=["http", "tls", "ssh", "bytes", "hello-too-long"],
)
def test_malformed_input_is_refused_and_counted(harness, noise):
    stranger = harness.connect()
    with contextlib.suppress(OSError):  # it may hang up before we are done
        stranger.sendall(noise)
    learned = read_until_closed(stranger)
    assert learned == (handshake.TLS_ALERT if noise.startswith(handshake.TLS_RECORD_PREFIX) else b""), (
        "that there is no TLS"
    )
    harness.assert_refused(1)
    still_serves(harness)


@pytest.mark.parametrize("length", [0, 1, 5, 6, 23, 24, 25])
def test_a_truncated_handshake_is_refused(harness, length):
    with harness.connect() as stranger:
        stranger.sendall((handshake.MAGIC + bytes(16) + b"\x02\x00" + b"me")[:length])
        stranger.shutdown(socket.SHUT_WR)
        read_until_closed(stranger)
    harness.assert_refused(1)
    still_serves(harness)


def test_who_says_nothing_is_sent_away_and_others_come_in_meanwhile(harness, monkeypatch):
    monkeypatch.setattr(handshake, "TIMEOUT_S", 0.3)
    silent = [harness.connect() for _ in range(5)]
    still_serves(harness)
    for stranger in silent:
        assert read_until_closed(stranger) == b""
    harness.assert_refused(5)


def test_who_lets_its_bytes_drip_gets_no_more_time_than_others(harness, monkeypatch):
    monkeypatch.setattr(handshake, "TIMEOUT_S", 0.3)
    greeting = handshake.MAGIC + bytes(16) + b"\x00\x10" + bytes(4096)
    with harness.connect() as stranger:
        dripped = 0
        while not select.select([stranger], [], [], 0.02)[0]:
            stranger.send(greeting[dripped : dripped + 1])
            dripped += 1
        assert dripped < len(greeting) // 4
    still_serves(harness)
    harness.assert_refused(1)


def test_a_crowd_of_strangers_costs_only_so_many_threads(monkeypatch):
    monkeypatch.setattr(handshake, "TIMEOUT_S", 0.5)
    monkeypatch.setattr(listener_module, "MAX_CONCURRENT_HANDSHAKES", 2)
    with contextlib.closing(ListenerHarness()) as harness:
        crowd = [harness.connect() for _ in range(20)]
        assert sum(t.name == "shoal-caller" for t in threading.enumerate()) <= 2
        for stranger in crowd:
            read_until_closed(stranger)
        harness.assert_refused(20)
        still_serves(harness)


@pytest.mark.parametrize("greeting", [b"", handshake.MAGIC, handshake.MAGIC + bytes(16) + b"\x02\x00me"])
def test_a_crowd_of_half_open_connections_keeps_nobody_out(monkeypatch, greeting):
    """They stay for as long as they may, and whoever knows the token is let in at once: the oldest makes room."""
    monkeypatch.setattr(handshake, "TIMEOUT_S", 30.0)
    monkeypatch.setattr(listener_module, "MAX_CONCURRENT_HANDSHAKES", 8)
    with contextlib.closing(ListenerHarness()) as harness, contextlib.ExitStack() as stack:
        for _ in range(3):
            for _ in range(20):
                stack.enter_context(harness.connect()).sendall(greeting)
            still_serves(harness)
        assert sum(t.name == "shoal-caller" for t in threading.enumerate()) <= 8
        with harness.changed:
            assert harness.changed.wait_for(lambda: harness.listener.refused >= 50, 30)


def test_a_host_that_refuses_the_hello_is_counted(monkeypatch):
    def welcome(sock, hello):
        raise LinkError("not you")

    with contextlib.closing(ListenerHarness(welcome)) as harness:
        assert read_until_closed(harness.call()) == b""
        harness.assert_refused(1)


def test_nobody_comes_in_after_close(harness):
    harness.listener.close()
    with pytest.raises(LinkError, match="cannot reach"):
        harness.call()
    for thread in threading.enumerate():
        if thread.name == "shoal-listener":
            thread.join(30)
            assert not thread.is_alive()


def test_a_caller_finds_out_that_the_other_side_does_not_know_the_token():
    with contextlib.closing(ListenerHarness(token=new_token())) as impostor, pytest.raises(LinkError, match="token"):
        impostor.call()


def test_a_caller_does_not_wait_for_ever_for_an_answer(monkeypatch):
    monkeypatch.setattr(handshake, "TIMEOUT_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as deaf, pytest.raises(LinkError):
        connect(socket.AF_INET, deaf.getsockname(), TOKEN, b"me")


def test_a_hello_that_is_too_long_is_not_even_sent(harness):
    most = handshake.MAX_HELLO_BYTES
    with pytest.raises(LinkError, match=f"at most {most}"):
        harness.call(b"x" * (most + 1))
    with harness.call(b"x" * most):
        assert len(harness.wait_accepted(0)[1]) == most


def test_hosts_are_called_by_name_or_by_address(harness):
    with connect_host("localhost", harness.address[1], TOKEN, b"named"):
        assert harness.wait_accepted(0)[1] == b"named"
    for nowhere in ("no-such-host.invalid", "a..b", "x" * 300):
        with pytest.raises(LinkError, match="cannot find"):
            connect_host(nowhere, 1, TOKEN, b"")
    with pytest.raises(LinkError, match="65535"):
        connect_host("localhost", 65_536 + harness.address[1], TOKEN, b"")


def test_unix_sockets_have_the_same_listener():
    name = f"\0shoal-test-{os.getpid()}-{new_token()}"
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(name)
    listener.listen()
    let_in = threading.Event()
    door = AuthenticatedListener([listener], TOKEN, lambda sock, hello: (sock.close(), let_in.set()))
    with connect(socket.AF_UNIX, name, TOKEN, b"me"):
        assert let_in.wait(30)
    door.close()


class Recorded:
    """A socket whose every byte is kept."""

    def __init__(self, sock, tape):
        self.sock, self.tape = sock, tape
        self.settimeout, self.recv_into = sock.settimeout, sock.recv_into

    def sendall(self, data):
        self.tape += data
        self.sock.sendall(data)


def test_the_token_is_never_sent_and_no_greeting_is_like_another():
    tapes = []
    for _ in range(2):
        tape = bytearray()
        ours, theirs = socket.socketpair()
        with ours, theirs:
            answering = threading.Thread(target=handshake.server_handshake, args=(Recorded(theirs, tape), TOKEN))
            answering.start()
            handshake.client_handshake(Recorded(ours, tape), TOKEN, b"me")
            answering.join()
        assert TOKEN.encode() not in tape
        assert bytes.fromhex(TOKEN) not in tape
        tapes.append(bytes(tape))
    assert tapes[0][6:22] != tapes[1][6:22]
    assert tapes[0][-33:] != tapes[1][-33:]


def test_a_recorded_greeting_opens_nothing(harness):
    tape = bytearray()
    sock = harness.connect()
    handshake.client_handshake(Recorded(sock, tape), TOKEN, b"me")
    sock.close()
    head, proof = bytes(tape[:26]), bytes(tape[26:])
    with harness.connect() as thief:
        thief.sendall(head + proof)
        assert len(read_until_closed(thief)) == 48, "the listener's challenge, and then nothing"
    harness.assert_refused(1)


def test_the_token_is_in_no_message_or_repr(harness, capfd):
    told = [repr(harness.listener), str(harness.listener)]
    for token in (new_token(), ""):
        with pytest.raises(LinkError) as failure:
            harness.call(token=token)
        told += [repr(failure.value), str(failure.value), token and str(failure.value.__cause__)]
    harness.listener.close()
    with pytest.raises(LinkError) as failure:
        harness.call()
    told += [repr(failure.value), repr(failure.value.__cause__), *capfd.readouterr()]
    assert not any(TOKEN in text for text in told)


def test_a_listener_takes_the_first_free_port_of_a_range_and_says_if_there_is_none():
    first = free_ports(2)
    ports = range(first, first + 2)
    with listen_in_range("127.0.0.1", ports, backlog=1) as one, listen_in_range("127.0.0.1", ports, backlog=1) as two:
        assert [one.getsockname()[1], two.getsockname()[1]] == list(ports)
        with pytest.raises(ShoalError, match=f"SH611.*{first} to {first + 1}.*in use"):
            listen_in_range("127.0.0.1", ports, backlog=1)
