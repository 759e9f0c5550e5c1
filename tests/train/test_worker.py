"""The worker's side of its driver, mostly without a process or a connection."""

import contextlib
import os
import signal
import socket
from types import SimpleNamespace

import pytest

from shoal.collectives.peer_services import PeerServices
from shoal.events import EventWriter, read_events
from shoal.fleet.driver_address import DriverAddress
from shoal.fleet.engine import Launch
from shoal.fleet.engines.local import LocalEngine
from shoal.spec.chunk_table import ChunkTable
from shoal.spec.run_paths import RunPaths
from shoal.spec.trust import CodeTrust
from shoal.spec.view import Address, Attachment, Seat, View
from shoal.train import worker
from shoal.train.activity import Activity
from tests.fleet.engine_contract import collect_exits

ATTACHED = Attachment(managed=True, can_save=True, needs_job=False)
SERVER = Address(host="127.0.0.1", port=1)
TABLE = ChunkTable(number=1, cuts=[0, 8], chains=[[5]], filling=[[]], addresses={5: SERVER})


class Control:
    """What a ControlClient shows of the driver."""

    def __init__(self, view=None, chunk_table=None):
        self.view, self.chunk_table, self.driver_silence_s, self.sent = view, chunk_table, 0.0, []

    def send(self, kind, **fields):
        self.sent.append((kind, fields))


@pytest.fixture
def session():
    peers = PeerServices("token", bind="127.0.0.1")
    yield worker.WorkerSession(lambda: None, peers, Activity(), ATTACHED, seat=2)
    peers.close()


@pytest.fixture
def signals():
    """Signal handlers are the process's: they are put back."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


# ---- who the worker is ----


def test_a_hello_says_where_peers_reach_the_worker(session):
    hello = session._hello(Control())
    assert (hello["role"], hello["seat"], hello["attachment"]) == ("worker", 2, ATTACHED.model_dump())
    assert hello["address"] == session.peers.endpoint.address.model_dump()
    assert (hello["view"], hello["table"]) == (0, None)


@pytest.mark.parametrize(("phase", "training"), [("building", False), ("waiting", False), ("compute", True)])
def test_a_driver_that_comes_back_hears_whether_the_worker_trains(session, phase, training):
    session.activity.begin(phase, 3)
    hello = session._hello(Control(view=View(number=7, stop="x"), chunk_table=TABLE))
    assert (hello["view"], hello["training"], hello["table"]["number"]) == (7, training, 1)


def test_a_heartbeat_says_that_the_worker_wants_to_leave(session):
    assert "leaving" not in session._heartbeat()
    session.leaving = True
    beat = session._heartbeat()
    assert beat["leaving"] is True
    assert {"phase", "refused", "served_bytes"} <= beat.keys()


def test_another_seat_is_passed_on_once(session):
    moved = []
    session.on_seat_changed = moved.append
    for seat in (2, 9, 9):
        session._on_welcome(Control(), {"seat": seat})
    assert moved == [9]
    assert session.seat == 9


def test_the_first_seat_is_no_change(session):
    session.seat, moved = None, []
    session.on_seat_changed = moved.append
    session._on_welcome(Control(), {"seat": 4})
    assert (session.seat, moved) == (4, [])


# ---- servers ----


def test_every_driver_hears_where_parameters_may_be_cut(session):
    control, learnt = Control(), []
    worker.place_chunks(session, control, [0, 8], learnt.append)
    assert control.sent == [("cuts", {"cuts": [0, 8]})]
    session._on_welcome(control, {"seat": 2})
    assert control.sent == [("cuts", {"cuts": [0, 8]})] * 2
    assert learnt == []
    session.on_chunk_table(TABLE)
    assert learnt == [TABLE]


def test_a_table_that_came_before_the_model_was_built_counts(session):
    learnt = []
    worker.place_chunks(session, Control(chunk_table=TABLE), [0, 8], learnt.append)
    assert learnt == [TABLE]


def test_without_servers_a_welcome_sends_nothing(session):
    control = Control()
    session._on_welcome(control, {"seat": 2})
    assert control.sent == []


# ---- leaving ----


def test_a_worker_that_is_terminated_waits_for_its_driver(session, signals):
    control = Control()
    why = worker.install_leave_handler(session, control, patience_s=30)
    assert why() == ""
    signal.raise_signal(signal.SIGTERM)
    assert session.leaving
    assert why() == "", "the driver lets it go"
    control.driver_silence_s = 0.1
    assert why() == "terminated"


@pytest.mark.parametrize("runs", ["before", "while it connects"])
def test_a_worker_that_is_terminated_before_it_has_a_job_leaves(fork_server, tmp_path, runs):
    """A real process, which has neither failed nor died."""
    (tmp_path / "own").mkdir()
    with socket.create_server(("127.0.0.1", 0)) as driver, contextlib.ExitStack() as stack:
        driver.settimeout(60)
        engine = LocalEngine(fork_server, RunPaths(tmp_path))
        stack.callback(engine.close)
        words = ("--join", f"127.0.0.1:{driver.getsockname()[1]}", "--run", str(tmp_path / "own"))
        secrets = {worker.TOKEN_VARIABLE: "token", worker.KEY_VARIABLE: "key"}
        engine.start([Launch(Seat(number=0), worker.__name__, words, environment=secrets)])
        if runs == "while it connects":
            stack.callback(driver.accept()[0].close)  # nobody answers
        engine.terminate([0])
        assert collect_exits(engine, 1) == {0: 0}
    assert RunPaths(tmp_path).error_log(0).read_text() == ""


def test_a_worker_waits_for_a_driver_as_long_as_the_job_says(session, signals):
    control = Control()
    why = worker.install_leave_handler(session, control, patience_s=30)
    control.driver_silence_s = 29
    assert why() == ""
    control.driver_silence_s = 31
    assert why() == "no driver came back in 30 s"


def test_an_interrupt_is_the_drivers_matter(session, signals):
    worker.install_leave_handler(session, Control(), patience_s=30)
    signal.raise_signal(signal.SIGINT)
    assert not session.leaving


# ---- ways out ----


def test_steps_of_a_remote_worker_are_for_the_driver_alone(tmp_path):
    control, own = Control(), EventWriter(tmp_path / "own.jsonl", "worker")
    stream = EventWriter.to_callback(lambda row: worker.emit_to_both(control, own, row), "worker-3")
    stream.emit("note", step=1, message="hello")
    stream.emit("step", step=1, steps=1, loss=1.0, lr=0.1, samples=1, wall_s=0.1)
    stream.emit("note", step=2, message="goodbye")
    stream.close()
    own.close()
    assert [kind for kind, _ in control.sent] == ["event"] * 3
    assert [event.kind for event in read_events(tmp_path / "own.jsonl")] == ["note", "note"]


def test_the_own_address_is_the_one_on_the_way_to_the_driver():
    assert worker.own_address(DriverAddress("127.0.0.1", 9, "token")) == "127.0.0.1"


def test_a_session_closes_both_ways_out(monkeypatch):
    closed = []
    control = SimpleNamespace(close=lambda: closed.append("control"))
    monkeypatch.setattr(worker.WorkerSession, "make_control_client", lambda self, tls_contexts: control)
    address = DriverAddress("127.0.0.1", 9, "token")
    with worker.open_session(address, lambda: address, ATTACHED, seat=None, tls_contexts=None) as (made, _):
        port = made.peers.endpoint.address.port
    assert closed == ["control"]
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.1", port), timeout=5)


def test_a_driver_that_is_not_there_is_reported_to_the_workers_user(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(worker, "WELCOME_TIMEOUT_S", 0.01)
    monkeypatch.setenv(worker.TOKEN_VARIABLE, "secret")
    with socket.socket() as unheard:  # bound, so that nobody else takes the port, and it does not listen
        unheard.bind(("127.0.0.1", 0))
        port = unheard.getsockname()[1]
        trust = CodeTrust(everything=True)
        code = worker.run_remote_worker(RunPaths.at(tmp_path), f"127.0.0.1:{port}", str(tmp_path), trust=trust)
    assert code == 6
    assert "SH610" in capsys.readouterr().err
    assert [(event.kind, event["code"]) for event in read_events(tmp_path / "events.jsonl")] == [("failed", "SH610")]
    assert worker.TOKEN_VARIABLE not in os.environ, "processes that the worker starts do not inherit it"
