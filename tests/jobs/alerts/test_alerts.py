"""Alerts of a real run: a webhook and a command get them; what cannot be delivered is told, and the run goes on."""

import contextlib
import json
import ssl
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from shoal.events import load_state, read_events
from shoal.jobs.alerts import sender
from shoal.jobs.alerts.sender import AlertSender, deliver
from shoal.spec.alerts.config import AlertConfig
from tests.conftest import MLP

CONTENT = {"run": "mlp-1", "when": "failed", "text": "it failed"}


@pytest.fixture
def webhook():
    """An address on this machine, and what it got."""
    got, ended = [], threading.Event()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            if self.path == "/elsewhere":
                self.send_response(302)
                self.send_header("location", "/hook")
            elif self.path == "/slow":
                self.send_response(200)
                self.end_headers()
                for _ in range(200):
                    self.wfile.write(b"x")
                    ended.wait(0.05)
            else:
                got.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
                self.send_response(500 if self.path == "/broken" else 204)
            self.end_headers()

        def log_message(self, *words):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", got
    ended.set()
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_run_tells_its_end_and_its_metrics(run, webhook, tmp_path):
    address, got = webhook
    told = tmp_path / "told.json"
    alerts = [
        {"when": "finished", "webhook": f"{address}/hook"},
        {"when": "metric", "metric": "accuracy", "above": 0.0, "command": ["sh", "-c", f"cat > {told}"]},
        {"when": "failed", "webhook": f"{address}/hook"},
        {"when": "disk", "free": "900000 TB"},
    ]
    done = run(MLP, steps=20, alerts=alerts)
    assert [(one["when"], one["run"]) for one in got] == [("finished", done.paths.name)]
    assert got[0]["text"] == got[0]["content"] == f"{done.paths.name}: the run has finished"
    assert json.loads(told.read_text())["when"] == "metric"
    events = [event["when"] for event in read_events(done.paths.events) if event.kind == "alert"]
    assert [when for when in events if when != "disk"] == ["metric", "finished"]
    plain = run(MLP, steps=20)
    assert done.receipt.weights_sha256 == plain.receipt.weights_sha256
    assert done.receipt.job_sha256 == plain.receipt.job_sha256  # alerts are no part of the result


LOCAL_STEPS = {"kind": "local", "every": 4}


@pytest.mark.parametrize("changes", [{}, {"sync": LOCAL_STEPS}], ids=["every step", "local"])
def test_a_loss_that_is_not_finite_is_told_before_the_failure(run, changes):
    hot = {"optimizer": {"name": "SGD", "args": {"lr": 1e30}}, "steps": 8}
    done = run(MLP, alerts=[{"when": "nan"}, {"when": "failed"}], **hot, **changes)
    assert (done.status, done.error.code) == ("failed", "SH403")
    told = [(event["when"], event["about"]) for event in read_events(done.paths.events) if event.kind == "alert"]
    assert told == [("nan", "loss"), ("failed", "")]


def test_what_cannot_be_delivered_is_told_without_the_address(webhook):
    address, got = webhook
    one = AlertSender()
    for rule in (
        {"webhook": f"{address}/broken"},
        {"webhook": f"{address}/elsewhere"},
        {"webhook": "http://127.0.0.1:1/secret"},
        {"webhook": "env:NO_SUCH_VARIABLE"},
        {"command": ["sh", "-c", "echo no >&2; exit 3"]},
        {"command": ["/no/such/program"]},
    ):
        one.send(AlertConfig(when="failed", **rule), CONTENT)
    one.close()
    failures = one.take_failures()
    assert len(failures) == 6
    assert "answers 500" in failures[0]
    assert "answers 302" in failures[1]
    assert "secret" not in "".join(failures)
    assert "NO_SUCH_VARIABLE" in failures[3]
    assert "ended with 3: no" in failures[4]
    assert len(got) == 1  # the redirect was not followed


def test_a_webhook_that_fails_does_not_keep_the_command_back(webhook, tmp_path):
    address, got = webhook
    told = tmp_path / "told"
    one = AlertSender()
    one.send(AlertConfig(when="failed", webhook=f"{address}/broken", command=["sh", "-c", f"cat > {told}"]), CONTENT)
    failing = AlertConfig(when="failed", webhook=f"{address}/broken", command=["sh", "-c", "exit 3"])
    one.send(failing, CONTENT)
    one.close()
    first, second = one.take_failures()
    assert json.loads(told.read_text()) == CONTENT
    assert "answers 500" in first
    assert "answers 500; sh ended with 3" in second
    assert len(got) == 2


@pytest.mark.parametrize(
    "address",
    ["http://127.0.0.1:1/one SECRET", "http://127.0.0.1:SECRET/", "http://SECRET.invalid/", "http://[SECRET/",
     "https://127.0.0.1:1/SECRET", "http://\x01SECRET/", "http://h\xe9SECRET.invalid/\xe9"],
)  # fmt: skip
def test_no_part_of_an_address_from_the_environment_is_told(monkeypatch, address):
    monkeypatch.setenv("HOOK", address)
    one = AlertSender()
    one.send(AlertConfig(when="failed", webhook="env:HOOK"), CONTENT)
    one.close()
    (told,) = one.take_failures()
    assert "the webhook cannot be reached" in told
    assert "SECRET" not in told


def test_a_certificate_that_does_not_fit_does_not_tell_the_host():
    failure = ssl.SSLCertVerificationError(1, "Hostname mismatch, certificate is not valid for 'SECRET.example'")
    assert "SECRET" not in sender._reason(failure)


def test_one_delivery_takes_a_bounded_time(webhook, monkeypatch):
    """Also of a webhook whose answer comes byte by byte, and of a command with a secret in its words."""
    monkeypatch.setattr(sender, "TIMEOUT_S", 0.2)
    one = AlertSender()
    one.send(
        AlertConfig(when="failed", webhook=f"{webhook[0]}/slow", command=["sh", "-c", "sleep 60", "SECRET"]), CONTENT
    )
    one.send(AlertConfig(when="failed", command=["sleep", "60"]), CONTENT)
    one.close()
    told = one.take_failures()
    assert "the webhook took longer than 0.2 s; sh took longer than 0.2 s" in told[0]
    assert "sleep took longer than 0.2 s" in told[1]
    assert "SECRET" not in "".join(told)


@contextlib.contextmanager
def hanging_sender(monkeypatch, *, alerts):
    """A sender whose first delivery does not end before this context does. It is closed."""
    started, free = threading.Event(), threading.Event()

    def hang(*words):
        started.set()
        free.wait()

    monkeypatch.setattr(sender, "deliver", hang)
    one = AlertSender()
    for _ in range(alerts):
        one.send(AlertConfig(when="failed", command=["true"]), CONTENT)
    assert started.wait(60)
    one.close(timeout_s=0.05)
    yield one
    free.set()


def test_alerts_that_are_lost_at_the_end_are_counted(monkeypatch):
    with hanging_sender(monkeypatch, alerts=3) as one:
        assert one.take_failures() == ["alerts that were not delivered before the run ended: 3"]
    one._thread.join(60)
    assert not one._thread.is_alive()
    assert sender.CLOSE_S > 2 * sender.TIMEOUT_S  # a webhook and a command, one after the other


def test_a_command_gets_words_not_a_shell_line(tmp_path, monkeypatch):
    target = tmp_path / "argument"
    rule = AlertConfig(when="failed", command=["sh", "-c", f'printf %s "$1" > {target}', "-", "$(touch nothing); x"])
    deliver(rule, CONTENT, {"PATH": "/usr/bin:/bin"})
    assert target.read_text() == "$(touch nothing); x"


def test_a_hook_that_hangs_holds_nobody_up(monkeypatch):
    with hanging_sender(monkeypatch, alerts=sender.MAX_WAITING + 5) as one:
        assert any("dropped" in text for text in one.take_failures())


def test_usage_is_part_of_a_state(tmp_path):
    from shoal.events import Event
    from shoal.events.stream import format_event

    usage = {"worker": "worker-0", "cpu": 0.5, "rss_bytes": 10, "room_bytes": 90}
    rows = [
        Event("worker_started", 1.0, "worker-0", None, {"pid": 1, "host": "a", "threads": 1, "torch": ""}),
        Event("usage", 2.0, "driver", None, usage),
    ]
    (tmp_path / "events.jsonl").write_bytes(b"".join(map(format_event, rows)))
    state = load_state(tmp_path / "events.jsonl", tmp_path / "state")
    assert state.workers["worker-0"].usage == {"cpu": 0.5, "rss_bytes": 10, "room_bytes": 90}
