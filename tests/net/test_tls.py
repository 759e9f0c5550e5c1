"""TLS: what goes over TCP is a socket like any other to those who use it, and noise to everybody else."""

import contextlib
import select
import socket
import ssl
import subprocess
import sys
import threading

import pytest

from shoal.net import handshake, tls_pump
from shoal.net.errors import LinkError, TlsError, TokenError
from shoal.net.handshake import TLS_ALERT, new_token
from shoal.net.listener import AuthenticatedListener, connect
from shoal.net.tls_pump import TlsSocket
from shoal.spec.certificates import load_tls_contexts
from tests.net.certificate_authority import CertificateAuthority, needs_openssl
from tests.net.recording_proxy import RecordingProxy
from tests.net.test_listener import TOKEN, ListenerHarness, read_until_closed

pytestmark = needs_openssl
LONGEST_S = 30


@pytest.fixture(scope="module")
def authorities(tmp_path_factory):
    place = tmp_path_factory.mktemp("authorities")
    return {name: CertificateAuthority(place / name).issue("member") for name in ("ours", "theirs")}


@pytest.fixture(scope="module")
def ours(authorities):
    return load_tls_contexts(authorities["ours"], where="ours")


@pytest.fixture(scope="module")
def theirs(authorities):
    return load_tls_contexts(authorities["theirs"], where="theirs")


@pytest.fixture
def harness(ours):
    with contextlib.closing(ListenerHarness(tls_contexts=ours)) as made:
        yield made


@pytest.fixture
def pair(harness):
    """Both ends of a connection: who called, and who was called."""
    with harness.call() as caller:
        guest, _ = harness.wait_accepted(0)
        for sock in (caller, guest):
            sock.settimeout(LONGEST_S)
        yield caller, guest


@pytest.fixture(params=["caller", "called"])
def ends(pair, request):
    """The same, in both orders."""
    return pair if request.param == "caller" else pair[::-1]


def pump_threads():
    return [thread for thread in threading.enumerate() if thread.name == "shoal-tls"]


def all_of(sock):
    got = bytearray()
    while data := sock.recv(1 << 16):
        got += data
    return bytes(got)


def test_who_has_certificate_and_token_comes_in(harness):
    with harness.call(b'{"seat": 3}') as caller:
        guest, hello = harness.wait_accepted(0)
        assert hello == b'{"seat": 3}'
        assert isinstance(caller, TlsSocket)
        assert isinstance(guest, TlsSocket)
        assert caller.gettimeout() is guest.gettimeout() is None
        assert harness.listener.refused == 0


def test_it_passes_for_the_connection_itself(pair):
    caller, guest = pair
    assert caller.family == guest.family == socket.AF_INET, "a Unix socket would be taken for a peer on this host"
    assert caller.getpeername() == guest.getsockname()
    assert caller.getsockname() == guest.getpeername()
    caller.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 0)
    assert caller._outer.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) == 0
    caller.close()
    assert all_of(guest) == b""
    guest.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # of a connection that has ended


def test_much_in_both_directions_at_once(pair):
    """Sizes that fit nothing: each end sends all before it is asked to read any."""
    contents = [bytes((7 * i + k) % 251 for i in range(99_991)) * 40 for k in (0, 1)]
    got = [b"", b""]

    def send(sock, content):
        sock.sendall(content)
        sock.shutdown(socket.SHUT_WR)

    def receive(k):
        got[k] = all_of(pair[k])

    threads = [threading.Thread(target=send, args=(pair[k], contents[k])) for k in (0, 1)]
    threads += [threading.Thread(target=receive, args=(k,)) for k in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [len(one) for one in got] == [len(one) for one in contents]
    assert got == contents[::-1]


def test_a_half_close_is_one_there_too(ends):
    one, other = ends
    one.sendall(b"the last word")
    one.shutdown(socket.SHUT_WR)
    assert all_of(other) == b"the last word"
    other.sendall(b"x" * 1_000_000)
    other.shutdown(socket.SHUT_WR)
    assert all_of(one) == b"x" * 1_000_000


def test_a_goodbye_after_much_unread_loses_nothing(ends):
    """TLS forbids to say goodbye on top of what was not read; nobody here has to know."""
    one, other = ends
    other.sendall(b"y" * 300_000)
    one.shutdown(socket.SHUT_WR)
    assert other.recv(1) == b""
    other.sendall(b"z" * 300_000)
    other.close()
    assert all_of(one) == b"y" * 300_000 + b"z" * 300_000


def test_what_was_sent_before_a_close_arrives(ends):
    one, other = ends
    other.sendall(b"nobody reads this")
    sender = threading.Thread(target=lambda: (one.sendall(b"w" * 2_000_000), one.close()))
    sender.start()
    assert len(all_of(other)) == 2_000_000
    sender.join()


def test_data_that_meets_a_close_does_not_cost_what_was_sent_before(ends):
    """The kernel resets a connection that is closed with unread data, and drops what it has not sent."""
    one, other = ends
    other._outer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)  # so that much waits on the closing side
    content = b"v" * 600_000
    sender = threading.Thread(target=lambda: (one.sendall(content), one.close()))
    sender.start()
    got = other.recv(1)
    sender.join(LONGEST_S)
    assert not sender.is_alive(), "all is written, and the end is closed"
    other.sendall(b"too late")
    assert len(got + all_of(other)) == len(content)


def test_shutting_down_wakes_both_who_wait(ends):
    one, other = ends
    waiting = [threading.Thread(target=sock.recv, args=(1,)) for sock in ends]
    for thread in waiting:
        thread.start()
    one.shutdown(socket.SHUT_RDWR)
    for thread in waiting:
        thread.join(LONGEST_S)
        assert not thread.is_alive()
    assert other.recv(1) == b""


def test_who_writes_to_one_that_is_gone_learns_it(ends):
    one, other = ends
    one.close()
    with pytest.raises((BrokenPipeError, ConnectionResetError)):
        other.sendall(bytes(100_000_000))


def test_a_connection_that_breaks_ends_both_at_once(harness):
    """No goodbye came: nobody may go on as if all had been said."""
    with contextlib.closing(RecordingProxy(harness.address)) as relay:
        caller = connect(socket.AF_INET, relay.address, TOKEN, b"me", tls_contexts=harness.tls_contexts)
        guest, _ = harness.wait_accepted(0)
        relay.break_connections()
        for sock in (caller, guest):
            sock.settimeout(LONGEST_S)
            assert read_until_closed(sock) == b""
            assert sock.failure_reason == ""


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_pump_that_fails_leaves_nobody_waiting(pair):
    def fail():
        raise MemoryError

    caller, guest = pair
    both = pump_threads()
    caller._pump._read_user = fail
    caller.sendall(b"!")
    assert read_until_closed(caller) == read_until_closed(guest) == b""
    for thread in both:
        thread.join(LONGEST_S)


def test_who_does_not_read_is_not_waited_for_in_memory(pair):
    caller, _ = pair
    caller.setblocking(False)
    sent = 0
    while select.select([], [caller], [], 0.5)[1]:
        sent += caller.send(b"x" * 100_000)
        assert sent < 64 << 20
    assert sum(len(pump._ciphertext) for pump in tls_pump._pumps) < 2 * tls_pump.CHUNK_BYTES


def test_a_close_ends_thread_and_sockets(harness):
    before = set(pump_threads())
    with harness.call():
        guest, _ = harness.wait_accepted(0)
        mine = set(pump_threads()) - before
        assert len(mine) == 2
    guest.close()
    for thread in mine:
        thread.join(LONGEST_S)
        assert not thread.is_alive()


def test_who_hangs_up_on_one_that_never_reads_does_not_leave_a_thread(pair, monkeypatch):
    monkeypatch.setattr(tls_pump, "LINGER_S", 0.05)
    caller, guest = pair
    caller.setblocking(False)
    while select.select([], [caller], [], 0.5)[1]:
        caller.send(b"x" * 100_000)
    before = set(pump_threads())
    caller.close()
    guest.setblocking(True)
    while len(set(pump_threads()) & before) == 2:
        pass
    guest.close()


# ---- who is not let in ----


def refused(harness):
    harness.assert_refused(1)
    with harness.call(b"again"):
        assert harness.wait_accepted(0)[1] == b"again"


def test_a_wrong_token_is_a_wrong_token(harness):
    with pytest.raises(TokenError):
        harness.call(token=new_token())
    refused(harness)


def test_a_caller_of_another_authority_is_refused(harness, authorities):
    """It trusts us; we do not trust it."""
    stranger = careless(authorities["theirs"])
    with pytest.raises(TlsError, match="does not accept our certificate: unknown ca"):
        harness.call(tls_contexts=(stranger, stranger))
    refused(harness)


def test_a_caller_without_a_certificate_is_refused(harness):
    nobody = careless()
    with pytest.raises(TlsError, match="certificate required"):
        harness.call(tls_contexts=(nobody, nobody))
    refused(harness)


def careless(directory=None):
    """A caller's context that accepts everybody."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    if directory:
        context.load_cert_chain(directory / "cert.pem", directory / "key.pem")
    return context


def test_a_listener_of_another_authority_is_not_trusted(harness, theirs):
    with pytest.raises(TlsError, match="certificate of the other side is not accepted"):
        harness.call(tls_contexts=theirs)
    refused(harness)


def test_a_plain_caller_is_told_that_tls_is_used(harness):
    with pytest.raises(TlsError, match="the other side uses TLS, but this process does not"):
        harness.call(tls_contexts=None)
    refused(harness)


def test_a_caller_with_tls_is_told_that_it_is_not_used(ours):
    with contextlib.closing(ListenerHarness()) as plain:
        with pytest.raises(TlsError, match="the other side does not use TLS"):
            plain.call(tls_contexts=ours)
        refused(plain)


def test_two_authorities_in_one_process_do_not_mix(ours, theirs):
    """As in a process that drives two runs with different certificates."""
    with contextlib.ExitStack() as open_:
        both = [open_.enter_context(contextlib.closing(ListenerHarness(tls_contexts=one))) for one in (ours, theirs)]
        for harness in both:
            open_.enter_context(harness.call(b"mine"))
            assert harness.wait_accepted(0)[1] == b"mine"
        for harness, other in zip(both, (theirs, ours), strict=True):
            with pytest.raises(TlsError, match="the certificate of the other side is not accepted"):
                harness.call(tls_contexts=other)


NOISE = {
    "nothing": b"",
    "an alert": TLS_ALERT,
    "HTTP": b"GET / HTTP/1.1\r\n\r\n",
    "half a record": b"\x16\x03\x01\x02\x00\x01",
    "an empty record": b"\x16\x03\x01\x00\x00" + bytes(40),
    "a long greeting": handshake.MAGIC + b"x" * 100_000,
}


@pytest.mark.parametrize("plain", [False, True], ids=["tls", "plain"])
@pytest.mark.parametrize("noise", NOISE)
def test_malformed_input_is_refused_and_delays_no_client(ours, noise, plain, monkeypatch):
    monkeypatch.setattr(handshake, "TIMEOUT_S", 0.3)
    with contextlib.closing(ListenerHarness(tls_contexts=None if plain else ours)) as harness:
        with harness.connect() as sock, contextlib.suppress(OSError):
            sock.sendall(NOISE[noise])
            sock.shutdown(socket.SHUT_WR)
            read_until_closed(sock)
        monkeypatch.setattr(handshake, "TIMEOUT_S", LONGEST_S)
        refused(harness)


def test_one_who_stops_in_the_handshake_is_let_go(harness, monkeypatch):
    monkeypatch.setattr(handshake, "TIMEOUT_S", 0.2)
    with harness.connect() as silent:
        assert read_until_closed(silent) == b""
    monkeypatch.setattr(handshake, "TIMEOUT_S", LONGEST_S)
    refused(harness)


def test_no_thread_to_be_had_is_a_refusal(harness, monkeypatch):
    def none_left(self):
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", none_left)
        with pytest.raises(LinkError, match="thread"):
            harness.call()


# ---- what others see ----


@pytest.mark.parametrize("encrypts", [True, False])
def test_nothing_readable_goes_over_the_wire(ours, encrypts):
    """Without TLS the same recording shows everything: else this test would say nothing."""
    contexts = ours if encrypts else None
    with (
        contextlib.closing(ListenerHarness(tls_contexts=contexts)) as harness,
        contextlib.closing(RecordingProxy(harness.address)) as relay,
        connect(socket.AF_INET, relay.address, TOKEN, b'{"role": "worker"}', tls_contexts=contexts) as caller,
    ):
        guest, _ = harness.wait_accepted(0)
        guest.sendall(b'{"kind": "welcome"}\n')
        assert caller.recv(100).startswith(b'{"kind"')
        seen = [word in relay.recorded for word in (handshake.MAGIC, b"role", b"worker", b"kind", b"welcome")]
    assert set(seen) == {not encrypts}


def test_unix_sockets_stay_as_they_are(ours):
    unix = socket.socket(socket.AF_UNIX)
    unix.bind("")
    unix.listen()
    let_in = []
    came = threading.Event()
    listener = AuthenticatedListener(
        [unix], TOKEN, lambda sock, hello: (let_in.append(sock), came.set()), tls_contexts=ours
    )
    with connect(socket.AF_UNIX, unix.getsockname(), TOKEN, b"me", tls_contexts=ours) as caller:
        assert came.wait(LONGEST_S)
        assert {type(caller), type(let_in[0])} == {socket.socket}
    let_in[0].close()
    listener.close()


SAY_AND_LEAVE = """
import pathlib, socket, sys
from shoal.spec.certificates import load_tls_contexts
from shoal.net.listener import connect
contexts = load_tls_contexts(pathlib.Path(sys.argv[1]), where="")
sock = connect(socket.AF_INET, ("127.0.0.1", int(sys.argv[2])), sys.argv[3], b"me", tls_contexts=contexts)
sock.sendall(b"x" * 1_000_000)
"""


def test_what_was_said_goes_out_before_the_process_ends(harness, authorities):
    """As the kernel sees to it without TLS."""
    words = [sys.executable, "-c", SAY_AND_LEAVE, str(authorities["ours"]), str(harness.address[1]), TOKEN]
    with subprocess.Popen(words) as leaving:
        guest, _ = harness.wait_accepted(0)
        guest.settimeout(LONGEST_S)
        assert len(all_of(guest)) == 1_000_000
    assert leaving.returncode == 0
