"""Attacks that need real sockets: streams, headers and connections without an end. Numbers as in test_attacks.py."""

import contextlib
import socket
import ssl
import threading
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import pytest

from shoal.events.stream import format_event
from shoal.jobs.queue.access_tokens import TokenFile
from shoal.spec.run_paths import RunPaths
from shoal.web.serve import MAX_HEADER_BYTES, MOST_CONNECTIONS
from shoal.web.stream import MAX_STREAMS
from shoal.web.table import MAX_AT_ONCE
from tests.jobs.past_run import write_run
from tests.net.certificate_authority import CertificateAuthority, needs_openssl
from tests.web.live_run import serving, wait_until
from tests.web.test_api import step
from tests.web.test_serve import ask

PATIENCE_S = 60


@pytest.fixture
def server(tmp_path):
    write_run(tmp_path / "mlp-1")
    with serving(tmp_path) as one:
        one.token = TokenFile(tmp_path).create("guest", role="read", runs=[], expires_t=None)
        yield one


def open_stream(server, token=""):
    return ask(f"{server.url}/api/v1/stream?runs=mlp-1", token or server.token)


def status_of(server):
    return ask(f"{server.url}/api/v1/me", server.token).status


# 25: streams of one identity are few, and a place is free again when one ends
def test_a_ninth_stream_is_refused_until_another_ends(server):
    with contextlib.ExitStack() as opened:
        streams = [opened.enter_context(open_stream(server)) for _ in range(MAX_STREAMS)]
        assert [one.readline() for one in streams] == [b"retry: 1000\n"] * MAX_STREAMS
        with pytest.raises(urllib.error.HTTPError) as refused:
            open_stream(server)
        assert refused.value.code == 429
        assert status_of(server) == 200
        streams[0].close()
        wait_until(lambda: is_served(server))


def is_served(server):
    try:
        with open_stream(server) as one:
            return one.readline() == b"retry: 1000\n"
    except urllib.error.HTTPError:
        return False


# 20, 25: an open stream is no way around a revoked token
def test_a_stream_ends_with_its_token(server):
    with open_stream(server) as stream:
        assert stream.readline() == b"retry: 1000\n"
        TokenFile(server.site.runs).revoke("guest")
        began_s = time.monotonic()
        while stream.readline():
            assert time.monotonic() - began_s < PATIENCE_S


def test_a_new_token_of_the_same_name_does_not_revive_a_session(server):
    access, tokens = server.access, TokenFile(server.site.runs)
    secret, _ = access.begin_session(server.token)
    assert access.of_session(secret)
    tokens.revoke("guest")
    assert access.of_session(secret) is None
    tokens.create("guest", role="read", runs=["mlp-1"], expires_t=None)
    assert access.of_session(secret) is None


# 3, 20: an address that a client makes up is no way around the count of wrong tokens
def test_an_address_that_the_client_names_is_not_believed(server):
    answers = []
    for n in range(60):
        with pytest.raises(urllib.error.HTTPError) as refused:
            ask(f"{server.url}/api/v1/me", "wrong", headers={"x-forwarded-for": f"192.0.2.{n}"})
        answers.append(refused.value.code)
    assert set(answers) == {401, 429}


# 25: who does not read holds up nobody
def test_readers_that_do_not_read_hold_up_nobody(server):
    request = f"GET /api/v1/stream?runs=mlp-1&after=0 HTTP/1.1\r\nHost: {server.url[7:]}\r\nAuthorization: Bearer "
    with contextlib.ExitStack() as opened:
        for _ in range(MAX_STREAMS):
            silent = opened.enter_context(socket.create_connection(address_of(server)))
            silent.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            silent.sendall(f"{request}{server.token}\r\n\r\n".encode())
        with RunPaths(server.site.runs / "mlp-1").events.open("ab") as file:
            file.writelines(format_event(step(61 + n, 1.0)) for n in range(20_000))
        assert status_of(server) == 200
        assert b'"step":20060' in ask(f"{server.url}/api/v1/runs/mlp-1", server.token).read()


def address_of(server):
    host, port = server.url.partition("://")[2].split(":")
    return host, int(port)


# 23: headers and requests without an end
@pytest.mark.parametrize("line", [b"X-Long: " + b"x" * 4 * MAX_HEADER_BYTES, b"X-Many: 1\r\n" * MAX_HEADER_BYTES])
def test_headers_without_an_end_are_refused(server, line):
    with socket.create_connection(address_of(server), timeout=PATIENCE_S) as connection:
        with contextlib.suppress(OSError):
            connection.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n" + line)
        with contextlib.suppress(ConnectionResetError):
            assert connection.recv(65536)[:12] in (b"HTTP/1.1 400", b"HTTP/1.1 431")  # not only closed at last
    assert status_of(server) == 200


def test_connections_that_say_nothing_do_not_end_the_server(server):
    """Beyond the limit others are told to wait; when they go, it serves."""
    with contextlib.ExitStack() as opened:
        for _ in range(300):
            opened.enter_context(socket.create_connection(address_of(server)))
    wait_until(lambda: is_answered(server))


def test_no_crowd_of_connections_uses_up_the_files_of_the_server(server, caplog):
    with contextlib.ExitStack() as opened:
        crowd = [
            opened.enter_context(socket.create_connection(address_of(server), timeout=PATIENCE_S))
            for _ in range(MOST_CONNECTIONS + 20)
        ]
        for one in crowd[-20:]:
            with contextlib.suppress(ConnectionResetError):
                assert one.recv(1) == b""
        crowd[0].sendall(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
        assert crowd[0].recv(12) == b"HTTP/1.1 503"  # those before are told
    assert not caplog.records  # a line for each would let anybody fill a log
    wait_until(lambda: is_answered(server))


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    return CertificateAuthority(tmp_path_factory.mktemp("tls") / "authority").issue("training.example")


@pytest.fixture
def tls_server(tmp_path, certificate, monkeypatch):
    monkeypatch.setattr("shoal.web.serve.TLS_TIMEOUT_S", 0.5)
    with serving(tmp_path, tls=certificate) as one:
        yield one


def healthy(server):
    """The answer over TLS; nothing if the connection is cut."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with contextlib.suppress(OSError), urllib.request.urlopen(f"{server.url}/healthz", context=context) as answer:
        return answer.status


@needs_openssl
@pytest.mark.long
def test_no_crowd_before_the_handshake_uses_up_the_files_of_a_tls_server(tls_server, caplog):
    """A client that says nothing has shown no certificate, no token and no request."""
    assert healthy(tls_server) == 200
    with contextlib.ExitStack() as opened:
        crowd = [
            opened.enter_context(socket.create_connection(address_of(tls_server), timeout=PATIENCE_S))
            for _ in range(MOST_CONNECTIONS + 400)
        ]
        for one in crowd:  # those in time for a place have it for as long as a handshake may take
            with contextlib.suppress(ConnectionResetError):
                assert one.recv(1) == b""
        wait_until(lambda: healthy(tls_server) == 200)
        assert len(tls_server._listener._accepted) <= MOST_CONNECTIONS
    assert not caplog.records


@needs_openssl
@pytest.mark.parametrize("sent", [b"", b"\x16\x03\x01", b"GET / HTTP/1.1\r\n\r\n"], ids=["nothing", "a part", "no TLS"])
def test_a_handshake_that_does_not_come_is_not_waited_for(tls_server, sent, caplog):
    """asyncio alone would wait a minute."""
    with socket.create_connection(address_of(tls_server), timeout=PATIENCE_S / 3) as connection:
        connection.sendall(sent)
        with contextlib.suppress(ConnectionResetError):
            while connection.recv(65536):
                pass
    assert healthy(tls_server) == 200
    assert not caplog.records


def is_answered(server):
    try:
        return status_of(server) == 200
    except (urllib.error.URLError, OSError):
        return False


@pytest.mark.parametrize(
    "sent", [b"", b"GET /healthz HTTP/1.1\r\n", b"GET /healthz HTTP/1.1\r\nHost: {host}\r\n\r\nGET"]
)
def test_a_request_that_does_not_come_is_not_waited_for(server, monkeypatch, sent):
    """The third is the second request of a connection."""
    monkeypatch.setattr("shoal.web.serve.REQUEST_TIMEOUT_S", 0.2)
    with socket.create_connection(address_of(server), timeout=PATIENCE_S) as connection:
        connection.sendall(sent.replace(b"{host}", server.url[7:].encode()))
        while connection.recv(65536):
            pass


def test_a_body_that_does_not_come_is_not_waited_for(server, monkeypatch):
    monkeypatch.setattr("shoal.web.table.BODY_TIMEOUT_S", 0.2)
    with socket.create_connection(address_of(server), timeout=PATIENCE_S) as connection:
        head = f"POST /api/v1/session HTTP/1.1\r\nHost: {server.url[7:]}\r\nContent-Type: application/json\r\n"
        connection.sendall(f"{head}Content-Length: 100\r\n\r\n{{".encode())
        assert connection.recv(65536).startswith(b"HTTP/1.1 408")


# 24: long questions of one identity leave room for the others
def test_questions_at_once_are_bounded(server, monkeypatch):
    entered, may_end = threading.Semaphore(0), threading.Event()

    def long_question(runs):
        entered.release()
        assert may_end.wait(PATIENCE_S)
        return []

    monkeypatch.setattr("shoal.web.reading.all_usage", long_question)
    other = TokenFile(server.site.runs).create("other", role="read", runs=[], expires_t=None)
    with ThreadPoolExecutor(MAX_AT_ONCE) as pool:
        url = f"{server.url}/api/v1/storage"
        asked = [pool.submit(lambda: ask(url, server.token).status) for _ in range(MAX_AT_ONCE)]
        try:
            assert all(entered.acquire(timeout=PATIENCE_S) for _ in asked)
            with pytest.raises(urllib.error.HTTPError) as refused:
                status_of(server)
            assert refused.value.code == 429
            assert ask(f"{server.url}/api/v1/me", other).status == 200
        finally:
            may_end.set()
        assert {one.result() for one in asked} == {200}
    assert status_of(server) == 200


# 22, 23: two lengths, two hosts
@pytest.mark.parametrize("more", [b"Host: evil.example\r\n", b"Content-Length: 3\r\nContent-Length: 7\r\n"])
def test_a_header_that_is_there_twice_is_refused(server, more):
    with socket.create_connection(address_of(server), timeout=PATIENCE_S) as connection:
        head = f"GET /healthz HTTP/1.1\r\nHost: {server.url[7:]}\r\n".encode()
        connection.sendall(head + more + b"Connection: close\r\n\r\n")
        assert connection.recv(65536)[:12] in (b"HTTP/1.1 400", b"HTTP/1.1 421")
