"""`shoal web` as a process: its link, its end, what it loads, and a live run that it steers."""

import contextlib
import json
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request

import psutil
import pytest

from shoal.jobs.queue import daemon_lock as queue
from shoal.jobs.queue.access_tokens import TokenFile
from shoal.jobs.queue.queue_file import QueuePaths
from shoal.spec.private_file import open_lock_file
from shoal.spec.run_paths import RunPaths
from shoal.storage.locks import locked
from shoal.web.serve import WebServer
from tests.jobs.past_run import call_verb, write_run
from tests.net.certificate_authority import CertificateAuthority, needs_openssl
from tests.web.live_run import serving


@contextlib.contextmanager
def web_process(runs, *words):
    process = subprocess.Popen(
        [sys.executable, "-m", "shoal", "web", "--runs", str(runs), "--listen", "127.0.0.1:0", *words],
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        link = next(line.strip() for line in process.stdout if "#code=" in line)
        yield process, link
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()
        process.stdout.close()


def ask(url, token, body=None, headers=None):
    sent = {"authorization": f"Bearer {token}", "content-type": "application/json", **(headers or {})}
    data = None if body is None else json.dumps(body).encode()
    return urllib.request.urlopen(urllib.request.Request(url, data=data, headers=sent), timeout=60)


def test_the_page_answers_and_ends_with_open_streams(tmp_path):
    write_run(tmp_path / "mlp-1")
    token = TokenFile(tmp_path).create("t", role="read", runs=[], expires_t=None)
    with web_process(tmp_path) as (process, link):
        url = link.partition("/#")[0]
        assert b"<title>Shoal" in urllib.request.urlopen(url, timeout=60).read()
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(f"{url}/api/v1/runs", timeout=60)
        assert refused.value.code == 401
        with ask(f"{url}/api/v1/stream?runs=mlp-1&after=0", token) as stream:
            lines = [stream.readline() for _ in range(4)]
            assert lines[2].startswith(b"id: mlp-1:")
            assert json.loads(lines[3].removeprefix(b"data: "))["rows"][0]["kind"] == "run_started"
            process.send_signal(signal.SIGINT)
            assert process.wait(60) in (0, 130)


def test_a_stream_of_two_runs_misses_nothing_wherever_it_breaks(tmp_path):
    """The position of a message is that of the rows up to it, not of those that are still to come."""
    sizes = [write_run(tmp_path / name).events.stat().st_size for name in ("mlp-1", "mlp-2")]
    token = TokenFile(tmp_path).create("t", role="read", runs=[], expires_t=None)
    question = "stream?runs=mlp-1,mlp-2&after=mlp-1:0,mlp-2:0"
    with serving(tmp_path) as server, ask(f"{server.url}/api/v1/{question}", token) as stream:
        lines = [stream.readline().decode().strip() for _ in range(6)]
    assert [line for line in lines if line.startswith("id:")] == [
        f"id: mlp-1:{sizes[0]},mlp-2:0", f"id: mlp-1:{sizes[0]},mlp-2:{sizes[1]}"
    ]  # fmt: skip


def test_ctrl_c_does_not_wait_for_an_operation_that_hangs(tmp_path):
    write_run(tmp_path / "mlp-1")
    token = TokenFile(tmp_path).create("t", role="operate", runs=[], expires_t=None)
    with locked(open_lock_file(tmp_path / ".tags.lock")), web_process(tmp_path) as (process, link):
        url = link.partition("/#")[0]
        begun = ask(f"{url}/api/v1/runs/mlp-1/tags", token, {"add": ["best"]})
        assert (begun.status, json.loads(begun.read())["state"]) == (202, "running")
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0


@pytest.mark.long
@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGKILL])
def test_the_page_of_a_queue_ends_with_it(tmp_path, end):
    """`shoal up --web` serves the page in a process of its own, which outlives no daemon."""
    words = [sys.executable, "-m", "shoal", "up", "--web", "--runs", str(tmp_path)]
    daemon = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    try:
        link = next(line.strip() for line in daemon.stdout if "#code=" in line)
        url = link.partition("/#")[0]
        (page,) = psutil.Process(daemon.pid).children()
        assert b"<title>Shoal" in urllib.request.urlopen(url, timeout=60).read()
        while not queue.is_served(QueuePaths.of(tmp_path)):
            assert daemon.poll() is None
            time.sleep(0.05)
        daemon.send_signal(end)
        daemon.wait(60)
        psutil.wait_procs([page], timeout=60)
        assert not page.is_running()
    finally:
        if daemon.poll() is None:
            daemon.kill()
        daemon.wait()
        daemon.stdout.close()


@needs_openssl
def test_off_loopback_it_speaks_tls_only(tmp_path):
    """A real certificate: who believes its authority gets the page, and the cookie goes over TLS only."""
    runs = tmp_path / "runs"
    write_run(runs / "mlp-1")
    place = CertificateAuthority(tmp_path / "authority").issue("training.example")
    server = WebServer(runs, listen="127.0.0.1:0", tls=place, names=("training.example",), say=lambda line: None)
    thread = threading.Thread(target=server.run_in_thread)
    thread.start()
    try:
        link, port = server.link(), server._listener.getsockname()[1]
        assert link.startswith(f"https://training.example:{port}/#code=")
        body = json.dumps({"secret": link.partition("code=")[2]})
        sent = f"POST /api/v1/session HTTP/1.1\r\nHost: training.example:{port}\r\nConnection: close\r\n"
        sent += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n{body}"
        context = ssl.create_default_context(cafile=str(place / "ca.pem"))
        context.check_hostname = False  # these certificates have no names of hosts
        answer = exchange(port, sent, context).lower()
        assert answer.startswith("http/1.1 200")
        assert f"set-cookie: __host-shoal-{port}=" in answer
        assert "; secure" in answer
        assert not exchange(port, sent, None).startswith("HTTP/1.1 2")
        for untrusting in (ssl.create_default_context(), old_tls()):
            with pytest.raises(ssl.SSLError):
                exchange(port, sent, untrusting)
    finally:
        server.stop()
        thread.join()


def old_tls():
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_ciphers("ALL:@SECLEVEL=0")
    context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_1
    return context


def exchange(port, sent, context):
    """What the server answers; '' if it closes the connection."""
    with socket.create_connection(("127.0.0.1", port), timeout=60) as plain:
        connection = plain if context is None else context.wrap_socket(plain, server_hostname="training.example")
        with contextlib.suppress(ConnectionError):
            connection.sendall(sent.encode())
            return b"".join(iter(lambda: connection.recv(65536), b"")).decode()
    return ""


def test_the_server_starts_without_torch_numpy_and_the_driver(tmp_path):
    code = (
        "import sys; import shoal.cli, shoal.web.serve; from pathlib import Path;"
        "s = shoal.web.serve.WebServer(Path(sys.argv[1]), listen='127.0.0.1:0'); s.site.rows();"
        "bad = {'torch', 'sklearn', 'pyarrow', 'torchmetrics', 'numpy', 'shoal.jobs.run_executor'} & set(sys.modules);"
        "print(sorted(bad))"
    )
    write_run(tmp_path / "mlp-1")
    found = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


def test_two_servers_at_once(tmp_path):
    write_run(tmp_path / "mlp-1")
    servers = [WebServer(tmp_path, listen="127.0.0.1:0", say=lambda line: None) for _ in range(2)]
    assert servers[0].url != servers[1].url
    for server in servers:
        assert len(server.site.rows()) == 1
        server._listener.close()


def test_user_mistakes_have_codes(tmp_path, capsys, monkeypatch):
    for words, sign in (
        (["web", "--runs", tmp_path / "none"], "SH605"),
        (["web", "--runs", tmp_path, "--listen", "0.0.0.0:1"], "SH675"),
        (["web", "--runs", tmp_path, "--listen", "192.0.2.1:1"], "SH675"),
        (["web", "--runs", tmp_path, "--listen", "192.0.2.1:1", "--tls", tmp_path], "SH619"),
        (["tokens", "--create", "x", "--role", "root", "--runs", tmp_path], "SH676"),
        (["tokens", "--revoke", "x", "--runs", tmp_path], "SH676"),
        (["tokens", "--create", "x", "--only", "", "--runs", tmp_path], "SH676"),
        (["tokens", "--create", "x", "--only", " , ", "--runs", tmp_path], "SH676"),
        (["trash", "--restore", "x", "--runs", tmp_path], "SH671"),
        (["gc", "--apply", "../../x", "--runs", tmp_path], "SH674"),
    ):
        code, _, err = call_verb(capsys, monkeypatch, *words)
        assert code == 6, words
        assert sign in err
        assert "Traceback" not in err
        assert "ca.pem" not in err  # which this page needs of nobody


def test_tokens_of_a_verb(tmp_path, capsys, monkeypatch):
    code, token, _ = call_verb(capsys, monkeypatch, "tokens", "--create", "ci", "--role", "operate", "--runs", tmp_path)
    assert code == 0
    listed = call_verb(capsys, monkeypatch, "tokens", "--runs", tmp_path, "--json")[1]
    assert [(one["name"], one["role"]) for one in json.loads(listed)] == [("ci", "operate")]
    assert token.strip() not in listed
    assert "sha256" not in listed
    assert TokenFile(tmp_path).find(token.strip()).role == "operate"
    call_verb(capsys, monkeypatch, "tokens", "--revoke", "ci", "--runs", tmp_path)
    assert TokenFile(tmp_path).find(token.strip()) is None
    token = call_verb(capsys, monkeypatch, "tokens", "--create", "g", "--only", "a-1, b-1", "--runs", tmp_path)[1]
    assert TokenFile(tmp_path).find(token.strip()).runs == {"a-1", "b-1"}


def test_a_file_opens_without_a_server(tmp_path, capsys, monkeypatch):
    write_run(tmp_path / "mlp-1")
    out = tmp_path / "mlp-1.html"
    assert call_verb(capsys, monkeypatch, "export", "mlp-1", "--to", "html", "--out", out, "--runs", tmp_path)[0] == 0
    text = out.read_text()
    assert "</script><script>" not in text.split('id="data">')[1].split("</script>")[0]
    assert "src=" not in text.split("<body>")[0].replace("default-src", "").replace("img-src", "")
    assert '"shoal/main.js"' in text


def test_a_hostile_name_stays_text_in_a_file(tmp_path):
    from shoal.web.single_file import make_page

    write_run(tmp_path / "x").root.rename(tmp_path / "x<script>")
    page = make_page(RunPaths(tmp_path / "x<script>"))
    assert "x<script>" not in page
